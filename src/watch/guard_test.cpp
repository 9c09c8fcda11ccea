// SPDX-License-Identifier: Apache-2.0
//
// Goal: a command ends as it would alone, and one that goes over its limit is ended and said to be.
// The commands are shells and this program itself, told by HOLD_MIB to hold so much and wait.
#include "watch/guard.h"

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "os/cgroup.h"
#include "plimsoll/bytes.h"
#include "tests/support/needs_cgroup.h"
#include "watch/verdict.h"

namespace plimsoll {
namespace {

using namespace plimsoll::literals;
using std::chrono::milliseconds;

TEST(GuardHold, DISABLED_Hold) {
  const char* const text = std::getenv("HOLD_MIB");
  ASSERT_NE(text, nullptr);
  const std::int64_t bytes = std::stoll(text) << 20;
  const std::unique_ptr<char, decltype(&std::free)> memory(
      // NOLINTNEXTLINE(cppcoreguidelines-no-malloc): pages are touched below.
      static_cast<char*>(std::malloc(static_cast<std::size_t>(bytes))), &std::free);
  for (std::int64_t at = 0; at < bytes; at += 4096) {
    static_cast<volatile char*>(memory.get())[at] = 1;
  }
  ::usleep(1'500'000);
}

TEST(GuardHold, DISABLED_Read) {
  const int file = ::open(std::getenv("READ_FILE"), O_RDONLY | O_CLOEXEC);
  const auto bytes = static_cast<std::size_t>(::lseek(file, 0, SEEK_END));
  const void* const memory = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file, 0);
  ASSERT_NE(memory, MAP_FAILED);
  for (std::size_t at = 0; at < bytes; at += 4096) {
    static_cast<void>(static_cast<const volatile char*>(memory)[at]);
  }
  ::usleep(300'000);
}

// Deaf, and takes 200 MiB a second.
TEST(GuardHold, DISABLED_Grow) {
  ::signal(SIGTERM, SIG_IGN);
  const std::int64_t bytes = std::stoll(std::getenv("GROW_MIB")) << 20;
  std::vector<std::string> kept;
  for (std::int64_t at = 0; at < bytes; at += 1_MiB) {
    kept.emplace_back(1_MiB, 'x');
    ::usleep(5000);
  }
}

std::vector<std::string> start(const std::string& variable, const std::string& test) {
  return {"env", variable, "/proc/" + std::to_string(::getpid()) + "/exe",
          "--gtest_also_run_disabled_tests", "--gtest_filter=GuardHold.DISABLED_" + test};
}

std::vector<std::string> hold(int mebibytes) {
  return start("HOLD_MIB=" + std::to_string(mebibytes), "Hold");
}

GuardReport run(GuardOptions options) {
  options.interval = milliseconds{20};
  return run_guarded(options).or_throw();
}

TEST(Guard, PassesTheStatusOn) {
  EXPECT_EQ(run({.command = {"sh", "-c", "exit 7"}}).status, 7);
  EXPECT_EQ(run({.command = {"sh", "-c", "kill -TERM $$"}}).status, 128 + 15);
  EXPECT_EQ(run({.command = {"true"}, .limit_bytes = 64_MiB}).status, 0);
}

TEST(Guard, SaysWhatCannotBeStarted) {
  const auto absent = run_guarded({.command = {"plimsoll-no-such-program"}});
  ASSERT_FALSE(absent);
  EXPECT_EQ(absent.error().code, ErrorCode::kNotFound);
  EXPECT_NE(absent.error().to_string().find("plimsoll-no-such-program"), std::string::npos);
  EXPECT_EQ(run_guarded({}).error().code, ErrorCode::kInvalidArgument);
}

TEST(Guard, SeesThePeakAndTellsOfItOnce) {
  std::vector<std::string> told;
  const GuardReport report =
      run({.command = hold(96), .alert_bytes = 64_MiB, .tell = [&](const std::string& line) {
             told.push_back(line);
           }});
  EXPECT_EQ(report.status, 0);
  EXPECT_GE(report.peak.bytes, 96_MiB);
  EXPECT_GE(report.process_peak_bytes, 96_MiB);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_NE(told[0].find("more than 64.0 MiB"), std::string::npos) << told[0];
}

// Held and given back between two looks: only the kernel knows.
TEST(R66Peak, IsTheKernelsOwnAndNotOnlyWhatWasSeen) {
  for (const bool cgroup : {false, true}) {
    const GuardReport report = run_guarded({.command = hold(96),
                                            .limit_bytes = 512_MiB,
                                            .cgroup = cgroup,
                                            .interval = milliseconds{60'000}})
                                   .or_throw();
    EXPECT_EQ(report.status, 0);
    EXPECT_LT(report.peak.bytes, 96_MiB);
    EXPECT_GE(report.process_peak_bytes, 96_MiB);
    EXPECT_GE(report.peak_bytes(), 96_MiB);
    EXPECT_EQ(report.charged_peak_bytes >= 96_MiB, report.in_cgroup);
  }
}

// A forked child is a copy of the guard until it becomes the command.
TEST(R66Peak, OfTheCommandIsNotTheGuards) {
  constexpr std::int64_t kGuards = 256_MiB;
  const std::unique_ptr<char, decltype(&std::free)> memory(
      // NOLINTNEXTLINE(cppcoreguidelines-no-malloc): pages are touched below.
      static_cast<char*>(std::malloc(kGuards)), &std::free);
  for (std::int64_t at = 0; at < kGuards; at += 4096) {
    static_cast<volatile char*>(memory.get())[at] = 1;
  }
  EXPECT_LT(run({.command = {"sleep", "0.1"}}).peak_bytes(), 64_MiB);
}

TEST(Guard, WithoutACgroupEndsWhatGoesOverTheLimit) {
  std::vector<std::string> told;
  const GuardReport report = run({.command = hold(96),
                                  .limit_bytes = 92_MiB,
                                  .cgroup = false,
                                  .tell = [&](const std::string& line) { told.push_back(line); }});
  EXPECT_TRUE(report.stopped);
  EXPECT_FALSE(report.in_cgroup);
  EXPECT_FALSE(report.no_cgroup.empty());
  EXPECT_EQ(report.status, 128 + 15);
  EXPECT_LT(report.seconds, 1.5);
  ASSERT_EQ(told.size(), 2U);
  EXPECT_NE(told[0].find(report.no_cgroup), std::string::npos) << told[0];
  EXPECT_NE(told[1].find("over the limit of 92.0 MiB"), std::string::npos) << told[1];
  EXPECT_EQ(verdict_of(report, 92_MiB, 1_GiB).ending, Ending::kStopped);
}

// The kernel takes their pages back where it needs them.
TEST(Guard, MappedFilesEndNothing) {
  const auto path = std::filesystem::path(testing::TempDir()) / "guard-read.bin";
  std::ofstream(path).write(std::string(96_MiB, 'f').data(), 96_MiB);
  const GuardReport report = run({.command = start("READ_FILE=" + path.string(), "Read"),
                                  .limit_bytes = 64_MiB,
                                  .cgroup = false});
  std::filesystem::remove(path);
  EXPECT_FALSE(report.stopped);
  EXPECT_EQ(report.status, 0);
  EXPECT_GE(report.peak.file, 96_MiB);
}

TEST(Guard, KillsWhatIgnoresBeingAsked) {
  auto command = hold(96);
  command.insert(command.begin(), {"sh", "-c", "trap '' TERM; \"$@\"", "sh"});
  const GuardReport report =
      run({.command = command, .limit_bytes = 92_MiB, .cgroup = false, .grace = milliseconds{200}});
  EXPECT_TRUE(report.stopped);
  EXPECT_EQ(report.status, 128 + 9);
  EXPECT_LT(report.seconds, 1.5);
}

TEST(Guard, InACgroupTheKernelHoldsTheLimit) {
  if (const auto made = MemoryCgroup::create(64_MiB); !made) {
    PLIMSOLL_SKIP_WITHOUT_CGROUP(made.error().to_string());
  }
  const GuardReport report = run({.command = hold(128), .limit_bytes = 64_MiB});
  EXPECT_TRUE(report.in_cgroup);
  EXPECT_FALSE(report.stopped);
  EXPECT_EQ(report.status, 128 + 9);
  EXPECT_GE(report.oom_kills, 1);
  EXPECT_LT(report.process_peak_bytes, 128_MiB);  // Libraries that others use are not charged.
  EXPECT_EQ(verdict_of(report, 64_MiB, 1_GiB).ending, Ending::kKilledForLimit);
}

// A log says anything, and a kill for memory leaves none: the kernel's counters decide.
TEST(T10Guard, WhatACommandPrintsIsNoSignOfItsEnd) {
  const std::string loud = "echo 'OOM: Out of memory, killed; see the classroom'; exit 1";
  const GuardReport failed = run({.command = {"sh", "-c", loud}, .limit_bytes = 1_GiB});
  EXPECT_EQ(verdict_of(failed, 1_GiB, 2_GiB).ending, Ending::kDone);
  EXPECT_TRUE(verdict_of(failed, 1_GiB, 2_GiB).advice.empty());
  const GuardReport killed = run({.command = {"sh", "-c", "kill -KILL $$"}, .limit_bytes = 1_GiB});
  EXPECT_EQ(killed.status, 137);
  EXPECT_EQ(verdict_of(killed, 1_GiB, 2_GiB).ending, Ending::kKilled);
}

TEST(Guard, EndsWhatIsLeftBehind) {
  const GuardReport report = run({.command = {"sh", "-c", "(sleep 60 &) ; exit 3"}});
  EXPECT_EQ(report.status, 3);
  EXPECT_EQ(report.left_behind, 1);
  EXPECT_LT(report.seconds, 5);
  EXPECT_TRUE(descendants(::getpid()).or_throw().empty());
}

std::string own_choice() {
  std::string own;
  std::ifstream("/proc/self/oom_score_adj") >> own;
  return own;
}

// Of the two the kernel would kill who holds more, which may be the guard: it is made the last,
// where it may, and its command is as it would be alone; so is the command of an alert.
TEST(T10Guard, TheCommandIsKilledBeforeItsGuard) {
  const std::string own = own_choice();
  const auto path = std::filesystem::path(testing::TempDir()) / "guard-choice";
  const std::string tell =
      "cat /proc/self/oom_score_adj /proc/$PPID/oom_score_adj > " + path.string();
  const GuardReport report = run({.command = {"sh", "-c", tell + "; sleep 0.2"},
                                  .alert_bytes = 1,
                                  .alerts = {.command = tell + ".alert"}});
  EXPECT_EQ(report.status, 0);
  std::string first;
  std::string guards;
  for (const char* more : {"", ".alert"}) {
    std::ifstream(path.string() + more) >> first >> guards;
    EXPECT_LT(std::stoi(guards), std::stoi(first)) << more;
    EXPECT_TRUE(guards != "-999" || first == own) << first;
    std::filesystem::remove(path.string() + more);
  }
  EXPECT_EQ(own_choice(), own);
}

TEST(Guard, AsksWhatIsLeftBehindOnce) {
  const auto path = std::filesystem::path(testing::TempDir()) / "guard-asked";
  std::filesystem::remove(path);
  const std::string deaf = "(trap 'echo x >> " + path.string() + "' TERM; touch " + path.string() +
                           "; for i in 1 2 3 4 5 6; do sleep 0.05; done) & while [ ! -e " +
                           path.string() + " ]; do sleep 0.01; done; exit 3";
  EXPECT_EQ(run({.command = {"sh", "-c", deaf}}).status, 3);
  EXPECT_EQ(std::filesystem::file_size(path), 2U);
  std::filesystem::remove(path);
}

// Also while an alert's command takes its time.
TEST(T9Guard, KillsWhatIsLeftBehindBeforeItTakesTheRestOfTheMemory) {
  if (const auto made = MemoryCgroup::create(64_MiB); !made) {
    PLIMSOLL_SKIP_WITHOUT_CGROUP(made.error().to_string());
  }
  auto command = start("GROW_MIB=512", "Grow");
  command.insert(command.begin(), {"sh", "-c", "\"$@\" & sleep 0.5; exit 3", "sh"});
  for (const bool alerts : {false, true}) {
    GuardOptions options{.command = command, .limit_bytes = 256_MiB};
    if (alerts) {
      options.alerts = {.command = "sleep 2", .reserve_bytes = 160_MiB};
    }
    const GuardReport report = run(options);
    EXPECT_TRUE(report.in_cgroup);
    EXPECT_EQ(report.status, 3);
    EXPECT_EQ(report.left_behind, 1);
    EXPECT_EQ(report.oom_kills, 0);
    EXPECT_GT(report.charged_peak_bytes, 200_MiB);
  }
}

}  // namespace
}  // namespace plimsoll
