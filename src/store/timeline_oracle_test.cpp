// SPDX-License-Identifier: Apache-2.0
//
// Goal: whatever is asked for in whatever order, a table in sample order holds what a plain map
// would, and the same bits as a table in any order. Method: training epochs by seed, mixed with
// skipped batches, early stops, changes out of order, evaluation, rows that come, commits, crashes,
// reopening at either commit with other slabs and seeds; every row is compared, slots and counts
// included.
#include <optional>

#include "plimsoll/sample_order.h"
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;

struct Case {
  std::uint64_t seed;
  std::int64_t dim;
  RowOptimizer kind;
  RowInitKind init;
  std::size_t rows;
  std::int64_t batch_rows;
  int compute_threads;
  bool sparse;
  RowDType dtype{};
  std::size_t come{0};  // Of the rows, those that are not there when the table is made.
};

std::vector<std::int64_t> all_ids(const Case& c) {
  auto ids = sparse_ids(c.rows, c.seed);
  for (std::size_t i = 0; !c.sparse && i < ids.size(); ++i) {
    ids[i] = static_cast<std::int64_t>(i);
  }
  return ids;
}

class TimelineAgainstMapTest : public EmbeddingTableTest,
                               public ::testing::WithParamInterface<Case> {
 protected:
  EmbeddingStoreOptions options() const {
    const Case& c = GetParam();
    EmbeddingStoreOptions made{
        .directory = directory(),
        .dim = c.dim,
        .dtype = c.dtype,
        .optimizer = {.kind = c.kind, .learning_rate = 0.1F, .weight_decay = 0.01F},
        .init = {.kind = c.init, .scale = 0.5F, .seed = c.seed},
        .layout = RowLayout::kSampleOrder,
        .order_seed = 7,
        .ids = std::span(ids_).first(c.rows - c.come),
        .rows_max = c.come > 0 ? static_cast<std::int64_t>(c.rows) : 0,
        .batch_rows = c.batch_rows,
        .io_threads = 2,
        .compute_threads = c.compute_threads};
    return with_floor(made);
  }
  std::vector<std::int64_t> ids_ = all_ids(GetParam());
};

using Record = std::pair<std::uint32_t, std::vector<float>>;

// Puts a record into a map, once.
auto into(std::map<std::int64_t, Record>& records) {
  return [&records](std::span<const std::int64_t> ids, std::span<const std::uint32_t> sequences,
                    std::span<const float> values) -> Result<void> {
    const std::size_t width = values.size() / ids.size();
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto row = values.subspan(i * width, width);
      EXPECT_TRUE(records.emplace(ids[i], Record{sequences[i], {row.begin(), row.end()}}).second)
          << "id " << ids[i] << " twice";
    }
    return {};
  };
}
std::map<std::int64_t, Record> scanned(EmbeddingStore& store) {
  std::map<std::int64_t, Record> records;
  store.scan(into(records)).or_throw();
  return records;
}
std::map<std::int64_t, Record> visited(EmbeddingStore& store) {
  std::map<std::int64_t, Record> records;
  store.visit_rows(into(records)).or_throw();
  return records;
}

// What is kept of a commit, to go back to.
struct Saved {
  EmbeddingOracle oracle;
  std::int64_t epoch;
  std::int64_t position;
  std::uint64_t seed;
  std::int64_t rows;   // That there are: the first of ids_.
  std::int64_t order;  // Of them, those in the order of the epoch.
};

