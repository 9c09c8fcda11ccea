// SPDX-License-Identifier: Apache-2.0
//
// Goal: one handle at a time changes a table, whichever process it is of; readers change nothing;
// and a child that was forked after a table was opened does not use its handle. Both layouts.
// Method: children are forked before the table is opened where they stand for other processes, and
// after it where they stand for workers; a child tells what it saw by its exit status or a pipe.
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <thread>
#include <tuple>

#include <fcntl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <fmt/format.h>

#include "os/crash_point.h"
#include "os/file_faults.h"
#include "os/folder_lock.h"
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;
namespace fs = std::filesystem;

constexpr std::int64_t kRows = 2000;
constexpr std::int64_t kDim = 16;

class Processes : public EmbeddingTableTest, public ::testing::WithParamInterface<RowLayout> {
 protected:
  [[nodiscard]] EmbeddingStoreOptions options(bool pinned = false) const {
    return {.directory = directory(),
            .dim = kDim,
            .init = {.kind = RowInitKind::kZeros},
            .layout = GetParam(),
            .rows = pinned ? 0 : kRows,
            .ids = {},
            .pinned = pinned,
            .io_threads = 1};
  }
  static void set(EmbeddingStore& store, std::int64_t from, std::int64_t to, float value) {
    std::vector<std::int64_t> ids(static_cast<std::size_t>(to - from));
    std::iota(ids.begin(), ids.end(), from);
    const std::vector<float> rows(ids.size() * kDim, value);
    store.update(ids, rows).or_throw();
  }
  static float get(EmbeddingStore& store, std::int64_t id) {
    return gather(store, std::span(&id, 1))[0];
  }
  [[nodiscard]] std::string refusal(const EmbeddingStoreOptions& how) const {
    const auto refused = EmbeddingStore::open(governor_, how);
    EXPECT_FALSE(refused);
    EXPECT_TRUE(refused || refused.error().code == ErrorCode::kInvalidArgument);
    return refused ? "" : refused.error().to_string();
  }
  [[nodiscard]] std::string held_by(const std::string& who) const {
    return fmt::format(
        "{}: {} has this table open to change it: close it there, or open it to be read (pinned)",
        directory().string(), who);
  }
  // What a process forked now answers: 0 … 255.
  static int in_child(const std::function<int()>& asked) {
    const ::pid_t child = ::fork();
    if (child == 0) {
      ::alarm(60);  // Rather than a test that hangs.
      int answer = 99;
      try {
        answer = asked();
      } catch (const std::exception& problem) {
        fmt::print(stderr, "child: {}\n", problem.what());
      }
      ::_exit(answer);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  // Another process, with a governor of its own, that has the table open until it is killed.
  ::pid_t trainer_elsewhere() const {
    std::array<int, 2> ready{};
    EXPECT_EQ(::pipe(ready.data()), 0);
    const ::pid_t child = ::fork();
    if (child == 0) {
      auto governor = Governor::create({.memory_limit = "1GiB"});
      auto store = EmbeddingStore::open(*governor, options());
      set(*store, 0, 100, 1);
      store->commit(1).or_throw();
      std::ignore = ::write(ready[1], "y", 1);
      ::pause();
      ::_exit(0);
    }
    char there = 0;
    EXPECT_EQ(::read(ready[0], &there, 1), 1);
    ::close(ready[0]);
    ::close(ready[1]);
    return child;
  }
  static void kill_it(::pid_t child) {
    ASSERT_EQ(::kill(child, SIGKILL), 0);
    ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  }
  // What every file of the table is like: any change of it shows in one of these.
  [[nodiscard]] std::map<std::string, std::array<std::int64_t, 4>> footprint() const {
    std::map<std::string, std::array<std::int64_t, 4>> files;
    const auto note = [&](const fs::path& path) {
      struct stat facts {};
      EXPECT_EQ(::stat(path.c_str(), &facts), 0);
      files[path.string()] = {static_cast<std::int64_t>(facts.st_ino), facts.st_size,
                              facts.st_mtim.tv_sec, facts.st_mtim.tv_nsec};
    };
    note(directory());
    for (const auto& entry : fs::directory_iterator(directory())) {
      note(entry.path());
    }
    return files;
  }
};
INSTANTIATE_TEST_SUITE_P(Layouts, Processes, both_layouts(), layout_case);

// ---- One at a time ------------------------------------------------------------------------------

TEST_P(Processes, R01ASecondProcessIsRefusedAndTheFirstGoesOn) {
  const ::pid_t first = trainer_elsewhere();
  EXPECT_EQ(refusal(options()), held_by(fmt::format("process {}", first)));
  EXPECT_FALSE(fs::exists(root_ / "table.compacting"));
  kill_it(first);  // However it ends, its lock ends with it.
  EmbeddingStore store = open(options());
  EXPECT_EQ(store.last_commit(), 1);
  EXPECT_EQ(get(store, 99), 1);
}

TEST_P(Processes, R01OfManyThatMakeATableAtOnceOneDoes) {
  constexpr int kOthers = 6;
  std::array<int, 2> start{};
  ASSERT_EQ(::pipe(start.data()), 0);
  std::vector<::pid_t> children;
  for (int i = 0; i < kOthers; ++i) {
    children.push_back(::fork());
    if (children.back() == 0) {
      ::close(start[1]);
      char go = 0;
      std::ignore = ::read(start[0], &go, 1);
      const auto governor = Governor::create({.memory_limit = "1GiB"});
      auto store = EmbeddingStore::open(*governor, options());
      if (!store) {
        ::_exit(store.error().code == ErrorCode::kInvalidArgument ? 1 : 2);
      }
      set(*store, 0, kRows, static_cast<float>(i + 1));
      const bool done = store->commit(i + 1).has_value();
      ::pause();  // Holds it until all have tried.
      ::_exit(done ? 0 : 3);
    }
  }
  ::close(start[0]);
  ::close(start[1]);  // Go.
  int refused = 0;
  for (int left = kOthers - 1; left > 0; --left) {
    int status = 0;
    const ::pid_t one = ::waitpid(-1, &status, 0);
    EXPECT_EQ(WEXITSTATUS(status), 1);
    refused += WEXITSTATUS(status) == 1 ? 1 : 0;
    std::erase(children, one);
  }
  EXPECT_EQ(refused, kOthers - 1);
  ASSERT_EQ(children.size(), 1U);
  for (std::vector<std::int64_t> steps; steps.empty(); std::this_thread::yield()) {
    const auto info = EmbeddingStore::inspect(directory());
    steps = info ? info->commit_steps : steps;
  }
  kill_it(children[0]);
  EmbeddingStore store = open(options());
  EXPECT_EQ(get(store, kRows - 1), static_cast<float>(store.last_commit()));
  EXPECT_TRUE(EmbeddingStore::verify(directory(), {}));
}

TEST_P(Processes, R53ASecondHandleOfTheSameProcessIsRefusedUntilTheFirstIsGone) {
  std::optional<EmbeddingStore> first(open(options()));
  set(*first, 0, 500, 1);
  first->commit(1).or_throw();
  const std::string refused = held_by(fmt::format("this process ({})", ::getpid()));
  EXPECT_EQ(refusal(options()), refused);
  EmbeddingStore moved = std::move(*first);
  first.reset();
  EXPECT_EQ(refusal(options()), refused);
  set(moved, 500, kRows, 2);
  moved.commit(2).or_throw();
  { const EmbeddingStore gone = std::move(moved); }
  EmbeddingStore again = open(options());
  EXPECT_EQ(get(again, 0), 1);
  EXPECT_EQ(get(again, kRows - 1), 2);
  EmbeddingStoreOptions other = options();
  other.directory = root_ / "other";
  again = open(other);  // Another table in the same variable: the first is closed at once.
  EXPECT_TRUE(EmbeddingStore::open(governor_, options()));
}

TEST_P(Processes, R01WhoIsRefusedLeavesNothingBehind) {
  EmbeddingStoreOptions how = options();
  how.directory = root_ / "new" / "table";
  how.store_bytes = 4096;
  EXPECT_FALSE(EmbeddingStore::open(governor_, how));
  EXPECT_FALSE(fs::exists(how.directory));
  how.store_bytes = 0;
  how.dim = 0;
  EXPECT_FALSE(EmbeddingStore::open(governor_, how));
  EXPECT_FALSE(fs::exists(how.directory));
}

TEST_P(Processes, R01AFileSystemWithoutLocksIsNamed) {
  const ScopedFileFault none({.call = FileCall::kLock, .os_errno = ENOLCK, .keeps_failing = true});
  EXPECT_NE(refusal(options()).find("its file system has no locks"), std::string::npos);
  EXPECT_FALSE(fs::exists(directory()));
}

TEST_P(Processes, R02CompactingBesideATrainerIsRefused) {
  {
    EmbeddingStore store = open(options());
    set(store, 0, kRows, 1);
    store.commit(1).or_throw();
    const auto refused = EmbeddingStore::compact(governor_, directory(), -1, {});
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().to_string(), held_by(fmt::format("this process ({})", ::getpid())));
    set(store, 0, kRows, 2);
    store.commit(2).or_throw();
    EXPECT_EQ(EmbeddingStore::inspect(directory()).or_throw().commit_steps,
              (std::vector<std::int64_t>{2, 1}));
  }
  if (GetParam() == RowLayout::kAnyOrder) {
    EmbeddingStore::compact(governor_, directory(), -1, {}).or_throw();
    EXPECT_EQ(EmbeddingStore::inspect(directory()).or_throw().commit_steps,
              std::vector<std::int64_t>{2});
  }
  EmbeddingStore store = open(options());
  EXPECT_EQ(get(store, 7), 2);
}

TEST_P(Processes, R02NobodyTrainsInATableThatIsBeingCompacted) {
  if (GetParam() == RowLayout::kSampleOrder) {
    GTEST_SKIP() << "rows in sample order are not compacted";
  }
  {
    EmbeddingStore store = open(options());
    set(store, 0, kRows, 1);
    store.commit(1).or_throw();
  }
  int asked = 0;
  EmbeddingStore::compact(governor_, directory(), -1, [&](std::int64_t, std::int64_t) {
    asked += EmbeddingStore::open(governor_, options()) ? 100 : 1;
    return true;
  }).or_throw();
  EXPECT_GE(asked, 1);
  EXPECT_LT(asked, 100);
  EXPECT_FALSE(FolderLock::held(directory()));
  EmbeddingStore store = open(options());
  EXPECT_EQ(get(store, 7), 1);
}

TEST_P(Processes, R02CompactingNothingMakesNothing) {
  const auto refused = EmbeddingStore::compact(governor_, root_ / "none", -1, {});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kNotFound);
  EXPECT_FALSE(fs::exists(root_ / "none"));
}

