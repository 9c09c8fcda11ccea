// SPDX-License-Identifier: Apache-2.0
#include "watch/look_history.h"

#include <filesystem>
#include <fstream>
#include <set>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "tests/support/array_files.h"
#include "watch/kernel_log.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

class LookHistoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = fs::temp_directory_path() /
            fmt::format("plimsoll-looks-{}-{}", ::getpid(),
                        ::testing::UnitTest::GetInstance()->current_test_info()->name());
  }
  void TearDown() override { fs::remove(path_); }

  LookHistory open(int pid = 1) const {
    return LookHistory::open(path_, {.pid = pid, .began = 1.5e9, .cgroup = "/a", .command = "c d"})
        .or_throw();
  }
  void add(LookHistory& history, std::int64_t from, std::int64_t to) const {
    for (std::int64_t at = from; at < to; ++at) {
      ASSERT_TRUE(history.add({.time = 1e9 + static_cast<double>(at), .step = at}));
    }
  }
  fs::path path_;
};

TEST_F(LookHistoryTest, GivesBackWhatWasKept) {
  KeptLook look{.time = 1.25e9,
                .step = 1LL << 40,
                .epoch = 3,
                .loss = 0.5,
                .rows_per_second = 1024,
                .limit_bytes = 7LL << 30,
                .held_bytes = 6LL << 30,
                .phase = "a name that is longer than it may be",
                .course = Course::kLeak,
                .owner = Owner::kChildren,
                .bytes_per_unit = 123456.5,
                .cgroup_oom_kills = 2,
                .machine_oom_kills = 9,
                .booted = 1'200'000'000,
                .largest = {{.pid = 4711, .name = "python", .bytes = 5LL << 40}}};
  look.owners.fill(-1);
  look.owners[2] = 3LL << 30;
  {
    LookHistory history = open(77);
    ASSERT_TRUE(history.add(look));
  }
  const auto kept = LookHistory::read(path_).or_throw();
  EXPECT_EQ(kept.life.number, 1);
  EXPECT_EQ(kept.life.pid, 77);
  EXPECT_EQ(kept.life.cgroup, "/a");
  EXPECT_EQ(kept.life.command, "c d");
  ASSERT_EQ(kept.looks.size(), 1U);
  const KeptLook& got = kept.looks[0];
  EXPECT_EQ(got.step, look.step);
  EXPECT_EQ(got.epoch, 3);
  EXPECT_EQ(got.loss, 0.5);
  EXPECT_EQ(got.held_bytes, look.held_bytes);
  EXPECT_EQ(got.owners, look.owners);
  EXPECT_EQ(got.phase, "a name that is ");
  EXPECT_EQ(got.course, Course::kLeak);
  EXPECT_EQ(got.owner, Owner::kChildren);
  EXPECT_EQ(got.bytes_per_unit, look.bytes_per_unit);
  EXPECT_EQ(got.machine_oom_kills, 9);
  EXPECT_EQ(got.booted, look.booted);
  ASSERT_EQ(got.largest.size(), 1U);
  EXPECT_EQ(got.largest[0].name, "python");
  EXPECT_EQ(got.largest[0].bytes, (std::int64_t{UINT32_MAX} - 1) << 10);  // More than 4 TiB is cut.
}

// The newest are all there; the older, the fewer, and never a gap of more than four times the
// distance that their age allows.
TEST_F(LookHistoryTest, KeepsItsSizeAndReachesBack) {
  constexpr std::int64_t kLooks = 200'000;
  LookHistory history = open();
  add(history, 0, kLooks);
  EXPECT_EQ(fs::file_size(path_), static_cast<std::uintmax_t>(LookHistory::kBytes));
  const auto looks = LookHistory::read(path_).or_throw().looks;
  EXPECT_GT(looks.size(), 700U);
  EXPECT_EQ(looks.back().step, kLooks - 1);
  EXPECT_EQ(looks.front().step, 0);
  for (std::size_t at = 1; at < looks.size(); ++at) {
    const std::int64_t age = kLooks - looks[at - 1].step;
    const std::int64_t gap = looks[at].step - looks[at - 1].step;
    EXPECT_LE(gap, std::max<std::int64_t>(1, age / 25)) << "at " << looks[at].step;
    EXPECT_TRUE(age > LookHistory::kSlots * 4 / 3 || gap == 1) << "at " << looks[at].step;
  }
}

