// SPDX-License-Identifier: Apache-2.0
//
// Goal: descendants and nobody else are counted, shared memory once. Method: a laid-out /proc with
// names that mislead, and real children that share a mapping.
#include "os/process_tree.h"

#include <array>
#include <csignal>
#include <fstream>
#include <tuple>

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

using namespace plimsoll::literals;
namespace fs = std::filesystem;

TreeUse tree_below(int root, const fs::path& proc = "/proc") {
  return read_tree(descendants(root, proc).or_throw(), proc);
}

class LaidOut : public ::testing::Test {
 protected:
  LaidOut() { fs::remove_all(proc_); }
  void add(int pid, const std::string& name, int parent, const std::string& state,
           const std::string& rollup, const std::string& stack = "") const {
    const fs::path folder = proc_ / std::to_string(pid);
    fs::create_directories(folder);
    std::ofstream(folder / "stat")
        << pid << " (" << name << ") " << state << " " << parent << " 1 1 0 -1"
        << (stack.empty() ? "" : " 0 0 0 0 0 0 0 0 0 0 20 0 1 99 0 0 0 0 0 " + stack) << " 0\n";
    if (!rollup.empty()) {
      std::ofstream(folder / "smaps_rollup") << "00400000-7ffc ---p 00000000 00:00 0 [rollup]\n"
                                             << rollup;
    }
  }
  fs::path proc_ = fs::path(::testing::TempDir()) / "process-tree";
};

TEST_F(LaidOut, CountsDescendantsAndNobodyElse) {
  fs::create_directories(proc_ / "sys");
  add(10, "guard", 1, "S", "Rss: 9000 kB\nPss: 9000 kB\n");
  add(30, "python", 10, "R",
      "Rss: 500 kB\nPss: 400 kB\nPss_Anon: 300 kB\nPss_File: 60 kB\nPss_Shmem: 40 kB\n");
  add(20, "a) R 1 (b", 30, "S", "Pss: 100 kB\n");  // A name that looks like the fields behind it.
  add(40, "python", 20, "Z", "");                  // Ended, and not yet reaped.
  add(50, "other", 1, "S", "Pss: 7000 kB\n");
  const TreeUse tree = tree_below(10, proc_);
  EXPECT_EQ(tree.processes, 2);
  EXPECT_EQ(tree.bytes, 500 << 10);
  EXPECT_EQ(tree.anonymous, 300 << 10);
  EXPECT_EQ(tree.file, 60 << 10);
  EXPECT_EQ(tree.shared, 40 << 10);
  ASSERT_EQ(tree.largest.size(), 2U);
  EXPECT_EQ(tree.largest[0].pid, 30);
  EXPECT_EQ(tree.largest[1].name, "a) R 1 (b");
  EXPECT_EQ(tree.largest[1].parent, 30);
}

TEST_F(LaidOut, R57TakesTheKernelsListsOfChildrenWhereItKeepsThem) {
  add(10, "trainer", 1, "S", "");
  add(30, "worker", 10, "S", "Pss: 400 kB\n");
  add(31, "worker", 10, "Z", "");
  add(40, "decoder", 30, "S", "Pss: 100 kB\n");
  const auto children = [&](int pid, int thread, const std::string& pids) {
    const fs::path folder = proc_ / std::to_string(pid) / "task" / std::to_string(thread);
    fs::create_directories(folder);
    std::ofstream(folder / "children") << pids;
  };
  children(10, 10, "");
  children(10, 11, "30 31 ");
  children(30, 30, "40 ");
  children(40, 40, "");
  EXPECT_EQ(descendants(10, proc_).or_throw(), (std::vector<int>{30, 40}));
  EXPECT_EQ(tree_below(10, proc_).bytes, 500 << 10);
}

TEST_F(LaidOut, WhoMayNotBeReadCountsWithItsResidentSize) {
  fs::create_directories(proc_);
  add(30, "setuid", 10, "S", "");
  std::ofstream(proc_ / "30" / "statm") << "900 25 3 1 0 9 0\n";
  EXPECT_EQ(tree_below(10, proc_).bytes, 25 * ::sysconf(_SC_PAGESIZE));
  std::ofstream(proc_ / "30" / "status")
      << "VmHWM: 400 kB\nRssAnon: 300 kB\nRssFile: 10 kB\nRssShmem: 20 kB\nVmPTE: 12 kB\n";
  const TreeUse tree = tree_below(10, proc_);
  EXPECT_EQ(tree.anonymous, 300 << 10);
  EXPECT_EQ(tree.shared, 20 << 10);
  EXPECT_EQ(tree.bytes, 330 << 10);
}

