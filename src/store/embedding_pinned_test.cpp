// SPDX-License-Identifier: Apache-2.0
//
// Goal: who reads a pinned commit while somebody trains gets that commit's rows, or is told that it
// is gone, and training goes on either way. Method: a second handle on the table, as another
// process has it (locks belong to handles, and memory is shared with none of the table's files),
// reading slowly while the first one trains and commits; every row is compared with a copy of the
// plain map made at that step. Readers that are killed are processes.
#include <atomic>
#include <csignal>
#include <optional>
#include <thread>
#include <tuple>

#include <sys/wait.h>

#include "base/mutex.h"
#include "plimsoll/bytes.h"
#include "store/commit_pins.h"
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;
using namespace literals;

constexpr std::uint64_t kSeed = 21;
constexpr std::size_t kRows = 6'000;
constexpr std::int64_t kDim = 64;

class EmbeddingPinnedTest : public EmbeddingTableTest {
 protected:
  [[nodiscard]] EmbeddingStoreOptions options(bool pinned = false, std::int64_t step = -1) const {
    EmbeddingStoreOptions how{.directory = directory(),
                              .dim = kDim,
                              .optimizer = {.kind = RowOptimizer::kAdagrad, .learning_rate = 0.1F},
                              .init = {.kind = RowInitKind::kUniform, .scale = 0.5F, .seed = kSeed},
                              .ids = {},
                              .at_step = step,
                              .pinned = pinned,
                              .batch_rows = 512,
                              .io_threads = 1};
    if (!pinned) {
      how.ids = ids_;
    }
    return how;
  }
  [[nodiscard]] EmbeddingOracle oracle() const {
    return EmbeddingOracle(kDim, options().optimizer, options().init);
  }
  // One step of the training: some rows change, here and in the plain map.
  void train(EmbeddingStore& store, EmbeddingOracle& live, std::size_t rows) {
    const std::size_t first = random_() % ids_.size();
    std::vector<std::int64_t> some(rows);
    for (std::size_t i = 0; i < rows; ++i) {
      some[i] = ids_[(first + i) % ids_.size()];
    }
    for (std::size_t at = 0; at < rows; at += 512) {
      const auto piece = std::vector<std::int64_t>(
          some.begin() + static_cast<std::ptrdiff_t>(at),
          some.begin() + static_cast<std::ptrdiff_t>(std::min(rows, at + 512)));
      const auto grads = random_floats(piece.size() * kDim, random_);
      store.apply(piece, grads).or_throw();
      live.apply(piece, grads, 1.0F);
    }
  }
  void commit(EmbeddingStore& store) { store.commit(store.last_commit() + 1).or_throw(); }

  // Reads every row, calling `between` after each piece; what went wrong, if anything.
  template <class Between>
  static Result<void> read_slowly(EmbeddingStore& reader, EmbeddingOracle& at_step,
                                  std::size_t& rows, Between between) {
    const auto floats = static_cast<std::size_t>(kDim + reader.state_floats());
    rows = 0;
    return reader.scan([&](std::span<const std::int64_t> ids, std::span<const std::uint32_t> steps,
                           std::span<const float> values) -> Result<void> {
      for (std::size_t i = 0; i < ids.size(); ++i, ++rows) {
        const OracleRow& wanted = at_step.row(ids[i]);
        EXPECT_EQ(steps[i], wanted.sequence) << "id " << ids[i];
        // NOLINTBEGIN(bugprone-suspicious-memory-comparison): bits are compared.
        EXPECT_EQ(0, std::memcmp(&values[i * floats], wanted.weights.data(), kDim * 4))
            << "id " << ids[i];
        EXPECT_EQ(0, std::memcmp(&values[i * floats + kDim], wanted.slot1.data(), kDim * 4))
            << "id " << ids[i];
        // NOLINTEND(bugprone-suspicious-memory-comparison)
      }
      between();
      return ::testing::Test::HasFailure() ? fail(ErrorCode::kInternal, "a row differs")
                                           : Result<void>{};
    });
  }
  [[nodiscard]] bool anybody_pins() const {
    return CommitPins::open(directory() / "super", true).or_throw().any();
  }

  const std::vector<std::int64_t> ids_ = sparse_ids(kRows, kSeed);
  std::mt19937_64 random_{kSeed};
};

