// SPDX-License-Identifier: Apache-2.0
//
// Goal: a store with compression differs from one without in the bytes on disk and in nothing else,
// and its damage is found. Method: random columns, sizes and contents, written both ways;
// FeatureSet (plain arrays) is the oracle; the seed is printed on failure.
#include <gtest/gtest.h>

#include "base/crc32c.h"
#include "os/file_faults.h"
#include "plimsoll/feature_store.h"
#include "store/feature_block.h"
#include "store/feature_format.h"
#include "store/feature_table.h"
#include "tests/support/array_files.h"
#include "tests/support/feature_set.h"

namespace plimsoll {
namespace {

using test::FeatureSet;
using test::GroupKind;
using test::IdKind;
using test::ScratchDirectory;
using test::slurp;
using test::spill;
namespace fs = std::filesystem;

std::vector<ColumnSpec> clip_columns() {
  return {{.name = "image", .dtype = DType::kFloat32, .shape = {512}},
          {.name = "text", .dtype = DType::kFloat32, .shape = {512}}};
}

std::vector<ColumnSpec> random_columns(std::mt19937_64& random) {
  std::vector<ColumnSpec> columns;
  const std::size_t count = 1 + random() % 4;
  for (std::size_t k = 0; k < count; ++k) {
    ColumnSpec column{.name = std::string("c").append(std::to_string(k)),
                      .dtype = static_cast<DType>(random() % 7),
                      .shape = {}};
    if (random() % 4 != 0) {
      column.shape.push_back(1 +
                             static_cast<std::int64_t>(random() % (random() % 5 == 0 ? 9000 : 90)));
    }
    columns.push_back(std::move(column));
  }
  return columns;
}

// All columns of the records, joined; an error's text instead, if there is one.
std::string read_all(FeatureStore& store, const std::vector<std::int64_t>& ordinals) {
  std::vector<std::string> out;
  std::vector<std::span<std::byte>> spans;
  std::vector<int> columns;
  for (const ColumnSpec& column : store.info().columns) {
    columns.push_back(static_cast<int>(columns.size()));
    out.emplace_back(ordinals.size() * static_cast<std::size_t>(column.bytes()), '\0');
  }
  spans.reserve(out.size());
  for (std::string& bytes : out) {
    spans.push_back(std::as_writable_bytes(std::span(bytes)));
  }
  if (const auto read = store.read_ordinals(ordinals, columns, spans); !read) {
    return std::string("error: ").append(read.error().to_string());
  }
  std::string joined;
  for (const std::string& bytes : out) {
    joined += bytes;
  }
  return joined;
}

std::string expected(const FeatureSet& set, const std::vector<std::int64_t>& ordinals) {
  std::string joined;
  for (std::size_t k = 0; k < set.columns.size(); ++k) {
    for (const std::int64_t ordinal : ordinals) {
      const auto bytes = set.at(ordinal, k);
      joined.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    }
  }
  return joined;
}

std::vector<std::int64_t> some_of(std::int64_t rows, std::mt19937_64& random, std::size_t count) {
  std::vector<std::int64_t> ordinals(rows == 0 ? 0 : count);
  for (auto& ordinal : ordinals) {
    ordinal = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(rows));
  }
  return ordinals;
}

std::int64_t floor_of(Governor governor, const fs::path& directory) {
  const auto refused = FeatureStore::open(governor, {.directory = directory, .cache_bytes = 1});
  return refused ? 0 : refused.error().requested_bytes;
}

class CompressionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!lz4_available()) {
      GTEST_SKIP() << "this build has no LZ4";
    }
  }
  Result<void> write(const std::string& name, const FeatureSet& set,
                     BlockCompression compression = BlockCompression::kLz4,
                     std::int64_t buffer_bytes = 1 << 20) {
    return test::write_set(governor_, scratch_ / name, set, buffer_bytes, compression);
  }
  FeatureStore open(const std::string& name, std::int64_t cache_bytes, int io_threads = 4) {
    return FeatureStore::open(
               governor_,
               {.directory = scratch_ / name, .cache_bytes = cache_bytes, .io_threads = io_threads})
        .or_throw();
  }
  ScratchDirectory scratch_;
  Governor governor_ = test::governor_of();
};

