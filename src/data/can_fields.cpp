// SPDX-License-Identifier: Apache-2.0
#include "data/can_fields.h"

#include <algorithm>
#include <charconv>
#include <cmath>

namespace plimsoll {
namespace {

constexpr std::uint8_t kNoDigit = 0xFF;
constexpr std::uint32_t kIdMost = 0x1FFFFFFF;  // 29 bits: the extended format.

constexpr std::array<std::uint8_t, 256> make_hex_digits() {
  std::array<std::uint8_t, 256> digits{};
  digits.fill(kNoDigit);
  for (std::uint8_t i = 0; i < 10; ++i) {
    digits[static_cast<std::size_t>('0' + i)] = i;
  }
  for (std::uint8_t i = 0; i < 6; ++i) {
    digits[static_cast<std::size_t>('a' + i)] = static_cast<std::uint8_t>(10 + i);
    digits[static_cast<std::size_t>('A' + i)] = static_cast<std::uint8_t>(10 + i);
  }
  return digits;
}
constexpr std::array<std::uint8_t, 256> kHex = make_hex_digits();

std::uint8_t hex(char c) noexcept {
  return kHex[static_cast<unsigned char>(c)];
}

char lower(char c) noexcept {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

bool same_word(std::string_view text, std::string_view word) noexcept {
  return text.size() == word.size() && std::equal(text.begin(), text.end(), word.begin(),
                                                  [](char a, char b) { return lower(a) == b; });
}

// A number below `most` + 1. Errors: a digit that is none, or none at all.
bool parse_number(std::string_view text, bool decimal, std::uint32_t most,
                  std::uint32_t& number) noexcept {
  if (!decimal && text.size() > 2 && text[0] == '0' && lower(text[1]) == 'x') {
    text.remove_prefix(2);
  }
  const std::uint64_t base = decimal ? 10 : 16;
  std::uint64_t value = 0;
  for (const char c : text) {
    const std::uint8_t digit = hex(c);
    if (digit >= base || value > most) {
      return false;
    }
    value = value * base + digit;
  }
  number = static_cast<std::uint32_t>(value);
  return !text.empty() && value <= most;
}

}  // namespace

bool is_can_space(char c) noexcept {
  return c == ' ' || c == '\t' || c == '\r';
}

std::string_view can_trim(std::string_view text) noexcept {
  while (!text.empty() && is_can_space(text.front())) {
    text.remove_prefix(1);
  }
  while (!text.empty() && is_can_space(text.back())) {
    text.remove_suffix(1);
  }
  return text;
}

std::string_view can_bare(std::string_view text) noexcept {
  text = can_trim(text);
  if (text.size() >= 2 && text.front() == '"' && text.back() == '"') {
    text = can_trim(text.substr(1, text.size() - 2));
  }
  return text;
}

std::string can_lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), lower);
  return out;
}

std::string_view can_token(std::string_view& text) noexcept {
  std::size_t begin = 0;
  while (begin < text.size() && is_can_space(text[begin])) {
    ++begin;
  }
  std::size_t end = begin;
  while (end < text.size() && !is_can_space(text[end])) {
    ++end;
  }
  const std::string_view token = text.substr(begin, end - begin);
  text.remove_prefix(end);
  return token;
}

// Plain decimals are the rule; exponents and the like go the long way.
bool parse_can_time(std::string_view text, CanTime& time) noexcept {
  constexpr std::size_t kWholeDigitsMost = 18;  // Nanoseconds since 1970 have 19, and go on below.
  constexpr double kWholeMost = 9.2e18;
  constexpr double kBillion = 1e9;
  std::int64_t whole = 0;
  std::size_t at = 0;
  while (at < text.size() && text[at] >= '0' && text[at] <= '9' && at < kWholeDigitsMost) {
    whole = whole * 10 + (text[at++] - '0');
  }
  if (at == kWholeDigitsMost && at + 1 == text.size() && text[at] >= '0' && text[at] <= '9' &&
      text[0] < '9') {
    time = {whole * 10 + (text[at] - '0'), 0};
    return true;
  }
  std::int64_t fraction = 0;
  std::size_t digits = 0;
  if (at > 0 && at < text.size() && text[at] == '.') {
    for (++at; at < text.size() && text[at] >= '0' && text[at] <= '9' && digits < 9; ++digits) {
      fraction = fraction * 10 + (text[at++] - '0');
    }
  }
  if (at > 0 && at == text.size()) {
    for (; digits < 9; ++digits) {
      fraction *= 10;
    }
    time = {whole, fraction};
    return true;
  }
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() ||
      !(std::abs(value) < kWholeMost)) {
    return false;
  }
  const double floor = std::floor(value);
  time = {static_cast<std::int64_t>(floor), static_cast<std::int64_t>((value - floor) * kBillion)};
  return true;
}

bool parse_can_id(std::string_view text, bool decimal, std::uint32_t& id) noexcept {
  return parse_number(text, decimal, kIdMost, id);
}

bool parse_can_payload(std::string_view text, std::array<std::uint8_t, 8>& bytes) noexcept {
  bytes.fill(0);
  std::size_t count = 0;
  for (std::size_t at = 0; at < text.size();) {
    if ((is_can_space(text[at]) || text[at] == '.') && count > 0) {  // Between bytes.
      ++at;
      continue;
    }
    if (count == bytes.size() || at + 1 == text.size()) {
      return false;
    }
    const std::uint8_t high = hex(text[at]);
    const std::uint8_t low = hex(text[at + 1]);
    if (high == kNoDigit || low == kNoDigit) {
      return false;
    }
    bytes[count++] = static_cast<std::uint8_t>(high << 4 | low);
    at += 2;
  }
  return true;
}

bool parse_can_byte(std::string_view text, bool decimal, std::uint8_t& byte) noexcept {
  std::uint32_t value = 0;
  if (!parse_number(text, decimal, UINT8_MAX, value)) {
    return false;
  }
  byte = static_cast<std::uint8_t>(value);
  return true;
}

bool parse_can_label(std::string_view text, std::uint8_t& attack) noexcept {
  constexpr std::array<std::array<std::string_view, 6>, 2> kWords{
      {{"0", "0.0", "false", "r", "normal", "benign"},
       {"1", "1.0", "true", "t", "attack", "malicious"}}};
  for (std::size_t value = 0; value < kWords.size(); ++value) {
    for (const std::string_view word : kWords[value]) {
      if (same_word(text, word)) {
        attack = static_cast<std::uint8_t>(value);
        return true;
      }
    }
  }
  return false;
}

std::optional<std::size_t> parse_can_length(std::string_view text) noexcept {
  if (text.size() == 2 && text[0] == '0') {
    text.remove_prefix(1);
  }
  if (text.size() != 1 || text[0] < '0' || text[0] > '8') {
    return std::nullopt;
  }
  return static_cast<std::size_t>(text[0] - '0');
}

}  // namespace plimsoll
