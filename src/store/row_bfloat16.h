// SPDX-License-Identifier: Apache-2.0
//
// The weights of a row as bfloat16 in its record and as float32 where they are used.
//
// A step of training is often smaller than half the distance of two neighbouring bfloat16: rounded
// to the nearest it would be lost each time, and training stall. Rounded up or down by chance it
// counts on average. Source: Zamirai et al., "Revisiting BFloat16 Training" (arXiv 2010.06192,
// 2020); Gupta et al., "Deep Learning with Limited Numerical Precision" (ICML 2015), section 3.
//
// Threads: pure functions.   Memory: none.
#pragma once

#include <cstdint>

namespace plimsoll {

/// What decides how the weights of a row are rounded after one step, so that it depends on nothing
/// else: no thread, no slab, no layout.
struct RoundingKey {
  std::uint64_t seed{0};      ///< Of the table; see rounding_seed().
  std::int64_t id{0};         ///< Of the row.
  std::uint32_t sequence{0};  ///< Its steps before this one.
};

/// The seed of a table's rounding, from that of its initialiser: another stream of numbers.
[[nodiscard]] std::uint64_t rounding_seed(std::uint64_t init_seed) noexcept;

void widen_row(const std::uint16_t* stored, std::int64_t dim, float* weights) noexcept;

/// Each weight to the nearest bfloat16, of two to the even one.
void round_row(const float* weights, std::int64_t dim, std::uint16_t* stored) noexcept;

/// Each weight up or down by chance. Weight 64g + 16w + 8h + l takes the lower (h = 0) or upper
/// half of word w of philox(seed, id, sequence × 2³² + 8g + l).
void round_row_stochastic(const RoundingKey& key, const float* weights, std::int64_t dim,
                          std::uint16_t* stored) noexcept;

}  // namespace plimsoll