TEST_F(CompressionTest, AStoreReadsTheSameWithAndWithoutIt) {
  for (std::uint64_t seed = 0; seed < 14; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto columns = random_columns(random);
    const auto rows = static_cast<std::int64_t>(random() % 1500);
    FeatureSet set = test::make_set(seed, rows, columns, static_cast<IdKind>(random() % 3),
                                    static_cast<GroupKind>(random() % 3));
    test::make_compressible(set, seed, static_cast<double>(random() % 101) / 100.0);
    const std::string plain_name = std::to_string(seed).append("plain");
    const std::string packed_name = std::to_string(seed).append("packed");
    const auto buffer = static_cast<std::int64_t>(random() % (1 << 20));
    ASSERT_TRUE(write(plain_name, set, BlockCompression::kNone));
    ASSERT_TRUE(write(packed_name, set, BlockCompression::kLz4, buffer));
    const auto plain = FeatureStore::inspect(scratch_ / plain_name).or_throw();
    const auto packed = FeatureStore::inspect(scratch_ / packed_name).or_throw();
    ASSERT_EQ(packed.fingerprint, plain.fingerprint) << "compression does not name the data";
    ASSERT_LE(packed.stored_bytes, plain.stored_bytes);
    ASSERT_EQ(packed.blocks, plain.blocks);
    ASSERT_TRUE(FeatureStore::verify(scratch_ / packed_name, nullptr));
    const std::int64_t floor = floor_of(governor_, scratch_ / packed_name);
    for (const std::int64_t cache : {floor, floor + (300 << 10), std::int64_t{24} << 20}) {
      auto store = open(packed_name, cache, static_cast<int>(random() % 4));
      for (int round = 0; round < 6; ++round) {
        const auto wanted = some_of(rows, random, random() % 900);
        ASSERT_TRUE(read_all(store, wanted) == expected(set, wanted)) << "cache " << cache;
      }
    }
    fs::remove_all(scratch_ / plain_name);
    fs::remove_all(scratch_ / packed_name);
  }
}

TEST_F(CompressionTest, ABlockThatDoesNotShrinkIsStoredPlain) {
  FeatureSet set = test::make_set(1, 300, clip_columns());
  ASSERT_TRUE(write("plain", set, BlockCompression::kNone));
  ASSERT_TRUE(write("packed", set));
  const auto info = FeatureStore::inspect(scratch_ / "packed").or_throw();
  EXPECT_EQ(info.compression, BlockCompression::kLz4);
  EXPECT_EQ(info.plain_blocks, 300);
  EXPECT_EQ(info.stored_bytes, 300 * 4096);
  EXPECT_EQ(slurp(scratch_ / "packed" / "records.dat"), slurp(scratch_ / "plain" / "records.dat"));
  test::make_compressible(set, 1, 0.5);
  ASSERT_TRUE(write("half", set));
  const auto half = FeatureStore::inspect(scratch_ / "half").or_throw();
  EXPECT_GT(half.plain_blocks, 100);
  EXPECT_LT(half.plain_blocks, 200);
  EXPECT_LT(half.stored_bytes, 300 * 4096 * 3 / 4);
}

TEST_F(CompressionTest, ABlockCostsAtMostOnePageMoreToReadThanPlain) {
  FeatureSet set = test::make_set(2, 2000, {{.name = "x", .dtype = DType::kUint8, .shape = {700}}});
  test::make_compressible(set, 3, 0.4);
  ASSERT_TRUE(write("packed", set));
  auto store = open("packed", floor_of(governor_, scratch_ / "packed"));
  const std::int64_t block_bytes = store.info().block_bytes;
  std::mt19937_64 random(4);
  std::int64_t larger = 0;
  for (int i = 0; i < 500; ++i) {
    const FeatureStats before = store.stats();
    const auto one = some_of(2000, random, 1);
    ASSERT_EQ(read_all(store, one), expected(set, one));
    const FeatureStats after = store.stats();
    // The tables of checksums and places are paged in so small a slab: a block's size each.
    const std::int64_t blocks = after.blocks_read - before.blocks_read;
    const std::int64_t bytes = after.bytes_read - before.bytes_read;
    ASSERT_LE(bytes, blocks * block_bytes + 4096);
    larger += bytes > blocks * block_bytes ? 1 : 0;
  }
  EXPECT_GT(larger, 0);
  EXPECT_LT(store.info().stored_bytes, store.info().blocks * block_bytes * 9 / 10);
}

