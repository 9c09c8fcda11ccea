// SPDX-License-Identifier: Apache-2.0
//
// Goal: rows that others write stay until no copy is left, and no place is given twice; what is
// taken is leased, and a refusal changes nothing; nothing is left behind, in no process.
// Method: all ranks in one process where the order of events matters, real ones for the rest.
#include "memory/rank_memory.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "plimsoll/bytes.h"
#include "tests/support/forked_ranks.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
using namespace literals;

constexpr std::int64_t kWordBytes = 32;

// Descriptors of this process that are ranks' files, and mappings of them.
std::pair<int, int> held() {
  std::pair<int, int> found{};
  for (const fs::directory_entry& one : fs::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    found.first += fs::read_symlink(one, gone).native().find(kRankFileName) != std::string::npos;
  }
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    found.second += line.find(kRankFileName) != std::string::npos;
  }
  return found;
}

class RankMemoryTest : public testing::Test {
 protected:
  RankMemoryTest() {
    std::vector<std::string> addresses;
    for (int rank = 0; rank < 2; ++rank) {
      ranks_.push_back(
          RankMemory::create({.rank = rank, .count = 2, .bytes = kWordBytes}).or_throw());
      addresses.push_back(ranks_.back().address());
    }
    for (RankMemory& one : ranks_) {
      one.open(addresses).or_throw();
    }
  }
  ~RankMemoryTest() override {
    ranks_.clear();
    governor_.close();
  }
  RankMemoryTest(const RankMemoryTest&) = delete;
  RankMemoryTest& operator=(const RankMemoryTest&) = delete;

  [[nodiscard]] std::int64_t leased() const { return governor_.state().leased_bytes; }

  Governor governor_{Governor::create({.memory_limit = "1GiB", .foreign_bytes = 0}).or_throw()};
  std::vector<RankMemory> ranks_;
};

TEST_F(RankMemoryTest, RowsStayUntilNoCopyOfThemIsLeft) {
  RankRows first = ranks_[0].take({.count = 1000, .dim = 16}, governor_).or_throw();
  std::fill(first.ids().begin(), first.ids().end(), 5);
  const std::int64_t begin = first.begin();
  {
    const RankRows theirs = ranks_[1].rows(0, begin, first.shape()).or_throw();
    EXPECT_EQ(theirs.ids().back(), 5);
    std::fill(theirs.rows().begin(), theirs.rows().end(), 7.0F);
  }
  auto kept = std::make_unique<RankRows>(first);
  first = RankRows();
  const RankRows second = ranks_[0].take({.count = 5000, .dim = 16}, governor_).or_throw();
  EXPECT_GE(second.begin(), begin + 1000 * 72);  // It has grown, and is mapped anew.
  std::fill(second.rows().begin(), second.rows().end(), 9.0F);
  EXPECT_TRUE(
      std::all_of(kept->rows().begin(), kept->rows().end(), [](float one) { return one == 7.0F; }));
  EXPECT_EQ(ranks_[1].rows(0, second.begin(), second.shape()).or_throw().rows().back(), 9.0F);
  kept.reset();
  EXPECT_EQ(ranks_[0].take({.count = 1000, .dim = 16}, governor_).or_throw().begin(), begin);
  const RankRows none = ranks_[0].take({.count = 0, .dim = 16}, governor_).or_throw();
  EXPECT_TRUE(none.ids().empty() && none.rows().empty());
}

