// SPDX-License-Identifier: Apache-2.0
//
// Reading order: run_sparse, Pair, then what they call.
#include "sparse_ids.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <fstream>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "bench/engines.h"
#include "bench/report.h"
#include "bench/turns.h"
#include "plimsoll/embedding_store.h"

namespace w2 {
namespace {

namespace pl = plimsoll;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kRowsABatch = 4096;
constexpr std::int64_t kWidth =
    2;  // Floats a row: the narrower it is, the more its look-up weighs.
constexpr std::uint64_t kSeed = 20261125;

// Distinct, and as good as random: an odd number times a constant, modulo 2^64.
std::int64_t sparse_id(std::int64_t position) {
  return static_cast<std::int64_t>((2 * static_cast<std::uint64_t>(position) + 1) *
                                   0x9E3779B97F4A7C15ULL);
}

// Blocks of 4 KiB that this process has had the disk read.
double blocks_read() {
  std::ifstream io("/proc/self/io");
  for (std::string line; std::getline(io, line);) {
    if (line.starts_with("read_bytes: ")) {
      return std::stod(line.substr(12)) / 4096;
    }
  }
  throw std::runtime_error("w2_skewed_ids: no read_bytes in /proc/self/io");
}

// A table of `rows` rows and room for `more`: positions are dense ids, or stand for sparse ones.
class Table {
 public:
  Table(const pl::Governor& governor, const std::filesystem::path& directory, bool sparse,
        std::int64_t rows, std::int64_t more, double share_in_ram)
      : sparse_(sparse) {
    std::vector<std::int64_t> ids;
    pl::EmbeddingStoreOptions options{
        .directory = directory,
        .dim = kWidth,
        .optimizer = {.kind = pl::RowOptimizer::kSgd, .learning_rate = bench::kRate},
        .init = {.kind = pl::RowInitKind::kZeros},
        .rows_max = rows + more,
        .batch_rows = kRowsABatch,
        .io_threads = 8};
    if (sparse && !std::filesystem::exists(directory)) {
      ids.resize(static_cast<std::size_t>(rows));
      for (std::int64_t i = 0; i < rows; ++i) {
        ids[static_cast<std::size_t>(i)] = sparse_id(i);
      }
      options.ids = ids;
    } else if (!sparse) {
      options.rows = rows;
    }
    options.store_bytes =
        pl::EmbeddingStore::plan(options).or_throw().floor_bytes +
        static_cast<std::int64_t>(static_cast<double>(rows + more) * 48 * share_in_ram);
    store_.emplace(pl::EmbeddingStore::open(governor, options).or_throw());
  }

  pl::EmbeddingStore& store() { return *store_; }
  std::vector<std::int64_t> ids_of(std::span<const std::int64_t> positions) const {
    std::vector<std::int64_t> ids(positions.begin(), positions.end());
    for (auto& id : ids) {
      id = sparse_ ? sparse_id(id) : id;
    }
    return ids;
  }

 private:
  bool sparse_;
  std::optional<pl::EmbeddingStore> store_;
};

using Call = std::function<void(pl::EmbeddingStore&, std::span<const std::int64_t>)>;

// The same call on both tables, one after the other, each first every other time. What is counted
// beside the time is counted by `counter`.
class Pair {
 public:
  Pair(Table& dense, Table& sparse) : tables_{&dense, &sparse} {}

  void time(const std::string& name, std::span<const std::int64_t> positions, const Call& call) {
    std::array<double, 2> took{};
    std::array<double, 2> blocks{};
    for (const std::size_t i :
         turn_++ % 2 == 0 ? std::array<std::size_t, 2>{0, 1} : std::array<std::size_t, 2>{1, 0}) {
      const auto ids = tables_[i]->ids_of(positions);
      const double before = blocks_read();
      const auto began = Clock::now();
      call(tables_[i]->store(), ids);
      took[i] = std::chrono::duration<double>(Clock::now() - began).count();
      blocks[i] = blocks_read() - before;
      times_[name][i].push_back(took[i] * 1e3);
      blocks_[name][i] += blocks[i];
    }
    logs_[name].push_back(std::log(took[1] / took[0]));
  }

  // Adds figures of what was timed to `peers`; returns the worst of the ratios of medians.
  double report(const std::string& prefix, nlohmann::json& peers) {
    double worst = 0;
    for (const auto& [name, times] : times_) {
      const double dense = bench::median(times[0]);
      const double sparse = bench::median(times[1]);
      const auto pairs = bench::ratio_of(logs_[name]);
      fmt::print(
          "{:4} {:7} dense {:8.3f} ms, sparse {:8.3f} ms: {:.2f} x (pairs {:.2f}, bound "
          "{:.2f}); blocks read {:.0f}, {:.0f}\n",
          prefix, name, dense, sparse, sparse / dense, pairs.mean, pairs.bound, blocks_[name][0],
          blocks_[name][1]);
      peers[prefix + "_" + name + "_dense_ms"] = dense;
      peers[prefix + "_" + name + "_sparse_ms"] = sparse;
      peers[prefix + "_" + name + "_ratio"] = sparse / dense;
      peers[prefix + "_" + name + "_ratio_bound"] = pairs.bound;
      worst = std::max(worst, sparse / dense);
    }
    return worst;
  }

  // Microseconds for each block that calls of that name read, dense and sparse.
  std::array<double, 2> us_a_block(const std::string& name) {
    std::array<double, 2> us{};
    for (std::size_t i = 0; i < 2; ++i) {
      const auto& times = times_[name][i];
      us[i] =
          std::accumulate(times.begin(), times.end(), 0.0) * 1e3 / std::max(blocks_[name][i], 1.0);
    }
    return us;
  }

