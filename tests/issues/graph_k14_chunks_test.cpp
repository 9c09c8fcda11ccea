// SPDX-License-Identifier: Apache-2.0
//
// K14: files were read 5,000 rows at a time, and the last row and edge of each chunk were lost.
// Goal: the same bytes for any chunk and any number of threads, and as many graphs as the frames
// say.
#include <gtest/gtest.h>

#include "tests/support/can_traffic.h"

namespace plimsoll {
namespace {

TEST(GraphK14, ChunksAndThreadsChangeNoByte) {
  test::CanTraffic traffic({{"train_1.csv", test::can_csv(12'345, 30, 1)},
                            {"train_2.csv", test::can_csv(5'001, 30, 2)},
                            {"train_3.csv", test::can_csv(777, 30, 3)},
                            {"test_1.csv", test::can_csv(10'000, 50, 4)}});
  traffic.options().stride = 70;
  const GraphSetInfo info = traffic.import().info;
  const auto windows = [](std::int64_t frames) { return (frames - 1 - 100) / 70 + 1; };
  EXPECT_EQ(info.graphs, windows(12'345) + windows(5'001) + windows(777) + windows(10'000));
  const std::string whole = traffic.bytes();
  traffic.options().rebuild = true;
  for (const std::int64_t chunk : {1, 13, 4096, 100'003}) {
    for (const int threads : {1, 3}) {
      traffic.options().chunk_bytes = chunk;
      traffic.options().threads = threads;
      EXPECT_FALSE(traffic.import().reused);
      EXPECT_EQ(traffic.bytes(), whole) << chunk << " bytes, " << threads << " threads";
    }
  }
}

TEST(GraphK14, SkippedRowsAreTheSameForAnyChunk) {
  std::mt19937_64 random(14);
  std::string text = test::can_csv(3'000, 20, 5);
  for (int i = 0; i < 200; ++i) {
    text[100 + random() % (text.size() - 100)] = "x,\n\0 9\xFF"[random() % 7];
  }
  text.insert(text.size() / 2, std::string(9'000, 'z'));
  test::CanTraffic traffic({{"train_1.csv", text}});
  traffic.options().skip_bad = true;
  const GraphSetInfo info = traffic.import().info;
  EXPECT_GT(info.files[0].skipped_rows(), 50);
  const std::string whole = traffic.bytes();
  traffic.options().rebuild = true;
  for (const std::int64_t chunk : {1, 7, 5'000, 30'000}) {
    traffic.options().chunk_bytes = chunk;
    traffic.import();
    EXPECT_EQ(traffic.bytes(), whole) << chunk << " bytes at a time";
  }
}

}  // namespace
}  // namespace plimsoll
