// SPDX-License-Identifier: Apache-2.0
#include "base/utf8.h"

#include <algorithm>
#include <array>
#include <cstdint>

namespace plimsoll {

bool is_utf8(std::string_view text) noexcept {
  constexpr std::array<std::uint32_t, 4> kLeast{0, 0x80, 0x800, 0x10000};  // By bytes that follow.
  for (std::size_t at = 0; at < text.size();) {
    const auto lead = static_cast<unsigned char>(text[at++]);
    const std::size_t more = lead < 0x80          ? 0
                             : lead >> 5U == 0x06 ? 1
                             : lead >> 4U == 0x0E ? 2
                             : lead >> 3U == 0x1E ? 3
                                                  : kLeast.size();
    if (more == kLeast.size() || text.size() - at < more) {
      return false;
    }
    std::uint32_t code = more == 0 ? lead : lead & (0x3FU >> more);
    for (const std::size_t end = at + more; at < end; ++at) {
      const auto next = static_cast<unsigned char>(text[at]);
      if (next >> 6U != 0x02) {
        return false;
      }
      code = code << 6U | (next & 0x3FU);
    }
    if (code < kLeast[more] || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) {
      return false;
    }
  }
  return true;
}

std::string as_utf8(std::string text) {
  if (is_utf8(text)) {
    return text;
  }
  constexpr std::string_view kDigits = "0123456789abcdef";
  constexpr std::size_t kLongest = 4;
  std::string told;
  for (std::string_view left = text; !left.empty();) {
    std::size_t good = 1;
    while (good <= std::min(kLongest, left.size()) && !is_utf8(left.substr(0, good))) {
      ++good;
    }
    if (good <= std::min(kLongest, left.size())) {
      told += left.substr(0, good);
      left.remove_prefix(good);
    } else {
      const auto byte = static_cast<unsigned char>(left.front());
      told += {'\\', 'x', kDigits[byte >> 4U], kDigits[byte & 0xFU]};
      left.remove_prefix(1);
    }
  }
  return told;
}

}  // namespace plimsoll
