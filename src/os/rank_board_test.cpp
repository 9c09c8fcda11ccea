// SPDX-License-Identifier: Apache-2.0
//
// Goal: what ranks say is what all get, whoever is late, over the counters' end; one that has left
// or was killed is noticed, and one gone astray is not taken for one that came. A file that may
// not be opened, or is another one, is refused.
// Method: real processes, which open rank 0's file as ranks do.
#include "os/rank_board.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/support/forked_ranks.h"

namespace plimsoll {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr std::int64_t kWordBytes = 24;

std::string word_of(int rank, int k) {
  std::string word = fmt::format("{} says {}", rank, k);
  word.resize(kWordBytes);
  return word;
}

// Of one of `count` ranks. Counters of meetings begin with `met`.
RankBoard board_of(int rank, int count, const RankTexts& texts, std::uint32_t met = 0) {
  const RankWords words{.rank = rank, .count = count, .bytes = kWordBytes};
  RankFile own = RankFile::create(RankBoard::bytes_of(words)).or_throw();
  if (rank == 0) {
    const RankPages pages = own.map(0, 4096).or_throw();
    auto* const counters = reinterpret_cast<std::uint32_t*>(pages.data());
    counters[0] = counters[1] = met;
  }
  const std::vector<std::string> addresses = texts.all(rank, count, own.address());
  std::vector<int> pids;
  pids.reserve(addresses.size());
  for (const std::string& address : addresses) {
    pids.push_back(std::atoi(address.c_str()));
  }
  // The others' files are there until all have come to the board.
  RankFile first = RankFile::open(addresses[0], 0).or_throw();
  RankBoard board(first.map(0, RankBoard::bytes_of(words)).or_throw(), words, pids, met);
  board.meet(Meeting::kRooms).or_throw();
  return board;
}

// `turns` words, and between some of them meetings for rooms to which one comes late.
void talk(RankBoard& board, int rank, int count, int turns) {
  for (int k = 0; k < turns; ++k) {
    const std::string own = word_of(rank, k);
    const auto said = board.word(std::as_bytes(std::span(own))).or_throw();
    for (int other = 0; other < count; ++other) {
      const std::string wanted = word_of(other, k);
      const auto one = said.subspan(static_cast<std::size_t>(other * kWordBytes), kWordBytes);
      ASSERT_TRUE(std::equal(one.begin(), one.end(), std::as_bytes(std::span(wanted)).begin()));
    }
    if (k % 50 < count) {
      if (k % 50 == rank) {
        std::this_thread::sleep_for(milliseconds(5));
      }
      board.meet(Meeting::kRooms).or_throw();
    }
  }
}

TEST(RankBoardTest, WordsAreWhatAllSaid) {
  const auto ends = forked_ranks(5, [](int rank, const RankTexts& texts) {
    RankBoard board = board_of(rank, 5, texts);
    talk(board, rank, 5, 300);
  });
  EXPECT_EQ(ends, std::vector<int>(5));
}

TEST(RankBoardTest, CountersGoOverTheirEnd) {
  constexpr std::uint32_t kNearTheEnd = 0U - 3 * 20;  // Three ranks, 20 meetings.
  const auto ends = forked_ranks(3, [](int rank, const RankTexts& texts) {
    RankBoard board = board_of(rank, 3, texts, kNearTheEnd);
    talk(board, rank, 3, 600);
  });
  EXPECT_EQ(ends, std::vector<int>(3));
}

// Who notices leaves as well.
void expect_left(RankBoard& board) {
  const auto began = steady_clock::now();
  const std::string own = word_of(0, 0);
  const auto said = board.word(std::as_bytes(std::span(own)));
  ASSERT_FALSE(said);
  EXPECT_EQ(said.error().code, ErrorCode::kIo);
  EXPECT_TRUE(said.error().to_string().ends_with(" has left")) << said.error().to_string();
  EXPECT_LT(steady_clock::now() - began, milliseconds(1500));
  board.leave();
}

TEST(RankBoardTest, ARankThatLeavesIsNoticed) {
  const auto ends = forked_ranks(3, [](int rank, const RankTexts& texts) {
    RankBoard board = board_of(rank, 3, texts);
    if (rank == 2) {
      board.leave();
      std::this_thread::sleep_for(milliseconds(2000));  // Its process is there all the while.
      return;
    }
    expect_left(board);
  });
  EXPECT_EQ(ends, std::vector<int>(3));
}

TEST(RankBoardTest, ARankThatWasKilledIsNoticed) {
  const auto ends = forked_ranks(3, [](int rank, const RankTexts& texts) {
    RankBoard board = board_of(rank, 3, texts);
    if (rank == 2) {
      ::kill(::getpid(), SIGKILL);
    }
    expect_left(board);
  });
  EXPECT_EQ(ends, (std::vector<int>{0, 0, -SIGKILL}));
}

TEST(RankBoardTest, ARankGoneAstrayIsWaitedForUntilItGivesUp) {
  const auto ends = forked_ranks(2, [](int rank, const RankTexts& texts) {
    RankBoard board = board_of(rank, 2, texts);
    if (rank == 0) {
      const auto began = steady_clock::now();
      expect_left(board);
      EXPECT_GT(steady_clock::now() - began, milliseconds(150));
      return;
    }
    int looks = 0;
    const auto met = board.meet(Meeting::kRooms, [&] { return ++looks < 3; });
    ASSERT_FALSE(met);
    EXPECT_EQ(met.error().os_errno, EINTR);
    EXPECT_EQ(looks, 3);
    board.leave();
  });
  EXPECT_EQ(ends, std::vector<int>(2));
}

TEST(RankBoardTest, WhoWaitsDoesNotUseTheProcessor) {
  const auto ends = forked_ranks(2, [](int rank, const RankTexts& texts) {
    RankBoard board = board_of(rank, 2, texts);
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(1000));
    }
    const std::clock_t began = std::clock();
    board.meet(Meeting::kRooms).or_throw();
    EXPECT_LT(std::clock() - began, CLOCKS_PER_SEC / 5);
  });
  EXPECT_EQ(ends, std::vector<int>(2));
}

