// SPDX-License-Identifier: Apache-2.0
//
// Goal: a block survives compression, and no bytes and no table entry can make decoding write
// elsewhere, read elsewhere or accept what no writer wrote. Method: seeded random blocks and
// damage; a guarded buffer around what is decoded.
#include "store/feature_block.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "memory/slab.h"
#include "store/feature_block_reader.h"
#include "store/feature_format.h"
#include "tests/support/array_files.h"
#include "tests/support/feature_set.h"

namespace plimsoll {
namespace {

constexpr std::byte kGuard{0xA5};
constexpr std::size_t kGuardBytes = 64;

std::vector<std::byte> random_block(std::mt19937_64& random, std::size_t bytes, int repeats) {
  std::vector<std::byte> block(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    const bool again = i >= 16 && static_cast<int>(random() % 100) < repeats;
    block[i] = again ? block[i - 16] : static_cast<std::byte>(random());
  }
  return block;
}

// Decodes into a guarded buffer; empty when refused.
std::vector<std::byte> decode(std::span<const std::byte> stored, std::size_t bytes) {
  std::vector<std::byte> guarded(bytes + 2 * kGuardBytes, kGuard);
  const bool sound = decode_block(stored, std::span(guarded).subspan(kGuardBytes, bytes));
  for (std::size_t i = 0; i < kGuardBytes; ++i) {
    EXPECT_EQ(guarded[i], kGuard);
    EXPECT_EQ(guarded[guarded.size() - 1 - i], kGuard);
  }
  if (!sound) {
    return {};
  }
  return {guarded.begin() + kGuardBytes, guarded.end() - kGuardBytes};
}

class FeatureBlockTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!lz4_available()) {
      GTEST_SKIP() << "this build has no LZ4";
    }
    state_.resize(static_cast<std::size_t>(encoder_state_bytes() / 8 + 1));
  }
  std::vector<std::byte> encode(std::span<const std::byte> block) {
    std::vector<std::byte> out(block.size());
    out.resize(static_cast<std::size_t>(
        encode_block(block, out, std::as_writable_bytes(std::span(state_)))));
    return out;
  }
  std::vector<std::uint64_t> state_;
};

TEST_F(FeatureBlockTest, ComesBackAsItWasOrIsNotCompressed) {
  int packed = 0;
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const std::size_t bytes = 4096 * (1 + random() % 16);
    const auto block = random_block(random, bytes, static_cast<int>(random() % 101));
    auto stored = encode(block);
    if (stored.empty()) {
      continue;
    }
    ++packed;
    ASSERT_LE(stored.size(), bytes - bytes / 8) << "what saves less stays plain";
    ASSERT_EQ(decode(stored, bytes), block);
    stored.resize(stored.size() + random() % 4096);  // The zeros up to the next block.
    ASSERT_EQ(decode(stored, bytes), block);
    stored.push_back(std::byte{1});
    ASSERT_TRUE(decode(stored, bytes).empty()) << "only zeros may follow";
    ASSERT_TRUE(decode(std::span(stored).first(stored.size() - 1), bytes - 4096).empty());
    ASSERT_TRUE(decode(std::span(stored).first(stored.size() - 1), bytes + 4096).empty());
  }
  EXPECT_GT(packed, 100);
  EXPECT_LT(packed, 390);
}

