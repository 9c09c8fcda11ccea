// SPDX-License-Identifier: Apache-2.0
#include "base/crc32c.h"

#include <array>
#include <cstring>

#include "base/crc32c_paths.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace plimsoll {

namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78U;  // 0x1EDC6F41, bits reflected.

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1U) != 0 ? kPolynomial : 0U);
    }
    table[i] = crc;
  }
  return table;
}

constexpr std::array<std::uint32_t, 256> kTable = make_table();

// The instruction answers after three cycles and may begin every cycle, so three lanes run side by
// side. 3 x 168 bytes just fit a row of 512; longer lanes gain a tenth on pages and lose the rows.
constexpr std::size_t kLane = 168;

// What becomes of a register over kLane zero bytes. It is linear, so a table per byte of it does.
using ShiftTables = std::array<std::array<std::uint32_t, 256>, 4>;

constexpr ShiftTables make_shift_tables() {
  std::array<std::uint32_t, 32> by_bit{};
  for (std::uint32_t bit = 0; bit < 32; ++bit) {
    std::uint32_t crc = 1U << bit;
    for (std::size_t i = 0; i < kLane; ++i) {
      crc = (crc >> 8) ^ kTable[crc & 0xFFU];
    }
    by_bit[bit] = crc;
  }
  ShiftTables tables{};
  for (std::uint32_t byte = 0; byte < 4; ++byte) {
    for (std::uint32_t value = 0; value < 256; ++value) {
      for (std::uint32_t bit = 0; bit < 8; ++bit) {
        tables[byte][value] ^= ((value >> bit) & 1U) != 0 ? by_bit[8 * byte + bit] : 0U;
      }
    }
  }
  return tables;
}

constexpr ShiftTables kShift = make_shift_tables();

[[maybe_unused]] std::uint64_t shifted_by_lane(std::uint64_t crc) noexcept {
  return kShift[0][crc & 0xFFU] ^ kShift[1][(crc >> 8) & 0xFFU] ^ kShift[2][(crc >> 16) & 0xFFU] ^
         kShift[3][(crc >> 24) & 0xFFU];
}

[[maybe_unused]] std::uint64_t word_at(const std::byte* at) noexcept {
  std::uint64_t word = 0;
  std::memcpy(&word, at, sizeof word);
  return word;
}

}  // namespace

std::uint32_t crc32c_by_table(std::span<const std::byte> bytes, std::uint32_t seed) noexcept {
  std::uint32_t crc = ~seed;
  for (const std::byte byte : bytes) {
    crc = (crc >> 8) ^ kTable[(crc ^ static_cast<std::uint32_t>(byte)) & 0xFFU];
  }
  return ~crc;
}

#if defined(__x86_64__)

bool crc32c_has_instruction() noexcept {
  return __builtin_cpu_supports("sse4.2") != 0;
}

__attribute__((target("sse4.2"))) std::uint32_t crc32c_by_instruction(
    std::span<const std::byte> bytes, std::uint32_t seed) noexcept {
  const std::byte* at = bytes.data();
  std::size_t left = bytes.size();
  std::uint64_t crc = static_cast<std::uint32_t>(~seed);
  for (; left >= 3 * kLane; left -= 3 * kLane, at += 3 * kLane) {
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (std::size_t i = 0; i < kLane; i += 8) {
      crc = _mm_crc32_u64(crc, word_at(at + i));
      second = _mm_crc32_u64(second, word_at(at + kLane + i));
      third = _mm_crc32_u64(third, word_at(at + 2 * kLane + i));
    }
    crc = shifted_by_lane(shifted_by_lane(crc) ^ second) ^ third;
  }
  for (; left >= 8; left -= 8, at += 8) {
    crc = _mm_crc32_u64(crc, word_at(at));
  }
  auto narrow = static_cast<std::uint32_t>(crc);
  for (; left > 0; --left, ++at) {
    narrow = _mm_crc32_u8(narrow, static_cast<unsigned char>(*at));
  }
  return ~narrow;
}

#else

bool crc32c_has_instruction() noexcept {
  return false;
}

std::uint32_t crc32c_by_instruction(std::span<const std::byte> bytes, std::uint32_t seed) noexcept {
  return crc32c_by_table(bytes, seed);
}

#endif

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t seed) noexcept {
  static const auto path = crc32c_has_instruction() ? crc32c_by_instruction : crc32c_by_table;
  return path(bytes, seed);
}

}  // namespace plimsoll
