// SPDX-License-Identifier: Apache-2.0
#include "watch/alerts.h"

#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include "tests/support/array_files.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::int64_t kGiB = 1LL << 30;

class AlertsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() /
            fmt::format("plimsoll-alerts-{}-{}", ::getpid(),
                        ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  // A look `at` so many milliseconds, with so many hundredths of 10 GiB left.
  AlertLevel look(Alerts& alerts, std::int64_t at, double left, const Finding& finding = {}) {
    const std::int64_t left_bytes = static_cast<std::int64_t>(left * 10 * kGiB / 100);
    return alerts.look(
        begin_ + milliseconds(at), 10 * kGiB - left_bytes,
        {.source = "limit of the run", .limit_bytes = 10 * kGiB, .left_bytes = left_bytes},
        "process 7", finding);
  }
  std::vector<nlohmann::json> lines(const char* name = "file") const {
    std::vector<nlohmann::json> all;
    std::ifstream file(root_ / name);
    for (std::string line; std::getline(file, line);) {
      all.push_back(nlohmann::json::parse(line));
    }
    return all;
  }
  // Waits until the command has ended.
  void settle(Alerts& alerts) {
    for (int i = 0; i < 1000 && alerts.busy(); ++i) {
      alerts.poll(begin_);
      std::this_thread::sleep_for(milliseconds(10));
    }
    ASSERT_FALSE(alerts.busy());
  }

  fs::path root_;
  Alerts::Clock::time_point begin_{Alerts::Clock::now()};
};

TEST_F(AlertsTest, LevelsRiseAtOnceAndFallWhenThereIsRoomAgain) {
  Alerts alerts({.file = root_ / "file"});
  EXPECT_EQ(look(alerts, 0, 40), AlertLevel::kCalm);
  EXPECT_EQ(look(alerts, 1000, 16), AlertLevel::kCalm);
  EXPECT_EQ(look(alerts, 2000, 14), AlertLevel::kHigh);
  EXPECT_EQ(look(alerts, 3000, 16), AlertLevel::kHigh);  // Not yet 15 % and 5 %.
  EXPECT_EQ(look(alerts, 4000, 14), AlertLevel::kHigh);
  EXPECT_EQ(look(alerts, 5000, 21), AlertLevel::kCalm);
  EXPECT_EQ(look(alerts, 6000, 4), AlertLevel::kAct);
  EXPECT_EQ(look(alerts, 7000, 9), AlertLevel::kAct);
  EXPECT_EQ(look(alerts, 8000, 11), AlertLevel::kHigh);
  const auto told = lines();
  ASSERT_EQ(told.size(), 4U);
  EXPECT_EQ(told[0]["level"], "high");
  EXPECT_EQ(told[1]["level"], "calm");
  EXPECT_EQ(told[2]["level"], "act");
  EXPECT_EQ(told[3]["level"], "high");
  EXPECT_EQ(told[0]["source"], "limit of the run");
  EXPECT_EQ(told[0]["left_bytes"], static_cast<std::int64_t>(1.4 * kGiB));
  EXPECT_TRUE(told[0]["seconds_left"].is_null());
}

// 1 GiB a second: what came in a quarter to half a second is more than the 0.3 GiB of the last
// look.
TEST_F(AlertsTest, WhatGrowsFastIsActedUponSooner) {
  Alerts slow({.file = root_ / "slow"});
  Alerts fast({.file = root_ / "fast"});
  for (int at = 0; at < 20; ++at) {
    const double left = 12 + 0.1 * (20 - at);
    EXPECT_EQ(look(slow, 1000 * at, left), AlertLevel::kHigh);
  }
  AlertLevel level = AlertLevel::kCalm;
  double left = 100;
  for (int at = 0; level != AlertLevel::kAct; ++at) {
    left -= 1;  // 100 MiB in 20 ms: 5 GiB a second.
    ASSERT_GT(left, 10);
    level = look(fast, 20 * at, left);
  }
  EXPECT_LE(left, 15);
}

