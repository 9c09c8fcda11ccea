// SPDX-License-Identifier: Apache-2.0
//
// Goal: whatever a power failure leaves of a table whose ids come and go, it opens with the ids and
// rows of one legal commit. Method: a short trace is run once; at every crash point of it the
// unsynced changes are all kept, all dropped, each one alone kept or dropped, and mixed at random;
// each state is built on a copy, opened and compared. tests/crash has the same for fixed rows.
#include <algorithm>
#include <atomic>
#include <iterator>
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

// After step s a fifth of the ids is away, another one each step; nothing is there before.
std::vector<std::int64_t> ids_after(std::int64_t step) {
  std::vector<std::int64_t> ids;
  for (std::int64_t k = 0; k < 25 && step > 0; ++k) {
    if ((k + step) % 5 != 0) {
      ids.push_back(k * 977 - 5000);
    }
  }
  return ids;
}

// An id that was there before keeps its row but for every third step's; one that comes is zeros.
float value_of(std::int64_t id, std::int64_t step) {
  const auto there = [&](std::int64_t at) {
    const auto ids = ids_after(at);
    return std::find(ids.begin(), ids.end(), id) != ids.end();
  };
  for (; step > 0 && there(step) && there(step - 1); --step) {
    if (step % 3 == 2) {
      return static_cast<float>(step * 10'000 + id);
    }
  }
  return 0.0F;
}

class GrowthStatesTest : public EmbeddingTableTest {
 public:
  void look(const char* name) noexcept;

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
  [[nodiscard]] static EmbeddingStoreOptions options(const fs::path& directory) {
    return with_floor({.directory = directory,
                       .dim = kDim,
                       .init = {.kind = RowInitKind::kZeros},
                       .rows_max = 30,
                       .batch_rows = 16,
                       .io_threads = 0});
  }
  static void train(EmbeddingStore& store, std::int64_t step) {
    const auto before = ids_after(step - 1);
    const auto after = ids_after(step);
    std::vector<std::int64_t> gone;
    std::set_difference(before.begin(), before.end(), after.begin(), after.end(),
                        std::back_inserter(gone));
    store.erase(gone).or_throw();
    store.insert(after).or_throw();
    for (const std::int64_t id : after) {
      const float value = value_of(id, step);
      if (value != 0 && value != value_of(id, step - 1)) {
        store.update({&id, 1}, std::vector<float>(kDim, value)).or_throw();
      }
    }
  }
  void judge(const std::vector<UnsyncedChange>& changes, const SurvivesFn& survives) {
    SCOPED_TRACE(++states_);
    const fs::path copy = root_ / "copy";
    fs::remove_all(copy);
    fs::create_directories(copy);
    if (fs::exists(directory())) {
      fs::copy(directory(), copy / "table", fs::copy_options::recursive);
    }
    strike(changes, survives, kSector, {directory(), copy / "table"});
    if (fs::exists(copy / "table" / "table.json")) {
      const auto sound = EmbeddingStore::verify(copy / "table", {});
      ASSERT_TRUE(sound) << sound.error().to_string();
    }
    auto store = EmbeddingStore::open(governor_, options(copy / "table"));
    ASSERT_TRUE(store) << store.error().to_string();
    std::int64_t step = std::max<std::int64_t>(store->last_commit(), 0);
    ASSERT_TRUE(legal_.contains(step)) << "opened at " << step;
    for (int commits = 0; commits < 2; ++commits, ++step) {
      const auto rows = all_rows(*store);
      ASSERT_EQ(rows.size(), ids_after(step).size());
      for (const std::int64_t id : ids_after(step)) {
        ASSERT_TRUE(rows.contains(id)) << id;
        ASSERT_EQ(rows.at(id).weights, std::vector<float>(kDim, value_of(id, step))) << id;
      }
      train(*store, step + 1);  // What was found must be able to go on.
      store->commit(step + 1).or_throw();
    }
  }

  std::set<std::int64_t> legal_{0};
  int states_{0};
  std::atomic<bool> looking_{false};  // Threads of the store pass crash points, too.
  // NOLINTNEXTLINE(readability-identifier-naming): a private member.
  static inline GrowthStatesTest* current_{nullptr};
};

void GrowthStatesTest::look(const char* name) noexcept {
  if (std::string_view(name).ends_with(".after") || HasFailure() || looking_.exchange(true)) {
    return;
  }
  auto changes = unsynced_changes();
  stop_recording_unsynced();
  SCOPED_TRACE(name);
  try {
    judge(changes, [](std::size_t, std::int64_t) { return true; });
    judge(changes, [](std::size_t, std::int64_t) { return false; });
    for (std::size_t one = 0; one < changes.size() && changes.size() > 1; ++one) {
      judge(changes, [&](std::size_t at, std::int64_t) { return at != one; });
      judge(changes, [&](std::size_t at, std::int64_t) { return at == one; });
    }
    std::mt19937_64 random(static_cast<std::uint64_t>(states_));
    for (int mix = 0; mix < 4 && !changes.empty(); ++mix) {
      judge(changes, [&](std::size_t, std::int64_t) { return random() % 2 == 0; });
    }
  } catch (const std::exception& problem) {
    ADD_FAILURE() << problem.what();
  }
  record_unsynced({.sector_bytes = kSector}, std::move(changes));
  looking_ = false;
}

TEST_F(GrowthStatesTest, OfEveryCommitAreTheOldIdsOrTheNewOnes) {
  record_unsynced({.sector_bytes = kSector});
  set_crash_hook([](const char* name, bool) noexcept { current_->look(name); });
  auto store = open(options(directory()));
  for (std::int64_t step = 1; step <= 4; ++step) {
    train(store, step);
    legal_.insert(step);
    store.commit(step).or_throw();
    legal_ = {step};
  }
  set_crash_hook(nullptr);
  stop_recording_unsynced();
  EXPECT_GT(states_, 100);
}

}  // namespace
}  // namespace plimsoll
