// SPDX-License-Identifier: Apache-2.0
//
// Products of matrices, element by element in one order of sums: the same bits for any number of
// rows and of threads.
//
// Why not torch's: the bits of its products depend on the number of threads where a matrix is
// narrow, and on the rows beside; and without fused multiply-add these are as fast where
// multiplications and additions have units of their own (AMD's Zen). Reading order: this file,
// row_products.cpp.
//
// Threads: free functions; work is shared among torch's threads.
// Memory:  a copy of the weights; for columns, a block of 256 rows of x a thread.
#pragma once

#include <cstdint>

namespace plimsoll::kernels {

/// y = x Wᵀ + b: each element is the sum over k in order.
/// Shape: x [rows, in]; weight [out, in], or [in, out] when `turned`; bias [out] or null;
///        y [rows, out].
struct RowProduct {
  std::int64_t rows{0};
  std::int64_t in{0};
  std::int64_t out{0};
  const float* x{nullptr};
  const float* weight{nullptr};
  const float* bias{nullptr};
  bool turned{false};
};
void multiply_rows(const RowProduct& product, float* y);

/// sum = gᵀ x, or added to it: each element over the rows in order, by blocks of 256.
/// Shape: g [rows, out], x [rows, in], sum [out, in].
struct ColumnProduct {
  std::int64_t rows{0};
  std::int64_t out{0};
  std::int64_t in{0};
  const float* g{nullptr};
  const float* x{nullptr};
  bool add{false};
};
void multiply_columns(const ColumnProduct& product, float* sum);

}  // namespace plimsoll::kernels