// A bound of which 15 % come in less time than it takes to hear of it.
TEST_F(AlertsTest, WhatWouldPassTheBoundInATenthOfASecondIsActedUponAboveTheThresholds) {
  Alerts alerts({.file = root_ / "file", .signals = {SIGTERM, SIGKILL}});
  double left = 100;
  int at = 0;
  for (AlertLevel level = AlertLevel::kCalm; level != AlertLevel::kAct; at += 10) {
    left -= 2;  // 200 MiB in 10 ms: 20 GiB a second.
    ASSERT_GT(left, 15);
    level = look(alerts, at, left);
  }
  EXPECT_LE(left, 50);
  EXPECT_EQ(alerts.act_signal(begin_ + milliseconds(at)), SIGTERM);
  EXPECT_FALSE(alerts.nearly_gone());
  for (; !alerts.nearly_gone(); at += 10) {
    left -= 2;
    ASSERT_GT(left, 2);  // Above a 64th.
    look(alerts, at, left);
  }
  EXPECT_EQ(alerts.act_signal(begin_ + milliseconds(at)), SIGKILL);
}

// A cgroup holds more than the processes that were found so far; and a bound that moves is no
// growth.
TEST_F(AlertsTest, GrowthIsOfWhatIsBounded) {
  Alerts unseen({.file = root_ / "unseen"});
  Alerts moved({.file = root_ / "moved"});
  AlertLevel level = AlertLevel::kCalm;
  for (int at = 0; at < 10; ++at) {
    const std::int64_t left = (20 - at) * kGiB / 2;
    level = unseen.look(begin_ + milliseconds(10 * at), kGiB,
                        {.source = "cgroup", .limit_bytes = 12 * kGiB, .left_bytes = left},
                        "process 7", {});
    const std::int64_t limit = (30 - 2 * at) * kGiB;
    EXPECT_EQ(moved.look(begin_ + milliseconds(10 * at), kGiB,
                         {.source = "cgroup", .limit_bytes = limit, .left_bytes = limit - kGiB},
                         "process 7", {}),
              AlertLevel::kCalm);
  }
  EXPECT_EQ(level, AlertLevel::kAct);
}

TEST_F(AlertsTest, TheReserveIsKeptForActing) {
  Alerts alerts({.file = root_ / "file", .reserve_bytes = 1 * kGiB});
  EXPECT_EQ(look(alerts, 0, 11), AlertLevel::kHigh);
  EXPECT_EQ(look(alerts, 1000, 9), AlertLevel::kAct);
  EXPECT_EQ(look(alerts, 2000, 14), AlertLevel::kAct);
  EXPECT_EQ(look(alerts, 3000, 16), AlertLevel::kHigh);
}

TEST_F(AlertsTest, ALeakIsToldOnceAnOwner) {
  Alerts alerts({.file = root_ / "file"});
  const Finding leak{.course = Course::kLeak,
                     .owner = Owner::kChildren,
                     .bytes_per_unit = 5e8,  // A step.
                     .bytes_per_second = 1e8};
  look(alerts, 0, 50);
  look(alerts, 1000, 50, leak);
  look(alerts, 2000, 49, leak);
  const auto told = lines();
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0]["level"], "leak");
  EXPECT_EQ(told[0]["owner"], "children");
  EXPECT_NEAR(told[0]["seconds_left"].get<double>(), 5 * kGiB / 1e8, 0.1);
  EXPECT_NE(told[0]["text"].get<std::string>().find("grows by 95.4 MiB a second"),
            std::string::npos)
      << told[0]["text"];
}

TEST_F(AlertsTest, SignalsComeOnceAndTheSecondLaterOrWhenNothingIsLeft) {
  Alerts late({.signals = {SIGTERM, SIGKILL}});
  look(late, 0, 20);
  EXPECT_EQ(late.act_signal(begin_), 0);
  look(late, 1000, 4);
  EXPECT_EQ(late.act_signal(begin_ + seconds(1)), SIGTERM);
  EXPECT_EQ(late.act_signal(begin_ + seconds(2)), 0);
  look(late, 3000, 60);  // It has let go of much: the second comes all the same, as it did not end.
  EXPECT_EQ(late.act_signal(begin_ + seconds(12)), SIGKILL);
  EXPECT_EQ(late.act_signal(begin_ + seconds(99)), 0);
  Alerts soon({.signals = {SIGTERM, SIGKILL}});
  look(soon, 0, 4);
  EXPECT_EQ(soon.act_signal(begin_), SIGTERM);
  look(soon, 10, 1);
  EXPECT_EQ(soon.act_signal(begin_ + milliseconds(10)), SIGKILL);
}

TEST_F(AlertsTest, LooksComeTheSoonerTheLessIsLeft) {
  Alerts alerts({.signals = {SIGTERM}});
  look(alerts, 0, 90);
  EXPECT_EQ(alerts.pause(), Alerts::kLookMost);
  look(alerts, 1000, 4);
  EXPECT_NEAR(static_cast<double>(alerts.pause().count()), 100, 3);
  look(alerts, 2000, 0);
  EXPECT_EQ(alerts.pause(), Alerts::kLookLeast);
}

