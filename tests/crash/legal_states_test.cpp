// SPDX-License-Identifier: Apache-2.0
//
// Goal: every state of the disk that a power failure may leave opens at a legal commit.
// Method: a short trace of create, commit, overwrite, grow, go back and commit again is run once;
// at every crash point on the way the changes that no sync has covered (writes, and names of files
// and of the directories above the table) are enumerated: all kept, all
// dropped, each one alone dropped, kept, torn at its first and at its last 512 bytes, and some
// random mixes. Each state is built on a copy, opened, and compared row by row with what its step
// must hold. In sample order a second thread writes: the table's threads take turns from one change
// to the next, so that a state is looked at while nobody changes it.
#include <atomic>
#include <functional>
#include <mutex>
#include <set>

#include <unistd.h>

#include "os/crash_point.h"
#include "os/power_loss.h"
#include "plimsoll/sample_order.h"
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;
namespace fs = std::filesystem;

constexpr std::int64_t kDim = 96;
constexpr std::int64_t kSector = 512;
constexpr std::uint64_t kOrderSeed = 9;
constexpr std::int64_t kStepsPerEpoch = 2;

// After step s every row holds the last step, up to s, that set it since it came; a third of them
// each step.
float value_of(std::int64_t id, std::int64_t step, std::int64_t came = 0) {
  for (; step > 0 && step >= came; --step) {
    if (mix64(static_cast<std::uint64_t>(id * 64 + step)) % 3 == 0) {
      return static_cast<float>(step * 1000 + id);
    }
  }
  return 0.0F;
}

class LegalStatesTest : public EmbeddingTableTest, public ::testing::WithParamInterface<RowLayout> {
 protected:
  void SetUp() override {
    EmbeddingTableTest::SetUp();
    current_ = this;
  }
  void TearDown() override {
    set_crash_hook(nullptr);
    stop_recording_unsynced();
    current_ = nullptr;
    EmbeddingTableTest::TearDown();
  }

  [[nodiscard]] EmbeddingStoreOptions options(const fs::path& directory) const {
    EmbeddingStoreOptions options{.directory = directory,
                                  .dim = kDim,
                                  .init = {.kind = RowInitKind::kZeros},
                                  .layout = GetParam(),
                                  .order_seed = kOrderSeed,
                                  .batch_rows = 4,
                                  .io_threads = 0};
    if (grows_) {
      options.rows = rows_after(0);
      options.rows_max = static_cast<std::int64_t>(ids_.size());
    } else if (dense_) {
      options.rows = static_cast<std::int64_t>(ids_.size());
    } else {
      options.ids = ids_;
    }
    return with_floor(options);
  }

  // A table that grows begins with half of its rows, and each step brings a fifth of the others.
  [[nodiscard]] std::int64_t rows_after(std::int64_t step) const {
    const auto rows = static_cast<std::int64_t>(ids_.size());
    return grows_ ? std::min(rows, rows / 2 + step * (rows / 10)) : rows;
  }
  [[nodiscard]] float value(std::int64_t id, std::int64_t step) const {
    std::int64_t came = 0;
    while (rows_after(came) <= id && came <= step) {
      ++came;
    }
    return value_of(id, step, came);
  }

  // Neither it nor the two above it are there before: they are made, and may be lost, too.
  [[nodiscard]] fs::path directory() const { return root_ / "above" / "below" / "table"; }

  // Opens the table whose states are enumerated.
  EmbeddingStore open_looked_at(const EmbeddingStoreOptions& how) {
    auto store = open(how);
    for (const auto& task : fs::directory_iterator("/proc/self/task")) {
      known_.insert(std::stoi(task.path().filename()));
    }
    return store;
  }
  // Records what `trace` does and looks at every state on the way.
  void enumerate(const std::function<void()>& trace) {
    known_ = {::gettid()};
    record_unsynced({.sector_bytes = kSector});
    set_crash_hook([](const char* name, bool) noexcept { current_->pass(name); });
    trace();
    set_crash_hook(nullptr);
    stop_recording_unsynced();
  }

  void enumerate_four_commits() {
    enumerate([&] {
      auto store = open_looked_at(options(directory()));
      for (std::int64_t step = 1; step <= 4; ++step) {
        train(store, step);
        commit(store, step);
      }
    });
    EXPECT_GT(states_, 300);
  }

