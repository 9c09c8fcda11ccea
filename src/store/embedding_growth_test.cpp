// SPDX-License-Identifier: Apache-2.0
//
// Goal: a table whose ids come and go holds what a plain map would, whatever its slab, and a commit
// holds the ids of its step. Method: examples, then random operations by seed against the map.
#include <optional>
#include <set>

#include <sys/stat.h>

#include "os/file_faults.h"
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;
namespace fs = std::filesystem;

class GrowthTest : public EmbeddingTableTest {
 protected:
  [[nodiscard]] EmbeddingStoreOptions growing(std::int64_t rows_max,
                                              std::span<const std::int64_t> ids = {}) const {
    return with_floor({.directory = directory(),
                       .dim = 24,
                       .init = {.seed = 5},
                       .ids = ids,
                       .rows_max = rows_max,
                       .batch_rows = 64,
                       .io_threads = 2});
  }
  template <class T>
  [[nodiscard]] static std::string error_of(const Result<T>& result) {
    return result ? "" : result.error().to_string();
  }
  static void train(EmbeddingStore& store, EmbeddingOracle& oracle,
                    std::span<const std::int64_t> ids, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto grads = random_floats(ids.size() * static_cast<std::size_t>(store.dim()), random);
    store.apply(ids, grads).or_throw();
    oracle.apply(ids, grads);
  }
  EmbeddingOracle oracle_{24, {}, {.seed = 5}};
};

TEST_F(GrowthTest, ATableMayBeginWithNoRows) {
  const auto ids = sparse_ids(300, 1);
  auto options = growing(300);
  {
    auto store = open(options);
    EXPECT_EQ(store.rows(), 0);
    EXPECT_EQ(store.rows_max(), 300);
    EXPECT_EQ(store.plan().rows_max, 300);
    EXPECT_TRUE(all_rows(store).empty());
    EXPECT_EQ(store.insert(ids).or_throw(), 300);
    expect_all_rows(store, oracle_, ids);
    train(store, oracle_, std::span(ids).first(64), 2);
    store.commit(1).or_throw();
  }
  EXPECT_TRUE(EmbeddingStore::verify(directory(), {}));
  EXPECT_EQ(EmbeddingStore::inspect(directory()).or_throw().rows, 300);
  auto store = open(options);
  EXPECT_EQ(store.rows(), 300);
  expect_all_rows(store, oracle_, ids);
}

TEST_F(GrowthTest, InsertMakesSureOfIdsAndLeavesThoseThereAlone) {
  const std::vector<std::int64_t> first{10, -20, 30};
  auto store = open(growing(10, first));
  train(store, oracle_, first, 3);
  const std::vector<std::int64_t> more{30, 40, 40, -50, 10};
  EXPECT_EQ(store.insert(more).or_throw(), 2);
  EXPECT_EQ(store.insert(more).or_throw(), 0);
  EXPECT_EQ(store.rows(), 5);
  expect_all_rows(store, oracle_, std::vector<std::int64_t>{10, -20, 30, 40, -50});
}

TEST_F(GrowthTest, AnErasedIdIsUnknownAndComesBackAsNew) {
  const std::vector<std::int64_t> first{10, 20, 30};
  auto store = open(growing(6, first));
  const std::vector<std::int64_t> later{40, 50};
  store.insert(later).or_throw();
  const std::vector<std::int64_t> all{10, 20, 30, 40, 50};
  train(store, oracle_, all, 4);
  const std::vector<std::int64_t> gone{20, 40, 20};
  store.erase(gone).or_throw();
  oracle_.erase(gone);
  EXPECT_EQ(store.rows(), 3);
  std::vector<float> row(24);
  for (const std::int64_t id : {20, 40}) {
    const auto answer = store.gather({&id, 1}, row);
    ASSERT_FALSE(answer);
    EXPECT_EQ(answer.error().code, ErrorCode::kNotFound);
    EXPECT_NE(answer.error().to_string().find("no row with id " + std::to_string(id)),
              std::string::npos);
    EXPECT_FALSE(store.apply({&id, 1}, row));
    EXPECT_FALSE(store.update({&id, 1}, row));
    EXPECT_FALSE(store.erase({&id, 1}));
  }
  expect_all_rows(store, oracle_, std::vector<std::int64_t>{10, 30, 50});
  EXPECT_EQ(store.insert(gone).or_throw(), 2);
  expect_all_rows(store, oracle_, all);  // As never trained: the oracle has forgotten them too.
}

