// SPDX-License-Identifier: Apache-2.0
//
// Counter-based random numbers: a pure function of (seed, stream, counter), never a shared state.
// Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC'11), Philox-4x32-10.
//
// Threads: pure functions.   Memory: none.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

namespace plimsoll {

using PhiloxBlock = std::array<std::uint32_t, 4>;

/// Four 32-bit random words. `seed` is the key; (stream, counter) the 128-bit counter.
[[nodiscard]] constexpr PhiloxBlock philox(std::uint64_t seed, std::uint64_t stream,
                                           std::uint64_t counter) noexcept {
  PhiloxBlock x{static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32),
                static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32)};
  auto k0 = static_cast<std::uint32_t>(seed);
  auto k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = 0xD2511F53ULL * x[0];
    const std::uint64_t p1 = 0xCD9E8D57ULL * x[2];
    x = {static_cast<std::uint32_t>(p1 >> 32) ^ x[1] ^ k0, static_cast<std::uint32_t>(p1),
         static_cast<std::uint32_t>(p0 >> 32) ^ x[3] ^ k1, static_cast<std::uint32_t>(p0)};
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return x;
}

/// Uniform in (0, 1): never 0, never 1. 23 bits, because with 24 the largest would round up to 1.
[[nodiscard]] constexpr float uniform01(std::uint32_t word) noexcept {
  return (static_cast<float>(word >> 9) + 0.5F) * 0x1p-23F;
}

/// Two independent standard normals from two words (Box and Muller, 1958).
[[nodiscard]] inline std::array<float, 2> normal2(std::uint32_t a, std::uint32_t b) noexcept {
  const float radius = std::sqrt(-2.0F * std::log(uniform01(a)));
  const float angle = 6.28318530717958647692F * uniform01(b);
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

/// Mixes a 64-bit value (splitmix64's finaliser): for hashing ids and deriving keys.
[[nodiscard]] constexpr std::uint64_t mix64(std::uint64_t x) noexcept {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

}  // namespace plimsoll
