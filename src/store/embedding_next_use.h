// SPDX-License-Identifier: Apache-2.0
//
// NextUse: when a page will be asked for, as far as the look-ahead has said.
//
// Uses are numbered by ticks. The first one is exact; of those after it, a tick more than kReach
// beyond the first is not remembered.
//
// Threads: a value.   Memory: 8 bytes.
#pragma once

#include <bit>
#include <cstdint>

namespace plimsoll {

class NextUse {
 public:
  static constexpr std::uint32_t kReach = 32;

  NextUse() = default;
  explicit NextUse(std::uint32_t tick) noexcept : first_(tick) {}

  [[nodiscard]] std::uint32_t first() const noexcept { return first_; }

  /// Requires: `tick` is not before one that was added earlier.
  void add(std::uint32_t tick) noexcept {
    const std::uint32_t after = tick - first_;
    if (after >= 1 && after <= kReach) {
      later_ |= std::uint32_t{1} << (after - 1);
    }
  }

  /// Forgets the first use. False: there is no other.
  [[nodiscard]] bool pass() noexcept {
    if (later_ == 0) {
      return false;
    }
    const auto skipped = static_cast<std::uint32_t>(std::countr_zero(later_));
    first_ += skipped + 1;
    later_ = skipped == kReach - 1 ? 0 : later_ >> (skipped + 1);
    return true;
  }

 private:
  std::uint32_t first_{0};
  std::uint32_t later_{0};  // Bit i: used at first_ + 1 + i.
};

}  // namespace plimsoll
