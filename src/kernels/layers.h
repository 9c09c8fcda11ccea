// SPDX-License-Identifier: Apache-2.0
//
// Layers row by row, as operators: what stands between products and attention.
//
// Where the bits of torch's operators depend on the number of threads or on a row's place (sums,
// exponentials of the last lanes) these do not. A mask or noise is a function of (seed, place,
// index) alone: the same on any device and when a step is made again; two of one step have two
// places. Gradients of gradients are refused, but by logistic().
// Reading order: operators.h, this file, row_loops.h.
//
// Threads: as torch operators.   Memory: what backward keeps is said at each.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace plimsoll::kernels {

/// Which elements a layer drops, or what noise it adds.
struct Noise {
  std::int64_t seed{0};
  std::int64_t place{0};
  double rate{0};  ///< Of dropout.
};

/// Dropout of ReLU of x, of any shape. Keeps the result.
at::Tensor relu_dropout(const at::Tensor& x, const Noise& noise);

/// Mean and biased variance of each column of x [rows, columns]; no gradients.
struct Moments {
  at::Tensor mean;
  at::Tensor variance;
};
Moments column_moments(const at::Tensor& x);

/// Dropout of ReLU of (x − mean)/√(variance + 1e-5)·weight + bias, column by column. `of_batch`:
/// the moments are column_moments(x), and the gradient goes through them. Keeps x and the result.
at::Tensor norm_relu_dropout(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                             const Moments& moments, bool of_batch, const Noise& noise);

/// 1 / (1 + e^−x). Keeps the result.
at::Tensor logistic(const at::Tensor& x);

/// mean + noise·e^(log_variance/2), noise standard normal. Keeps what was added.
at::Tensor sample_normal(const at::Tensor& mean, const at::Tensor& log_variance,
                         const Noise& noise);

/// Mean of runs of rows, zeros for an empty one: row g of the result is over rows ptr[g] … of x.
/// Shape: x [rows, columns]; ptr int32 [runs + 1], ascending from 0 to rows. Keeps ptr.
at::Tensor segment_mean(const at::Tensor& x, const at::Tensor& ptr);

/// One step of an LSTM. Shape: gates [rows, 4·hidden] before their functions, in torch's order;
/// before [rows, hidden] or undefined (zeros).
struct LstmState {
  at::Tensor hidden;
  at::Tensor cell;
};
LstmState lstm_cell(const at::Tensor& gates, const at::Tensor& before);

/// Σ_l softmax(scores)_l · layers_l, row by row. Shape: layers [rows, columns] each; scores
/// [rows, layers]. Keeps layers and weights.
at::Tensor mix_layers(const std::vector<at::Tensor>& layers, const at::Tensor& scores);

}  // namespace plimsoll::kernels