TEST_F(GrowthTest, APlaceIsUsedAgainAndNeverShowsItsOldRow) {
  auto store = open(growing(4));
  const std::vector<std::int64_t> old{1, 2, 3, 4};
  store.insert(old).or_throw();
  train(store, oracle_, old, 5);
  store.commit(1).or_throw();
  for (std::int64_t round = 0; round < 20; ++round) {
    const std::vector<std::int64_t> out{round * 4 + 1, round * 4 + 2, round * 4 + 3, round * 4 + 4};
    store.erase(out).or_throw();
    std::vector<std::int64_t> in(out);
    for (auto& id : in) {
      id += 4;
    }
    EXPECT_EQ(store.insert(in).or_throw(), 4);
    expect_all_rows(store, oracle_, in);
    train(store, oracle_, in, static_cast<std::uint64_t>(round));
    store.commit(round + 2).or_throw();
  }
}

TEST_F(GrowthTest, AFullTableRefusesAllOfARequestAndNamesRowsMax) {
  const std::vector<std::int64_t> first{10, 20, 30};
  auto store = open(growing(5, first));
  const std::vector<std::int64_t> three{40, 50, 60};
  auto refused = store.insert(three);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(refused.error().to_string().find("rows_max is 5, 3 rows are there"), std::string::npos)
      << refused.error().to_string();
  EXPECT_EQ(store.rows(), 3);
  expect_all_rows(store, oracle_, first);
  // Ids named twice or there already take no place.
  const std::vector<std::int64_t> two{40, 50, 40, 10, 50};
  EXPECT_EQ(store.insert(two).or_throw(), 2);
  // A row the table was made with keeps its place until it is compacted; an inserted one does not.
  store.erase(std::vector<std::int64_t>{10}).or_throw();
  refused = store.insert(std::vector<std::int64_t>{60});
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().to_string().find("1 erased ones keep their places"), std::string::npos);
  store.erase(std::vector<std::int64_t>{40}).or_throw();
  EXPECT_EQ(store.insert(std::vector<std::int64_t>{60}).or_throw(), 1);
  expect_all_rows(store, oracle_, std::vector<std::int64_t>{20, 30, 50, 60});
}

TEST_F(GrowthTest, AnUnknownIdAmongManyErasesNothing) {
  auto store = open(growing(500));
  std::vector<std::int64_t> ids = sparse_ids(300, 9);
  store.insert(ids).or_throw();
  std::vector<std::int64_t> asked(ids);
  asked.push_back(424242);  // In the fifth piece of 64.
  const auto refused = store.erase(asked);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().to_string().find("424242"), std::string::npos);
  EXPECT_EQ(store.rows(), 300);
  expect_all_rows(store, oracle_, ids);
  asked.pop_back();
  asked.insert(asked.end(), ids.begin(), ids.begin() + 100);  // Twice, far apart.
  store.erase(asked).or_throw();
  EXPECT_EQ(store.rows(), 0);
}

TEST_F(GrowthTest, EachCommitHasTheIdsOfItsStep) {
  const auto first = sparse_ids(100, 3);
  auto options = growing(200, first);
  const std::vector<std::int64_t> later{1, 2, 3};
  std::vector<std::int64_t> at2(first.begin() + 10, first.end());
  at2.insert(at2.end(), later.begin(), later.end());
  {
    auto store = open(options);
    store.commit(1).or_throw();
    store.insert(later).or_throw();
    store.erase(std::span(first).first(10)).or_throw();
    store.commit(2).or_throw();
    store.insert(std::vector<std::int64_t>{4, 5}).or_throw();
    store.erase(later).or_throw();
  }  // As after a crash: what step 3 would have been is gone.
  {
    auto store = open(options);
    EXPECT_EQ(store.last_commit(), 2);
    EXPECT_EQ(store.rows(), 93);
    expect_all_rows(store, oracle_, at2);
  }
  options.at_step = 1;
  auto store = open(options);
  EXPECT_EQ(store.rows(), 100);
  expect_all_rows(store, oracle_, first);
  store.insert(later).or_throw();
  store.commit(2).or_throw();
  EXPECT_EQ(EmbeddingStore::inspect(directory()).or_throw().rows, 103);
}

