// SPDX-License-Identifier: Apache-2.0
//
// Compares PageRuns with a plain map of free runs, and its bookkeeping with the kernel's.
#include "torch/page_runs.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <vector>

namespace plimsoll {
namespace {

constexpr std::int64_t kRange = PageRuns::kRangeMin;

// Free runs by their first page; best fit, lowest address among equals; neighbours merge.
class PlainRuns {
 public:
  explicit PlainRuns(std::uint32_t pages) { free_[1] = pages; }

  PageIndex take(std::uint32_t pages) {
    auto best = free_.end();
    for (auto at = free_.begin(); at != free_.end(); ++at) {
      if (at->second >= pages && (best == free_.end() || at->second < best->second)) {
        best = at;
      }
    }
    if (best == free_.end()) {
      return 0;
    }
    const auto [first, span] = *best;
    free_.erase(best);
    if (span > pages) {
      free_[first + pages] = span - pages;
    }
    return first;
  }

  void give(PageIndex first, std::uint32_t pages) {
    const auto after = free_.find(first + pages);
    if (after != free_.end()) {
      pages += after->second;
      free_.erase(after);
    }
    const auto next = free_.lower_bound(first);
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == first) {
        before->second += pages;
        return;
      }
    }
    free_[first] = pages;
  }

 private:
  std::map<PageIndex, std::uint32_t> free_;
};

std::int64_t pages_in_core(const PageRuns& runs, PageIndex first, std::uint32_t pages) {
  std::vector<unsigned char> in_core(pages);
  EXPECT_EQ(::mincore(runs.address(first), static_cast<std::size_t>(pages) * kArenaPageBytes,
                      in_core.data()),
            0);
  return std::count_if(in_core.begin(), in_core.end(), [](auto byte) { return (byte & 1) != 0; });
}

TEST(PageRunsTest, TakesAndMergesLikeAPlainMapOfFreeRuns) {
  for (const unsigned seed : {1U, 2U, 3U, 4U}) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    PageRuns runs;
    ASSERT_TRUE(runs.reserve(kRange));
    PlainRuns plain(static_cast<std::uint32_t>(runs.range_bytes() / kArenaPageBytes) - 2);
    std::vector<std::pair<PageIndex, std::uint32_t>> taken;
    for (int i = 0; i < 20'000; ++i) {
      // Few runs at a time: best fit is exact while a bin holds at most 64.
      if (taken.size() < 60 && (taken.empty() || random() % 2 == 0)) {
        const auto pages = static_cast<std::uint32_t>(1 + random() % (1U << random() % 12));
        const PageIndex first = runs.take(pages);
        ASSERT_EQ(first, plain.take(pages)) << "step " << i << ", " << pages << " pages";
        taken.emplace_back(first, pages);
      } else {
        const std::size_t which = random() % taken.size();
        const auto [first, pages] = taken[which];
        runs.give(first, pages);
        plain.give(first, pages);
        taken.erase(taken.begin() + static_cast<std::ptrdiff_t>(which));
      }
    }
  }
}

TEST(PageRunsTest, RefusesWhatTheRangeCannotHoldAndStillWorks) {
  PageRuns runs;
  ASSERT_TRUE(runs.reserve(kRange));
  const auto all = static_cast<std::uint32_t>(runs.range_bytes() / kArenaPageBytes) - 2;
  EXPECT_EQ(runs.take(all + 1), 0U);
  const PageIndex first = runs.take(all);
  EXPECT_EQ(first, 1U);
  EXPECT_EQ(runs.take(1), 0U);
  runs.give(first, all);
  EXPECT_EQ(runs.take(3), 1U);
}

TEST(PageRunsTest, KnowsWhichPagesAreResidentAndGivesThemBack) {
  PageRuns runs;
  ASSERT_TRUE(runs.reserve(kRange));
  const PageIndex first = runs.take(300);
  EXPECT_EQ(runs.resident_pages(first, 300), 0);
  runs.mark_resident(first, 300);
  std::memset(runs.address(first), 1, 300 * kArenaPageBytes);
  EXPECT_EQ(runs.resident_pages(first, 300), 300);
  EXPECT_EQ(pages_in_core(runs, first, 300), 300);
  EXPECT_EQ(runs.cached_pages(), 0);
  runs.give(first, 300);
  EXPECT_EQ(runs.cached_pages(), 300);
  EXPECT_EQ(runs.release_free(100), 100);
  EXPECT_EQ(pages_in_core(runs, first, 300), 200);
  EXPECT_EQ(runs.cached_pages(), 200);
  EXPECT_EQ(runs.take(50), first);  // The low end, which the partial release left resident.
  EXPECT_EQ(runs.resident_pages(first, 50), 50);
  EXPECT_EQ(runs.release_free(INT64_MAX), 150);
  EXPECT_EQ(runs.cached_pages(), 0);
  EXPECT_EQ(pages_in_core(runs, first, 300), 50);
}

TEST(PageRunsTest, CountsItsTablesOnlyForPagesThatWereUsed) {
  PageRuns runs;
  ASSERT_TRUE(runs.reserve(kRange));
  const std::int64_t before = runs.table_bytes();
  const PageIndex first = runs.take(10'000);
  runs.give(first, 10'000);  // Refused a lease, say.
  EXPECT_EQ(runs.table_bytes(), before);
  ASSERT_EQ(runs.take(10'000), first);
  const std::int64_t promised = runs.table_bytes(first + 10'000);
  runs.mark_resident(first, 10'000);
  EXPECT_EQ(runs.table_bytes(), promised);
  EXPECT_LE(promised, 10'000 * kArenaPageBytes / 200);  // 0.4 %, and a page.
}

}  // namespace
}  // namespace plimsoll
