// SPDX-License-Identifier: Apache-2.0
//
// W2: any-order rows on disk, 10 % of them in RAM, gather + update of batches of 4,096 ids.
//
// The same batches go through the store, RocksDB, the store again and LMDB: Zipf 1.15 and uniform,
// or a real stream. Each is a process of its own and has the disk to itself; its files are removed
// when its turn is over.
// Beside each of the store's rounds the disk is asked for random 4 KiB reads of a file as large and
// as new as the table, with the same number of pages written in long runs. The store's misses are
// compared with LRU, S3-FIFO and the offline optimum on the same stream of pages. At the end of a
// turn rows are compared with a plain sum of the gradients they were given, bit for bit.
//
// Reading order: main, run, in_child, take_turn, play, engines.h, ids.h, policies.h.
//
// Threads: the store's, RocksDB's readers, the raw probe's.   Memory: about 30 bytes a row.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "bench/report.h"
#include "engines.h"
#include "ids.h"
#include "plimsoll/embedding_store.h"
#include "policies.h"
#include "sparse_ids.h"

namespace {

namespace pl = plimsoll;
namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using Batches = std::vector<std::vector<std::int64_t>>;

constexpr std::int64_t kBatchRows = 4096;
constexpr std::int64_t kRowsPerPage = 7;  // Of 512 bytes with the header, in 4 KiB.
constexpr std::int64_t kPageBytes = 4096;
constexpr std::uint64_t kSeed = 20240617;
constexpr double kZipf = 1.15;
constexpr int kAhead = 3;  // Batches announced beforehand.

struct Settings {
  bool smoke{false};
  std::int64_t rows{1'000'000};
  std::int64_t batch_rows{0};  // 0: chosen.
  int batches{40};             // A round.
  int warm{60};                // Batches before the first round.
  int rounds{3};
  int readers{16};
  int io_threads{32};
  fs::path ids{};
  int column{-1};
  bool blocks{false};       // The ids are of blocks: each has a page of its own.
  bool misses_only{false};  // The store alone; nothing else is timed.
};

double seconds_since(Clock::time_point began) {
  return std::chrono::duration<double>(Clock::now() - began).count();
}

// The store, as an engine; announces kAhead batches.
class StoreEngine final : public w2::Engine {
 public:
  StoreEngine(const pl::Governor& governor, const fs::path& directory, const Settings& settings)
      : governor_(governor) {
    pl::EmbeddingStoreOptions options{
        .directory = directory,
        .dim = w2::kDim,
        .optimizer = {.kind = pl::RowOptimizer::kSgd, .learning_rate = w2::kRate},
        .init = {.kind = pl::RowInitKind::kZeros},
        .rows = settings.rows,
        .batch_rows = settings.batch_rows,
        .io_threads = settings.io_threads};
    // The floor counts buffers and index; the rest is frames: a tenth of the pages.
    const auto least = pl::EmbeddingStore::plan(options).or_throw();
    options.store_bytes =
        least.floor_bytes + settings.rows / 10 / kRowsPerPage * (kPageBytes + kPageBytes / 64);
    store_.emplace(pl::EmbeddingStore::open(governor_, options).or_throw());
    std::vector<std::int64_t> ids;
    std::vector<float> values;
    for (std::int64_t first = 0; first < settings.rows; first += settings.batch_rows) {
      ids.resize(static_cast<std::size_t>(std::min(settings.batch_rows, settings.rows - first)));
      std::iota(ids.begin(), ids.end(), first);
      values.clear();
      for (const std::int64_t id : ids) {
        values.insert(values.end(), w2::kDim, w2::start_of(id));
      }
      store_->update(ids, values).or_throw();
    }
    store_->commit(1).or_throw();
  }

  [[nodiscard]] std::string name() const override { return "store"; }

  void step(std::span<const std::int64_t> ids, std::int64_t batch) override {
    rows_.resize(ids.size() * w2::kDim);
    grads_.clear();
    store_->gather(ids, rows_).or_throw();
    for (const std::int64_t id : ids) {
      grads_.insert(grads_.end(), w2::kDim, w2::grad_of(id, batch));
    }
    store_->apply(ids, grads_).or_throw();
  }
  void announce(std::span<const std::int64_t> ids) override { store_->prefetch(ids); }

  std::vector<float> row(std::int64_t id) override {
    std::vector<float> weights(w2::kDim);
    store_->gather({&id, 1}, weights).or_throw();
    return weights;
  }
  [[nodiscard]] pl::StoreStats stats() const { return store_->stats(); }
  [[nodiscard]] std::int64_t slab_bytes() const { return store_->plan().total_bytes; }

