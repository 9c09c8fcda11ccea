// SPDX-License-Identifier: Apache-2.0
//
// Goal: the smallest slab that is accepted, rounded up to 1 MiB, completes every workload, 20 times
// of 20. Method: tables by seed (width, type, rows, ids, optimizer, threads, growing or not); each
// is trained through shuffled epochs, out of order and by skewed ids with a commit each step,
// grown, scanned, opened again and exported, and every answer is compared with the oracle, bit by
// bit. Features by seed are read in order, shuffled, by skewed ids, ahead and from two threads.
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>
#include <thread>
#include <utility>

#include "os/power_loss.h"
#include "plimsoll/sample_order.h"
#include "tables/store_export.h"
#include "tests/support/embedding_table_fixture.h"
#include "tests/support/feature_set.h"

namespace plimsoll {
namespace {

using namespace test;
namespace fs = std::filesystem;

constexpr std::int64_t kMiB = 1 << 20;
constexpr std::size_t kBatch = 128;

// A table at its smallest slab, beside the oracle.
struct Table {
  EmbeddingStoreOptions options{};
  std::vector<std::int64_t> ids{};
  std::size_t to_come{0};  // Of them, the last ones.
  std::optional<EmbeddingStore> store{};
  std::optional<EmbeddingOracle> oracle{};
  std::int64_t step{0};
  [[nodiscard]] std::span<const std::int64_t> there() const {
    return std::span(ids).first(ids.size() - to_come);
  }
};

class SmallestSlabTest : public EmbeddingTableTest,
                         public ::testing::WithParamInterface<RowLayout> {
 protected:
  void TearDown() override {
    stop_recording_unsynced();
    EmbeddingTableTest::TearDown();
  }

  void make(std::mt19937_64& random) {
    constexpr std::array<std::int64_t, 4> kDims{8, 64, 200, 700};
    constexpr std::array kKinds{RowOptimizer::kAdamW,      RowOptimizer::kAdagrad,
                                RowOptimizer::kSgd,        RowOptimizer::kRowAdagrad,
                                RowOptimizer::kAdamWFresh, RowOptimizer::kSgdMomentum,
                                RowOptimizer::kAdam};
    table_ = Table{};
    const std::int64_t dim = kDims[random() % kDims.size()];
    table_.ids = sparse_ids(200 + random() % (dim < 100 ? 1800 : 400), random());
    const bool dense = random() % 2 == 0;
    for (std::size_t i = 0; dense && i < table_.ids.size(); ++i) {
      table_.ids[i] = static_cast<std::int64_t>(i);
    }
    table_.to_come = random() % 3 == 0 ? table_.ids.size() / 4 : 0;
    table_.options = {
        .directory = directory(),
        .dim = dim,
        .dtype = random() % 4 == 0 ? RowDType::kBFloat16 : RowDType::kFloat32,
        .optimizer = {.kind = kKinds[random() % kKinds.size()]},
        .layout = GetParam(),
        .order_seed = random(),
        .ids = table_.there(),
        .rows_max = table_.to_come > 0 ? static_cast<std::int64_t>(table_.ids.size()) : 0,
        .batch_rows = static_cast<std::int64_t>(kBatch),
        .io_threads = static_cast<int>(random() % 4),
        .compute_threads = 1 + static_cast<int>(random() % 2)};
    const std::int64_t floor = EmbeddingStore::plan(table_.options).or_throw().floor_bytes;
    table_.options.store_bytes = floor - 1;
    const auto refused = EmbeddingStore::open(governor_, table_.options);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().requested_bytes, floor);
    table_.options.store_bytes = (floor + kMiB - 1) / kMiB * kMiB;
    table_.store.emplace(open(table_.options));
    table_.oracle.emplace(dim, table_.options.optimizer, table_.options.init, table_.options.dtype);
  }

