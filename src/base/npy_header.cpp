// SPDX-License-Identifier: Apache-2.0
#include "base/npy_header.h"

#include <algorithm>

#include <fmt/format.h>

#include "base/check.h"

namespace plimsoll {

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

}  // namespace plimsoll
