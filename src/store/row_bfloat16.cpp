// SPDX-License-Identifier: Apache-2.0
#include "store/row_bfloat16.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "base/bfloat16.h"
#include "base/philox.h"
#include "store/row_wide.h"

namespace plimsoll {
namespace {

constexpr std::size_t kLanes = 8;           // Philox blocks computed together,
constexpr std::size_t kGroup = 8 * kLanes;  // and weights they are enough for.

PLIMSOLL_BODY void widen_body(const std::uint16_t* stored, std::int64_t dim, float* weights) {
  for (std::int64_t i = 0; i < dim; ++i) {
    weights[i] = widen_bfloat16(stored[i]);
  }
}

PLIMSOLL_BODY void round_body(const float* weights, std::int64_t dim, std::uint16_t* stored) {
  for (std::int64_t i = 0; i < dim; ++i) {
    stored[i] = nearest_bfloat16(weights[i]);
  }
}

// Eight blocks of philox() at once, its loops turned inside out so that they are vectorised:
// counter sequence × 2³² + 8 × group + lane. Sixteen bits of them for each weight.
PLIMSOLL_BODY void random_group(const RoundingKey& key, std::uint32_t group,
                                std::array<std::uint32_t, kGroup>& random) {
  const auto id = static_cast<std::uint64_t>(key.id);
  std::array<std::uint32_t, kLanes> x0;
  std::array<std::uint32_t, kLanes> x1;
  std::array<std::uint32_t, kLanes> x2;
  std::array<std::uint32_t, kLanes> x3;
  for (std::size_t l = 0; l < kLanes; ++l) {
    x0[l] = group * static_cast<std::uint32_t>(kLanes) + static_cast<std::uint32_t>(l);
    x1[l] = key.sequence;
    x2[l] = static_cast<std::uint32_t>(id);
    x3[l] = static_cast<std::uint32_t>(id >> 32);
  }
  auto k0 = static_cast<std::uint32_t>(key.seed);
  auto k1 = static_cast<std::uint32_t>(key.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (std::size_t l = 0; l < kLanes; ++l) {
      const std::uint64_t p0 = std::uint64_t{0xD2511F53U} * x0[l];
      const std::uint64_t p1 = std::uint64_t{0xCD9E8D57U} * x2[l];
      x0[l] = static_cast<std::uint32_t>(p1 >> 32) ^ x1[l] ^ k0;
      x1[l] = static_cast<std::uint32_t>(p1);
      x2[l] = static_cast<std::uint32_t>(p0 >> 32) ^ x3[l] ^ k1;
      x3[l] = static_cast<std::uint32_t>(p0);
    }
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  for (std::size_t l = 0; l < kLanes; ++l) {
    random[l] = x0[l] & 0xFFFFU;
    random[kLanes + l] = x0[l] >> 16;
    random[2 * kLanes + l] = x1[l] & 0xFFFFU;
    random[3 * kLanes + l] = x1[l] >> 16;
    random[4 * kLanes + l] = x2[l] & 0xFFFFU;
    random[5 * kLanes + l] = x2[l] >> 16;
    random[6 * kLanes + l] = x3[l] & 0xFFFFU;
    random[7 * kLanes + l] = x3[l] >> 16;
  }
}

PLIMSOLL_BODY void stochastic_body(const RoundingKey& key, const float* weights, std::int64_t dim,
                                   std::uint16_t* stored) {
  std::array<std::uint32_t, kGroup> random;
  std::uint32_t group = 0;
  for (std::int64_t first = 0; first < dim; first += kGroup) {
    random_group(key, group++, random);
    const auto count = std::min<std::int64_t>(dim - first, kGroup);
    for (std::int64_t i = 0; i < count; ++i) {
      stored[first + i] =
          stochastic_bfloat16(weights[first + i], random[static_cast<std::size_t>(i)]);
    }
  }
}

PLIMSOLL_WIDE void widen_wide(const std::uint16_t* stored, std::int64_t dim, float* weights) {
  widen_body(stored, dim, weights);
}
PLIMSOLL_WIDE void round_wide(const float* weights, std::int64_t dim, std::uint16_t* stored) {
  round_body(weights, dim, stored);
}
PLIMSOLL_WIDE void stochastic_wide(const RoundingKey& key, const float* weights, std::int64_t dim,
                                   std::uint16_t* stored) {
  stochastic_body(key, weights, dim, stored);
}

}  // namespace

std::uint64_t rounding_seed(std::uint64_t init_seed) noexcept {
  return mix64(init_seed ^ 0x726F756E64696E67ULL);  // "rounding"
}

void widen_row(const std::uint16_t* stored, std::int64_t dim, float* weights) noexcept {
  PLIMSOLL_HAS_WIDE ? widen_wide(stored, dim, weights) : widen_body(stored, dim, weights);
}

void round_row(const float* weights, std::int64_t dim, std::uint16_t* stored) noexcept {
  PLIMSOLL_HAS_WIDE ? round_wide(weights, dim, stored) : round_body(weights, dim, stored);
}

void round_row_stochastic(const RoundingKey& key, const float* weights, std::int64_t dim,
                          std::uint16_t* stored) noexcept {
  PLIMSOLL_HAS_WIDE ? stochastic_wide(key, weights, dim, stored)
                    : stochastic_body(key, weights, dim, stored);
}

}  // namespace plimsoll
