// SPDX-License-Identifier: Apache-2.0
//
// Goal: what a store says it takes is what it takes. The parts of its plan add up to the slab, and
// the slab is what it leases, from open to close; a process that holds nothing but a store has no
// more resident bytes than its plan, 2 % and 4 MiB. Method: the kernel's own peak (VmHWM) of a
// child, against what it was before the store was opened.
#include <cstdio>
#include <fstream>
#include <functional>

#include <sys/wait.h>

#include "plimsoll/feature_store.h"
#include "plimsoll/sample_order.h"
#include "tests/support/embedding_table_fixture.h"
#include "tests/support/feature_set.h"

namespace plimsoll {
namespace {

using namespace test;
namespace fs = std::filesystem;

constexpr std::int64_t kMiB = 1 << 20;
constexpr std::int64_t kDim = 64;
constexpr std::size_t kBatch = 4096;

// ---- What is stated and what is leased --------------------------------------------------------

class SlabPlanTest : public EmbeddingTableTest, public ::testing::WithParamInterface<RowLayout> {};

TEST_P(SlabPlanTest, ItsPartsAddUpToTheSlabAndTheSlabIsLeased) {
  std::mt19937_64 random(17);
  for (int time = 0; time < 24; ++time) {
    SCOPED_TRACE("time " + std::to_string(time));
    fs::remove_all(directory());
    constexpr std::array<std::int64_t, 5> kDims{1, 24, 64, 200, 1500};
    const auto ids = sparse_ids(1 + random() % 5000, random());
    EmbeddingStoreOptions how{.directory = directory(),
                              .dim = kDims[random() % kDims.size()],
                              .dtype = time % 4 < 2 ? RowDType::kFloat32 : RowDType::kBFloat16,
                              .layout = GetParam(),
                              .batch_rows = static_cast<std::int64_t>(1 + random() % 2000),
                              .io_threads = static_cast<int>(random() % 3),
                              .compute_threads = 1 + static_cast<int>(random() % 2)};
    if (time % 2 == 0) {
      how.ids = ids;
    } else {
      how.rows = static_cast<std::int64_t>(ids.size());
    }
    how = with_floor(how);
    how.store_bytes += time % 3 == 0 ? 0 : static_cast<std::int64_t>(random() % (8 * kMiB));
    const SlabPlan stated = EmbeddingStore::plan(how).or_throw();
    const std::int64_t before = governor_.state().leased_bytes;
    {
      auto store = open(how);
      const SlabPlan plan = store.plan();
      const std::int64_t parts =
          plan.frame_bytes + plan.index_bytes + plan.buffer_bytes + plan.queue_bytes;
      EXPECT_LE(parts, plan.total_bytes);
      EXPECT_GT(parts, plan.total_bytes - 4096) << plan.to_string();
      EXPECT_EQ(plan.total_bytes, stated.total_bytes);
      EXPECT_LE(plan.total_bytes, how.store_bytes);
      EXPECT_LE(plan.floor_bytes, plan.total_bytes);
      const auto leased = [&] { return governor_.state().leased_bytes - before; };
      EXPECT_EQ(leased(), plan.total_bytes);
      const auto some = time % 2 == 0 ? ids : std::vector<std::int64_t>{0};
      static_cast<void>(gather(store, some));
      const std::vector<float> rows(some.size() * static_cast<std::size_t>(how.dim), 1.0F);
      store.update(some, rows).or_throw();
      store.begin_epoch(1).or_throw();
      store.commit(1).or_throw();
      store.scan([](auto, auto, auto) { return Result<void>{}; }).or_throw();
      EXPECT_EQ(leased(), plan.total_bytes);
    }
    EXPECT_EQ(governor_.state().leased_bytes, before);
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, SlabPlanTest, both_layouts(), layout_case);

TEST(FeatureSlabTest, IsLeasedWholeAndNeverPassesWhatWasGiven) {
  ScratchDirectory scratch;
  Governor governor = governor_of();
  const FeatureSet set =
      make_set(5, 2000, {{.name = "x", .dtype = DType::kFloat32, .shape = {64}}}, IdKind::kSparse);
  ASSERT_TRUE(write_set(governor, scratch / "set", set));
  std::vector<std::byte> out(set.values[0].size());
  const std::vector<std::span<std::byte>> spans{out};
  for (const std::int64_t bytes : {128 << 10, 200 << 10, 1 << 20, 8 << 20}) {
    const std::int64_t before = governor.state().leased_bytes;
    {
      auto store =
          FeatureStore::open(governor,
                             {.directory = scratch / "set", .cache_bytes = bytes, .io_threads = 2})
              .or_throw();
      const std::int64_t leased = governor.state().leased_bytes - before;
      EXPECT_LE(leased, bytes);
      EXPECT_GT(leased, store.stats().frames * 4096);
      store.read(set.ids, std::vector<int>{0}, spans).or_throw();
      EXPECT_EQ(out, set.values[0]);
      EXPECT_EQ(governor.state().leased_bytes - before, leased);
    }
    EXPECT_EQ(governor.state().leased_bytes, before);
  }
  const auto refused =
      FeatureStore::open(governor, {.directory = scratch / "set", .cache_bytes = 4096});
  ASSERT_FALSE(refused);
  const auto opened = FeatureStore::open(
      governor, {.directory = scratch / "set", .cache_bytes = refused.error().requested_bytes});
  EXPECT_TRUE(opened) << opened.error().to_string();
}

// ---- What is resident -------------------------------------------------------------------------

std::int64_t status_bytes(const char* field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field)) {
      return std::stoll(line.substr(line.find(':') + 1)) * 1024;
    }
  }
  return -1;
}

