// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>

#include "base/philox.h"
#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

using namespace literals;

TEST(BytesTest, ParsesBinaryDecimalAndBareSizes) {
  EXPECT_EQ(parse_bytes("512MiB").value(), 512_MiB);
  EXPECT_EQ(parse_bytes("512M").value(), 512_MiB);
  EXPECT_EQ(parse_bytes("512m").value(), 512_MiB);
  EXPECT_EQ(parse_bytes("6GB").value(), 6'000'000'000);
  EXPECT_EQ(parse_bytes("6 gib").value(), 6_GiB);
  EXPECT_EQ(parse_bytes(" 1.5 GiB ").value(), 1_GiB + 512_MiB);
  EXPECT_EQ(parse_bytes("2TiB").value(), 2048_GiB);
  EXPECT_EQ(parse_bytes("3KB").value(), 3000);
  EXPECT_EQ(parse_bytes("1048576").value(), 1_MiB);
  EXPECT_EQ(parse_bytes("12B").value(), 12);
  EXPECT_EQ(parse_bytes("0").value(), 0);
}

TEST(BytesTest, KeepsBareBytesExactBeyondWhatADoubleHolds) {
  EXPECT_EQ(parse_bytes("9007199254740993").value(), 9007199254740993);
  EXPECT_EQ(parse_bytes("9223372036854775807").value(), INT64_MAX);
}

TEST(BytesTest, TakesAPercentageOfTheWhole) {
  EXPECT_EQ(parse_bytes("25%", 8_GiB).value(), 2_GiB);
  EXPECT_EQ(parse_bytes("100 %", 8_GiB).value(), 8_GiB);
  EXPECT_EQ(parse_bytes("12.5%", 8_GiB).value(), 1_GiB);
}

TEST(BytesTest, RefusesWhatIsNoSizeAndSaysWhatIs) {
  const auto message = [](std::string_view text, std::int64_t whole = 0) {
    const auto result = parse_bytes(text, whole);
    return result ? "accepted as " + std::to_string(*result) : result.error().to_string();
  };
  const std::string forms = ": write a size such as 512MiB, 6GiB, 6GB, 1048576 or 25%";
  EXPECT_EQ(message(""), "\"\" is not a size: it is empty" + forms);
  EXPECT_EQ(message("lots"), "\"lots\" is not a size: it does not begin with a number" + forms);
  EXPECT_EQ(message("-5MiB"), "\"-5MiB\" is not a size: it is negative or not finite" + forms);
  EXPECT_EQ(message("-5"), "\"-5\" is not a size: it is negative or not finite" + forms);
  EXPECT_EQ(message("6 gallons"), "\"6 gallons\" is not a size: its unit is unknown" + forms);
  EXPECT_EQ(message("6MiBs"), "\"6MiBs\" is not a size: its unit is unknown" + forms);
  EXPECT_EQ(message("nan"), "\"nan\" is not a size: it is negative or not finite" + forms);
  EXPECT_EQ(message("25%"),
            "\"25%\" is not a size: there is nothing here to take a share of" + forms);
  EXPECT_EQ(message("125%", 1_GiB), "\"125%\" is not a size: a share cannot pass 100%" + forms);
  EXPECT_EQ(message("9000PiB"), "\"9000PiB\" is not a size: it is too large" + forms);
  EXPECT_EQ(message("99999999999999999999"),
            "\"99999999999999999999\" is not a size: it is too large" + forms);
  EXPECT_EQ(parse_bytes("x").error().code, ErrorCode::kInvalidArgument);
}

TEST(BytesTest, PrintsOneDecimalInTheLargestUnitBelow) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(512), "512 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1.0 KiB");
  EXPECT_EQ(format_bytes(768_MiB), "768.0 MiB");
  EXPECT_EQ(format_bytes(1_GiB - 1), "1.0 GiB");
  EXPECT_EQ(format_bytes(18_GiB + 410_MiB), "18.4 GiB");
  EXPECT_EQ(format_bytes(-12_MiB), "-12.0 MiB");
  EXPECT_EQ(format_bytes(-3), "-3 B");
  EXPECT_EQ(format_bytes(INT64_MAX), "8192.0 PiB");
}

// Goal: what we print, we parse, and nothing is lost but the rounding to one decimal.
TEST(BytesTest, RoundTripsWhatItPrintsToWithinItsRounding) {
  constexpr std::uint64_t kSeed = 20;
  for (std::uint64_t i = 0; i < 20'000; ++i) {
    const auto words = philox(kSeed, 0, i);
    const int shift = static_cast<int>(words[2] % 50);
    const auto bytes = static_cast<std::int64_t>(
        ((static_cast<std::uint64_t>(words[0]) << 32 | words[1]) >> 2) >> shift);
    const auto parsed = parse_bytes(format_bytes(bytes));
    ASSERT_TRUE(parsed) << format_bytes(bytes) << ", seed " << kSeed << ", case " << i;
    const double unit =
        std::pow(1024.0, std::floor(std::log2(static_cast<double>(bytes) + 1) / 10));
    ASSERT_NEAR(static_cast<double>(*parsed), static_cast<double>(bytes), 0.0501 * unit * 1.03 + 1)
        << format_bytes(bytes) << ", seed " << kSeed << ", case " << i;
    ASSERT_EQ(format_bytes(*parsed), format_bytes(bytes)) << "seed " << kSeed << ", case " << i;
  }
}

}  // namespace
}  // namespace plimsoll
