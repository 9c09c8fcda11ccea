// SPDX-License-Identifier: Apache-2.0
//
// Each rule by hand, and random requests against an allocator that looks at every piece in turn.
#include "plan/device_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <list>
#include <optional>
#include <random>
#include <vector>

namespace plimsoll {
namespace {

using Block = DeviceAllocator::Block;
constexpr std::int64_t kKiB = 1LL << 10;
constexpr std::int64_t kMiB = 1LL << 20;

// ---- Rules, by hand ----

TEST(DeviceAllocatorTest, SizesAreRoundedUpTo512Bytes) {
  DeviceAllocator device;
  const Block one = device.allocate(1).or_throw();
  EXPECT_EQ(device.piece_of(one).bytes, 512);
  const Block more = device.allocate(513).or_throw();
  EXPECT_EQ(device.piece_of(more).bytes, 1024);
  EXPECT_EQ(device.piece_of(more).address, device.piece_of(one).address + 512);
  EXPECT_EQ(device.stats().allocated_bytes, 1536);
  EXPECT_EQ(device.stats().reserved_bytes, 2 * kMiB);
  EXPECT_EQ(device.stats().largest_free_bytes, 2 * kMiB - 1536);
}

TEST(DeviceAllocatorTest, ASegmentDependsOnTheBlockItIsBoughtFor) {
  EXPECT_EQ(device_segment_bytes(1), 2 * kMiB);
  EXPECT_EQ(device_segment_bytes(kMiB), 2 * kMiB);
  EXPECT_EQ(device_segment_bytes(kMiB + 1), 20 * kMiB);
  EXPECT_EQ(device_segment_bytes(10 * kMiB - 512), 20 * kMiB);
  EXPECT_EQ(device_segment_bytes(10 * kMiB - 511), 10 * kMiB);  // Rounded, it has 10 MiB.
  EXPECT_EQ(device_segment_bytes(10 * kMiB), 10 * kMiB);
  EXPECT_EQ(device_segment_bytes(10 * kMiB + 1), 12 * kMiB);
  EXPECT_EQ(device_segment_bytes(101 * kMiB), 102 * kMiB);
}

TEST(DeviceAllocatorTest, SmallAndLargeBlocksShareNoSegment) {
  DeviceAllocator device;
  const Block large = device.allocate(2 * kMiB).or_throw();  // Leaves 18 of 20 MiB free.
  const Block small = device.allocate(kMiB).or_throw();
  EXPECT_FALSE(device.piece_of(large).small);
  EXPECT_TRUE(device.piece_of(small).small);
  EXPECT_EQ(device.stats().segments, 2);
  EXPECT_EQ(device.stats().reserved_bytes, 22 * kMiB);
}

TEST(DeviceAllocatorTest, ASmallBlockLeavesEverythingOf512BytesOrMore) {
  DeviceAllocator device;
  const Block most = device.allocate(kMiB).or_throw();
  const Block rest = device.allocate(kMiB - 512).or_throw();  // 512 bytes of the segment are left.
  EXPECT_EQ(device.stats().largest_free_bytes, 512);
  const Block last = device.allocate(512).or_throw();
  EXPECT_EQ(device.stats().segments, 1);
  EXPECT_EQ(device.stats().largest_free_bytes, 0);
  EXPECT_LT(device.piece_of(most).address, device.piece_of(rest).address);
  EXPECT_LT(device.piece_of(rest).address, device.piece_of(last).address);
}

TEST(DeviceAllocatorTest, ALargeBlockKeepsARemainderOfAMebibyteAndLeavesALargerOne) {
  DeviceAllocator keeps;
  const Block whole = keeps.allocate(11 * kMiB).or_throw();  // 12 MiB: exactly 1 MiB is over.
  EXPECT_EQ(keeps.piece_of(whole).bytes, 12 * kMiB);
  EXPECT_EQ(keeps.stats().allocated_bytes, 12 * kMiB);
  EXPECT_EQ(keeps.stats().largest_free_bytes, 0);
  DeviceAllocator leaves;
  const Block part = leaves.allocate(11 * kMiB - 512).or_throw();
  EXPECT_EQ(leaves.piece_of(part).bytes, 11 * kMiB - 512);
  EXPECT_EQ(leaves.stats().largest_free_bytes, kMiB + 512);
}

TEST(DeviceAllocatorTest, TakesTheSmallestPieceThatFitsAndOfEqualsTheLowest) {
  DeviceAllocator device;
  std::vector<Block> blocks;
  for (const std::int64_t mib : {30, 12, 20, 12}) {
    blocks.push_back(device.allocate(mib * kMiB).or_throw());
  }
  const std::int64_t first_of_12 = device.piece_of(blocks[1]).address;
  const std::int64_t of_20 = device.piece_of(blocks[2]).address;
  for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) {
    device.free(*block);
  }
  EXPECT_EQ(device.piece_of(device.allocate(12 * kMiB).or_throw()).address, first_of_12);
  EXPECT_GT(device.piece_of(device.allocate(12 * kMiB).or_throw()).address, of_20);
  EXPECT_EQ(device.piece_of(device.allocate(11 * kMiB).or_throw()).address, of_20);
  EXPECT_EQ(device.stats().segments, 4);  // Nothing was bought.
}

TEST(DeviceAllocatorTest, AFreedBlockJoinsItsFreeNeighboursOnBothSides) {
  DeviceAllocator device;
  const Block a = device.allocate(512 * kKiB).or_throw();
  const Block b = device.allocate(512 * kKiB).or_throw();
  const Block c = device.allocate(512 * kKiB).or_throw();
  device.free(a);
  EXPECT_EQ(device.stats().largest_free_bytes, 512 * kKiB);
  device.free(c);  // Joins the rest of the segment behind it.
  EXPECT_EQ(device.stats().largest_free_bytes, kMiB);
  EXPECT_EQ(device.pieces().size(), 3U);
  device.free(b);
  EXPECT_EQ(device.stats().largest_free_bytes, 2 * kMiB);
  EXPECT_EQ(device.pieces().size(), 1U);
}

TEST(DeviceAllocatorTest, SegmentsStayUntilTheCacheIsEmptied) {
  DeviceAllocator device;
  const Block kept = device.allocate(3 * kMiB).or_throw();
  const Block gone = device.allocate(40 * kMiB).or_throw();
  device.free(gone);
  EXPECT_EQ(device.stats().reserved_bytes, 60 * kMiB);
  EXPECT_EQ(device.empty_cache(), 40 * kMiB);
  EXPECT_EQ(device.stats().reserved_bytes, 20 * kMiB);  // A block is in it.
  EXPECT_EQ(device.empty_cache(), 0);
  device.free(kept);
  EXPECT_EQ(device.empty_cache(), 20 * kMiB);
  EXPECT_EQ(device.stats().segments, 0);
}

TEST(DeviceAllocatorTest, AtTheLimitFreeSegmentsAreGivenBackAndTheRequestTriedAgain) {
  DeviceAllocator device(60 * kMiB);
  const Block kept = device.allocate(20 * kMiB).or_throw();
  device.free(device.allocate(30 * kMiB).or_throw());
  const Block next = device.allocate(40 * kMiB).or_throw();  // The 30 MiB do not hold it.
  EXPECT_EQ(device.stats().reserved_bytes, 60 * kMiB);
  EXPECT_EQ(device.stats().segments, 2);
  device.free(next);
  device.free(kept);
}

TEST(DeviceAllocatorTest, ARefusalNamesTheLimitThatWouldDoAndLeavesBlocksAsTheyWere) {
  DeviceAllocator device(60 * kMiB);
  const Block kept = device.allocate(20 * kMiB).or_throw();
  const auto before = device.pieces();
  const auto refused = device.allocate(41 * kMiB);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kOverBudget);
  EXPECT_EQ(refused.error().requested_bytes, 42 * kMiB);
  EXPECT_EQ(refused.error().available_bytes, 40 * kMiB);
  EXPECT_EQ(refused.error().smallest_limit_bytes, 62 * kMiB);
  EXPECT_NE(refused.error().to_string().find("--device-memory-limit"), std::string::npos);
  EXPECT_EQ(device.pieces().size(), before.size());
  EXPECT_EQ(device.stats().allocated_bytes, 20 * kMiB);
  EXPECT_EQ(device.stats().reserved_bytes, 20 * kMiB);
  device.set_limit(62 * kMiB);
  EXPECT_TRUE(device.allocate(41 * kMiB));
  device.free(kept);
}

