// SPDX-License-Identifier: Apache-2.0
//
// Goal: a flipped bit in any file of a table or of a feature store is noticed, or harmless; no
// wrong row or feature is ever returned. Method: every bit of the superblocks' records, and one bit
// of every 7th byte of the small files and of a share of the large ones, flipped one at a time;
// then everything is opened and read.
#include "plimsoll/feature_store.h"
#include "plimsoll/sample_order.h"
#include "tests/support/array_files.h"
#include "tests/support/embedding_table_fixture.h"
#include "tests/support/feature_set.h"

namespace plimsoll {
namespace {

using namespace test;
namespace fs = std::filesystem;

// One file, held in memory, of which one bit at a time is another.
class FlippedFile {
 public:
  explicit FlippedFile(const fs::path& path) : path_(path), text_(slurp(path)) {}
  ~FlippedFile() { spill(path_, text_); }
  FlippedFile(const FlippedFile&) = delete;
  FlippedFile& operator=(const FlippedFile&) = delete;

  void flip(std::size_t byte, unsigned bit) const {
    std::string other = text_;
    other[byte] = static_cast<char>(other[byte] ^ (1U << bit));
    spill(path_, other);
  }
  [[nodiscard]] std::size_t size() const { return text_.size(); }
  [[nodiscard]] bool is_zero(std::size_t begin, std::size_t size) const {
    return text_.find_first_not_of('\0', begin) >= begin + size;
  }

