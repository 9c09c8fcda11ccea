// SPDX-License-Identifier: Apache-2.0
//
// Goal: when the disk fails, the caller is told, the handle stays poisoned, and the commits that
// were on disk stay readable.
#include <cerrno>
#include <numeric>
#include <string_view>

#include "base/philox.h"
#include "os/crash_point.h"
#include "os/file_faults.h"
#include "os/power_loss.h"
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;

class FaultsTest : public EmbeddingTableTest {
 protected:
  [[nodiscard]] EmbeddingStoreOptions options() const {
    return with_floor(
        {.directory = directory(), .dim = 64, .ids = ids_, .batch_rows = 128, .io_threads = 2});
  }
  void fill(EmbeddingStore& store, float value) const {
    const std::vector<float> rows(ids_.size() * 64, value);
    store.update(ids_, rows).or_throw();
  }
  // Commits 1 with all rows 1.0, breaks the next commit with `fault`, and expects 1 afterwards.
  void expect_old_commit_after(const FileFault& fault) {
    std::filesystem::remove_all(directory());
    {
      auto store = open(options());
      fill(store, 1.0F);
      store.commit(1).or_throw();
      Result<void> done;
      {
        const ScopedFileFault armed(fault);
        const std::vector<float> rows(ids_.size() * 64, 2.0F);
        done = store.update(ids_, rows);
        done = done ? store.commit(2) : done;
      }
      if (done) {
        EXPECT_EQ(store.last_commit(), 2);  // The fault came later than the commit's last call.
        return;
      }
      EXPECT_EQ(done.error().code, ErrorCode::kIo);
      std::vector<float> row(64);
      for (const auto& later : {store.gather(std::span(ids_).first(1), row), store.commit(3),
                                store.apply(std::span(ids_).first(1), row)}) {
        ASSERT_FALSE(later) << "a poisoned store went on";
        EXPECT_EQ(later.error().to_string(), done.error().to_string());
      }
    }
    ASSERT_TRUE(EmbeddingStore::verify(directory(), {}));
    auto store = open(options());
    const auto step = store.last_commit();
    EXPECT_TRUE(step == 1 || step == 2) << step;  // 2: only the word that it was durable was lost.
    for (const auto& [id, row] : all_rows(store)) {
      ASSERT_EQ(row.weights, std::vector<float>(64, static_cast<float>(step)));
    }
    fill(store, 4.0F);
    store.commit(4).or_throw();
  }
  std::vector<std::int64_t> ids_ = sparse_ids(900, 3);
};

TEST_F(FaultsTest, AFailedWriteLeavesTheOldCommit) {
  for (const std::int64_t nth : {1, 2, 5, 40, 100, 150, 151, 152, 153, 154, 155, 156, 157, 158}) {
    SCOPED_TRACE(nth);
    expect_old_commit_after({.call = FileCall::kWrite, .nth = nth, .os_errno = EIO});
  }
}

// Pages of a request are read as one batch; what the kernel says of one of them is tried again.
TEST_F(FaultsTest, ABatchOfReadsOfWhichSomeFailIsReadByOtherMeans) {
  {
    auto store = open(options());
    fill(store, 5.0F);
    store.commit(1).or_throw();
  }
  for (const bool keeps_failing : {false, true}) {
    for (const int os_errno : {EIO, EINTR, 0}) {
      SCOPED_TRACE(std::to_string(os_errno) + (keeps_failing ? " each" : " once"));
      auto store = open(options());
      const ScopedFileFault armed({.call = FileCall::kAioRead,
                                   .nth = 2,
                                   .os_errno = os_errno,
                                   .short_bytes = 512,
                                   .keeps_failing = keeps_failing});
      EXPECT_EQ(gather(store, ids_), std::vector<float>(ids_.size() * 64, 5.0F));
      const auto told = file_fault_calls();
      if (told == 0) {
        GTEST_SKIP() << "no batches here: not direct, or without AIO";
      }
      EXPECT_GE(told, 2);
    }
  }
}

