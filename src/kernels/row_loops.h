// SPDX-License-Identifier: Apache-2.0
//
// Loops over rows of layers: element by element, and sums of columns.
//
// An element's bits depend on its row, on parameters and, for dropout, on its index alone; sums
// over rows go by blocks of kRowBlock. So they do not depend on the number of threads. Reading
// order: this file, row_loops.cpp.
//
// Threads: free functions; work is shared among torch's threads.   Memory: the caller's, but for a
// block of partial sums or a copy of one matrix of weights.
#pragma once

#include <cstdint>
#include <span>

namespace plimsoll::kernels {

inline constexpr std::int64_t kRowBlock = 256;

/// A matrix in memory, row after row.
struct Extent {
  std::int64_t rows{0};
  std::int64_t columns{0};
  [[nodiscard]] std::int64_t size() const noexcept { return rows * columns; }
};

/// Sum of each column, [columns].
void sum_columns(const float* x, Extent shape, float* sum);

/// Σ (x − y)², in double.
double sum_of_squared_differences(const float* x, const float* y, std::int64_t n);

/// Which elements dropout keeps: a function of (seed, place, index), in steps of 2^-16.
struct Dropout {
  std::uint64_t seed{0};
  std::uint64_t place{0};
  double rate{0};                                          ///< 0: everything is kept.
  [[nodiscard]] std::uint32_t threshold() const noexcept;  ///< Kept when 16 bits reach it.
  [[nodiscard]] float scale() const noexcept;  ///< What kept elements are multiplied by.
};
/// keep = scale() or 0.
void dropout_factors(const Dropout& dropout, std::int64_t n, float* keep);
/// y = kept ? max(x, 0)·scale : 0.
void relu_dropout(const float* x, std::int64_t n, const Dropout& dropout, float* y);
/// grad_x = y > 0 ? grad·scale : 0.
void relu_dropout_backward(const float* y, const float* grad, std::int64_t n, float scale,
                           float* grad_x);

/// Mean and (biased) variance of each column.
void column_moments(const float* x, Extent shape, float* mean, float* variance);
/// y = dropout(relu(x·by + plus)) with one factor and one term a column.
void scale_relu_dropout(const float* x, Extent shape, const float* by, const float* plus,
                        const Dropout& dropout, float* y);
/// Backward of batch norm, ReLU and dropout. Shape: mean, inverse (1/σ), weight [columns]; y the
/// forward's result. `batch`: the moments were the batch's own.
struct NormGradient {
  Extent shape{};
  const float* x{nullptr};
  const float* y{nullptr};
  const float* grad{nullptr};
  const float* mean{nullptr};
  const float* inverse{nullptr};
  const float* weight{nullptr};
  float scale{1};
  bool batch{true};
  float* grad_x{nullptr};
  float* grad_weight{nullptr};
  float* grad_bias{nullptr};
};
void norm_relu_dropout_backward(const NormGradient& in);

/// y = 1/(1 + e^−x).
void sigmoid(const float* x, std::int64_t n, float* y);
/// y = e^x. Requires: x <= 88.
void exponential(const float* x, std::int64_t n, float* y);
/// Standard normals of (seed, place, index).
void normals(std::uint64_t seed, std::uint64_t place, std::int64_t n, float* y);
/// Σ −½(1 + v − m² − eᵛ), in double.
double sum_of_divergences(const float* mean, const float* log_variance, std::int64_t n);

/// y = Σ_l w_l x_l with w = softmax of the row's scores. Shape: each x_l [rows, columns], scores
/// and weights [rows, x.size()]. And backward: grad_x like x, grad_scores like scores.
void mix_rows(std::span<const float* const> x, Extent shape, const float* scores, float* weights,
              float* y);
void mix_rows_backward(std::span<const float* const> x, Extent shape, const float* weights,
                       const float* grad, std::span<float* const> grad_x, float* grad_scores);

/// Means of runs of rows: y[g] over rows ptr[g] … ptr[g+1]. And backward.
void mean_of_runs(const float* x, std::int64_t columns, std::span<const std::int32_t> ptr,
                  float* y);
void mean_of_runs_backward(const float* grad, std::int64_t columns,
                           std::span<const std::int32_t> ptr, float* grad_x);

/// One step of an LSTM. Shape: gates [rows, 4·hidden] (input, forget, cell, output), made σ, σ,
/// tanh, σ in place; before, cell, hidden [rows, hidden]; before may be null (zeros).
void lstm_cell(float* gates, Extent hidden_shape, const float* before, float* cell, float* hidden);
/// Shape: grad_cell, grad_hidden may be null; grad_gates like gates; grad_before like cell.
struct LstmGradient {
  Extent shape{};  ///< [rows, hidden]
  const float* gates{nullptr};
  const float* before{nullptr};
  const float* cell{nullptr};
  const float* grad_cell{nullptr};
  const float* grad_hidden{nullptr};
  float* grad_gates{nullptr};
  float* grad_before{nullptr};
};
void lstm_cell_backward(const LstmGradient& in);

/// Cross entropy of each row's target, loss [rows]; x becomes the gradient of
/// factor times it.
void cross_entropy_rows(float* x, Extent shape, const std::int64_t* target, float factor,
                        float* loss);
/// Σ over a row of log(1 + e^x), loss [rows]; x becomes factor·σ(x).
void softplus_rows(float* x, Extent shape, float factor, float* loss);

}  // namespace plimsoll::kernels
