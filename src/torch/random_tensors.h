// SPDX-License-Identifier: Apache-2.0
//
// Tensors of random numbers: a pure function of a seed and a stream, for the first weights of
// models.
//
// Threads: pure functions.   Memory: the tensor.
#pragma once

#include <cstdint>
#include <optional>

#include <torch/types.h>

namespace plimsoll {

/// A tensor of philox values: uniform within ±width, or normal times width. Not requiring grad.
at::Tensor random_uniform(at::IntArrayRef shape, double width, std::uint64_t seed,
                          std::uint64_t stream);
at::Tensor random_normal(at::IntArrayRef shape, double width, std::uint64_t seed,
                         std::uint64_t stream);

/// Weight [out, in] and bias [out] of a linear layer, as torch.nn.Linear begins: uniform within
/// ±1/√in. To be trained. Takes two streams from `stream` on.
void random_linear(at::Tensor& weight, at::Tensor& bias, std::int64_t out, std::int64_t in,
                   std::uint64_t seed, std::uint64_t& stream);

/// While one lives on a thread, the functions above draw nothing: a model is about to be read from
/// its file, or only its size is asked for.
class UndrawnWeights {
 public:
  enum class Kind : std::uint8_t {
    kUnset,   ///< Values are whatever was there.
    kShapes,  ///< Tensors on the meta device: no memory at all.
  };
  explicit UndrawnWeights(Kind kind) noexcept;
  ~UndrawnWeights();
  UndrawnWeights(const UndrawnWeights&) = delete;
  UndrawnWeights& operator=(const UndrawnWeights&) = delete;

 private:
  std::optional<Kind> before_;
};

}  // namespace plimsoll
