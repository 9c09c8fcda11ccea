// SPDX-License-Identifier: Apache-2.0
#include "plimsoll/sample_order.h"

#include "base/philox.h"

namespace plimsoll {

namespace {

// One half through a round: `half_bits` well-mixed bits of (half, key). Two multiplications suffice
// because only the high bits, which depend on every bit below them, are kept.
std::uint64_t round_bits(std::uint64_t half, std::uint64_t key, int half_bits) noexcept {
  std::uint64_t x = (half ^ key) * 0xBF58476D1CE4E5B9ULL;
  x ^= x >> 32;
  x *= 0x94D049BB133111EBULL;
  return x >> (64 - half_bits);
}

}  // namespace

SampleOrder::SampleOrder(std::int64_t samples, std::uint64_t seed, std::int64_t epoch) noexcept
    : samples_(samples) {
  // The smallest 2^(2 half_bits) >= samples: less than four times as many, so that a walk takes
  // fewer than four rounds of the cipher on average.
  while (half_bits_ < 31 && (std::int64_t{1} << (2 * half_bits_)) < samples) {
    ++half_bits_;
  }
  for (std::size_t i = 0; i < keys_.size(); ++i) {
    const PhiloxBlock block = philox(seed, static_cast<std::uint64_t>(epoch), i);
    keys_[i] = block[0] | (static_cast<std::uint64_t>(block[1]) << 32);
  }
}

std::int64_t SampleOrder::at(std::int64_t position) const noexcept {
  const std::uint64_t mask = (1ULL << half_bits_) - 1;
  auto x = static_cast<std::uint64_t>(position);
  do {
    std::uint64_t left = x >> half_bits_;
    std::uint64_t right = x & mask;
    for (const std::uint64_t key : keys_) {
      const std::uint64_t next = left ^ round_bits(right, key, half_bits_);
      left = right;
      right = next;
    }
    x = (left << half_bits_) | right;
  } while (x >= static_cast<std::uint64_t>(samples_));
  return static_cast<std::int64_t>(x);
}

std::int64_t SampleOrder::position_of(std::int64_t sample) const noexcept {
  const std::uint64_t mask = (1ULL << half_bits_) - 1;
  auto x = static_cast<std::uint64_t>(sample);
  do {
    std::uint64_t left = x >> half_bits_;
    std::uint64_t right = x & mask;
    for (std::size_t i = keys_.size(); i-- > 0;) {
      const std::uint64_t previous = right ^ round_bits(left, keys_[i], half_bits_);
      right = left;
      left = previous;
    }
    x = (left << half_bits_) | right;
  } while (x >= static_cast<std::uint64_t>(samples_));
  return static_cast<std::int64_t>(x);
}

}  // namespace plimsoll
