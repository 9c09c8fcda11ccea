// SPDX-License-Identifier: Apache-2.0
//
// How a program that torchrun starts several times on a machine finds its other ranks, and opens
// the memory through which they exchange.
//
//   torchrun --no-python --standalone --nproc-per-node 2 PROGRAM …
//
// Ranks tell one another by the launcher's store (c10d::TCPStore), under a name that has the number
// of the restart in it: the store keeps what ranks said that ended.
//
// Reading order: memory/rank_memory.h, this file, python/plimsoll/ranks/_ranks.py.
//
// Threads: that which trains; a server's, where no launcher has one, until join_ranks() returns.
// Memory:  the addresses, a kilobyte.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "memory/rank_memory.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// What the environment says of this process.
struct LaunchedRank {
  int rank{0};
  int count{1};
  std::string host{};              ///< Of the store.
  std::uint16_t port{0};           ///< Of the store.
  std::string restart{};           ///< How often the ranks were started again.
  bool store_is_launchers{false};  ///< Else it is rank 0's.
};

/// The rank that this process is, by RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
/// TORCHELASTIC_RESTART_COUNT and TORCHELASTIC_USE_AGENT_STORE; none where it trains alone.
///
/// Errors: kInvalidArgument for one that is missing or cannot be, and for several machines.
[[nodiscard]] Result<std::optional<LaunchedRank>> launched_rank();

/// The memory of all ranks, open; on all of them, or on none. longest: as RankWords has it.
///
/// Errors: kIo where one does not come in five minutes, or cannot open another's memory; of another
///         rank's it says whose.
[[nodiscard]] Result<RankMemory> join_ranks(const LaunchedRank& own, std::int64_t word_bytes,
                                            std::chrono::seconds longest = RankWords().longest);

}  // namespace plimsoll