// ---- Forked children ----------------------------------------------------------------------------

TEST_P(Processes, R03AForkedChildIsRefusedEveryCallAndHarmsNothing) {
  EmbeddingStoreOptions how = with_floor(options());  // Reading evicts.
  EmbeddingStore store = open(how);
  set(store, 0, kRows, 1);
  store.commit(1).or_throw();
  set(store, 0, kRows / 2, 2);  // Dirty pages, which a child must not write.
  const std::string wanted = fmt::format(
      "{}: gather() in a process that was forked after it was opened: open it in this "
      "process, to be read (pinned)",
      directory().string());
  EXPECT_EQ(in_child([&] {
              const std::int64_t id = 3;
              std::vector<float> row(kDim);
              const std::span one(&id, 1);
              const RowVisit visit = [](auto, auto, auto) { return Result<void>{}; };
              const auto said = store.gather(one, row);
              int refused = !said && said.error().to_string() == wanted ? 1 : 0;
              for (const Result<void>& done :
                   {store.apply(one, row), store.update(one, row), store.commit(9),
                    store.begin_epoch(1), store.scan(visit), store.visit_rows(visit),
                    store.erase(one), store.set_optimizer({})}) {
                refused += !done && done.error().code == ErrorCode::kInvalidArgument ? 1 : 0;
              }
              refused += store.insert(one) ? 0 : 1;
              store.prefetch(one);
              refused += store.stats().requests == 0 && store.shrink(1 << 20) == 0 ? 1 : 0;
              const EmbeddingStore gone = std::move(store);  // Its destructor touches nothing.
              return refused;
            }),
            11);
  set(store, kRows / 2, kRows, 3);
  store.commit(2).or_throw();
  EXPECT_EQ(get(store, 0), 2);
  EXPECT_EQ(get(store, kRows - 1), 3);
  EXPECT_TRUE(EmbeddingStore::verify(directory(), {}));
}

