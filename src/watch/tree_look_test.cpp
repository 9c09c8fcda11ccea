// SPDX-License-Identifier: Apache-2.0
//
// Goal: what a tree holds is said of the right owner, once, in both tiers.
// Method: real children that fork, map and touch when they are told to; no assert waits for a time.
#include "watch/tree_look.h"

#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <tuple>

#include <fcntl.h>
#include <gtest/gtest.h>

#include "plimsoll/bytes.h"
#include "tests/support/child.h"
#include "watch/owners.h"

namespace plimsoll {
namespace {

using namespace literals;
using Root = TreeLooker::Root;

// A look as a looker takes it that has never looked before: a close one.
TreeLook fresh_look(int pid, Root counted = Root::kCounted) {
  TreeLook look = TreeLooker(pid, counted).look(INT64_MAX).or_throw();
  EXPECT_TRUE(look.close);
  return look;
}

std::int64_t change(const TreeLook& before, const TreeLook& after, Owner owner) {
  return Holdings(after, {}).of(owner) - Holdings(before, {}).of(owner);
}

// But for what stacks, copies on write and the like may add.
testing::AssertionResult close_to(std::int64_t bytes, std::int64_t expected) {
  if (std::abs(bytes - expected) <= 2_MiB) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure() << format_bytes(bytes) << ", not " << format_bytes(expected);
}

TEST(TreeLooker, AProcesssOwnMemoryIsItsHeap) {
  const Child child([](int order) {
    if (order == 1) {
      map_touched(40_MiB);
    }
  });
  const TreeLook before = fresh_look(child.pid());
  child.tell();
  const TreeLook after = fresh_look(child.pid());
  EXPECT_TRUE(close_to(change(before, after, Owner::kHeap), 40_MiB));
  EXPECT_TRUE(close_to(change(before, after, Owner::kChildren), 0));
  EXPECT_GE(change(before, after, Owner::kPageTables), 40_MiB / 4096 * 8);
  EXPECT_EQ(after.tree.processes, 1);
  EXPECT_EQ(after.root.anonymous, read_resident(child.pid()).or_throw().anonymous);
}

// A wrapper stands still while its grandchild grows.
TEST(M4TreeLooker, GrandchildrenOfAWrapperAreSeen) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer's shadow is shared with this process, which no tree here has";
#endif
  std::optional<Child> worker;  // Of the child: forked there.
  const Child wrapper([&](int order) {
    if (order == 0) {
      worker.emplace([](int inner) {
        if (inner == 1) {
          map_touched(48_MiB);
        }
      });
    } else {
      worker->tell();
    }
  });
  const TreeLook before = fresh_look(wrapper.pid());
  wrapper.tell();
  const TreeLook after = fresh_look(wrapper.pid());
  EXPECT_TRUE(close_to(change(before, after, Owner::kChildren), 48_MiB));
  EXPECT_TRUE(close_to(change(before, after, Owner::kHeap), 0));
  ASSERT_EQ(after.tree.processes, 2);
  EXPECT_EQ(after.tree.largest.front().parent, wrapper.pid());
  EXPECT_GE(after.tree.largest.front().anonymous, 48_MiB);
}

TEST(T9TreeLooker, SharedMemoryOfSeveralProcessesCountsOnce) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer's shadow is shared with this process, which no tree here has";
#endif
  std::array<std::optional<Child>, 3> workers;
  const Child parent([&](int order) {
    static void* memory = nullptr;
    if (order == 0) {
      memory = map_touched(32_MiB, MAP_SHARED);
      for (auto& worker : workers) {
        worker.emplace([](int) { std::memset(memory, 1, 32_MiB); });
      }
    }
  });
  const TreeLook look = fresh_look(parent.pid());
  EXPECT_EQ(look.tree.processes, 4);
  EXPECT_TRUE(close_to(Holdings(look, {}).of(Owner::kShared), 32_MiB));
  EXPECT_GE(look.bound_bytes, 4 * 32_MiB);
  EXPECT_LT(look.tree.unbacked(), 4 * 32_MiB);
}

// What a forked child has not written to is its parent's, and counts there.
TEST(TreeLooker, CopiesOnWriteAreTheChildrensOnceTheyAreMade) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer's shadow is shared with this process, which no tree here has";
#endif
  std::optional<Child> worker;
  const Child parent([&](int order) {
    static char* memory = nullptr;
    if (order == 0) {
      memory = static_cast<char*>(map_touched(40_MiB));
      worker.emplace([](int inner) {
        if (inner == 1) {
          std::memset(memory, 1, 40_MiB);
        }
      });
    } else {
      worker->tell();
    }
  });
  const TreeLook before = fresh_look(parent.pid());
  EXPECT_LT(Holdings(before, {}).of(Owner::kChildren), 8_MiB);
  EXPECT_GE(Holdings(before, {}).of(Owner::kHeap), 40_MiB);
  parent.tell();
  const TreeLook after = fresh_look(parent.pid());
  EXPECT_TRUE(close_to(change(before, after, Owner::kChildren), 40_MiB));
  EXPECT_TRUE(close_to(change(before, after, Owner::kHeap), 0));
}