TEST_F(GrowthTest, RefusesWhatDoesNotFitItsKindOfTable) {
  auto fixed = with_floor({.directory = directory(), .dim = 4, .rows = 20});
  auto sample = fixed;
  sample.directory = root_ / "sample";
  sample.layout = RowLayout::kSampleOrder;
  sample.store_bytes = 0;
  const std::vector<std::int64_t> ids{3};
  {
    auto store = open(fixed);
    EXPECT_EQ(store.rows_max(), 0);
    auto refused = store.insert(ids);
    ASSERT_FALSE(refused);
    EXPECT_NE(refused.error().to_string().find("made without rows_max"), std::string::npos);
    EXPECT_FALSE(store.erase(ids));
    EXPECT_EQ(all_rows(store).size(), 20U);
  }
  auto store = open(sample);
  EXPECT_NE(error_of(store.erase(ids)).find("come and stay"), std::string::npos);
  EXPECT_FALSE(store.insert(ids));
  sample.rows_max = 30;
  EXPECT_NE(error_of(EmbeddingStore::plan(sample)).find("rows_max"), std::string::npos);
  fixed.rows_max = 30;
  const auto other = EmbeddingStore::open(governor_, fixed);
  ASSERT_FALSE(other);
  EXPECT_NE(other.error().to_string().find("rows_max is 0, but 30"), std::string::npos);
}

TEST_F(GrowthTest, FewerPlacesThanIdsAreRefused) {
  const std::vector<std::int64_t> three{1, 2, 3};
  const auto plan =
      EmbeddingStore::plan({.directory = directory(), .dim = 4, .ids = three, .rows_max = 2});
  ASSERT_FALSE(plan);
  EXPECT_NE(plan.error().to_string().find("rows_max is 2, but there are 3 ids"), std::string::npos);
}

TEST_F(GrowthTest, TheIdsItWasMadeWithAreNotComparedLater) {
  const auto first = sparse_ids(50, 4);
  const auto options = growing(80, first);
  {
    auto store = open(options);
    store.erase(std::span(first).first(20)).or_throw();
    store.commit(1).or_throw();
  }
  ASSERT_TRUE(EmbeddingStore::compact(governor_, directory(), -1, {}));
  auto store = open(options);  // By the same program as before.
  EXPECT_EQ(store.rows(), 30);
}

TEST_F(GrowthTest, CompactingFoldsInWhatCameAndWent) {
  const auto first = sparse_ids(200, 6);
  auto options = growing(240, first);
  const auto later = sparse_ids(40, 7);
  std::vector<std::int64_t> left(first.begin() + 150, first.end());
  left.insert(left.end(), later.begin(), later.end());
  {
    auto store = open(options);
    store.insert(later).or_throw();
    train(store, oracle_, std::span(later).first(30), 1);
    train(store, oracle_, std::span(first).last(30), 2);
    store.erase(std::span(first).first(150)).or_throw();
    store.commit(1).or_throw();
    EXPECT_FALSE(store.insert(std::vector<std::int64_t>{1}));
  }
  ASSERT_TRUE(EmbeddingStore::compact(governor_, directory(), -1, {}));
  EXPECT_TRUE(EmbeddingStore::verify(directory(), {}));
  const TableInfo info = EmbeddingStore::inspect(directory()).or_throw();
  EXPECT_EQ(info.rows, 90);
  EXPECT_EQ(info.rows_max, 240);
  {
    auto store = open(options);
    expect_all_rows(store, oracle_, left);
    EXPECT_EQ(store.insert(std::span(first).first(150)).or_throw(), 150);
  }
  ASSERT_TRUE(EmbeddingStore::compact(governor_, directory(), -1, {}, 1000));
  options.rows_max = 0;
  auto store = open(with_floor(options));
  EXPECT_EQ(store.rows_max(), 1000);
  expect_all_rows(store, oracle_, left);
  store.erase(left).or_throw();
  store.commit(2).or_throw();
}

TEST_F(GrowthTest, AnEmptiedTableIsCompactedToOneWithNoRows) {
  const std::vector<std::int64_t> two{5, 6};
  const auto options = growing(30, two);
  {
    auto store = open(options);
    store.erase(two).or_throw();
    store.commit(1).or_throw();
  }
  ASSERT_TRUE(EmbeddingStore::compact(governor_, directory(), -1, {}));
  auto store = open(options);
  EXPECT_EQ(store.rows(), 0);
  EXPECT_EQ(store.last_commit(), 1);
  EXPECT_EQ(store.insert(sparse_ids(30, 8)).or_throw(), 30);
}

