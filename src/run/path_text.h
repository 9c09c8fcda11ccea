// SPDX-License-Identifier: Apache-2.0
//
// is_path_text: whether a path may be written into run.toml and the JSON files of a run.
// cut_text: of a text that is too long to be shown.
//
// Threads: pure functions.   Memory: none.
#pragma once

#include <cstddef>
#include <string_view>

#include "base/utf8.h"

namespace plimsoll {

[[nodiscard]] inline bool is_path_text(std::string_view path) noexcept {
  return is_utf8(path);
}

/// The beginning of UTF-8, of so many bytes at most, that ends within no character.
[[nodiscard]] inline std::string_view cut_text(std::string_view text, std::size_t most) noexcept {
  std::size_t end = text.size() <= most ? text.size() : most;
  while (end > 0 && end < text.size() && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) {
    --end;
  }
  return text.substr(0, end);
}

}  // namespace plimsoll
