// SPDX-License-Identifier: Apache-2.0
//
// Goal: compaction keeps every row, slot and count of steps, makes the file shrink, and leaves the
// old or the new table wherever the process is killed.
#include <cerrno>
#include <csignal>
#include <fstream>
#include <iterator>

#include <sys/wait.h>

#include "os/crash_point.h"
#include "os/file_faults.h"
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;
namespace fs = std::filesystem;

class CompactTest : public EmbeddingTableTest {
 protected:
  void SetUp() override {
    EmbeddingTableTest::SetUp();
    options_ = with_floor({.directory = directory(), .dim = 64, .ids = ids_, .batch_rows = 128});
    auto store = open(options_);
    std::mt19937_64 random(7);
    for (std::int64_t step = 1; step <= 6; ++step) {
      const auto some = draw(hot_, 120, random);
      const auto grads = random_floats(some.size() * 64, random);
      store.apply(some, grads).or_throw();
      oracle_.apply(some, grads);
      store.commit(step).or_throw();
    }
  }
  Result<void> compact() { return EmbeddingStore::compact(governor_, directory(), -1, {}); }
  void expect_same_table() {
    ASSERT_TRUE(EmbeddingStore::verify(directory(), {}));
    auto store = open(options_);
    EXPECT_EQ(store.last_commit(), 6);
    expect_all_rows(store, oracle_, ids_);
  }
  [[nodiscard]] std::uintmax_t rows_bytes() const {
    return fs::file_size(directory() / "rows.dat");
  }
  std::vector<std::int64_t> ids_ = sparse_ids(900, 3);
  std::vector<std::int64_t> hot_{ids_.begin(), ids_.begin() + 300};
  EmbeddingStoreOptions options_;
  EmbeddingOracle oracle_{64, {}, {}};
};

TEST_F(CompactTest, KeepsEveryRowAndShrinksToWhatIsLive) {
  const auto before = rows_bytes();
  std::int64_t reported = 0;
  const auto progress = [&](std::int64_t done, std::int64_t total) {
    EXPECT_GE(done, reported);
    EXPECT_LE(done, total);
    reported = done;
    return true;
  };
  ASSERT_TRUE(EmbeddingStore::compact(governor_, directory(), -1, progress));
  EXPECT_GT(reported, 0);
  EXPECT_LT(rows_bytes(), before / 2) << "of " << before;
  EXPECT_FALSE(fs::exists(directory().string() + ".compacting"));
  expect_same_table();
  auto store = open(options_);
  store.commit(7).or_throw();
}

TEST_F(CompactTest, KeepsTheCommitAskedFor) {
  EmbeddingOracle oracle(64, {}, {});
  std::mt19937_64 random(7);
  for (int step = 1; step <= 5; ++step) {
    const auto some = draw(hot_, 120, random);
    oracle.apply(some, random_floats(some.size() * 64, random));
  }
  ASSERT_TRUE(EmbeddingStore::compact(governor_, directory(), 5, {}));
  auto store = open(options_);
  EXPECT_EQ(store.last_commit(), 5);
  expect_all_rows(store, oracle, ids_);
}

TEST_F(CompactTest, ThatIsCancelledLeavesTheTableAlone) {
  const auto before = rows_bytes();
  EXPECT_FALSE(EmbeddingStore::compact(governor_, directory(), -1,
                                       [](std::int64_t, std::int64_t) { return false; }));
  EXPECT_EQ(rows_bytes(), before);
  EXPECT_FALSE(fs::exists(directory().string() + ".compacting"));
  expect_same_table();
}

TEST_F(CompactTest, AVerificationThatIsCancelledDoesNotCallTheTableSound) {
  EXPECT_FALSE(
      EmbeddingStore::verify(directory(), [](std::int64_t, std::int64_t) { return false; }));
}

TEST_F(CompactTest, OnAFullDiskLeavesTheTableAlone) {
  {
    const ScopedFileFault full(
        {.call = FileCall::kWrite, .nth = 9, .os_errno = ENOSPC, .keeps_failing = true});
    const auto failed = compact();
    ASSERT_FALSE(failed);
    EXPECT_EQ(failed.error().os_errno, ENOSPC);
  }
  expect_same_table();
}