TEST_F(GrowthTest, ATableWithFixedRowsCanBeCompactedToOneThatGrows) {
  const auto first = sparse_ids(60, 2);
  auto options = growing(0, first);
  {
    auto store = open(options);
    train(store, oracle_, std::span(first).first(40), 2);
    store.commit(3).or_throw();
  }
  ASSERT_TRUE(EmbeddingStore::compact(governor_, directory(), -1, {}, 100));
  auto store = open(with_floor(options));
  expect_all_rows(store, oracle_, first);
  EXPECT_EQ(store.insert(std::vector<std::int64_t>{1, 2}).or_throw(), 2);
}

// An id inserted costs its page and the units of the map that hold it, however large the table is.
TEST_F(GrowthTest, ACommitCostsWhatCameAndWentAndNotRowsMax) {
  auto store = open(growing(2'000'000));
  for (std::int64_t step = 1; step <= 6; ++step) {
    store.insert(std::vector<std::int64_t>{step * 1000, step * 1000 + 1}).or_throw();
    store.commit(step).or_throw();
  }
  for (const char* map : {"map.0", "map.1"}) {
    struct stat status {};
    ASSERT_EQ(::stat((directory() / map).c_str(), &status), 0);
    EXPECT_GT(status.st_size, 16'000'000);
    EXPECT_LT(status.st_blocks * 512, 200'000) << map;
  }
  const std::int64_t plan = store.plan().index_bytes;
  EXPECT_LT(plan, 2'000'000 * 16);
  EXPECT_GT(plan, 2'000'000 * 14);
}

TEST_F(GrowthTest, AFailedReadWhileInsertingChangesNothing) {
  auto options = growing(4000);
  const auto ids = sparse_ids(3000, 1);
  auto store = open(options);
  store.insert(ids).or_throw();
  train(store, oracle_, std::span(ids).first(64), 6);
  store.commit(1).or_throw();
  // The last page is no longer in RAM once the first ones were read.
  store.erase(std::span(ids).last(1)).or_throw();
  oracle_.erase(std::span(ids).last(1));
  expect_rows(store, oracle_, std::span(ids).first(2500));
  {
    const ScopedFileFault fault({.call = FileCall::kRead, .nth = 1, .os_errno = EIO});
    const auto refused = store.insert(std::vector<std::int64_t>{17});
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().os_errno, EIO);
  }
  EXPECT_EQ(store.rows(), 2999);
  EXPECT_FALSE(store.erase(std::vector<std::int64_t>{17}));
  EXPECT_EQ(store.insert(std::vector<std::int64_t>{17}).or_throw(), 1);
  expect_rows(store, oracle_, std::vector<std::int64_t>{17});
}

// The n-th write or sync fails, for n = 1, 2, … until none does: one whole set of ids is there.
TEST_F(GrowthTest, WhateverFailsACommitIsOfOneStep) {
  const auto first = sparse_ids(40, 3);
  const auto later = sparse_ids(30, 4);
  const auto options = growing(80, first);
  {
    auto store = open(options);
    store.commit(1).or_throw();
  }
  fs::copy(directory(), root_ / "kept", fs::copy_options::recursive);
  std::vector<std::int64_t> after(first.begin() + 20, first.end());
  after.insert(after.end(), later.begin(), later.end());
  for (const FileCall call : {FileCall::kWrite, FileCall::kSync}) {
    std::int64_t nth = 1;
    for (bool failed = true; failed; ++nth) {
      SCOPED_TRACE(nth);
      fs::remove_all(directory());
      fs::copy(root_ / "kept", directory(), fs::copy_options::recursive);
      {
        auto store = open(options);
        const ScopedFileFault fault(
            {.call = call, .nth = nth, .os_errno = EIO, .keeps_failing = true});
        store.erase(std::span(first).first(20)).or_throw();
        store.insert(later).or_throw();
        failed = !store.commit(2);
        EXPECT_EQ(store.insert({}).has_value(), !failed) << "a poisoned handle went on";
      }
      ASSERT_TRUE(EmbeddingStore::verify(directory(), {}));
      auto store = open(options);
      expect_all_rows(store, oracle_, store.last_commit() == 1 ? first : after);
      ASSERT_FALSE(HasFatalFailure());
      EXPECT_TRUE(failed || store.last_commit() == 2);
      store.insert(later).or_throw();
      store.commit(5).or_throw();
    }
    EXPECT_GT(nth, 3);
  }
}