// So are pages, and chunks of rows in sample order, that are written as one batch.
TEST_F(FaultsTest, ABatchOfWritesOfWhichSomeFailIsWrittenByOtherMeans) {
  std::int64_t told = 0;
  for (const RowLayout layout : {RowLayout::kAnyOrder, RowLayout::kSampleOrder}) {
    for (const bool keeps_failing : {false, true}) {
      for (const int os_errno : {ENOSPC, EINTR, 0}) {
        SCOPED_TRACE(std::to_string(static_cast<int>(layout)) + " " + std::to_string(os_errno) +
                     (keeps_failing ? " each" : " once"));
        std::filesystem::remove_all(directory());
        auto how = with_floor({.directory = directory(),
                               .dim = 64,
                               .init = {.kind = RowInitKind::kZeros},
                               .layout = layout,
                               .rows = 4'000,
                               .batch_rows = 256,
                               .io_threads = 2});
        std::vector<std::int64_t> ids(4'000);
        std::iota(ids.begin(), ids.end(), 0);
        std::vector<float> expected(ids.size() * 64, 0.0F);
        {
          auto store = open(how);
          const ScopedFileFault armed({.call = FileCall::kAioWrite,
                                       .nth = 2,
                                       .os_errno = os_errno,
                                       .short_bytes = 4096,
                                       .keeps_failing = keeps_failing});
          // An epoch; or a part of the rows, so often that free blocks have no neighbours.
          const bool ordered = layout == RowLayout::kSampleOrder;
          for (int round = 1; round <= (ordered ? 1 : 12); ++round) {
            std::vector<std::int64_t> some;
            for (const std::int64_t id : ids) {
              if (ordered || mix64(static_cast<std::uint64_t>(id * 16 + round)) % 8 == 0) {
                some.push_back(id);
                std::fill_n(expected.begin() + id * 64, 64, static_cast<float>(round));
              }
            }
            const std::vector<float> rows(some.size() * 64, static_cast<float>(round));
            store.update(some, rows).or_throw();
            store.commit(round).or_throw();
          }
          told = file_fault_calls();
        }
        if (told == 0) {
          GTEST_SKIP() << "no batches here: not direct, or without AIO";
        }
        EXPECT_GE(told, 2);
        ASSERT_TRUE(EmbeddingStore::verify(directory(), {}));
        auto store = open(how);
        EXPECT_EQ(gather(store, ids), expected);
      }
    }
  }
}

TEST_F(FaultsTest, AFullDiskLeavesTheOldCommitAndIsNamed) {
  for (const std::int64_t nth : {1, 30, 120}) {
    SCOPED_TRACE(nth);
    expect_old_commit_after(
        {.call = FileCall::kWrite, .nth = nth, .os_errno = ENOSPC, .keeps_failing = true});
  }
}

// A reservation would make the commit wait for the file system's journal. Method: the ledger of
// what a power failure may undo, looked at when a commit's pages are sealed and nothing is synced
// yet.
TEST_F(FaultsTest, ACommitOfASmallTableReservesNothingInItsFile) {
  static std::int64_t commits;
  static std::int64_t reserved;
  commits = reserved = 0;
  EmbeddingStoreOptions small = options();
  small.ids = std::span(ids_).first(40);
  auto store = open(small);
  record_unsynced({});
  set_crash_hook([](const char* name, bool) noexcept {
    if (name != std::string_view("store.commit.pages")) {
      return;
    }
    ++commits;
    for (const UnsyncedChange& change : unsynced_changes()) {
      reserved += change.kind == UnsyncedChange::Kind::kResize ? 1 : 0;
    }
  });
  for (std::int64_t step = 1; step <= 3; ++step) {  // Once through all blocks of the file.
    const std::vector<float> rows(small.ids.size() * 64, static_cast<float>(step));
    store.update(small.ids, rows).or_throw();
    store.commit(step).or_throw();
  }
  set_crash_hook(nullptr);
  stop_recording_unsynced();
  EXPECT_EQ(commits, 3);
  EXPECT_EQ(reserved, 0);
}

// As a process leaves it that is killed between writing a superblock and syncing it: the next one
// finds the commit in the kernel's cache, and overwrites the one before it.
TEST_F(FaultsTest, ACommitThatIsOpenedIsDurableFromThereOn) {
  for (const RowLayout layout : {RowLayout::kAnyOrder, RowLayout::kSampleOrder}) {
    std::filesystem::remove_all(directory());
    auto how = options();
    how.layout = layout;
    how = with_floor(how);
    record_unsynced({});
    {
      auto store = open(how);
      fill(store, 1.0F);
      store.commit(1).or_throw();
      fill(store, 2.0F);
      const ScopedFileFault superblock_only({.call = FileCall::kSync, .nth = 3, .os_errno = 0});
      store.commit(2).or_throw();
      EXPECT_EQ(file_fault_calls(), 3);
    }
    EXPECT_FALSE(unsynced_changes().empty());
    {
      auto store = open(how);
      EXPECT_EQ(store.last_commit(), 2);
    }
    strike(
        unsynced_changes(), [](std::size_t, std::int64_t) { return false; }, 512);
    stop_recording_unsynced();
    auto store = open(how);
    EXPECT_EQ(store.last_commit(), 2);
    for (const auto& [id, row] : all_rows(store)) {
      ASSERT_EQ(row.weights, std::vector<float>(64, 2.0F));
    }
  }
}

TEST_F(FaultsTest, AFailedSyncLeavesTheOldCommit) {
  for (const std::int64_t nth : {1, 2, 3}) {
    SCOPED_TRACE(nth);
    expect_old_commit_after({.call = FileCall::kSync, .nth = nth, .os_errno = EIO});
  }
}

TEST_F(FaultsTest, AShortWriteIsFinished) {
  const ScopedFileFault armed(
      {.call = FileCall::kWrite, .nth = 3, .os_errno = 0, .short_bytes = 512});
  auto store = open(options());
  fill(store, 1.0F);
  store.commit(1).or_throw();
}

TEST_F(FaultsTest, AFailedReadIsReportedAndCanBeTriedAgain) {
  {
    auto store = open(options());
    fill(store, 1.0F);
    store.commit(1).or_throw();
  }
  auto store = open(options());
  std::vector<float> row(64);
  {
    const ScopedFileFault armed(
        {.call = FileCall::kRead, .nth = 1, .os_errno = EIO, .keeps_failing = true});
    const auto failed = store.gather(std::span(ids_).first(1), row);
    ASSERT_FALSE(failed);
    EXPECT_EQ(failed.error().code, ErrorCode::kIo);
    EXPECT_NE(failed.error().to_string().find(directory().string()), std::string::npos);
  }
  store.gather(std::span(ids_).first(1), row).or_throw();
  EXPECT_EQ(row, std::vector<float>(64, 1.0F));
}

TEST_F(FaultsTest, CreatingOnADiskThatFailsLeavesNoTable) {
  for (std::int64_t nth = 1; nth < 12; ++nth) {
    SCOPED_TRACE(nth);
    {
      const ScopedFileFault armed(
          {.call = FileCall::kWrite, .nth = nth, .os_errno = ENOSPC, .keeps_failing = true});
      auto store = EmbeddingStore::open(governor_, options());
      if (store) {
        break;
      }
      EXPECT_EQ(store.error().code, ErrorCode::kIo);
    }
    EXPECT_FALSE(std::filesystem::exists(directory() / "table.json"));
    EmbeddingOracle oracle(64, {}, {});
    auto store = open(options());
    expect_all_rows(store, oracle, ids_);
    store = EmbeddingStore(std::move(store));
    std::filesystem::remove_all(directory());
  }
}

}  // namespace
}  // namespace plimsoll
