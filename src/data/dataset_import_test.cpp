// SPDX-License-Identifier: Apache-2.0
//
// Goal: shards of any division become one store, paired by row; whatever is wrong names its file
// and row and leaves nothing behind.
#include "plimsoll/dataset_import.h"

#include <limits>

#include <gtest/gtest.h>

#include "data/column_shards.h"
#include "data/safetensors.h"
#include "tests/support/array_files.h"
#include "tests/support/feature_set.h"

namespace plimsoll {
namespace {

using test::ScratchDirectory;
namespace fs = std::filesystem;

// Value of element j of row r of a column.
float value(int column, std::int64_t row, std::int64_t j) {
  return static_cast<float>(column * 1'000'000 + row * 10 + j);
}

std::vector<float> rows_of(int column, std::int64_t first, std::int64_t rows, std::int64_t width) {
  std::vector<float> values;
  for (std::int64_t r = first; r < first + rows; ++r) {
    for (std::int64_t j = 0; j < width; ++j) {
      values.push_back(value(column, r, j));
    }
  }
  return values;
}

// 40 rows: images in two uneven .npy shards and a .safetensors, texts in one file.
struct Shards {
  Shards() {
    fs::create_directory(scratch / "image");
    test::write_npy(scratch / "image" / "part2.npy", "<f4", {7, 3}, rows_of(0, 0, 7, 3));
    test::write_npy(scratch / "image" / "part10.npy", "<f4", {20, 3}, rows_of(0, 7, 20, 3));
    auto writer = SafetensorsWriter::create(
                      scratch / "image" / "part11.safetensors",
                      {{"mask", DType::kUint8, {13}}, {"image_features", DType::kFloat32, {13, 3}}})
                      .or_throw();
    writer.write(std::vector<std::byte>(13)).or_throw();
    const auto tail = rows_of(0, 27, 13, 3);
    writer.write(std::as_bytes(std::span(tail))).or_throw();
    writer.finish().or_throw();
    test::write_npy(scratch / "text.npy", "<f4", {40, 2}, rows_of(1, 0, 40, 2));
    for (std::int64_t i = 0; i < 40; ++i) {
      ids.push_back((i * 17 % 40) * 1'000'003 - 5);
      groups.push_back(i / 5);
    }
    test::write_npy(scratch / "ids.npy", "<i8", {40}, ids);
    test::write_npy(scratch / "groups.npy", "<i8", {40}, groups);
  }
  [[nodiscard]] CosirImportOptions options() const {
    return {.image_features = {scratch / "image"},
            .text_features = {scratch / "text.npy"},
            .ids = scratch / "ids.npy",
            .groups = scratch / "groups.npy",
            .out = scratch / "out"};
  }
  // The error of an import, which must have left nothing.
  std::string refusal(const CosirImportOptions& changed) {
    const auto result = import_cosir(governor, changed, nullptr);
    EXPECT_FALSE(result);
    EXPECT_FALSE(fs::exists(scratch / "out"));
    EXPECT_FALSE(fs::exists(scratch / "out.partial"));
    EXPECT_EQ(governor.state().leased_bytes, 0);
    return result ? "" : result.error().to_string();
  }
  [[nodiscard]] std::string at(const std::string& name) const { return (scratch / name).string(); }