// ---- Against a plain map ----------------------------------------------------------------------

struct Case {
  std::uint64_t seed;
  std::int64_t dim;
  RowOptimizer kind;
  std::size_t made;
  std::int64_t rows_max;
  bool dense;
};

struct Model {
  EmbeddingOracle rows;
  std::set<std::int64_t> ids;
};

class GrowthAgainstMapTest : public EmbeddingTableTest, public ::testing::WithParamInterface<Case> {
 protected:
  void SetUp() override {
    EmbeddingTableTest::SetUp();
    const Case& c = GetParam();
    random_.seed(c.seed);
    pool_ = sparse_ids(static_cast<std::size_t>(c.rows_max) * 2, c.seed);
    for (std::size_t i = 0; c.dense && i < pool_.size(); ++i) {
      pool_[i] = static_cast<std::int64_t>(i);
    }
    made_.assign(pool_.begin(), pool_.begin() + static_cast<std::ptrdiff_t>(c.made));
    options_ = with_floor({.directory = directory(),
                           .dim = c.dim,
                           .optimizer = {.kind = c.kind, .learning_rate = 0.1F},
                           .init = {.scale = 0.5F, .seed = c.seed},
                           .ids = made_,
                           .rows_max = c.rows_max,
                           .batch_rows = 100,
                           .io_threads = 2,
                           .compute_threads = 2});
    live_ = first_model();
    inserted_most_ = static_cast<std::size_t>(c.rows_max) - c.made;
    made_now_.insert(made_.begin(), made_.end());
  }
  [[nodiscard]] Model first_model() const {
    return {EmbeddingOracle(GetParam().dim, options_.optimizer, options_.init),
            {made_.begin(), made_.end()}};
  }
  [[nodiscard]] std::vector<std::int64_t> known() {
    const std::vector<std::int64_t> ids(live_->ids.begin(), live_->ids.end());
    return ids.empty() ? ids : draw(ids, 1 + random_() % 150, random_);
  }

  void insert() {
    const auto some = draw(pool_, 1 + random_() % 200, random_);
    std::set<std::int64_t> fresh(some.begin(), some.end());
    std::erase_if(fresh, [&](std::int64_t id) { return live_->ids.contains(id); });
    // Those that stand in the first places take none of the others.
    const auto inserted = static_cast<std::size_t>(
        std::count_if(live_->ids.begin(), live_->ids.end(),
                      [&](std::int64_t id) { return !in_first_place(id); }));
    const auto added = store_->insert(some);
    if (inserted + fresh.size() > inserted_most_) {
      ASSERT_FALSE(added);
      ASSERT_EQ(added.error().code, ErrorCode::kInvalidArgument);
      return;
    }
    ASSERT_TRUE(added);
    ASSERT_EQ(*added, static_cast<std::int64_t>(fresh.size()));
    live_->ids.insert(fresh.begin(), fresh.end());
    for (const std::int64_t id : fresh) {
      moved_.insert(id);
    }
  }
  // Whether an id that is there is one the table was made with, and was never erased since.
  [[nodiscard]] bool in_first_place(std::int64_t id) const {
    return made_now_.contains(id) && !moved_.contains(id);
  }
  void erase() {
    const auto some = known();
    store_->erase(some).or_throw();
    live_->rows.erase(some);
    for (const std::int64_t id : some) {
      live_->ids.erase(id);
      moved_.insert(id);
    }
  }
  void train(bool sets) {
    auto some = known();
    some.resize(std::min<std::size_t>(some.size(), 100));
    const auto values =
        random_floats(some.size() * static_cast<std::size_t>(GetParam().dim), random_);
    if (sets) {
      store_->update(some, values).or_throw();
      live_->rows.update(some, values);
    } else {
      store_->apply(some, values).or_throw();
      live_->rows.apply(some, values);
    }
  }
  void commit() {
    store_->commit(++step_).or_throw();
    if (commits_.size() == 2) {
      commits_.erase(commits_.begin());
    }
    commits_.insert_or_assign(step_, std::pair(*live_, moved_));
  }
  // As after a crash: back to the newest commit, or to the older one.
  void reopen(bool older) {
    store_.reset();
    auto how = options_;
    const auto to = older ? commits_.begin() : std::prev(commits_.end());
    how.at_step = older ? to->first : -1;
    store_.emplace(open(how));
    ASSERT_EQ(store_->last_commit(), to->first);
    live_ = to->second.first;
    moved_ = to->second.second;
    step_ = to->first;
    if (older) {
      const auto kept = *to;
      commits_.clear();
      commits_.insert(kept);
      commit();
    }
  }
  void compact() {
    store_.reset();
    const auto rows_max = GetParam().rows_max;
    ASSERT_TRUE(EmbeddingStore::compact(governor_, directory(), -1, {}));
    live_ = std::prev(commits_.end())->second.first;
    moved_.clear();
    made_now_ = live_->ids;
    inserted_most_ = static_cast<std::size_t>(rows_max) - made_now_.size();
    step_ = std::prev(commits_.end())->first;
    commits_.clear();
    commits_.insert_or_assign(step_, std::pair(*live_, moved_));
    options_ = with_floor(options_);
    store_.emplace(open(options_));
  }
  void check() {
    const std::vector<std::int64_t> ids(live_->ids.begin(), live_->ids.end());
    ASSERT_EQ(store_->rows(), static_cast<std::int64_t>(ids.size()));
    expect_all_rows(*store_, live_->rows, ids);
    std::vector<float> row(static_cast<std::size_t>(GetParam().dim));
    for (int i = 0; i < 20; ++i) {
      const std::int64_t id = pool_[random_() % pool_.size()];
      ASSERT_EQ(store_->gather({&id, 1}, row).has_value(), live_->ids.contains(id)) << "id " << id;
    }
  }

