// SPDX-License-Identifier: Apache-2.0
//
// W1: epochs in a new order each, every row read and changed once, in a slab far smaller than the
// table; against what the bare disk does with the same bytes.
//
// The store's table is in sample order. Each batch is gathered, checked and updated; 64 commits an
// epoch. Before, between and after the epochs the raw disk is measured; an epoch is compared with
// the mean of the two measurements beside it, and the value is the median ratio. Every row read is
// compared with what the epoch before wrote.
//
// Reading order: main, run, epoch.
//
// Threads: one and the store's I/O threads.   Memory: the slab and a batch.
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "bench/report.h"
#include "bench/w1_shuffled_epoch/peers.h"
#include "plimsoll/embedding_store.h"
#include "plimsoll/sample_order.h"

namespace {

namespace pl = plimsoll;
using Clock = std::chrono::steady_clock;

constexpr double kBar = 0.85;
constexpr double kMovedMost = 2.1;
constexpr std::int64_t kRawBytesMost = 4LL << 30;  // Of a larger table, a part is the measure.
constexpr std::uint64_t kSeed = 7;

struct Settings {
  bool smoke{false};
  std::int64_t rows{2'097'152};
  std::int64_t row_bytes{512};
  std::int64_t slab_bytes{256LL << 20};
  std::int64_t batch_rows{4096};
  std::int64_t commits{64};
  std::int64_t epochs{4};
  std::int64_t peer_rows{262'144};
  int io_threads{4};
  std::string directory{};
};

float value_of(std::int64_t id, std::int64_t epoch) {
  return static_cast<float>(id & 0xFFFF) + static_cast<float>(epoch) * 0.25F;
}

// Seconds of an epoch that the training thread was held by each kind of request.
struct Held {
  double gather{0};
  double update{0};
  double commit{0};
};

// Adds the time that passes until it is destroyed.
class Watch {
 public:
  explicit Watch(double& sum) : sum_(sum) {}
  ~Watch() { sum_ += std::chrono::duration<double>(Clock::now() - start_).count(); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

 private:
  double& sum_;
  Clock::time_point start_{Clock::now()};
};

// Reads, checks and changes every row once; returns the seconds, or a negative number when a row
// was not what the epoch before wrote.
double epoch(pl::EmbeddingStore& store, const Settings& settings, std::int64_t number,
             std::int64_t& step, Held& held) {
  const auto dim = static_cast<std::size_t>(store.dim());
  std::vector<std::int64_t> ids;
  std::vector<float> rows;
  const pl::SampleOrder order(settings.rows, kSeed, number);
  const std::int64_t between = std::max<std::int64_t>(1, settings.rows / settings.commits);
  std::int64_t committed = 0;
  bool right = true;
  const auto start = Clock::now();
  store.begin_epoch(number).or_throw();
  for (std::int64_t at = 0; at < settings.rows; at += settings.batch_rows) {
    const auto count = static_cast<std::size_t>(std::min(settings.batch_rows, settings.rows - at));
    ids.resize(count);
    rows.resize(count * dim);
    for (std::size_t i = 0; i < count; ++i) {
      ids[i] = order.at(at + static_cast<std::int64_t>(i));
    }
    {
      const Watch watch(held.gather);
      store.gather(ids, rows).or_throw();
    }
    for (std::size_t i = 0; i < count; ++i) {
      float* const row = rows.data() + i * dim;
      const float before = number == 0 ? 0.0F : value_of(ids[i], number);
      right = right && row[0] == before && row[dim - 1] == before;
      std::fill_n(row, dim, value_of(ids[i], number + 1));
    }
    {
      const Watch watch(held.update);
      store.update(ids, rows).or_throw();
    }
    const std::int64_t done = at + static_cast<std::int64_t>(count);
    if (done - committed >= between || done == settings.rows) {
      const Watch watch(held.commit);
      store.commit(++step).or_throw();
      committed = done;
    }
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return right ? seconds : -1;
}

int run(const Settings& settings, const std::string& command) {
  const bench::Scratch scratch("w1", settings.directory);
  const std::filesystem::path& directory = scratch.path();
  const std::int64_t dim = (settings.row_bytes - 16) / 4;
  const w1::Work raw{
      directory / "raw",   std::min(settings.rows, kRawBytesMost / settings.row_bytes),
      settings.row_bytes,  settings.slab_bytes,
      settings.batch_rows, settings.commits};
  const double share = static_cast<double>(settings.rows) / static_cast<double>(raw.rows);
  w1::Work peer = raw;
  peer.directory = directory;
  peer.rows = settings.peer_rows;
  bool right = true;
  std::vector<double> ratios;
  std::vector<double> speeds;
  pl::StoreStats before;
  pl::StoreStats stats;
  double fresh = 0;
  {
    auto governor = pl::Governor::create({}).or_throw();
    auto store =
        pl::EmbeddingStore::open(governor, {.directory = directory / "table",
                                            .dim = dim,
                                            .optimizer = {.kind = pl::RowOptimizer::kAdamWFresh},
                                            .init = {.kind = pl::RowInitKind::kZeros},
                                            .layout = pl::RowLayout::kSampleOrder,
                                            .order_seed = kSeed,
                                            .store_bytes = settings.slab_bytes,
                                            .rows = settings.rows,
                                            .batch_rows = settings.batch_rows,
                                            .io_threads = settings.io_threads})
            .or_throw();
    fmt::print("{} rows of {} bytes; {}\n", settings.rows, settings.row_bytes,
               store.plan().to_string());
    std::int64_t step = 0;
    const auto rows = static_cast<double>(settings.rows);
    // The first epoch only writes: there is nothing to be read yet. It is reported, not judged.
    Held held;
    const double first = epoch(store, settings, 0, step, held);
    right = right && first > 0;
    fresh = rows / first;
    before = store.stats();
    double disk = w1::seconds_of_raw_disk(raw) * share;
    for (std::int64_t number = 1; right && number <= settings.epochs; ++number) {
      held = {};
      const double seconds = epoch(store, settings, number, step, held);
      right = right && seconds > 0;
      const double disk_after = w1::seconds_of_raw_disk(raw) * share;
      ratios.push_back((disk + disk_after) / 2 / seconds);
      speeds.push_back(rows / seconds);
      fmt::print(
          "epoch {}: {:.0f} rows/s, the bare disk {:.0f} and {:.0f}: {:.3f}; of {:.2f} s, gather "
          "{:.2f}, update {:.2f}, commit {:.2f}\n",
          number, speeds.back(), rows / disk, rows / disk_after, ratios.back(), seconds,
          held.gather, held.update, held.commit);
      disk = disk_after;
    }
    stats = store.stats();
  }
  std::filesystem::remove_all(directory);
  if (!right) {
    std::cerr << "w1_shuffled_epoch: a row was not what the epoch before wrote\n";
    return 1;
  }
  std::filesystem::create_directories(directory);
  const double rocksdb = w1::rows_per_second_of_rocksdb(peer);
  const double lmdb = w1::rows_per_second_of_lmdb(peer);
  std::filesystem::remove_all(directory);
  const double bytes = static_cast<double>(settings.rows) *
                       static_cast<double>(settings.row_bytes) *
                       static_cast<double>(settings.epochs);
  const double moved = static_cast<double>(stats.bytes_read - before.bytes_read +
                                           stats.bytes_written - before.bytes_written) /
                       bytes;
  const double ratio = bench::median(ratios);
  return bench::Report{.name = "w1_shuffled_epoch",
                       .value = ratio,
                       .unit = "x bare disk",
                       .bar = kBar,
                       .pass = settings.smoke || (ratio >= kBar && moved <= kMovedMost),
                       .peers = {{"rows_per_second", bench::median(speeds)},
                                 {"first_epoch_rows_per_second", fresh},
                                 {"bytes_moved_per_row_byte", moved},
                                 {"bytes_moved_bar", kMovedMost},
                                 {"last_epoch_to_first", speeds.back() / speeds.front()},
                                 {"rocksdb_rows_per_second", rocksdb},
                                 {"lmdb_rows_per_second", lmdb},
                                 {"peer_rows", settings.peer_rows},
                                 {"rows", settings.rows},
                                 {"row_bytes", settings.row_bytes},
                                 {"slab_bytes", settings.slab_bytes}},
                       .seed = kSeed,
                       .command = command}
      .print();
}

Settings settings_of(bench::Arguments& words) {
  Settings settings;
  while (words.next()) {
    if (words.is("--smoke")) {
      settings.smoke = true;
      settings.rows = 20'000;
      settings.slab_bytes = 4LL << 20;
      settings.batch_rows = 512;
      settings.commits = 4;
      settings.epochs = 3;
      settings.peer_rows = 5'000;
    } else if (words.is("--rows")) {
      settings.rows = words.number(1);
    } else if (words.is("--row-bytes")) {
      settings.row_bytes = words.number(24, 1 << 20);
    } else if (words.is("--slab-mib")) {
      settings.slab_bytes = words.number(1, 1 << 20) << 20;
    } else if (words.is("--epochs")) {
      settings.epochs = words.number(1);
    } else if (words.is("--commits")) {
      settings.commits = words.number(1);
    } else if (words.is("--peer-rows")) {
      settings.peer_rows = words.number(1);
    } else if (words.is("--io-threads")) {
      settings.io_threads = static_cast<int>(words.number(1, 256));
    } else if (words.is("--directory")) {
      settings.directory = words.word();
    } else {
      words.refuse();
    }
  }
  if (settings.row_bytes % 8 != 0) {
    throw std::invalid_argument("--row-bytes wants a multiple of 8");
  }
  return settings;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string usage =
      "[--smoke] [--rows N] [--row-bytes N] [--slab-mib N] [--epochs N] [--commits N] "
      "[--peer-rows N] [--io-threads N] [--directory DIR]";
  return bench::run_benchmark(argc, argv, "w1_shuffled_epoch", usage, [](bench::Arguments& words) {
    return run(settings_of(words), words.command());
  });
}
