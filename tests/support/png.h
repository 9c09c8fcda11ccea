// SPDX-License-Identifier: Apache-2.0
//
// PNGs written chunk by chunk, without a library.
//
// Threads: pure functions.   Memory: the text of an image.
#pragma once

#include <cstdint>
#include <string>

namespace plimsoll::test {

// A number, big-endian.
inline std::string big(std::uint32_t value) {
  std::string text;
  for (int shift = 24; shift >= 0; shift -= 8) {
    text += static_cast<char>(value >> shift);
  }
  return text;
}

inline std::uint32_t crc32(const std::string& text) {
  std::uint32_t crc = 0xFFFFFFFF;
  for (const char c : text) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) {
      crc = crc >> 1 ^ ((crc & 1) != 0 ? 0xEDB88320 : 0);
    }
  }
  return ~crc;
}

inline std::string chunk(const std::string& name, const std::string& body) {
  return big(static_cast<std::uint32_t>(body.size())) + name + body + big(crc32(name + body));
}

// zlib's form, without packing.
inline std::string stored(const std::string& data) {
  std::uint32_t a = 1;
  std::uint32_t b = 0;
  for (const char c : data) {
    a = (a + static_cast<unsigned char>(c)) % 65521;
    b = (b + a) % 65521;
  }
  const auto size = static_cast<std::uint32_t>(data.size());
  std::string text("\x78\x01\x01", 3);
  for (const std::uint32_t value : {size, ~size}) {
    text += static_cast<char>(value);
    text += static_cast<char>(value >> 8);
  }
  return text + data + big(b << 16 | a);
}

// EXIF that says one thing.
inline std::string exif(int orientation) {
  return std::string("II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0", 18) +
         static_cast<char>(orientation) + std::string(7, '\0');
}

struct Png {
  std::uint32_t width{3};
  std::uint32_t height{2};
  int depth{8};
  int color{2};
  std::string rows{};   // Without filter bytes.
  std::string extra{};  // Chunks before the pixels.
  [[nodiscard]] std::string text() const {
    const std::size_t row = rows.size() / height;
    std::string filtered;
    for (std::size_t y = 0; y < height; ++y) {
      filtered += std::string(1, '\0') + rows.substr(y * row, row);
    }
    return "\x89PNG\r\n\x1A\n" +
           chunk("IHDR", big(width) + big(height) + static_cast<char>(depth) +
                             static_cast<char>(color) + std::string(3, '\0')) +
           extra + chunk("IDAT", stored(filtered)) + chunk("IEND", "");
  }
};

}  // namespace plimsoll::test
