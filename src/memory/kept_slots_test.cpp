// SPDX-License-Identifier: Apache-2.0
//
// Goal: whoever takes a slot has its memory, and hears the truth of its content; the rest is given
// back when it is needed, and comes again.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "memory/kept_slots.h"
#include "plimsoll/bytes.h"
#include "tests/support/unleased.h"

namespace plimsoll {
namespace {

using namespace literals;
using Found = KeptSlots::Found;

constexpr std::int64_t kCount = 8;
constexpr std::int64_t kSlot = 8_MiB;
constexpr std::int64_t kFixed = 24_MiB;  // More than a slot: a pool counts both together.

class KeptSlotsTest : public testing::Test {
 protected:
  KeptSlotsTest() : governor_(Governor::create({.memory_limit = "512MiB"}).or_throw()) {}
  ~KeptSlotsTest() override { governor_.close(); }
  KeptSlotsTest(const KeptSlotsTest&) = delete;
  KeptSlotsTest& operator=(const KeptSlotsTest&) = delete;

  std::unique_ptr<KeptSlots> open(HostRegistration driver = {}) {
    return KeptSlots::open(governor_, kCount, kSlot, kFixed, driver).or_throw();
  }
  [[nodiscard]] std::int64_t leased() const { return governor_.state().leased_bytes; }

