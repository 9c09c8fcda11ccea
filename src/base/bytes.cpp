// SPDX-License-Identifier: Apache-2.0
#include "plimsoll/bytes.h"

#include <array>
#include <charconv>
#include <cmath>

#include <fmt/core.h>

namespace plimsoll {

namespace {

constexpr const char* kAcceptedForms = "write a size such as 512MiB, 6GiB, 6GB, 1048576 or 25%";
constexpr double kTooLarge = 9.2e18;  // Just below 2^63, so that the cast is defined.

tl::unexpected<Error> bad_size(std::string_view text, const char* why) {
  return fail(ErrorCode::kInvalidArgument, fmt::format("\"{}\" is not a size: {}", text, why),
              kAcceptedForms);
}

// Lower case, without spaces and tabs.
std::string squeezed(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c != ' ' && c != '\t') {
      out += c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    }
  }
  return out;
}

// The factor of a unit in lower case, or 0: "" and "b" 1; "k", "kib" 1024; "kb" 1000; and so on.
double unit_factor(std::string_view unit) {
  if (unit.empty() || unit == "b") {
    return 1;
  }
  const auto power = std::string_view("kmgtp").find(unit.front());
  const std::string_view rest = unit.substr(1);
  if (power == std::string_view::npos || (!rest.empty() && rest != "ib" && rest != "b")) {
    return 0;
  }
  return std::pow(rest == "b" ? 1000.0 : 1024.0, static_cast<double>(power + 1));
}

}  // namespace

Result<std::int64_t> parse_bytes(std::string_view text, std::int64_t whole_bytes) {
  const std::string clean = squeezed(text);
  const char* const end = clean.data() + clean.size();
  std::int64_t whole = 0;
  if (const auto [stop, status] = std::from_chars(clean.data(), end, whole);
      status == std::errc() && whole >= 0 && (stop == end || (*stop == 'b' && stop + 1 == end))) {
    return whole;  // Bare bytes are exact; a double holds only 53 bits.
  }
  double number = 0;
  const auto [stop, status] = std::from_chars(clean.data(), end, number, std::chars_format::fixed);
  if (status != std::errc()) {
    return bad_size(text, clean.empty() ? "it is empty" : "it does not begin with a number");
  }
  if (!std::isfinite(number) || std::signbit(number)) {
    return bad_size(text, "it is negative or not finite");
  }
  const std::string_view unit(stop, static_cast<std::size_t>(end - stop));
  if (unit == "%") {
    if (whole_bytes <= 0) {
      return bad_size(text, "there is nothing here to take a share of");
    }
    if (number > 100) {
      return bad_size(text, "a share cannot pass 100%");
    }
    return static_cast<std::int64_t>(std::floor(static_cast<double>(whole_bytes) * number / 100));
  }
  const double factor = unit_factor(unit);
  if (factor == 0) {
    return bad_size(text, "its unit is unknown");
  }
  if (number * factor >= kTooLarge) {
    return bad_size(text, "it is too large");
  }
  return static_cast<std::int64_t>(std::floor(number * factor));
}

std::string format_bytes(std::int64_t bytes) {
  constexpr std::array<const char*, 6> kUnits{"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = std::fabs(static_cast<double>(bytes));
  const char* const sign = bytes < 0 ? "-" : "";
  if (value < 1024) {
    return fmt::format("{} B", bytes);
  }
  std::size_t unit = 0;
  // 1023.95 would be printed as 1024.0: the next unit says it better.
  while (value >= 1023.95 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return fmt::format("{}{:.1f} {}", sign, value, kUnits[unit]);
}

}  // namespace plimsoll