 private:
  fs::path path_;
  std::string text_;
};

// The bytes of a file to try: all of the small ones' 7th bytes, some 300 of the large ones.
std::size_t stride_of(std::size_t size) {
  return std::max<std::size_t>(7, size / 300 | 1);
}

struct Kind {
  RowLayout layout;
  bool grows;  // A fifth of its rows were inserted.
};

class BitFlipsTest : public EmbeddingTableTest, public ::testing::WithParamInterface<Kind> {
 protected:
  // In sample order: each step ends an epoch half way, carries the rest over, changes half of the
  // next epoch in its order, and then every row out of order.
  void SetUp() override {
    EmbeddingTableTest::SetUp();
    const auto [layout, grows] = GetParam();
    auto store = open(options_ = {.directory = directory(),
                                  .dim = 24,
                                  .init = {.kind = RowInitKind::kZeros},
                                  .layout = layout,
                                  .order_seed = 6,
                                  .ids = std::span(ids_).first(grows ? 200 : 250),
                                  .rows_max = grows ? 260 : 0,
                                  .batch_rows = 32,
                                  .io_threads = 0});
    options_.store_bytes = store.plan().floor_bytes;
    if (grows) {
      store.insert(ids_).or_throw();
    }
    for (std::int64_t step = 1; step <= 3; ++step) {
      rows_.assign(ids_.size() * 24, static_cast<float>(step));
      store.begin_epoch(step).or_throw();
      const SampleOrder order(static_cast<std::int64_t>(ids_.size()), 6, step);
      for (std::int64_t at = 0; at < 125; at += 25) {
        std::vector<std::int64_t> batch;
        for (std::int64_t i = at; i < at + 25; ++i) {
          batch.push_back(ids_[static_cast<std::size_t>(order.at(i))]);
        }
        store.update(batch, std::span(rows_).first(std::size_t{25} * 24)).or_throw();
      }
      for (std::size_t at = 0; at < ids_.size(); at += 10) {
        store.update(std::span(ids_).subspan(at, 10), std::span(rows_).first(std::size_t{10} * 24))
            .or_throw();
      }
      store.commit(step).or_throw();
    }
  }
  // True when the damage was noticed. Fails the test when a wrong row came back, be it by batches
  // in the order of the epoch, by all ids at once, or by scan().
  bool noticed(const std::string& what) {
    const auto told = [&](const Error& error) {
      EXPECT_EQ(error.code, ErrorCode::kCorrupt) << what << ": " << error.to_string();
      return true;
    };
    auto store = EmbeddingStore::open(governor_, options_);
    if (!store) {
      return told(store.error());
    }
    std::vector<float> got(rows_.size());
    std::vector<float> next(std::size_t{20} * 24);
    const SampleOrder order(static_cast<std::int64_t>(ids_.size()), 6, 3);
    std::vector<std::int64_t> batch;
    for (std::int64_t at = 125; at < 145; ++at) {
      batch.push_back(ids_[static_cast<std::size_t>(order.at(at))]);
    }
    if (const auto gathered = store->gather(batch, next); !gathered) {
      return told(gathered.error());
    }
    EXPECT_EQ(next, std::vector<float>(next.size(), 3.0F)) << what;
    if (const auto gathered = store->gather(ids_, got); !gathered) {
      return told(gathered.error());
    }
    EXPECT_EQ(store->last_commit(), 3) << what;
    EXPECT_EQ(got, rows_) << what;
    std::size_t seen = 0;
    const auto scanned =
        store->scan([&](std::span<const std::int64_t> ids, auto, std::span<const float> values) {
          EXPECT_TRUE(std::equal(ids.begin(), ids.end(), ids_.begin() + static_cast<long>(seen)))
              << what;
          for (std::size_t i = 0; i < values.size(); ++i) {
            const bool is_weight = i % (values.size() / ids.size()) < 24;
            EXPECT_EQ(values[i], is_weight ? 3.0F : 0.0F) << what;
          }
          seen += ids.size();
          return Result<void>{};
        });
    if (!scanned) {
      return told(scanned.error());
    }
    EXPECT_EQ(seen, ids_.size()) << what;
    return false;
  }
  EmbeddingStoreOptions options_;
  std::vector<std::int64_t> ids_ = sparse_ids(250, 77);
  std::vector<float> rows_;
};

TEST_P(BitFlipsTest, OfASuperblockAreMendedByItsOtherCopy) {
  const FlippedFile file(directory() / "super");
  int records = 0;
  for (std::size_t sector = 0; sector + 512 <= file.size() && !HasFailure(); sector += 512) {
    if (file.is_zero(sector, 512)) {
      continue;
    }
    ++records;
    for (std::size_t bit = 0; bit < std::size_t{56} * 8 && !HasFailure(); ++bit) {
      file.flip(sector + bit / 8, bit % 8);
      EXPECT_FALSE(noticed("bit " + std::to_string(sector * 8 + bit)));
    }
  }
  EXPECT_EQ(records, 4) << "two slots, two copies each";
}

TEST_P(BitFlipsTest, OfATableAreNoticedOrHarmless) {
  for (const auto& entry : fs::directory_iterator(directory())) {
    if (entry.path().filename() == ".lock") {
      continue;  // Holds nothing of the table, only who has it open.
    }
    int seen = 0;
    int tried = 0;
    {
      const FlippedFile file(entry.path());
      const std::size_t stride = stride_of(file.size());
      for (std::size_t byte = 0; byte < file.size() && !HasFailure(); byte += stride, ++tried) {
        file.flip(byte, static_cast<unsigned>(byte % 8));
        const std::string name = entry.path().filename().string();
        const bool saw = noticed(name + " byte " + std::to_string(byte));
        const auto sound = EmbeddingStore::verify(directory(), {});
        EXPECT_TRUE(!saw || !sound) << name << ": verify calls it sound, byte " << byte;
        seen += saw ? 1 : 0;
      }
    }
    RecordProperty(entry.path().filename().string(), std::to_string(seen));
    EXPECT_GT(tried, 20) << entry.path();
  }
  EXPECT_FALSE(noticed("after all damage was undone"));
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, BitFlipsTest,
    ::testing::Values(Kind{RowLayout::kAnyOrder, false}, Kind{RowLayout::kSampleOrder, false},
                      Kind{RowLayout::kAnyOrder, true}, Kind{RowLayout::kSampleOrder, true}),
    [](const auto& one) {
      return std::string(one.param.grows ? "Growing" : "") +
             (one.param.layout == RowLayout::kAnyOrder ? "AnyOrder" : "SampleOrder");
    });

TEST(FeatureBitFlipsTest, OfAFeatureStoreAreNoticedOrHarmless) {
  ScratchDirectory scratch;
  Governor governor = governor_of();
  const FeatureSet set = make_set(5, 300, {{.name = "x", .dtype = DType::kFloat32, .shape = {24}}},
                                  IdKind::kSparse, GroupKind::kVaried);
  const fs::path directory = scratch / "set";
  ASSERT_TRUE(write_set(governor, directory, set));
  std::vector<std::byte> out(set.values[0].size());
  const std::vector<std::span<std::byte>> spans{out};
  for (const std::string& name : names_in(directory)) {
    int seen = 0;
    const FlippedFile file(directory / name);
    const std::size_t stride = stride_of(file.size());
    for (std::size_t byte = 0; byte < file.size() && !::testing::Test::HasFailure();
         byte += stride) {
      file.flip(byte, static_cast<unsigned>(byte % 8));
      SCOPED_TRACE(name + " byte " + std::to_string(byte));
      auto store = FeatureStore::open(governor, {.directory = directory, .cache_bytes = 256 << 10});
      const auto read = store ? store->read(set.ids, std::vector<int>{0}, spans)
                              : Result<void>(tl::unexpected(store.error()));
      const bool sound = FeatureStore::verify(directory, {}).has_value();
      seen += sound ? 0 : 1;
      if (read) {
        EXPECT_EQ(out, set.values[0]);
      } else {
        EXPECT_EQ(read.error().code, ErrorCode::kCorrupt) << read.error().to_string();
        EXPECT_FALSE(sound) << "verify calls it sound";
      }
    }
    EXPECT_GT(seen, 0) << name << ": no damage was ever noticed";
  }
}

}  // namespace
}  // namespace plimsoll
