// SPDX-License-Identifier: Apache-2.0
//
// A Life is one directory's history of training and deaths, with the oracle of what it must hold.
//
// Everything follows from the life's seed: its tables, and what every step does to them. So the
// rows after step N are a pure function of (seed, id, N), whoever computed them, however often the
// process died on the way, and whatever its slab, batches or threads were.
//
// Reading order: crash_cycles.cpp, this file, life.cpp.
//
// Threads: single-owner.   Memory: unbounded; for tests.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plimsoll/embedding_store.h"
#include "tests/support/embedding_oracle.h"

namespace plimsoll::test {

/// How the process ends.
enum class Death : std::uint8_t {
  kKilled,     ///< SIGKILL at a crash point.
  kPowerLoss,  ///< The same, and of what was not synced a random part is undone.
  kFromAside,  ///< SIGKILL by another process, anywhere.
};

/// What one process of a life is like; none of it may change what is stored.
struct Process {
  std::uint64_t seed{0};
  Death death{Death::kKilled};
  std::int64_t passage{0};  ///< The crash point it dies at, counted over all; 0: at none.
  int company{0};           ///< Processes that it forks when its tables are open; see Life::attend.
  bool compacts{false};     ///< Instead of training, where there is a table that can be.
};

/// What the dying process leaves for its judge, in memory both share.
struct LastWords {
  std::atomic<std::int64_t> acknowledged{0};  ///< The last commit it was told is durable.
  std::atomic<std::int64_t> attempted{0};     ///< The last commit it began.
  std::atomic<std::int64_t> rolled_back{-1};  ///< It opened this older commit and went on there.
  std::atomic<std::int64_t> steps{0};
  char failure[480]{};  ///< Why it gave up, or one of its company, if any did.
  // Over all cycles, of its company: writers and users of its handles that were refused, commits
  // read whole beside it, and those that were gone before they were read.
  std::atomic<std::int64_t> refused{0};
  std::atomic<std::int64_t> read{0};
  std::atomic<std::int64_t> gone{0};
  std::atomic<std::int64_t> compacted{0};
};

struct TableSpec {
  std::string name{};
  std::int64_t dim{0};
  RowDType dtype{};
  RowOptimizerOptions optimizer{};
  RowInit init{};
  std::vector<std::int64_t> ids{};   ///< Dense when 0 … N−1. Those it is made with,
  std::int64_t rows_max{0};          ///< and, when they come (any order: and go), places for
  std::vector<std::int64_t> pool{};  ///< all that there may ever be, `ids` first.
  bool dense{false};
  RowLayout layout{};
  std::uint64_t order_seed{0};
};

class Life {
 public:
  Life(const std::filesystem::path& directory, std::uint64_t seed);

  /// Works from where the directory stands, until it is killed or has done enough. In the child.
  void work(const Process& process, LastWords& words);

  /// Opens what is there and compares every row and slot with the oracle.
  /// Returns "" or what is wrong.
  std::string judge(const LastWords& words);

  [[nodiscard]] bool is_run() const noexcept { return is_run_; }
  [[nodiscard]] std::int64_t step() const noexcept { return step_; }

 private:
  struct Batch {
    bool sets{false};  // update(), else apply().
    std::int64_t epoch{0};
    std::vector<std::int64_t> inserted{};
    std::vector<std::int64_t> erased{};
    std::vector<std::int64_t> ids{};
    std::vector<float> values{};
  };
  [[nodiscard]] std::int64_t comes(std::size_t table, std::size_t at) const;
  [[nodiscard]] bool is_there(std::size_t table, std::size_t at, std::int64_t step) const;
  [[nodiscard]] std::vector<std::int64_t> ids_after(std::size_t table, std::int64_t step) const;
  [[nodiscard]] Batch batch(std::size_t table, std::int64_t step) const;
  [[nodiscard]] EmbeddingStoreOptions options(std::size_t table, std::uint64_t seed) const;
  std::vector<EmbeddingStore> open_tables(Governor& governor, const Process& process,
                                          std::int64_t at_step) const;
  void keep_company(std::vector<EmbeddingStore>& tables, const Process& process, LastWords& words);
  void attend(std::vector<EmbeddingStore>& tables, std::uint64_t seed, int trainer,
              LastWords& words);
  std::string be_worker(std::vector<EmbeddingStore>& tables, LastWords& words) const;
  std::string be_rival(std::size_t table, std::uint64_t seed, int trainer, LastWords& words) const;
  std::string be_reader(std::size_t table, std::uint64_t seed, LastWords& words);
  bool compact(const Process& process, LastWords& words) const;
  void train_step(std::vector<EmbeddingStore>& tables, std::int64_t step, std::uint64_t seed);
  EmbeddingOracle& oracle_at(std::size_t table, std::int64_t step);
  void work_on_table(Governor& governor, const Process& process, LastWords& words);
  void work_on_run(Governor& governor, const Process& process, LastWords& words);
  void save(std::vector<EmbeddingStore>& tables, std::int64_t step) const;
  [[nodiscard]] std::string checkpoint_differs(std::int64_t step) const;
  // `stopped`: set when the rows could not all be read.
  std::string compare(std::size_t table, EmbeddingStore& store, std::int64_t step,
                      std::optional<Error>* stopped = nullptr);

  std::filesystem::path directory_;
  std::uint64_t seed_;
  bool is_run_;
  std::vector<TableSpec> tables_;
  std::int64_t step_{0};  // Where the judge last found it.
  struct Position {
    std::int64_t step{0};
    std::unique_ptr<EmbeddingOracle> oracle{};
  };
  std::vector<Position> oracles_;  // By table; each goes forward, or begins anew.
};

}  // namespace plimsoll::test
