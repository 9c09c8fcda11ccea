// SPDX-License-Identifier: Apache-2.0
//
// Goal: rows and pixels are those that were written, in an order that depends on nothing but the
// options, and no more is held than was leased. Method: an image is a function of its number, and
// is checked pixel by pixel; what every writer of rows does is tested in token_set_test.cpp.
#include "plimsoll/image_set.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "base/check.h"
#include "plimsoll/image_batches.h"
#include "tests/support/array_files.h"
#include "tests/support/feature_set.h"
#include "tests/support/png.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

std::int64_t images_of(std::int64_t row) {
  return row % 4;  // Every fourth has none.
}

test::Png picture(std::int64_t row, std::int64_t image) {
  test::Png png{.width = static_cast<std::uint32_t>(1 + row % 7),
                .height = static_cast<std::uint32_t>(2 + image)};
  for (std::uint32_t i = 0; i < png.width * png.height * 3; ++i) {
    png.rows += static_cast<char>(row * 31 + image * 7 + i);
  }
  return png;
}

class ImageSetTest : public ::testing::Test {
 protected:
  static constexpr std::int64_t kRows = 30;

  Result<void> write(const fs::path& path) {
    PLIMSOLL_TRY(auto writer, ImageWriter::open(governor_, {.path = path, .fingerprint = "f"}));
    for (std::int64_t row = writer.info().rows; !writer.whole() && row < kRows; ++row) {
      std::vector<std::string> texts;
      for (std::int64_t i = 0; i < images_of(row); ++i) {
        texts.push_back(picture(row, i).text());
      }
      std::vector<std::span<const std::byte>> images;
      for (const std::string& text : texts) {
        images.push_back(std::as_bytes(std::span(text)));
      }
      PLIMSOLL_TRY_VOID(writer.append(std::to_string(row), images));
      PLIMSOLL_TRY_VOID(writer.commit("here"));
    }
    return writer.whole() ? Result<void>{} : writer.finish("{}");
  }

  ImageSet made() {
    write(scratch_ / "set").or_throw();
    return ImageSet::open(scratch_ / "set").or_throw();
  }

  void expect_row(const ImageBatchRow& row) {
    EXPECT_EQ(row.messages, std::to_string(row.row));
    ASSERT_EQ(static_cast<std::int64_t>(row.pixels.size()), images_of(row.row));
    for (std::size_t i = 0; i < row.pixels.size(); ++i) {
      const std::string pixels(row.pixels[i].begin(), row.pixels[i].end());
      EXPECT_EQ(pixels, picture(row.row, static_cast<std::int64_t>(i)).rows);
    }
  }

  test::ScratchDirectory scratch_;
  Governor governor_{Governor::create({.memory_limit = "1GiB"}).or_throw()};
};

TEST_F(ImageSetTest, RowsAndImagesComeBackAsTheyWere) {
  const ImageSet set = made();
  EXPECT_EQ(set.rows(), kRows);
  set.verify({}).or_throw();
  std::int64_t images = 0;
  std::int64_t encoded = 0;
  for (std::int64_t row = 0; row < kRows; ++row) {
    const ImageRow found = set.row(row).or_throw();
    EXPECT_EQ(found.messages, std::to_string(row));
    for (const ImagePlace& place : found.images) {
      std::vector<std::byte> bytes(static_cast<std::size_t>(place.bytes));
      set.read(place, bytes).or_throw();
      const std::string text = picture(row, &place - found.images.data()).text();
      EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()), text);
      EXPECT_EQ(place.width, 1 + row % 7);
      ++images;
      encoded += place.bytes;
    }
  }
  EXPECT_EQ(set.info().images, images);
  EXPECT_EQ(set.info().encoded_bytes, encoded);
  EXPECT_FALSE(set.row(kRows));
}