TEST_F(FeatureBlockTest, DamageIsRefusedOrDecodesToOneBlockAndNothingBeyond) {
  std::mt19937_64 first(7);
  const auto block = random_block(first, 8192, 90);
  const auto good = encode(block);
  ASSERT_FALSE(good.empty());
  int refused = 0;
  for (std::uint64_t seed = 0; seed < 20'000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    auto bad = good;
    for (std::uint64_t changes = 1 + random() % 8; changes > 0; --changes) {
      bad[random() % bad.size()] = static_cast<std::byte>(random());
    }
    if (random() % 4 == 0) {
      bad.resize(random() % (bad.size() + 1));
    }
    refused += decode(bad, 8192).empty() ? 1 : 0;
  }
  EXPECT_GT(refused, 10'000);
}

TEST_F(FeatureBlockTest, AnyBytesAreRefusedOrFillExactlyOneBlock) {
  for (std::uint64_t seed = 0; seed < 20'000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    auto bytes = random_block(random, random() % 600, 60);
    if (bytes.size() > 4) {  // A size that fits, so that the decoder itself is reached.
      const auto size = static_cast<std::uint32_t>(bytes.size() - 4);
      std::memcpy(bytes.data(), &size, sizeof size);
    }
    decode(bytes, 4096);
  }
}

TEST(FeatureBlockEntryTest, AcceptsOnlyPlacesWhereAWriterPutsBlocks) {
  constexpr std::int64_t kBlock = 8192;
  constexpr std::int64_t kFile = 1 << 20;
  const auto parse = [](std::int64_t begin, BlockCoding coding, std::int64_t end) {
    return parse_block_entries(block_entry(begin, coding), block_entry(end, BlockCoding::kLz4),
                               kBlock, kFile, 3, "blocks.dat");
  };
  using enum BlockCoding;
  const auto plain = parse(4096, kPlain, 12288).or_throw();
  EXPECT_EQ(plain.offset, 4096);
  EXPECT_EQ(plain.bytes, kBlock);
  const auto packed = parse(100, kLz4, 8100).or_throw();
  EXPECT_EQ(packed.bytes, 8000);
  EXPECT_EQ(packed.coding, kLz4);
  EXPECT_TRUE(parse(kFile - 8192, kPlain, kFile));
  EXPECT_FALSE(parse(4096, kPlain, 8192)) << "a plain block is whole";
  EXPECT_FALSE(parse(100, kPlain, 8292)) << "and begins a page";
  EXPECT_TRUE(parse(4000, kLz4, 8200)) << "a page more than the block, for its place";
  EXPECT_FALSE(parse(4000, kLz4, 12300)) << "but not two";
  EXPECT_FALSE(parse(100, kLz4, 104)) << "no room for more than a size";
  EXPECT_FALSE(parse(8000, kLz4, 100)) << "backwards";
  EXPECT_FALSE(parse(kFile - 4096, kLz4, kFile + 1)) << "beyond the file";
  EXPECT_FALSE(parse_block_entries(2ULL << 56, block_entry(8192, kLz4), kBlock, kFile, 0, "b"));
  EXPECT_EQ(*parse(8000, kLz4, 100).error().detail,
            "blocks.dat: block 3 cannot stand where it says");
  std::mt19937_64 random(5);
  for (int i = 0; i < 200'000; ++i) {
    const auto entry = random() >> (random() % 64);
    const auto next = random() % 2 == 0 ? entry + random() % 9000 : random() >> (random() % 64);
    const auto block = parse_block_entries(entry, next, kBlock, kFile, 0, "b");
    if (block) {
      ASSERT_GE(block->offset, 0);
      ASSERT_GT(block->bytes, 0);
      ASSERT_LE(block->offset + block->bytes, kFile);
      const std::int64_t begin = block->offset / kFeaturePage * kFeaturePage;
      const std::int64_t end = (block->offset + block->bytes + kFeaturePage - 1) / kFeaturePage;
      ASSERT_LE(end * kFeaturePage - begin, stored_bytes_max(kBlock));
    }
  }
}

// Places come from a file. Blocks that lie side by side are read straight to where they belong; one
// that says it stands among them must not draw them all into a lane that holds one.
TEST_F(FeatureBlockTest, ABlockThatOverlapsOthersIsNotReadWithThemIntoASmallLane) {
  constexpr std::int64_t kBlock = 4096;
  const test::ScratchDirectory scratch;
  Governor governor = test::governor_of();
  std::mt19937_64 random(16);
  const auto bytes = random_block(random, 20 * kBlock, 0);
  test::spill(scratch / "records",
              std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  File file = File::open(scratch / "records", FileMode::kRead).or_throw();
  Slab slab = Slab::create(governor, Tag::kFeature, 1 << 20).or_throw();
  IoPool pool{1};
  BlockReader reader(slab, pool, {.count = 1, .bytes = stored_bytes_max(kBlock)});
  const auto behind = slab.take<std::byte>(64 << 10);
  std::fill(behind.begin(), behind.end(), kGuard);
  const auto frames = slab.take<std::byte>(17 * kBlock, kBlock);
  std::vector<BlockReader::Wanted> wanted;
  for (std::int64_t i = 0; i < 17; ++i) {
    StoredBlock stored{.offset = i * kBlock, .bytes = kBlock};
    if (i == 16) {
      stored = {.offset = 0, .bytes = 200};
      stored.coding = BlockCoding::kLz4;
    }
    wanted.push_back({.file = &file,
                      .stored = stored,
                      .number = i,
                      .out = frames.subspan(static_cast<std::size_t>(i * kBlock), kBlock)});
  }
  const auto read = reader.read(wanted, false);
  ASSERT_FALSE(read);
  EXPECT_NE(read.error().to_string().find("block 16"), std::string::npos);
  EXPECT_EQ(std::count(behind.begin(), behind.end(), kGuard), std::ssize(behind));
  EXPECT_TRUE(std::equal(bytes.begin(), bytes.begin() + 16 * kBlock, frames.begin()));
}

}  // namespace
}  // namespace plimsoll
