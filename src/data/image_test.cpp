// SPDX-License-Identifier: Apache-2.0
//
// Goal: pixels are those that were drawn, whichever way up they are stored, and what is no whole
// image is an error. Method: small images written here, a PNG chunk by chunk, and a JPEG by hand;
// tests/python/test_images.py compares with Pillow.
#include "plimsoll/image.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "data/image_format.h"
#include "data/image_resize_paths.h"
#include "tests/support/png.h"

namespace plimsoll {
namespace {

using test::chunk;
using test::exif;
using test::Png;

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

Result<std::string> decoded(const std::string& text) {
  const auto info = read_image_info(bytes_of(text));
  if (!info) {
    return tl::unexpected(info.error());
  }
  std::vector<std::uint8_t> pixels(static_cast<std::size_t>(info->pixel_bytes()));
  if (const auto done = decode_image(bytes_of(text), *info, pixels); !done) {
    return tl::unexpected(done.error());
  }
  return std::string(pixels.begin(), pixels.end());
}

const std::string kColors = "abcdefghi123456789";  // Two rows of three pixels.

TEST(ImageTest, APngOfColorsIsItsBytes) {
  EXPECT_EQ(decoded(Png{.rows = kColors}.text()).or_throw(), kColors);
}

TEST(ImageTest, EveryOrientationPutsEveryPixelWhereExifSays) {
  // abc def ghi / 123 456 789, by orientation.
  const std::vector<std::string> wanted{
      "abcdefghi123456789", "ghidefabc789456123", "789456123ghidefabc", "123456789abcdefghi",
      "abc123def456ghi789", "123abc456def789ghi", "789ghi456def123abc", "ghi789def456abc123"};
  for (int orientation = 1; orientation <= 8; ++orientation) {
    const std::string text = Png{.rows = kColors, .extra = chunk("eXIf", exif(orientation))}.text();
    const ImageInfo info = read_image_info(bytes_of(text)).or_throw();
    EXPECT_EQ(info.orientation, orientation);
    EXPECT_EQ(info.width, orientation < 5 ? 3 : 2);
    EXPECT_EQ(decoded(text).or_throw(), wanted[static_cast<std::size_t>(orientation - 1)]);
  }
}

TEST(ImageTest, SamplesOfAnyKindBecomeEightBitsOfColor) {
  EXPECT_EQ(decoded(Png{.width = 2, .height = 1, .color = 0, .rows = "ab"}.text()).or_throw(),
            "aaabbb");
  EXPECT_EQ(decoded(Png{.width = 1, .height = 1, .color = 4, .rows = "a\x01"}.text()).or_throw(),
            "aaa");
  EXPECT_EQ(decoded(Png{.width = 1, .height = 1, .depth = 16, .rows = "a1b2c3"}.text()).or_throw(),
            "abc");
  const std::string wide("\0\x41\x01\0", 4);  // 65 is itself, 256 is cut off.
  EXPECT_EQ(decoded(Png{.width = 2, .height = 1, .depth = 16, .color = 0, .rows = wide}.text())
                .or_throw(),
            "AAA\xFF\xFF\xFF");
}

TEST(ImageTest, EveryTruncationIsAnError) {
  const std::string whole = Png{.rows = kColors}.text();
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(decoded(whole.substr(0, size))) << size;
  }
}

TEST(ImageTest, ADamagedByteOfThePixelsIsAnError) {
  std::string text = Png{.rows = kColors}.text();
  text[text.find("def")] = 'x';
  const auto made = decoded(text);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code, ErrorCode::kCorrupt);
}