TEST_F(CompressionTest, ReadsFewerBytesFromTheDiskThanItDelivers) {
  FeatureSet set = test::make_set(3, 4000, clip_columns());
  test::make_compressible(set, 3, 1.0);
  ASSERT_TRUE(write("plain", set, BlockCompression::kNone));
  ASSERT_TRUE(write("packed", set));
  std::vector<std::int64_t> all(4000);
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = static_cast<std::int64_t>(i);
  }
  auto plain = open("plain", 2 << 20);
  auto packed = open("packed", 2 << 20);
  ASSERT_TRUE(read_all(plain, all) == expected(set, all));
  ASSERT_TRUE(read_all(packed, all) == expected(set, all));
  EXPECT_EQ(plain.stats().bytes_delivered, 4000 * 4096);
  EXPECT_EQ(packed.stats().bytes_delivered, 4000 * 4096);
  EXPECT_EQ(plain.stats().bytes_read, 4000 * 4096);
  EXPECT_LT(packed.stats().bytes_read, 4000 * 4096 / 20);
  EXPECT_LT(packed.stats().reads, plain.stats().reads / 4);
}

TEST_F(CompressionTest, EveryBitOfEveryFileIsGuarded) {
  FeatureSet set = test::make_set(5, 900, {{.name = "x", .dtype = DType::kFloat32, .shape = {50}}},
                                  IdKind::kSparse, GroupKind::kVaried);
  test::make_compressible(set, 5, 0.7);
  ASSERT_TRUE(write("set", set));
  for (const std::string& name : test::names_in(scratch_ / "set")) {
    const fs::path path = scratch_ / "set" / name;
    const std::string good = slurp(path);
    std::mt19937_64 random(6);
    for (int i = 0; i < 12; ++i) {
      std::string bad = good;
      const std::size_t at = random() % bad.size();
      bad[at] = static_cast<char>(bad[at] ^ (1 << (random() % 8)));
      spill(path, bad);
      const auto verified = FeatureStore::verify(scratch_ / "set", nullptr);
      ASSERT_FALSE(verified) << name << " byte " << at;
      ASSERT_EQ(verified.error().code, ErrorCode::kCorrupt) << verified.error().to_string();
    }
    spill(path, good);
  }
  EXPECT_TRUE(FeatureStore::verify(scratch_ / "set", nullptr));
}

TEST_F(CompressionTest, APlaceThatNoWriterChoseIsRefusedEvenWithAValidChecksum) {
  FeatureSet set = test::make_set(6, 3000, clip_columns());
  test::make_compressible(set, 6, 1.0);
  ASSERT_TRUE(write("set", set));
  // A small slab pages the table of places, so only the page's own checksum stands before it.
  auto store = open("set", floor_of(governor_, scratch_ / "set"));
  const fs::path path = scratch_ / "set" / "blocks.dat";
  std::string table = slurp(path);
  for (const std::uint64_t entry :
       {std::uint64_t{1} << 40, std::uint64_t{7} << 56, ~std::uint64_t{0}, std::uint64_t{5}}) {
    std::memcpy(table.data() + 8 * 20, &entry, 8);
    const std::uint32_t crc = crc32c(std::as_bytes(std::span(table.data(), 4092)));
    std::memcpy(table.data() + 4092, &crc, 4);
    spill(path, table);
    store = open("set", floor_of(governor_, scratch_ / "set"));
    EXPECT_EQ(read_all(store, {20}).find("error: "), 0U) << entry;
    EXPECT_EQ(read_all(store, {400}), expected(set, {400})) << "the others can be read";
  }
}

