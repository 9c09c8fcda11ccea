// SPDX-License-Identifier: Apache-2.0
#include "base/utf8.h"

#include <gtest/gtest.h>

#include <string>

namespace plimsoll {
namespace {

TEST(R49Utf8, TakesWellFormedTextOnly) {
  for (const char* good : {"", "plain", "M\xC3\xBCnchen", "\xE6\xBC\xA2", "\xF0\x9F\x98\x80",
                           "\xED\x9F\xBF", "\xEE\x80\x80", "\xF4\x8F\xBF\xBF"}) {
    EXPECT_TRUE(is_utf8(good)) << good;
  }
  for (const char* bad : {"M\xFCnchen", "\x80", "\xC3", "\xE6\xBC", "\xC0\xAF", "\xE0\x80\x80",
                          "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xF8\x88\x80\x80\x80", "\xC3 "}) {
    EXPECT_FALSE(is_utf8(bad)) << bad;
  }
  EXPECT_TRUE(is_utf8(std::string(3, '\0')));
}

TEST(R49Utf8, TellsOtherBytesByTheirNumber) {
  EXPECT_EQ(as_utf8("M\xC3\xBCnchen"), "M\xC3\xBCnchen");
  EXPECT_EQ(as_utf8("M\xFCnchen \xE6\xBC"), "M\\xfcnchen \\xe6\\xbc");
  EXPECT_EQ(as_utf8("\xC3\xBC\xC3"), "\xC3\xBC\\xc3");
}

}  // namespace
}  // namespace plimsoll
