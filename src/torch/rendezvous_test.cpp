// SPDX-License-Identifier: Apache-2.0
//
// Goal: programs that torchrun starts find one another, with a store of the launcher's or without,
// after a restart as well; what one cannot, all are told.
// Method: real processes with the environment that torchrun gives, one of them with its store.
#include "torch/rendezvous.h"

#include <cstdlib>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tests/support/launched_ranks.h"

namespace plimsoll {
namespace {

// Joins, and says what only this rank knows.
void join_and_talk() {
  const auto own = launched_rank().or_throw();
  ASSERT_TRUE(own.has_value());
  RankMemory memory = join_ranks(*own, 8).or_throw();
  const std::int64_t word = 100 + own->rank;
  const auto said = memory.word(std::as_bytes(std::span(&word, 1))).or_throw();
  for (int rank = 0; rank < own->count; ++rank) {
    EXPECT_EQ(static_cast<int>(said[static_cast<std::size_t>(8 * rank)]), 100 + rank);
  }
  memory.meet().or_throw();
}

TEST(RendezvousTest, RanksFindOneAnotherAtAStoreOfRankZeros) {
  const int port = free_port();
  EXPECT_EQ(forked_ranks(3,
                         [&](int rank, const RankTexts&) {
                           launch(rank, 3, port, "0", false);
                           join_and_talk();
                         }),
            std::vector<int>(3));
}

TEST(RendezvousTest, RanksThatAreStartedAgainDoNotFindThoseThatEnded) {
  const int port = free_port();
  const auto ends = forked_ranks(3, [&](int rank, const RankTexts& texts) {
    if (rank == 2) {
      c10d::TCPStoreOptions options;
      options.port = static_cast<std::uint16_t>(port);
      options.isServer = true;
      options.waitWorkers = false;
      const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
      texts.all(rank, 3, "");  // Until all are through.
      return;
    }
    for (const char* restart : {"0", "1"}) {
      launch(rank, 2, port, restart, true);
      join_and_talk();
    }
    texts.all(rank, 3, "");
  });
  EXPECT_EQ(ends, std::vector<int>(3));
}

TEST(RendezvousTest, WhatOneCannotAllAreTold) {
  if (::getuid() != 0) {
    GTEST_SKIP() << "a user's process may open the files of all others of its own";
  }
  const int port = free_port();
  const auto ends = forked_ranks(2, [&](int rank, const RankTexts&) {
    launch(rank, 2, port, "0", false);
    if (rank == 1) {
      ASSERT_TRUE(::setgid(65534) == 0 && ::setuid(65534) == 0);
    }
    const auto joined = join_ranks(*launched_rank().or_throw(), 8);
    ASSERT_FALSE(joined);
    EXPECT_NE(joined.error().to_string().find("rank 1 cannot share memory with the others: "),
              std::string::npos)
        << joined.error().to_string();
  });
  EXPECT_EQ(ends, std::vector<int>(2));
}

TEST(RendezvousTest, AProcessAloneIsNoRankAndOddNumbersAreRefused) {
  const auto ends = forked_ranks(1, [](int, const RankTexts&) {
    ::unsetenv("RANK");
    EXPECT_FALSE(launched_rank().or_throw().has_value());
    launch(0, 1, 29500, "0", true);
    EXPECT_FALSE(launched_rank().or_throw().has_value());
    launch(1, 2, 29500, "3", true);
    const auto own = launched_rank().or_throw();
    ASSERT_TRUE(own.has_value());
    EXPECT_EQ(own->rank, 1);
    EXPECT_EQ(own->restart, "3");
    EXPECT_TRUE(own->store_is_launchers);
    set("LOCAL_WORLD_SIZE", "1");
    EXPECT_EQ(
        launched_rank().error().to_string(),
        "2 ranks, 1 of them on this machine: the ranks of a run are on one machine yet: start "
        "them with torchrun --standalone --nproc-per-node");
    launch(2, 2, 29500, "0", true);
    EXPECT_EQ(launched_rank().error().to_string(),
              "RANK: '2' is no number from 0 to 1: start ranks with torchrun --standalone "
              "--nproc-per-node");
  });
  EXPECT_EQ(ends, std::vector<int>(1));
}

}  // namespace
}  // namespace plimsoll