 private:
  pl::Governor governor_;
  std::optional<pl::EmbeddingStore> store_;
  std::vector<float> rows_;
  std::vector<float> grads_;
};

// Random reads of a page by `threads` threads, and one thread writing as many pages in runs of 64;
// returns reads a second.
double raw_reads(const fs::path& path, std::int64_t bytes, int threads, std::int64_t reads) {
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_DIRECT, 0600);
  if (file < 0) {
    throw std::runtime_error("w2_skewed_ids: no direct I/O in " + path.string());
  }
  constexpr std::size_t kRun = 64 * kPageBytes;
  auto memory = std::unique_ptr<std::byte, decltype(&std::free)>(
      static_cast<std::byte*>(std::aligned_alloc(4096, kRun)), &std::free);
  std::fill_n(memory.get(), kRun, std::byte{1});
  const auto runs = std::max<std::int64_t>(64, bytes / static_cast<std::int64_t>(kRun));
  std::atomic<bool> failed{false};
  const auto write = [&](std::int64_t run) {
    failed = failed || ::pwrite(file, memory.get(), kRun, run * static_cast<std::int64_t>(kRun)) !=
                           static_cast<ssize_t>(kRun);
  };
  std::error_code none;
  if (static_cast<std::int64_t>(fs::file_size(path, none)) < runs * static_cast<int>(kRun)) {
    for (std::int64_t run = 0; run < runs; ++run) {
      write(run);
    }
    ::fdatasync(file);
  }
  std::atomic<std::int64_t> left{reads};
  const auto began = Clock::now();
  {
    std::vector<std::jthread> crew;
    for (int t = 0; t < threads; ++t) {
      crew.emplace_back([&, t] {
        std::mt19937_64 random(kSeed + static_cast<std::uint64_t>(t));
        alignas(4096) std::array<std::byte, kPageBytes> page;
        while (left.fetch_sub(1) > 0) {
          const auto pages = static_cast<std::uint64_t>(runs) * (kRun / kPageBytes);
          const auto at = static_cast<std::int64_t>(random() % pages) * kPageBytes;
          failed = failed || ::pread(file, page.data(), page.size(), at) != kPageBytes;
        }
      });
    }
    crew.emplace_back([&] {
      for (std::int64_t run = 0; left.load() > 0; ++run) {
        write(run % runs);
        while (left.load() > 0 && reads - left.load() < (run + 1) * 64) {
          std::this_thread::yield();
        }
      }
    });
  }
  const double took = seconds_since(began);
  ::close(file);
  if (failed) {
    throw std::runtime_error("w2_skewed_ids: a raw transfer failed");
  }
  return static_cast<double>(reads) / took;
}

// A stream as it is played.
struct Played {
  std::string name;
  Batches batches;
  std::int64_t numbered_from{0};  // The number of its first batch.
};

// What one engine made of one stream.
struct Outcome {
  std::vector<double> rows_per_second;  // By round.
  std::vector<double> raw;              // Reads a second, by round; the store's alone.
  std::vector<double> page_reads;       // The store's, a second.
  std::int64_t misses{0};
};

// One engine's turn: its outcomes by stream, and whether its rows were right at the end.
struct Turn {
  std::string engine;
  std::vector<Outcome> outcomes;
  bool right{false};
  std::int64_t slab_bytes{0};  // The store's.
  std::int64_t frames{0};      // The store's.
};

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Outcome, rows_per_second, raw, page_reads, misses)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Turn, engine, outcomes, right, slab_bytes, frames)

w2::Stream pages_of(const Batches& batches, std::size_t warm, std::int64_t rows,
                    std::int64_t frames) {
  w2::Stream stream;
  stream.page_count = static_cast<std::uint32_t>(rows / kRowsPerPage + 1);
  stream.frames = frames;
  std::vector<std::uint32_t> last(stream.page_count, 0);
  for (std::size_t b = 0; b < batches.size(); ++b) {
    stream.warm = b == warm ? stream.pages.size() : stream.warm;
    for (const std::int64_t id : batches[b]) {
      const auto page = static_cast<std::uint32_t>(id / kRowsPerPage);
      if (last[page] != b + 1) {
        last[page] = static_cast<std::uint32_t>(b + 1);
        stream.pages.push_back(page);
      }
    }
  }
  return stream;
}

