// SPDX-License-Identifier: Apache-2.0
//
// W1: epochs in a new order each, every row read and changed once, in a slab far smaller than the
// table; against what the bare disk does with the same bytes.
//
// The store's table is in sample order. Each batch is gathered, checked and updated; 64 commits an
// epoch. The first epoch only writes, the second tells how large the reads and writes are; before,
// between and after those that are judged the bare disk reads and writes in the same mix and sizes
// (raw_disk.h). An epoch is compared with the mean of the two measurements beside it, and the value
// is the median ratio. Every row read is compared with what the epoch before wrote.
//
// Reading order: main, run, epoch, as_between, epoch_of_peer.
//
// Threads: one, the store's I/O threads, the peers'.   Memory: the slab and a batch.
#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "bench/engines.h"
#include "bench/raw_disk.h"
#include "bench/report.h"
#include "plimsoll/embedding_store.h"
#include "plimsoll/sample_order.h"

namespace {

namespace pl = plimsoll;
using Clock = std::chrono::steady_clock;

constexpr double kBar = 0.85;
constexpr double kMovedMost = 2.1;
constexpr std::int64_t kRawFileMost = 4LL << 30;   // Of a larger table, a part is the measure.
constexpr std::int64_t kRawBytesMost = 1LL << 30;  // At each depth.
constexpr std::uint64_t kSeed = 7;

struct Settings {
  bool smoke{false};
  std::int64_t rows{2'097'152};
  std::int64_t row_bytes{512};
  std::int64_t data_bytes{0};  // 0: as `rows` says.
  std::int64_t slab_bytes{256LL << 20};
  std::int64_t batch_rows{4096};
  std::int64_t commits{64};
  std::int64_t epochs{4};
  std::int64_t peer_rows{0};  // 0: as many as the store's.
  int io_threads{8};
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

// The bare disk's work: reads and writes as large, and of as many bytes each, as the store's
// extents between the two. (The kernel's count of a process's transfers knows nothing of
// asynchronous ones.)
bench::RawDiskWork as_between(const pl::StoreStats& before, const pl::StoreStats& after,
                              const Settings& settings, const std::filesystem::path& directory) {
  const auto size = [](double bytes, double requests) {
    return std::max<std::int64_t>(1, static_cast<std::int64_t>(bytes / requests / 4096 + 0.5)) *
           4096;
  };
  const auto read = static_cast<double>(after.bytes_read - before.bytes_read);
  const auto written = static_cast<double>(after.bytes_written - before.bytes_written);
  const std::int64_t table = settings.rows * settings.row_bytes;
  return {
      .directory = directory,
      .file_bytes = std::min(table, kRawFileMost),
      .bytes = std::min(2 * table, kRawBytesMost),
      .read_bytes = size(read, static_cast<double>(after.pages_read - before.pages_read)),
      .write_bytes = size(written, static_cast<double>(after.pages_written - before.pages_written)),
      .read_share = read / (read + written)};
}

// Rows a second of one epoch of a peer, in the same order and with as many commits, or 0 where
// there is none: the better of with and without look-ahead, which it has from every other commit to
// the next. Throws when a row is wrong at the end.
double epoch_of_peer(const std::unique_ptr<bench::Engine>& peer, const Settings& settings,
                     std::int64_t rows) {
  if (peer == nullptr) {
    return 0;
  }
  const pl::SampleOrder order(rows, kSeed, 0);
  const auto batch = [&](std::int64_t number) {
    std::vector<std::int64_t> ids;
    for (std::int64_t at = number * settings.batch_rows;
         at < std::min(rows, (number + 1) * settings.batch_rows); ++at) {
      ids.push_back(order.at(at));
    }
    return ids;
  };
  const std::int64_t batches = (rows + settings.batch_rows - 1) / settings.batch_rows;
  const std::int64_t between = std::max<std::int64_t>(1, batches / settings.commits);
  std::array<double, 2> seconds{};  // Of the time between two commits, without and with look-ahead.
  std::array<double, 2> done{};
  for (std::int64_t first = 0; first < batches; first += between) {
    const std::int64_t last = std::min(batches, first + between);
    const auto announces = static_cast<std::size_t>(first / between % 2);
    const auto start = Clock::now();
    for (std::int64_t b = first; b < last; ++b) {
      const auto ahead = static_cast<std::int64_t>(announces * bench::kAhead);
      for (std::int64_t next = b == first ? b + 1 : b + ahead; next <= b + ahead && next < last;
           ++next) {
        peer->announce(batch(next));
      }
      peer->step(batch(b), b);
    }
    peer->commit();
    seconds[announces] += std::chrono::duration<double>(Clock::now() - start).count();
    done[announces] += static_cast<double>(std::min(rows, last * settings.batch_rows) -
                                           first * settings.batch_rows);
  }
  peer->settle();
  std::mt19937_64 random(kSeed);
  for (int i = 0; i < 1000; ++i) {
    const auto at = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(rows));
    const std::int64_t id = order.at(at);
    const float wanted =
        bench::start_of(id) - bench::kRate * bench::grad_of(id, at / settings.batch_rows);
    const auto row = peer->row(id);
    if (row != std::vector<float>(row.size(), wanted)) {
      throw std::runtime_error("w1_shuffled_epoch: row " + std::to_string(id) + " of " +
                               peer->name() + " is wrong");
    }
  }
  return std::max(done[0] / seconds[0], seconds[1] > 0 ? done[1] / seconds[1] : 0);
}

// Epochs of the store, and the disk beside them.
struct Played {
  bool right{true};
  double fresh{0};  // Rows a second of the first epoch.
  std::vector<double> ratios{};
  std::vector<double> speeds{};
  std::vector<double> committing{};  // Share of an epoch's time.
  double moved{0};                   // Bytes, in the epochs that are judged.
  bench::RawDiskWork raw{};
  std::vector<int> depths{};  // The disk's best, by measurement.
};

Played play(pl::EmbeddingStore& store, const Settings& settings,
            const std::filesystem::path& raw_directory) {
  Played played;
  const auto rows = static_cast<double>(settings.rows);
  std::int64_t step = 0;
  Held held;
  // The first epoch only writes: there is nothing to be read yet. It is reported, not judged.
  const double first = epoch(store, settings, 0, step, held);
  played.fresh = rows / first;
  const pl::StoreStats from = store.stats();
  played.right = first > 0 && epoch(store, settings, 1, step, held) > 0;
  played.raw = as_between(from, store.stats(), settings, raw_directory);
  fmt::print(
      "the disk is asked for reads of {} KiB and writes of {} KiB, {:.1f} % of the bytes read\n",
      played.raw.read_bytes >> 10, played.raw.write_bytes >> 10, played.raw.read_share * 100);
  bench::RawDisk raw(played.raw);
  const auto ask_disk = [&] {  // Seconds for the bytes of an epoch's rows.
    const auto speed = raw.measure();
    played.depths.push_back(speed.depth);
    return 2 * rows * static_cast<double>(settings.row_bytes) / speed.bytes_per_second;
  };
  const auto before = store.stats();
  double disk = ask_disk();
  for (std::int64_t number = 2; played.right && number < settings.epochs + 2; ++number) {
    held = {};
    const double seconds = epoch(store, settings, number, step, held);
    played.right = seconds > 0;
    const double disk_after = ask_disk();
    played.ratios.push_back((disk + disk_after) / 2 / seconds);
    played.speeds.push_back(rows / seconds);
    played.committing.push_back(held.commit / seconds);
    fmt::print(
        "epoch {}: {:.0f} rows/s, the bare disk {:.0f} and {:.0f} (best at depth {}): {:.3f}; of "
        "{:.2f} s, gather {:.2f}, update {:.2f}, commit {:.2f}\n",
        number, played.speeds.back(), rows / disk, rows / disk_after, played.depths.back(),
        played.ratios.back(), seconds, held.gather, held.update, held.commit);
    disk = disk_after;
  }
  const auto after = store.stats();
  played.moved = static_cast<double>(after.bytes_read - before.bytes_read + after.bytes_written -
                                     before.bytes_written);
  return played;
}

int run(const Settings& settings, const std::string& command) {
  const bench::Scratch scratch("w1", settings.directory);
  const std::filesystem::path& directory = scratch.path();
  Played played;
  {
    auto governor = pl::Governor::create({}).or_throw();
    auto store =
        pl::EmbeddingStore::open(governor, {.directory = directory / "table",
                                            .dim = (settings.row_bytes - 16) / 4,
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
    played = play(store, settings, directory / "raw");
  }
  std::filesystem::remove_all(directory / "table");
  std::filesystem::remove_all(directory / "raw");
  if (!played.right) {
    std::cerr << "w1_shuffled_epoch: a row was not what the epoch before wrote\n";
    return 1;
  }
  const std::int64_t peer_rows = settings.peer_rows > 0 ? settings.peer_rows : settings.rows;
  const bench::EngineOptions peer{.directory = directory / "peer",
                                  .rows = peer_rows,
                                  .dim = (settings.row_bytes - 16) / 4,
                                  .memory_bytes = settings.slab_bytes,
                                  .durable = true};
  const double rocksdb = epoch_of_peer(bench::make_rocksdb(peer), settings, peer_rows);
  std::filesystem::remove_all(peer.directory);
  const double lmdb = epoch_of_peer(bench::make_lmdb(peer), settings, peer_rows);
  const double bytes = static_cast<double>(settings.rows * settings.row_bytes * settings.epochs);
  const double moved = played.moved / bytes;
  const double ratio = bench::median(played.ratios);
  return bench::Report{
      .name = "w1_shuffled_epoch",
      .value = ratio,
      .unit = "x bare disk, best of depths 1 to 64",
      .bar = kBar,
      .pass =
          settings.smoke || (ratio >= kBar && moved <= kMovedMost && peer_rows == settings.rows),
      .peers = {{"rows_per_second", bench::median(played.speeds)},
                {"first_epoch_rows_per_second", played.fresh},
                {"bytes_moved_per_row_byte", moved},
                {"bytes_moved_bar", kMovedMost},
                {"last_epoch_to_first", played.speeds.back() / played.speeds.front()},
                {"disk_best_depths", played.depths},
                {"disk_read_bytes", played.raw.read_bytes},
                {"disk_write_bytes", played.raw.write_bytes},
                {"disk_read_share", played.raw.read_share},
                {"rocksdb_rows_per_second", rocksdb},
                {"lmdb_rows_per_second", lmdb},
                {"peer_rows", peer_rows},
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
    } else if (words.is("--rows")) {
      settings.rows = words.number(1);
    } else if (words.is("--data-gib")) {
      settings.data_bytes = words.number(1, 1 << 20) << 30;
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
  if (settings.data_bytes > 0) {
    settings.rows = settings.data_bytes / settings.row_bytes;
  }
  return settings;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string usage =
      "[--smoke] [--rows N | --data-gib N] [--row-bytes N] [--slab-mib N] [--epochs N] [--commits "
      "N] "
      "[--peer-rows N] [--io-threads N] [--directory DIR]";
  return bench::run_benchmark(argc, argv, "w1_shuffled_epoch", usage, [](bench::Arguments& words) {
    return run(settings_of(words), words.command());
  });
}
