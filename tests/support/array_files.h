// SPDX-License-Identifier: Apache-2.0
//
// Writes .npy files and random damage for tests.
//
// Threads: pure functions over files.   Memory: the text of one file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace plimsoll::test {

/// A version 1 .npy header as NumPy writes it, padded to 64.
inline std::string npy_header(const std::string& descr, const std::vector<std::int64_t>& shape) {
  std::string dict = "{'descr': '" + descr + "', 'fortran_order': False, 'shape': (";
  for (const std::int64_t extent : shape) {
    dict += std::to_string(extent) + ", ";
  }
  dict += "), }";
  dict.resize((dict.size() + 10 + 1 + 63) / 64 * 64 - 11, ' ');
  dict += '\n';
  std::string head("\x93NUMPY\x01\x00", 8);
  head += static_cast<char>(dict.size() & 0xFF);
  head += static_cast<char>(dict.size() >> 8);
  return head + dict;
}

template <class T>
std::string bytes_text(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

inline void spill(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

inline std::string slurp(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

template <class T>
void write_npy(const std::filesystem::path& path, const std::string& descr,
               const std::vector<std::int64_t>& shape, const std::vector<T>& values) {
  spill(path, npy_header(descr, shape) + bytes_text(values));
}

/// One to four changes: a flipped bit, a repeated or removed run, a cut, a telling character.
inline std::string damage(std::string text, std::mt19937_64& random) {
  for (std::uint64_t n = 1 + random() % 4; n > 0 && !text.empty(); --n) {
    const std::size_t at = random() % text.size();
    switch (random() % 5) {
      case 0:
        text[at] = static_cast<char>(text[at] ^ (1 << random() % 8));
        break;
      case 1:
        text.insert(at, text.substr(random() % text.size(), random() % 40));
        break;
      case 2:
        text.erase(at, 1 + random() % 30);
        break;
      case 3:
        text.resize(at);
        break;
      default:
        text[at] = "0123456789{}[]()\",:'-e.\xFF"[random() % 24];
    }
  }
  return text;
}

}  // namespace plimsoll::test
