// SPDX-License-Identifier: Apache-2.0
#include "kernels/recall.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cstring>
#include <numeric>
#include <tuple>
#include <vector>

#include "kernels/lanes.h"
#include "kernels/operators.h"

namespace plimsoll::kernels {
namespace {

constexpr std::int64_t kQueriesAtOnce = 8;  // Of a thread, at least.

// A comparison's lanes are −1 where it holds, so subtracting them counts.
PLIMSOLL_INLINE std::int32_t sum_counts(const IntLanes& lanes) {
  std::int32_t part[kLanes];
  std::memcpy(part, &lanes, sizeof(part));
  return std::accumulate(part, part + kLanes, 0);
}

// How many j < n have s_j >= least.
PLIMSOLL_CLONES std::int32_t count_reaching(const float* s, std::int64_t n, float least) {
  IntLanes counts = {};
  Lanes x;
  std::int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    load(s + j, x);
    counts -= x >= least;
  }
  std::int32_t count = sum_counts(counts);
  for (; j < n; ++j) {
    count += s[j] >= least ? 1 : 0;
  }
  return count;
}

// How many j < n have a·s_j + b·p_j >= least.
PLIMSOLL_CLONES std::int32_t count_fixed(const float* s, const float* p, std::int64_t n, float a,
                                         float b, float least) {
  IntLanes counts = {};
  Lanes x;
  Lanes y;
  std::int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    load(s + j, x);
    load(p + j, y);
    counts -= a * x + b * y >= least;
  }
  std::int32_t count = sum_counts(counts);
  for (; j < n; ++j) {
    count += a * s[j] + b * p[j] >= least ? 1 : 0;
  }
  return count;
}

// How many j < n have a_j·s_j + b_j·p >= least.
PLIMSOLL_CLONES std::int32_t count_moving(const float* s, const float* a, const float* b,
                                          std::int64_t n, float p, float least) {
  IntLanes counts = {};
  Lanes x;
  Lanes f;
  Lanes y;
  std::int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    load(s + j, x);
    load(a + j, f);
    load(b + j, y);
    counts -= f * x + y * p >= least;
  }
  std::int32_t count = sum_counts(counts);
  for (; j < n; ++j) {
    count += a[j] * s[j] + b[j] * p >= least ? 1 : 0;
  }
  return count;
}

// ---- recall_ranks ----

void check_recall(const at::Tensor& similarity, const at::Tensor& target) {
  check_dims(similarity, 2, "recall_ranks: similarity");
  check_list(similarity, "similarity", target, "recall_ranks: target");
}

at::Tensor recall_composed(const at::Tensor& similarity, const at::Tensor& target) {
  check_recall(similarity, target);
  return (similarity >= similarity.gather(1, target.unsqueeze(1))).sum(1, false, at::kInt);
}

at::Tensor recall_below(const at::Tensor& given, const at::Tensor& target_given) {
  check_recall(given, target_given);
  if (!has_kernel(given)) {
    return recall_composed(given, target_given);
  }
  const auto s = given.contiguous();
  const auto target = target_given.contiguous();
  const std::int64_t width = s.size(1);
  check_range(target, width, "recall_ranks: target");
  auto ranks = at::empty({s.size(0)}, s.options().dtype(at::kInt));
  const auto* own = target.const_data_ptr<std::int64_t>();
  auto* rank = ranks.data_ptr<std::int32_t>();
  at::parallel_for(0, s.size(0), kQueriesAtOnce, [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t q = from; q < to; ++q) {
      const float* row = floats(s) + q * width;
      rank[q] = count_reaching(row, width, row[own[q]]);
    }
  });
  return ranks;
}

at::Tensor recall_meta(const at::Tensor& similarity, const at::Tensor& target) {
  check_recall(similarity, target);
  return at::empty_symint({similarity.sym_size(0)}, similarity.options().dtype(at::kInt));
}

// ---- Turned queries ----

// Errors: as check_size() for a matrix [rows of x, rows of y], or as its dimensions are told.
void check_matrix(const char* name, const at::Tensor& matrix, const char* rows, const at::Tensor& x,
                  std::int64_t of_x, const char* columns, const at::Tensor& y, std::int64_t of_y) {
  check_dims(matrix, 2, name);
  check_alike(x, rows, matrix, name);
  check_size(x, of_x, rows, matrix, 0, name);
  check_size(y, of_y, columns, matrix, 1, name);
}