TEST(DeviceAllocatorTest, FragmentationIsWhatWasFreeWhenMoreHadToBeReserved) {
  DeviceAllocator device;
  std::vector<Block> blocks;
  for (int k = 0; k < 4; ++k) {
    blocks.push_back(device.allocate(5 * kMiB).or_throw());  // Four of them fill 20 MiB.
  }
  EXPECT_EQ(device.stats().fragmentation_bytes, 15 * kMiB);  // With the first, 15 were not used.
  device.free(blocks[0]);
  device.free(blocks[2]);
  const Block next = device.allocate(6 * kMiB).or_throw();  // 10 are free, in two pieces of 5.
  const DeviceMemoryStats stats = device.stats();
  EXPECT_EQ(stats.reserved_peak_bytes, 40 * kMiB);
  EXPECT_EQ(stats.allocated_peak_bytes, 20 * kMiB);
  EXPECT_EQ(stats.fragmentation_bytes, (40 - 16) * kMiB);
  device.free(next);
  device.free(blocks[1]);
  device.free(blocks[3]);
  device.empty_cache();
  EXPECT_EQ(device.stats().reserved_peak_bytes, 40 * kMiB);
  device.reset_peak();
  EXPECT_EQ(device.stats().reserved_peak_bytes, 0);
  EXPECT_EQ(device.stats().fragmentation_bytes, 0);
}

