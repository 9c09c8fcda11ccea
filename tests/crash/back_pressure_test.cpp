// SPDX-License-Identifier: Apache-2.0
//
// Goal: a slow disk and the smallest slab cost time and nothing else: no row is dropped, nothing
// waits for ever; and a process that holds only a store holds no more memory than its plan.
#include <chrono>
#include <fstream>

#include <sys/wait.h>

#include "os/file_faults.h"
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;

class BackPressureTest : public EmbeddingTableTest {
 protected:
  // Every kind of call, `steps` times, each answer compared with the oracle.
  static void work(EmbeddingStore& store, EmbeddingOracle& oracle,
                   const std::vector<std::int64_t>& ids, std::int64_t steps, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto dim = static_cast<std::size_t>(store.dim());
    for (std::int64_t step = 1; step <= steps; ++step) {
      const auto batch = draw(ids, 1 + random() % 128, random);
      store.prefetch(draw(ids, 64, random));
      expect_rows(store, oracle, batch);
      const auto values = random_floats(batch.size() * dim, random);
      if (step % 4 == 0) {
        store.update(batch, values).or_throw();
        oracle.update(batch, values);
      } else {
        store.apply(batch, values).or_throw();
        oracle.apply(batch, values);
      }
      if (step % 3 == 0) {
        store.commit(step).or_throw();
      }
    }
    store.commit(steps + 1).or_throw();
    expect_all_rows(store, oracle, ids);
  }
};

TEST_F(BackPressureTest, ADiskAHundredTimesSlowerDropsNothing) {
  const auto ids = sparse_ids(160, 4);
  const auto options = with_floor(
      {.directory = directory(), .dim = 96, .ids = ids, .batch_rows = 128, .io_threads = 2});
  EmbeddingOracle oracle(96, {}, {});
  {
    auto store = open(options);
    ASSERT_LT(store.plan().frame_bytes, 54 * 4096) << "the table must not fit";
    // An SSD answers in some 30 microseconds.
    const ScopedFileFault slow(
        {.call = FileCall::kAny, .nth = 1, .keeps_failing = true, .delay_us = 3000});
    work(store, oracle, ids, 12, 1);
    EXPECT_GT(file_fault_calls(), 300);
    EXPECT_GT(store.stats().evictions_dirty, 10);
  }
  auto store = open(options);
  expect_all_rows(store, oracle, ids);
}

TEST_F(BackPressureTest, TheSmallestSlabCompletesEveryWorkload) {
  constexpr int kTimes = 20;
  int completed = 0;
  for (int time = 0; time < kTimes && !HasFailure(); ++time) {
    SCOPED_TRACE("seed " + std::to_string(time));
    std::filesystem::remove_all(directory());
    std::mt19937_64 random(static_cast<std::uint64_t>(time));
    constexpr std::array<std::int64_t, 4> kDims{8, 64, 200, 700};
    const std::int64_t dim = kDims[random() % kDims.size()];
    const auto ids = sparse_ids(200 + random() % 3000, random());
    constexpr std::array kKinds{RowOptimizer::kAdamW, RowOptimizer::kAdagrad};
    EmbeddingStoreOptions options{.directory = directory(),
                                  .dim = dim,
                                  .optimizer = {.kind = kKinds[random() % 2]},
                                  .ids = ids,
                                  .batch_rows = 128,
                                  .io_threads = static_cast<int>(random() % 4),
                                  .compute_threads = 1 + static_cast<int>(random() % 2)};
    const std::int64_t floor = EmbeddingStore::plan(options).or_throw().floor_bytes;
    options.store_bytes = floor - 1;
    const auto refused = EmbeddingStore::open(governor_, options);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().requested_bytes, floor);
    constexpr std::int64_t kMiB = 1 << 20;
    options.store_bytes = (floor + kMiB - 1) / kMiB * kMiB;
    EmbeddingOracle oracle(dim, options.optimizer, {});
    auto store = open(options);
    work(store, oracle, ids, 20, random());
    completed += HasFailure() ? 0 : 1;
  }
  EXPECT_EQ(completed, kTimes);
}

// What the kernel charges this process.
std::int64_t resident_bytes() {
  std::ifstream rollup("/proc/self/smaps_rollup");
  std::int64_t bytes = 0;
  for (std::string line; std::getline(rollup, line);) {
    if (line.starts_with("Rss:")) {
      bytes = std::stoll(line.substr(4)) * 1024;
    }
  }
  return bytes;
}

TEST_F(BackPressureTest, AStoreHoldsNoMoreMemoryThanItsPlan) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "a sanitizer's shadow of the memory is resident too";
#endif
  governor_.close();
  const pid_t child = ::fork();
  if (child == 0) {
    const std::int64_t before = resident_bytes();
    auto governor = Governor::create({.memory_limit = "1GiB"}).or_throw();
    EmbeddingStoreOptions options{.directory = directory(),
                                  .dim = 64,
                                  .store_bytes = 48 << 20,
                                  .rows = 400'000,
                                  .batch_rows = 4096};
    auto store = EmbeddingStore::open(governor, options).or_throw();
    std::mt19937_64 random(3);
    std::vector<std::int64_t> batch(4096);
    std::vector<float> values(batch.size() * 64, 0.5F);
    std::int64_t most = 0;
    for (std::int64_t step = 1; step <= 24; ++step) {
      for (auto& id : batch) {
        id = static_cast<std::int64_t>(random() % 400'000);
      }
      store.prefetch(batch);
      store.gather(batch, values).or_throw();
      store.apply(batch, values).or_throw();
      if (step % 8 == 0) {
        store.commit(step).or_throw();
      }
      most = std::max(most, resident_bytes());
    }
    const auto caller = static_cast<std::int64_t>(values.size() * sizeof(float) +
                                                  batch.size() * sizeof(std::int64_t));
    const std::int64_t plan = store.plan().total_bytes;
    const std::int64_t over = most - before - caller - plan;
    std::printf("plan %ld, above it %ld bytes\n", static_cast<long>(plan), static_cast<long>(over));
    std::fflush(stdout);
    ::_exit(over <= plan / 50 + (4 << 20) ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace
}  // namespace plimsoll
