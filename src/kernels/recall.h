// SPDX-License-Identifier: Apache-2.0
//
// Recall ranks by counting: how many of a gallery are at least as similar as a query's own.
//
// A rank of 1 is best. Nothing is sorted. Where queries or a gallery are turned by conditions, a
// similarity is a·s + b·p of two products that serve all conditions
// (python/plimsoll/recipes/cosir/_evaluate.py). Counts
// of a gallery's blocks add up. torch.ops.plimsoll.NAME are recall_ranks, turned_query_ranks and
// turned_gallery_ranks. Reading order: operators.h, this file.
//
// Threads: as torch operators.   Memory: the counts.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace plimsoll::kernels {

/// Rank of each query's own among a gallery: int32 [Q]. Shape: similarity [Q, N] float32 or
/// float64; target int64 [Q], from 0 to N − 1.
at::Tensor recall_ranks(const at::Tensor& similarity, const at::Tensor& target);

/// Queries turned by K conditions each: counts[q, k] grows by the number of j with
/// a[k, q]·s[q, j] + b[k, q]·p[k, j] >= least[q, k].
struct TurnedQueries {
  std::int64_t queries{0};
  std::int64_t gallery{0};
  std::int64_t turns{0};
  const float* s{nullptr};      ///< [queries, gallery]
  const float* p{nullptr};      ///< [turns, gallery]
  const float* a{nullptr};      ///< [turns, queries]
  const float* b{nullptr};      ///< [turns, queries]
  const float* least{nullptr};  ///< [queries, turns]
};
void count_turned_queries(const TurnedQueries& in, std::int32_t* counts);

/// A gallery turned by K conditions: all[q, k] grows by the number of j with
/// a[k, j]·s[q, j] + b[k, j]·p[q, k] >= least[q, k], and own[q, k] by those from low[q] to high[q].
struct TurnedGallery {
  std::int64_t queries{0};
  std::int64_t gallery{0};
  std::int64_t turns{0};
  const float* s{nullptr};      ///< [queries, gallery]
  const float* p{nullptr};      ///< [queries, turns]
  const float* a{nullptr};      ///< [turns, gallery]
  const float* b{nullptr};      ///< [turns, gallery]
  const float* least{nullptr};  ///< [queries, turns]
  const std::int64_t* low{nullptr};
  const std::int64_t* high{nullptr};
};
void count_turned_gallery(const TurnedGallery& in, std::int32_t* all, std::int32_t* own);

}  // namespace plimsoll::kernels