  std::mt19937_64 random_;
  std::vector<std::int64_t> pool_;
  std::vector<std::int64_t> made_;
  EmbeddingStoreOptions options_;
  std::optional<Model> live_;
  std::set<std::int64_t> made_now_;  // Those the table was made with, or compacted to.
  std::set<std::int64_t> moved_;     // Erased or inserted since.
  std::size_t inserted_most_{0};
  std::map<std::int64_t, std::pair<Model, std::set<std::int64_t>>> commits_;
  std::optional<EmbeddingStore> store_;
  std::int64_t step_{0};
};

TEST_P(GrowthAgainstMapTest, HoldsWhatAPlainMapHolds) {
  SCOPED_TRACE("seed " + std::to_string(GetParam().seed));
  store_.emplace(open(options_));
  commit();
  for (int operation = 0; operation < 150; ++operation) {
    const auto what = random_() % 100;
    SCOPED_TRACE("operation " + std::to_string(operation) + " " + std::to_string(what));
    if (what < 25) {
      insert();
    } else if (what < 40) {
      erase();
    } else if (what < 60) {
      train(what < 45);
    } else if (what < 70) {
      const auto some = known();
      expect_rows(*store_, live_->rows, some);
    } else if (what < 80) {
      store_->prefetch(draw(pool_, 100, random_));
    } else if (what < 90) {
      commit();
    } else if (what < 97) {
      reopen(what > 94);
    } else if (what < 98) {
      compact();
    } else {
      check();
    }
    if (HasFatalFailure()) {
      return;
    }
  }
  check();
  commit();
  const auto cap = store_->plan().disk_cap_bytes;
  store_.reset();
  EXPECT_TRUE(EmbeddingStore::verify(directory(), {}));
  const TableInfo info = EmbeddingStore::inspect(directory()).or_throw();
  EXPECT_LE(info.disk_bytes, cap);
  EXPECT_EQ(info.rows, static_cast<std::int64_t>(live_->ids.size()));
  store_.emplace(open(options_));
  check();
}

INSTANTIATE_TEST_SUITE_P(Seeds, GrowthAgainstMapTest,
                         ::testing::Values(Case{1, 32, RowOptimizer::kAdamW, 0, 700, false},
                                           Case{2, 32, RowOptimizer::kAdagrad, 300, 800, false},
                                           Case{3, 3, RowOptimizer::kAdamW, 2000, 2400, true},
                                           Case{4, 200, RowOptimizer::kSgd, 100, 100, true},
                                           Case{5, 64, RowOptimizer::kRowAdagrad, 50, 900, true},
                                           Case{6, 1500, RowOptimizer::kAdamWFresh, 20, 120, false},
                                           Case{7, 1, RowOptimizer::kAdam, 0, 4000, true},
                                           Case{8, 96, RowOptimizer::kAdamW, 1000, 1700, false}));

}  // namespace
}  // namespace plimsoll