TEST(RankFileTest, AnotherFileIsRefused) {
  const RankFile own = RankFile::create(4096).or_throw();
  const RankFile other = RankFile::create(4096).or_throw();
  const std::string address = own.address();
  const std::string swapped = address.substr(0, address.find(kRankFileName)) +
                              other.address().substr(other.address().find(kRankFileName));
  const auto opened = RankFile::open(swapped, 1);
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().code, ErrorCode::kIo);
  const std::string text = opened.error().to_string();
  EXPECT_TRUE(text.starts_with("/proc/")) << text;
  EXPECT_NE(text.find(" is not what rank 1 calls plimsoll-rank "), std::string::npos) << text;
  EXPECT_EQ(RankFile::open(address, 1).or_throw().bytes().or_throw(), 4096);
}

TEST(RankFileTest, WhatIsNoAddressIsRefused) {
  for (const char* text : {"", "1", "1 2", "x 2 plimsoll-rank 00", "1 2 another"}) {
    const auto opened = RankFile::open(text, 0);
    ASSERT_FALSE(opened) << text;
    EXPECT_EQ(opened.error().code, ErrorCode::kInvalidArgument) << text;
  }
}

TEST(RankFileTest, AProcessThatMayNotOpenAnothersFilesIsTold) {
  const RankFile own = RankFile::create(4096).or_throw();
  const std::string address = own.address();
  const auto ends = forked_ranks(1, [&](int, const RankTexts&) {
    // The parent's, once this is somebody else's process; of a user's, the first process's.
    const bool somebody = ::getuid() == 0 && ::setgid(65534) == 0 && ::setuid(65534) == 0;
    const auto opened = RankFile::open(somebody ? address : "1 0 plimsoll-rank 00", 3);
    ASSERT_FALSE(opened);
    EXPECT_EQ(opened.error().code, ErrorCode::kIo);
    EXPECT_TRUE(!somebody || opened.error().os_errno == EACCES) << opened.error().to_string();
  });
  EXPECT_EQ(ends, std::vector<int>(1));
}

TEST(RankFileTest, AForkedChildHasNeitherDescriptorNorPages) {
  const RankFile own = RankFile::create(8192).or_throw();
  const RankPages pages = own.map(4096, 4096).or_throw();
  pages.data()[0] = std::byte{7};
  EXPECT_EQ(forked_ranks(1,
                         [&](int, const RankTexts&) {
                           EXPECT_FALSE(own.bytes());
                           EXPECT_NE(::msync(pages.data(), 4096, MS_ASYNC), 0);
                         }),
            std::vector<int>(1));
  EXPECT_EQ(pages.data()[0], std::byte{7});
}

}  // namespace
}  // namespace plimsoll
