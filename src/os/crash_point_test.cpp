// SPDX-License-Identifier: Apache-2.0
//
// Each test forks, so that the child may die.
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <functional>

#include <sys/wait.h>
#include <unistd.h>

#include "os/crash_point.h"

namespace plimsoll {
namespace {

// Runs `work` in a child with PLIMSOLL_CRASH=`crash`. Returns its exit status, or minus the signal.
int outcome(const char* crash, const std::function<int()>& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::setenv("PLIMSOLL_CRASH", crash, 1);
    reload_crash_points();
    ::_exit(work());
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

int pass_points() {
  for (int i = 0; i < 3; ++i) {
    crash_point("a");
    crash_point("b");
  }
  return 0;
}

TEST(CrashPointTest, DoesNothingUnlessAsked) {
  EXPECT_EQ(outcome("", pass_points), 0);
  EXPECT_EQ(outcome("c:1", pass_points), 0);
  EXPECT_EQ(outcome("a:4", pass_points), 0);
}

TEST(CrashPointTest, KillsAtTheNthPassageOfAName) {
  EXPECT_EQ(outcome("a:1", pass_points), -SIGKILL);
  EXPECT_EQ(outcome("b:3", pass_points), -SIGKILL);
  EXPECT_EQ(outcome("b", pass_points), -SIGKILL);  // No number: the first.
}

TEST(CrashPointTest, CountsEveryPointForAStar) {
  EXPECT_EQ(outcome("*:6", pass_points), -SIGKILL);
  EXPECT_EQ(outcome("*:7", pass_points), 0);
}

TEST(CrashPointTest, CountsPassagesWhileArmed) {
  const auto count = [](const char* name) {
    return outcome("none:1", [name] {
      pass_points();
      return static_cast<int>(crash_point_count(name));
    });
  };
  EXPECT_EQ(count("a"), 3);
  EXPECT_EQ(count("*"), 6);
  EXPECT_EQ(count("never"), 0);
}

TEST(CrashPointTest, CountsNothingWhenUnset) {
  const int counted = outcome("", [] {
    pass_points();
    return static_cast<int>(crash_point_count("*"));
  });
  EXPECT_EQ(counted, 0);
}

}  // namespace
}  // namespace plimsoll
