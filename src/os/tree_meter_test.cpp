// SPDX-License-Identifier: Apache-2.0
//
// Goal: what children hold beside their parent is counted, what they share with it is not, shared
// memory that is resident nowhere is, and weights mapped from a file are told from other files.
// Method: real children, mappings and files; the meter is asked until it has looked.
#include "os/tree_meter.h"

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>
#include <tuple>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "os/mappings.h"
#include "plimsoll/bytes.h"
#include "tests/support/child.h"

namespace plimsoll {
namespace {

using namespace literals;
namespace fs = std::filesystem;

// Asks until the answer satisfies, for a minute; returns the last.
TreeMemory asked_until(TreeMeter& meter, const std::function<bool(const TreeMemory&)>& enough) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  for (;;) {
    const TreeMemory seen = meter.read(read_resident().or_throw(), 0);
    if (enough(seen) || std::chrono::steady_clock::now() > deadline) {
      return seen;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

// Without cgroups, unless a test lays one out: the one the tests run in has other processes in it.
class TreeMeterTest : public testing::Test {
 protected:
  TreeMeter meter_{"/proc", fs::path(testing::TempDir()) / "no-cgroups"};
};

TEST_F(TreeMeterTest, R13ChildrenCountWhatTheyHoldAndNotWhatTheyShare) {
  void* const own = map_touched(200_MiB);
  const Child idle([](int) {});
  const Child holder([](int) { map_touched(60_MiB); });
  const TreeMemory seen = asked_until(meter_, [](const TreeMemory& tree) {
    return tree.children == 2 && tree.children_bytes > 50_MiB;
  });
  EXPECT_EQ(seen.children, 2);
  EXPECT_GE(seen.children_bytes, 60_MiB);
  EXPECT_LT(seen.children_bytes, 90_MiB);  // And not 200 more for each.
  ::munmap(own, 200_MiB);
}

TEST_F(TreeMeterTest, R11PagesThatAForkMadeTwoOfCountTwice) {
  void* const own = map_touched(100_MiB);
  const Child sleeper([](int) {});
  std::memset(own, 1, 100_MiB);
  const TreeMemory seen =
      asked_until(meter_, [](const TreeMemory& tree) { return tree.children_bytes > 90_MiB; });
  EXPECT_GE(seen.children_bytes, 95_MiB);
  EXPECT_LT(seen.children_bytes, 130_MiB);
  ::munmap(own, 100_MiB);
}

TEST_F(TreeMeterTest, R14SharedMemoryOnItsWayCounts) {
  const Child sender([](int) {
    const int file = ::memfd_create("batch", 0);
    std::ignore = ::ftruncate(file, 40 << 20);
    void* const memory =
        ::mmap(nullptr, 40 << 20, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
    std::memset(memory, 1, 40 << 20);
    ::munmap(memory, 40 << 20);  // Only the descriptor is left, as when a worker sends a batch.
  });
  const TreeMemory seen =
      asked_until(meter_, [](const TreeMemory& tree) { return tree.in_flight_bytes > 0; });
  EXPECT_EQ(seen.in_flight_bytes, 40_MiB);
  EXPECT_LT(seen.children_bytes, 30_MiB);
}

// Others' is mapped by a rank as well, which touches a part of it.
TEST_F(TreeMeterTest, WhatRanksExchangeCountsWhereItIsResident) {
  const std::string rows(40_MiB, 'r');
  const int file = ::memfd_create("plimsoll-rank 0123", 0);
  ASSERT_EQ(::write(file, rows.data(), rows.size()), std::ssize(rows));
  void* const others = ::mmap(nullptr, 40_MiB, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  const Child worker([](int) { map_touched(60_MiB); });
  const TreeMemory seen =
      asked_until(meter_, [](const TreeMemory& tree) { return tree.children_bytes > 50_MiB; });
  EXPECT_GE(seen.children_bytes, 50_MiB);
  EXPECT_EQ(seen.in_flight_bytes, 0);
  ::munmap(others, 40_MiB);
  ::close(file);
}

// As a loop keeps the batches of its workers: mapped, with their descriptors, and resident nowhere.
TEST_F(TreeMeterTest, SharedMemoryThatWasTakenAndNeverTouchedCounts) {
  const std::string batch(40_MiB, 'b');
  const int file = ::memfd_create("batch", 0);
  ASSERT_EQ(::write(file, batch.data(), batch.size()), std::ssize(batch));
  void* const kept = ::mmap(nullptr, 40_MiB, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  const auto absent = [&](std::int64_t bytes) {
    return asked_until(meter_,
                       [&](const TreeMemory& tree) { return tree.in_flight_bytes == bytes; })
        .in_flight_bytes;
  };
  {
    const Child worker([](int) {});
    EXPECT_EQ(absent(40_MiB), 40_MiB);
  }
  EXPECT_EQ(meter_.read(read_resident().or_throw(), 0).in_flight_bytes, 40_MiB);
  std::memset(kept, 1, 40_MiB);
  EXPECT_EQ(absent(0), 0);  // It is resident now, and counted as that.
  ::munmap(kept, 40_MiB);
  ::close(file);
}

TEST_F(TreeMeterTest, R51WeightsMappedFromAFileAreToldFromOtherFiles) {
  const fs::path path = fs::path(testing::TempDir()) / "weights.bin";
  std::ofstream(path).write(std::string(24_MiB, 'w').data(), 24_MiB);
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const auto mapped = [&](int flags, int protection) {
    void* const memory = ::mmap(nullptr, 24_MiB, protection, flags | MAP_POPULATE, file, 0);
    EXPECT_NE(memory, MAP_FAILED);
    for (std::int64_t at = 0; at < 24_MiB; at += 4096) {
      static_cast<void>(static_cast<volatile const char*>(memory)[at]);
    }
    return memory;
  };
  EXPECT_EQ(meter_.read(read_resident().or_throw(), 0).mapped_bytes, 0);
  void* const data_set = mapped(MAP_SHARED, PROT_READ);
  std::this_thread::sleep_for(std::chrono::milliseconds(250));
  EXPECT_EQ(meter_.read(read_resident().or_throw(), 0).mapped_bytes, 0);
  ::munmap(data_set, 24_MiB);
  static_cast<void>(meter_.read(read_resident().or_throw(), 0));
  void* const weights = ::mmap(nullptr, 24_MiB, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
  for (std::int64_t at = 0; at < 24_MiB; at += 4096) {
    static_cast<void>(static_cast<volatile const char*>(weights)[at]);
  }
  const TreeMemory seen =
      asked_until(meter_, [](const TreeMemory& tree) { return tree.mapped_bytes > 0; });
  EXPECT_EQ(seen.mapped_bytes, 24_MiB);
  ::munmap(weights, 24_MiB);
  ::close(file);
}

TEST(PrivateFileBytes, AreOfAllFilesButLibraries) {
  const fs::path proc = fs::path(testing::TempDir()) / "private-file-bytes";
  fs::create_directories(proc);
  const auto bytes_of = [&](const char* path) {
    std::ofstream(proc / "maps") << "7f0000000000-7f0000200000 rw-p 00000000 08:01 42 " << path
                                 << "\n";
    return private_file_bytes(proc);
  };
  for (const char* const weights : {"/models/a.safetensors", "/data/by.sort/a.safetensors",
                                    "/hub/x.solar-10b/model.bin", "/m/part.so-far"}) {
    EXPECT_EQ(bytes_of(weights), 2_MiB) << weights;
  }
  for (const char* const library : {"/lib/libtorch_cpu.so", "/lib/libm.so.6",
                                    "/lib/libz.so.1.2 (deleted)", "/lib/x.so (deleted)"}) {
    EXPECT_EQ(bytes_of(library), 0) << library;
  }
}

TEST(TreeMeterGroup, ACgroupOfOurOwnSaysItAndOneThatOthersShareDoesNot) {
  const fs::path root = fs::path(testing::TempDir()) / "tree-meter";
  fs::remove_all(root);
  const fs::path group = root / "cgroup" / "memory" / "job";
  fs::create_directories(group);
  fs::create_directories(root / "proc" / "self");
  std::ofstream(root / "proc" / "self" / "cgroup") << "4:memory:/job\n";
  std::ofstream(group / "memory.limit_in_bytes") << "4294967296\n";
  std::ofstream(group / "memory.stat") << "cache 9000\nrss 1000\nshmem 50\ntotal_cache 9000\n"
                                       << "total_rss 4294967296\ntotal_shmem 1048576\n";
  std::ofstream(group / "cgroup.procs") << ::getpid() << "\n";
  const Resident own{.anonymous = 1_GiB, .file = 10_MiB, .shared = 0};
  TreeMeter alone(root / "proc", root / "cgroup");
  EXPECT_EQ(alone.read(own, 0).children_bytes, 3_GiB + 1_MiB);
  std::ofstream(group / "cgroup.procs", std::ios::app) << 1 << "\n";
  TreeMeter shared(root / "proc", root / "cgroup");
  EXPECT_EQ(shared.read(own, 0).children_bytes, 0);
}

}  // namespace
}  // namespace plimsoll
