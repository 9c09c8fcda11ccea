// SPDX-License-Identifier: Apache-2.0
//
// Random tensors, element by element.
//
// Threads: pure functions.   Memory: see random_tensors.h.
#include "recipes/random_tensors.h"

#include <ATen/ops/empty.h>

#include "base/philox.h"

namespace plimsoll {

at::Tensor random_uniform(at::IntArrayRef shape, double width, std::uint64_t seed,
                          std::uint64_t stream) {
  auto x = at::empty(shape, at::kFloat);
  auto* values = x.data_ptr<float>();
  for (std::int64_t n = 0; n < x.numel(); ++n) {
    const auto word = philox(seed, stream, static_cast<std::uint64_t>(n / 4))[n % 4];
    values[n] = static_cast<float>(width) * (2.0F * uniform01(word) - 1.0F);
  }
  return x;
}

at::Tensor random_normal(at::IntArrayRef shape, double width, std::uint64_t seed,
                         std::uint64_t stream) {
  auto x = at::empty(shape, at::kFloat);
  auto* values = x.data_ptr<float>();
  for (std::int64_t n = 0; n < x.numel(); ++n) {
    const auto words = philox(seed, stream, static_cast<std::uint64_t>(n / 4));
    const auto pair = n % 4 < 2 ? normal2(words[0], words[1]) : normal2(words[2], words[3]);
    values[n] = static_cast<float>(width) * pair[n % 2];
  }
  return x;
}

}  // namespace plimsoll