// Runs batches [first, last) through an engine; returns rows a second.
double run_batches(w2::Engine& engine, const Played& stream, std::size_t first, std::size_t last) {
  std::int64_t rows = 0;
  const auto began = Clock::now();
  for (std::size_t b = first; b < last; ++b) {
    for (std::size_t next = b == first ? b : b + kAhead; next <= b + kAhead; ++next) {
      if (next < last) {
        engine.announce(stream.batches[next]);
      }
    }
    engine.step(stream.batches[b], stream.numbered_from + static_cast<std::int64_t>(b));
    rows += static_cast<std::int64_t>(stream.batches[b].size());
  }
  return static_cast<double>(rows) / seconds_since(began);
}

// `store` is the engine where that is ours, and `raw_file` then the file the disk is asked with.
Outcome play(const Settings& settings, w2::Engine& engine, const StoreEngine* store,
             const Played& stream, const fs::path& raw_file) {
  Outcome outcome;
  const auto warm = static_cast<std::size_t>(settings.warm);
  const auto pages_read = [&] { return store != nullptr ? store->stats().pages_read : 0; };
  static_cast<void>(run_batches(engine, stream, 0, warm));
  engine.settle();
  const auto before = pages_read();
  const auto size = (stream.batches.size() - warm) / static_cast<std::size_t>(settings.rounds);
  for (int round = 0; round < settings.rounds; ++round) {
    const std::size_t first = warm + static_cast<std::size_t>(round) * size;
    const auto reads = pages_read();
    const auto began = Clock::now();
    outcome.rows_per_second.push_back(run_batches(engine, stream, first, first + size));
    if (store != nullptr) {
      outcome.page_reads.push_back(static_cast<double>(pages_read() - reads) /
                                   seconds_since(began));
    }
    engine.settle();  // In no one's time.
    if (store != nullptr && !settings.misses_only) {
      outcome.raw.push_back(raw_reads(raw_file, settings.rows * 512, settings.io_threads,
                                      settings.smoke ? 2000 : 60'000));
    }
  }
  outcome.misses = pages_read() - before;
  return outcome;
}

// One weight of every row after all streams, and the ids that were used.
struct Expected {
  std::vector<float> weights;
  std::vector<std::int64_t> used;
};

Expected plain_sums(std::int64_t rows, const std::vector<Played>& streams) {
  Expected expected{.weights = std::vector<float>(static_cast<std::size_t>(rows)), .used = {}};
  for (std::int64_t id = 0; id < rows; ++id) {
    expected.weights[static_cast<std::size_t>(id)] = w2::start_of(id);
  }
  for (const Played& stream : streams) {
    for (std::size_t b = 0; b < stream.batches.size(); ++b) {
      for (const std::int64_t id : stream.batches[b]) {
        expected.weights[static_cast<std::size_t>(id)] -=
            w2::kRate * w2::grad_of(id, stream.numbered_from + static_cast<std::int64_t>(b));
      }
      expected.used.insert(expected.used.end(), stream.batches[b].begin(), stream.batches[b].end());
    }
  }
  return expected;
}

bool is_right(w2::Engine& engine, const Expected& expected) {
  std::mt19937_64 random(kSeed);
  for (int i = 0; i < 4000; ++i) {
    const auto id = i % 2 == 0 ? expected.used[random() % expected.used.size()]
                               : static_cast<std::int64_t>(random() % expected.weights.size());
    const auto row = engine.row(id);
    if (row != std::vector<float>(w2::kDim, expected.weights[static_cast<std::size_t>(id)])) {
      std::cerr << "w2_skewed_ids: row " << id << " of " << engine.name() << " is wrong\n";
      return false;
    }
  }
  return true;
}

Turn take_turn(const Settings& settings, w2::Engine& engine, const StoreEngine* store,
               const std::vector<Played>& streams, const Expected& expected,
               const fs::path& raw_file) {
  Turn turn;
  turn.engine = engine.name();
  for (const Played& stream : streams) {
    turn.outcomes.push_back(play(settings, engine, store, stream, raw_file));
  }
  turn.right = is_right(engine, expected);
  return turn;
}

// What `work` returns, done by a child process in a folder of its own: nothing that an engine
// leaves behind, in memory or on the disk, is there when the next one begins. Requires: no other
// thread.
std::optional<Turn> in_child(const fs::path& directory,
                             const std::function<std::optional<Turn>(const fs::path&)>& work) {
  const bench::Scratch scratch("turn", directory);
  const fs::path answer = scratch.path() / "answer.json";
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      const auto turn = work(scratch.path());
      std::ofstream(answer) << (turn ? nlohmann::json(*turn) : nlohmann::json()).dump();
    } catch (const std::exception& error) {
      std::cerr << error.what() << '\n';
      std::_Exit(2);
    }
    std::_Exit(0);
  }
  int status = 0;
  if (child < 0 || ::waitpid(child, &status, 0) != child || status != 0) {
    throw std::runtime_error(
        fmt::format("w2_skewed_ids: an engine's process ended with {}", status));
  }
  const auto read = nlohmann::json::parse(std::ifstream(answer));
  return read.is_null() ? std::nullopt : std::optional<Turn>(read.get<Turn>());
}