TEST_P(TimelineAgainstMapTest, HoldsWhatAPlainMapHolds) {
  const Case& c = GetParam();
  SCOPED_TRACE("seed " + std::to_string(c.seed));
  std::mt19937_64 random(c.seed);
  EmbeddingStoreOptions now = options();
  const auto smallest = now.store_bytes;
  const auto made = static_cast<std::int64_t>(c.rows - c.come);
  Saved live{
      EmbeddingOracle(c.dim, now.optimizer, now.init, c.dtype), 0, 0, now.order_seed, made, made};
  const Saved initial = live;
  std::map<std::int64_t, Saved> commits;  // At most two, by step.
  std::optional<EmbeddingStore> store(open(now));
  ASSERT_GT(store->plan().total_bytes, 0);
  std::int64_t step = 0;
  const auto dim = static_cast<std::size_t>(c.dim);
  const auto there = [&] { return std::span(ids_).first(static_cast<std::size_t>(live.rows)); };
  const auto begin = [&] {
    store->begin_epoch(live.epoch).or_throw();
    live.order = live.position > 0 ? live.order : live.rows;
  };
  const auto reopen = [&](std::int64_t at_step) {
    store.reset();
    now.at_step = at_step;
    now.store_bytes = smallest + static_cast<std::int64_t>(random() % 3) * (smallest / 2);
    now.order_seed = live.seed;
    store.emplace(open(now));
    begin();
  };
  for (int operation = 0; operation < 160; ++operation) {
    const auto what = random() % 100;
    SCOPED_TRACE("operation " + std::to_string(operation) + " " + std::to_string(what));
    const auto count =
        1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(c.batch_rows));
    if (c.come > 0 &&
        (live.rows == 0 || random() % 8 == 0)) {  // Rows come, some that are there are named again.
      const std::int64_t end = std::min(live.rows + (live.rows == 0 ? 1 : 0) +
                                            static_cast<std::int64_t>(random() % (c.come / 6 + 2)),
                                        static_cast<std::int64_t>(c.rows));
      const std::int64_t from = live.rows - static_cast<std::int64_t>(random() % 3) % (made + 1);
      const auto named = std::span(ids_).subspan(static_cast<std::size_t>(from),
                                                 static_cast<std::size_t>(end - from));
      ASSERT_EQ(store->insert(named).or_throw(), end - live.rows);
      live.rows = end;
      ASSERT_EQ(store->rows(), end);
    }
    if (what < 70) {  // The order goes on.
      const SampleOrder order(live.order, live.seed, live.epoch);
      std::vector<std::int64_t> batch;
      for (std::int64_t i = 0; i < count && live.position + i < live.order; ++i) {
        batch.push_back(ids_[static_cast<std::size_t>(order.at(live.position + i))]);
      }
      live.position += static_cast<std::int64_t>(batch.size());
      if (!batch.empty() && random() % 12 != 0) {  // Else a batch is skipped.
        if (random() % 4 == 0) {
          std::shuffle(batch.begin(), batch.end(), random);
        }
        expect_rows(*store, live.oracle, batch);
        const auto values = random_floats(batch.size() * dim, random);
        if (random() % 5 != 0) {
          store->apply(batch, values, 0.5F).or_throw();
          live.oracle.apply(batch, values, 0.5F);
        } else {
          store->update(batch, values).or_throw();
          live.oracle.update(batch, values);
        }
      }
      if (live.position == live.order || random() % 40 == 0) {  // The epoch ends, or is stopped.
        ++live.epoch;
        live.position = 0;
        begin();
      }
    } else if (what < 78) {  // Evaluation, duplicates included.
      expect_rows(*store, live.oracle,
                  draw({there().begin(), there().end()}, static_cast<std::size_t>(count), random));
    } else if (what < 85) {  // Changes out of order.
      const auto some =
          draw({there().begin(), there().end()}, static_cast<std::size_t>(count), random);
      const auto values = random_floats(some.size() * dim, random);
      if (random() % 2 == 0) {
        store->apply(some, values).or_throw();
        live.oracle.apply(some, values);
      } else {
        store->update(some, values).or_throw();
        live.oracle.update(some, values);
      }
    } else if (what < 87) {
      expect_all_rows(*store, live.oracle, there());
      EXPECT_EQ(visited(*store), scanned(*store));
    } else if (what < 95) {
      store->commit(++step).or_throw();
      if (commits.size() == 2) {
        commits.erase(commits.begin());
      }
      commits.insert_or_assign(step, live);
    } else if (what < 96) {  // Another seed, or an epoch that is not the next.
      live.seed = random() % 2 == 0 ? live.seed : random();
      live.epoch = static_cast<std::int64_t>(random() % 9);
      live.position = 0;
      store->commit(++step).or_throw();
      if (commits.size() == 2) {
        commits.erase(commits.begin());
      }
      commits.insert_or_assign(step, live);
      reopen(-1);
    } else if (what < 98 || commits.empty()) {  // As after a crash: back to the newest commit.
      live = commits.empty() ? initial : commits.rbegin()->second;
      step = commits.empty() ? 0 : commits.rbegin()->first;
      reopen(-1);
      ASSERT_EQ(store->last_commit(), commits.empty() ? -1 : step);
    } else {  // Back to the older of two commits; the newer one is gone with the next.
      live = commits.begin()->second;
      step = commits.begin()->first;
      reopen(step);
      store->commit(++step).or_throw();
      commits.erase(std::next(commits.begin()), commits.end());
      commits.insert_or_assign(step, live);
    }
    if (::testing::Test::HasFatalFailure()) {
      return;
    }
  }
  expect_all_rows(*store, live.oracle, there());
  store->commit(++step).or_throw();
  EXPECT_EQ(store->stats().dirty_bytes, 0);
  const auto cap = store->plan().disk_cap_bytes;
  store.reset();
  const auto sound = EmbeddingStore::verify(directory(), {});
  EXPECT_TRUE(sound) << sound.error().to_string();
  const auto info = EmbeddingStore::inspect(directory()).or_throw();
  EXPECT_LE(info.disk_bytes, cap);
  EXPECT_EQ(info.layout, RowLayout::kSampleOrder);
  EXPECT_EQ(info.epoch, live.epoch);
  reopen(-1);
  expect_all_rows(*store, live.oracle, there());
}