TEST_F(ImageSetTest, RowsOfOtherSetsAreAppendedToTheBytesThatTheyHadAtOnce) {
  const ImageSet set = made();
  const ImageWriterOptions options{.path = scratch_ / "joined", .fingerprint = "f"};
  for (const std::int64_t end : {std::int64_t{0}, std::int64_t{17}, kRows}) {
    auto writer = ImageWriter::open(governor_, options).or_throw();
    EXPECT_GE(writer.append_rows(set, writer.info().rows, end).or_throw(), 0);
    writer.commit("here").or_throw();
  }
  auto writer = ImageWriter::open(governor_, options).or_throw();
  EXPECT_FALSE(writer.append_rows(set, kRows, kRows + 1));
  writer.finish("{}").or_throw();
  EXPECT_EQ(test::slurp(options.path), test::slurp(scratch_ / "set"));
}

TEST_F(ImageSetTest, ADamagedByteIsFoundWhereverItIs) {
  write(scratch_ / "set").or_throw();
  const std::string good = test::slurp(scratch_ / "set");
  std::size_t index_at = 0;
  std::memcpy(&index_at, good.data() + 56, sizeof(index_at));
  for (std::size_t at = 0; at < good.size(); at += at < 200 || at > 4096 ? 13 : 97) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 4);
    test::spill(scratch_ / "bad", bad);
    const auto set = ImageSet::open(scratch_ / "bad");
    const bool padding = at < index_at && at >= index_at - 15;  // Zeros that nobody reads.
    EXPECT_TRUE(!set || !set->verify({}) || padding) << at;
  }
}

TEST_F(ImageSetTest, ARowWithABadImageAddsNothing) {
  auto writer =
      ImageWriter::open(governor_, {.path = scratch_ / "set", .fingerprint = "f"}).or_throw();
  const std::string good = picture(1, 0).text();
  const std::string bad = good.substr(0, good.size() - 9);
  const std::array both{std::as_bytes(std::span(good)), std::as_bytes(std::span(bad))};
  const auto added = writer.append("1", both);
  ASSERT_FALSE(added);
  EXPECT_NE(added.error().to_string().find("image 2 of 2: damaged image: the file is truncated"),
            std::string::npos)
      << added.error().to_string();
  writer.append("2", std::span(both).first(1)).or_throw();
  EXPECT_EQ(writer.info().rows, 1);
  EXPECT_EQ(writer.info().images, 1);
  writer.finish("{}").or_throw();
  const ImageSet set = ImageSet::open(scratch_ / "set").or_throw();
  EXPECT_EQ(set.row(0).or_throw().messages, "2");
  set.verify({}).or_throw();
}

TEST_F(ImageSetTest, BatchesAreTheSameForAnyThreadsAndQueue) {
  const ImageSet set = made();
  std::vector<std::vector<std::int64_t>> orders;
  for (const auto& [threads, queue_bytes] :
       {std::pair(1, std::int64_t{0}), std::pair(3, std::int64_t{300}),
        std::pair(2, std::int64_t{1} << 30)}) {
    auto batches = ImageBatches::open(governor_, &set,
                                      {.batch_size = 4,
                                       .seed = 7,
                                       .held_out = 3,
                                       .threads = threads,
                                       .queue_bytes = queue_bytes})
                       .or_throw();
    std::vector<std::int64_t>& order = orders.emplace_back();
    for (int epoch = 0; epoch < 3; ++epoch) {
      std::set<std::int64_t> seen;
      for (bool ended = false; !ended;) {
        const ImageBatch batch = batches.next().or_throw();
        EXPECT_EQ(batch.place.epoch, epoch);
        for (const ImageBatchRow& row : batch.rows) {
          expect_row(row);
          order.push_back(row.row);
          EXPECT_TRUE(seen.insert(row.row).second);
        }
        ended = batch.ends_epoch;
      }
      EXPECT_EQ(static_cast<std::int64_t>(seen.size()), kRows - 3);
    }
  }
  EXPECT_EQ(orders[0], orders[1]);
  EXPECT_EQ(orders[0], orders[2]);
}

