// SPDX-License-Identifier: Apache-2.0
//
// Admission: a pool's promise of memory, kept as long as its owner lives; and what a pool that is
// too small is told.
//
// Declare it before the slab it was taken for, so that the slab goes first.
//
// Threads: single-owner.   Memory: the promise; no lease.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

#include "plimsoll/governor.h"
#include "plimsoll/result.h"

namespace plimsoll {

class Admission {
 public:
  Admission() = default;
  Admission(const Admission&) = delete;
  Admission& operator=(const Admission&) = delete;
  ~Admission();

  /// For a pool that holds `bytes`, no more and no less; `option` (static) is the one to change.
  /// Errors: kOverBudget. Requires: nothing was taken before.
  Result<void> take(const Governor& governor, Tag tag, std::int64_t bytes, const char* option);

  /// From now on a lower limit may take what its slab has given back, until the limit rises again,
  /// but for `fixed_bytes`.
  /// Requires: all of it is leased, and its owner answers kShrink and grow_back().
  void make_elastic(std::int64_t fixed_bytes = 0) noexcept;

 private:
  Governor governor_{};
  PoolSpec spec_{};
};

/// The refusal of a pool that is to be smaller than it can work with, in words and numbers. `name`
/// is that of the option that says so, `advice` (static) what to do about it.
[[nodiscard]] Error below_floor(Tag tag, const std::filesystem::path& place, std::string_view name,
                                const char* advice, std::int64_t bytes, std::int64_t floor);

}  // namespace plimsoll
