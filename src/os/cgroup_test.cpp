// SPDX-License-Identifier: Apache-2.0
//
// Goal: the lines of /proc/self/cgroup that matter are found, and a cgroup of one's own holds its
// child to the limit. Skips, with the reason, where none may be made.
#include "os/cgroup.h"

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "plimsoll/bytes.h"
#include "tests/support/needs_cgroup.h"

namespace plimsoll {
namespace {

using namespace plimsoll::literals;
namespace fs = std::filesystem;

TEST(Cgroup, FindsTheLinesThatMatter) {
  const fs::path root = fs::path(::testing::TempDir()) / "cgroup-lines";
  fs::create_directories(root / "self");
  std::ofstream(root / "self" / "cgroup") << "12:cpu,cpuacct:/a\n"
                                             "7:rdma,memory:/job/1\n"
                                             "5:memory_like:/no\n"
                                             "0::/user.slice:odd\n"
                                             "damaged\n";
  const auto lines = read_cgroup_lines(root);
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_FALSE(lines[0].version2);
  EXPECT_EQ(lines[0].path, "/job/1");
  EXPECT_TRUE(lines[1].version2);
  EXPECT_EQ(lines[1].path, "/user.slice:odd");
  EXPECT_TRUE(read_cgroup_lines(root / "nowhere").empty());
}

// As Docker's and Kubernetes' of version 1 are: the path is the host's, what is mounted the
// container's own.
TEST(Cgroup, InAContainerWhatIsMountedIsItsOwn) {
  const fs::path root = fs::path(::testing::TempDir()) / "cgroup-container";
  fs::remove_all(root);
  fs::create_directories(root / "self");
  fs::create_directories(root / "fs" / "memory");
  std::ofstream(root / "fs" / "memory" / "memory.limit_in_bytes") << "1073741824\n";
  std::ofstream(root / "self" / "cgroup") << "4:memory:/docker/4711\n";
  EXPECT_EQ(memory_cgroup(0, root, root / "fs"), root / "fs" / "memory");
  const fs::path inner = root / "fs" / "memory" / "docker" / "4711";
  fs::create_directories(inner);
  std::ofstream(inner / "memory.limit_in_bytes") << "1073741824\n";
  EXPECT_EQ(memory_cgroup(0, root, root / "fs"), inner);
  std::ofstream(root / "self" / "cgroup") << "4:memory:/../another\n";  // Of nobody in here.
  EXPECT_EQ(memory_cgroup(0, root, root / "fs"), fs::path());
}

// Status of a child that joins and touches `bytes`.
int child_holding(const MemoryCgroup& group, std::int64_t bytes) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (!group.join()) {
      ::_exit(1);
    }
    auto* const memory = static_cast<char*>(std::malloc(static_cast<std::size_t>(bytes)));
    for (std::int64_t at = 0; at < bytes; at += 4096) {
      static_cast<volatile char*>(memory)[at] = 1;
    }
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return status;
}

TEST(Cgroup, HoldsItsChildToTheLimitAndIsGoneAfterwards) {
  fs::path folder;
  {
    auto made = MemoryCgroup::create(64_MiB);
    if (!made) {
      PLIMSOLL_SKIP_WITHOUT_CGROUP(made.error().to_string());
    }
    const MemoryCgroup group = std::move(*made);
    folder = group.folder();
    EXPECT_EQ(child_holding(group, 16_MiB), 0);
    EXPECT_EQ(group.oom_kills().or_throw(), 0);
    EXPECT_GE(group.use().peak_bytes, 16_MiB);  // Its child has ended; the peak stays.
    EXPECT_LE(group.use().peak_bytes, 64_MiB);
    EXPECT_FALSE(group.met_limit());
    EXPECT_LE(least_limit_in(folder), 64_MiB);  // The test's own may be less.
    EXPECT_GT(least_limit_in(folder), 0);
    const int status = child_holding(group, 128_MiB);
    ASSERT_TRUE(WIFSIGNALED(status));
    EXPECT_EQ(WTERMSIG(status), SIGKILL);
    EXPECT_EQ(group.oom_kills().or_throw(), 1);
    EXPECT_TRUE(group.met_limit());
  }
  EXPECT_FALSE(fs::exists(folder));
}

}  // namespace
}  // namespace plimsoll