TEST_F(CompressionTest, ThePartsOfThePlanAddUpToTheSlab) {
  FeatureSet set =
      test::make_set(7, 20'000, {{.name = "x", .dtype = DType::kFloat32, .shape = {24}}},
                     IdKind::kSparse, GroupKind::kVaried);
  test::make_compressible(set, 7, 0.9);
  ASSERT_TRUE(write("plain", set, BlockCompression::kNone));
  ASSERT_TRUE(write("packed", set));
  for (const std::string name : {"plain", "packed"}) {
    const std::int64_t floor = floor_of(governor_, scratch_ / name);
    EXPECT_EQ(FeatureStore::inspect(scratch_ / name).or_throw().floor_bytes, floor);
    for (const std::int64_t cache : {floor, floor + 5000, std::int64_t{1} << 20,
                                     std::int64_t{3} << 20, std::int64_t{64} << 20}) {
      auto store = open(name, cache);
      const FeaturePlan plan = store.plan();
      EXPECT_EQ(plan.total_bytes, plan.frame_bytes + plan.buffer_bytes + plan.table_bytes +
                                      plan.index_bytes + plan.slack_bytes);
      EXPECT_LE(plan.total_bytes, cache);
      EXPECT_EQ(governor_.state().leased_bytes, (plan.total_bytes + 4095) / 4096 * 4096);
      EXPECT_EQ(name == "packed" ? plan.buffer_bytes > 0 : true, true);
    }
  }
}

TEST(NoCompressionTest, AStoreIsByteForByteWhatTheFirstVersionWrote) {
  const ScratchDirectory scratch;
  {
    auto writer =
        FeatureWriter::create(test::governor_of(),
                              {.directory = scratch / "set",
                               .columns = {{.name = "x", .dtype = DType::kFloat32, .shape = {2}}}})
            .or_throw();
    const std::vector<float> values{1, 2, 3, 4, 5, 6};
    const std::vector<std::span<const std::byte>> columns{std::as_bytes(std::span(values))};
    ASSERT_TRUE(writer.append(std::vector<std::int64_t>{0, 1, 2}, columns));
    ASSERT_TRUE(writer.finish());
  }
  EXPECT_EQ(test::names_in(scratch / "set"),
            (std::vector<std::string>{"checksums.dat", "features.json", "records.dat"}));
  const std::string header = slurp(scratch / "set" / "features.json");
  // Recorded from the program before it could compress. The first number covers all other keys.
  EXPECT_NE(header.find("\"crc32c\": 2718826981,\n"), std::string::npos) << header;
  EXPECT_NE(header.find("\"fingerprint\": \"7b23d6f76a28a92a\""), std::string::npos) << header;
  EXPECT_NE(header.find("\"version\": 1\n"), std::string::npos) << header;
}

TEST_F(CompressionTest, LeavesNothingBehindWhicheverWriteSyncOrRenameFails) {
  FeatureSet set = test::make_set(6, 1500, {{.name = "x", .dtype = DType::kFloat32, .shape = {20}}},
                                  IdKind::kSparse);
  test::make_compressible(set, 6, 0.6);
  for (const FileCall call : {FileCall::kWrite, FileCall::kSync, FileCall::kRename}) {
    int failures = 0;
    for (std::int64_t nth = 1;; ++nth) {
      Result<void> result;
      {
        const ScopedFileFault fault({.call = call, .nth = nth, .os_errno = 28});
        result = write("set", set, BlockCompression::kLz4, 0);
      }
      if (result) {
        break;
      }
      ++failures;
      EXPECT_EQ(result.error().code, ErrorCode::kIo);
      fs::remove_all(scratch_ / "set");  // A failed sync after the rename leaves a whole store.
      EXPECT_TRUE(test::names_in(scratch_.path()).empty()) << "call " << nth;
    }
    EXPECT_GT(failures, 0);
    EXPECT_TRUE(FeatureStore::verify(scratch_ / "set", nullptr));
    fs::remove_all(scratch_ / "set");
  }
}

TEST(CompressionNameTest, IsNoneOrLz4) {
  EXPECT_EQ(parse_compression("lz4").or_throw(), BlockCompression::kLz4);
  EXPECT_EQ(parse_compression("none").or_throw(), BlockCompression::kNone);
  EXPECT_EQ(*parse_compression("zip").error().detail,
            "compression = \"zip\" is neither none nor lz4");
}

}  // namespace
}  // namespace plimsoll
