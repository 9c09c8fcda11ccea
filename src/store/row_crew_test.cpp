// SPDX-License-Identifier: Apache-2.0
#include "store/row_crew.h"

#include <vector>

#include <gtest/gtest.h>

namespace plimsoll {
namespace {

TEST(RowCrewTest, DoesEveryRowOnceWhateverTheNumberOfThreads) {
  for (const int threads : {1, 2, 5}) {
    RowCrew crew(threads);
    EXPECT_EQ(crew.threads(), threads);
    for (int round = 0; round < 300; ++round) {
      for (const std::int64_t count : {0, 1, 63, 64, 65, 1000}) {
        std::vector<int> done(static_cast<std::size_t>(count), 0);
        crew.run(count, 64, [&](std::int64_t begin, std::int64_t end, int member) {
          ASSERT_GE(member, 0);
          ASSERT_LT(member, threads);
          for (std::int64_t i = begin; i < end; ++i) {
            ++done[static_cast<std::size_t>(i)];
          }
        });
        for (const int times : done) {
          ASSERT_EQ(times, 1);
        }
      }
    }
  }
}

}  // namespace
}  // namespace plimsoll
