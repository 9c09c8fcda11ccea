// SPDX-License-Identifier: Apache-2.0
//
// Goal: a process killed at any point leaves a table whose rows are exactly those of one committed
// step. Method: a child works with PLIMSOLL_CRASH set to a random passage; every row's value is a
// pure function of (id, step), so what is found afterwards names the step it belongs to.
#include <csignal>
#include <cstdlib>
#include <set>

#include <sys/wait.h>

#include "os/crash_point.h"
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;

constexpr std::size_t kRows = 400;
constexpr std::int64_t kDim = 96;
constexpr int kSteps = 12;

// What a row holds after `step`: the value of the last step that wrote it.
float value_of(std::int64_t id, std::int64_t step) {
  for (; step > 0; --step) {
    if (mix64(static_cast<std::uint64_t>(id) ^ mix64(static_cast<std::uint64_t>(step))) % 3 == 0) {
      return static_cast<float>(step) + static_cast<float>(id & 1023) * 0.0001F;
    }
  }
  return 0.0F;
}

class CrashTest : public EmbeddingTableTest {
 protected:
  [[nodiscard]] EmbeddingStoreOptions options() const {
    return with_floor({.directory = directory(),
                       .dim = kDim,
                       .init = {.kind = RowInitKind::kZeros},
                       .ids = ids_,
                       .batch_rows = 64,
                       .io_threads = 2});
  }

  // Works from where the table stands; never returns when the crash comes first.
  [[noreturn]] void work(const char* crash) const {
    ::setenv("PLIMSOLL_CRASH", crash, 1);
    reload_crash_points();
    auto governor = Governor::create({.memory_limit = "1GiB"}).or_throw();
    auto store = EmbeddingStore::open(governor, options()).or_throw();
    for (std::int64_t step = std::max<std::int64_t>(store.last_commit(), 0) + 1; step <= kSteps;
         ++step) {
      std::vector<std::int64_t> ids;
      std::vector<float> rows;
      for (const std::int64_t id : ids_) {
        if (value_of(id, step) != value_of(id, step - 1)) {
          ids.push_back(id);
          rows.insert(rows.end(), kDim, value_of(id, step));
        }
      }
      store.prefetch(ids);
      store.update(ids, rows).or_throw();
      store.commit(step).or_throw();
    }
    std::_Exit(0);
  }

  int run_child(const std::string& crash) const {
    const pid_t child = ::fork();
    if (child == 0) {
      try {
        work(crash.c_str());
      } catch (...) {
        std::_Exit(3);
      }
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    return status;
  }

  // Opens the table and returns the step whose rows it holds; −1 when there is no table yet.
  std::int64_t step_found() {
    auto governor = Governor::create({.memory_limit = "1GiB"}).or_throw();
    EXPECT_TRUE(!std::filesystem::exists(directory() / "table.json") ||
                EmbeddingStore::verify(directory(), {}));
    std::int64_t step = 0;
    {
      auto store = EmbeddingStore::open(governor, options()).or_throw();
      step = std::max<std::int64_t>(store.last_commit(), 0);
      for (const auto& [id, row] : all_rows(store)) {
        for (const float weight : row.weights) {
          EXPECT_EQ(weight, value_of(id, step)) << "id " << id << " step " << step;
          if (weight != value_of(id, step)) {
            return step;
          }
        }
      }
    }
    governor.close();
    return step;
  }

  std::vector<std::int64_t> ids_ = sparse_ids(kRows, 99);
};

TEST_F(CrashTest, LeavesExactlyOneCommittedStepWhereverItStrikes) {
  governor_.close();
  std::mt19937_64 random(20240607);
  std::set<std::int64_t> steps;
  int killed = 0;
  for (int trial = 0; trial < 25; ++trial) {
    std::filesystem::remove_all(directory());
    std::int64_t last = 0;
    // A life of several deaths, each further on.
    for (int death = 0; death < 3; ++death) {
      const std::string crash = "*:" + std::to_string(1 + random() % 900);
      SCOPED_TRACE("trial " + std::to_string(trial) + " crash " + crash);
      const int status = run_child(crash);
      ASSERT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0) << status;
      killed += WIFSIGNALED(status) ? 1 : 0;
      const auto step = step_found();
      ASSERT_FALSE(HasFailure());
      ASSERT_GE(step, last) << "a committed step was lost";
      last = step;
      steps.insert(step);
    }
  }
  EXPECT_GT(killed, 25);
  EXPECT_GT(steps.size(), 4U) << "the crashes came too early to mean much";
}

TEST_F(CrashTest, EveryPointOfACommitHoldsTheOldOrTheNewStep) {
  governor_.close();
  for (const char* point : {"store.commit.pages", "store.commit.map",
                            "store.commit.superblock.before", "store.commit.superblock.after"}) {
    for (int passage = 1; passage <= 4; ++passage) {
      const std::string crash = std::string(point) + ":" + std::to_string(passage);
      SCOPED_TRACE(crash);
      std::filesystem::remove_all(directory());
      ASSERT_TRUE(WIFSIGNALED(run_child(crash)));
      const bool after = std::string(point) == "store.commit.superblock.after";
      EXPECT_EQ(step_found(), after ? passage : passage - 1);
      EXPECT_EQ(run_child(""), 0);
      EXPECT_EQ(step_found(), kSteps);
    }
  }
}

}  // namespace
}  // namespace plimsoll
