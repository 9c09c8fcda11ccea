// SPDX-License-Identifier: Apache-2.0
//
// Goal: what a process wrote before it came is seen by those that met it, for any number of
// meetings, over the counter's end; and nobody waits longer than it said.
// Method: real processes over a shared mapping.
#include "os/meeting.h"

#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

namespace plimsoll {
namespace {

constexpr std::uint32_t kProcesses = 4;

struct Shared {
  std::uint32_t counter{0};
  std::uint32_t said[2][kProcesses]{};
};

class MeetingTest : public testing::Test {
 protected:
  ~MeetingTest() override { ::munmap(shared_, sizeof(Shared)); }

  // Zeros.
  Shared* const shared_{static_cast<Shared*>(
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))};
};

// How many meetings went right.
std::uint32_t meetings(Shared& shared, std::uint32_t own, std::uint32_t begun, std::uint32_t many) {
  for (std::uint32_t k = 0; k < many; ++k) {
    auto& said = shared.said[k % 2];
    said[own] = k * kProcesses + own;
    const std::uint32_t all = begun + (k + 1) * kProcesses;
    come(shared.counter, all);
    while (!met(shared.counter, all, 1000)) {
    }
    for (std::uint32_t other = 0; other < kProcesses; ++other) {
      if (said[other] != k * kProcesses + other) {
        return k;
      }
    }
  }
  return many;
}

TEST_F(MeetingTest, ShowsWhatAllWroteBeforeTheyCameOverTheCountersEnd) {
  constexpr std::uint32_t kMany = 2000;
  const std::uint32_t begun = 0U - kMany * kProcesses / 2;
  shared_->counter = begun;
  for (std::uint32_t own = 1; own < kProcesses; ++own) {
    if (::fork() == 0) {
      ::_exit(meetings(*shared_, own, begun, kMany) == kMany ? 0 : 1);
    }
  }
  EXPECT_EQ(meetings(*shared_, 0, begun, kMany), kMany);
  for (std::uint32_t own = 1; own < kProcesses; ++own) {
    int status = -1;
    EXPECT_GT(::wait(&status), 0);
    EXPECT_EQ(status, 0);
  }
}

TEST_F(MeetingTest, WaitsNoLongerThanItSaid) {
  const auto began = std::chrono::steady_clock::now();
  EXPECT_FALSE(met(shared_->counter, 1, 50));
  EXPECT_GE(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(49));
  come(shared_->counter, 2);
  EXPECT_TRUE(met(shared_->counter, 1, 50));
}

TEST_F(MeetingTest, AWakeEndsAWait) {
  const auto began = std::chrono::steady_clock::now();
  std::atomic<bool> back{false};
  std::jthread waker([&] {
    while (!back) {  // Until the other one waits.
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      wake(shared_->counter);
    }
  });
  EXPECT_FALSE(met(shared_->counter, 1, 60'000));
  back = true;
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(30));
}

}  // namespace
}  // namespace plimsoll