// Adds one stream's figures to `peers`, the store's worse turn; returns its rate to the best
// peer's, or 0 where there is none.
double report(const Played& stream, std::size_t at, const std::vector<Turn>& turns,
              const Settings& settings, std::int64_t frames, nlohmann::json& peers) {
  const auto pages =
      pages_of(stream.batches, static_cast<std::size_t>(settings.warm), settings.rows, frames);
  const auto best = static_cast<double>(std::max<std::int64_t>(w2::misses_at_best(pages), 1));
  double ours = std::numeric_limits<double>::max();
  double best_peer = 0;
  double misses = 0;
  double to_raw = std::numeric_limits<double>::max();
  for (const Turn& turn : turns) {
    const Outcome& outcome = turn.outcomes[at];
    const double rate = bench::median(outcome.rows_per_second);
    if (outcome.page_reads.empty()) {
      best_peer = std::max(best_peer, rate);
      peers[stream.name + "_" + turn.engine + "_rows_per_s"] = rate;
      continue;
    }
    ours = std::min(ours, rate);
    peers[stream.name + "_store_rows_per_s"].push_back(rate);
    misses = std::max(misses, static_cast<double>(outcome.misses));
    if (!outcome.raw.empty()) {
      const double reads = bench::median(outcome.page_reads);
      const double raw = bench::median(outcome.raw);
      fmt::print("{}: {:.0f} pages read a second; the disk alone {:.0f}\n", stream.name, reads,
                 raw);
      peers[stream.name + "_raw_reads_per_s"].push_back(raw);
      to_raw = std::min(to_raw, reads / raw);
      peers[stream.name + "_reads_to_raw"] = to_raw;
    }
  }
  const double lru = static_cast<double>(w2::misses_of_lru(pages)) / best;
  const double s3_fifo = static_cast<double>(w2::misses_of_s3_fifo(pages)) / best;
  fmt::print(
      "{}: {} frames; misses to the offline optimum ({:.0f} pages): store {:.3f}, S3-FIFO {:.3f}, "
      "LRU {:.3f}\n",
      stream.name, frames, best, misses / best, s3_fifo, lru);
  peers[stream.name + "_misses_to_best"] = misses / best;
  peers[stream.name + "_s3_fifo_to_best"] = s3_fifo;
  peers[stream.name + "_lru_to_best"] = lru;
  const double ratio = best_peer > 0 ? ours / best_peer : 0;
  peers[stream.name + "_to_best_peer"] = ratio;
  return ratio;
}