  // Reads the rows, changes them, commits.
  void train(const std::vector<std::int64_t>& batch, std::mt19937_64& random, bool sets) {
    EmbeddingStore& store = *table_.store;
    expect_rows(store, *table_.oracle, batch);
    const auto values = random_floats(batch.size() * static_cast<std::size_t>(store.dim()), random);
    if (sets) {
      store.update(batch, values).or_throw();
      table_.oracle->update(batch, values);
    } else {
      store.apply(batch, values).or_throw();
      table_.oracle->apply(batch, values);
    }
    store.commit(++table_.step).or_throw();
  }
  void shuffled_epoch(std::int64_t epoch, std::mt19937_64& random) {
    const auto rows = static_cast<std::int64_t>(table_.there().size());
    const SampleOrder order(rows, table_.options.order_seed, epoch);
    table_.store->begin_epoch(epoch).or_throw();
    const auto batch_at = [&](std::int64_t begin) {
      std::vector<std::int64_t> batch;
      for (std::int64_t at = begin; at < std::min(begin + static_cast<std::int64_t>(kBatch), rows);
           ++at) {
        batch.push_back(table_.ids[static_cast<std::size_t>(order.at(at))]);
      }
      return batch;
    };
    for (std::int64_t at = 0; at < rows && !HasFailure(); at += static_cast<std::int64_t>(kBatch)) {
      table_.store->prefetch(batch_at(at + static_cast<std::int64_t>(kBatch)));
      train(batch_at(at), random, false);
    }
  }
  std::vector<std::int64_t> skewed(std::mt19937_64& random) const {
    std::vector<std::int64_t> batch(1 + random() % kBatch);
    for (auto& id : batch) {
      const double u = static_cast<double>(random() >> 11) * 0x1p-53;
      const double rank = static_cast<double>(table_.there().size()) * std::pow(u, 6.0);
      id = table_.ids[static_cast<std::size_t>(rank)];
    }
    return batch;
  }
  // Whether there were rows to come.
  bool grow() {
    if (table_.to_come == 0) {
      return false;
    }
    EXPECT_EQ(table_.store->insert(table_.ids).or_throw(),
              static_cast<std::int64_t>(std::exchange(table_.to_come, 0)));
    table_.options.ids = {};
    return true;
  }
  void expect_exported() {
    const fs::path out = root_ / "rows.npy";
    fs::remove(out);
    fs::remove(root_ / "rows.ids.npy");
    ASSERT_EQ(export_store(governor_, {.directory = directory(), .out = out}, {}).or_throw(),
              static_cast<std::int64_t>(table_.ids.size()));
    std::vector<float> wanted;
    for (const std::int64_t id : table_.ids) {
      const auto& weights = table_.oracle->row(id).weights;
      wanted.insert(wanted.end(), weights.begin(), weights.end());
    }
    std::ifstream file(out, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    const std::size_t bytes = wanted.size() * sizeof(float);
    ASSERT_GT(text.size(), bytes);
    EXPECT_EQ(std::memcmp(text.data() + text.size() - bytes, wanted.data(), bytes), 0);
  }

  Table table_;
};

TEST_P(SmallestSlabTest, CompletesEveryWorkloadTwentyTimesOfTwenty) {
  constexpr int kTimes = 20;
  int completed = 0;
  for (int time = 0; time < kTimes && !HasFailure(); ++time) {
    SCOPED_TRACE("seed " + std::to_string(time));
    fs::remove_all(directory());
    record_unsynced({});  // A commit each step: what syncs cost is not what this is about.
    std::mt19937_64 random(static_cast<std::uint64_t>(time));
    ASSERT_NO_FATAL_FAILURE(make(random));
    shuffled_epoch(0, random);
    shuffled_epoch(1, random);
    ASSERT_EQ(grow(), table_.options.rows_max > 0);
    for (int i = 0; i < 8; ++i) {
      train(draw(table_.ids, 1 + random() % kBatch, random), random, true);
      train(skewed(random), random, false);
    }
    expect_all_rows(*table_.store, *table_.oracle, table_.ids);
    table_.store.reset();
    table_.store.emplace(open(table_.options));
    ASSERT_EQ(table_.store->last_commit(), table_.step);
    expect_all_rows(*table_.store, *table_.oracle, table_.ids);
    shuffled_epoch(2, random);
    EXPECT_LE(table_.store->plan().total_bytes, table_.options.store_bytes);
    table_.store.reset();
    expect_exported();
    completed += HasFailure() ? 0 : 1;
  }
  EXPECT_EQ(completed, kTimes);
}

INSTANTIATE_TEST_SUITE_P(Layouts, SmallestSlabTest, both_layouts(), layout_case);

// ---- Features ---------------------------------------------------------------------------------

void expect_records(FeatureStore& store, const FeatureSet& set,
                    const std::vector<std::int64_t>& ordinals) {
  for (std::size_t k = 0; k < set.columns.size(); ++k) {
    const auto bytes = static_cast<std::size_t>(set.columns[k].bytes());
    std::vector<std::byte> out(ordinals.size() * bytes);
    const std::array<std::span<std::byte>, 1> to{std::span(out)};
    store.read_ordinals(ordinals, std::array{static_cast<int>(k)}, to).or_throw();
    for (std::size_t i = 0; i < ordinals.size(); ++i) {
      const auto wanted = set.at(ordinals[i], k);
      EXPECT_EQ(std::memcmp(out.data() + i * bytes, wanted.data(), bytes), 0)
          << "record " << ordinals[i] << " column " << k;
    }
  }
}

TEST(SmallestFeatureSlabTest, CompletesEveryWorkloadTwentyTimesOfTwenty) {
  constexpr int kTimes = 20;
  int completed = 0;
  for (int time = 0; time < kTimes && !::testing::Test::HasFailure(); ++time) {
    SCOPED_TRACE("seed " + std::to_string(time));
    std::mt19937_64 random(static_cast<std::uint64_t>(time));
    ScratchDirectory scratch;
    Governor governor = governor_of();
    const auto rows = static_cast<std::int64_t>(300 + random() % 3000);
    const FeatureSet set =
        make_set(random(), rows,
                 {{.name = "a",
                   .dtype = DType::kFloat32,
                   .shape = {static_cast<std::int64_t>(1 + random() % 900)}},
                  {.name = "b", .dtype = DType::kInt64, .shape = {}}},
                 static_cast<IdKind>(random() % 3), static_cast<GroupKind>(random() % 3));
    const fs::path directory = scratch / "set";
    ASSERT_TRUE(write_set(governor, directory, set));
    FeatureStoreOptions how{.directory = directory, .io_threads = static_cast<int>(random() % 4)};
    const std::int64_t floor = FeatureStore::inspect(directory).or_throw().floor_bytes;
    how.cache_bytes = floor - 1;
    ASSERT_FALSE(FeatureStore::open(governor, how));
    how.cache_bytes = (floor + kMiB - 1) / kMiB * kMiB;
    auto store = FeatureStore::open(governor, how).or_throw();
    const auto some = [&](std::mt19937_64& from, double skew) {
      std::vector<std::int64_t> ordinals(1 + from() % kBatch);
      for (auto& ordinal : ordinals) {
        const double u = static_cast<double>(from() >> 11) * 0x1p-53;
        ordinal = static_cast<std::int64_t>(static_cast<double>(rows) * std::pow(u, skew));
      }
      return ordinals;
    };
    const SampleOrder order(rows, 3, time);
    for (std::int64_t at = 0; at < rows; at += static_cast<std::int64_t>(kBatch)) {
      std::vector<std::int64_t> in_order;
      std::vector<std::int64_t> shuffled;
      for (std::int64_t i = at; i < std::min(at + static_cast<std::int64_t>(kBatch), rows); ++i) {
        in_order.push_back(i);
        shuffled.push_back(order.at(i));
      }
      store.prefetch_ordinals(shuffled).or_throw();
      expect_records(store, set, in_order);
      expect_records(store, set, shuffled);
    }
    {
      std::vector<std::jthread> readers;
      for (std::uint64_t reader = 0; reader < 2; ++reader) {
        readers.emplace_back([&, seed = random()] {
          std::mt19937_64 mine(seed);
          for (int i = 0; i < 10; ++i) {
            expect_records(store, set, some(mine, i % 2 == 0 ? 1.0 : 6.0));
          }
        });
      }
    }
    EXPECT_LE(store.plan().total_bytes, how.cache_bytes);
    completed += ::testing::Test::HasFailure() ? 0 : 1;
  }
  EXPECT_EQ(completed, kTimes);
}

}  // namespace
}  // namespace plimsoll
