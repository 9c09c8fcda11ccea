// SPDX-License-Identifier: Apache-2.0
//
// What the kernel says of memory, from trees of files laid out here as it lays them out.
#include "os/memory_signals.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include <unistd.h>

#include <fmt/format.h>

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

class MemorySignalsTest : public testing::Test {
 protected:
  MemorySignalsTest()
      : root_(fs::temp_directory_path() /
              fmt::format("plimsoll-signals-{}-{}", ::getpid(),
                          testing::UnitTest::GetInstance()->current_test_info()->name())) {
    fs::create_directories(root_);
  }
  ~MemorySignalsTest() override { fs::remove_all(root_); }
  MemorySignalsTest(const MemorySignalsTest&) = delete;
  MemorySignalsTest& operator=(const MemorySignalsTest&) = delete;

  // In place, as a file of the kernel's changes: descriptors opened before see it.
  void write(const std::string& path, const std::string& text) const {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  static std::string events(int high, int max, int oom) {
    return fmt::format("low 0\nhigh {}\nmax {}\noom {}\noom_kill 0\n", high, max, oom);
  }
  static std::string stalls(double full) {
    return fmt::format(
        "some avg10=90.00 avg60=9.00 avg300=1.00 total=12345\n"
        "full avg10={:.2f} avg60=0.00 avg300=0.00 total=678\n",
        full);
  }
  [[nodiscard]] MemorySignals open() const {
    return MemorySignals::open(root_ / "proc", root_ / "cgroup");
  }

  fs::path root_;
};

TEST_F(MemorySignalsTest, SayNothingWhereThereIsNothingToRead) {
  MemorySignals none;
  EXPECT_EQ(none.read(), KernelPressure::kNone);
  MemorySignals empty = open();
  EXPECT_EQ(empty.read(), KernelPressure::kNone);
}

TEST_F(MemorySignalsTest, ACgroupThatMeetsItsBoundIsTightOnceForEveryTime) {
  write("proc/self/cgroup", "0::/a/b\n");
  write("cgroup/a/b/memory.events", events(5, 7, 0));
  MemorySignals signals = open();
  EXPECT_EQ(signals.read(), KernelPressure::kNone);  // What was before is past.
  write("cgroup/a/b/memory.events", events(5, 8, 0));
  EXPECT_EQ(signals.read(), KernelPressure::kTight);
  EXPECT_EQ(signals.read(), KernelPressure::kNone);
  write("cgroup/a/b/memory.events", events(6, 8, 0));
  EXPECT_EQ(signals.read(), KernelPressure::kTight);
}

TEST_F(MemorySignalsTest, AnAncestorsBoundCountsToo) {
  write("proc/self/cgroup", "0::/a/b\n");
  write("cgroup/a/b/memory.events", events(0, 0, 0));
  write("cgroup/a/memory.events", events(0, 0, 0));
  MemorySignals signals = open();
  write("cgroup/a/memory.events", events(0, 1, 0));
  EXPECT_EQ(signals.read(), KernelPressure::kTight);
}

TEST_F(MemorySignalsTest, MemoryThatWasRefusedIsAStall) {
  write("proc/self/cgroup", "0::/a\n");
  write("cgroup/a/memory.events", events(0, 0, 0));
  MemorySignals signals = open();
  write("cgroup/a/memory.events", events(0, 4, 1));
  EXPECT_EQ(signals.read(), KernelPressure::kStalled);
  EXPECT_EQ(signals.read(), KernelPressure::kNone);
}

TEST_F(MemorySignalsTest, TasksOfTheOwnCgroupThatWaitAreAStall) {
  write("proc/self/cgroup", "0::/a\n");
  write("proc/pressure/memory", stalls(99.0));  // The machine's: the cgroup's own comes first.
  write("cgroup/a/memory.pressure", stalls(9.99));
  MemorySignals signals = open();
  EXPECT_EQ(signals.read(), KernelPressure::kNone);
  write("cgroup/a/memory.pressure", stalls(10.0));
  EXPECT_EQ(signals.read(), KernelPressure::kStalled);
  EXPECT_EQ(signals.read(), KernelPressure::kStalled);  // An average: it holds as long as it lasts.
}

TEST_F(MemorySignalsTest, TasksOfTheMachineThatWaitAreNoMoreThanTight) {
  write("proc/self/cgroup", "0::/\n");
  write("cgroup/memory.pressure", stalls(0.0));  // Of the root: that is the machine.
  write("proc/pressure/memory", stalls(40.0));
  MemorySignals signals = open();
  EXPECT_EQ(signals.read(), KernelPressure::kTight);
  write("proc/pressure/memory", stalls(1.0));
  EXPECT_EQ(signals.read(), KernelPressure::kNone);
}

TEST_F(MemorySignalsTest, Version1CountsTheTimesItsBoundWasMet) {
  write("proc/self/cgroup", "4:memory:/box\n");
  write("cgroup/memory/box/memory.failcnt", "3\n");
  write("cgroup/memory/memory.failcnt", "0\n");
  MemorySignals signals = open();
  EXPECT_EQ(signals.read(), KernelPressure::kNone);
  write("cgroup/memory/box/memory.failcnt", "4\n");
  EXPECT_EQ(signals.read(), KernelPressure::kTight);
  EXPECT_EQ(signals.read(), KernelPressure::kNone);
}

TEST_F(MemorySignalsTest, OpenNoMoreFilesThanTheyMay) {
  std::string path;
  for (int depth = 0; depth < 2 * MemorySignals::kFilesMax; ++depth) {
    path += "/d";
    write("cgroup" + path + "/memory.events", events(0, 0, 0));
  }
  write("proc/self/cgroup", "0::" + path + "\n");
  MemorySignals signals = open();
  write("cgroup" + path + "/memory.events", events(0, 1, 0));
  EXPECT_EQ(signals.read(), KernelPressure::kTight);
  MemorySignals moved = std::move(signals);
  write("cgroup" + path + "/memory.events", events(0, 2, 0));
  EXPECT_EQ(moved.read(), KernelPressure::kTight);
}

}  // namespace
}  // namespace plimsoll
