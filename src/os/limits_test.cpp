// SPDX-License-Identifier: Apache-2.0
//
// Limits found in made-up /proc and cgroup trees, and readings of the real process.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <string>

#include <sys/mman.h>
#include <unistd.h>

#include "plimsoll/bytes.h"
#include "plimsoll/limits.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
using namespace literals;

class LimitsTest : public testing::Test {
 protected:
  LimitsTest() {
    std::string pattern = (fs::temp_directory_path() / "plimsoll_limits_XXXXXX").string();
    root_ = ::mkdtemp(pattern.data());
    write(
        "proc/meminfo",
        "MemTotal:       33554432 kB\nMemFree:         1048576 kB\nMemAvailable:   25165824 kB\n");
  }
  ~LimitsTest() override { fs::remove_all(root_); }
  LimitsTest(const LimitsTest&) = delete;
  LimitsTest& operator=(const LimitsTest&) = delete;

  void write(const std::string& name, const std::string& text) const {
    fs::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name) << text;
  }
  [[nodiscard]] Result<LimitReport> find(const std::string& user = "") const {
    LimitQuery query;
    query.user_limit = user;
    query.proc_root = root_ / "proc";
    query.cgroup_root = root_ / "cgroup";
    query.getenv = [this](const char* name) {
      const auto found = environment_.find(name);
      return found == environment_.end() ? nullptr : found->second.c_str();
    };
    return find_limit(query);
  }
  // "SOURCE=BYTES" of every candidate, in order, available memory left out.
  static std::vector<std::string> found(const LimitReport& report) {
    std::vector<std::string> lines;
    for (const LimitCandidate& candidate : report.candidates) {
      if (candidate.source != "available") {
        lines.push_back(candidate.source + "=" + std::to_string(candidate.bytes));
      }
    }
    return lines;
  }

  fs::path root_;
  std::map<std::string, std::string> environment_;
};

using Lines = std::vector<std::string>;

