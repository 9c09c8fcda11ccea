// SPDX-License-Identifier: Apache-2.0
//
// Goal: a table in sample order survives kills and failing disks: what is found afterwards is
// exactly one committed step, or the damage is noticed. Method: every row's value is a pure
// function of (id, epoch, position of the cursor), so what is found names its step.
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <set>

#include <sys/wait.h>

#include "os/crash_point.h"
#include "os/file_faults.h"
#include "plimsoll/sample_order.h"
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;

constexpr std::int64_t kRows = 900;
constexpr std::int64_t kDim = 60;
constexpr std::int64_t kBatch = 45;
constexpr std::int64_t kSteps = 60;  // Of kBatch rows: three epochs.
constexpr std::int64_t kStepsPerEpoch = kRows / kBatch;

class TimelineDurabilityTest : public EmbeddingTableTest {
 protected:
  [[nodiscard]] EmbeddingStoreOptions options() const {
    return with_floor({.directory = directory(),
                       .dim = kDim,
                       .init = {.kind = RowInitKind::kZeros},
                       .layout = RowLayout::kSampleOrder,
                       .order_seed = 3,
                       .rows = kRows,
                       .batch_rows = kBatch,
                       .io_threads = 2});
  }
  static std::vector<std::int64_t> batch_of(std::int64_t step) {  // Steps count from 1.
    const SampleOrder order(kRows, 3, (step - 1) / kStepsPerEpoch);
    std::vector<std::int64_t> ids;
    for (std::int64_t i = 0; i < kBatch; ++i) {
      ids.push_back(order.at((step - 1) % kStepsPerEpoch * kBatch + i));
    }
    return ids;
  }
  // A row changed out of order by a step, too: what random access does to streams is killed as
  // well.
  static std::int64_t stray_of(std::int64_t step) { return step * 7919 % kRows; }

  static Result<void> work(EmbeddingStore& store, std::int64_t step) {
    if (auto begun = store.begin_epoch((step - 1) / kStepsPerEpoch); !begun) {
      return begun;
    }
    auto ids = batch_of(step);
    const std::vector<float> rows(ids.size() * kDim, static_cast<float>(step));
    if (auto done = store.update(ids, rows); !done) {
      return done;
    }
    const std::int64_t stray = stray_of(step);
    return store.update({&stray, 1}, std::span(rows).first(kDim));
  }
  static std::vector<float> expected(std::int64_t step) {
    std::vector<float> values(kRows, 0.0F);
    for (std::int64_t s = 1; s <= step; ++s) {
      for (const std::int64_t id : batch_of(s)) {
        values[static_cast<std::size_t>(id)] = static_cast<float>(s);
      }
      values[static_cast<std::size_t>(stray_of(s))] = static_cast<float>(s);
    }
    return values;
  }
  // Opens the table and returns the step whose rows it holds.
  std::int64_t step_found(std::int64_t at_step = -1) {
    governor_.close();
    governor_ = Governor::create({.memory_limit = "1GiB"}).or_throw();
    std::int64_t step = 0;
    {
      auto wanted = options();
      wanted.at_step = at_step;
      auto store = EmbeddingStore::open(governor_, wanted).or_throw();
      step = std::max<std::int64_t>(store.last_commit(), 0);
      const auto values = expected(step);
      for (const auto& [id, row] : all_rows(store)) {
        const std::vector<float> all(kDim, values[static_cast<std::size_t>(id)]);
        EXPECT_EQ(row.weights, all) << "id " << id << " step " << step;
        if (row.weights != all) {
          break;
        }
      }
    }
    return step;
  }
  int run_child(const std::string& crash) {
    governor_.close();
    const pid_t child = ::fork();
    if (child == 0) {
      ::setenv("PLIMSOLL_CRASH", crash.c_str(), 1);
      reload_crash_points();
      try {
        auto governor = Governor::create({.memory_limit = "1GiB"}).or_throw();
        auto store = EmbeddingStore::open(governor, options()).or_throw();
        for (std::int64_t step = std::max<std::int64_t>(store.last_commit(), 0) + 1; step <= kSteps;
             ++step) {
          work(store, step).or_throw();
          if (step % 3 == 0) {
            store.commit(step).or_throw();
          }
        }
        std::_Exit(0);
      } catch (...) {
        std::_Exit(3);
      }
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    return status;
  }
  void flip(const std::filesystem::path& path, std::uint64_t bit) const {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(bit / 8));
    const char byte = static_cast<char>(file.get());
    file.seekp(static_cast<std::streamoff>(bit / 8));
    file.put(static_cast<char>(byte ^ (1 << (bit % 8))));
  }
};