TEST(DeviceAllocatorTest, ABlockIsTakenBackOnce) {
  DeviceAllocator device;
  const Block block = device.allocate(100).or_throw();
  device.free(block);
  EXPECT_THROW(device.free(block), Exception);
  EXPECT_THROW(static_cast<void>(device.allocate(0)), Exception);
}

// ---- Against every piece in turn ----

// The rules written down as plainly as they can be.
class PlainDevice {
 public:
  struct Piece {
    std::int64_t segment, address, bytes;
    bool small, allocated;
  };
  using Pieces = std::list<Piece>;  // By address.

  explicit PlainDevice(std::int64_t limit) : limit_(limit) {}

  std::optional<Pieces::iterator> allocate(std::int64_t bytes) {
    bytes = (bytes + 511) / 512 * 512;
    const bool small = bytes <= kMiB;
    auto best = fitting(bytes, small);
    if (best == pieces_.end()) {
      const std::int64_t segment = small ? 2 * kMiB
                                   : bytes < 10 * kMiB
                                       ? 20 * kMiB
                                       : (bytes + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB);
      if (reserved() + segment > limit_) {
        empty_cache();
      }
      if (reserved() + segment > limit_) {
        return std::nullopt;
      }
      best = pieces_.insert(pieces_.end(), {next_, next_, segment, small, false});
      next_ += segment;
    }
    const std::int64_t rest = best->bytes - bytes;
    if (small ? rest >= 512 : rest > kMiB) {
      pieces_.insert(std::next(best), {best->segment, best->address + bytes, rest, small, false});
      best->bytes = bytes;
    }
    best->allocated = true;
    return best;
  }
  void free(Pieces::iterator piece) {
    piece->allocated = false;
    for (auto a = pieces_.begin(); a != pieces_.end();) {
      const auto b = std::next(a);
      if (b != pieces_.end() && a->segment == b->segment && !a->allocated && !b->allocated) {
        a->bytes += b->bytes;
        pieces_.erase(b);
      } else {
        ++a;
      }
    }
  }
  void empty_cache() {
    pieces_.remove_if([this](const Piece& piece) {
      return !piece.allocated && std::count_if(pieces_.begin(), pieces_.end(), [&](const Piece& p) {
                                   return p.segment == piece.segment;
                                 }) == 1;
    });
  }
  [[nodiscard]] std::int64_t reserved() const {
    std::int64_t sum = 0;
    for (const Piece& piece : pieces_) {
      sum += piece.bytes;
    }
    return sum;
  }
  [[nodiscard]] const Pieces& pieces() const { return pieces_; }

 private:
  Pieces::iterator fitting(std::int64_t bytes, bool small) {
    auto best = pieces_.end();
    for (auto p = pieces_.begin(); p != pieces_.end(); ++p) {
      if (!p->allocated && p->small == small && p->bytes >= bytes &&
          (best == pieces_.end() || p->bytes < best->bytes)) {
        best = p;
      }
    }
    return best;
  }
  Pieces pieces_;
  std::int64_t limit_;
  std::int64_t next_{2 * kMiB};
};

// Sums hold, and nothing overlaps within a segment or leaves a hole in it.
void expect_whole(const DeviceAllocator& device) {
  std::int64_t allocated = 0;
  std::int64_t reserved = 0;
  std::int64_t largest = 0;
  const auto pieces = device.pieces();
  for (std::size_t k = 0; k < pieces.size(); ++k) {
    const DevicePiece& piece = pieces[k];
    allocated += piece.allocated ? piece.bytes : 0;
    largest = std::max(largest, piece.allocated ? 0 : piece.bytes);
    reserved += piece.bytes;
    const bool first = k == 0 || pieces[k - 1].segment != piece.segment;
    ASSERT_EQ(piece.address, first ? piece.segment : pieces[k - 1].address + pieces[k - 1].bytes);
    ASSERT_TRUE(first || piece.allocated || pieces[k - 1].allocated) << "two free neighbours";
    ASSERT_EQ(piece.bytes % 512, 0);
  }
  const DeviceMemoryStats stats = device.stats();
  ASSERT_EQ(stats.allocated_bytes, allocated);
  ASSERT_EQ(stats.reserved_bytes, reserved);
  ASSERT_EQ(stats.largest_free_bytes, largest);
  ASSERT_EQ(stats.reserved_bytes % kSegmentUnit, 0);
  ASSERT_GE(stats.reserved_bytes, stats.allocated_bytes);
  ASSERT_GE(stats.reserved_peak_bytes, stats.reserved_bytes);
  ASSERT_GE(stats.allocated_peak_bytes, stats.allocated_bytes);
  ASSERT_LE(stats.reserved_peak_bytes, device.limit_bytes());
  ASSERT_GE(stats.fragmentation_bytes, 0);
}