// Says in a child how far its peak passes `plan`, which `work` returns with the caller's own bytes.
struct Held {
  std::int64_t plan{0};
  std::int64_t callers{0};  // Batches and the like, which are not the store's.
};
void expect_no_more_than_planned(const char* what, const std::function<Held()>& work) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "a sanitizer's shadow of the memory is resident too";
#endif
  const pid_t child = ::fork();
  if (child == 0) {
    int verdict = 2;
    try {
      const std::int64_t before = status_bytes("VmRSS");
      std::ofstream("/proc/self/clear_refs") << "5" << std::flush;  // VmHWM begins anew.
      const std::int64_t start = std::max(before, status_bytes("VmHWM"));
      const Held held = work();
      const std::int64_t over = status_bytes("VmHWM") - start - held.callers - held.plan;
      std::printf("%s: plan %lld, peak above it %lld bytes\n", what,
                  static_cast<long long>(held.plan), static_cast<long long>(over));
      verdict = over <= held.plan / 50 + 4 * kMiB ? 0 : 1;
    } catch (const std::exception& problem) {
      std::printf("%s: %s\n", what, problem.what());
    }
    std::fflush(stdout);
    ::_exit(verdict);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << what << ": " << status;
}

Held train_table(const EmbeddingStoreOptions& how) {
  auto governor = Governor::create({.memory_limit = "2GiB"}).or_throw();
  auto store = EmbeddingStore::open(governor, how).or_throw();
  std::mt19937_64 random(3);
  std::vector<std::int64_t> batch(kBatch);
  std::vector<float> values(batch.size() * kDim, 0.5F);
  for (std::int64_t step = 1; step <= 12; ++step) {
    const SampleOrder order(how.rows, how.order_seed, step / 8);
    store.begin_epoch(step / 8).or_throw();
    for (std::size_t i = 0; i < batch.size(); ++i) {  // Two in the order of the epoch, one not.
      const auto at = step % 8 * static_cast<std::int64_t>(kBatch) + static_cast<std::int64_t>(i);
      batch[i] = step % 3 == 0
                     ? static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(how.rows))
                     : order.at(at);
    }
    store.prefetch(batch);
    store.gather(batch, values).or_throw();
    store.apply(batch, values).or_throw();
    if (step % 4 == 0) {
      store.commit(step).or_throw();
    }
  }
  store.scan([](auto, auto, auto) { return Result<void>{}; }).or_throw();
  return {.plan = store.plan().total_bytes,
          .callers = static_cast<std::int64_t>(values.size() * sizeof(float) +
                                               batch.size() * sizeof(std::int64_t))};
}

class ResidentBytesTest : public EmbeddingTableTest,
                          public ::testing::WithParamInterface<RowLayout> {};

TEST_P(ResidentBytesTest, OfATableAreNoMoreThanItsPlan) {
  governor_.close();
  for (const std::int64_t bytes : {64 * kMiB, 256 * kMiB}) {
    fs::remove_all(directory());
    // Twice the slab; rows that nobody wrote cost no disk.
    const EmbeddingStoreOptions how{.directory = directory(),
                                    .dim = kDim,
                                    .init = {.kind = RowInitKind::kZeros},
                                    .layout = GetParam(),
                                    .order_seed = 2,
                                    .store_bytes = bytes,
                                    .rows = 2 * bytes / 784,
                                    .batch_rows = static_cast<std::int64_t>(kBatch)};
    const std::string what = layout_case({GetParam(), 0}) + " " + std::to_string(bytes / kMiB);
    expect_no_more_than_planned(what.c_str(), [&] { return train_table(how); });
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, ResidentBytesTest, both_layouts(), layout_case);

TEST(FeatureResidentBytesTest, OfAStoreAreNoMoreThanItsSlab) {
  constexpr std::int64_t kRows = 20'000;
  constexpr std::int64_t kFloats = 1024;
  ScratchDirectory scratch;
  {
    Governor governor = governor_of();
    auto writer = FeatureWriter::create(governor, {.directory = scratch / "set",
                                                   .columns = {{.name = "x", .shape = {kFloats}}}})
                      .or_throw();
    const std::vector<float> record(kFloats, 0.25F);
    for (std::int64_t id = 0; id < kRows; ++id) {
      const std::vector<std::span<const std::byte>> columns{std::as_bytes(std::span(record))};
      writer.append({&id, 1}, columns).or_throw();
    }
    writer.finish().or_throw();
    governor.close();
  }
  for (const std::int64_t bytes : {16 * kMiB, 64 * kMiB, 256 * kMiB}) {
    const std::string what = "features " + std::to_string(bytes / kMiB);
    expect_no_more_than_planned(what.c_str(), [&]() -> Held {
      auto governor = Governor::create({.memory_limit = "2GiB"}).or_throw();
      auto store =
          FeatureStore::open(governor, {.directory = scratch / "set", .cache_bytes = bytes})
              .or_throw();
      std::mt19937_64 random(3);
      std::vector<std::int64_t> batch(256);
      std::vector<float> out(batch.size() * kFloats);
      const std::vector<std::span<std::byte>> spans{std::as_writable_bytes(std::span(out))};
      for (int step = 0; step < 60; ++step) {
        for (auto& id : batch) {
          id = static_cast<std::int64_t>(random() % kRows);
        }
        store.read(batch, std::vector<int>{0}, spans).or_throw();
      }
      return {.plan = governor.state().leased_bytes,
              .callers = static_cast<std::int64_t>(out.size() * sizeof(float))};
    });
  }
}

}  // namespace
}  // namespace plimsoll
