// SPDX-License-Identifier: Apache-2.0
#include "base/npy_header.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include <fmt/format.h>

#include "base/check.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kTextBytesMax = 1 << 20;
constexpr std::size_t kDimensionsMax = 32;
constexpr std::string_view kMagic = "\x93NUMPY";

// Reads {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }.
class DictScanner {
 public:
  explicit DictScanner(std::string_view text) : text_(text) {}

  struct Fields {
    std::optional<std::string> descr{};
    std::optional<bool> fortran_order{};
    std::optional<std::vector<std::int64_t>> shape{};
  };

  // Nothing when the text is not such a dictionary, with each key once.
  std::optional<Fields> scan() {
    Fields fields;
    if (!take('{')) {
      return std::nullopt;
    }
    while (!take('}')) {
      const auto key = quoted();
      if (!key || !take(':') || !value(*key, fields)) {
        return std::nullopt;
      }
      if (!take(',') && !next_is('}')) {
        return std::nullopt;
      }
    }
    skip_space();
    if (!text_.empty() || !fields.descr || !fields.fortran_order || !fields.shape) {
      return std::nullopt;
    }
    return fields;
  }

 private:
  bool value(const std::string& key, Fields& fields) {
    if (key == "descr" && !fields.descr) {
      fields.descr = quoted();
      return fields.descr.has_value();
    }
    if (key == "fortran_order" && !fields.fortran_order) {
      if (take_word("True")) {
        fields.fortran_order = true;
      } else if (take_word("False")) {
        fields.fortran_order = false;
      }
      return fields.fortran_order.has_value();
    }
    if (key == "shape" && !fields.shape) {
      fields.shape = tuple();
      return fields.shape.has_value();
    }
    return false;
  }

  std::optional<std::vector<std::int64_t>> tuple() {
    std::vector<std::int64_t> values;
    if (!take('(')) {
      return std::nullopt;
    }
    while (!take(')')) {
      const auto number = integer();
      if (!number || values.size() == kDimensionsMax) {
        return std::nullopt;
      }
      values.push_back(*number);
      if (!take(',') && !next_is(')')) {
        return std::nullopt;
      }
    }
    return values;
  }

  std::optional<std::int64_t> integer() {
    skip_space();
    std::int64_t number = 0;
    std::size_t digits = 0;
    for (; digits < text_.size() && text_[digits] >= '0' && text_[digits] <= '9'; ++digits) {
      if (__builtin_mul_overflow(number, 10, &number) ||
          __builtin_add_overflow(number, text_[digits] - '0', &number)) {
        return std::nullopt;
      }
    }
    text_.remove_prefix(digits);
    return digits > 0 ? std::optional(number) : std::nullopt;
  }

  std::optional<std::string> quoted() {
    skip_space();
    if (text_.empty() || (text_[0] != '\'' && text_[0] != '"')) {
      return std::nullopt;
    }
    const std::size_t end = text_.find(text_[0], 1);
    if (end == std::string_view::npos || end > 64) {
      return std::nullopt;
    }
    std::string inner(text_.substr(1, end - 1));
    text_.remove_prefix(end + 1);
    return inner;
  }

  void skip_space() {
    const std::size_t begin = text_.find_first_not_of(" \t\r\n");
    text_.remove_prefix(std::min(begin, text_.size()));
  }
  bool next_is(char c) {
    skip_space();
    return !text_.empty() && text_[0] == c;
  }
  bool take(char c) {
    const bool there = next_is(c);
    text_.remove_prefix(there ? 1 : 0);
    return there;
  }
  bool take_word(std::string_view word) {
    skip_space();
    const bool there = text_.substr(0, word.size()) == word;
    text_.remove_prefix(there ? word.size() : 0);
    return there;
  }

  std::string_view text_;
};

// Where the dictionary stands in `head`.
Result<std::string_view> header_text(std::span<const std::byte> head, const std::string& name,
                                     std::int64_t& data_offset) {
  const std::string_view text(reinterpret_cast<const char*>(head.data()), head.size());
  if (text.size() < 10 || text.substr(0, kMagic.size()) != kMagic) {
    return fail(ErrorCode::kCorrupt, fmt::format("{}: not a .npy file", name));
  }
  const int major = static_cast<unsigned char>(text[6]);
  if (major < 1 || major > 3) {
    return fail(ErrorCode::kCorrupt,
                fmt::format("{}: .npy version {}; versions 1 to 3 are read", name, major));
  }
  const std::size_t length_bytes = major == 1 ? 2 : 4;
  const std::size_t begin = 8 + length_bytes;
  std::uint32_t length = 0;
  if (text.size() >= begin) {
    std::memcpy(&length, text.data() + 8, length_bytes);
  }
  if (text.size() < begin || length > static_cast<std::uint32_t>(kTextBytesMax) ||
      text.size() - begin < length) {
    return fail(
        ErrorCode::kCorrupt,
        fmt::format("{}: truncated inside its .npy header, or the header is too large", name));
  }
  data_offset = static_cast<std::int64_t>(begin + length);
  return text.substr(begin, length);
}

}  // namespace

std::string npy_header(std::string_view descr, std::span<const std::int64_t> shape) {
  constexpr std::size_t kUnit = 64;
  constexpr std::size_t kPreamble = 10;  // The magic, the version, the length of the rest.
  std::string sizes;
  for (const std::int64_t size : shape) {  // As Python writes a tuple: "()", "(3,)", "(3, 4)".
    sizes += fmt::format("{}{}", sizes.empty() ? "" : ", ", size);
  }
  sizes += shape.size() == 1 ? "," : "";
  std::string text =
      fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}), }}", descr, sizes);
  const std::size_t needed = kPreamble + text.size() + 1;
  const std::size_t total = std::max(2 * kUnit, (needed + kUnit - 1) / kUnit * kUnit);
  text.resize(total - kPreamble - 1, ' ');
  text += '\n';
  PLIMSOLL_CHECK(text.size() <= 0xFFFF, "a shape too long for version 1.0");
  std::string header("\x93NUMPY\x01\x00", 8);
  header += static_cast<char>(text.size() & 0xFF);
  header += static_cast<char>(text.size() >> 8);
  return header + text;
}

Result<NpyFields> parse_npy_fields(std::span<const std::byte> head, const std::string& name) {
  NpyFields read;
  PLIMSOLL_TRY(const std::string_view text, header_text(head, name, read.data_offset));
  auto fields = DictScanner(text).scan();
  if (!fields) {
    return fail(ErrorCode::kCorrupt, fmt::format("{}: malformed .npy header", name));
  }
  read.descr = *std::move(fields->descr);
  read.fortran_order = *fields->fortran_order;
  read.shape = *std::move(fields->shape);
  return read;
}

}  // namespace plimsoll
