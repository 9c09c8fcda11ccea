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

TEST(T10Verdict, TellsWhoseLimitTheKernelKilledAt) {
  GuardReport report = killed();
  report.killer = Killer::kCgroup;
  report.killer_limit_bytes = 8_GiB;
  const Verdict around = verdict_of(report, 64_GiB, 64_GiB);
  EXPECT_EQ(around.ending, Ending::kKilledInCgroup);
  EXPECT_NE(around.summary.find("in the cgroup around it, which may hold 8.0 GiB"),
            std::string::npos)
      << around.summary;
  EXPECT_EQ(joined(around).find("a higher limit"), std::string::npos) << joined(around);
  report.killer = Killer::kMachine;
  EXPECT_EQ(verdict_of(report, 64_GiB, 64_GiB).ending, Ending::kMachineFull);
}

TEST(Verdict, ACommandOfItsOwnNeedsNoAdvice) {
  GuardReport report = killed();
  report.oom_kills = 0;
  report.status = 1;
  EXPECT_EQ(joined(verdict_of(report, 8_GiB, 64_GiB)), "");
}

TEST(Verdict, NamesTheWorkersTheBatchAndTheMachine) {
  const Verdict verdict = verdict_of(killed(), 8_GiB, 64_GiB);
  EXPECT_NE(verdict.summary.find("peak 8.0 GiB of 8.0 GiB"), std::string::npos) << verdict.summary;
  EXPECT_NE(verdict.summary.find("at one look 8.0 GiB in 5 processes"), std::string::npos)
      << verdict.summary;
  const std::string advice = joined(verdict);
  EXPECT_NE(advice.find("4 worker processes `pt_data_worker` held 4.0 GiB"), std::string::npos);
  EXPECT_NE(advice.find("saves about 1.0 GiB"), std::string::npos) << advice;
  EXPECT_NE(advice.find("`python` held 4.0 GiB of its own"), std::string::npos) << advice;
  EXPECT_NE(advice.find("64.0 GiB available"), std::string::npos) << advice;
  EXPECT_EQ(joined(verdict_of(killed(), 8_GiB, 4_GiB)).find("a higher limit"), std::string::npos);
}

TEST(Verdict, BlamesNobodyWhomNoLookSawNearThePeak) {
  GuardReport report = killed();
  report.process_peak_bytes = 3 * report.peak.bytes;
  const std::string advice = joined(verdict_of(report, 8_GiB, 64_GiB));
  EXPECT_EQ(advice.find("of its own"), std::string::npos) << advice;
  EXPECT_EQ(advice.find("worker processes"), std::string::npos) << advice;
  EXPECT_NE(advice.find("a higher limit"), std::string::npos) << advice;
}

TEST(Verdict, NamesSharedMemory) {
  GuardReport report = killed();
  EXPECT_EQ(joined(verdict_of(report, 8_GiB, 1_GiB)).find("shared memory"), std::string::npos);
  report.peak.shared = 3_GiB;
  const std::string advice = joined(verdict_of(report, 8_GiB, 1_GiB));
  EXPECT_NE(advice.find("3.0 GiB was shared memory"), std::string::npos) << advice;
}

TEST(R61Growth, ComesFirstAndAdviceThatContradictsItIsDropped) {
  GuardReport report = killed();
  report.growth = {.bytes = 300_MiB,
                   .seconds = 2,
                   .ended_at = 89,
                   .name = "python",
                   .processes = 1,
                   .group_bytes = 300_MiB};
  const Verdict verdict = verdict_of(report, 8_GiB, 64_GiB);
  ASSERT_EQ(verdict.advice.size(), 1U) << joined(verdict);
  const std::string& line = verdict.advice.front();
  EXPECT_EQ(line.find("`python` grew steadily, by 300.0 MiB within 2.0 s (150.0 MiB a second): "
                      "look for what is kept from step to step"),
            0U)
      << line;
  EXPECT_NE(line.find("A smaller batch or a higher limit would only put off the end"),
            std::string::npos)
      << line;
}

