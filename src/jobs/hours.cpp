// SPDX-License-Identifier: Apache-2.0
#include "jobs/hours.h"

#include <charconv>
#include <ctime>
#include <string_view>

#include <fmt/format.h>

#include "base/check.h"

namespace plimsoll {
namespace {

constexpr int kHoursOfDay = 24;
constexpr int kMinutesOfHour = 60;
constexpr std::int64_t kSecondsMost = 3650LL * 24 * 3600;

// "9:30" as a minute of the day; −1 for anything else.
int minute_of(std::string_view text) {
  const auto colon = text.find(':');
  if (colon == std::string_view::npos || text.size() != colon + 3 || colon == 0 || colon > 2) {
    return -1;
  }
  int hour = 0;
  int minute = 0;
  const char* const begin = text.data();
  const auto [hour_end, hour_read] = std::from_chars(begin, begin + colon, hour);
  const auto [end, read] = std::from_chars(begin + colon + 1, begin + text.size(), minute);
  const bool whole = hour_read == std::errc() && read == std::errc() && hour_end == begin + colon &&
                     end == begin + text.size();
  const bool known =
      whole && hour >= 0 && hour < kHoursOfDay && minute >= 0 && minute < kMinutesOfHour;
  return known ? hour * kMinutesOfHour + minute : -1;
}

}  // namespace

Result<Hours> parse_hours(const std::string& text) {
  const auto dash = text.find('-');
  const int from = minute_of(std::string_view(text).substr(0, dash));
  const int to =
      dash == std::string::npos ? -1 : minute_of(std::string_view(text).substr(dash + 1));
  if (from < 0 || to < 0 || from == to) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("hours: '{}' are none", text),
                "write them as 09:00-17:30, in local time");
  }
  return Hours{from, to};
}

int minute_of_day() noexcept {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  return local.tm_hour * kMinutesOfHour + local.tm_min;
}

Result<std::int64_t> parse_duration(const std::string& text, const char* option) {
  std::int64_t number = 0;
  const char* const last = text.data() + text.size();
  const auto [end, read] = std::from_chars(text.data(), last, number);
  const std::string_view unit(end, static_cast<std::size_t>(last - end));
  const std::int64_t scale = unit.empty() || unit == "s" ? 1
                             : unit == "m"               ? 60
                             : unit == "h"               ? 3600
                             : unit == "d"               ? 86'400
                                                         : 0;
  if (read != std::errc() || scale == 0 || number < 1 || number > kSecondsMost / scale) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("{}: '{}' is no duration", option, text),
                "write it as 90s, 15m, 2h or 1d");
  }
  return number * scale;
}

}  // namespace plimsoll