TEST_F(LaidOut, NamesTheLargestOnly) {
  for (int i = 0; i < 100; ++i) {
    add(100 + i, "worker", 10, "S", "Pss: " + std::to_string(1 + i) + " kB\n");
  }
  const TreeUse tree = tree_below(10, proc_);
  EXPECT_EQ(tree.processes, 100);
  EXPECT_EQ(tree.bytes, 5050 << 10);
  EXPECT_EQ(tree.largest.size(), TreeUse::kNamedMost);
  EXPECT_EQ(tree.largest.front().bytes, 100 << 10);
}

// The rollup says something else than the resident sizes, so that it shows which was read.
TEST_F(LaidOut, OnlyWhoSharesIsWalkedThrough) {
  const auto add_large = [&](int pid, int parent, const std::string& stack, int shared_kib = 0) {
    add(pid, "python", parent, "S", "Pss: 1000 kB\nPss_Anon: 1000 kB\n", stack);
    std::ofstream(proc_ / std::to_string(pid) / "status")
        << "VmHWM: 2097152 kB\nRssAnon:\t 1048576 kB\nRssFile: 10 kB\nRssShmem: " << shared_kib
        << " kB\nVmPTE: 12 kB\n";
  };
  add_large(10, 1, "7001");
  add_large(20, 10, "7002");  // Made an exec.
  add_large(30, 10, "7001");  // A forked worker of the root, …
  add_large(31, 20, "7003");  // … and workers of another, …
  add_large(32, 31, "7003");
  add_large(40, 10, "7004", 65536);  // … shared memory, …
  add_large(50, 10, "0");            // … and somebody else's.
  const TreeUse tree = tree_below(10, proc_);
  ASSERT_EQ(tree.processes, 6);
  for (const ProcessUse& use : tree.largest) {
    EXPECT_EQ(use.anonymous, use.pid == 20 ? 1_GiB : 1000_KiB) << use.pid;
    EXPECT_EQ(use.resident_peak, 2_GiB);
  }
}

TEST_F(LaidOut, ErrorsNameTheFolder) {
  const auto found = descendants(1, proc_ / "nowhere");
  ASSERT_FALSE(found);
  EXPECT_NE(found.error().to_string().find("nowhere"), std::string::npos);
}

TEST_F(LaidOut, TellsPageTablesAndThePeakOfEach) {
  add(30, "python", 10, "R", "Pss: 400 kB\n");
  std::ofstream(proc_ / "30" / "status") << "Name:\tpython\nVmHWM:\t    900 kB\nVmPTE:\t 12 kB\n";
  const TreeUse tree = tree_below(10, proc_);
  EXPECT_EQ(tree.resident_peak, 900 << 10);
  EXPECT_EQ(tree.page_tables, 12 << 10);
  EXPECT_EQ(tree.unbacked(), 400 << 10);  // Without the kinds, all of it.
}

TEST(ProcessTree, AProcessIsStoppedUntilItGoesOn) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  EXPECT_FALSE(process_stopped(child));
  ::kill(child, SIGSTOP);
  siginfo_t info{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &info, WSTOPPED), 0);
  EXPECT_TRUE(process_stopped(child));
  ::kill(child, SIGCONT);
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &info, WCONTINUED), 0);
  EXPECT_FALSE(process_stopped(child));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_FALSE(process_stopped(child));
}

TEST(ProcessTree, APidThatIsTakenAgainIsAnotherProcess) {
  const auto began = process_began(::getpid());
  ASSERT_TRUE(began);
  EXPECT_GT(*began, 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::_exit(0);
  }
  siginfo_t info{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  EXPECT_FALSE(process_began(child));  // Ended, and not yet reaped.
  ::waitpid(child, nullptr, 0);
  EXPECT_FALSE(process_began(child));
  EXPECT_EQ(process_began(::getpid()), began);
}

TEST(ProcessTree, K17CountsWhatChildrenShareOnce) {
  constexpr std::int64_t kShared = 32_MiB;
  void* const memory =
      ::mmap(nullptr, kShared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  std::array<int, 2> ready{};
  ASSERT_EQ(::pipe(ready.data()), 0);
  std::array<pid_t, 2> children{};
  for (pid_t& child : children) {
    child = ::fork();
    if (child == 0) {
      for (std::int64_t at = 0; at < kShared; at += 4096) {
        static_cast<volatile char*>(memory)[at] = 1;
      }
      std::ignore = ::write(ready[1], "x", 1);
      ::pause();
    }
  }
  char one = 0;
  ASSERT_EQ(::read(ready[0], &one, 1), 1);
  ASSERT_EQ(::read(ready[0], &one, 1), 1);
  const TreeUse tree = tree_below(::getpid());
  for (const pid_t child : children) {
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
  ::munmap(memory, kShared);
  EXPECT_EQ(tree.processes, 2);
  EXPECT_GE(tree.bytes, kShared);
  if (tree.shared == 0) {
    GTEST_SKIP() << "this kernel does not tell what a proportional share is of";
  }
  EXPECT_GE(tree.shared, kShared);
  EXPECT_LT(tree.shared, kShared + kShared / 2);
}

}  // namespace
}  // namespace plimsoll
