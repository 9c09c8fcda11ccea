// SPDX-License-Identifier: Apache-2.0
//
// Goal: what the embedding store promises in its header, one promise per test.
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <tuple>

#include "base/crc32c.h"
#include "base/npy_header.h"
#include "os/file.h"
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;

class EmbeddingStoreTest : public EmbeddingTableTest {
 protected:
  [[nodiscard]] EmbeddingStoreOptions dense(std::int64_t rows, std::int64_t dim) const {
    return {.directory = directory(), .dim = dim, .rows = rows, .batch_rows = 512};
  }
  static std::vector<std::int64_t> range(std::int64_t count) {
    std::vector<std::int64_t> ids(static_cast<std::size_t>(count));
    std::iota(ids.begin(), ids.end(), 0);
    return ids;
  }
  Error refused(const EmbeddingStoreOptions& options) {
    auto store = EmbeddingStore::open(governor_, options);
    EXPECT_FALSE(store);
    return store ? Error{} : store.error();
  }
};

TEST_F(EmbeddingStoreTest, ReturnsRowsInRequestOrderWithDuplicates) {
  auto options = dense(1000, 5);
  EmbeddingOracle oracle(5, options.optimizer, options.init);
  auto store = open(options);
  expect_rows(store, oracle, std::vector<std::int64_t>{999, 0, 3, 3, 999, 500, 0});
}

TEST_F(EmbeddingStoreTest, InitialRowsDependOnSeedAndIdAlone) {
  const auto ids = sparse_ids(300, 4);
  auto reversed = ids;
  std::reverse(reversed.begin(), reversed.end());
  EmbeddingStoreOptions options{.directory = root_ / "a", .dim = 9, .ids = ids};
  auto a = open(options);
  options.directory = root_ / "b";
  options.ids = reversed;
  options.batch_rows = 7;
  auto b = open(options);
  EXPECT_EQ(gather(a, ids), gather(b, ids));
  options.directory = root_ / "c";
  options.init.seed = 1;
  auto c = open(options);
  EXPECT_NE(gather(a, ids), gather(c, ids));
}

TEST_F(EmbeddingStoreTest, SumsGradientsOfADuplicateIdOnce) {
  auto options = dense(100, 3);
  EmbeddingOracle oracle(3, options.optimizer, options.init);
  auto store = open(options);
  const std::vector<std::int64_t> ids{7, 8, 7, 7};
  const std::vector<float> grads{1e8F, 1, 1, 2, 2, 2, -1e8F, 1, 1, 3, 1, 1};
  store.apply(ids, grads).or_throw();
  oracle.apply(ids, grads);
  expect_all_rows(store, oracle, range(100));
  EXPECT_EQ(all_rows(store).at(7).sequence, 1U);
}

TEST_F(EmbeddingStoreTest, LastOfADuplicateIdWinsAndSlotsAreCleared) {
  auto store = open(dense(10, 2));
  store.apply(std::vector<std::int64_t>{4}, std::vector<float>{1, 1}).or_throw();
  store.update(std::vector<std::int64_t>{4, 4}, std::vector<float>{1, 2, 3, 4}).or_throw();
  const auto row = all_rows(store).at(4);
  EXPECT_EQ(row, (OracleRow{{3, 4}, {0, 0}, {0, 0}, 0}));
}

TEST_F(EmbeddingStoreTest, NamesTheFirstUnknownIdAndChangesNothing) {
  auto store = open(dense(10, 2));
  const auto before = gather(store, range(10));
  const std::vector<std::int64_t> ids{1, 77, -3};
  std::vector<float> values(6, 1.0F);
  for (auto& result :
       {store.gather(ids, values), store.apply(ids, values), store.update(ids, values)}) {
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, ErrorCode::kNotFound);
    EXPECT_NE(result.error().to_string().find("id 77"), std::string::npos);
  }
  EXPECT_EQ(gather(store, range(10)), before);
}