TEST_P(Processes, R03AWorkerReadsAPinnedCommitOfItsOwn) {
  const bool beside = GetParam() == RowLayout::kAnyOrder;  // Else: at rest.
  std::optional<EmbeddingStore> store(open(options()));
  set(*store, 0, kRows, 1);
  store->commit(1).or_throw();
  if (!beside) {
    store.reset();
  } else {
    set(*store, 0, kRows, 2);
  }
  std::array<int, 2> ready{};
  std::array<int, 2> go_on{};
  ASSERT_EQ(::pipe(ready.data()), 0);
  ASSERT_EQ(::pipe(go_on.data()), 0);
  const ::pid_t worker = ::fork();
  if (worker == 0) {
    ::alarm(60);
    auto governor = Governor::create({.memory_limit = "1GiB"}).or_throw();
    auto reader = EmbeddingStore::open(governor, options(true)).or_throw();
    bool right = reader.last_commit() == 1 && get(reader, 5) == 1;
    std::ignore = ::write(ready[1], "y", 1);
    char on = 0;
    std::ignore = ::read(go_on[0], &on, 1);
    for (std::int64_t id = 0; id < kRows; id += 7) {
      right = right && get(reader, id) == 1;
    }
    ::_exit(right ? 7 : 8);
  }
  char there = 0;
  ASSERT_EQ(::read(ready[0], &there, 1), 1);
  for (int step = 2; beside && step < 6; ++step) {
    set(*store, 0, 200, static_cast<float>(step));
    store->commit(step).or_throw();
  }
  ASSERT_EQ(::write(go_on[1], "y", 1), 1);
  int status = 0;
  ASSERT_EQ(::waitpid(worker, &status, 0), worker);
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

TEST_P(Processes, R03AReadersHandleIsItsProcessesOwnToo) {
  {
    EmbeddingStore store = open(options());
    set(store, 0, kRows, 1);
    store.commit(1).or_throw();
  }
  EmbeddingStore reader = open(options(true));
  EXPECT_EQ(in_child([&] {
              const std::int64_t id = 3;
              std::vector<float> row(kDim);
              const auto said = reader.gather({&id, 1}, row);
              return !said && said.error().code == ErrorCode::kInvalidArgument ? 7 : 8;
            }),
            7);
  EXPECT_EQ(get(reader, 3), 1);
}

// A worker that outlives its trainer must not keep the table locked.
TEST_P(Processes, R01AWorkerThatOutlivesItsTrainerDoesNotHoldTheTable) {
  std::optional<EmbeddingStore> store(open(options()));
  std::array<int, 2> hold{};
  ASSERT_EQ(::pipe(hold.data()), 0);
  const ::pid_t worker = ::fork();
  if (worker == 0) {
    ::close(hold[1]);
    char end = 0;
    std::ignore = ::read(hold[0], &end, 1);
    ::_exit(0);
  }
  EXPECT_TRUE(FolderLock::held(directory()));
  store.reset();
  EXPECT_TRUE(EmbeddingStore::open(governor_, options()));
  ::close(hold[1]);
  ::close(hold[0]);
  ASSERT_EQ(::waitpid(worker, nullptr, 0), worker);
}

// ---- Who reads writes nothing -------------------------------------------------------------------

TEST_P(Processes, R04AReaderOpensNothingToWrite) {
  {
    EmbeddingStore store = open(options());
    set(store, 0, kRows, 1);
    store.commit(1).or_throw();
    set(store, 0, kRows, 2);
    store.commit(2).or_throw();
  }
  const auto before = footprint();
  const ScopedFileFault read_only(
      {.call = FileCall::kOpenToWrite, .os_errno = EROFS, .keeps_failing = true});
  EXPECT_FALSE(EmbeddingStore::open(governor_, options()));
  const std::int64_t calls = file_fault_calls();
  EXPECT_GE(calls, 1);
  {
    EmbeddingStore reader = open(options(true));
    EXPECT_EQ(get(reader, 3), 2);
    EXPECT_EQ(all_rows(reader).size(), static_cast<std::size_t>(kRows));
    std::size_t rows = 0;
    reader
        .visit_rows([&](auto ids, auto, auto) {
          rows += ids.size();
          return Result<void>{};
        })
        .or_throw();
    EXPECT_EQ(rows, static_cast<std::size_t>(kRows));
    EmbeddingStoreOptions older = options(true);
    older.at_step = 1;
    EmbeddingStore other = open(older);
    EXPECT_EQ(get(other, 3), 1);
  }
  EXPECT_EQ(EmbeddingStore::inspect(directory()).or_throw().commit_steps.size(), 2U);
  EXPECT_TRUE(EmbeddingStore::verify(directory(), {}));
  EXPECT_TRUE(EmbeddingStore::plan(options()));
  EXPECT_EQ(file_fault_calls(), calls);
  EXPECT_EQ(footprint(), before);
}

TEST_P(Processes, R04ATableOnAReadOnlyMountIsRead) {
  {
    EmbeddingStore store = open(options());
    set(store, 0, kRows, 1);
    store.commit(1).or_throw();
  }
  const int answer = in_child([&] {
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount(directory().c_str(), directory().c_str(), nullptr, MS_BIND, nullptr) != 0 ||
        ::mount(nullptr, directory().c_str(), nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY, nullptr) !=
            0) {
      return 50;
    }
    auto governor = Governor::create({.memory_limit = "1GiB"}).or_throw();
    const auto refused = EmbeddingStore::open(governor, options());
    auto reader = EmbeddingStore::open(governor, options(true)).or_throw();
    return !refused && refused.error().os_errno == EROFS && get(reader, 3) == 1 &&
                   EmbeddingStore::verify(directory(), {})
               ? 7
               : 8;
  });
  if (answer == 50) {
    GTEST_SKIP() << "no mounts are allowed here";
  }
  EXPECT_EQ(answer, 7);
}

