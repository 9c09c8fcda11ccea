// SPDX-License-Identifier: Apache-2.0
#include "base/npy_header.h"

#include <vector>

#include <gtest/gtest.h>

namespace plimsoll {
namespace {

TEST(NpyHeaderTest, IsByteForByteWhatNumpyWrites) {
  // numpy.lib.format.header_data_from_array_1_0 and _write_array_header, for float32 [7, 3].
  std::string wanted("\x93NUMPY\x01\x00\x76\x00", 10);
  wanted += "{'descr': '<f4', 'fortran_order': False, 'shape': (7, 3), }";
  wanted.resize(127, ' ');
  wanted += '\n';
  EXPECT_EQ(npy_header("<f4", std::vector<std::int64_t>{7, 3}), wanted);
}

TEST(NpyHeaderTest, WritesShapesAsPythonWritesTuples) {
  const auto has = [](const std::vector<std::int64_t>& shape, const char* text) {
    return npy_header("|u1", shape).find(std::string("'shape': ") + text + ", }") !=
           std::string::npos;
  };
  EXPECT_TRUE(has({}, "()"));
  EXPECT_TRUE(has({0}, "(0,)"));
  EXPECT_TRUE(has({12}, "(12,)"));
  EXPECT_TRUE(has({1, 2, 3}, "(1, 2, 3)"));
}

TEST(NpyHeaderTest, KeepsItsSizeWhateverTheNumberOfRows) {
  for (std::int64_t rows = 0; rows < INT64_MAX / 10; rows = rows * 10 + 9) {
    EXPECT_EQ(npy_header("<i8", std::vector<std::int64_t>{rows}).size(), 128U);
    EXPECT_EQ(npy_header("<f4", std::vector<std::int64_t>{rows, 1024}).size(), 128U);
  }
}

TEST(NpyHeaderTest, SaysHowLongItIsAndEndsAtAMultipleOf64) {
  std::vector<std::int64_t> shape;
  for (int dims = 0; dims < 300; ++dims, shape.push_back(dims * 1'000'003)) {
    const std::string header = npy_header("<f8", shape);
    ASSERT_EQ(header.size() % 64, 0U);
    ASSERT_EQ(header.back(), '\n');
    const auto low = static_cast<unsigned char>(header[8]);
    const auto high = static_cast<unsigned char>(header[9]);
    ASSERT_EQ(10U + low + 256U * high, header.size());
  }
}

}  // namespace
}  // namespace plimsoll