TEST_F(LookHistoryTest, ANewLifeGoesOnWithTheFile) {
  {
    LookHistory first = open(1);
    add(first, 0, 10);
  }
  LookHistory second = open(2);
  add(second, 10, 15);
  const auto kept = LookHistory::read(path_).or_throw();
  EXPECT_EQ(kept.life.number, 2);
  EXPECT_EQ(kept.life.pid, 2);
  ASSERT_EQ(kept.looks.size(), 15U);
  EXPECT_EQ(kept.looks[9].life, 1);
  EXPECT_EQ(kept.looks[10].life, 2);
  EXPECT_EQ(kept.looks[14].number, 14);
}

// A kill within a write leaves half a slot, a flipped bit anything: that look alone is lost.
TEST_F(LookHistoryTest, ADamagedLookIsLostAndNoOther) {
  {
    LookHistory history = open();
    add(history, 0, 100);
  }
  const std::string whole = test::slurp(path_);
  std::int64_t found = 0;
  for (std::size_t at = 4096; at < whole.size(); at += 256) {
    if (whole.compare(at, 4, std::string_view("\0\0\0\0", 4)) == 0) {
      continue;
    }
    std::string damaged = whole;
    damaged[at + 30] = static_cast<char>(damaged[at + 30] ^ 4);
    test::spill(path_, damaged);
    EXPECT_EQ(LookHistory::read(path_).or_throw().looks.size(), 99U);
    ++found;
  }
  EXPECT_EQ(found, 100);
}

TEST_F(LookHistoryTest, WhatIsNoHistoryIsRefusedAndMadeAnew) {
  EXPECT_EQ(LookHistory::read(path_).error().code, ErrorCode::kNotFound);
  test::spill(path_, "something else");
  const auto refused = LookHistory::read(path_);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kCorrupt);
  LookHistory history = open();
  add(history, 0, 1);
  EXPECT_EQ(LookHistory::read(path_).or_throw().looks.size(), 1U);
}

TEST(KernelLog, OnlyTheKernelsOwnLinesCount) {
  const auto kill = parse_kill(
      "6,1234,5678901234,-;Memory cgroup out of memory: Killed process 4711 (pt_data_worker) "
      "total-vm:22222kB, anon-rss:11264kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:60kB");
  ASSERT_TRUE(kill);
  EXPECT_EQ(kill->pid, 4711);
  EXPECT_EQ(kill->name, "pt_data_worker");
  EXPECT_TRUE(kill->of_cgroup);
  EXPECT_EQ(kill->anonymous_bytes, 11264 << 10);
  EXPECT_DOUBLE_EQ(kill->seconds, 5678.901234);
  const auto machine = parse_kill("3,1,99,-;Out of memory: Killed process 12 (a b) total-vm:1kB");
  ASSERT_TRUE(machine);
  EXPECT_FALSE(machine->of_cgroup);
  EXPECT_EQ(machine->name, "a b");
  for (const char* other : {
           "12,1,99,-;Out of memory: Killed process 12 (python)",  // A program's own words.
           "6,1,99,-;the classroom: Out of memory: Killed process 12 (python)",
           "6,1,99,-;Out of memory: Killed process soon (python)",
           "6,1,99,-;Out of memory and patience",
           "Out of memory: Killed process 12 (python)",
           "",
       }) {
    EXPECT_FALSE(parse_kill(other)) << other;
  }
}

}  // namespace
}  // namespace plimsoll
