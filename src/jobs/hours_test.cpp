// SPDX-License-Identifier: Apache-2.0
#include "jobs/hours.h"

#include <gtest/gtest.h>

namespace plimsoll {
namespace {

TEST(Hours, HoldFromTheirBeginUpToTheirEnd) {
  const Hours day = parse_hours("09:00-17:30").or_throw();
  EXPECT_FALSE(day.hold(8 * 60 + 59));
  EXPECT_TRUE(day.hold(9 * 60));
  EXPECT_TRUE(day.hold(17 * 60 + 29));
  EXPECT_FALSE(day.hold(17 * 60 + 30));
}

TEST(Hours, PassMidnight) {
  const Hours night = parse_hours("22:00-6:15").or_throw();
  EXPECT_TRUE(night.hold(23 * 60));
  EXPECT_TRUE(night.hold(0));
  EXPECT_TRUE(night.hold(6 * 60 + 14));
  EXPECT_FALSE(night.hold(6 * 60 + 15));
  EXPECT_FALSE(night.hold(12 * 60));
}

TEST(Hours, OtherTextsAreRefused) {
  for (const char* text :
       {"", "9", "9-17", "09:00", "09:00-", "24:00-1:00", "9:60-10:00", "9:0-10:00", "-1:00-2:00",
        "09:00-09:00", "09:00-17:30h", "09:00 -17:30", "009:00-1:00"}) {
    const auto parsed = parse_hours(text);
    ASSERT_FALSE(parsed) << text;
    EXPECT_NE(parsed.error().to_string().find("09:00-17:30"), std::string::npos);
  }
}

TEST(Duration, IsInSecondsMinutesHoursOrDays) {
  EXPECT_EQ(parse_duration("90", "--timeout").value(), 90);
  EXPECT_EQ(parse_duration("90s", "--timeout").value(), 90);
  EXPECT_EQ(parse_duration("15m", "--timeout").value(), 900);
  EXPECT_EQ(parse_duration("2h", "--timeout").value(), 7200);
  EXPECT_EQ(parse_duration("1d", "--timeout").value(), 86'400);
  for (const char* text :
       {"", "h", "0", "-1", "1.5h", "1w", "1 h", "99999999999999999999", "9999999d"}) {
    const auto parsed = parse_duration(text, "--timeout");
    ASSERT_FALSE(parsed) << text;
    EXPECT_NE(parsed.error().to_string().find("--timeout"), std::string::npos);
  }
}

}  // namespace
}  // namespace plimsoll
