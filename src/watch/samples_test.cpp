// SPDX-License-Identifier: Apache-2.0
//
// Goal: what Samples say of a line is what it holds, in bounded memory, whatever is freed
// meanwhile. Method: addresses are made up; who asks where the program is gets an answer that the
// test sets.
#include "watch/samples.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace plimsoll {
namespace {

thread_local int line_now = 0;

void place_now(Place& place) noexcept {
  if (line_now > 0) {
    std::strcpy(place.file.data(), "train.py");
    place.line = line_now;
  }
}

void* address(std::uintptr_t number) {
  return reinterpret_cast<void*>(0x10000 + 16 * number);
}

class SamplesTest : public ::testing::Test {
 protected:
  ~SamplesTest() override { Samples::end(); }
  static std::vector<Samples::Site> now() { return Samples::by_site(Samples::alive(0, 1000), 10); }
};

TEST_F(SamplesTest, SumsByLineAreUnbiased) {
  Samples::begin(4096, place_now);
  for (std::uintptr_t k = 0; k < 100'000; ++k) {
    line_now = k % 4 == 0 ? 7 : 9;
    Samples::allocated(address(k), k % 4 == 0 ? 300 : 100);
  }
  const auto sites = now();
  ASSERT_EQ(sites.size(), 2U);
  EXPECT_EQ(sites[0].site, "train.py:7");  // 7.5 MB and 7.5 MB: either may be first.
  EXPECT_EQ(sites[1].site, "train.py:9");
  for (const auto& one : sites) {
    EXPECT_NEAR(static_cast<double>(one.bytes), 7.5e6, 0.1 * 7.5e6) << one.site;
    EXPECT_LT(one.samples, 2500);
  }
}

TEST_F(SamplesTest, WhatIsFreedCountsNoMore) {
  Samples::begin(1, place_now);  // Everything.
  line_now = 3;
  for (std::uintptr_t k = 0; k < 10'000; ++k) {
    Samples::allocated(address(k), 64);
    if (k % 10 != 0) {
      Samples::freed(address(k));
    }
  }
  const auto sites = now();
  ASSERT_EQ(sites.size(), 1U);
  EXPECT_EQ(sites[0].samples, 1000);
  EXPECT_EQ(sites[0].bytes, 64'000);
}

TEST_F(SamplesTest, ALineThatGoesOnStandsBeforeALargerOneThatDidOnce) {
  Samples::begin(1, place_now);
  for (std::uint32_t step = 0; step < 100; ++step) {
    Samples::step(step);
    line_now = 3;
    Samples::allocated(address(step), 32);
    if (step == 50) {
      line_now = 5;
      Samples::allocated(address(1000), 1'000'000);
    }
  }
  const auto sites = now();
  ASSERT_EQ(sites.size(), 2U);
  EXPECT_EQ(sites[0].site, "train.py:3");
  EXPECT_EQ(sites[1].bytes, 1'000'000);
}

TEST_F(SamplesTest, StepsTellOldFromNew) {
  Samples::begin(1, place_now);
  line_now = 3;
  for (std::uint32_t step = 0; step < 100; ++step) {
    Samples::step(step);
    Samples::allocated(address(step), 32);
  }
  EXPECT_EQ(Samples::alive(10, 20).size(), 10U);
  EXPECT_EQ(Samples::alive(0, 1000).size(), 100U);
  for (const auto& one : Samples::alive(10, 20)) {
    EXPECT_EQ(reinterpret_cast<void*>(one.address), address(one.step));
  }
}

TEST_F(SamplesTest, WhatMovesKeepsItsStepAndBelongsToTheNewLine) {
  Samples::begin(1, place_now);
  line_now = 3;
  Samples::step(5);
  Samples::allocated(address(1), 100);
  Samples::step(50);
  line_now = 4;
  Samples::moved(reinterpret_cast<std::uintptr_t>(address(1)), address(2), 5000);
  const auto alive = Samples::alive(0, 10);
  ASSERT_EQ(alive.size(), 1U);
  EXPECT_EQ(alive[0].bytes, 5000U);
  EXPECT_EQ(Samples::site(alive[0].place), "train.py:4");
}

TEST_F(SamplesTest, NeverHoldsMoreThanItsTableAndStaysUnbiased) {
  Samples::begin(1, place_now);
  line_now = 3;
  constexpr std::uintptr_t kCount = 10 * Samples::kMost;
  for (std::uintptr_t k = 0; k < kCount; ++k) {
    Samples::allocated(address(k), 1000);
  }
  EXPECT_LE(Samples::alive(0, 1000).size(), Samples::kMost);
  EXPECT_GT(Samples::mean_bytes(), 1);
  EXPECT_NEAR(static_cast<double>(now()[0].bytes), 1000.0 * kCount, 0.1 * 1000.0 * kCount);
}

TEST_F(SamplesTest, LinesAreBounded) {
  Samples::begin(1, place_now);
  for (int line = 1; line < 5000; ++line) {
    line_now = line;
    Samples::allocated(address(static_cast<std::uintptr_t>(line)), 8);
  }
  const auto sites = Samples::by_site(Samples::alive(0, 1), 10'000);
  EXPECT_EQ(sites.size(), Samples::kPlacesMost);
  EXPECT_EQ(sites[0].site, "");  // All that were one too many.
}

TEST_F(SamplesTest, NothingIsSampledBeforeAndAfter) {
  Samples::allocated(address(1), 1 << 30);
  EXPECT_TRUE(Samples::alive(0, 1000).empty());
  Samples::begin(1, place_now);
  Samples::allocated(address(1), 100);
  EXPECT_EQ(Samples::alive(0, 1000).size(), 1U);
  Samples::end();
  EXPECT_FALSE(Samples::on());
  EXPECT_TRUE(Samples::alive(0, 1000).empty());
}

TEST_F(SamplesTest, ThreadsSampleBesideEachOther) {
  Samples::begin(64, place_now);
  {
    std::vector<std::jthread> threads;
    for (std::uintptr_t thread = 0; thread < 4; ++thread) {
      threads.emplace_back([thread] {
        line_now = 1;
        for (std::uintptr_t k = 0; k < 20'000; ++k) {
          Samples::allocated(address(thread * 100'000 + k), 16);
          if (k % 2 == 0) {
            Samples::freed(address(thread * 100'000 + k));
          }
        }
      });
    }
  }
  EXPECT_NEAR(static_cast<double>(now()[0].bytes), 4 * 10'000 * 16.0, 0.15 * 4 * 10'000 * 16.0);
}

TEST_F(SamplesTest, AForkedChildSamplesNothingAndMayBeginAgain) {
  Samples::begin(1, place_now);
  line_now = 2;
  Samples::allocated(address(1), 10);
  const pid_t child = ::fork();
  if (child == 0) {
    Samples::freed(address(1));
    const bool quiet = !Samples::on();
    Samples::begin(1, place_now);
    Samples::allocated(address(2), 10);
    ::_exit(quiet && Samples::alive(0, 1000).size() == 1 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(Samples::alive(0, 1000).size(), 1U);
}

}  // namespace
}  // namespace plimsoll
