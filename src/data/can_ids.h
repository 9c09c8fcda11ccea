// SPDX-License-Identifier: Apache-2.0
//
// CanIds: the different ids met, at most so many.
//
// Threads: single-owner.   Memory: 8 to 16 bytes an id that there may be, lent by the caller.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "memory/slab.h"

namespace plimsoll {

class CanIds {
 public:
  [[nodiscard]] static std::int64_t slab_bytes(std::int64_t ids_max) noexcept {
    return places(ids_max) * static_cast<std::int64_t>(sizeof(std::uint32_t)) + 64;
  }
  CanIds(Slab& slab, std::int64_t ids_max)
      : places_(slab.take<std::uint32_t>(places(ids_max))), ids_max_(ids_max) {}

  /// False when it is new and there are as many as there may be.
  bool insert(std::uint32_t id) noexcept {
    const std::size_t mask = places_.size() - 1;
    std::size_t at = id * kFibonacci >> 5U & mask;
    while (places_[at] != 0) {
      if (places_[at] == id + 1) {
        return true;
      }
      at = (at + 1) & mask;
    }
    if (count_ == ids_max_) {
      return false;
    }
    ++count_;
    places_[at] = id + 1;
    return true;
  }

  /// All of them, ascending.
  [[nodiscard]] std::vector<std::uint32_t> sorted() const {
    std::vector<std::uint32_t> ids;
    ids.reserve(static_cast<std::size_t>(count_));
    for (const std::uint32_t place : places_) {
      if (place != 0) {
        ids.push_back(place - 1);
      }
    }
    std::sort(ids.begin(), ids.end());
    return ids;
  }

 private:
  static constexpr std::uint32_t kFibonacci = 0x9E3779B1U;  // 2^32 / golden ratio, odd.
  [[nodiscard]] static std::int64_t places(std::int64_t ids_max) noexcept {
    return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(2 * ids_max)));
  }

  std::span<std::uint32_t> places_;  // id + 1, or 0; open addressing, at most half full.
  std::int64_t ids_max_;
  std::int64_t count_{0};
};

}  // namespace plimsoll