TEST_F(TimelineDurabilityTest, LeavesExactlyOneCommittedStepWhereverAKillStrikes) {
  governor_.close();
  std::mt19937_64 random(20241121);
  std::set<std::int64_t> steps;
  int killed = 0;
  for (int trial = 0; trial < 8; ++trial) {
    std::filesystem::remove_all(directory());
    std::int64_t last = 0;
    for (int death = 0; death < 3; ++death) {  // A life of several deaths, each further on.
      const std::string crash = "*:" + std::to_string(1 + random() % 700);
      SCOPED_TRACE("trial " + std::to_string(trial) + " crash " + crash);
      const int status = run_child(crash);
      ASSERT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0) << status;
      killed += WIFSIGNALED(status) ? 1 : 0;
      const std::int64_t found = step_found();
      ASSERT_FALSE(HasFailure());
      ASSERT_GE(found, last);
      last = found;
      steps.insert(found);
    }
  }
  EXPECT_GT(killed, 8);
  EXPECT_GT(steps.size(), 4U);
}

TEST_F(TimelineDurabilityTest, SurvivesAKillAtEveryKindOfPoint) {
  governor_.close();
  for (const char* point :
       {"store.timeline.bucket", "store.commit.rows", "store.commit.map",
        "store.commit.superblock.before", "store.commit.superblock.after", "file.write.before",
        "file.write.after", "file.sync.before", "file.sync.after"}) {
    for (const int passage : {1, 7}) {
      SCOPED_TRACE(std::string(point) + ":" + std::to_string(passage));
      std::filesystem::remove_all(directory());
      ASSERT_TRUE(WIFSIGNALED(run_child(std::string(point) + ":" + std::to_string(passage))));
      static_cast<void>(step_found());
      ASSERT_FALSE(HasFailure());
      ASSERT_EQ(run_child("none:1"), 0);
      ASSERT_EQ(step_found(), kSteps);
      ASSERT_EQ(step_found(kSteps - 3), kSteps - 3);
      ASSERT_FALSE(HasFailure());
    }
  }
}

TEST_F(TimelineDurabilityTest, ADiskThatFailsPoisonsTheHandleAndLeavesTheOldCommit) {
  for (const FileCall call : {FileCall::kWrite, FileCall::kSync}) {
    for (const std::int64_t nth : {1, 2, 3, 4, 6, 9, 20, 33}) {
      SCOPED_TRACE("call " + std::to_string(static_cast<int>(call)) + " nth " +
                   std::to_string(nth));
      std::filesystem::remove_all(directory());
      {
        auto store = open(options());
        for (std::int64_t step = 1; step <= 13; ++step) {
          work(store, step).or_throw();
        }
        store.commit(13).or_throw();
        Result<void> done;
        {
          const ScopedFileFault armed({.call = call,
                                       .nth = nth,
                                       .os_errno = nth % 2 == 0 ? ENOSPC : EIO,
                                       .keeps_failing = nth % 2 == 0});
          for (std::int64_t step = 14; done && step <= 30; ++step) {
            done = work(store, step);
          }
          done = done ? store.commit(30) : done;
        }
        if (!done) {
          EXPECT_EQ(done.error().code, ErrorCode::kIo);
          std::vector<float> row(kDim);
          const std::int64_t id = 3;
          EXPECT_FALSE(store.gather({&id, 1}, row)) << "a poisoned store went on";
          EXPECT_FALSE(store.commit(31));
          EXPECT_FALSE(store.begin_epoch(5));
        }
      }
      const auto step = step_found();
      EXPECT_TRUE(step == 13 || step == 30) << step;
      ASSERT_FALSE(HasFailure());
    }
  }
}

TEST_F(TimelineDurabilityTest, AFailedReadIsReportedAndCanBeTriedAgain) {
  {
    auto store = open(options());
    for (std::int64_t step = 1; step <= 25; ++step) {
      work(store, step).or_throw();
    }
    store.commit(25).or_throw();
  }
  auto store = open(options());
  const auto values = expected(25);
  for (const std::int64_t step : {26, 3}) {  // What is streamed, and what is looked up.
    const auto ids = batch_of(step);
    std::vector<float> rows(ids.size() * kDim);
    {
      const ScopedFileFault armed(
          {.call = FileCall::kRead, .nth = 1, .os_errno = EIO, .keeps_failing = true});
      const auto failed = store.gather(ids, rows);
      ASSERT_FALSE(failed);
      EXPECT_EQ(failed.error().code, ErrorCode::kIo);
      EXPECT_NE(failed.error().to_string().find(directory().string()), std::string::npos);
    }
    store.gather(ids, rows).or_throw();
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ASSERT_EQ(rows[i * kDim], values[static_cast<std::size_t>(ids[i])]);
    }
  }
}

