// SPDX-License-Identifier: Apache-2.0
#include "os/background_thread.h"

#include <algorithm>
#include <array>
#include <string>
#include <thread>

#include <gtest/gtest.h>

namespace plimsoll {
namespace {

TEST(BackgroundThread, YieldsToTheThreadThatStartedIt) {
  const int before = getpriority(PRIO_PROCESS, 0);
  int its_own = 0;
  std::array<char, 16> name{};
  std::thread([&] {
    enter_background("pl-test-0");
    its_own = getpriority(PRIO_PROCESS, 0);
    pthread_getname_np(pthread_self(), name.data(), name.size());
  }).join();
  EXPECT_EQ(its_own, std::min(before + 10, 19));
  EXPECT_EQ(getpriority(PRIO_PROCESS, 0), before);
  EXPECT_EQ(std::string(name.data()), "pl-test-0");
}

}  // namespace
}  // namespace plimsoll
