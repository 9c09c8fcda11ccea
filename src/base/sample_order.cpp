// SPDX-License-Identifier: Apache-2.0
#include "plimsoll/sample_order.h"

#include "base/philox.h"

namespace plimsoll {

namespace {

// `bits` well-mixed bits of (half, key). Two multiplications suffice because only the high bits,
// which depend on every bit below them, are kept.
std::uint64_t round_bits(std::uint64_t half, std::uint64_t key, int bits) noexcept {
  std::uint64_t x = (half ^ key) * 0xBF58476D1CE4E5B9ULL;
  x ^= x >> 32;
  x *= 0x94D049BB133111EBULL;
  return x >> (64 - bits);
}

}  // namespace

SampleOrder::SampleOrder(std::int64_t samples, std::uint64_t seed, std::int64_t epoch) noexcept
    : samples_(samples) {
  // Fewer than twice as many as samples from 2^8 on: a walk takes less than two turns on average.
  while (low_bits_ + high_bits_ < 62 && (std::int64_t{1} << (low_bits_ + high_bits_)) < samples) {
    ++(low_bits_ == high_bits_ ? low_bits_ : high_bits_);
  }
  for (std::size_t i = 0; i < keys_.size(); ++i) {
    const PhiloxBlock block = philox(seed, static_cast<std::uint64_t>(epoch), i);
    keys_[i] = block[0] | (static_cast<std::uint64_t>(block[1]) << 32);
  }
}

// Even rounds change the low half by the high one, odd rounds the high half by the low one.

std::int64_t SampleOrder::at(std::int64_t position) const noexcept {
  const std::uint64_t mask = (1ULL << low_bits_) - 1;
  auto x = static_cast<std::uint64_t>(position);
  do {
    std::uint64_t low = x & mask;
    std::uint64_t high = x >> low_bits_;
    for (std::size_t i = 0; i < keys_.size(); i += 2) {
      low ^= round_bits(high, keys_[i], low_bits_);
      high ^= round_bits(low, keys_[i + 1], high_bits_);
    }
    x = (high << low_bits_) | low;
  } while (x >= static_cast<std::uint64_t>(samples_));
  return static_cast<std::int64_t>(x);
}

std::int64_t SampleOrder::position_of(std::int64_t sample) const noexcept {
  const std::uint64_t mask = (1ULL << low_bits_) - 1;
  auto x = static_cast<std::uint64_t>(sample);
  do {
    std::uint64_t low = x & mask;
    std::uint64_t high = x >> low_bits_;
    for (std::size_t i = keys_.size(); i > 0; i -= 2) {
      high ^= round_bits(low, keys_[i - 1], high_bits_);
      low ^= round_bits(high, keys_[i - 2], low_bits_);
    }
    x = (high << low_bits_) | low;
  } while (x >= static_cast<std::uint64_t>(samples_));
  return static_cast<std::int64_t>(x);
}

}  // namespace plimsoll
