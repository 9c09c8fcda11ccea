// SPDX-License-Identifier: Apache-2.0
//
// Goal: the bound that is met first is found, whoever else is charged to it. Method: a laid-out
// /proc and cgroups of version 2.
#include "watch/room.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>

#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

using namespace literals;
namespace fs = std::filesystem;

class LeastRoom : public testing::Test {
 protected:
  LeastRoom() {
    fs::remove_all(root_);
    fs::create_directories(root_ / "proc" / "70");
    fs::create_directories(root_ / "cgroup" / "job" / "part");
    std::ofstream(root_ / "proc" / "meminfo")
        << "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n";  // 32 GiB of 64.
    std::ofstream(root_ / "proc" / "70" / "cgroup") << "0::/job/part\n";
  }
  void group(const std::string& path, const std::string& most, std::int64_t anonymous) const {
    std::ofstream(root_ / "cgroup" / path / "memory.max") << most << "\n";
    std::ofstream(root_ / "cgroup" / path / "memory.stat")
        << "anon " << anonymous << "\nfile 999999999999\nshmem 0\n";
  }
  [[nodiscard]] Room room(std::int64_t held, std::int64_t run_limit) const {
    return least_room(70, held, run_limit, root_ / "proc", root_ / "cgroup").or_throw();
  }
  const fs::path root_ = fs::path(testing::TempDir()) / "least-room";
};

TEST_F(LeastRoom, OfTheMachineWhereNothingElseBounds) {
  const Room machine = room(2_GiB, 0);
  EXPECT_EQ(machine.source, "available");
  EXPECT_EQ(machine.limit_bytes, 34_GiB);  // What the tree holds is available to it.
  EXPECT_EQ(machine.left_bytes, 32_GiB);
}

TEST_F(LeastRoom, OfTheRunWhereItsLimitIsLess) {
  const Room run = room(2_GiB, 6_GiB);
  EXPECT_EQ(run.source, "limit of the run");
  EXPECT_EQ(run.limit_bytes, 6_GiB);
  EXPECT_EQ(run.left_bytes, 4_GiB);
  EXPECT_DOUBLE_EQ(run.seconds_left(static_cast<double>(1_GiB)), 4);
  EXPECT_TRUE(std::isinf(run.seconds_left(0)));
  EXPECT_EQ(room(7_GiB, 6_GiB).left_bytes, 0);
}

// The job's cgroup may hold 8 GiB, of which another process has taken 5: page cache is not taken.
TEST_F(LeastRoom, OfACgroupAboveItThatOthersAreChargedToo) {
  group("job/part", "max", 2_GiB);
  group("job", std::to_string(8_GiB), 7_GiB);
  const Room job = room(2_GiB, 6_GiB);
  EXPECT_EQ(job.source, "cgroup v2 memory.max");
  EXPECT_EQ(job.limit_bytes, 8_GiB);
  EXPECT_EQ(job.left_bytes, 1_GiB);
}

}  // namespace
}  // namespace plimsoll