TEST_F(RankMemoryTest, WhatWasTakenAtRandomNeverOverlaps) {
  std::mt19937_64 random(3);
  const auto below = [&](std::uint64_t most) { return static_cast<std::int64_t>(random() % most); };
  std::map<std::int64_t, RankRows> taken;
  for (std::int64_t k = 0; k < 2000; ++k) {
    const RankRowsShape shape{.count = below(400), .dim = 1 + below(40)};
    const RankRows& made =
        taken.emplace(k, ranks_[0].take(shape, governor_).or_throw()).first->second;
    std::fill(made.ids().begin(), made.ids().end(), k);
    const RankRows theirs = ranks_[1].rows(0, made.begin(), shape).or_throw();
    std::fill(theirs.rows().begin(), theirs.rows().end(), static_cast<float>(k));
    for (std::int64_t old = below(3); old > 0 && !taken.empty(); --old) {
      const auto one = std::next(taken.begin(), below(taken.size()));
      const auto& [number, rows] = *one;
      ASSERT_EQ(std::count(rows.ids().begin(), rows.ids().end(), number), rows.shape().count);
      ASSERT_EQ(std::count(rows.rows().begin(), rows.rows().end(), static_cast<float>(number)),
                std::ssize(rows.rows()));
      taken.erase(one);
    }
  }
  EXPECT_LT(ranks_[0].rows_bytes(), 32_MiB);
  EXPECT_GE(leased(), ranks_[0].rows_bytes());
}

TEST_F(RankMemoryTest, MemoryIsLeasedAndARefusalChangesNothing) {
  const std::int64_t before = leased();
  RankRows made = ranks_[0].take({.count = 1 << 16, .dim = 128}, governor_).or_throw();
  const std::int64_t rows = leased() - before;  // 32.5 MiB, and an eighth.
  EXPECT_GT(rows, 32_MiB);
  EXPECT_LT(rows, 40_MiB);
  ranks_[0].grow_room(kRankRoomBytes, governor_).or_throw();
  EXPECT_EQ(leased() - before, rows + kRankRoomBytes);
  const auto refused = ranks_[0].take({.count = 1 << 22, .dim = 128}, governor_);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kOverBudget);
  EXPECT_EQ(leased() - before, rows + kRankRoomBytes);
  EXPECT_EQ(ranks_[0].rows_bytes(), rows);
  made = ranks_[0].take({.count = 1 << 18, .dim = 128}, governor_).or_throw();  // Beside it.
  made = RankRows();
  EXPECT_GT(leased() - before, 128_MiB);
  // Once, and then no more.
  const RankRows few = ranks_[0].take({.count = 10, .dim = 128}, governor_).or_throw();
  EXPECT_EQ(leased() - before, 32_MiB + kRankRoomBytes);
  const RankRows theirs = ranks_[1].rows(0, few.begin(), few.shape()).or_throw();
  std::fill(theirs.rows().begin(), theirs.rows().end(), 2.0F);
  EXPECT_EQ(few.rows().back(), 2.0F);
  ranks_[0].close();
  ranks_[0].close();
  EXPECT_EQ(leased(), before);
}

TEST_F(RankMemoryTest, NothingIsLeftBehindAndRowsOutliveIt) {
  const RankRows made = ranks_[0].take({.count = 1000, .dim = 16}, governor_).or_throw();
  {
    const RankRows theirs = ranks_[1].rows(0, made.begin(), made.shape()).or_throw();
    const auto room = ranks_[0].room(1).or_throw();
    room->data()[0] = std::byte{1};
    EXPECT_EQ(ranks_[1].room(1).or_throw()->data()[0], std::byte{1});
    EXPECT_EQ(held(), std::pair(4, 6));  // Each has both boards' page, rows of one, a room.
    ranks_.clear();
    EXPECT_EQ(held(), std::pair(0, 3));
    made.rows()[0] = 4;
    EXPECT_EQ(theirs.rows()[0], 4);
  }
  EXPECT_EQ(held(), std::pair(0, 1));
}

TEST_F(RankMemoryTest, AForkedChildHasNoneOfItAndLeavesItAlone) {
  RankRows made = ranks_[0].take({.count = 1000, .dim = 16}, governor_).or_throw();
  const auto room = ranks_[0].room(0).or_throw();
  const auto ends = forked_ranks(1, [&](int, const RankTexts&) {
    EXPECT_EQ(held(), std::pair(0, 0));
    const auto met = ranks_[0].meet();
    EXPECT_TRUE(!met && met.error().code == ErrorCode::kInvalidArgument);
    EXPECT_FALSE(ranks_[0].take({.count = 1, .dim = 1}, governor_));
    made = RankRows();
    ranks_[0].close();
  });
  EXPECT_EQ(ends, std::vector<int>(1));
  // The place is still taken here, and nobody has left.
  EXPECT_GT(ranks_[0].take({.count = 1, .dim = 1}, governor_).or_throw().begin(), made.begin());
  std::jthread other([&] { EXPECT_TRUE(ranks_[1].meet()); });
  EXPECT_TRUE(ranks_[0].meet());
}