TEST_F(AlertsTest, TheFileKeepsToItsBound) {
  Alerts alerts({.file = root_ / "file"});
  const std::string text(3000, 'x');
  for (int at = 0; at < 1000; ++at) {
    alerts.say(begin_, "size", text);
  }
  EXPECT_LE(fs::file_size(root_ / "file"), static_cast<std::uintmax_t>(Alerts::kFileBytes));
  EXPECT_LE(fs::file_size(root_ / "file.1"), static_cast<std::uintmax_t>(Alerts::kFileBytes));
  EXPECT_GT(fs::file_size(root_ / "file.1"), 900'000U);
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), fs::directory_iterator()), 2);
  EXPECT_EQ(lines().back()["text"], text);
}

TEST_F(AlertsTest, AFileThatCannotBeWrittenIsToldOnce) {
  std::vector<std::string> told;
  Alerts alerts({.file = root_ / "nowhere" / "file",
                 .tell = [&](const std::string& text) { told.push_back(text); }});
  alerts.say(begin_, "size", "a");
  alerts.say(begin_, "size", "b");
  ASSERT_EQ(told.size(), 1U);
  EXPECT_NE(told[0].find("nowhere"), std::string::npos);
}

TEST_F(AlertsTest, TheCommandReadsTheLineAndComesNotTooOften) {
  const std::string command = fmt::format(
      "read line; echo \"$line\" >> {0}/heard; echo $PLIMSOLL_ALERT >> {0}/levels", root_.string());
  Alerts alerts({.command = command});
  look(alerts, 0, 14);
  settle(alerts);
  look(alerts, 1000, 30);  // Calm again: no matter for a command.
  look(alerts, 2000, 14);  // Too soon after the last.
  settle(alerts);
  look(alerts, 3000, 4);  // Time to act is never too soon.
  settle(alerts);
  look(alerts, 40'000, 30);
  look(alerts, 50'000, 14);
  settle(alerts);
  EXPECT_EQ(test::slurp(root_ / "levels"), "high\nact\nhigh\n");
  const auto heard = lines("heard");
  ASSERT_EQ(heard.size(), 3U);
  EXPECT_EQ(heard[1]["level"], "act");
}

TEST_F(AlertsTest, OneCommandRunsAtATimeAndAnEndlessOneIsKilledWithItsChildren) {
  const std::string command =
      fmt::format("echo x >> {0}/started; sleep 1000 & echo $! > {0}/child; wait", root_.string());
  Alerts alerts({.command = command});
  look(alerts, 0, 14);
  look(alerts, 1000, 4);  // Waits.
  for (int i = 0; i < 500 && !fs::exists(root_ / "child"); ++i) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  std::this_thread::sleep_for(milliseconds(100));
  alerts.poll(begin_ + seconds(1));
  EXPECT_EQ(test::slurp(root_ / "started"), "x\n");
  const int child = std::stoi(test::slurp(root_ / "child"));
  alerts.poll(begin_ + Alerts::kCommandMost + seconds(1));
  for (int i = 0; i < 500 && test::slurp(root_ / "started") != "x\nx\n"; ++i) {
    alerts.poll(begin_ + Alerts::kCommandMost + seconds(1));
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_EQ(test::slurp(root_ / "started"), "x\nx\n");
  bool gone = false;
  for (int i = 0; i < 500 && !gone; ++i) {
    std::ifstream stat(fmt::format("/proc/{}/stat", child));
    std::string pid;
    std::string name;
    std::string state;
    gone = !(stat >> pid >> name >> state) || state == "Z";
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_TRUE(gone);
}

TEST(Signals, AreNamedInAnyOfTheirForms) {
  EXPECT_EQ(parse_signals("TERM").or_throw(), std::vector{SIGTERM});
  EXPECT_EQ(parse_signals("SIGUSR1,KILL").or_throw(), (std::vector{SIGUSR1, SIGKILL}));
  EXPECT_EQ(parse_signals("2").or_throw(), std::vector{SIGINT});
  for (const char* wrong : {"", "TERM,", "TERM,KILL,INT", "QUICKLY", "0", "99", "TERM KILL"}) {
    EXPECT_FALSE(parse_signals(wrong)) << wrong;
  }
}

}  // namespace
}  // namespace plimsoll