TEST(TreeLooker, MappedFilesAreApart) {
  const auto path = std::filesystem::path(testing::TempDir()) / "tree-look-file.bin";
  std::ofstream(path).write(std::string(24_MiB, 'f').data(), 24_MiB);
  const Child child([&](int order) {
    if (order == 1) {
      const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
      const auto* const bytes = static_cast<const volatile char*>(
          ::mmap(nullptr, 24_MiB, PROT_READ, MAP_SHARED, file, 0));
      for (std::int64_t at = 0; at < 24_MiB; at += 4096) {
        static_cast<void>(bytes[at]);
      }
    }
  });
  const TreeLook before = fresh_look(child.pid());
  child.tell();
  const TreeLook after = fresh_look(child.pid());
  EXPECT_TRUE(close_to(change(before, after, Owner::kFiles), 24_MiB));
  EXPECT_TRUE(close_to(after.tree.unbacked() - before.tree.unbacked(), 0));
}

TEST(TreeLooker, SharedMemoryOnItsWayCounts) {
  const Child child([](int order) {
    if (order == 1) {
      const int file = ::memfd_create("batch", 0);
      std::ignore = ::ftruncate(file, 16 << 20);
      void* const memory =
          ::mmap(nullptr, 16 << 20, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
      std::memset(memory, 1, 16 << 20);
      ::munmap(memory, 16 << 20);
    }
  });
  child.tell();
  const TreeLook look = fresh_look(child.pid());
  EXPECT_EQ(look.in_flight_bytes, 16_MiB);
  EXPECT_TRUE(close_to(Holdings(look, {}).of(Owner::kShared), 16_MiB));
}

TEST(TreeLooker, SharedMemoryThatWasTakenAndNeverTouchedCounts) {
  const Child child([](int order) {
    if (order == 1) {
      const std::string batch(16_MiB, 'b');
      const int file = ::memfd_create("batch", 0);
      std::ignore = ::write(file, batch.data(), batch.size());
      static_cast<void>(::mmap(nullptr, 16_MiB, PROT_READ, MAP_SHARED, file, 0));
    }
  });
  child.tell();
  const TreeLook look = fresh_look(child.pid());
  EXPECT_EQ(look.in_flight_bytes, 16_MiB);
  EXPECT_TRUE(close_to(Holdings(look, {}).of(Owner::kShared), 16_MiB));
}

// Between two close looks: what came, what went, and who ended, as far as resident sizes tell.
TEST(TreeLooker, ShortLooksFollowGrowthAndShrinking) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer's shadow is shared with this process, which no tree here has";
#endif
  std::optional<Child> worker;
  const Child parent([&](int order) {
    static void* memory = nullptr;
    if (order == 0) {
      worker.emplace([](int inner) { map_touched(inner == 0 ? 16_MiB : 24_MiB); });
    } else if (order == 1) {
      memory = map_touched(32_MiB);
    } else if (order == 2) {
      ::munmap(memory, 32_MiB);
    } else if (order == 3) {
      worker->tell();
    } else {
      worker->end();
    }
  });
  TreeLooker looker(parent.pid(), Root::kCounted);
  std::array<TreeLook, 5> looks{};
  looks[0] = looker.look(INT64_MAX).or_throw();
  for (std::size_t i = 1; i < looks.size(); ++i) {
    parent.tell();
    looks[i] = looker.look(INT64_MAX).or_throw();
    EXPECT_GE(looks[i].bound_bytes, looks[i].tree.unbacked());
  }
  EXPECT_TRUE(close_to(change(looks[0], looks[1], Owner::kHeap), 32_MiB));
  EXPECT_TRUE(close_to(looks[1].tree.unbacked() - looks[0].tree.unbacked(), 32_MiB));
  EXPECT_TRUE(close_to(change(looks[1], looks[2], Owner::kHeap), -32_MiB));
  EXPECT_TRUE(close_to(change(looks[2], looks[3], Owner::kChildren), 24_MiB));
  EXPECT_TRUE(close_to(change(looks[3], looks[4], Owner::kChildren), -40_MiB));
}

TEST(TreeLooker, ALimitThatMayBePassedIsLookedAtInAHurry) {
  const Child child([](int) { map_touched(16_MiB); });
  TreeLooker calm(child.pid(), Root::kCounted);
  TreeLooker near(child.pid(), Root::kCounted);
  int calm_looks = 0;
  int near_looks = 0;
  for (int i = 0; i < 2000; ++i) {
    calm_looks += calm.look(INT64_MAX).or_throw().close ? 1 : 0;
    near_looks += near.look(1_MiB).or_throw().close ? 1 : 0;
  }
  EXPECT_GE(calm_looks, 1);
  EXPECT_GT(near_looks, calm_looks);
}