 private:
  std::array<Table*, 2> tables_;
  int turn_{0};
  std::map<std::string, std::array<std::vector<double>, 2>> times_;  // Milliseconds.
  std::map<std::string, std::array<double, 2>> blocks_;
  std::map<std::string, std::vector<double>> logs_;
};

std::vector<float> values_of(std::span<const std::int64_t> positions, std::int64_t round) {
  std::vector<float> values;
  for (const std::int64_t position : positions) {
    values.insert(values.end(), kWidth, bench::start_of(position) + static_cast<float>(round % 3));
  }
  return values;
}

// Whether both tables hold the same rows at these positions, bit for bit.
bool same_rows(Table& dense, Table& sparse, std::span<const std::int64_t> positions) {
  std::array<std::vector<float>, 2> rows;
  for (std::size_t i = 0; i < 2; ++i) {
    Table& table = i == 0 ? dense : sparse;
    rows[i].resize(positions.size() * kWidth);
    table.store().gather(table.ids_of(positions), rows[i]).or_throw();
  }
  return rows[0] == rows[1] &&
         std::any_of(rows[0].begin(), rows[0].end(), [](float value) { return value != 0.0F; });
}

}  // namespace

int run_sparse(std::int64_t rows, int rounds, bool smoke, const std::filesystem::path& directory,
               const std::string& command) {
  const auto governor = pl::Governor::create({}).or_throw();
  const std::int64_t more = (rounds + 1) * kRowsABatch;
  if (more >= rows) {
    throw std::invalid_argument(fmt::format("--batches {}: each erases {} rows, and --rows has {}",
                                            rounds, kRowsABatch, rows));
  }
  std::mt19937_64 random(kSeed);
  std::vector<std::int64_t> order(static_cast<std::size_t>(rows));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  const auto last = order.begin() + (rounds + 1) * kRowsABatch;  // Before it: to be erased.
  nlohmann::json peers{{"rows", rows}};
  std::vector<float> out(static_cast<std::size_t>(kRowsABatch * kWidth));
  std::vector<std::int64_t> batch(static_cast<std::size_t>(kRowsABatch));
  const auto draw = [&] {
    for (auto& position : batch) {
      position = *(last + static_cast<std::ptrdiff_t>(
                              random() % static_cast<std::uint64_t>(order.end() - last)));
    }
  };
  bool right = true;
  double worst = 0;
  {
    Table dense(governor, directory / "dense", false, rows, more, 1.0);
    Table sparse(governor, directory / "sparse", true, rows, more, 1.0);
    fmt::print("dense:  {}\nsparse: {}\n", dense.store().plan().to_string(),
               sparse.store().plan().to_string());
    peers["index_bytes_a_row"] =
        static_cast<double>(sparse.store().plan().index_bytes - dense.store().plan().index_bytes) /
        static_cast<double>(rows);
    std::vector<std::int64_t> some(batch.size());
    for (std::int64_t first = 0; first < rows; first += kRowsABatch) {  // All rows into RAM.
      some.resize(static_cast<std::size_t>(std::min(kRowsABatch, rows - first)));
      std::iota(some.begin(), some.end(), first);
      const auto values = values_of(some, 0);
      dense.store().update(dense.ids_of(some), values).or_throw();
      sparse.store().update(sparse.ids_of(some), values).or_throw();
    }
    Pair pair(dense, sparse);
    for (int round = 0; round <= rounds; ++round) {
      draw();
      Pair unseen(dense, sparse);  // The first round is nobody's.
      Pair& timed = round == 0 ? unseen : pair;
      timed.time("gather", batch,
                 [&](auto& store, auto ids) { store.gather(ids, out).or_throw(); });
      const std::vector<float> grads = values_of(batch, round);
      timed.time("apply", batch,
                 [&](auto& store, auto ids) { store.apply(ids, grads).or_throw(); });
      draw();
      const auto values = values_of(batch, round);
      timed.time("update", batch,
                 [&](auto& store, auto ids) { store.update(ids, values).or_throw(); });
      std::vector<std::int64_t> fresh(batch.size());
      std::iota(fresh.begin(), fresh.end(), rows + round * kRowsABatch);
      timed.time("insert", fresh, [](auto& store, auto ids) { store.insert(ids).or_throw(); });
      const auto out_of = std::span(order).subspan(static_cast<std::size_t>(round * kRowsABatch),
                                                   static_cast<std::size_t>(kRowsABatch));
      timed.time("erase", out_of, [](auto& store, auto ids) { store.erase(ids).or_throw(); });
      right = right && same_rows(dense, sparse, batch);
    }
    worst = pair.report("warm", peers);
    dense.store().commit(1).or_throw();
    sparse.store().commit(1).or_throw();
  }
  {
    Table dense(governor, directory / "dense", false, rows, more, 0.05);
    Table sparse(governor, directory / "sparse", true, rows, more, 0.05);
    Pair pair(dense, sparse);
    for (int round = 0; round < rounds; ++round) {
      draw();
      pair.time("gather", batch, [&](auto& store, auto ids) { store.gather(ids, out).or_throw(); });
      right = right && same_rows(dense, sparse, batch);
    }
    pair.report("cold", peers);
    const auto [dense_us, sparse_us] = pair.us_a_block("gather");
    fmt::print("cold: {:.1f} us for each 4 KiB read by dense ids, {:.1f} by sparse\n", dense_us,
               sparse_us);
    peers["cold_dense_us_a_block"] = dense_us;
    peers["cold_sparse_us_a_block"] = sparse_us;
  }
  return bench::Report{.name = "w2_skewed_ids",
                       .value = worst,
                       .unit = "x dense ids, warm",
                       .bar = 1.5,
                       .pass = right && (smoke || worst <= 1.5),
                       .peers = peers,
                       .seed = kSeed,
                       .command = command}
      .print();
}

}  // namespace w2