  // Sets the rows that a step changes, in order of their ids; in sample order also those that the
  // epoch visits now, which then stay or become what they are to be.
  void train(EmbeddingStore& store, std::int64_t step) {
    std::vector<std::int64_t> ids;
    const auto there = static_cast<std::size_t>(rows_after(step));
    const std::int64_t epoch = (step - 1) / kStepsPerEpoch;
    store.begin_epoch(epoch).or_throw();
    if (grows_) {
      store.insert(std::span(ids_).first(there)).or_throw();
    }
    if (GetParam() == RowLayout::kSampleOrder) {
      const std::int64_t rows = rows_after(epoch * kStepsPerEpoch);
      const SampleOrder order(rows, kOrderSeed, epoch);
      const std::int64_t some = 2 * rows / 5;  // The last fifth of an epoch is carried over.
      const std::int64_t begin = (step - 1) % kStepsPerEpoch * some;
      for (std::int64_t at = begin; at < begin + some; ++at) {
        ids.push_back(ids_[static_cast<std::size_t>(order.at(at))]);
      }
      set(store, ids, step);
      ids.clear();
    }
    for (const std::int64_t id : std::span(ids_).first(there)) {
      if (value(id, step) != value(id, step - 1)) {
        ids.push_back(id);
      }
    }
    set(store, ids, step);
  }
  void set(EmbeddingStore& store, const std::vector<std::int64_t>& ids, std::int64_t step) const {
    std::vector<float> rows;
    for (const std::int64_t id : ids) {
      rows.insert(rows.end(), kDim, value(id, step));
    }
    store.update(ids, rows).or_throw();
  }
  void commit(EmbeddingStore& store, std::int64_t step) {
    legal_.insert(step);
    store.commit(step).or_throw();
    legal_ = {step};
  }

  // The legal steps now; a commit in progress adds its own.
  std::set<std::int64_t> legal_{0};
  bool dense_{true};
  bool grows_{false};
  int states_{0};
  std::vector<std::int64_t> ids_ = [] {
    std::vector<std::int64_t> ids(GetParam() == RowLayout::kSampleOrder ? 60 : 12);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<std::int64_t>(i);
    }
    return ids;
  }();

 private:
  // Every thread of the table that is looked at comes by here; so do those of the copies that are
  // opened meanwhile, which do not matter. A change is made between its two points, alone.
  void pass(const char* name) noexcept {
    thread_local int held = 0;
    const std::string_view point(name);
    if (looker_ == ::gettid() || known_.count(::gettid()) == 0) {
      return;
    }
    if (point.ends_with(".after")) {
      if (held > 0) {
        --held;
        turn_.unlock();
      }
      return;
    }
    turn_.lock();
    looker_ = ::gettid();
    look(name);
    looker_ = 0;
    if (point.ends_with(".before")) {
      ++held;
    } else {
      turn_.unlock();
    }
  }
  void look(const char* name) noexcept {
    if (HasFailure()) {
      return;
    }
    auto changes = unsynced_changes();
    stop_recording_unsynced();
    try {
      each_state(name, changes);
    } catch (const std::exception& problem) {
      ADD_FAILURE() << name << ": " << problem.what();
    }
    record_unsynced({.sector_bytes = kSector}, std::move(changes));
  }

  void each_state(const char* name, const std::vector<UnsyncedChange>& changes) {
    judge(name, "all kept", changes, [](std::size_t, std::int64_t) { return true; });
    judge(name, "all dropped", changes, [](std::size_t, std::int64_t) { return false; });
    for (std::size_t one = 0; one < changes.size() && changes.size() > 1; ++one) {
      judge(name, "one dropped", changes, [&](std::size_t at, std::int64_t) { return at != one; });
      judge(name, "one kept", changes, [&](std::size_t at, std::int64_t) { return at == one; });
    }
    for (std::size_t one = 0; one < changes.size(); ++one) {
      const std::int64_t sectors = sectors_of(changes[one], kSector);
      for (const bool others : {true, false}) {
        for (const std::int64_t edge : {std::int64_t{0}, sectors - 1}) {
          if (sectors == 1) {
            continue;
          }
          judge(name, "torn", changes, [&](std::size_t at, std::int64_t sector) {
            return at == one ? sector == edge : others;
          });
          judge(name, "torn", changes, [&](std::size_t at, std::int64_t sector) {
            return at == one ? sector != edge : others;
          });
        }
      }
    }
    std::mt19937_64 random(static_cast<std::uint64_t>(states_));
    for (int mix = 0; mix < 4 && !changes.empty(); ++mix) {
      judge(name, "mixed", changes, [&](std::size_t, std::int64_t) { return random() % 2 == 0; });
    }
  }

  void judge(const char* name, const char* how, const std::vector<UnsyncedChange>& changes,
             const SurvivesFn& survives) {
    ++states_;
    const fs::path copy = root_ / "copy";
    fs::remove_all(copy);
    fs::create_directories(copy);
    if (fs::exists(root_ / "above")) {
      fs::copy(root_ / "above", copy / "above", fs::copy_options::recursive);
    }
    strike(changes, survives, kSector, {root_ / "above", copy / "above"});
    const std::string place = std::string(name) + ", " + how + ", state " + std::to_string(states_);
    const fs::path table = copy / "above" / "below" / "table";
    if (fs::exists(table / "table.json")) {
      const auto sound = EmbeddingStore::verify(table, {});
      ASSERT_TRUE(sound) << place << ": " << sound.error().to_string();
    }
    auto store = EmbeddingStore::open(governor_, options(table));
    ASSERT_TRUE(store) << place << ": " << store.error().to_string();
    const std::int64_t step = std::max<std::int64_t>(store->last_commit(), 0);
    ASSERT_TRUE(legal_.count(step) == 1) << place << ": opened at " << step;
    const auto rows = all_rows(*store);
    ASSERT_EQ(rows.size(), static_cast<std::size_t>(rows_after(step))) << place;
    for (const auto& [id, row] : rows) {
      ASSERT_EQ(row.weights, std::vector<float>(kDim, value(id, step))) << place << " id " << id;
    }
    // What was found must be able to go on.
    train(*store, step + 1);
    const auto went_on = store->commit(step + 1);
    ASSERT_TRUE(went_on) << place << ": " << went_on.error().to_string();
  }

  static LegalStatesTest* current_;  // NOLINT(readability-identifier-naming): a private member.
  std::set<pid_t> known_;  // Of the table: changes only while none of them passes a point.
  std::recursive_mutex turn_;
  std::atomic<pid_t> looker_{0};
};