// The reader looks at the commits, training replaces both, and then the reader goes on.
TEST_P(Processes, R04ACommitMadeWhileAReaderOpensStays) {
  {
    EmbeddingStore store = open(options());
    for (int step = 1; step <= 2; ++step) {
      set(store, 0, kRows, static_cast<float>(step));
      store.commit(step).or_throw();
    }
  }
  EmbeddingStore reader = open(options(true));
  {
    EmbeddingStore store = open(options());
    for (int step = 3; step <= 4; ++step) {
      set(store, 0, kRows, static_cast<float>(step));
      store.commit(step).or_throw();
    }
  }
  const auto before = footprint();
  const std::int64_t id = 3;
  std::vector<float> row(kDim);
  const auto read = reader.gather({&id, 1}, row);
  if (GetParam() == RowLayout::kAnyOrder) {
    EXPECT_TRUE(read);  // It pinned its commit.
    EXPECT_EQ(row[0], 2);
  } else {
    ASSERT_FALSE(read);
    EXPECT_EQ(read.error().code, ErrorCode::kNotFound);
    EXPECT_NE(read.error().to_string().find("commit 2 is gone"), std::string::npos);
  }
  EXPECT_EQ(EmbeddingStore::inspect(directory()).or_throw().commit_steps,
            (std::vector<std::int64_t>{4, 3}));
  EXPECT_EQ(footprint(), before);
}