void check_queries(const at::Tensor& s, const at::Tensor& p, const at::Tensor& a,
                   const at::Tensor& b, const at::Tensor& least) {
  check_dims(s, 2, "turned_query_ranks: s");
  check_dims(p, 2, "turned_query_ranks: p");
  check_matrix("turned_query_ranks: p", p, "p", p, 0, "s", s, 1);
  check_matrix("turned_query_ranks: a", a, "p", p, 0, "s", s, 0);
  check_matrix("turned_query_ranks: b", b, "p", p, 0, "s", s, 0);
  check_matrix("turned_query_ranks: least", least, "s", s, 0, "p", p, 0);
}

at::Tensor queries_composed(const at::Tensor& s, const at::Tensor& p, const at::Tensor& a,
                            const at::Tensor& b, const at::Tensor& least) {
  check_queries(s, p, a, b, least);
  std::vector<at::Tensor> counts;  // A turn at a time: [Q, N] is large enough.
  const auto turns = p.unbind(0);
  const auto as = a.unbind(0);
  const auto bs = b.unbind(0);
  const auto leasts = least.unbind(1);
  for (std::size_t k = 0; k < turns.size(); ++k) {
    const auto turned = as[k].unsqueeze(1) * s + bs[k].unsqueeze(1) * turns[k].unsqueeze(0);
    counts.push_back((turned >= leasts[k].unsqueeze(1)).sum(1, false, at::kInt));
  }
  return counts.empty() ? at::zeros_like(least, least.options().dtype(at::kInt))
                        : at::stack(counts, 1);
}

at::Tensor queries_below(const at::Tensor& s_given, const at::Tensor& p_given,
                         const at::Tensor& a_given, const at::Tensor& b_given,
                         const at::Tensor& least_given) {
  check_queries(s_given, p_given, a_given, b_given, least_given);
  if (!has_kernel(s_given)) {
    return queries_composed(s_given, p_given, a_given, b_given, least_given);
  }
  const auto s = s_given.contiguous();
  const auto p = p_given.contiguous();
  const auto a = a_given.contiguous();
  const auto b = b_given.contiguous();
  const auto least = least_given.contiguous();
  auto counts = at::zeros({s.size(0), p.size(0)}, s.options().dtype(at::kInt));
  count_turned_queries(
      {s.size(0), s.size(1), p.size(0), floats(s), floats(p), floats(a), floats(b), floats(least)},
      counts.data_ptr<std::int32_t>());
  return counts;
}

at::Tensor queries_meta(const at::Tensor& s, const at::Tensor& p, const at::Tensor& a,
                        const at::Tensor& b, const at::Tensor& least) {
  check_queries(s, p, a, b, least);
  return at::empty_symint(least.sym_sizes(), least.options().dtype(at::kInt));
}

// ---- A turned gallery ----

using Counts = std::tuple<at::Tensor, at::Tensor>;

void check_gallery(const at::Tensor& s, const at::Tensor& p, const at::Tensor& a,
                   const at::Tensor& b, const at::Tensor& least, const at::Tensor& low,
                   const at::Tensor& high) {
  check_dims(s, 2, "turned_gallery_ranks: s");
  check_dims(a, 2, "turned_gallery_ranks: a");
  check_matrix("turned_gallery_ranks: a", a, "a", a, 0, "s", s, 1);
  check_matrix("turned_gallery_ranks: p", p, "s", s, 0, "a", a, 0);
  check_matrix("turned_gallery_ranks: b", b, "a", a, 0, "s", s, 1);
  check_matrix("turned_gallery_ranks: least", least, "s", s, 0, "a", a, 0);
  check_list(s, "s", low, "turned_gallery_ranks: low");
  check_list(s, "s", high, "turned_gallery_ranks: high");
}

Counts gallery_composed(const at::Tensor& s, const at::Tensor& p, const at::Tensor& a,
                        const at::Tensor& b, const at::Tensor& least, const at::Tensor& low,
                        const at::Tensor& high) {
  check_gallery(s, p, a, b, least, low, high);
  const auto place = at::ones_like(s, s.options().dtype(at::kLong)).cumsum(1) - 1;
  const auto own = at::logical_and(place >= low.unsqueeze(1), place < high.unsqueeze(1));
  std::vector<at::Tensor> all_counts;
  std::vector<at::Tensor> own_counts;
  const auto as = a.unbind(0);
  const auto bs = b.unbind(0);
  const auto ps = p.unbind(1);
  const auto leasts = least.unbind(1);
  for (std::size_t k = 0; k < as.size(); ++k) {
    const auto turned = as[k].unsqueeze(0) * s + bs[k].unsqueeze(0) * ps[k].unsqueeze(1);
    const auto reaches = turned >= leasts[k].unsqueeze(1);
    all_counts.push_back(reaches.sum(1, false, at::kInt));
    own_counts.push_back(at::logical_and(reaches, own).sum(1, false, at::kInt));
  }
  if (as.empty()) {
    const auto none = at::zeros_like(least, least.options().dtype(at::kInt));
    return {none, at::zeros_like(none)};
  }
  return {at::stack(all_counts, 1), at::stack(own_counts, 1)};
}

