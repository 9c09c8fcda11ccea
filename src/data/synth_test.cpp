// SPDX-License-Identifier: Apache-2.0
//
// Synthetic pairs: the same for any number of threads, and partly aligned, so that there is
// something to learn and something left to learn.
#include "plimsoll/synth.h"

#include <cmath>
#include <filesystem>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

using namespace plimsoll::literals;

class SynthTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              (std::string("plimsoll-synth-") +
               testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    governor_ = Governor::create({.memory_limit = "4GiB"}).or_throw();
  }
  void TearDown() override {
    governor_.close();
    std::filesystem::remove_all(folder_);
  }

  // Every record of a set, image then text.
  std::vector<float> make(const CosirSynthOptions& options) {
    EXPECT_TRUE(synth_cosir(governor_, options, nullptr).has_value());
    auto store = FeatureStore::open(governor_, {.directory = options.out}).or_throw();
    std::vector<std::int64_t> ordinals(static_cast<std::size_t>(options.rows));
    std::iota(ordinals.begin(), ordinals.end(), 0);
    std::vector<float> image(static_cast<std::size_t>(options.rows * options.image_dim));
    std::vector<float> text(static_cast<std::size_t>(options.rows * options.text_dim));
    const std::array<int, 2> columns{store.column("image").or_throw(),
                                     store.column("text").or_throw()};
    const std::array<std::span<std::byte>, 2> out{std::as_writable_bytes(std::span(image)),
                                                  std::as_writable_bytes(std::span(text))};
    store.read_ordinals(ordinals, columns, out).or_throw();
    image.insert(image.end(), text.begin(), text.end());
    return image;
  }

  std::filesystem::path folder_;
  Governor governor_;
};

float dot(const float* a, const float* b, std::int64_t n) {
  return std::inner_product(a, a + n, b, 0.0F);
}

TEST_F(SynthTest, RowsDoNotDependOnThreadsOrOnHowManyThereAre) {
  const auto one = make({.rows = 3000, .out = folder_ / "one", .seed = 5, .threads = 1});
  const auto two = make({.rows = 3000, .out = folder_ / "two", .seed = 5, .threads = 3});
  EXPECT_EQ(one, two);
  const auto few = make({.rows = 10, .out = folder_ / "few", .seed = 5});
  EXPECT_TRUE(std::equal(few.begin(), few.begin() + 10 * 512, one.begin()));
  const auto other = make({.rows = 10, .out = folder_ / "other", .seed = 6});
  EXPECT_NE(few, other);
}

TEST_F(SynthTest, PairsAreUnitVectorsThatAreNearerToEachOtherThanToStrangers) {
  constexpr std::int64_t kRows = 256;
  const auto rows = make({.rows = kRows, .out = folder_ / "pairs"});
  const float* image = rows.data();
  const float* text = rows.data() + kRows * 512;
  double own = 0;
  double stranger = 0;
  for (std::int64_t i = 0; i < kRows; ++i) {
    EXPECT_NEAR(dot(image + i * 512, image + i * 512, 512), 1.0F, 1e-4F);
    EXPECT_NEAR(dot(text + i * 512, text + i * 512, 512), 1.0F, 1e-4F);
    own += dot(image + i * 512, text + i * 512, 512) / kRows;
    stranger += std::abs(dot(image + i * 512, text + (i + 1) % kRows * 512, 512)) / kRows;
  }
  EXPECT_GT(own, 0.2);  // Something to build on …
  EXPECT_LT(own, 0.6);  // … and something left to learn.
  EXPECT_LT(stranger, 0.1);
}

TEST_F(SynthTest, WidthsMayDiffer) {
  const auto rows = make({.rows = 20, .out = folder_ / "widths", .image_dim = 96, .text_dim = 40});
  EXPECT_EQ(rows.size(), 20U * (96 + 40));
}

TEST_F(SynthTest, RefusesNoRowsAndLeavesNothingWhenCancelled) {
  EXPECT_EQ(synth_cosir(governor_, {.rows = 0, .out = folder_ / "none"}, nullptr).error().code,
            ErrorCode::kInvalidArgument);
  const auto cancelled = synth_cosir(governor_, {.rows = 9000, .out = folder_ / "cancelled"},
                                     [](std::int64_t, std::int64_t) { return false; });
  ASSERT_FALSE(cancelled.has_value());
  EXPECT_FALSE(std::filesystem::exists(folder_ / "cancelled"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "cancelled.partial"));
}

}  // namespace
}  // namespace plimsoll
