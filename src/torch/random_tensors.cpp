// SPDX-License-Identifier: Apache-2.0
//
// Random tensors, element by element.
//
// Threads: pure functions.   Memory: see random_tensors.h.
#include "torch/random_tensors.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "base/philox.h"

namespace plimsoll {
namespace {

thread_local std::optional<UndrawnWeights::Kind> undrawn;

// Four values a block: `values_of(words)` are those of elements 4k … 4k + 3.
template <class ValuesOf>
at::Tensor filled(at::IntArrayRef shape, std::uint64_t seed, std::uint64_t stream,
                  const ValuesOf& values_of) {
  auto x = at::empty(shape,
                     at::TensorOptions(at::kFloat)
                         .device(undrawn == UndrawnWeights::Kind::kShapes ? at::kMeta : at::kCPU));
  if (undrawn) {
    return x;
  }
  auto* values = x.data_ptr<float>();
  for (std::int64_t first = 0; first < x.numel(); first += 4) {
    const std::array<float, 4> four =
        values_of(philox(seed, stream, static_cast<std::uint64_t>(first / 4)));
    std::copy_n(four.begin(), std::min<std::int64_t>(4, x.numel() - first), values + first);
  }
  return x;
}

}  // namespace

void random_linear(at::Tensor& weight, at::Tensor& bias, std::int64_t out, std::int64_t in,
                   std::uint64_t seed, std::uint64_t& stream) {
  const double width = 1.0 / std::sqrt(static_cast<double>(in));
  weight = random_uniform({out, in}, width, seed, stream++).set_requires_grad(true);
  bias = random_uniform({out}, width, seed, stream++).set_requires_grad(true);
}

UndrawnWeights::UndrawnWeights(Kind kind) noexcept : before_(undrawn) {
  undrawn = kind;
}

UndrawnWeights::~UndrawnWeights() {
  undrawn = before_;
}

at::Tensor random_uniform(at::IntArrayRef shape, double width, std::uint64_t seed,
                          std::uint64_t stream) {
  const auto within = [width](std::uint32_t word) {
    return static_cast<float>(width) * (2.0F * uniform01(word) - 1.0F);
  };
  return filled(shape, seed, stream, [&](const PhiloxBlock& words) {
    return std::array{within(words[0]), within(words[1]), within(words[2]), within(words[3])};
  });
}

at::Tensor random_normal(at::IntArrayRef shape, double width, std::uint64_t seed,
                         std::uint64_t stream) {
  const auto times = static_cast<float>(width);
  return filled(shape, seed, stream, [&](const PhiloxBlock& words) {
    const auto one = normal2(words[0], words[1]);
    const auto two = normal2(words[2], words[3]);
    return std::array{times * one[0], times * one[1], times * two[0], times * two[1]};
  });
}

}  // namespace plimsoll
