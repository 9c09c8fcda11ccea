// SPDX-License-Identifier: Apache-2.0
//
// Tensors of random numbers: a pure function of a seed and a stream, for the first weights of
// models.
//
// Threads: pure functions.   Memory: the tensor.
#pragma once

#include <cstdint>

#include <torch/types.h>

namespace plimsoll {

/// A tensor of philox values: uniform within ±width, or normal times width. Not requiring grad.
at::Tensor random_uniform(at::IntArrayRef shape, double width, std::uint64_t seed,
                          std::uint64_t stream);
at::Tensor random_normal(at::IntArrayRef shape, double width, std::uint64_t seed,
                         std::uint64_t stream);

/// While one lives on a thread, the functions above leave what they make unset: a model is about to
/// be read from its file.
class UnsetWeights {
 public:
  UnsetWeights() noexcept;
  ~UnsetWeights();
  UnsetWeights(const UnsetWeights&) = delete;
  UnsetWeights& operator=(const UnsetWeights&) = delete;
};

}  // namespace plimsoll