TEST_F(RankMemoryTest, WhatIsWrongIsRefused) {
  EXPECT_EQ(RankMemory::create({.rank = 2, .count = 2, .bytes = 1}).error().code,
            ErrorCode::kInvalidArgument);
  RankMemory alone = RankMemory::create({.rank = 0, .count = 2, .bytes = 8}).or_throw();
  EXPECT_FALSE(alone.meet());
  EXPECT_FALSE(alone.open(std::vector<std::string>{alone.address()}));
  const auto opened =
      alone.open(std::vector<std::string>{alone.address(), "1 2 plimsoll-rank of nobody"});
  EXPECT_EQ(opened.error().code, ErrorCode::kIo);
  EXPECT_FALSE(alone.address().empty());
  EXPECT_FALSE(ranks_[0].rows(1, 0, {.count = 1, .dim = 1}));  // It has taken none.
  EXPECT_FALSE(ranks_[0].word(std::vector<std::byte>(kWordBytes - 1)));
  ranks_[0].close();
  EXPECT_EQ(ranks_[0].meet().error().code, ErrorCode::kInvalidArgument);
}

// As a step with a lookup: each lays ids for the other ranks, these write rows, all read.
TEST(RankMemoryOfProcessesTest, RowsAndRoomsAreExchanged) {
  constexpr int kRanks = 4;
  const auto exchange = [](int rank, const RankTexts& texts) {
    Governor governor = Governor::create({.memory_limit = "1GiB", .foreign_bytes = 0}).or_throw();
    RankMemory memory = RankMemory::create({.rank = rank, .count = kRanks, .bytes = 8}).or_throw();
    memory.open(texts.all(rank, kRanks, memory.address())).or_throw();
    memory.grow_room(4096, governor).or_throw();
    for (std::int64_t step = 0; step < 50; ++step) {
      const RankRowsShape shape{.count = kRanks * (1 + step % 7 * 100), .dim = 3};
      const RankRows own = memory.take(shape, governor).or_throw();
      std::fill(own.ids().begin(), own.ids().end(), 100 * step + rank);
      const std::int64_t begin = own.begin();
      const auto said = memory.word(std::as_bytes(std::span(&begin, 1))).or_throw();
      std::vector<std::int64_t> begins(kRanks);
      std::copy(said.begin(), said.end(), std::as_writable_bytes(std::span(begins)).begin());
      const std::int64_t part = shape.count / kRanks;
      for (int other = 0; other < kRanks; ++other) {
        const RankRows theirs =
            memory.rows(other, begins[static_cast<std::size_t>(other)], shape).or_throw();
        for (std::int64_t k = rank * part; k < (rank + 1) * part; ++k) {
          for (std::int64_t d = 0; d < 3; ++d) {
            theirs.rows()[static_cast<std::size_t>(3 * k + d)] =
                static_cast<float>(theirs.ids()[static_cast<std::size_t>(k)] * 4 + rank);
          }
        }
      }
      memory.room(rank).or_throw()->data()[step] = static_cast<std::byte>(rank + step);
      memory.meet().or_throw();
      memory.word(std::as_bytes(std::span(&begin, 1))).or_throw();
      for (std::int64_t k = 0; k < shape.count; ++k) {
        ASSERT_EQ(own.rows()[static_cast<std::size_t>(3 * k + 2)],
                  static_cast<float>((100 * step + rank) * 4 + k / part));
      }
      for (int other = 0; other < kRanks; ++other) {
        ASSERT_EQ(memory.room(other).or_throw()->data()[step],
                  static_cast<std::byte>(other + step));
      }
    }
    memory.close();
    EXPECT_EQ(governor.state().leased_bytes, 0);
  };
  EXPECT_EQ(forked_ranks(kRanks, exchange), std::vector<int>(kRanks));
}

}  // namespace
}  // namespace plimsoll