// However hard it is pressed: short looks are the caller's to pace, close ones are its own.
TEST(T11TreeLooker, SaysWhenTheNextLookIsDue) {
  const Child child([](int) { map_touched(16_MiB); });
  TreeLooker looker(child.pid(), Root::kCounted);
  ASSERT_TRUE(looker.look(0));
  const std::int64_t before = looker.spent_ns();
  EXPECT_GT(before, 0);
  ASSERT_TRUE(looker.look(0));
  const std::int64_t took = looker.spent_ns() - before;
  EXPECT_GT(took, 0);
  EXPECT_GT(looker.next_ns(), now_ns());
}

// One process that looks at itself does so rarely, and sees in the end what it has mapped nowhere.
TEST(T11TreeLooker, AProcessSeesItsOwnFilesInMemory) {
  TreeLooker looker(::getpid(), Root::kCounted);
  ASSERT_EQ(looker.look(INT64_MAX).or_throw().in_flight_bytes, 0);
  const int file = ::memfd_create("kept", 0);
  const std::string bytes(4_MiB, 'x');
  ASSERT_EQ(::write(file, bytes.data(), bytes.size()), 4_MiB);
  const std::int64_t spent = looker.rare_ns();
  const std::int64_t began = now_ns();
  int close = 0;
  TreeLook look;
  do {
    look = looker.look(INT64_MAX).or_throw();
    close += look.close ? 1 : 0;
  } while (look.in_flight_bytes == 0);
  EXPECT_EQ(look.in_flight_bytes, 4_MiB);
  EXPECT_EQ(look.tree.shared, 4_MiB);
  const std::int64_t took = now_ns() - began;
  EXPECT_LE(close, took / 250'000'000 + 1);
  EXPECT_LE(looker.rare_ns() - spent, took / 100 + 5'000'000);
  ::close(file);
}

TEST(TreeLooker, WhatNobodyHasResidentIsSeenBetweenCloseLooks) {
  const Child child([](int) {});
  TreeLooker looker(::getpid(), Root::kCounted);
  const int file = ::memfd_create("kept", 0);
  const std::string bytes(4_MiB, 'x');
  std::int64_t seen = 0;
  for (int step = 1; step <= 3; ++step) {
    ASSERT_EQ(::write(file, bytes.data(), bytes.size()), 4_MiB);
    for (seen = 0; seen < step * 4_MiB;) {
      const TreeLook look = looker.look(INT64_MAX).or_throw();
      seen = look.in_flight_bytes;
      EXPECT_GE(look.tree.shared, seen);
      EXPECT_GE(look.bound_bytes, look.tree.unbacked());
    }
  }
  EXPECT_EQ(seen, 12_MiB);
  ::close(file);
}

TEST(TreeLooker, TheRootIsLeftOutWhereItIsTheGuard) {
  void* const own = map_touched(64_MiB);
  const Child child([](int) {});
  const TreeLook look = fresh_look(::getpid(), Root::kLeftOut);
  EXPECT_EQ(look.tree.processes, 1);
  EXPECT_EQ(look.tree.largest.front().pid, child.pid());
  EXPECT_EQ(look.root.total(), 0);
  ::munmap(own, 64_MiB);
}

TEST(TreeLooker, AProcessThatHasEndedIsNamed) {
  Child child([](int) {});
  TreeLooker looker(child.pid(), Root::kCounted);
  ASSERT_TRUE(looker.look(INT64_MAX));
  const std::string pid = std::to_string(child.pid());
  child.end();
  const auto look = looker.look(INT64_MAX);
  ASSERT_FALSE(look);
  EXPECT_EQ(look.error().code, ErrorCode::kNotFound);
  EXPECT_NE(look.error().to_string().find(pid + " has ended"), std::string::npos);
}

TEST(Holdings, WhatAProcessSaysOfItselfPartsItsHeap) {
  TreeLook look;
  look.root.anonymous = 1000;
  look.tree = {.bytes = 1900, .anonymous = 1600, .file = 200, .shared = 100};
  const Holdings outside(look, {});
  EXPECT_EQ(outside.of(Owner::kHeap), 1000);
  EXPECT_EQ(outside.of(Owner::kUnexplained), -1);
  EXPECT_EQ(outside.of(Owner::kTensors), -1);
  EXPECT_EQ(outside.of(Owner::kChildren), 600);
  const Holdings inside(look, {.tensors = 500, .python = 200, .native = 50, .retained = 10});
  EXPECT_EQ(inside.of(Owner::kHeap), -1);
  EXPECT_EQ(inside.of(Owner::kTensors), 500);
  EXPECT_EQ(inside.of(Owner::kLeased), -1);
  EXPECT_EQ(inside.of(Owner::kUnexplained), 240);
  // Allocated and never touched: more is said than is there.
  EXPECT_EQ(Holdings(look, {.tensors = 5000}).of(Owner::kUnexplained), 0);
  EXPECT_STREQ(owner_name(Owner::kPageTables), "page tables");
}

}  // namespace
}  // namespace plimsoll