TEST(R61Growth, WorkersThatGrowAreNamed) {
  GuardReport report = killed();
  report.growth = {.bytes = 3_GiB,
                   .seconds = 60,
                   .ended_at = 89,
                   .name = "pt_data_worker",
                   .processes = 4,
                   .group_bytes = 3_GiB};
  const std::string advice = joined(verdict_of(report, 8_GiB, 64_GiB));
  EXPECT_EQ(advice.find("4 processes `pt_data_worker` grew steadily, by 3.0 GiB within 60.0 s"), 0U)
      << advice;
  EXPECT_NE(advice.find("a cache in the dataset"), std::string::npos) << advice;
}

TEST(R61Growth, IsNotBlamedWhereItDidNotLeadToTheEnd) {
  GuardReport report = killed();
  report.growth = {.bytes = 3_GiB,
                   .seconds = 5,
                   .ended_at = 10,
                   .name = "python",
                   .processes = 1,
                   .group_bytes = 3_GiB};
  EXPECT_NE(joined(verdict_of(report, 8_GiB, 64_GiB)).find("grew steadily"), std::string::npos)
      << "it stood at its limit since";
  report.peak.bytes = 7_GiB + 256_MiB;  // Loaded its data, trained, and was killed much later.
  EXPECT_EQ(joined(verdict_of(report, 8_GiB, 64_GiB)).find("grew steadily"), std::string::npos);
  report.growth.ended_at = 85;
  EXPECT_NE(joined(verdict_of(report, 8_GiB, 64_GiB)).find("grew steadily"), std::string::npos);
  EXPECT_EQ(joined(verdict_of(report, 16_GiB, 64_GiB)).find("grew steadily"), std::string::npos)
      << "one large allocation beyond what was ever seen";
}

TEST(R61Thrashing, IsSaidWithItsSecondsAndItsFaults) {
  GuardReport report = killed();
  report.stalled_seconds = 5;
  EXPECT_EQ(verdict_of(report, 8_GiB, 1_GiB).summary.find("waiting"), std::string::npos);
  report.stalled_seconds = 60;
  report.major_faults = 1'234'567;
  const std::string summary = verdict_of(report, 8_GiB, 1_GiB).summary;
  EXPECT_NE(
      summary.find("it spent 60 s at its limit waiting for memory (1234567 major page faults"),
      std::string::npos)
      << summary;
}

TEST(R66Peak, IsNeverBelowWhatTheKernelCounted) {
  GuardReport report = killed();
  report.peak.bytes = 79_MiB;
  report.process_peak_bytes = 413_MiB;
  EXPECT_EQ(report.peak_bytes(), 413_MiB);
  std::string summary = verdict_of(report, 600_MiB, 1_GiB).summary;
  EXPECT_NE(summary.find("peak 413.0 MiB of 600.0 MiB"), std::string::npos) << summary;
  report.charged_peak_bytes = 450_MiB;
  EXPECT_EQ(report.peak_bytes(), 450_MiB);
  summary = verdict_of(report, 600_MiB, 1_GiB).summary;
  EXPECT_NE(summary.find("peak 450.0 MiB of 600.0 MiB, page cache included; largest process "
                         "413.0 MiB; most seen at one look 79.0 MiB"),
            std::string::npos)
      << summary;
}

TEST(R66Peak, AboveTheLimitIsExplained) {
  GuardReport report = killed();
  report.peak.bytes = 508_MiB;
  report.charged_peak_bytes = 500_MiB;
  const std::string summary = verdict_of(report, 500_MiB, 1_GiB).summary;
  EXPECT_NE(summary.find("peak 508.0 MiB, 500.0 MiB of it charged to the limit of 500.0 MiB (files "
                         "in use elsewhere are not)"),
            std::string::npos)
      << summary;
}

TEST(R66Peak, WithoutALimitThereIsNoneToNameEvenWhereNothingWasSeen) {
  const std::string summary = verdict_of({.status = 5}, 0, 1_GiB).summary;
  EXPECT_EQ(summary, "ended with status 5 after 0.0 s; peak 0 B");
}

}  // namespace
}  // namespace plimsoll