TEST_F(LimitsTest, DefaultsToFourFifthsOfAvailableMemory) {
  const LimitReport report = find().or_throw();
  EXPECT_TRUE(report.defaulted);
  EXPECT_EQ(report.candidates.size(), 1U);
  EXPECT_EQ(report.limit_bytes, 20'615'843'020);  // 80 % of 24 GiB, rounded down.
  EXPECT_EQ(report.explain(),
            "19.2 GiB (80 % of available: " + (root_ / "proc/meminfo").string() + ")");
}

TEST_F(LimitsTest, TakesTheUsersLimitWhenItIsTheSmallest) {
  const LimitReport report = find("768MiB").or_throw();
  EXPECT_FALSE(report.defaulted);
  EXPECT_EQ(report.limit_bytes, 768_MiB);
  EXPECT_EQ(report.explain(), "768.0 MiB (user: --memory-limit)");
}

TEST_F(LimitsTest, TakesAPercentageOfTheMachine) {
  EXPECT_EQ(find("25%").or_throw().limit_bytes, 8_GiB);
}

TEST_F(LimitsTest, ReadsV2LimitsOfEveryAncestorAndSkipsMax) {
  write("proc/self/cgroup", "0::/a/b\n");
  write("cgroup/a/b/memory.max", "max\n");
  write("cgroup/a/b/memory.high", "3221225472\n");
  write("cgroup/a/memory.max", "2147483648\n");
  write("cgroup/a/memory.high", "max\n");
  const LimitReport report = find("4GiB").or_throw();
  EXPECT_EQ(found(report), (Lines{"user=4294967296", "cgroup v2 memory.high=3221225472",
                                  "cgroup v2 memory.max=2147483648"}));
  EXPECT_EQ(report.limit_bytes, 2_GiB);
  EXPECT_EQ(report.explain(),
            "2.0 GiB (cgroup v2 memory.max: " + (root_ / "cgroup/a/memory.max").string() +
                "; below the 4.0 GiB of --memory-limit)");
}

TEST_F(LimitsTest, ReadsV1LimitsOfEveryAncestorAndTakesHugeOnesForNone) {
  write("proc/self/cgroup", "5:cpuset:/x\n4:cpu,memory:/job/task\n1:name=systemd:/\n");
  write("cgroup/memory/job/task/memory.limit_in_bytes", "9223372036854771712\n");
  write("cgroup/memory/job/memory.limit_in_bytes", "1073741824\n");
  write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  const LimitReport report = find().or_throw();
  EXPECT_EQ(found(report), (Lines{"cgroup v1 memory.limit_in_bytes=1073741824"}));
  EXPECT_EQ(report.limit_bytes, 858'993'459);
  EXPECT_EQ(report.explain(), "819.2 MiB (80 % of cgroup v1 memory.limit_in_bytes: " +
                                  (root_ / "cgroup/memory/job/memory.limit_in_bytes").string() +
                                  ")");
}

TEST_F(LimitsTest, ReadsBothVersionsOfAHybridMachine) {
  write("proc/self/cgroup", "4:memory:/v1\n0::/v2\n");
  write("cgroup/memory/v1/memory.limit_in_bytes", "4000000000\n");
  write("cgroup/unified/v2/memory.max", "3000000000\n");
  write("cgroup/v2/memory.max", "1\n");  // Not where version 2 is mounted.
  const LimitReport report = find().or_throw();
  EXPECT_EQ(found(report), (Lines{"cgroup v1 memory.limit_in_bytes=4000000000",
                                  "cgroup v2 memory.max=3000000000"}));
}

TEST_F(LimitsTest, FindsTheMountPointsLimitInAContainer) {
  write("proc/self/cgroup", "4:memory:/docker/0123\n0::/../../outside\n");
  write("cgroup/memory/memory.limit_in_bytes", "536870912\n");
  write("cgroup/memory.max", "1073741824\n");
  const LimitReport report = find().or_throw();
  EXPECT_EQ(found(report), (Lines{"cgroup v1 memory.limit_in_bytes=536870912",
                                  "cgroup v2 memory.max=1073741824"}));
}

TEST_F(LimitsTest, IgnoresMissingAndGarbledFiles) {
  write("proc/self/cgroup", "nonsense\n0::/gone\n\n");
  write("cgroup/memory.max", "lots\n");
  EXPECT_EQ(found(find().or_throw()), Lines{});
}

TEST_F(LimitsTest, ReadsSlurmsMebibytesAndSuffixes) {
  environment_["SLURM_MEM_PER_NODE"] = "2048";
  EXPECT_EQ(found(find().or_throw()), (Lines{"SLURM_MEM_PER_NODE=2147483648"}));
  environment_["SLURM_MEM_PER_NODE"] = "3G";
  EXPECT_EQ(found(find().or_throw()), (Lines{"SLURM_MEM_PER_NODE=3221225472"}));
  environment_["SLURM_MEM_PER_NODE"] = "0";  // The whole node.
  EXPECT_EQ(found(find().or_throw()), Lines{});
}

TEST_F(LimitsTest, MultipliesSlurmsMemoryPerCpu) {
  environment_["SLURM_MEM_PER_CPU"] = "512";
  EXPECT_EQ(found(find().or_throw()), Lines{});  // Without the number of CPUs it says nothing.
  environment_["SLURM_CPUS_ON_NODE"] = "4";
  const LimitReport report = find("8GiB").or_throw();
  EXPECT_EQ(found(report), (Lines{"user=8589934592", "SLURM_MEM_PER_CPU x 4=2147483648"}));
  EXPECT_EQ(report.explain(),
            "2.0 GiB (SLURM_MEM_PER_CPU x 4: environment; below the 8.0 GiB of --memory-limit)");
}

TEST_F(LimitsTest, BlamesTheOptionForAnUnreadableLimit) {
  const auto bad = find("lots");
  ASSERT_FALSE(bad);
  EXPECT_EQ(bad.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(bad.error().to_string(),
            "--memory-limit: \"lots\" is not a size: it does not begin with a number: "
            "write a size such as 512MiB, 6GiB, 6GB, 1048576 or 25%");
  EXPECT_EQ(find("0").error().to_string(),
            "--memory-limit: a limit of 0 bytes: write a size such as 512MiB, 6GiB or 25%");
}

TEST_F(LimitsTest, NeedsProc) {
  fs::remove(root_ / "proc/meminfo");
  EXPECT_EQ(find().error().code, ErrorCode::kIo);
}

TEST_F(LimitsTest, TakesFreeMemoryWhereAvailableIsNotSaid) {
  write("proc/meminfo", "MemTotal: 33554432 kB\nMemFree: 1048576 kB\n");
  EXPECT_EQ(find().or_throw().candidates.back().bytes, 1_GiB);
}

TEST(RealLimitsTest, FindsALimitOnThisMachine) {
  const LimitReport report = find_limit({}).or_throw();
  EXPECT_GT(report.limit_bytes, 0);
  EXPECT_FALSE(report.explain().empty());
}

TEST(ResidentTest, SeesAnonymousMemoryComeAndGo) {
  constexpr std::int64_t kBytes = 64_MiB;
  const Resident before = read_resident().or_throw();
  EXPECT_GT(before.total(), 0);
  EXPECT_GE(before.peak, before.total());
  void* const memory = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const Resident during = read_resident().or_throw();
  ::munmap(memory, kBytes);
  const Resident after = read_resident(::getpid()).or_throw();
  constexpr std::int64_t kSlack = 2_MiB;  // The kernel counts per CPU and settles in batches.
  EXPECT_LT(std::abs(during.anonymous - before.anonymous - kBytes), kSlack);
  EXPECT_LT(std::abs(after.anonymous - before.anonymous), kSlack);
  EXPECT_GE(after.peak, during.total() - kSlack);
}

TEST(ResidentTest, SaysThatAProcessIsGone) {
  EXPECT_EQ(read_resident(INT32_MAX).error().code, ErrorCode::kIo);
}

TEST(FreeDiskTest, LooksAtTheNearestExistingParent) {
  const std::int64_t here = free_disk_bytes("/tmp").or_throw();
  EXPECT_GT(here, 0);
  EXPECT_GT(free_disk_bytes("/tmp/not/made/yet").or_throw(), 0);
  EXPECT_GT(free_disk_bytes("relative/not/made").or_throw(), 0);
}

}  // namespace
}  // namespace plimsoll