// In sample order nothing keeps a reader's commit: it must see that, and never a newer row.
TEST_P(Processes, R04AReaderSeesItsCommitOrThatItIsGone) {
  std::optional<EmbeddingStore> store(open(options()));
  set(*store, 0, kRows, 1);
  store->commit(1).or_throw();
  set(*store, 0, kRows, 2);
  store->commit(2).or_throw();
  store.reset();
  EmbeddingStore reader = open(options(true));
  store.emplace(open(options()));
  bool gone = false;
  for (int step = 3; step < 12; ++step) {
    set(*store, 0, kRows, static_cast<float>(step));
    store->commit(step).or_throw();
    for (std::int64_t id = 0; id < kRows; id += 97) {
      std::vector<float> row(kDim);
      const auto read = reader.gather({&id, 1}, row);
      ASSERT_TRUE(read || read.error().code == ErrorCode::kNotFound) << read.error().to_string();
      ASSERT_TRUE(!read || row[0] == 2) << row[0];
      gone = gone || !read;
    }
  }
  EXPECT_TRUE(gone || GetParam() == RowLayout::kAnyOrder) << "every row changed nine times";
}

// ---- Errors and counters ------------------------------------------------------------------------

TEST_P(Processes, R08AnErrorOfTheDiskDoesNotForgetACommit) {
  {
    EmbeddingStore store = open(options());
    for (int step = 1; step <= 2; ++step) {
      set(store, 0, kRows, static_cast<float>(step));
      store.commit(step).or_throw();
    }
  }
  const auto steps = [&] { return EmbeddingStore::inspect(directory()).or_throw().commit_steps; };
  int refused = 0;
  for (std::int64_t nth = 1;; ++nth) {
    bool reached = false;
    {
      const ScopedFileFault fault({.call = FileCall::kRead, .nth = nth, .os_errno = EIO});
      const auto info = EmbeddingStore::inspect(directory());
      reached = file_fault_calls() >= nth;
      if (info) {
        EXPECT_EQ(info->commit_steps.size(), 2U) << "read " << nth;
      } else {
        EXPECT_EQ(info.error().code, ErrorCode::kIo);
      }
    }
    {
      const ScopedFileFault fault({.call = FileCall::kRead, .nth = nth, .os_errno = EIO});
      auto store = EmbeddingStore::open(governor_, options());
      reached = reached || file_fault_calls() >= nth;
      clear_file_fault();
      if (!store) {
        EXPECT_EQ(store.error().os_errno, EIO) << store.error().to_string();
        ++refused;
      } else {  // Then it knows of both: nothing that they need is written.
        set(*store, 0, kRows, 3);
      }
    }
    ASSERT_EQ(steps(), (std::vector<std::int64_t>{2, 1})) << "read " << nth;
    EXPECT_TRUE(EmbeddingStore::verify(directory(), {})) << "read " << nth;
    EmbeddingStoreOptions older = options(true);
    older.at_step = 1;
    EmbeddingStore reader = open(older);
    ASSERT_EQ(get(reader, kRows - 1), 1) << "read " << nth;
    if (!reached) {
      break;
    }
  }
  EXPECT_GE(refused, 3);
}