// Every other flipped bit: tests/crash/bit_flips_test.cpp.
TEST_F(TimelineDurabilityTest, ADamagedMapIsNoticedUnlessItIsOfTheOlderCommit) {
  {
    auto store = open(options());
    for (std::int64_t step = 1; step <= 30; ++step) {
      work(store, step).or_throw();
      if (step % 10 == 0) {
        store.commit(step).or_throw();
      }
    }
  }
  flip(directory() / "map.1", 8 * 100);  // Commits went to map.0, map.1, map.2: the older one.
  EXPECT_EQ(step_found(), 30);
  flip(directory() / "map.2", 8 * 100);
  const auto refused = EmbeddingStore::open(governor_, options());
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kCorrupt);
  EXPECT_FALSE(EmbeddingStore::verify(directory(), {}));
}

// A table that goes on from the older commit writes where the newer one had written: the same
// extents of the same streams, with other rows. What a disk kept of the newer one must not pass.
TEST_F(TimelineDurabilityTest, AnOldExtentWhoseSuccessorWasLostIsNoticed) {
  const std::int64_t strays[] = {5, 400, 800};
  const auto go_on = [&](EmbeddingStore& store, float value) {
    const std::vector<float> rows(std::size(strays) * kDim, value);
    store.update(strays, rows).or_throw();
  };
  std::string newer;
  {
    auto store = open(options());
    for (std::int64_t step = 1; step <= 30; ++step) {
      work(store, step).or_throw();
    }
    store.commit(30).or_throw();
    go_on(store, 1.0F);
    store.commit(31).or_throw();
  }
  std::ifstream before(directory() / "rows.dat", std::ios::binary);
  newer.assign(std::istreambuf_iterator<char>(before), {});
  {
    auto wanted = options();
    wanted.at_step = 30;
    auto store = open(wanted);
    go_on(store, 2.0F);
    store.commit(32).or_throw();
  }
  ASSERT_EQ(std::filesystem::file_size(directory() / "rows.dat"), newer.size());
  std::ofstream(directory() / "rows.dat", std::ios::binary) << newer << std::flush;
  EXPECT_FALSE(EmbeddingStore::verify(directory(), {}));
  auto store = open(options());
  ASSERT_EQ(store.last_commit(), 32);
  std::vector<float> row(kDim);
  for (const std::int64_t id : strays) {
    const auto got = store.gather({&id, 1}, row);
    EXPECT_FALSE(got) << "id " << id << " holds " << row[0];
  }
  EXPECT_FALSE(store.scan([](auto, auto, auto) { return Result<void>{}; }));
}

TEST_F(TimelineDurabilityTest, ASlabBelowTheFloorIsRefusedWithTheFloor) {
  auto wanted = options();
  const auto floor = wanted.store_bytes;
  wanted.store_bytes = floor / 2;
  const auto refused = EmbeddingStore::open(governor_, wanted);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kOverBudget);
  EXPECT_FALSE(std::filesystem::exists(directory()));
  wanted.store_bytes = refused.error().requested_bytes;
  EXPECT_LE(wanted.store_bytes, floor);
  auto store = open(wanted);
  EXPECT_LE(store.plan().total_bytes, wanted.store_bytes);
  for (std::int64_t step = 1; step <= 25; ++step) {
    work(store, step).or_throw();
  }
  EXPECT_EQ(gather(store, batch_of(25))[0], 25.0F);
}

TEST_F(TimelineDurabilityTest, TheFloorItStatesWhenMadeIsTheOneItOpensWith) {
  auto wanted = options();
  wanted.store_bytes = 64 << 20;  // Other buckets than for the smallest slab.
  wanted.store_bytes = open(wanted).plan().floor_bytes;
  EXPECT_LE(open(wanted).plan().total_bytes, wanted.store_bytes);
  --wanted.store_bytes;
  const auto refused = EmbeddingStore::open(governor_, wanted);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().requested_bytes, wanted.store_bytes + 1);
}

TEST_F(TimelineDurabilityTest, AnotherLayoutThanTheTablesIsRefused) {
  { auto store = open(options()); }
  auto wanted = options();
  wanted.layout = RowLayout::kAnyOrder;
  const auto refused = EmbeddingStore::open(governor_, wanted);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(refused.error().to_string().find("layout is sample_order"), std::string::npos);
}

TEST_F(TimelineDurabilityTest, ManyCommitsStayWithinTheStatedDisk) {
  auto store = open(options());
  for (std::int64_t step = 1; step <= 150; ++step) {
    store.begin_epoch((step - 1) / kStepsPerEpoch).or_throw();
    const auto ids = batch_of(step);
    const std::vector<float> rows(ids.size() * kDim, static_cast<float>(step));
    store.update(ids, rows).or_throw();
    for (int i = 0; i < 3; ++i) {
      store.commit(4 * step + i).or_throw();
      const std::int64_t stray = (step * 31 + i * 401) % kRows;
      store.update({&stray, 1}, std::span(rows).first(kDim)).or_throw();
    }
    ASSERT_LE(std::filesystem::file_size(directory() / "rows.dat"),
              static_cast<std::uintmax_t>(store.plan().disk_cap_bytes));
  }
}

}  // namespace
}  // namespace plimsoll
