// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "memory/slab.h"
#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

using namespace literals;

constexpr std::int64_t kSlack = 2_MiB;  // The kernel settles its counters in batches.

class SlabTest : public testing::Test {
 protected:
  SlabTest() : governor_(Governor::create({.memory_limit = "900MiB"}).or_throw()) {}
  ~SlabTest() override { governor_.close(); }
  SlabTest(const SlabTest&) = delete;
  SlabTest& operator=(const SlabTest&) = delete;

  static std::int64_t resident() { return read_resident().or_throw().anonymous; }
  [[nodiscard]] std::int64_t leased() const { return governor_.state().leased_bytes; }

  Governor governor_;
};

TEST_F(SlabTest, IsLeasedAndResidentFromTheFirstMoment) {
  const std::int64_t before = resident();
  {
    const Slab slab = Slab::create(governor_, Tag::kEmbedding, 64_MiB - 100).or_throw();
    EXPECT_EQ(slab.bytes(), 64_MiB);
    EXPECT_EQ(leased(), 64_MiB);
    EXPECT_GT(resident(), before + 64_MiB - kSlack);
  }
  EXPECT_EQ(leased(), 0);
  EXPECT_LT(resident(), before + kSlack);
}

TEST_F(SlabTest, IsTouchedWithHugePagesToo) {
  const std::int64_t before = resident();
  const Slab slab = Slab::create(governor_, Tag::kEmbedding, 64_MiB, true).or_throw();
  EXPECT_GT(resident(), before + 64_MiB - kSlack);
}

TEST_F(SlabTest, IsRefusedWithoutMappingAnything) {
  const auto refused = Slab::create(governor_, Tag::kEmbedding, 4_GiB);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kOverBudget);
  EXPECT_EQ(Slab::create(governor_, Tag::kEmbedding, -1).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(leased(), 0);
}

TEST_F(SlabTest, OfNoBytesIsEmpty) {
  Slab slab = Slab::create(governor_, Tag::kEmbedding, 0).or_throw();
  EXPECT_EQ(slab.bytes(), 0);
  EXPECT_TRUE(slab.take<int>(0).empty());
}

TEST_F(SlabTest, HandsOutAlignedZeroedPartsUntilItIsFull) {
  Slab slab = Slab::create(governor_, Tag::kLoader, 8192).or_throw();
  const auto bytes = slab.take<std::uint8_t>(3);
  const auto floats = slab.take<float>(10);
  const auto page = slab.take<double>(512, 4096);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(floats.data()) % 64, 0U);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(page.data()) % 4096, 0U);
  EXPECT_GE(reinterpret_cast<std::byte*>(floats.data()),
            reinterpret_cast<std::byte*>(bytes.data()) + 3);
  EXPECT_TRUE(std::ranges::all_of(page, [](double x) { return x == 0; }));
  EXPECT_EQ(slab.taken_bytes(), 8192);
  EXPECT_THROW(static_cast<void>(slab.take<std::uint8_t>(1, 1)), Exception);
}

TEST_F(SlabTest, MovesItsMappingAndItsLeaseTogether) {
  Slab first = Slab::create(governor_, Tag::kLoader, 1_MiB).or_throw();
  std::byte* const data = first.data();
  Slab second = Slab::create(governor_, Tag::kLoader, 2_MiB).or_throw();
  second = std::move(first);
  EXPECT_EQ(second.data(), data);
  EXPECT_EQ(leased(), 1_MiB);
  const Slab third = std::move(second);
  EXPECT_EQ(third.bytes(), 1_MiB);
  EXPECT_EQ(leased(), 1_MiB);
}

TEST_F(SlabTest, GivesBackWholePagesOnceAndTakesThemAgain) {
  Slab slab = Slab::create(governor_, Tag::kFeature, 32_MiB).or_throw();
  const auto bytes = slab.take<std::uint8_t>(32_MiB);
  std::ranges::fill(bytes.first(8192), std::uint8_t{9});
  const std::int64_t before = resident();

  EXPECT_EQ(slab.release_pages(100, 4000), 0);  // No whole page inside.
  EXPECT_EQ(slab.release_pages(4_MiB + 1, 16_MiB), 16_MiB - 4096);
  EXPECT_EQ(slab.release_pages(4_MiB, 16_MiB), 4096);  // Only the page that was not yet.
  EXPECT_EQ(slab.release_pages(4_MiB, 16_MiB), 0);
  EXPECT_EQ(leased(), 16_MiB);
  EXPECT_LT(resident(), before - 16_MiB + kSlack);
  EXPECT_EQ(bytes[0], 9);  // Outside the range nothing changed.

  slab.reacquire_pages(4_MiB, 16_MiB).or_throw();
  EXPECT_EQ(leased(), 32_MiB);
  EXPECT_GT(resident(), before - kSlack);
  EXPECT_EQ(bytes[4_MiB], 0);
  slab.reacquire_pages(0, 32_MiB).or_throw();
  EXPECT_EQ(leased(), 32_MiB);
}

TEST_F(SlabTest, CannotTakePagesAgainWhileOthersHoldTheRoom) {
  Slab slab = Slab::create(governor_, Tag::kFeature, 32_MiB).or_throw();
  slab.release_pages(0, 32_MiB);
  const Lease rest = governor_.reserve(Tag::kTensor, governor_.state().free_bytes()).or_throw();
  EXPECT_EQ(slab.reacquire_pages(0, 4096).error().code, ErrorCode::kOverBudget);
}

// What a forked child says of the first page: −1 when it is not there, else its first byte.
int in_child(const Slab& slab) {
  const pid_t child = ::fork();
  if (child == 0) {
    unsigned char there = 0;
    const bool gone = ::mincore(slab.data(), 4096, &there) != 0 && errno == ENOMEM;
    ::_exit(gone ? 255 : static_cast<int>(slab.data()[0]));
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  return WEXITSTATUS(status) == 255 ? -1 : WEXITSTATUS(status);
}

TEST_F(SlabTest, R11AForkedChildHasNoneOfIt) {
  for (const bool huge_pages : {false, true}) {
    const Slab slab = Slab::create(governor_, Tag::kEmbedding, 8_MiB, huge_pages).or_throw();
    slab.data()[0] = std::byte{7};
    EXPECT_EQ(in_child(slab), -1);
    EXPECT_EQ(slab.data()[0], std::byte{7});
  }
}

}  // namespace
}  // namespace plimsoll