  ScratchDirectory scratch;
  Governor governor{test::governor_of()};
  std::vector<std::int64_t> ids;
  std::vector<std::int64_t> groups;
};

TEST(ImportTest, JoinsShardsInNameOrderAndPairsThemById) {
  Shards shards;
  std::int64_t seen = 0;
  const auto info = import_cosir(shards.governor, shards.options(), [&](auto done, auto total) {
                      seen = done;
                      return total == 40;
                    }).or_throw();
  EXPECT_EQ(seen, 40);
  EXPECT_EQ(info.rows, 40);
  EXPECT_EQ(info.groups, 8);
  EXPECT_EQ(info.uniform_group, 5);
  EXPECT_FALSE(info.dense_ids);
  auto store =
      FeatureStore::open(shards.governor, {.directory = shards.scratch / "out"}).or_throw();
  std::vector<float> image(40 * 3);
  std::vector<float> text(40 * 2);
  const std::vector<std::span<std::byte>> out{std::as_writable_bytes(std::span(text)),
                                              std::as_writable_bytes(std::span(image))};
  std::vector<std::int64_t> request(shards.ids.rbegin(), shards.ids.rend());
  ASSERT_TRUE(store.read(request, std::vector<int>{1, 0}, out));
  for (std::size_t i = 0; i < 40; ++i) {
    const auto row = static_cast<std::int64_t>(39 - i);
    for (std::int64_t j = 0; j < 3; ++j) {
      ASSERT_EQ(image[i * 3 + static_cast<std::size_t>(j)], value(0, row, j));
    }
    for (std::int64_t j = 0; j < 2; ++j) {
      ASSERT_EQ(text[i * 2 + static_cast<std::size_t>(j)], value(1, row, j));
    }
  }
}

TEST(ImportTest, KeepsHalfPrecisionAndNumbersRowsWithoutIds) {
  Shards shards;
  test::write_npy(shards.scratch / "half.npy", "<f2", {40, 2}, std::vector<std::uint16_t>(80, 7));
  CosirImportOptions options = shards.options();
  options.text_features = {shards.scratch / "half.npy"};
  options.ids.clear();
  options.groups.clear();
  const auto info = import_cosir(shards.governor, options, nullptr).or_throw();
  EXPECT_EQ(info.columns[1].dtype, DType::kFloat16);
  EXPECT_EQ(info.columns[0].dtype, DType::kFloat32);
  EXPECT_TRUE(info.dense_ids);
  EXPECT_EQ(info.groups, 0);
}

TEST(ImportTest, NamesFileAndRowOfANonFiniteValue) {
  Shards shards;
  auto values = rows_of(0, 7, 20, 3);
  values[4 * 3 + 1] = std::numeric_limits<float>::quiet_NaN();
  test::write_npy(shards.scratch / "image" / "part10.npy", "<f4", {20, 3}, values);
  EXPECT_NE(shards.refusal(shards.options())
                .find(shards.at("image/part10.npy") + ": row 4 holds a NaN or an infinity"),
            std::string::npos);
}

TEST(ImportTest, NamesBothSidesWhenRowCountsDiffer) {
  Shards shards;
  test::write_npy(shards.scratch / "text.npy", "<f4", {39, 2}, rows_of(1, 0, 39, 2));
  const std::string text = shards.refusal(shards.options());
  EXPECT_NE(text.find("40 rows of image features (" + shards.at("image/part2.npy") +
                      " and 2 more), but 39 of text features (" + shards.at("text.npy") + ")"),
            std::string::npos)
      << text;
}

TEST(ImportTest, RefusesWhatDoesNotFit) {
  Shards shards;
  const auto expect = [&](const CosirImportOptions& options, const std::string& part) {
    const std::string text = shards.refusal(options);
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  CosirImportOptions options = shards.options();
  options.text_features = {shards.scratch / "gone.npy"};
  expect(options, shards.at("gone.npy") + ": no such file");
  options.text_features = {shards.scratch / "ids.npy"};
  expect(options, "text features must be float32 or float16 of shape [rows, width], not int64");
  options.text_features = {};
  expect(options, "no file is named for text");
  options = shards.options();
  options.ids = shards.scratch / "text.npy";
  expect(options, "ids must be int64 of shape [rows], not float32 with rows of [2]");
  options = shards.options();
  shards.ids[30] = shards.ids[3];
  test::write_npy(shards.scratch / "ids.npy", "<i8", {40}, shards.ids);
  expect(options, std::to_string(shards.ids[3]));
  test::write_npy(shards.scratch / "ids.npy", "<i8", {41}, std::vector<std::int64_t>(41));
  expect(options, "but 41 of ids (" + shards.at("ids.npy") + ")");
  options.ids.clear();
  shards.groups[39] = 0;
  test::write_npy(shards.scratch / "groups.npy", "<i8", {40}, shards.groups);
  expect(options, "a group returns");
  options.groups.clear();
  test::write_npy(shards.scratch / "image" / "part12.npy", "<f4", {1, 4}, rows_of(0, 0, 1, 4));
  expect(options, shards.at("image/part12.npy") + ": rows of float32 [4], but ");
  test::write_npy(shards.scratch / "image" / "part12.npy", "<f4", {9, 3}, rows_of(0, 0, 8, 3));
  expect(options, shards.at("image/part12.npy") + ": truncated: it promises 9 rows");
}

TEST(ImportTest, CancelsCleanly) {
  Shards shards;
  const auto cancelled =
      import_cosir(shards.governor, shards.options(), [](auto, auto) { return false; });
  EXPECT_FALSE(cancelled);
  EXPECT_FALSE(fs::exists(shards.scratch / "out"));
  EXPECT_FALSE(fs::exists(shards.scratch / "out.partial"));
}

TEST(ImportTest, RefusesASetLargerThanTheDisk) {
  Shards shards;
  shards.governor = Governor::create({.memory_limit = "2GiB", .disk_limit = "1KB"}).or_throw();
  EXPECT_NE(shards.refusal(shards.options()).find("disk limit"), std::string::npos);
}

TEST(ColumnShardsTest, OrdersNumbersInNamesAsNumbers) {
  EXPECT_TRUE(name_before("part2.npy", "part10.npy"));
  EXPECT_FALSE(name_before("part10.npy", "part2.npy"));
  EXPECT_TRUE(name_before("a2b3", "a2b20"));
  EXPECT_TRUE(name_before("a", "b"));
  EXPECT_TRUE(name_before("a", "a1"));
  EXPECT_FALSE(name_before("a01", "a1"));
  EXPECT_FALSE(name_before("x", "x"));
}

}  // namespace
}  // namespace plimsoll