TEST_P(TimelineAgainstMapTest, HasTheBitsOfAnyOrderAfterTheSameTraining) {
  const Case& c = GetParam();
  EmbeddingStoreOptions plain = options();
  plain.directory = root_ / "any";
  plain.layout = RowLayout::kAnyOrder;
  plain.compute_threads = 1;
  plain = with_floor(plain);
  auto ours = open(options());
  auto theirs = open(plain);
  std::mt19937_64 random(c.seed);
  const auto dim = static_cast<std::size_t>(c.dim);
  std::int64_t step = 0;
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    const std::int64_t rows = static_cast<std::int64_t>(c.rows - c.come) + epoch * (c.come / 2);
    if (c.come > 0) {
      const auto named = std::span(ids_).first(static_cast<std::size_t>(rows));
      ASSERT_EQ(ours.insert(named).or_throw(), theirs.insert(named).or_throw());
    }
    ours.begin_epoch(epoch).or_throw();
    const SampleOrder order(rows, 7, epoch);
    const std::int64_t batch_rows = std::max<std::int64_t>(c.batch_rows - epoch, 1);
    for (std::int64_t at = 0; at < rows; at += batch_rows) {
      std::vector<std::int64_t> batch;
      for (std::int64_t p = at; p < std::min(at + batch_rows, rows); ++p) {
        batch.push_back(ids_[static_cast<std::size_t>(order.at(p))]);
      }
      ASSERT_EQ(gather(ours, batch), gather(theirs, batch)) << "epoch " << epoch << " at " << at;
      const auto grads = random_floats(batch.size() * dim, random);
      ours.apply(batch, grads).or_throw();
      theirs.apply(batch, grads).or_throw();
      if (random() % 16 == 0) {
        ours.commit(++step).or_throw();
      }
    }
  }
  EXPECT_EQ(all_rows(ours), all_rows(theirs));
  const StoreStats stats = ours.stats();  // gather() hits, apply() moves.
  EXPECT_GE(2.04 * static_cast<double>(stats.hits),
            static_cast<double>(stats.requests - static_cast<std::int64_t>(c.come)));
}

INSTANTIATE_TEST_SUITE_P(
    Seeds, TimelineAgainstMapTest,
    ::testing::Values(
        Case{1, 128, RowOptimizer::kAdamW, RowInitKind::kNormal, 700, 40, 1, false},
        Case{2, 128, RowOptimizer::kAdamW, RowInitKind::kUniform, 701, 33, 2, true},
        Case{3, 33, RowOptimizer::kAdagrad, RowInitKind::kNormal, 2000, 64, 2, false},
        Case{4, 2, RowOptimizer::kAdamWFresh, RowInitKind::kZeros, 9000, 500, 1, false},
        Case{5, 1500, RowOptimizer::kAdamW, RowInitKind::kUniform, 150, 4, 1, true},
        Case{6, 12000, RowOptimizer::kAdamWFresh, RowInitKind::kNormal, 40, 2, 1, false},
        Case{7, 1, RowOptimizer::kAdagrad, RowInitKind::kUniform, 1, 3, 1, false},
        Case{8, 64, RowOptimizer::kAdamWFresh, RowInitKind::kNormal, 4000, 100, 2, false},
        Case{9, 77, RowOptimizer::kAdamW, RowInitKind::kNormal, 900, 40, 2, true,
             RowDType::kBFloat16},
        Case{10, 9001, RowOptimizer::kSgd, RowInitKind::kUniform, 60, 3, 2, false,
             RowDType::kBFloat16},
        Case{11, 40, RowOptimizer::kAdamW, RowInitKind::kNormal, 1600, 40, 2, true,
             RowDType::kFloat32, 900},
        Case{12, 16, RowOptimizer::kAdagrad, RowInitKind::kUniform, 5000, 150, 1, false,
             RowDType::kFloat32, 400},
        Case{13, 700, RowOptimizer::kAdamW, RowInitKind::kNormal, 120, 5, 1, true,
             RowDType::kFloat32, 120}));

}  // namespace
}  // namespace plimsoll
