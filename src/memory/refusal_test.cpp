// SPDX-License-Identifier: Apache-2.0
//
// Goal: an out-of-memory error needs no memory.
// Method: operator new of the whole process is replaced by one that counts.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "plimsoll/bytes.h"
#include "plimsoll/governor.h"

namespace {
std::atomic<long> allocations{0};
}  // namespace

// Not inlined: GCC would see malloc() and operator delete, and warn that they do not match.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes); memory != nullptr) {
    return memory;
  }
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace plimsoll {
namespace {

using namespace literals;

class RefusalTest : public testing::Test {
 protected:
  RefusalTest() : governor_(Governor::create({.memory_limit = "900MiB"}).or_throw()) {}
  ~RefusalTest() override { governor_.close(); }
  RefusalTest(const RefusalTest&) = delete;
  RefusalTest& operator=(const RefusalTest&) = delete;

  Governor governor_;
};

template <class Work>
long allocations_during(Work work) {
  const long before = allocations.load();
  work();
  return allocations.load() - before;
}

TEST_F(RefusalTest, CountsAllocationsAtAll) {
  // The other kind of error, whose text is its detail, does allocate: the counter works.
  EXPECT_GT(allocations_during([] { static_cast<void>(make_error(ErrorCode::kIo, "why")); }), 0);
}

TEST_F(RefusalTest, AllocatesNothingToRefuseALease) {
  bool refused = false;
  EXPECT_EQ(allocations_during([&] { refused = !governor_.reserve(Tag::kTensor, 4_GiB); }), 0);
  EXPECT_TRUE(refused);
  EXPECT_EQ(allocations_during([&] { refused = !governor_.try_reserve(Tag::kTensor, 4_GiB); }), 0);
  EXPECT_TRUE(refused);
  const PoolSpec spec{.tag = Tag::kLoader, .floor_bytes = 4_GiB};
  EXPECT_EQ(allocations_during([&] { refused = !governor_.admit(spec); }), 0);
  EXPECT_TRUE(refused);
}

TEST_F(RefusalTest, AllocatesNothingInTheLifeOfALease) {
  bool grown = false;
  bool too_much = true;
  EXPECT_EQ(allocations_during([&] {
              auto lease = governor_.try_reserve(Tag::kTensor, 1_MiB);
              grown = lease->grow(2_MiB).has_value();
              too_much = lease->grow(4_GiB).has_value();
              lease->shrink(1_MiB);
              const Lease moved = *std::move(lease);
            }),
            0);
  EXPECT_TRUE(grown);
  EXPECT_FALSE(too_much);
}

TEST_F(RefusalTest, AllocatesNothingWhenTheGovernorIsClosed) {
  governor_.close();
  bool refused = false;
  EXPECT_EQ(allocations_during([&] { refused = !governor_.reserve(Tag::kTensor, 1); }), 0);
  EXPECT_TRUE(refused);
}

TEST_F(RefusalTest, AllocatesNothingToReadWhatIsResident) {
  std::int64_t total = 0;
  EXPECT_EQ(allocations_during([&] { total = read_resident()->total(); }), 0);
  EXPECT_GT(total, 0);
  EXPECT_EQ(allocations_during([&] { total = governor_.step_boundary().resident.total(); }), 0);
  EXPECT_GT(total, 0);
}

}  // namespace
}  // namespace plimsoll