TEST_F(EmbeddingPinnedTest, ReadsOneCommitWhileFiftyMoreAreMade) {
  EmbeddingStore store = open(options());
  EmbeddingOracle live = oracle();
  for (int round = 0; round < 3; ++round) {
    train(store, live, 2000);
    commit(store);
  }
  EmbeddingOracle pinned = live;
  EmbeddingStore reader = open(options(true));
  EXPECT_EQ(reader.last_commit(), store.last_commit());
  EXPECT_TRUE(anybody_pins());
  const std::int64_t cap = store.plan().disk_cap_bytes;
  int commits = 0;
  std::size_t rows = 0;
  const auto done = read_slowly(reader, pinned, rows, [&] {
    for (int more = 0; more < 10 || commits % 10 != 0; ++more) {
      train(store, live, 700);
      commit(store);
      ++commits;
    }
  });
  EXPECT_TRUE(done) << (done ? "" : done.error().to_string());
  EXPECT_EQ(rows, kRows);
  EXPECT_GE(commits, 50);
  EXPECT_LE(EmbeddingStore::inspect(directory()).or_throw().disk_bytes, cap);
  expect_all_rows(store, live, ids_);
  // The same by asking for rows, and a second time: nothing of the pinned commit has gone.
  const auto some = draw(ids_, 400, random_);
  expect_rows(reader, pinned, some);
  EXPECT_TRUE(read_slowly(reader, pinned, rows, [] {}));
}

TEST_F(EmbeddingPinnedTest, ReadsTheCommitThatWasAskedFor) {
  EmbeddingStore store = open(options());
  EmbeddingOracle live = oracle();
  train(store, live, 2000);
  commit(store);
  EmbeddingOracle older = live;
  train(store, live, 2000);
  commit(store);
  EmbeddingStore reader = open(options(true, 0));
  EXPECT_EQ(reader.last_commit(), 0);
  std::size_t rows = 0;
  EXPECT_TRUE(read_slowly(reader, older, rows, [&] {
    train(store, live, 300);
    commit(store);
  }));
  EXPECT_EQ(rows, kRows);
  const auto gone = EmbeddingStore::open(governor_, options(true, 0));
  ASSERT_FALSE(gone);
  EXPECT_EQ(gone.error().code, ErrorCode::kNotFound);
}

TEST_F(EmbeddingPinnedTest, TrainingTakesTheRoomItNeedsAndTheReaderIsTold) {
  EmbeddingStore store = open(options());
  EmbeddingOracle live = oracle();
  train(store, live, kRows);
  commit(store);
  EmbeddingOracle pinned = live;
  EmbeddingStore reader = open(options(true));
  std::size_t rows = 0;
  // Every row changes between commits: the two newest and the working state are the whole bound.
  const auto done = read_slowly(reader, pinned, rows, [&] {
    train(store, live, kRows);
    commit(store);
  });
  ASSERT_FALSE(done) << "there was room for four whole tables";
  EXPECT_EQ(done.error().code, ErrorCode::kNotFound) << done.error().to_string();
  EXPECT_NE(done.error().to_string().find("commit 0 is gone"), std::string::npos)
      << done.error().to_string();
  EXPECT_LT(rows, kRows);
  expect_all_rows(store, live, ids_);
  EXPECT_LE(EmbeddingStore::inspect(directory()).or_throw().disk_bytes,
            store.plan().disk_cap_bytes);
  // A new reader begins with what is there now.
  EmbeddingStore again = open(options(true));
  EmbeddingOracle now = live;
  EXPECT_TRUE(read_slowly(again, now, rows, [] {}));
  EXPECT_EQ(rows, kRows);
}

TEST_F(EmbeddingPinnedTest, AReaderThatIsKilledPinsNothing) {
  EmbeddingStore store = open(options());
  EmbeddingOracle live = oracle();
  train(store, live, 2000);
  commit(store);
  int ready[2] = {-1, -1};
  ASSERT_EQ(::pipe(ready), 0);
  const ::pid_t child = ::fork();
  if (child == 0) {
    auto pins = CommitPins::open(directory() / "super", false);
    if (pins) {
      pins->pin(0);
      pins->await(0);
      std::ignore = ::write(ready[1], "y", 1);
    }
    ::pause();
    ::_exit(0);
  }
  char pinned = 0;
  ASSERT_EQ(::read(ready[0], &pinned, 1), 1);
  EXPECT_TRUE(anybody_pins());
  for (int round = 0; round < 3; ++round) {  // Commit 0 is replaced, and kept.
    train(store, live, 2000);
    commit(store);
  }
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_FALSE(anybody_pins());
  for (int round = 0; round < 3; ++round) {
    train(store, live, kRows);
    commit(store);
  }
  expect_all_rows(store, live, ids_);
  EXPECT_TRUE(EmbeddingStore::verify(directory(), {}));
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_F(EmbeddingPinnedTest, WhoBeginsAnewKnowsNoPinOfACommitThatIsGone) {
  std::optional<EmbeddingStore> store(open(options()));
  EmbeddingOracle live = oracle();
  train(*store, live, kRows);
  commit(*store);
  EmbeddingOracle pinned = live;
  EmbeddingStore reader = open(options(true));
  for (int round = 0; round < 3; ++round) {
    train(*store, live, 1000);
    commit(*store);
  }
  store
      .reset();  // As after a crash: the blocks of commit 0 are nobody's now, but for their reader.
  store.emplace(open(options()));
  for (int round = 0; round < 3; ++round) {
    train(*store, live, kRows);
    commit(*store);
  }
  std::size_t rows = 0;
  const auto done = read_slowly(reader, pinned, rows, [] {});
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kNotFound) << done.error().to_string();
  expect_all_rows(*store, live, ids_);
}

