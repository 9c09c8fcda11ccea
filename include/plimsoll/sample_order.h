// SPDX-License-Identifier: Apache-2.0
//
// SampleOrder: which sample stands at position p of epoch e, in O(1) time and no memory.
//
// A keyed Feistel permutation of [0, n) with cycle walking: invertible, the same for any number
// of threads or ranks.
// Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), §3. Six rounds,
// not the classical four: with four, orders of fewer than 16 samples were measurably uneven.
//
// Threads: immutable value; thread-safe.   Memory: 64 bytes.
#pragma once

#include <array>
#include <cstdint>

namespace plimsoll {

class SampleOrder {
 public:
  /// A permutation of [0, `samples`) keyed by (seed, epoch).
  /// Requires: samples >= 0.
  SampleOrder(std::int64_t samples, std::uint64_t seed, std::int64_t epoch) noexcept;

  /// The sample at position `position`. Requires: 0 <= position < samples().
  [[nodiscard]] std::int64_t at(std::int64_t position) const noexcept;

  /// The position at which `sample` stands: position_of(at(p)) == p.
  [[nodiscard]] std::int64_t position_of(std::int64_t sample) const noexcept;

  [[nodiscard]] std::int64_t samples() const noexcept { return samples_; }

 private:
  static constexpr int kRounds = 6;
  std::int64_t samples_{0};
  std::array<std::uint64_t, kRounds> keys_{};
  int low_bits_{4};   // The domain is 2^(low_bits_ + high_bits_): the smallest that holds
  int high_bits_{4};  // samples_, but never below 2^8.
};

}  // namespace plimsoll