int run(Settings settings, const fs::path& directory, const std::string& command) {
  std::vector<Played> streams;
  if (!settings.ids.empty()) {
    auto real = w2::read_ids(settings.ids, settings.column);
    if (settings.blocks) {
      std::for_each(real.ids.begin(), real.ids.end(), [](auto& id) { id *= kRowsPerPage; });
    }
    settings.rows = real.rows * (settings.blocks ? kRowsPerPage : 1);
    if (settings.batch_rows == 0) {  // As in the claim, a batch is small beside the frames.
      settings.batch_rows =
          std::clamp<std::int64_t>(settings.rows / 10 / kRowsPerPage / 32, 4, kBatchRows);
    }
    auto batches = w2::batches_of(real.ids, settings.batch_rows);
    fmt::print("{} ids, {} of them different, in batches of {}\n", real.ids.size(), real.rows,
               settings.batch_rows);
    settings.warm = static_cast<int>(batches.size() / 4);
    streams.push_back({"real", std::move(batches), 0});
  } else {
    settings.batch_rows = settings.batch_rows == 0 ? kBatchRows : settings.batch_rows;
    const int all = settings.warm + settings.batches * settings.rounds;
    const auto drawn = [&](double skew, std::uint64_t seed) {
      return w2::drawn_batches(settings.rows, skew, settings.batch_rows, all, seed);
    };
    streams.push_back({"zipf", drawn(kZipf, kSeed), 0});
    streams.push_back({"uniform", drawn(0, kSeed + 1), all});
  }
  for (Played& stream : streams) {  // To whole rounds.
    const auto warm = static_cast<std::size_t>(settings.warm);
    const auto rounds = static_cast<std::size_t>(settings.rounds);
    stream.batches.resize(warm + (stream.batches.size() - warm) / rounds * rounds);
  }
  const Expected expected = plain_sums(settings.rows, streams);
  std::vector<Turn> turns;
  const auto take = [&](const std::function<std::optional<Turn>(const fs::path&)>& work) {
    if (auto turn = in_child(directory, work)) {
      for (std::size_t s = 0; s < streams.size(); ++s) {
        fmt::print("{}: {:8} {:10.0f} rows/s\n", streams[s].name, turn->engine,
                   bench::median(turn->outcomes[s].rows_per_second));
      }
      turns.push_back(std::move(*turn));
    }
  };
  const auto take_store = [&](const fs::path& path) -> std::optional<Turn> {
    const auto governor = pl::Governor::create({}).or_throw();
    StoreEngine store(governor, path / "store", settings);
    Turn turn = take_turn(settings, store, &store, streams, expected, path / "raw");
    turn.slab_bytes = store.slab_bytes();
    turn.frames = store.stats().frames;
    return turn;
  };
  const auto take_peer = [&](const std::unique_ptr<w2::Engine>& peer) -> std::optional<Turn> {
    if (peer == nullptr) {
      return std::nullopt;
    }
    return take_turn(settings, *peer, nullptr, streams, expected, {});
  };
  take(take_store);
  if (!settings.misses_only) {
    take([&](const fs::path& path) {
      return take_peer(w2::make_rocksdb(path / "rocksdb", settings.rows, turns.front().slab_bytes,
                                        settings.readers));
    });
    take(take_store);
    take([&](const fs::path& path) {
      return take_peer(w2::make_lmdb(path / "lmdb", settings.rows));
    });
  }
  nlohmann::json peers{{"rows", settings.rows}};
  double value = 0;
  for (std::size_t s = 0; s < streams.size(); ++s) {
    const double ratio = report(streams[s], s, turns, settings, turns.front().frames, peers);
    value = s == 0 ? ratio : value;
  }
  const bool right =
      std::all_of(turns.begin(), turns.end(), [](const Turn& turn) { return turn.right; });
  const bool met = settings.ids.empty() && value >= 3.0 && peers["zipf_misses_to_best"] <= 1.35 &&
                   peers["uniform_reads_to_raw"] >= 0.85 && peers["uniform_to_best_peer"] > 1.0;
  const bool only_right_counts = settings.smoke || settings.misses_only || !settings.ids.empty();
  return bench::Report{.name = "w2_skewed_ids",
                       .value = value,
                       .unit = "x best peer",
                       .bar = 3.0,
                       .pass = right && (only_right_counts || met),
                       .peers = peers,
                       .seed = kSeed,
                       .command = command}
      .print();
}

Settings settings_of(bench::Arguments& words) {
  Settings settings;
  while (words.next()) {
    if (words.is("--smoke")) {
      settings.smoke = true;
      settings.rows = 50'000;
      settings.batches = 3;
      settings.warm = 4;
    } else if (words.is("--rows")) {
      settings.rows = words.number(50'000);
    } else if (words.is("--batches")) {
      settings.batches = static_cast<int>(words.number(1, 1'000'000));
    } else if (words.is("--warm")) {
      settings.warm = static_cast<int>(words.number(1, 1'000'000));
    } else if (words.is("--io-threads")) {
      settings.io_threads = static_cast<int>(words.number(1, 256));
    } else if (words.is("--ids")) {
      settings.ids = words.word();
    } else if (words.is("--column")) {
      settings.column = static_cast<int>(words.number(0, 1000));
    } else if (words.is("--batch")) {
      settings.batch_rows = words.number(1, 65'536);
    } else if (words.is("--blocks")) {
      settings.blocks = true;
    } else if (words.is("--misses")) {
      settings.misses_only = true;
    } else {
      words.refuse();
    }
  }
  return settings;
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_benchmark(argc, argv, "w2_skewed_ids",
                              "[--smoke] [--rows N] [--batches N] [--warm N] [--io-threads N] "
                              "[--batch N] [--misses]\n  [--ids FILE [--column N] [--blocks]]\n  "
                              "--ids sparse [--smoke] [--rows N] [--batches N]",
                              [](bench::Arguments& words) {
                                const Settings settings = settings_of(words);
                                const bench::Scratch scratch("w2");
                                if (settings.ids == "sparse") {
                                  return w2::run_sparse(settings.rows, settings.batches,
                                                        settings.smoke, scratch.path(),
                                                        words.command());
                                }
                                return run(settings, scratch.path(), words.command());
                              });
}