class Pair {
 public:
  explicit Pair(std::int64_t limit) : device(limit), plain_(limit) {}

  void allocate(std::int64_t bytes) {
    const DeviceMemoryStats before = device.stats();
    const auto got = device.allocate(bytes);
    const auto wanted = plain_.allocate(bytes);
    ASSERT_EQ(got.has_value(), wanted.has_value());
    if (got) {
      ASSERT_EQ(device.piece_of(*got).address, (*wanted)->address);
      ASSERT_EQ(device.piece_of(*got).bytes, (*wanted)->bytes);
      live_.emplace_back(*got, *wanted);
      return;
    }
    ++refused;
    const DeviceMemoryStats after = device.stats();
    ASSERT_EQ(after.allocated_bytes, before.allocated_bytes);
    ASSERT_EQ(after.reserved_peak_bytes, before.reserved_peak_bytes);
    const auto pieces = device.pieces();
    ASSERT_FALSE(device.allocate(bytes));  // The cache is gone: now nothing changes at all.
    ASSERT_EQ(device.pieces().size(), pieces.size());
    ASSERT_EQ(device.stats().reserved_bytes, after.reserved_bytes);
  }
  void free(std::uint64_t any) {
    if (!live_.empty()) {
      std::swap(live_[any % live_.size()], live_.back());
      device.free(live_.back().first);
      plain_.free(live_.back().second);
      live_.pop_back();
    }
  }
  void empty_cache() {
    const std::int64_t before = device.stats().reserved_bytes;
    const std::int64_t given_back = device.empty_cache();
    plain_.empty_cache();
    ASSERT_EQ(device.stats().reserved_bytes, before - given_back);
    for (const DevicePiece& piece : device.pieces()) {
      const auto pieces = device.pieces();
      ASSERT_TRUE(std::any_of(pieces.begin(), pieces.end(), [&](const DevicePiece& other) {
        return other.segment == piece.segment && other.allocated;
      })) << "a segment without a block was kept";
    }
  }
  void expect_same() const {
    const auto pieces = device.pieces();
    ASSERT_EQ(pieces.size(), plain_.pieces().size());
    auto plain = plain_.pieces().begin();
    for (const DevicePiece& piece : pieces) {
      ASSERT_EQ(piece.address, plain->address);
      ASSERT_EQ(piece.bytes, plain->bytes);
      ASSERT_EQ(piece.allocated, plain->allocated);
      ++plain;
    }
  }
  [[nodiscard]] bool empty() const { return live_.empty(); }
  DeviceAllocator device;
  int refused{0};

 private:
  PlainDevice plain_;
  std::vector<std::pair<Block, PlainDevice::Pieces::iterator>> live_;
};

TEST(DeviceAllocatorTest, RandomRequestsAreServedAsTheRulesSayAndEverySumHolds) {
  int refused = 0;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    Pair both(static_cast<std::int64_t>(40 + random() % 300) * kMiB);
    const auto size = [&random]() -> std::int64_t {
      const std::int64_t scale = random() % 2 == 0   ? kMiB
                                 : random() % 2 == 0 ? 12 * kMiB
                                                     : 40 * kMiB;
      return 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(scale));
    };
    for (int k = 0; k < 400; ++k) {
      const std::uint64_t what = random() % 100;
      if (what < 55) {
        both.allocate(size());
      } else if (what < 98) {
        both.free(random());
      } else {
        both.empty_cache();
      }
      both.expect_same();
      expect_whole(both.device);
      if (HasFatalFailure()) {
        return;
      }
    }
    while (!both.empty()) {
      both.free(0);
    }
    both.device.empty_cache();
    EXPECT_EQ(both.device.stats().reserved_bytes, 0);
    EXPECT_EQ(both.device.stats().allocated_bytes, 0);
    refused += both.refused;
  }
  EXPECT_GT(refused, 100);  // The limit was met, too.
}

TEST(DeviceAllocatorTest, TheSameRequestsAlwaysGetTheSameBlocks) {
  const auto run = [] {
    std::mt19937_64 random(7);
    DeviceAllocator device(200 * kMiB);
    std::vector<std::int64_t> addresses;
    for (int k = 0; k < 300; ++k) {
      const auto got = device.allocate(1 + static_cast<std::int64_t>(random() % (8U << 20)));
      addresses.push_back(got ? device.piece_of(*got).address : -1);
      if (got && random() % 3 != 0) {
        device.free(*got);
      }
    }
    return addresses;
  };
  EXPECT_EQ(run(), run());
}

}  // namespace
}  // namespace plimsoll
