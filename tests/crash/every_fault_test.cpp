// SPDX-License-Identifier: Apache-2.0
//
// Goal: whatever call to the disk fails, in whatever way, the caller is told or the call succeeds;
// the table on disk is at a legal commit; nothing changes by a fault while reading. Method: as
// SQLite's I/O error loops: the first call of a kind fails, then the second, … until the work is
// done without meeting the fault; after each, the table is opened again and compared. In sample
// order the work ends an epoch, goes on in the next, jumps about in it and makes streams fold.
#include <atomic>
#include <cerrno>
#include <functional>

#include "base/check.h"
#include "os/crash_point.h"
#include "os/file_faults.h"
#include "os/power_loss.h"
#include "plimsoll/sample_order.h"
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;
namespace fs = std::filesystem;

constexpr std::int64_t kDim = 96;
constexpr std::int64_t kRows = 150;
constexpr std::int64_t kInOrder = 60;  // Of them: changed in the order of the epoch.
constexpr std::uint64_t kOrderSeed = 5;

std::atomic<int> folds{0};

float value_of(std::int64_t id, std::int64_t step) {
  return static_cast<float>(step * 10'000 + id);
}

struct Way {
  const char* name;
  FileFault fault;
};

// How each kind of call can fail. EINTR and a short transfer are no failures: they are retried.
std::vector<Way> ways_of(FileCall call) {
  std::vector<Way> ways{{"EIO", {.call = call, .os_errno = EIO}},
                        {"EIO for good", {.call = call, .os_errno = EIO, .keeps_failing = true}},
                        {"EAGAIN", {.call = call, .os_errno = EAGAIN}}};
  if (call == FileCall::kWrite || call == FileCall::kRename) {
    ways.push_back({"ENOSPC", {.call = call, .os_errno = ENOSPC, .keeps_failing = true}});
  }
  if (call == FileCall::kRead || call == FileCall::kWrite) {
    ways.push_back({"EINTR", {.call = call, .os_errno = EINTR}});
    ways.push_back({"short", {.call = call, .os_errno = 0, .short_bytes = 512}});
    ways.push_back({"one byte", {.call = call, .os_errno = 0, .short_bytes = 1}});
  }
  return ways;
}

bool is_retried(const Way& way) {
  return way.fault.os_errno == EINTR || way.fault.os_errno == 0;
}

class EveryFaultTest : public EmbeddingTableTest, public ::testing::WithParamInterface<RowLayout> {
 protected:
  void SetUp() override {
    EmbeddingTableTest::SetUp();
    folds = 0;
    set_crash_hook([](const char* name, bool) noexcept {
      folds += std::string_view(name) == "store.timeline.fold" ? 1 : 0;
    });
    // In sample order: as many old versions as the file may hold before a stream is folded.
    int rounds = 0;
    if (GetParam() == RowLayout::kSampleOrder) {
      rounds = train_until_folded(40) - 1;
      fs::remove_all(directory());
      ASSERT_GT(rounds, 1);
    }
    ASSERT_EQ(train_until_folded(rounds), rounds);
    keep();
  }
  void TearDown() override {
    set_crash_hook(nullptr);
    stop_recording_unsynced();
    EmbeddingTableTest::TearDown();
  }
  void expect_folded() const {
    EXPECT_EQ(folds > 0, GetParam() == RowLayout::kSampleOrder) << "streams are to be folded";
  }
  // What start_again() goes back to.
  void keep() {
    kept_ = root_ / "kept";
    fs::remove_all(kept_);
    fs::copy(directory(), kept_, fs::copy_options::recursive);
  }
  void start_again() const {
    folds = 0;
    fs::remove_all(directory());
    fs::copy(kept_, directory(), fs::copy_options::recursive);
    record_unsynced({});  // Syncs are not passed on: they cost more than all the rest.
  }
  [[nodiscard]] EmbeddingStoreOptions options() const {
    return with_floor({.directory = directory(),
                       .dim = kDim,
                       .init = {.kind = RowInitKind::kZeros},
                       .layout = GetParam(),
                       .order_seed = kOrderSeed,
                       .ids = ids_,
                       .batch_rows = 64,
                       .io_threads = 0});
  }
  static Result<void> set(EmbeddingStore& store, std::span<const std::int64_t> ids,
                          std::int64_t step) {
    std::vector<float> rows;
    for (const std::int64_t id : ids) {
      rows.insert(rows.end(), kDim, value_of(id, step));
    }
    return store.update(ids, rows);
  }
  Result<void> set_in_order(EmbeddingStore& store, std::int64_t step) const {
    PLIMSOLL_TRY_VOID(store.begin_epoch(step));
    const SampleOrder order(kRows, kOrderSeed, step);
    std::vector<std::int64_t> ids;
    for (std::int64_t at = 0; at < kInOrder; ++at) {
      ids.push_back(ids_[static_cast<std::size_t>(order.at(at))]);
    }
    return set(store, ids, step);
  }
  Result<void> set_out_of_order(EmbeddingStore& store, std::int64_t step) const {
    std::vector<std::int64_t> ids;
    for (std::size_t begin = 0; begin < 3; ++begin) {
      ids.clear();
      for (std::size_t at = begin; at < ids_.size(); at += 3) {
        ids.push_back(ids_[at]);
      }
      PLIMSOLL_TRY_VOID(set(store, ids, step));
    }
    return {};
  }
  // Step 1, with up to `most` changes of every row; returns how many there were.
  int train_until_folded(int most) {
    folds = 0;
    auto store = open(options());
    set_in_order(store, 1).or_throw();
    set_out_of_order(store, 1).or_throw();
    int rounds = 0;
    for (; folds == 0 && rounds < most; ++rounds) {
      set_out_of_order(store, 1).or_throw();
    }
    store.commit(1).or_throw();
    return rounds;
  }
  // Gives every row the values of `step`, and goes on to the next epoch.
  Result<void> set_all(EmbeddingStore& store, std::int64_t step) const {
    PLIMSOLL_TRY_VOID(set_out_of_order(store, step));
    return set_in_order(store, step);
  }
  void expect_step(std::int64_t least, std::int64_t most) {
    ASSERT_TRUE(EmbeddingStore::verify(directory(), {}));
    auto store = open(options());
    const std::int64_t step = store.last_commit();
    ASSERT_TRUE(step >= least && step <= most) << step;
    for (const auto& [id, row] : all_rows(store)) {
      ASSERT_EQ(row.weights, std::vector<float>(kDim, value_of(id, step))) << "id " << id;
    }
  }
  static void expect_told(const Error& error, const Way& way) {
    EXPECT_EQ(error.code, ErrorCode::kIo) << error.to_string();
    EXPECT_EQ(error.os_errno, way.fault.os_errno);
    EXPECT_FALSE(is_retried(way)) << error.to_string();
  }

  // Runs `work` with the n-th call failing, for n = 1, 2, … until it is done without meeting it.
  // Of many reads, which change nothing, one in n / 8 is tried.
  void for_every_call(FileCall call, const std::function<void(const Way&)>& work) {
    for (Way way : ways_of(call)) {
      std::int64_t nth = 1;
      for (bool met = true; met && !HasFatalFailure();
           nth += call == FileCall::kRead ? 1 + nth / 8 : 1) {
        SCOPED_TRACE(std::string(way.name) + " at call " + std::to_string(nth));
        way.fault.nth = nth;
        work(way);
        met = calls_seen_ >= nth;
        ASSERT_LT(nth, 2000);
      }
      EXPECT_GT(nth, 2) << way.name << ": the work makes no such call";
    }
  }
  // Carries out one part of the work with the fault armed.
  template <class Work>
  auto with_fault(const Way& way, Work&& work) {
    const ScopedFileFault armed(way.fault);
    auto done = work();
    calls_seen_ = file_fault_calls();
    return done;
  }

  std::vector<std::int64_t> ids_ = [] {
    std::vector<std::int64_t> ids;
    for (std::int64_t i = 0; i < kRows; ++i) {
      ids.push_back(7 * i + 3);
    }
    return ids;
  }();
  fs::path kept_;
  std::int64_t calls_seen_{0};
};

TEST_P(EveryFaultTest, OfReadingWhileOpening) {
  for_every_call(FileCall::kRead, [&](const Way& way) {
    {
      const EmbeddingStoreOptions how = options();
      const auto store = with_fault(way, [&] { return EmbeddingStore::open(governor_, how); });
      if (!store) {
        expect_told(store.error(), way);
        EXPECT_NE(store.error().to_string().find(directory().string()), std::string::npos);
      }
    }
    expect_step(1, 1);
  });
}

TEST_P(EveryFaultTest, OfReadingWhileGathering) {
  for_every_call(FileCall::kRead, [&](const Way& way) {
    auto store = open(options());
    std::vector<float> out(ids_.size() * kDim);
    const auto gathered = with_fault(way, [&] { return store.gather(ids_, out); });
    if (!gathered) {
      expect_told(gathered.error(), way);
      store.gather(ids_, out).or_throw();  // A failed read poisons nothing.
    }
    for (std::size_t i = 0; i < out.size(); ++i) {
      ASSERT_EQ(out[i], value_of(ids_[i / kDim], 1));
    }
  });
}

TEST_P(EveryFaultTest, OfReadingWhileScanningAndVerifying) {
  for_every_call(FileCall::kRead, [&](const Way& way) {
    auto store = open(options());
    const auto done = with_fault(way, [&]() -> Result<void> {
      auto scanned = store.scan([](auto, auto, auto) { return Result<void>{}; });
      return scanned ? EmbeddingStore::verify(directory(), {}) : scanned;
    });
    if (!done) {
      expect_told(done.error(), way);
    }
    EXPECT_TRUE(EmbeddingStore::verify(directory(), {}));
  });
}

// A request that fails poisons the handle, or has changed nothing and can be made again.
TEST_P(EveryFaultTest, OfReadingWhileChanging) {
  for_every_call(FileCall::kRead, [&](const Way& way) {
    start_again();
    Result<void> done;
    {
      auto store = open(options());
      done = with_fault(way, [&] { return set_all(store, 2); });
      if (!done) {
        expect_told(done.error(), way);
        done = set_all(store, 2);
      }
      const auto committed = store.commit(2);
      EXPECT_EQ(done.has_value(), committed.has_value());
    }
    expect_step(done ? 2 : 1, done ? 2 : 1);
  });
  expect_folded();
}

class EveryFaultWhileCommittingTest : public EveryFaultTest {
 protected:
  void commit_meets(FileCall call) {
    for_every_call(call, [&](const Way& way) {
      start_again();
      Result<void> done;
      {
        auto store = open(options());
        done = with_fault(way, [&] {
          auto set = set_all(store, 2);
          return set ? store.commit(2) : set;
        });
        if (!done) {
          expect_told(done.error(), way);
          EXPECT_FALSE(store.commit(3)) << "a poisoned store went on";
        }
      }
      expect_step(done ? 2 : 1, 2);
    });
    expect_folded();
  }
};

TEST_P(EveryFaultWhileCommittingTest, OfWriting) {
  commit_meets(FileCall::kWrite);
}

TEST_P(EveryFaultWhileCommittingTest, OfSyncing) {
  commit_meets(FileCall::kSync);
}

// Of two commits the older is opened, so the newer one has to go before anything is written.
class EveryFaultWhileGoingBackTest : public EveryFaultTest {
 protected:
  void going_back_meets(FileCall call) {
    {
      auto store = open(options());
      set_all(store, 2).or_throw();
      store.commit(2).or_throw();
    }
    keep();
    for_every_call(call, [&](const Way& way) {
      start_again();
      Result<void> done;
      {
        auto how = options();
        how.at_step = 1;
        auto store = open(how);
        done = with_fault(way, [&]() -> Result<void> {
          // A row out of order, and a look at its bucket: reading it writes what is not on disk.
          PLIMSOLL_TRY_VOID(set(store, {&ids_[7], 1}, 3));
          std::vector<float> out(ids_.size() * kDim);
          PLIMSOLL_TRY_VOID(store.gather(ids_, out));
          PLIMSOLL_TRY_VOID(set_all(store, 3));
          return store.commit(3);
        });
        if (!done) {
          expect_told(done.error(), way);
          EXPECT_FALSE(store.commit(4)) << "a poisoned store went on";
        }
      }
      expect_step(done ? 3 : 1, 3);
    });
    expect_folded();
  }
};

TEST_P(EveryFaultWhileGoingBackTest, OfWriting) {
  going_back_meets(FileCall::kWrite);
}

TEST_P(EveryFaultWhileGoingBackTest, OfSyncing) {
  going_back_meets(FileCall::kSync);
}

// What fails last may be the superblock's own sync: then the new commit may be there, whole, in the
// older one's place.
TEST_P(EveryFaultTest, R07_OfCommittingLeavesBothCommits) {
  const std::vector<std::int64_t> before{2, 1};
  const std::vector<std::int64_t> after{3, 2};
  const auto steps = [&] { return EmbeddingStore::inspect(directory()).or_throw().commit_steps; };
  for (FileFault fault : {FileFault{.call = FileCall::kWrite, .os_errno = ENOSPC},
                          FileFault{.call = FileCall::kSync, .os_errno = EIO}}) {
    Result<void> done = fail(ErrorCode::kIo, "not tried yet");
    for (fault.nth = 1; !done && !HasFailure(); ++fault.nth) {
      SCOPED_TRACE("call " + std::to_string(fault.nth));
      start_again();
      {
        auto store = open(options());
        set_all(store, 2).or_throw();
        store.commit(2).or_throw();
        set_all(store, 3).or_throw();
        const ScopedFileFault armed(fault);
        done = store.commit(3);
      }
      EXPECT_TRUE(steps() == after || (!done && steps() == before)) << steps().front();
      if (!done) {
        strike(
            unsynced_changes(), [](std::size_t, std::int64_t) { return false; }, 512);
        EXPECT_EQ(steps(), before);
      }
      record_unsynced({});
      for (const std::int64_t step : steps()) {
        auto how = options();
        how.at_step = step;
        auto store = open(how);
        for (const auto& [id, row] : all_rows(store)) {
          ASSERT_EQ(row.weights, std::vector<float>(kDim, value_of(id, step))) << "id " << id;
        }
      }
    }
    EXPECT_GT(fault.nth, 4);
  }
}

TEST_P(EveryFaultTest, OfCreatingATableLeavesNoneOrAWholeOne) {
  for (const FileCall call :
       {FileCall::kWrite, FileCall::kSync, FileCall::kRename, FileCall::kMakeDirectory}) {
    for_every_call(call, [&](const Way& way) {
      fs::remove_all(directory());
      const EmbeddingStoreOptions how = options();
      const bool made = with_fault(way, [&] {
        const auto store = EmbeddingStore::open(governor_, how);
        if (!store) {
          expect_told(store.error(), way);
        }
        return store.has_value();
      });
      EXPECT_TRUE(made || !is_retried(way));
      auto store = open(options());
      EXPECT_EQ(store.last_commit(), -1);
      EXPECT_EQ(all_rows(store).size(), ids_.size());
    });
  }
}

// The kernel marks pages clean after a failed sync, so a second sync would succeed and mean
// nothing.
TEST_P(EveryFaultTest, OfSyncingOnceLosesTheCommitNotTheTable) {
  for (std::int64_t nth = 1; nth <= 3; ++nth) {
    SCOPED_TRACE(nth);
    start_again();
    {
      auto store = open(options());
      set_all(store, 2).or_throw();
      const Way way{"EIO", {.call = FileCall::kSync, .nth = nth, .os_errno = EIO}};
      const auto failed = with_fault(way, [&] { return store.commit(2); });
      ASSERT_FALSE(failed);
      for (std::int64_t step = 2; step < 5; ++step) {
        const auto again = store.commit(step);
        ASSERT_FALSE(again) << "a store whose sync failed went on";
        EXPECT_EQ(again.error().to_string(), failed.error().to_string());
      }
    }
    strike(
        unsynced_changes(), [](std::size_t, std::int64_t) { return false; }, 512);
    stop_recording_unsynced();
    expect_step(1, 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, EveryFaultTest, both_layouts(), layout_case);
INSTANTIATE_TEST_SUITE_P(Layouts, EveryFaultWhileCommittingTest, both_layouts(), layout_case);
INSTANTIATE_TEST_SUITE_P(Layouts, EveryFaultWhileGoingBackTest, both_layouts(), layout_case);

}  // namespace
}  // namespace plimsoll
