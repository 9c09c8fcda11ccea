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
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

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

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

const char* from_environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

int run(const Settings& settings, const std::string& command) {
  const std::filesystem::path base =
      settings.directory.empty() ? from_environment("TMPDIR", "/tmp") : settings.directory.c_str();
  const auto directory = base / ("plimsoll-w1-" + std::to_string(::getpid()));
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
  const double ratio = median(ratios);
  const nlohmann::json result{{"name", "w1_shuffled_epoch"},
                              {"value", ratio},
                              {"unit", "x bare disk"},
                              {"bar", kBar},
                              {"pass", settings.smoke || (ratio >= kBar && moved <= kMovedMost)},
                              {"peers",
                               {{"rows_per_second", median(speeds)},
                                {"first_epoch_rows_per_second", fresh},
                                {"bytes_moved_per_row_byte", moved},
                                {"bytes_moved_bar", kMovedMost},
                                {"last_epoch_to_first", speeds.back() / speeds.front()},
                                {"rocksdb_rows_per_second", rocksdb},
                                {"lmdb_rows_per_second", lmdb},
                                {"peer_rows", settings.peer_rows},
                                {"rows", settings.rows},
                                {"row_bytes", settings.row_bytes},
                                {"slab_bytes", settings.slab_bytes}}},
                              {"seed", kSeed},
                              {"command", command},
                              {"commit", from_environment("PLIMSOLL_COMMIT", "unknown")}};
  std::cout << result.dump() << std::endl;
  return result["pass"].get<bool>() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  std::string command = "w1_shuffled_epoch";
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    command += " " + argument;
    const auto number = [&] { return i + 1 < argc ? std::strtoll(argv[++i], nullptr, 10) : 0; };
    if (argument == "--smoke") {
      settings.smoke = true;
      settings.rows = 20'000;
      settings.slab_bytes = 4LL << 20;
      settings.batch_rows = 512;
      settings.commits = 4;
      settings.epochs = 3;
      settings.peer_rows = 5'000;
    } else if (argument == "--rows") {
      settings.rows = number();
    } else if (argument == "--row-bytes") {
      settings.row_bytes = number();
    } else if (argument == "--slab-mib") {
      settings.slab_bytes = number() << 20;
    } else if (argument == "--epochs") {
      settings.epochs = number();
    } else if (argument == "--commits") {
      settings.commits = number();
    } else if (argument == "--peer-rows") {
      settings.peer_rows = number();
    } else if (argument == "--io-threads") {
      settings.io_threads = static_cast<int>(number());
    } else if (argument == "--directory" && i + 1 < argc) {
      settings.directory = argv[++i];
    } else {
      std::cerr << "usage: bench_w1_shuffled_epoch [--smoke] [--rows N] [--row-bytes N] "
                   "[--slab-mib N] [--epochs N] [--commits N] [--peer-rows N] [--io-threads N] "
                   "[--directory DIR]\n";
      return 2;
    }
  }
  if (settings.row_bytes < 24 || settings.row_bytes % 8 != 0 || settings.rows < 1 ||
      settings.epochs < 1 || settings.commits < 1 || settings.peer_rows < 1) {
    std::cerr << "w1_shuffled_epoch: a number makes no sense (row bytes: a multiple of 8, >= 24)\n";
    return 2;
  }
  try {
    return run(settings, command);
  } catch (const std::exception& problem) {
    std::cerr << problem.what() << '\n';
    return 2;
  }
}
