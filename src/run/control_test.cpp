// SPDX-License-Identifier: Apache-2.0
#include "run/control.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "run/run_folder.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

class ControlTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() /
            fmt::format("plimsoll-control-{}-{}", ::getpid(),
                        ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }
  void touch(const char* name) const { std::ofstream file(root_ / name); }
  fs::path root_;
};

TEST_F(ControlTest, SignalsAskForAStopAndOldHandlersComeBack) {
  struct sigaction before {};
  ::sigaction(SIGTERM, nullptr, &before);
  for (const auto& [number, name] :
       {std::pair{SIGINT, "SIGINT"}, {SIGTERM, "SIGTERM"}, {SIGUSR1, "SIGUSR1"}}) {
    const StopSignals signals;
    RunControl control(root_);
    EXPECT_EQ(control.poll(), Request::kNone);
    ::raise(number);
    EXPECT_EQ(control.poll(), Request::kStop);
    EXPECT_STREQ(control.reason(), name);
    EXPECT_EQ(StopSignals::requested(), number);
  }
  struct sigaction after {};
  ::sigaction(SIGTERM, nullptr, &after);
  EXPECT_EQ(before.sa_handler, after.sa_handler);
}

TEST_F(ControlTest, ASecondInterruptEndsTheProcessAtOnceAndSaysSo) {
  int channel[2];
  ASSERT_EQ(::pipe(channel), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(channel[1], STDERR_FILENO);
    const StopSignals signals;
    ::raise(SIGINT);
    ::raise(SIGINT);
    ::_exit(0);
  }
  ::close(channel[1]);
  std::string text(4096, '\0');
  const ssize_t size = ::read(channel[0], text.data(), text.size());
  ::close(channel[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 130);
  ASSERT_GT(size, 0);
  EXPECT_NE(text.find("second Ctrl-C"), std::string::npos);
}

TEST_F(ControlTest, FilesAskForAStopOrAPauseAndStopWins) {
  StopSignals::clear();
  RunControl control(root_);
  EXPECT_EQ(control.poll(), Request::kNone);
  touch(".pause");
  EXPECT_EQ(control.poll(), Request::kPause);
  touch(".stop");
  EXPECT_EQ(control.poll(), Request::kStop);
  EXPECT_STREQ(control.reason(), ".stop");
}

TEST_F(ControlTest, APausedRunWaitsUntilContinuedOrStopped) {
  StopSignals::clear();
  RunControl control(root_);
  touch(".pause");
  int ticks = 0;
  EXPECT_EQ(control.wait_while_paused([&] {
    if (++ticks == 2) {
      fs::remove(root_ / ".pause");
    }
  }),
            Request::kNone);
  EXPECT_EQ(ticks, 2);
  touch(".pause");
  EXPECT_EQ(control.wait_while_paused([&] { touch(".stop"); }), Request::kStop);
}

TEST_F(ControlTest, AskingANobodyLeavesNoFile) {
  EXPECT_FALSE(ask_to_stop(root_));  // No run.
  const fs::path run = root_ / "run";
  {
    const auto folder = RunFolder::create(run, "[cosir]\n").or_throw();
    EXPECT_TRUE(ask_to_pause(run).or_throw());
    EXPECT_TRUE(fs::exists(run / ".pause"));
    EXPECT_TRUE(ask_to_continue(run).or_throw());
    EXPECT_FALSE(fs::exists(run / ".pause"));
    EXPECT_TRUE(ask_to_stop(run).or_throw());
    EXPECT_TRUE(fs::exists(run / ".stop"));
    fs::remove(run / ".stop");
  }
  EXPECT_FALSE(ask_to_stop(run).or_throw());
  EXPECT_FALSE(fs::exists(run / ".stop"));
  EXPECT_FALSE(ask_to_pause(run).or_throw());
  EXPECT_FALSE(fs::exists(run / ".pause"));
}

}  // namespace
}  // namespace plimsoll
