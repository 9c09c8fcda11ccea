// SPDX-License-Identifier: Apache-2.0
//
// Goal: pages waste little, and no flipped bit, swapped page or torn superblock passes.
#include "store/embedding_format.h"

#include <cstring>
#include <fstream>
#include <random>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

namespace plimsoll {
namespace {

TEST(TableShapeTest, WastesAtMostAQuarterOfAPage) {
  for (std::int64_t dim = 1; dim < 6000; dim += 1 + dim / 50) {
    for (const std::int64_t slots : {0, 1, 2}) {
      const bool halves = dim % 3 == 0;
      const TableShape shape =
          table_shape(1'000'003, dim, slots, 0, halves ? RowDType::kBFloat16 : RowDType::kFloat32);
      EXPECT_EQ(shape.page_bytes % 4096, 0);
      EXPECT_EQ(shape.record_bytes % 8, 0);
      EXPECT_EQ(shape.weight_bytes() % 4, 0);
      const std::int64_t least = 16 + dim * (halves ? 2 : 4) + 4 * dim * slots;
      EXPECT_GE(shape.record_bytes, least);
      EXPECT_LT(shape.record_bytes, least + 10);
      const auto used = 32 + shape.rows_per_page * shape.record_bytes;
      EXPECT_LE(used, shape.page_bytes);
      EXPECT_LE(4 * (shape.page_bytes - used), shape.page_bytes) << dim << " " << slots;
      EXPECT_GE(shape.pages * shape.rows_per_page, shape.rows);
      EXPECT_GT(shape.rows_in_page(shape.pages - 1), 0);
    }
  }
}

std::vector<std::byte> some_page(const TableShape& shape, std::uint64_t seed) {
  std::vector<std::byte> page(static_cast<std::size_t>(shape.page_bytes));
  std::mt19937_64 random(seed);
  const auto used = static_cast<std::size_t>(32 + shape.rows_per_page * shape.record_bytes);
  for (std::size_t i = 32; i < used; ++i) {
    page[i] = static_cast<std::byte>(random());
  }
  return page;
}

TEST(PageTest, EveryFlippedBitOfARowOrTheHeaderIsSeen) {
  const TableShape shape = table_shape(100, 30, 2);
  auto page = some_page(shape, 1);
  const auto crc = seal_page(shape, 77, 5, page);
  ASSERT_TRUE(page_is_sound(shape, 77, 5, crc, page));
  const auto used = static_cast<std::size_t>(32 + shape.rows_per_page * shape.record_bytes);
  for (std::size_t bit = 0; bit < used * 8; ++bit) {
    if (bit / 8 >= 28 && bit / 8 < 32) {
      continue;  // Reserved bytes: covered too, below.
    }
    page[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    ASSERT_FALSE(page_is_sound(shape, 77, 5, crc, page)) << "bit " << bit;
    page[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
  }
  page[28] = std::byte{1};
  EXPECT_FALSE(page_is_sound(shape, 77, 5, crc, page));
}

TEST(PageTest, AnotherPageTableOrVersionIsSeen) {
  const TableShape shape = table_shape(100, 30, 2);
  auto page = some_page(shape, 1);
  const auto crc = seal_page(shape, 77, 5, page);
  EXPECT_FALSE(page_is_sound(shape, 78, 5, crc, page));
  EXPECT_FALSE(page_is_sound(shape, 77, 6, crc, page));
  auto older = some_page(shape, 2);
  seal_page(shape, 77, 5, older);
  EXPECT_FALSE(page_is_sound(shape, 77, 5, crc, older)) << "a stale block passed for a new one";
}

class SuperFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ =
        std::filesystem::temp_directory_path() / ("plimsoll-super-" + std::to_string(::getpid()));
    SuperFile::create(path_).or_throw();
  }
  void TearDown() override { std::filesystem::remove(path_); }
  void damage(std::int64_t at) {
    std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at);
    const char byte = static_cast<char>(file.get());
    file.seekp(at);
    file.put(static_cast<char>(byte ^ 4));
  }
  SuperFile::Slot slot(std::size_t number) {
    return SuperFile::open(path_, false).or_throw().slots()[number];
  }
  std::filesystem::path path_;
};

TEST_F(SuperFileTest, KeepsTwoSlotsApart) {
  auto super = SuperFile::open(path_, true).or_throw();
  EXPECT_EQ(super.slots()[0].state, SuperFile::SlotState::kEmpty);
  super.write(1, {.step = 5, .fingerprint = 9, .pages = 3, .blocks_used = 2, .map_crc = 1})
      .or_throw();
  EXPECT_EQ(slot(0).state, SuperFile::SlotState::kEmpty);
  EXPECT_EQ(slot(1).state, SuperFile::SlotState::kValid);
  EXPECT_EQ(slot(1).superblock.step, 5);
  super.clear(1).or_throw();
  EXPECT_EQ(slot(1).state, SuperFile::SlotState::kEmpty);
}

TEST_F(SuperFileTest, SurvivesDamageToOneCopyAndReportsDamageToBoth) {
  auto super = SuperFile::open(path_, true).or_throw();
  super.write(0, {.step = 5}).or_throw();
  damage(16);
  EXPECT_EQ(slot(0).state, SuperFile::SlotState::kValid);
  damage(7 * 512 + 16);
  EXPECT_EQ(slot(0).state, SuperFile::SlotState::kDamaged);
}

}  // namespace
}  // namespace plimsoll
