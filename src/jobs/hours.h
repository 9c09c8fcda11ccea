// SPDX-License-Identifier: Apache-2.0
//
// Hours of the day in which no job starts, and durations as users write them.
//
// Threads: pure functions.   Memory: 8 bytes.
#pragma once

#include <cstdint>
#include <string>

#include "plimsoll/result.h"

namespace plimsoll {

/// From one time of the day up to another, in local time; past midnight where the end comes first.
struct Hours {
  int from_minute{0};  ///< Of the day, 0 to 1439.
  int to_minute{0};
  [[nodiscard]] bool hold(int minute_of_day) const noexcept {
    return from_minute <= to_minute ? minute_of_day >= from_minute && minute_of_day < to_minute
                                    : minute_of_day >= from_minute || minute_of_day < to_minute;
  }
};

/// "09:00-17:30", "22:00-6:00". Errors: kInvalidArgument.
[[nodiscard]] Result<Hours> parse_hours(const std::string& text);

/// Of the local time now.
[[nodiscard]] int minute_of_day() noexcept;

/// "90", "90s", "15m", "2h", "1d" in seconds, from 1 to ten years. Errors: kInvalidArgument, naming
/// `option`.
[[nodiscard]] Result<std::int64_t> parse_duration(const std::string& text, const char* option);

}  // namespace plimsoll