Counts gallery_below(const at::Tensor& s_given, const at::Tensor& p_given,
                     const at::Tensor& a_given, const at::Tensor& b_given,
                     const at::Tensor& least_given, const at::Tensor& low_given,
                     const at::Tensor& high_given) {
  check_gallery(s_given, p_given, a_given, b_given, least_given, low_given, high_given);
  if (!has_kernel(s_given)) {
    return gallery_composed(s_given, p_given, a_given, b_given, least_given, low_given, high_given);
  }
  const auto s = s_given.contiguous();
  const auto p = p_given.contiguous();
  const auto a = a_given.contiguous();
  const auto b = b_given.contiguous();
  const auto least = least_given.contiguous();
  const std::int64_t width = s.size(1);
  const auto low = low_given.clamp(0, width).contiguous();
  const auto high = high_given.clamp(0, width).contiguous();
  const auto whole = s.options().dtype(at::kInt);
  auto all = at::zeros({s.size(0), a.size(0)}, whole);
  auto own = at::zeros({s.size(0), a.size(0)}, whole);
  count_turned_gallery(
      {s.size(0), width, a.size(0), floats(s), floats(p), floats(a), floats(b), floats(least),
       low.const_data_ptr<std::int64_t>(), high.const_data_ptr<std::int64_t>()},
      all.data_ptr<std::int32_t>(), own.data_ptr<std::int32_t>());
  return {all, own};
}

Counts gallery_meta(const at::Tensor& s, const at::Tensor& p, const at::Tensor& a,
                    const at::Tensor& b, const at::Tensor& least, const at::Tensor& low,
                    const at::Tensor& high) {
  check_gallery(s, p, a, b, least, low, high);
  const auto whole = least.options().dtype(at::kInt);
  return {at::empty_symint(least.sym_sizes(), whole), at::empty_symint(least.sym_sizes(), whole)};
}

}  // namespace

at::Tensor recall_ranks(const at::Tensor& similarity, const at::Tensor& target) {
  static const auto op =
      operator_named<at::Tensor(const at::Tensor&, const at::Tensor&)>("plimsoll::recall_ranks");
  return op.call(similarity, target);
}

void count_turned_queries(const TurnedQueries& in, std::int32_t* counts) {
  at::parallel_for(0, in.queries, kQueriesAtOnce, [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t q = from; q < to; ++q) {
      for (std::int64_t k = 0; k < in.turns; ++k) {
        const std::int64_t at = q * in.turns + k;
        const std::int64_t of = k * in.queries + q;
        counts[at] += count_fixed(in.s + q * in.gallery, in.p + k * in.gallery, in.gallery,
                                  in.a[of], in.b[of], in.least[at]);
      }
    }
  });
}

void count_turned_gallery(const TurnedGallery& in, std::int32_t* all, std::int32_t* own) {
  at::parallel_for(0, in.queries, kQueriesAtOnce, [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t q = from; q < to; ++q) {
      const float* row = in.s + q * in.gallery;
      const std::int64_t low = in.low[q];
      for (std::int64_t k = 0; k < in.turns; ++k) {
        const std::int64_t at = q * in.turns + k;
        const float* a = in.a + k * in.gallery;
        const float* b = in.b + k * in.gallery;
        all[at] += count_moving(row, a, b, in.gallery, in.p[at], in.least[at]);
        own[at] +=
            count_moving(row + low, a + low, b + low, in.high[q] - low, in.p[at], in.least[at]);
      }
    }
  });
}

}  // namespace plimsoll::kernels

TORCH_LIBRARY_FRAGMENT(plimsoll, m) {
  m.def("recall_ranks(Tensor similarity, Tensor target) -> Tensor");
  m.def("turned_query_ranks(Tensor s, Tensor p, Tensor a, Tensor b, Tensor least) -> Tensor");
  m.def(
      "turned_gallery_ranks(Tensor s, Tensor p, Tensor a, Tensor b, Tensor least, Tensor low,"
      " Tensor high) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(plimsoll, CompositeExplicitAutograd, m) {
  using namespace plimsoll::kernels;
  m.impl("recall_ranks", &recall_below);
  m.impl("turned_query_ranks", &queries_below);
  m.impl("turned_gallery_ranks", &gallery_below);
}

TORCH_LIBRARY_IMPL(plimsoll, Meta, m) {
  using namespace plimsoll::kernels;
  m.impl("recall_ranks", &recall_meta);
  m.impl("turned_query_ranks", &queries_meta);
  m.impl("turned_gallery_ranks", &gallery_meta);
}
