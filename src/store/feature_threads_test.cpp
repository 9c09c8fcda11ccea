// SPDX-License-Identifier: Apache-2.0
//
// Goal: several threads reading one small store at once get the right bytes, join loads of one
// block, survive shrinking under their feet, and never wait for one another for ever.
// Method: random requests compared with plain arrays; run under TSan by its label.
#include <atomic>
#include <cstring>
#include <thread>

#include <gtest/gtest.h>

#include "os/file_faults.h"
#include "plimsoll/feature_store.h"
#include "store/feature_block.h"
#include "tests/support/feature_set.h"

namespace plimsoll {
namespace {

using test::FeatureSet;
using test::ScratchDirectory;

// One random request through every path; counts rows that differ or could not be read.
std::int64_t read_random(FeatureStore& store, const FeatureSet& set, std::mt19937_64& random) {
  const auto size = static_cast<std::size_t>(1 + random() % 400);
  std::vector<std::int64_t> ordinals(size);
  std::vector<std::int64_t> ids(size);
  for (auto& ordinal : ordinals) {
    ordinal = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(set.rows()));
  }
  const auto bytes = static_cast<std::size_t>(set.columns[0].bytes());
  std::vector<std::byte> out(size * bytes);
  const std::vector<std::span<std::byte>> spans{out};
  if (!store.ids_of(ordinals, ids) || !store.read(ids, std::vector<int>{0}, spans)) {
    return static_cast<std::int64_t>(size);
  }
  std::int64_t wrong = 0;
  for (std::size_t i = 0; i < size; ++i) {
    const auto expected = set.at(ordinals[i], 0);
    wrong += ids[i] != set.ids[static_cast<std::size_t>(ordinals[i])] ||
             std::memcmp(expected.data(), out.data() + i * bytes, bytes) != 0;
  }
  return wrong;
}

struct Shape {
  std::int64_t cache_bytes;
  BlockCompression compression;
};

class FeatureThreads : public ::testing::TestWithParam<Shape> {};

TEST_P(FeatureThreads, ReadTheSameBytesFromASmallSlab) {
  constexpr std::uint64_t kSeed = 20'250;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  if (GetParam().compression == BlockCompression::kLz4 && !lz4_available()) {
    GTEST_SKIP() << "this build has no LZ4";
  }
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  FeatureSet set =
      test::make_set(kSeed, 6000, {{.name = "x", .dtype = DType::kFloat32, .shape = {100}}},
                     test::IdKind::kSparse);
  test::make_compressible(set, kSeed, 0.8);
  ASSERT_TRUE(test::write_set(governor, scratch / "set", set, 1 << 20, GetParam().compression));
  auto store = FeatureStore::open(
                   governor, {.directory = scratch / "set", .cache_bytes = GetParam().cache_bytes})
                   .or_throw();
  std::atomic<std::int64_t> wrong{0};
  std::atomic<bool> done{false};
  {
    std::vector<std::jthread> readers;
    for (std::uint64_t t = 0; t < 4; ++t) {
      readers.emplace_back([&, t] {
        std::mt19937_64 random(kSeed + t);
        for (int round = 0; round < 60; ++round) {
          wrong += read_random(store, set, random);
        }
      });
    }
    std::jthread shrinker([&] {
      std::mt19937_64 random(kSeed + 99);
      while (!done) {
        if (random() % 3 == 0) {
          store.grow_back(static_cast<std::int64_t>(random() % (512 << 10)));
        } else {
          store.shrink(64 << 10);
        }
        std::this_thread::yield();
      }
    });
    readers.clear();  // Joins them.
    done = true;
  }
  EXPECT_EQ(wrong.load(), 0);
  const FeatureStats stats = store.stats();
  EXPECT_LE(stats.resident_frames, stats.frames);
  EXPECT_GT(stats.blocks_read, 0);
}

INSTANTIATE_TEST_SUITE_P(Slabs, FeatureThreads,
                         ::testing::Values(Shape{160 << 10, BlockCompression::kNone},
                                           Shape{512 << 10, BlockCompression::kNone},
                                           Shape{8 << 20, BlockCompression::kNone},
                                           Shape{160 << 10, BlockCompression::kLz4},
                                           Shape{512 << 10, BlockCompression::kLz4},
                                           Shape{8 << 20, BlockCompression::kLz4}));

TEST(FeatureThreadsTest, AFailedReadIsReportedToItsCallersAndForgotten) {
  constexpr std::uint64_t kSeed = 77;
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  const FeatureSet set =
      test::make_set(kSeed, 3000, {{.name = "x", .dtype = DType::kFloat32, .shape = {1024}}});
  ASSERT_TRUE(test::write_set(governor, scratch / "set", set));
  auto store =
      FeatureStore::open(governor, {.directory = scratch / "set", .cache_bytes = 256 << 10})
          .or_throw();
  std::atomic<std::int64_t> failed{0};
  {
    const ScopedFileFault fault({.call = FileCall::kRead, .nth = 500, .os_errno = 5});
    std::vector<std::jthread> readers;
    for (std::uint64_t t = 0; t < 4; ++t) {
      readers.emplace_back([&, t] {
        std::mt19937_64 random(kSeed + t);
        for (int round = 0; round < 20; ++round) {
          failed += read_random(store, set, random) > 0;
        }
      });
    }
  }
  EXPECT_GE(failed.load(), 1);
  EXPECT_LE(failed.load(), 4);
  std::mt19937_64 random(kSeed);
  for (int round = 0; round < 20; ++round) {
    ASSERT_EQ(read_random(store, set, random), 0);
  }
}

TEST(FeatureThreadsTest, ConcurrentLoadsOfOneBlockAreJoined) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  const FeatureSet set =
      test::make_set(9, 2000, {{.name = "x", .dtype = DType::kFloat32, .shape = {1024}}});
  ASSERT_TRUE(test::write_set(governor, scratch / "set", set));
  auto store = FeatureStore::open(governor, {.directory = scratch / "set", .cache_bytes = 16 << 20})
                   .or_throw();
  std::vector<std::int64_t> all(2000);
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = static_cast<std::int64_t>(i);
  }
  std::atomic<int> failed{0};
  {
    std::vector<std::jthread> readers;
    readers.reserve(4);
    for (int t = 0; t < 4; ++t) {
      readers.emplace_back([&] {
        std::vector<std::byte> out(2000 * 4096);
        const std::vector<std::span<std::byte>> spans{out};
        failed += store.read_ordinals(all, std::vector<int>{0}, spans).has_value() ? 0 : 1;
        failed += out == set.values[0] ? 0 : 1;
      });
    }
  }
  EXPECT_EQ(failed.load(), 0);
  EXPECT_EQ(store.stats().blocks_read, 2000) << "every block is read once, whoever asks first";
}

}  // namespace
}  // namespace plimsoll