TEST_F(EmbeddingStoreTest, RefusesAGradientThatIsNotFiniteAndChangesNothing) {
  auto store = open(dense(10, 4));
  const auto before = all_rows(store);
  const float bad[] = {std::numeric_limits<float>::quiet_NaN(),
                       std::numeric_limits<float>::infinity()};
  for (const float value : bad) {
    std::vector<float> grads(12, 1.0F);
    grads[6] = value;
    const auto result = store.apply(std::vector<std::int64_t>{3, 5, 6}, grads);
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(result.error().to_string().find("gradient of id 5"), std::string::npos);
  }
  // Finite each, infinite together.
  const std::vector<float> large(8, 3e38F);
  EXPECT_FALSE(store.apply(std::vector<std::int64_t>{2, 2}, large));
  EXPECT_EQ(all_rows(store), before);
}

TEST_F(EmbeddingStoreTest, WhatMayPassTheDiskLimitIsRefusedBeforeAnythingIsMade) {
  for (const RowLayout layout : {RowLayout::kAnyOrder, RowLayout::kSampleOrder}) {
    auto options = dense(5000, 8);
    options.directory = root_ / (layout == RowLayout::kAnyOrder ? "any" : "ordered");
    options.layout = layout;
    const std::int64_t most = EmbeddingStore::plan(options).or_throw().disk_cap_bytes;
    {
      const auto governor = Governor::create({.disk_limit = std::to_string(most - 1)}).or_throw();
      const auto refused = EmbeddingStore::open(governor, options);
      ASSERT_FALSE(refused);
      EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
      EXPECT_NE(refused.error().to_string().find("disk limit"), std::string::npos);
      EXPECT_FALSE(std::filesystem::exists(options.directory));
    }
    const auto governor = Governor::create({.disk_limit = std::to_string(most)}).or_throw();
    auto store = EmbeddingStore::open(governor, options).or_throw();
    store.update(std::vector<std::int64_t>{4}, std::vector<float>(8, 1.0F)).or_throw();
    store.commit(1).or_throw();
  }
}

TEST_F(EmbeddingStoreTest, RefusesShapesThatDoNotFit) {
  auto store = open(dense(10, 4));
  std::vector<float> values(7);
  const std::vector<std::int64_t> ids{1, 2};
  for (auto& result :
       {store.gather(ids, values), store.apply(ids, values), store.update(ids, values)}) {
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, ErrorCode::kInvalidArgument);
  }
  const auto many = range(10);
  auto small = dense(10, 4);
  small.directory = root_ / "small";
  small.batch_rows = 4;
  auto other = open(small);
  std::vector<float> rows(40, 1.0F);
  EXPECT_TRUE(other.gather(many, rows));
  EXPECT_TRUE(other.update(many, rows));
  const auto applied = other.apply(many, rows);
  ASSERT_FALSE(applied);
  EXPECT_NE(applied.error().to_string().find("batch_rows"), std::string::npos);
}

TEST_F(EmbeddingStoreTest, WhatWasNotCommittedIsGone) {
  auto options = dense(50, 3);
  EmbeddingOracle fresh(3, options.optimizer, options.init);
  {
    auto store = open(options);
    EXPECT_EQ(store.last_commit(), -1);
    store.update(std::vector<std::int64_t>{1}, std::vector<float>{9, 9, 9}).or_throw();
  }
  auto store = open(options);
  EXPECT_EQ(store.last_commit(), -1);
  expect_all_rows(store, fresh, range(50));
  EXPECT_TRUE(EmbeddingStore::inspect(directory()).or_throw().commit_steps.empty());
}

TEST_F(EmbeddingStoreTest, OpensEitherOfTheLastTwoCommits) {
  auto options = dense(50, 1);
  const std::vector<std::int64_t> id{7};
  {
    auto store = open(options);
    for (const int step : {10, 20, 30}) {
      store.update(id, std::vector<float>{static_cast<float>(step)}).or_throw();
      store.commit(step).or_throw();
    }
    const auto backwards = store.commit(30);
    ASSERT_FALSE(backwards);
    EXPECT_EQ(backwards.error().code, ErrorCode::kInvalidArgument);
  }
  EXPECT_EQ(EmbeddingStore::inspect(directory()).or_throw().commit_steps,
            (std::vector<std::int64_t>{30, 20}));
  options.at_step = 10;
  const auto gone = refused(options);
  EXPECT_EQ(gone.code, ErrorCode::kNotFound);
  EXPECT_NE(gone.to_string().find("20"), std::string::npos) << gone.to_string();
  EXPECT_NE(gone.to_string().find("30"), std::string::npos) << gone.to_string();
  options.at_step = 20;
  {
    auto store = open(options);
    EXPECT_EQ(store.last_commit(), 20);
    EXPECT_EQ(gather(store, id), std::vector<float>{20});
    store.update(id, std::vector<float>{25}).or_throw();
    store.commit(25).or_throw();
  }
  EXPECT_EQ(EmbeddingStore::inspect(directory()).or_throw().commit_steps,
            (std::vector<std::int64_t>{25, 20}));
  options.at_step = -1;
  auto store = open(options);
  EXPECT_EQ(gather(store, id), std::vector<float>{25});
}