  Governor governor_;
};

void fill(KeptSlots& slots, std::int64_t slot, char value) {
  ASSERT_NE(slots.take(slot), Found::kNothing);
  std::memset(slots.data() + slot * slots.stride(), value, static_cast<std::size_t>(kSlot));
  slots.give(slot, true);
}

bool holds(KeptSlots& slots, std::int64_t slot, char value) {
  const auto* const data = reinterpret_cast<const char*>(slots.data() + slot * slots.stride());
  return std::all_of(data, data + kSlot, [value](char one) { return one == value; });
}

TEST_F(KeptSlotsTest, IsLeasedAtOpenAndFindsWhatWasLeft) {
  {
    const auto slots = open();
    EXPECT_EQ(leased(), kFixed + kCount * kSlot);
    EXPECT_EQ(slots->take(0), Found::kRoom);
    slots->give(0, false);
    EXPECT_FALSE(slots->has_content(0));
    EXPECT_EQ(slots->take(0), Found::kRoom) << "what nobody filled has no content";
    slots->give(0, false);
    fill(*slots, 3, 'x');
    EXPECT_TRUE(slots->has_content(3));
    EXPECT_EQ(slots->take(3), Found::kContent);
    EXPECT_FALSE(slots->has_content(3)) << "it is taken";
    EXPECT_TRUE(holds(*slots, 3, 'x'));
    slots->give(3, true);
  }
  EXPECT_EQ(leased(), 0);
}

TEST_F(KeptSlotsTest, WhatIsTakenStaysAndTheRestIsGivenBackFromTheEnd) {
  const auto slots = open();
  for (std::int64_t slot = 0; slot < kCount; ++slot) {
    fill(*slots, slot, 'a');
  }
  ASSERT_EQ(slots->take(kCount - 1), Found::kContent);
  EXPECT_EQ(slots->reclaim(PressureMove::kPurge, kSlot), 0);
  EXPECT_EQ(slots->reclaim(PressureMove::kShrink, kSlot + 1), 2 * kSlot);
  EXPECT_EQ(leased(), kFixed + (kCount - 2) * kSlot);
  EXPECT_TRUE(holds(*slots, kCount - 1, 'a'));
  EXPECT_EQ(slots->take(kCount - 2), Found::kNothing);
  EXPECT_EQ(slots->take(kCount - 3), Found::kNothing);
  EXPECT_EQ(slots->take(kCount - 4), Found::kContent);
  slots->give(kCount - 4, true);
  EXPECT_EQ(slots->reclaim(PressureMove::kShrink, INT64_MAX), 5 * kSlot);
  EXPECT_EQ(leased(), kFixed + kSlot) << "the one that is taken";
  slots->give(kCount - 1, true);
  EXPECT_EQ(slots->take(kCount - 1), Found::kContent);
}

TEST_F(KeptSlotsTest, GrowsBackEmpty) {
  const auto slots = open();
  fill(*slots, 0, 'a');
  fill(*slots, 1, 'b');
  EXPECT_EQ(slots->reclaim(PressureMove::kShrink, INT64_MAX), kCount * kSlot);
  EXPECT_EQ(slots->grow_back(kSlot - 1), 0);
  EXPECT_EQ(slots->grow_back(2 * kSlot + 1), 2 * kSlot);
  EXPECT_EQ(leased(), kFixed + 2 * kSlot);
  EXPECT_FALSE(slots->has_content(0));
  EXPECT_EQ(slots->take(0), Found::kRoom);
  EXPECT_EQ(slots->take(1), Found::kRoom);
  EXPECT_EQ(slots->take(2), Found::kNothing);
}

TEST_F(KeptSlotsTest, GivesWayToALeaseAndGrowsBackAfterIt) {
  const auto slots = open();
  const std::int64_t room = governor_.state().free_bytes();
  {
    const Lease lease = governor_.reserve(Tag::kTensor, room + 3 * kSlot).or_throw();
    EXPECT_LE(slots->leased_bytes(), (kCount - 3) * kSlot);
    const auto more = governor_.reserve(Tag::kTensor, kCount * kSlot);
    EXPECT_FALSE(more) << "there is no more than all of it";
  }
  for (int boundary = 0; boundary < 300 && slots->leased_bytes() < kCount * kSlot; ++boundary) {
    static_cast<void>(governor_.step_boundary());
  }
  EXPECT_EQ(slots->leased_bytes(), kCount * kSlot);
}

TEST_F(KeptSlotsTest, GivesWayUnderPressure) {
  const auto slots = open();
  const test::Unleased foreign(440_MiB);
  const PressureReport report = governor_.step_boundary();
  EXPECT_GT(report.shrunk_bytes, 0);
  EXPECT_LT(slots->leased_bytes(), kCount * kSlot);
}

TEST_F(KeptSlotsTest, IsRefusedWhereThereIsNoRoom) {
  const auto refused = KeptSlots::open(governor_, 1000, kSlot, kFixed);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kOverBudget);
  EXPECT_EQ(KeptSlots::open(governor_, -1, kSlot, kFixed).error().code,
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(leased(), 0);
}

// What a driver knows of.
std::map<void*, std::size_t> registered;     // NOLINT(*-non-const-global-variables)
std::int64_t registers_at_most = INT64_MAX;  // NOLINT(*-non-const-global-variables)

int add(void* data, std::size_t size, unsigned flags) {
  if (std::ssize(registered) >= registers_at_most || flags != 1) {
    return 2;
  }
  return registered.emplace(data, size).second ? 0 : 712;
}

int remove(void* data) {
  return registered.erase(data) == 1 ? 0 : 713;
}

TEST_F(KeptSlotsTest, ADriverKnowsOfWhatIsThereAndOfNothingElse) {
  const HostRegistration driver{.add = &add, .remove = &remove, .flags = 1};
  {
    const auto slots = open(driver);
    EXPECT_EQ(std::ssize(registered), kCount);
    EXPECT_EQ(slots->reclaim(PressureMove::kShrink, 3 * kSlot), 3 * kSlot);
    EXPECT_EQ(std::ssize(registered), kCount - 3);
    registers_at_most = kCount - 2;
    EXPECT_EQ(slots->grow_back(3 * kSlot), kSlot) << "the driver takes no more";
    EXPECT_EQ(leased(), kFixed + (kCount - 2) * kSlot);
    registers_at_most = INT64_MAX;
  }
  EXPECT_TRUE(registered.empty());
  registers_at_most = 3;
  EXPECT_EQ(KeptSlots::open(governor_, kCount, kSlot, kFixed, driver).error().code, ErrorCode::kIo);
  registers_at_most = INT64_MAX;
  EXPECT_TRUE(registered.empty()) << "of the refused ones neither";
  EXPECT_EQ(leased(), 0);
}

TEST_F(KeptSlotsTest, UsersAndPressureFromManyThreads) {
  const auto slots = open();
  std::atomic<bool> over{false};
  std::thread pressure([&] {
    while (!over) {
      static_cast<void>(slots->reclaim(PressureMove::kShrink, 2 * kSlot));
      static_cast<void>(slots->grow_back(2 * kSlot));
    }
  });
  std::vector<std::thread> users;
  std::atomic<int> found{0};
  for (std::int64_t user = 0; user < 2; ++user) {
    users.emplace_back([&, user] {
      std::mt19937 random(static_cast<unsigned>(user));
      for (int turn = 0; turn < 400; ++turn) {
        const std::int64_t slot = 2 * (static_cast<std::int64_t>(random()) % (kCount / 2)) + user;
        auto* const data = reinterpret_cast<std::int64_t*>(slots->data() + slot * slots->stride());
        const Found what = slots->take(slot);
        if (what == Found::kNothing) {
          continue;
        }
        if (what == Found::kContent) {
          ++found;
          EXPECT_EQ(data[0], slot + 1);
          EXPECT_EQ(data[kSlot / 8 - 1], slot + 1);
        }
        data[0] = data[kSlot / 8 - 1] = slot + 1;
        slots->give(slot, true);
      }
    });
  }
  for (std::thread& one : users) {
    one.join();
  }
  over = true;
  pressure.join();
  EXPECT_GT(found, 0);
}

}  // namespace
}  // namespace plimsoll
