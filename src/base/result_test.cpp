// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cerrno>

#include "base/check.h"
#include "plimsoll/bytes.h"
#include "plimsoll/result.h"

namespace plimsoll {
namespace {

using namespace literals;

Error refusal() {
  Error error;
  error.code = ErrorCode::kOverBudget;
  error.tag = Tag::kTensor;
  error.requested_bytes = 64_MiB;
  error.available_bytes = 12_MiB + 512_KiB;
  error.limit_bytes = 768_MiB;
  error.baseline_bytes = 225_MiB;
  error.held_bytes = {300_MiB, 128_MiB, 0, 38_MiB, 0, 0, 64_MiB + 512_KiB, 0};
  error.advice = "raise --memory-limit or lower batch_size";
  return error;
}

TEST(ErrorTest, OfARefusedLeaseSaysWhatWasAskedWhatWasFreeWhoHoldsTheRestAndWhatToChange) {
  EXPECT_EQ(refusal().to_string(),
            "tensors wanted 64.0 MiB, 12.5 MiB free of the 768.0 MiB limit "
            "(held: tensors 300.0 MiB, rows 128.0 MiB, loader 38.0 MiB, foreign 64.5 MiB; "
            "baseline 225.0 MiB): raise --memory-limit or lower batch_size");
}

TEST(ErrorTest, OfARefusalNamesOrphans) {
  Error error = refusal();
  error.held_bytes = {};
  error.orphan_bytes = 3_MiB;
  EXPECT_EQ(error.to_string(),
            "tensors wanted 64.0 MiB, 12.5 MiB free of the 768.0 MiB limit "
            "(held: closed governors 3.0 MiB; baseline 225.0 MiB): "
            "raise --memory-limit or lower batch_size");
}

TEST(ErrorTest, OfARefusalWithNothingHeldHasNoParentheses) {
  Error error = refusal();
  error.held_bytes = {};
  error.baseline_bytes = 0;
  EXPECT_EQ(error.to_string(),
            "tensors wanted 64.0 MiB, 12.5 MiB free of the 768.0 MiB limit: "
            "raise --memory-limit or lower batch_size");
}

TEST(ErrorTest, OfARefusedAdmissionNamesTheSmallestLimitRoundedUp) {
  Error error = refusal();
  error.held_bytes = {};
  error.smallest_limit_bytes = 900_MiB + 1;
  EXPECT_EQ(error.to_string(),
            "tensors wanted 64.0 MiB, 12.5 MiB free of the 768.0 MiB limit (baseline 225.0 MiB): "
            "this takes a limit of at least 901MiB; "
            "raise --memory-limit or lower batch_size");
}

TEST(ErrorTest, OfACapNamesTheOptionThatSetIt) {
  Error error = refusal();
  error.tag = Tag::kFeature;
  error.cap_bytes = 128_MiB;
  error.advice = "cache_bytes";
  EXPECT_EQ(error.to_string(),
            "features wanted 64.0 MiB, 12.5 MiB free of their 128.0 MiB cap: raise cache_bytes");
}

TEST(ErrorTest, OfAnythingElseIsItsDetailAndItsAdvice) {
  EXPECT_EQ(make_error(ErrorCode::kNotFound, "ids.npy: no such file").to_string(),
            "ids.npy: no such file");
  EXPECT_EQ(make_error(ErrorCode::kCorrupt, "a.npy: truncated", "copy it again").to_string(),
            "a.npy: truncated: copy it again");
}

TEST(ErrorTest, OfTheOperatingSystemCarriesErrnoAndItsText) {
  const Error error = make_io_error(ENOSPC, "run/a.bin: writing");
  EXPECT_EQ(error.code, ErrorCode::kIo);
  EXPECT_EQ(error.os_errno, ENOSPC);
  EXPECT_EQ(error.to_string(), "run/a.bin: writing: No space left on device");
}

TEST(ErrorTest, NamesEveryTag) {
  EXPECT_STREQ(tag_name(Tag::kTensor), "tensors");
  EXPECT_STREQ(tag_name(Tag::kEmbedding), "rows");
  EXPECT_STREQ(tag_name(Tag::kFeature), "features");
  EXPECT_STREQ(tag_name(Tag::kLoader), "loader");
  EXPECT_STREQ(tag_name(Tag::kPinned), "pinned");
  EXPECT_STREQ(tag_name(Tag::kWeights), "weights");
  EXPECT_STREQ(tag_name(Tag::kForeign), "foreign");
  EXPECT_STREQ(tag_name(Tag::kOther), "other");
}

Result<int> half_of(int number) {
  if (number % 2 != 0) {
    return fail(ErrorCode::kInvalidArgument, "odd");
  }
  return number / 2;
}

Result<int> quarter_of(int number) {
  PLIMSOLL_TRY(const int half, half_of(number));
  PLIMSOLL_TRY_VOID(half_of(half));
  return half / 2;
}

TEST(ResultTest, PropagatesTheFirstErrorThroughTry) {
  EXPECT_EQ(quarter_of(8).value(), 2);
  EXPECT_EQ(quarter_of(6).error().to_string(), "odd");
  EXPECT_EQ(quarter_of(5).error().code, ErrorCode::kInvalidArgument);
}

TEST(ResultTest, OrThrowReturnsTheValueOrThrowsTheError) {
  EXPECT_EQ(half_of(4).or_throw(), 2);
  Result<void> fine;
  std::move(fine).or_throw();
  try {
    half_of(3).or_throw();
    FAIL() << "nothing was thrown";
  } catch (const Exception& exception) {
    EXPECT_EQ(exception.error().code, ErrorCode::kInvalidArgument);
    EXPECT_STREQ(exception.what(), "odd");
  }
}

TEST(CheckTest, ThrowsAnInternalErrorThatNamesThePlace) {
  PLIMSOLL_CHECK(true, "never seen");
  try {
    PLIMSOLL_CHECK(1 > 2, "numbers are out of order");
    FAIL() << "nothing was thrown";
  } catch (const Exception& exception) {
    EXPECT_EQ(exception.error().code, ErrorCode::kInternal);
    const std::string text = exception.what();
    EXPECT_NE(text.find("result_test.cpp"), std::string::npos) << text;
    EXPECT_NE(text.find("numbers are out of order (1 > 2)"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace plimsoll