// Of the syncs of the directory that holds both names, the last comes after the exchange.
TEST_F(CompactTest, R06_AFailedSyncAfterTheExchangeDeletesNothing) {
  std::int64_t syncs = 0;
  {
    const ScopedFileFault counting({.call = FileCall::kSync, .nth = 1 << 20});
    ASSERT_TRUE(compact());
    syncs = file_fault_calls();
  }
  {
    const ScopedFileFault fault({.call = FileCall::kSync, .nth = syncs, .os_errno = EIO});
    const auto failed = compact();
    ASSERT_FALSE(failed);
    EXPECT_EQ(failed.error().os_errno, EIO);
  }
  for (const fs::path& table : {directory(), fs::path(directory().string() + ".compacting")}) {
    EXPECT_TRUE(EmbeddingStore::verify(table, {})) << table;
    EXPECT_EQ(EmbeddingStore::inspect(table).or_throw().commit_steps.at(0), 6);
  }
  expect_same_table();
  ASSERT_TRUE(compact());
  EXPECT_FALSE(fs::exists(directory().string() + ".compacting"));
}

TEST_F(CompactTest, R06_AnExchangeThatFailsLeavesTheTableAlone) {
  const ScopedFileFault fault({.call = FileCall::kRename, .nth = 2, .os_errno = EINVAL});
  const auto failed = compact();  // The first rename is that of the copy's table.json.
  ASSERT_FALSE(failed);
  EXPECT_NE(failed.error().to_string().find("cannot exchange two folders at once"),
            std::string::npos);
  EXPECT_FALSE(fs::exists(directory().string() + ".compacting"));
  expect_same_table();
}

TEST_F(CompactTest, R06_ALinkedTableIsCompactedWhereItIs) {
  const fs::path disk = root_ / "disk";
  fs::create_directories(disk);
  fs::rename(directory(), disk / "rows");
  fs::create_directory_symlink(disk / "rows", directory());
  const auto before = fs::file_size(disk / "rows" / "rows.dat");
  ASSERT_TRUE(compact());
  EXPECT_TRUE(fs::is_symlink(directory()));
  EXPECT_LT(fs::file_size(disk / "rows" / "rows.dat"), before / 2);
  EXPECT_EQ(std::distance(fs::directory_iterator(disk), fs::directory_iterator()), 1);
  expect_same_table();
}

TEST_F(CompactTest, R43_WhatIsNoPartOfATableIsNotDeletedWithIt) {
  std::ofstream(directory() / "notes.txt") << "mine";
  const auto refused = compact();
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().to_string().find("holds \"notes.txt\", which is no part of a table"),
            std::string::npos);
  EXPECT_TRUE(fs::exists(directory() / "notes.txt"));
  fs::remove(directory() / "notes.txt");
  fs::create_directory(directory().string() + ".compacting");
  std::ofstream(directory().string() + ".compacting/thesis") << "mine";
  EXPECT_FALSE(compact());
  EXPECT_TRUE(fs::exists(directory().string() + ".compacting/thesis"));
}

TEST_F(CompactTest, KilledAnywhereLeavesTheOldOrTheNewTable) {
  governor_.close();
  int killed = 0;
  for (int passage = 1;; passage += 1 + passage / 16) {
    SCOPED_TRACE(passage);
    const pid_t child = ::fork();
    if (child == 0) {
      ::setenv("PLIMSOLL_CRASH", ("*:" + std::to_string(passage)).c_str(), 1);
      reload_crash_points();
      governor_ = Governor::create({.memory_limit = "1GiB"}).or_throw();
      ::_exit(compact() ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
    governor_ = Governor::create({.memory_limit = "1GiB"}).or_throw();
    expect_same_table();
    if (WIFSIGNALED(status)) {
      EXPECT_TRUE(compact()) << "the next compaction must clear up after the one that was killed";
    }
    governor_.close();
    ASSERT_FALSE(HasFailure());
    if (!WIFSIGNALED(status)) {
      break;
    }
    ++killed;
  }
  EXPECT_GT(killed, 10);
}

}  // namespace
}  // namespace plimsoll