TEST_F(EmbeddingStoreTest, UntouchedPagesTakeNoDisk) {
  auto options = dense(100'000, 128);
  auto store = open(options);
  static_cast<void>(gather(store, range(5000)));
  store.update(std::vector<std::int64_t>{5}, std::vector<float>(128, 1.0F)).or_throw();
  store.commit(1).or_throw();
  EXPECT_EQ(std::filesystem::file_size(directory() / "rows.dat"), 4096U);
  EXPECT_EQ(store.stats().pages_written, 1);
}

TEST_F(EmbeddingStoreTest, SaysWhatDiffersFromTheTableOnDisk) {
  const auto ids = sparse_ids(20, 1);
  const EmbeddingStoreOptions made{.directory = directory(), .dim = 8, .ids = ids};
  static_cast<void>(open(made));
  const auto expect = [&](EmbeddingStoreOptions options, const std::string& option,
                          const std::string& has, const std::string& asked) {
    const auto error = refused(options);
    const auto text = error.to_string();
    EXPECT_EQ(error.code, ErrorCode::kInvalidArgument) << text;
    EXPECT_NE(text.find("table.json"), std::string::npos) << text;
    EXPECT_NE(text.find(option + " is " + has + ", but " + asked), std::string::npos) << text;
  };
  auto options = made;
  options.dim = 16;
  expect(options, "dim", "8", "16");
  options = made;
  options.optimizer.kind = RowOptimizer::kAdagrad;
  expect(options, "optimizer.kind", "adamw", "adagrad");
  options = made;
  options.init.kind = RowInitKind::kZeros;
  expect(options, "init.kind", "normal", "zeros");
  options = made;
  options.init.seed = 3;
  expect(options, "init.seed", "0", "3");
  options = made;
  options.rows = 21;
  expect(options, "rows", "20", "21");
  auto swapped = ids;
  std::swap(swapped[0], swapped[1]);
  options = made;
  options.ids = swapped;
  EXPECT_NE(refused(options).to_string().find("ids (their fingerprint)"), std::string::npos);
  options = made;
  options.ids = {};
  options.dim = 0;
  EXPECT_EQ(open(options).rows(), 20);
}

TEST_F(EmbeddingStoreTest, RefusesDuplicateIdsAndLeavesNoTable) {
  auto ids = sparse_ids(100, 1);
  ids.push_back(ids[3]);
  const auto error = refused({.directory = directory(), .dim = 8, .ids = ids});
  EXPECT_EQ(error.code, ErrorCode::kInvalidArgument);
  EXPECT_NE(error.to_string().find("appears twice, at positions 3 and 100"), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(directory()));
}

TEST_F(EmbeddingStoreTest, RefusesToCreateWithoutDimOrIds) {
  EXPECT_EQ(refused({.directory = directory(), .dim = 8}).code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(refused({.directory = directory(), .rows = 8}).code, ErrorCode::kInvalidArgument);
  auto options = dense(10, 2);
  options.optimizer.beta1 = 1.0F;
  EXPECT_NE(refused(options).to_string().find("optimizer.beta1"), std::string::npos);
}

TEST_F(EmbeddingStoreTest, ReadsIdsFromNpy) {
  const auto ids = sparse_ids(3000, 8);
  const auto path = root_ / "ids.npy";
  const auto write = [&](std::string_view descr, const std::vector<std::int64_t>& shape,
                         std::span<const std::int64_t> numbers) {
    std::ofstream file(path, std::ios::binary);
    file << npy_header(descr, shape);
    file.write(reinterpret_cast<const char*>(numbers.data()),
               static_cast<std::streamsize>(numbers.size_bytes()));
  };
  write("<i8", {3000}, ids);
  EmbeddingStoreOptions options{.directory = directory(), .dim = 4, .ids_file = path};
  EmbeddingOracle oracle(4, options.optimizer, options.init);
  {
    auto store = open(options);
    expect_all_rows(store, oracle, ids);
  }
  options.ids_file.clear();
  options.ids = ids;
  static_cast<void>(open(options));  // The same ids, given another way.
  const auto refusal = [&] {
    return refused({.directory = root_ / "b", .dim = 4, .ids_file = path});
  };
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 8);
  EXPECT_EQ(refusal().code, ErrorCode::kCorrupt);
  write("<i8", {std::int64_t{1} << 61}, {});  // So many ids take 0 bytes, modulo 2^64.
  EXPECT_EQ(refusal().code, ErrorCode::kCorrupt);
  EXPECT_NE(refusal().to_string().find("expected those of"), std::string::npos);
  write("<f8", {3000}, ids);
  EXPECT_NE(refusal().to_string().find("dtype <f8, expected a vector"), std::string::npos);
  write("<i8", {1000, 3}, ids);
  EXPECT_NE(refusal().to_string().find("shape (1000, 3), expected a vector"), std::string::npos);
}

TEST_F(EmbeddingStoreTest, RefusesASlabBelowTheFloorWithTheNumberThatWouldDo) {
  auto options = with_floor(dense(100'000, 64));
  const auto floor = options.store_bytes;
  options.store_bytes = floor - 4096;
  const auto error = refused(options);
  EXPECT_EQ(error.code, ErrorCode::kOverBudget);
  EXPECT_EQ(error.requested_bytes, floor);
  EXPECT_NE(error.to_string().find(std::to_string(floor)), std::string::npos);
  EXPECT_NE(error.to_string().find("store_bytes"), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(directory()));
  options.store_bytes = floor;
  EXPECT_LE(open(options).plan().total_bytes, floor);
}

TEST_F(EmbeddingStoreTest, LeasesWhatItPlannedAndGivesItBack) {
  for (const std::int64_t store_bytes : {0LL, 3LL << 20, 20LL << 20, 900LL << 20}) {
    SCOPED_TRACE(store_bytes);
    auto options = dense(50'000, 32);
    options.store_bytes = store_bytes;
    const auto plan = EmbeddingStore::plan(options).or_throw();
    const auto before = governor_.state().leased_bytes;
    {
      auto store = open(options);
      EXPECT_EQ(store.plan().total_bytes, plan.total_bytes);
      EXPECT_EQ(governor_.state().leased_bytes - before, plan.total_bytes);
      EXPECT_GE(plan.total_bytes, plan.frame_bytes + plan.index_bytes + plan.buffer_bytes);
      EXPECT_TRUE(store_bytes == 0 || plan.total_bytes <= store_bytes);
    }
    EXPECT_EQ(governor_.state().leased_bytes, before);
    EXPECT_EQ(governor_.state().committed_bytes,
              governor_.state().pools[static_cast<std::size_t>(Tag::kForeign)].floor_bytes);
  }
}

TEST_F(EmbeddingStoreTest, ATableThatFitsIsReadOnceAndNeverEvicted) {
  const auto options = dense(20'000, 16);
  std::int64_t written = 0;
  {
    auto store = open(options);
    store.update(range(500), std::vector<float>(500 * 16, 1.0F)).or_throw();
    store.commit(1).or_throw();
    written = store.stats().bytes_written;
  }
  auto store = open(options);
  for (int round = 0; round < 3; ++round) {
    static_cast<void>(gather(store, range(20'000)));
  }
  const auto stats = store.stats();
  EXPECT_EQ(stats.evictions_clean + stats.evictions_dirty, 0);
  EXPECT_EQ(stats.bytes_read, written);
  EXPECT_EQ(stats.requests, 60'000);
  EXPECT_GE(stats.hits, 40'000);
  EXPECT_GT(stats.hit_rate(), 0.66);
}

TEST_F(EmbeddingStoreTest, HintedRowsAreInRamWhenAskedFor) {
  const auto ids = sparse_ids(4000, 5);
  EmbeddingStoreOptions options{.directory = directory(), .dim = 64, .ids = ids};
  options.batch_rows = 64;
  options = with_floor(options);
  auto store = open(options);
  EmbeddingOracle oracle(64, options.optimizer, options.init);
  // A hint may come late on a machine that does something else: then the next one.
  for (std::size_t i = 0; i < 200 && store.stats().prefetch_hits == 0; ++i) {
    const std::vector<std::int64_t> one{ids[i * 20]};
    store.prefetch(one);
    std::this_thread::sleep_for(std::chrono::milliseconds(1 + i));
    expect_rows(store, oracle, one);
  }
  EXPECT_GE(store.stats().prefetch_hits, 1);
  store.prefetch(std::vector<std::int64_t>{123456789, -1});  // Unknown: a hint cannot fail.
  std::vector<std::int64_t> flood(100'000, ids[0]);          // Too many: dropped.
  store.prefetch(flood);
  expect_rows(store, oracle, std::vector<std::int64_t>(ids.begin(), ids.begin() + 10));
}

// Each hint comes just before the rows are asked for: too late for most pages. A frame that is kept
// for a use that has been is one that the others lack.
TEST_F(EmbeddingStoreTest, HintsThatComeTooLateKeepNoFrames) {
  std::array<std::int64_t, 2> evictions{};
  for (const bool hinted : {false, true}) {
    auto options = dense(1000, 900);  // A row has a page of its own.
    options.directory = directory() / (hinted ? "hinted" : "plain");
    options.batch_rows = 8;
    auto store = open(with_floor(options));
    std::mt19937_64 random(17);
    for (int request = 0; request < 3000; ++request) {
      std::vector<std::int64_t> ids(8);
      for (auto& id : ids) {
        const double u = static_cast<double>(random() >> 11) * 0x1p-53;
        id = static_cast<std::int64_t>(1000 * std::pow(u, 6.0));
      }
      if (hinted) {
        store.prefetch(ids);
      }
      static_cast<void>(gather(store, ids));
    }
    const auto stats = store.stats();
    EXPECT_GT(stats.evictions_clean, 1000);
    evictions[hinted ? 1 : 0] = stats.evictions_clean;
  }
  EXPECT_LT(static_cast<double>(evictions[1]), 1.1 * static_cast<double>(evictions[0]));
}

TEST_F(EmbeddingStoreTest, ChangesTheNumbersButNotTheKind) {
  auto options = dense(10, 2);
  EmbeddingOracle oracle(2, {.learning_rate = 0.5F}, options.init);
  auto store = open(options);
  store.set_optimizer({.learning_rate = 0.5F}).or_throw();
  store.apply(std::vector<std::int64_t>{1}, std::vector<float>{1, -1}).or_throw();
  oracle.apply(std::vector<std::int64_t>{1}, std::vector<float>{1, -1});
  expect_all_rows(store, oracle, range(10));
  EXPECT_FALSE(store.set_optimizer({.kind = RowOptimizer::kAdagrad}));
  EXPECT_FALSE(store.set_optimizer({.learning_rate = -1.0F}));
}

TEST_F(EmbeddingStoreTest, ScansInCreationOrderAndStopsAtAnError) {
  const auto ids = sparse_ids(5000, 2);
  auto store = open({.directory = directory(), .dim = 3, .ids = ids});
  std::vector<std::int64_t> seen;
  store
      .scan([&](std::span<const std::int64_t> some, std::span<const std::uint32_t>,
                std::span<const float> values) -> Result<void> {
        EXPECT_EQ(values.size(), some.size() * 9);
        seen.insert(seen.end(), some.begin(), some.end());
        return {};
      })
      .or_throw();
  EXPECT_EQ(seen, ids);
  int calls = 0;
  const auto stopped = store.scan([&](auto, auto, auto) -> Result<void> {
    ++calls;
    return fail(ErrorCode::kInvalidArgument, "enough");
  });
  EXPECT_FALSE(stopped);
  EXPECT_EQ(calls, 1);
}

TEST_F(EmbeddingStoreTest, ResultsDoNotDependOnThreadsOrSlab) {
  const auto ids = sparse_ids(3000, 2);
  std::optional<std::map<std::int64_t, OracleRow>> expected;
  for (const int threads : {1, 2, 5}) {
    for (const bool small : {false, true}) {
      EmbeddingStoreOptions options{.directory = root_ / std::to_string(threads * 2 + small),
                                    .dim = 24,
                                    .ids = ids,
                                    .batch_rows = 1000,
                                    .compute_threads = threads};
      auto store = open(small ? with_floor(options) : options);
      std::mt19937_64 random(6);
      for (int step = 0; step < 6; ++step) {
        const auto some = draw(ids, 1000, random);
        store.apply(some, random_floats(some.size() * 24, random)).or_throw();
      }
      const auto rows = all_rows(store);
      if (!expected) {
        expected = rows;
      }
      EXPECT_EQ(rows, *expected) << threads << " threads, small " << small;
    }
  }
}

// A large slab writes more pages at once, and so has more blocks in use; they are the table's.
TEST_F(EmbeddingStoreTest, OpensBothCommitsOfALargerSlabInTheSmallest) {
  constexpr std::int64_t kRows = 300;
  constexpr std::int64_t kDim = 900;  // A row a page.
  for (int commits = 2; commits <= 9; ++commits) {
    EmbeddingStoreOptions options{.directory = root_ / std::to_string(commits),
                                  .dim = kDim,
                                  .optimizer = {.kind = RowOptimizer::kSgd},
                                  .rows = kRows,
                                  .batch_rows = kRows};
    options.store_bytes = 32 << 20;
    const auto ids = range(kRows);
    {
      auto store = open(options);
      for (int step = 1; step <= commits; ++step) {
        const std::vector<float> rows(static_cast<std::size_t>(kRows * kDim),
                                      static_cast<float>(step));
        store.update(ids, rows).or_throw();
        store.commit(step).or_throw();
      }
    }
    options = with_floor(options);
    for (const int step : {commits - 1, commits}) {
      options.at_step = step;
      options.pinned = step < commits;
      auto store = open(options);
      EXPECT_EQ(gather(store, ids), std::vector<float>(static_cast<std::size_t>(kRows * kDim),
                                                       static_cast<float>(step)))
          << commits << " commits";
    }
    EXPECT_EQ(EmbeddingStore::inspect(options.directory).or_throw().commit_steps,
              (std::vector<std::int64_t>{commits, commits - 1}));
  }
}

TEST_F(EmbeddingStoreTest, AStepAsksOnceForARowThatIsInItTwice) {
  auto store = open(dense(100, 3));
  const std::vector<std::int64_t> ids{7, 8, 7, 7};
  static_cast<void>(gather(store, ids));
  const StoreStats before = store.stats();
  store.apply(ids, std::vector<float>(12, 1.0F)).or_throw();
  EXPECT_EQ(store.stats().requests - before.requests, 2);
  EXPECT_EQ(store.stats().hits - before.hits, 2);
}

TEST_F(EmbeddingStoreTest, InspectsAndVerifiesWithoutOpening) {
  EXPECT_EQ(EmbeddingStore::inspect(directory()).error().code, ErrorCode::kNotFound);
  auto options = dense(1000, 128);
  {
    auto store = open(options);
    store.update(range(1000), std::vector<float>(128'000, 2.0F)).or_throw();
    store.commit(7).or_throw();
  }
  const auto info = EmbeddingStore::inspect(directory()).or_throw();
  EXPECT_EQ(info.rows, 1000);
  EXPECT_EQ(info.dim, 128);
  EXPECT_TRUE(info.dense_ids);
  EXPECT_EQ(info.record_bytes, 16 + 3 * 512);
  EXPECT_EQ(info.page_bytes, 4096);
  EXPECT_EQ(info.rows_per_page, 2);
  EXPECT_EQ(info.commit_steps, std::vector<std::int64_t>{7});
  std::int64_t last = 0;
  EXPECT_TRUE(EmbeddingStore::verify(directory(), [&](std::int64_t done, std::int64_t total) {
    EXPECT_EQ(total, 500 * 4096);
    EXPECT_GT(done, last);
    last = done;
    return true;
  }));
  EXPECT_EQ(last, 500 * 4096);
}

// The page table has a dozen parts here, of which a commit writes those that changed.
TEST_F(EmbeddingStoreTest, BothCommitsStayReadableWhenPartsOfThePageTableAreWritten) {
  constexpr std::int64_t kRows = 6000;
  EmbeddingStoreOptions options{.directory = directory(),
                                .dim = 900,  // A row a page.
                                .optimizer = {.kind = RowOptimizer::kSgd},
                                .init = {.kind = RowInitKind::kZeros},
                                .store_bytes = 8 << 20,
                                .rows = kRows,
                                .batch_rows = 64};
  const std::uint64_t seed = 41;
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  std::map<std::int64_t, std::map<std::int64_t, float>> commits{{-1, {}}};  // Step → id → value.
  std::int64_t step = 0;
  std::int64_t opened = -1;
  for (int life = 0; life < 8; ++life) {
    auto store = open(options);
    ASSERT_EQ(store.last_commit(), opened);
    auto rows = commits.at(opened);
    for (std::int64_t id = 0; id < kRows; ++id) {
      const auto found = rows.find(id);
      ASSERT_EQ(gather(store, {&id, 1})[0], found == rows.end() ? 0.0F : found->second) << id;
    }
    for (auto commit = 1 + random() % 3; commit > 0; --commit) {
      for (auto i = random() % 40; i > 0; --i) {
        const auto id = static_cast<std::int64_t>(random() % kRows);
        rows[id] = static_cast<float>(random() % 1000);
        store.update({&id, 1}, std::vector<float>(900, rows[id])).or_throw();
      }
      store.commit(++step).or_throw();
      commits[step] = rows;
    }
    const auto steps = EmbeddingStore::inspect(directory()).or_throw().commit_steps;
    ASSERT_EQ(steps.front(), store.last_commit());
    ASSERT_TRUE(EmbeddingStore::verify(directory(), {}));
    opened = steps[random() % steps.size()];  // The newest or the one before.
    options.at_step = opened;
  }
}

// Every frame is compared here, one is freed at a time and nothing is dirty, so the model is exact:
// uses counted per page whether it is in RAM or not, worth half after eight rounds (of a use per
// frame) without one, halved every thirty-two. The page of the request before stays: an apply() may
// follow its gather().
TEST_F(EmbeddingStoreTest, EvictsThePageUsedLeastOftenAndAmongEqualsTheOneUnusedForLongest) {
  auto options = with_floor({.directory = directory(),
                             .dim = 900,  // A row a page.
                             .optimizer = {.kind = RowOptimizer::kSgd},
                             .rows = 500,
                             .batch_rows = 1});
  auto store = open(options);
  const auto frames = static_cast<std::size_t>(store.stats().frames);
  ASSERT_LT(frames, 64U);
  const std::uint64_t seed = 3;
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  std::map<std::int64_t, int> heat;
  std::map<std::int64_t, int> resident;  // Page → when it was used last.
  std::map<std::int64_t, int> last_round;
  std::size_t uses = 0;
  int rounds = 0;
  std::int64_t hits = 0;
  const auto often = [&](std::int64_t page) {
    const int unused = std::min(rounds - last_round[page], 100);  // Nothing is left long before.
    return (static_cast<std::int64_t>(heat[page]) * (16 - unused % 8)) >> (unused / 8);
  };
  for (int request = 1; request <= 20'000; ++request) {
    // A third of the pages is asked for far more often, and which ones changes.
    const auto hot = (static_cast<std::uint64_t>(request) / 4000) * 100 + random() % 30;
    const auto id = static_cast<std::int64_t>((random() % 3 == 0 ? random() : hot) % 500);
    static_cast<void>(gather(store, {&id, 1}));
    hits += resident.contains(id) ? 1 : 0;
    if (!resident.contains(id) && resident.size() == frames) {
      const auto victim =
          std::min_element(resident.begin(), resident.end(), [&](const auto& a, const auto& b) {
            return std::tuple(a.second >= request - 1, often(a.first), a.second) <
                   std::tuple(b.second >= request - 1, often(b.first), b.second);
          });
      resident.erase(victim);
    }
    resident[id] = request;
    heat[id] = std::min(heat[id] + 1, 255);
    last_round[id] = rounds;
    if (++uses == frames) {
      uses = 0;
      if (++rounds % 32 == 0) {
        for (auto& [page, count] : heat) {
          count /= 2;
        }
      }
    }
    ASSERT_EQ(store.stats().hits, hits) << "request " << request << ", id " << id;
  }
  EXPECT_GT(hits, 9'000) << "the frequent pages did not stay";
}

TEST_F(EmbeddingStoreTest, KeepsDirtyBytesWithinTheirBound) {
  constexpr std::int64_t kBound = 1 << 20;
  EmbeddingStoreOptions options{.directory = directory(),
                                .dim = 900,
                                .optimizer = {.kind = RowOptimizer::kSgd},
                                .store_bytes = 24 << 20,
                                .rows = 20'000,
                                .batch_rows = 64,
                                .dirty_bytes = kBound};
  auto store = open(options);
  EmbeddingOracle oracle(900, options.optimizer, options.init);
  std::mt19937_64 random(17);
  std::vector<std::int64_t> all(300);
  std::iota(all.begin(), all.end(), 0);
  for (int step = 0; step < 200; ++step) {
    const auto ids = draw(all, 64, random);
    const auto grads = random_floats(64 * 900, random);
    store.apply(ids, grads).or_throw();
    oracle.apply(ids, grads);
    ASSERT_LE(store.stats().dirty_bytes_max, kBound);
  }
  EXPECT_GT(store.stats().pages_written, 256) << "nothing was written back";
  expect_rows(store, oracle, all);
  store.commit(1).or_throw();
  EXPECT_EQ(store.stats().dirty_bytes, 0);
  options.dirty_bytes = -1;
  EXPECT_FALSE(EmbeddingStore::open(governor_, options));
}

// Version 2 of the superblock had the page table of slot N in map.N, and no map.2.
TEST_F(EmbeddingTableTest, R07_ATableOfTwoMapsIsOpenedAndGoesOn) {
  const EmbeddingStoreOptions options = with_floor(
      {.directory = directory(), .dim = 8, .init = {.kind = RowInitKind::kZeros}, .rows = 100});
  const std::vector<std::int64_t> id{7};
  const auto at_step = [&](std::int64_t step) {
    auto how = options;
    how.at_step = step;
    return open(how);
  };
  {
    auto store = open(options);
    for (std::int64_t step = 1; step <= 2; ++step) {
      store.update(id, std::vector<float>(8, static_cast<float>(step))).or_throw();
      store.commit(step).or_throw();
    }
  }
  std::filesystem::remove(directory() / "map.2");
  {
    std::fstream super(directory() / "super", std::ios::in | std::ios::out | std::ios::binary);
    for (const std::streamoff at : {0, 7 * 512, 4096, 4096 + 7 * 512}) {
      std::array<char, 56> record{};
      super.seekg(at);
      super.read(record.data(), record.size());
      const std::uint32_t version = 2;
      std::uint32_t crc = 0;
      std::memcpy(record.data() + 8, &version, 4);
      std::memcpy(record.data() + 12, &crc, 4);
      std::memset(record.data() + 52, 0, 4);
      crc = crc32c(std::as_bytes(std::span(record)));
      std::memcpy(record.data() + 12, &crc, 4);
      super.seekp(at);
      super.write(record.data(), record.size());
    }
  }
  ASSERT_TRUE(EmbeddingStore::verify(directory(), {}));
  {
    auto store = open(options);
    EXPECT_EQ(store.last_commit(), 2);
    for (std::int64_t step = 3; step <= 5; ++step) {
      store.update(id, std::vector<float>(8, static_cast<float>(step))).or_throw();
      store.commit(step).or_throw();
    }
  }
  for (const std::int64_t step : {4, 5}) {
    std::vector<float> row(8);
    at_step(step).gather(id, row).or_throw();
    EXPECT_EQ(row, std::vector<float>(8, static_cast<float>(step)));
  }
}

}  // namespace
}  // namespace plimsoll
