// SPDX-License-Identifier: Apache-2.0
//
// Goal: every state of the disk that a power failure may leave opens at a legal commit.
// Method: a short trace of create, commit, overwrite, go back and commit again is run once; at
// every crash point on the way the writes that no sync has covered are enumerated: all kept, all
// dropped, each one alone dropped, kept, torn at its first and at its last 512 bytes, and some
// random mixes. Each state is built on a copy, opened, and compared row by row with what its step
// must hold.
#include <functional>
#include <set>

#include "os/crash_point.h"
#include "os/power_loss.h"
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;
namespace fs = std::filesystem;

constexpr std::int64_t kDim = 96;
constexpr std::int64_t kSector = 512;

// After step s every row holds the last step, up to s, that set it; a third of them each step.
float value_of(std::int64_t id, std::int64_t step) {
  for (; step > 0; --step) {
    if (mix64(static_cast<std::uint64_t>(id * 64 + step)) % 3 == 0) {
      return static_cast<float>(step * 1000 + id);
    }
  }
  return 0.0F;
}

class LegalStatesTest : public EmbeddingTableTest {
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
                                  .batch_rows = 16,
                                  .io_threads = 0};
    if (dense_) {
      options.rows = kRows;
    } else {
      options.ids = ids_;
    }
    return with_floor(options);
  }

  // Records what `trace` does and looks at every state on the way.
  void enumerate(const std::function<void()>& trace) {
    record_unsynced({.sector_bytes = kSector});
    set_crash_hook([](const char* name, bool) noexcept { current_->look(name); });
    trace();
    set_crash_hook(nullptr);
    stop_recording_unsynced();
  }

  void train(EmbeddingStore& store, std::int64_t step) {
    std::vector<std::int64_t> ids;
    std::vector<float> rows;
    for (const std::int64_t id : ids_) {
      if (value_of(id, step) != value_of(id, step - 1)) {
        ids.push_back(id);
        rows.insert(rows.end(), kDim, value_of(id, step));
      }
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
  int states_{0};
  static constexpr std::int64_t kRows = 12;
  std::vector<std::int64_t> ids_ = [] {
    std::vector<std::int64_t> ids(kRows);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<std::int64_t>(i);
    }
    return ids;
  }();

 private:
  void look(const char* name) noexcept {
    // A state is the same after one change and before the next.
    if (looking_ || std::string_view(name).ends_with(".after") || HasFailure()) {
      return;
    }
    looking_ = true;
    auto changes = unsynced_changes();
    stop_recording_unsynced();
    try {
      each_state(name, changes);
    } catch (const std::exception& problem) {
      ADD_FAILURE() << name << ": " << problem.what();
    }
    record_unsynced({.sector_bytes = kSector}, std::move(changes));
    looking_ = false;
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
    if (fs::exists(directory())) {
      fs::copy(directory(), copy / "table", fs::copy_options::recursive);
    }
    strike(changes, survives, kSector, {root_ / "table", copy / "table"});
    const std::string place = std::string(name) + ", " + how + ", state " + std::to_string(states_);
    if (fs::exists(copy / "table" / "table.json")) {
      const auto sound = EmbeddingStore::verify(copy / "table", {});
      ASSERT_TRUE(sound) << place << ": " << sound.error().to_string();
    }
    auto store = EmbeddingStore::open(governor_, options(copy / "table"));
    ASSERT_TRUE(store) << place << ": " << store.error().to_string();
    const std::int64_t step = std::max<std::int64_t>(store->last_commit(), 0);
    ASSERT_TRUE(legal_.count(step) == 1) << place << ": opened at " << step;
    const auto rows = all_rows(*store);
    ASSERT_EQ(rows.size(), ids_.size()) << place;
    for (const auto& [id, row] : rows) {
      ASSERT_EQ(row.weights, std::vector<float>(kDim, value_of(id, step))) << place << " id " << id;
    }
    // What was found must be able to go on.
    train(*store, step + 1);
    const auto went_on = store->commit(step + 1);
    ASSERT_TRUE(went_on) << place << ": " << went_on.error().to_string();
  }

  static LegalStatesTest* current_;
  bool looking_{false};
};

LegalStatesTest* LegalStatesTest::current_ = nullptr;

TEST_F(LegalStatesTest, OfCreatingATableWithIdsAreNoTableOrAnEmptyOne) {
  dense_ = false;
  ids_ = {5, 3, 900, 71, 12, 13, 14, 15, 16, 17, 18, 19};
  enumerate([&] { static_cast<void>(open(options(directory()))); });
  EXPECT_GT(states_, 100);
}

TEST_F(LegalStatesTest, OfCommitsAreTheOldOrTheNewStep) {
  enumerate([&] {
    auto store = open(options(directory()));
    for (std::int64_t step = 1; step <= 4; ++step) {
      train(store, step);
      commit(store, step);
    }
  });
  EXPECT_GT(states_, 300);
}

TEST_F(LegalStatesTest, OfGoingBackToTheOlderCommitAreOneOfBothOrTheNewOne) {
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
    auto store = open(how);
    train(store, 3);
    train(store, 4);
    commit(store, 4);
    train(store, 5);
    commit(store, 5);
  });
  EXPECT_GT(states_, 150);
}

}  // namespace
}  // namespace plimsoll