TEST_F(ImageSetTest, BatchesGoOnWhereTheyWere) {
  const ImageSet set = made();
  const ImageBatchesOptions options{.batch_size = 4, .seed = 3, .threads = 2};
  auto batches = ImageBatches::open(governor_, &set, options).or_throw();
  for (int i = 0; i < 5; ++i) {
    static_cast<void>(batches.next().or_throw());
  }
  const ImagesPlace place = batches.place();
  std::vector<std::int64_t> wanted;
  for (int i = 0; i < 6; ++i) {
    for (const ImageBatchRow& row : batches.next().or_throw().rows) {
      wanted.push_back(row.row);
    }
  }
  batches.seek(place).or_throw();
  std::vector<std::int64_t> got;
  for (int i = 0; i < 6; ++i) {
    for (const ImageBatchRow& row : batches.next().or_throw().rows) {
      got.push_back(row.row);
      expect_row(row);
    }
  }
  EXPECT_EQ(got, wanted);
  EXPECT_FALSE(batches.seek({.epoch = 0, .position = kRows}));
}

TEST_F(ImageSetTest, PixelsAreLeasedAsLongAsTheyAreHeldAndNoLonger) {
  const ImageSet set = made();
  const auto leased = [&] { return governor_.state().leased_bytes; };
  std::shared_ptr<const void> held;
  std::span<const std::uint8_t> pixels;
  {
    auto batches =
        ImageBatches::open(governor_, &set, {.batch_size = 8, .shuffle = false}).or_throw();
    const ImageBatch batch = batches.next().or_throw();
    held = batch.pixels;
    pixels = batch.rows[1].pixels[0];
  }
  EXPECT_EQ(leased(), 4096);
  EXPECT_EQ(std::string(pixels.begin(), pixels.end()), picture(1, 0).rows);
  held.reset();
  EXPECT_EQ(leased(), 0);
}

TEST_F(ImageSetTest, AnImageThatWasDamagedSinceIsAnErrorOfItsRowAndIsAskedForAgain) {
  write(scratch_ / "set").or_throw();
  std::string text = test::slurp(scratch_ / "set");
  const std::string second = picture(2, 1).text();
  text[text.find(second) + 60] ^= 1;
  test::spill(scratch_ / "bad", text);
  const ImageSet set = ImageSet::open(scratch_ / "bad").or_throw();
  auto batches =
      ImageBatches::open(governor_, &set, {.batch_size = 1, .shuffle = false, .threads = 2})
          .or_throw();
  for (int i = 0; i < 2; ++i) {
    expect_row(batches.next().or_throw().rows[0]);
  }
  for (int times = 0; times < 2; ++times) {
    const auto batch = batches.next();
    ASSERT_FALSE(batch);
    EXPECT_EQ(batch.error().code, ErrorCode::kCorrupt);
    EXPECT_NE(batch.error().to_string().find("row 2: "), std::string::npos);
  }
  batches.seek({.epoch = 0, .position = 3}).or_throw();
  expect_row(batches.next().or_throw().rows[0]);
}

TEST_F(ImageSetTest, OptionsThatDoNotFitAreNamed) {
  const ImageSet set = made();
  const auto refused = [&](const ImageBatchesOptions& options) {
    const auto batches = ImageBatches::open(governor_, &set, options);
    return batches ? std::string() : batches.error().to_string();
  };
  EXPECT_NE(refused({.batch_size = 0}).find("batch_size: 0 is below 1"), std::string::npos);
  EXPECT_NE(refused({.held_out = kRows}).find("held_out: 30 rows leave none"), std::string::npos);
  EXPECT_NE(refused({.threads = 0}).find("threads: 0 is not 1 to 256"), std::string::npos);
  EXPECT_NE(refused({.queue_bytes = -1}).find("queue_bytes: -1 is below 0"), std::string::npos);
}

}  // namespace
}  // namespace plimsoll