TEST_P(Processes, R08AMapThatIsDamagedIsForgotten) {
  {
    EmbeddingStore store = open(options());
    for (int step = 1; step <= 2; ++step) {
      set(store, 0, kRows, static_cast<float>(step));
      store.commit(step).or_throw();
    }
  }
  const int file = ::open((directory() / "map.0").c_str(), O_RDWR);
  ASSERT_EQ(::pwrite(file, "??", 2, 0), 2);  // Of commit 1.
  ::close(file);
  EXPECT_EQ(EmbeddingStore::inspect(directory()).or_throw().commit_steps,
            std::vector<std::int64_t>{2});
  EmbeddingStore store = open(options());
  EXPECT_EQ(get(store, 3), 2);
}

TEST_P(Processes, R09StatsAreAskedWhileAThreadTrains) {
  EmbeddingStore store = open(with_floor(options()));
  std::atomic<bool> done{false};
  std::jthread asking([&] {
    std::int64_t requests = 0;
    while (!done.load()) {
      const StoreStats stats = store.stats();
      EXPECT_GE(stats.requests, requests);
      EXPECT_GE(stats.dirty_bytes, 0);
      EXPECT_LE(stats.hits, stats.requests);
      requests = stats.requests;
      EXPECT_GT(store.plan().total_bytes, 0);
      std::this_thread::yield();
    }
  });
  for (int step = 1; step <= 12; ++step) {
    store.begin_epoch(step / 4).or_throw();
    set(store, 0, kRows, static_cast<float>(step));
    static_cast<void>(get(store, step));
    store.commit(step).or_throw();
  }
  done = true;
  asking.join();
  const StoreStats stats = store.stats();
  EXPECT_EQ(stats.requests, 12 * (kRows + 1));
  EXPECT_EQ(stats.commits, 12);
  EXPECT_EQ(stats.dirty_bytes, 0);
}

TEST_P(Processes, R10RowsWhoseBlocksCannotBeNumberedAreRefused) {
  EmbeddingStoreOptions how{
      .directory = root_ / "huge",
      .dim = GetParam() == RowLayout::kAnyOrder ? 512 : 1 << 20,
      .layout = GetParam(),
      .rows = GetParam() == RowLayout::kAnyOrder ? 1'500'000'000 : 4'000'000'000,
      .ids = {}};
  const auto refused = EmbeddingStore::plan(how);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  const std::string text = refused.error().to_string();
  const std::string at_most = "it can be ";
  const std::size_t at = text.find(at_most);
  ASSERT_NE(at, std::string::npos) << text;
  const std::int64_t most = std::atoll(text.c_str() + at + at_most.size());
  EXPECT_EQ(text, fmt::format("{}: rows is {}, but a table numbers its blocks with 32 bits: with "
                              "rows of {} bytes it can be {} at most: lower it, or dim, or divide "
                              "the rows among several tables",
                              how.directory.string(), how.rows,
                              GetParam() == RowLayout::kAnyOrder ? 6160 : 12'582'928, most));
  how.rows = most + 1;
  EXPECT_FALSE(EmbeddingStore::plan(how));
  how.rows = most;
  how.store_bytes = 0;
  const auto fits = EmbeddingStore::plan(how);
  EXPECT_TRUE(fits) << fits.error().to_string();
  how.rows = 0;
  how.rows_max = most + 1;
  const auto growing = EmbeddingStore::plan(how);
  ASSERT_FALSE(growing);
  EXPECT_NE(growing.error().to_string().find("rows_max is"), std::string::npos);
  EXPECT_FALSE(fs::exists(how.directory));
}

}  // namespace
}  // namespace plimsoll