LegalStatesTest* LegalStatesTest::current_ = nullptr;

TEST_P(LegalStatesTest, OfCreatingATableWithIdsAreNoTableOrAnEmptyOne) {
  dense_ = false;
  ids_ = {5, 3, 900, 71, 12, 13, 14, 15, 16, 17, 18, 19};
  enumerate([&] { static_cast<void>(open_looked_at(options(directory()))); });
  EXPECT_GT(states_, 100);
}

TEST_P(LegalStatesTest, R05_OfCommitsAreTheOldOrTheNewStep) {
  enumerate_four_commits();
}

TEST_P(LegalStatesTest, OfATableThatGrowsAreTheOldRowsOrTheNew) {
  grows_ = true;
  enumerate_four_commits();
}

TEST_P(LegalStatesTest, OfGoingBackToTheOlderCommitAreOneOfBothOrTheNewOne) {
  {
    auto store = open(options(directory()));
    for (std::int64_t step = 1; step <= 3; ++step) {
      train(store, step);
      store.commit(step).or_throw();
    }
  }
  legal_ = {2, 3};
  enumerate([&] {
    auto how = options(directory());
    how.at_step = 2;
    auto store = open_looked_at(how);
    train(store, 3);
    train(store, 4);
    commit(store, 4);
    train(store, 5);
    commit(store, 5);
  });
  EXPECT_GT(states_, 150);
}

// The table is the old one or its copy, whole; what may lie beside it is nobody's.
TEST_P(LegalStatesTest, R06_OfCompactingAreTheTableOrItsCopy) {
  {
    auto store = open(options(directory()));
    for (std::int64_t step = 1; step <= 3; ++step) {
      train(store, step);
      store.commit(step).or_throw();
    }
  }
  legal_ = {3};
  if (GetParam() == RowLayout::kSampleOrder) {
    EXPECT_FALSE(EmbeddingStore::compact(governor_, directory(), -1, {}));
    return;  // There is nothing to compact.
  }
  enumerate([&] { EmbeddingStore::compact(governor_, directory(), -1, {}).or_throw(); });
  EXPECT_GT(states_, 60);
  EXPECT_EQ(EmbeddingStore::inspect(directory()).or_throw().commit_steps,
            std::vector<std::int64_t>{3});
}

INSTANTIATE_TEST_SUITE_P(Layouts, LegalStatesTest, both_layouts(), layout_case);

}  // namespace
}  // namespace plimsoll
