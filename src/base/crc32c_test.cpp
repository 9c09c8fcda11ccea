// SPDX-License-Identifier: Apache-2.0
//
// The known value, and the two paths against each other over all short lengths and alignments.
#include <gtest/gtest.h>

#include <cstring>
#include <string_view>
#include <vector>

#include "base/crc32c.h"
#include "base/crc32c_paths.h"
#include "base/philox.h"

namespace plimsoll {
namespace {

std::vector<std::byte> random_bytes(std::size_t count, std::uint64_t seed) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) {
    bytes[i] = static_cast<std::byte>(philox(seed, 0, i)[0]);
  }
  return bytes;
}

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

TEST(Crc32cTest, GivesTheCheckValueOfRfc3720) {
  EXPECT_EQ(crc32c(bytes_of("123456789")), 0xE3069283U);
  EXPECT_EQ(crc32c_by_table(bytes_of("123456789"), 0), 0xE3069283U);
  const std::vector<std::byte> zeros(32);
  EXPECT_EQ(crc32c(zeros), 0x8A9136AAU);  // RFC 3720, B.4: 32 bytes of zeroes.
  const std::vector<std::byte> ones(32, std::byte{0xFF});
  EXPECT_EQ(crc32c(ones), 0x62A8AB43U);
}

TEST(Crc32cTest, OfNothingIsTheSeed) {
  EXPECT_EQ(crc32c({}), 0U);
  EXPECT_EQ(crc32c({}, 0x1234U), 0x1234U);
}

TEST(Crc32cTest, ComputesTheSameByInstructionAndByTable) {
  if (!crc32c_has_instruction()) {
    GTEST_SKIP() << "this CPU has no CRC-32C instruction; the table is the only path";
  }
  constexpr std::uint64_t kSeed = 11;
  const auto bytes = random_bytes(2200, kSeed);
  for (std::size_t length = 0; length < 2100; ++length) {
    const auto part = std::span(bytes).subspan(length % 17, length);
    const auto start = static_cast<std::uint32_t>(length * 2654435761U);
    ASSERT_EQ(crc32c_by_instruction(part, start), crc32c_by_table(part, start))
        << "length " << length << ", seed " << kSeed;
  }
}

TEST(Crc32cTest, ContinuesFromAnEarlierCrc) {
  const auto bytes = random_bytes(5000, 3);
  const std::uint32_t whole = crc32c(bytes);
  for (std::size_t cut = 0; cut <= bytes.size(); cut += 37) {
    const auto all = std::span(bytes);
    ASSERT_EQ(crc32c(all.subspan(cut), crc32c(all.first(cut))), whole) << "cut at " << cut;
  }
}

TEST(Crc32cTest, ChangesWithEveryFlippedBit) {
  auto bytes = random_bytes(600, 5);
  const std::uint32_t before = crc32c(bytes);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      bytes[i] ^= static_cast<std::byte>(1 << bit);
      ASSERT_NE(crc32c(bytes), before) << "byte " << i << " bit " << bit;
      bytes[i] ^= static_cast<std::byte>(1 << bit);
    }
  }
}

}  // namespace
}  // namespace plimsoll