TEST_F(EmbeddingPinnedTest, ReadersComeAndGoWhileAThreadTrains) {
  EmbeddingStore store = open(options());
  EmbeddingOracle live = oracle();
  train(store, live, 2000);
  commit(store);
  Mutex mutex;
  std::map<std::int64_t, EmbeddingOracle> steps{{0, live}};  // Guarded by mutex.
  std::atomic<bool> done{false};
  std::atomic<int> whole{0};
  {
    const std::jthread trainer([&] {
      while (!done.load()) {
        train(store, live, 300);
        {
          const MutexLock lock(mutex);  // Known before it can be read.
          steps.insert_or_assign(store.last_commit() + 1, live);
        }
        commit(store);
      }
    });
    for (int round = 0; round < 10; ++round) {
      auto reader = EmbeddingStore::open(governor_, options(true));
      if (!reader) {
        EXPECT_EQ(reader.error().code, ErrorCode::kNotFound) << reader.error().to_string();
        continue;
      }
      EmbeddingOracle at_step = [&] {
        const MutexLock lock(mutex);
        return steps.at(reader->last_commit());
      }();
      std::size_t rows = 0;
      const auto read = read_slowly(*reader, at_step, rows, [] { std::this_thread::yield(); });
      EXPECT_TRUE(read || read.error().code == ErrorCode::kNotFound) << read.error().to_string();
      whole += read ? 1 : 0;
      const MutexLock lock(mutex);
      steps.erase(steps.begin(), steps.lower_bound(reader->last_commit()));
    }
    done = true;
  }
  EXPECT_GE(whole.load(), 8) << "a few dirty rows a commit leave room for readers";
}

TEST_F(EmbeddingPinnedTest, NobodyChangesATableOpenedToBeRead) {
  {
    EmbeddingStore store = open(options());
    commit(store);
  }
  EmbeddingStore reader = open(options(true));
  const std::vector<float> zeros(kDim);
  const std::span<const std::int64_t> one(ids_.data(), 1);
  const auto inserted = reader.insert(one);
  ASSERT_FALSE(inserted);
  EXPECT_EQ(inserted.error().code, ErrorCode::kInvalidArgument);
  for (const Result<void>& refused :
       {reader.apply(one, zeros), reader.update(one, zeros), reader.commit(9), reader.erase(one)}) {
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(refused.error().to_string().find("opened to be read"), std::string::npos);
  }
  EmbeddingStoreOptions missing = options(true);
  missing.directory = root_ / "nothing";
  EXPECT_EQ(EmbeddingStore::open(governor_, missing).error().code, ErrorCode::kNotFound);
  EXPECT_FALSE(std::filesystem::exists(missing.directory));
}

TEST_F(EmbeddingPinnedTest, RowsInSampleOrderAreReadWhenNobodyTrains) {
  EmbeddingStoreOptions how = options();
  how.layout = RowLayout::kSampleOrder;
  EmbeddingOracle live = oracle();
  EmbeddingStoreOptions reading = options(true);
  reading.layout = RowLayout::kSampleOrder;
  {
    EmbeddingStore store = open(how);
    train(store, live, 1000);
    commit(store);
    const auto refused = EmbeddingStore::open(governor_, reading);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(refused.error().to_string().find("somebody trains"), std::string::npos);
  }
  EmbeddingStore reader = open(reading);
  std::size_t rows = 0;
  EXPECT_TRUE(read_slowly(reader, live, rows, [] {}));
  EXPECT_EQ(rows, kRows);
  EmbeddingStore another = open(reading);  // One who reads keeps nobody else from it,
  EXPECT_EQ(another.last_commit(), reader.last_commit());
  const std::vector<float> zeros(kDim);  // and changes nothing.
  const std::span<const std::int64_t> one(ids_.data(), 1);
  for (const Result<void>& refused : {reader.apply(one, zeros), reader.update(one, zeros),
                                      reader.commit(9), reader.begin_epoch(3)}) {
    ASSERT_FALSE(refused);
    EXPECT_NE(refused.error().to_string().find("opened to be read"), std::string::npos);
  }
}

}  // namespace
}  // namespace plimsoll
