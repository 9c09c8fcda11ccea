// SPDX-License-Identifier: Apache-2.0
//
// forked_ranks(): real processes that find one another as ranks do, each with its part of a test.
//
// Threads: the calling one.   Memory: 4 KiB of addresses; what the parts take, in the children.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "os/meeting.h"

namespace plimsoll {

/// What of a rank's the others are told before they have any memory of ranks.
class RankTexts {
 public:
  static constexpr std::size_t kMost = 16;

  RankTexts()
      : shared_(static_cast<Shared*>(::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE,
                                            MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~RankTexts() { ::munmap(shared_, sizeof(Shared)); }
  RankTexts(const RankTexts&) = delete;
  RankTexts& operator=(const RankTexts&) = delete;

  /// Of all `count` ranks in their order, once each has called it.
  std::vector<std::string> all(int rank, int count, const std::string& own) const {
    own.copy(shared_->texts[static_cast<std::size_t>(rank)].data(), 255);
    const auto everybody = static_cast<std::uint32_t>(count);
    come(shared_->counter, everybody);
    while (!met(shared_->counter, everybody, 1000)) {
    }
    std::vector<std::string> texts;
    for (int other = 0; other < count; ++other) {
      texts.emplace_back(shared_->texts[static_cast<std::size_t>(other)].data());
    }
    return texts;
  }

 private:
  struct Shared {
    std::uint32_t counter;
    std::array<std::array<char, 256>, kMost> texts;
  };

  Shared* shared_;
};

/// work(rank, texts) in `count` forked processes; how each ended: 0, 1 where an expectation was not
/// met, or less the signal that ended it.
inline std::vector<int> forked_ranks(int count,
                                     const std::function<void(int, const RankTexts&)>& work) {
  const RankTexts texts;
  std::vector<pid_t> pids;
  std::fflush(nullptr);
  for (int rank = 0; rank < count; ++rank) {
    pids.push_back(::fork());
    if (pids.back() == 0) {
      try {
        work(rank, texts);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
      std::fflush(nullptr);
      ::_exit(testing::Test::HasFailure() ? 1 : 0);
    }
  }
  std::vector<int> ends;
  for (const pid_t pid : pids) {
    int status = -1;
    EXPECT_EQ(::waitpid(pid, &status, 0), pid);
    ends.push_back(WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status));
  }
  return ends;
}

}  // namespace plimsoll