TEST(ImageTest, MorePixelsThanAllowedAreRefusedByNameAndOption) {
  const std::string text = Png{.width = 100'000, .height = 100'000, .rows = ""}.text();
  const auto info = read_image_info(bytes_of(text));
  ASSERT_FALSE(info);
  EXPECT_EQ(info.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(info.error().to_string().find("PNG of 100000 x 100000 pixels, more than 89478485 "
                                          "(pixels_max): pixels_max (--pixels-max) allows more"),
            std::string::npos)
      << info.error().to_string();
  EXPECT_TRUE(read_image_info(bytes_of(text), 10'000'000'000));
}

TEST(ImageTest, WhatIsNoImageSaysSo) {
  for (const std::string text : {"", "\xFF\xD8", "GIF89a", "RIFF    WAVE"}) {
    const auto info = read_image_info(bytes_of(text));
    ASSERT_FALSE(info);
    EXPECT_NE(info.error().to_string().find("neither JPEG, PNG nor WebP"), std::string::npos);
  }
}

// ---- Resizing ----

constexpr std::array kFilters{ImageFilter::kBox, ImageFilter::kBilinear, ImageFilter::kHamming,
                              ImageFilter::kBicubic, ImageFilter::kLanczos};

TEST(ImageResizeTest, OneColorStaysThatColor) {
  for (const ImageFilter filter : kFilters) {
    for (const auto& [from, to] : {std::pair(ImageSize{37, 5}, ImageSize{11, 50}),
                                   std::pair(ImageSize{1, 1}, ImageSize{9, 4}),
                                   std::pair(ImageSize{200, 300}, ImageSize{1, 1})}) {
      const std::vector<std::uint8_t> pixels(static_cast<std::size_t>(from.pixel_bytes()), 201);
      std::vector<std::uint8_t> out(static_cast<std::size_t>(to.pixel_bytes()));
      resize_image(pixels, from, out, to, filter).or_throw();
      EXPECT_EQ(out, std::vector<std::uint8_t>(out.size(), 201));
    }
  }
}

TEST(ImageResizeTest, TheSameSizeIsTheSameImage) {
  std::mt19937_64 random(7);
  const ImageSize size{19, 23};
  std::vector<std::uint8_t> pixels(static_cast<std::size_t>(size.pixel_bytes()));
  for (auto& value : pixels) {
    value = static_cast<std::uint8_t>(random());
  }
  std::vector<std::uint8_t> out(pixels.size());
  resize_image(pixels, size, out, size, ImageFilter::kBicubic).or_throw();
  EXPECT_EQ(out, pixels);
}

TEST(ImageResizeTest, HalfTheSizeByBoxesIsTheMeanOfFour) {
  const std::vector<std::uint8_t> pixels{10, 0, 0, 20, 0, 8, 30, 0, 0, 41, 4, 8};
  std::vector<std::uint8_t> out(3);
  resize_image(pixels, {2, 2}, out, {1, 1}, ImageFilter::kBox).or_throw();
  // Across first, each rounded: 15 and 36, then 25.5 and up.
  EXPECT_EQ(out, (std::vector<std::uint8_t>{26, 1, 4}));
}

TEST(ImageResizeTest, BothWaysAcrossGiveTheSameBits) {
  if (!resize_has_wide()) {
    GTEST_SKIP() << "this CPU has one way only";
  }
  std::mt19937_64 random(11);
  const auto side = [&] { return static_cast<std::int64_t>(1 + random() % 60); };
  for (int round = 0; round < 300; ++round) {
    const ImageSize from{side(), side()};
    const ImageSize to{side(), side()};
    std::vector<std::uint8_t> pixels(static_cast<std::size_t>(from.pixel_bytes()));
    for (auto& value : pixels) {
      value = static_cast<std::uint8_t>(random() % 3 == 0 ? 255 * (random() % 2) : random());
    }
    std::vector<std::uint8_t> wide(static_cast<std::size_t>(to.pixel_bytes()));
    std::vector<std::uint8_t> plain(wide.size());
    const ImageFilter filter = kFilters[random() % kFilters.size()];
    resize_image_by(true, pixels, from, wide, to, filter).or_throw();
    resize_image_by(false, pixels, from, plain, to, filter).or_throw();
    ASSERT_EQ(wide, plain) << round;
  }
}

TEST(ImageResizeTest, SidesAndSpansThatDoNotFitAreRefused) {
  std::vector<std::uint8_t> pixels(12);
  std::vector<std::uint8_t> out(3);
  EXPECT_FALSE(resize_image(pixels, {2, 2}, out, {0, 1}, ImageFilter::kBox));
  EXPECT_FALSE(resize_image(pixels, {2, 3}, out, {1, 1}, ImageFilter::kBox));
  EXPECT_FALSE(resize_image(pixels, {2, 2}, out, {2, 1}, ImageFilter::kBox));
}

}  // namespace
}  // namespace plimsoll
