// SPDX-License-Identifier: Apache-2.0
//
// can_fields: what the fields of a CAN log say: a time, an id, a payload, a label.
//
// Reading order: this file, can_forms.h, can_csv.h.
//
// Threads: pure functions.   Memory: none.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace plimsoll {

struct CanFrame {
  std::uint32_t id{0};                  ///< At most 29 bits.
  std::array<std::uint8_t, 8> bytes{};  ///< Of the payload; zeros beyond its end.
  std::uint8_t attack{0};
};

/// What is wrong with a row.
enum class CanBad : std::uint8_t { kNone, kFields, kTimestamp, kId, kPayload, kLabel };

/// A time in whatever unit its file has: only compared with others of the file.
struct CanTime {
  std::int64_t whole{INT64_MIN};
  std::int64_t fraction{0};                          ///< Billionths.
  auto operator<=>(const CanTime&) const = default;  // NOLINT(modernize-use-nullptr): it has none.
};

[[nodiscard]] bool is_can_space(char c) noexcept;
/// Without spaces, tabs and CR at both ends.
[[nodiscard]] std::string_view can_trim(std::string_view text) noexcept;
/// Without the spaces, then the quotes, then the spaces within them.
[[nodiscard]] std::string_view can_bare(std::string_view text) noexcept;
[[nodiscard]] std::string can_lower(std::string_view text);
/// The next run of characters that are no space, taken off the front of `text`; empty at the end.
std::string_view can_token(std::string_view& text) noexcept;

/// A number, as decimals or with an exponent.
[[nodiscard]] bool parse_can_time(std::string_view text, CanTime& time) noexcept;
/// At most 29 bits, hexadecimal ("0x" or not) or decimal.
[[nodiscard]] bool parse_can_id(std::string_view text, bool decimal, std::uint32_t& id) noexcept;
/// 0 to 8 bytes in hexadecimal, with or without spaces or dots between them.
[[nodiscard]] bool parse_can_payload(std::string_view text,
                                     std::array<std::uint8_t, 8>& bytes) noexcept;
/// One byte: one or two hexadecimal digits ("0x" or not), or a decimal number.
[[nodiscard]] bool parse_can_byte(std::string_view text, bool decimal, std::uint8_t& byte) noexcept;
/// 0 or 1, false or true, R or T (of HCRL: T is injected), normal or attack.
[[nodiscard]] bool parse_can_label(std::string_view text, std::uint8_t& attack) noexcept;
/// A number of payload bytes, 0 to 8.
[[nodiscard]] std::optional<std::size_t> parse_can_length(std::string_view text) noexcept;

}  // namespace plimsoll
