// SPDX-License-Identifier: Apache-2.0
#include "watch/verdict.h"

#include <gtest/gtest.h>

#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

using namespace plimsoll::literals;

std::string joined(const Verdict& verdict) {
  std::string text;
  for (const std::string& line : verdict.advice) {
    text += line + "\n";
  }
  return text;
}

// A trainer of 4 GiB with four workers of 1 GiB each.
GuardReport killed() {
  GuardReport report;
  report.status = 137;
  report.in_cgroup = true;
  report.oom_kills = 1;
  report.seconds = 90;
  report.peak = {.bytes = 8_GiB, .anonymous = 7_GiB, .file = 1_GiB, .shared = 0, .processes = 5};
  report.peak.largest.push_back(
      {.pid = 10, .parent = 1, .name = "python", .bytes = 4_GiB, .anonymous = 4_GiB});
  for (int i = 0; i < 4; ++i) {
    report.peak.largest.push_back(
        {.pid = 11 + i, .parent = 10, .name = "pt_data_worker", .bytes = 1_GiB});
  }
  return report;
}

TEST(Verdict, TellsByTheCountersWhoEndedIt) {
  GuardReport report;
  EXPECT_EQ(verdict_of(report, 0, 1_GiB).ending, Ending::kDone);
  report.status = 137;
  EXPECT_EQ(verdict_of(report, 8_GiB, 1_GiB).ending, Ending::kKilled);
  report.machine_oom_kills = 1;
  EXPECT_EQ(verdict_of(report, 8_GiB, 1_GiB).ending, Ending::kMachineFull);
  report.oom_kills = 1;
  EXPECT_EQ(verdict_of(report, 8_GiB, 1_GiB).ending, Ending::kKilledForLimit);
  report.status = 1;  // A worker was killed, and the trainer gave up.
  EXPECT_EQ(verdict_of(report, 8_GiB, 1_GiB).ending, Ending::kKilledForLimit);
  report.status = 0;
  const Verdict survived = verdict_of(report, 8_GiB, 1_GiB);
  EXPECT_EQ(survived.ending, Ending::kDone);
  EXPECT_NE(survived.summary.find("killed 1 of its processes"), std::string::npos);
  report.stopped = true;
  EXPECT_EQ(verdict_of(report, 8_GiB, 1_GiB).ending, Ending::kStopped);
}

TEST(Verdict, ACommandOfItsOwnNeedsNoAdvice) {
  GuardReport report = killed();
  report.oom_kills = 0;
  report.status = 1;
  EXPECT_EQ(joined(verdict_of(report, 8_GiB, 64_GiB)), "");
}

TEST(Verdict, NamesTheWorkersTheBatchAndTheMachine) {
  const Verdict verdict = verdict_of(killed(), 8_GiB, 64_GiB);
  EXPECT_NE(verdict.summary.find("8.0 GiB of 8.0 GiB in 5 processes"), std::string::npos)
      << verdict.summary;
  const std::string advice = joined(verdict);
  EXPECT_NE(advice.find("4 worker processes `pt_data_worker` held 4.0 GiB"), std::string::npos);
  EXPECT_NE(advice.find("saves about 1.0 GiB"), std::string::npos) << advice;
  EXPECT_NE(advice.find("`python` held 4.0 GiB of its own"), std::string::npos) << advice;
  EXPECT_NE(advice.find("64.0 GiB available"), std::string::npos) << advice;
  EXPECT_EQ(joined(verdict_of(killed(), 8_GiB, 4_GiB)).find("a higher limit"), std::string::npos);
}

TEST(Verdict, NamesSharedMemoryAndGrowth) {
  GuardReport report = killed();
  EXPECT_EQ(joined(verdict_of(report, 8_GiB, 1_GiB)).find("shared memory"), std::string::npos);
  report.peak.shared = 3_GiB;
  report.grown_bytes = 2_GiB;
  report.grown_seconds = 60;
  const std::string advice = joined(verdict_of(report, 8_GiB, 1_GiB));
  EXPECT_NE(advice.find("3.0 GiB was shared memory"), std::string::npos) << advice;
  EXPECT_NE(advice.find("grew by 2.0 GiB in its last 60 s"), std::string::npos) << advice;
  report.grown_seconds = 2;  // It had only just begun.
  EXPECT_EQ(joined(verdict_of(report, 8_GiB, 1_GiB)).find("grew by"), std::string::npos);
}

}  // namespace
}  // namespace plimsoll
