// SPDX-License-Identifier: Apache-2.0
//
// W2: any-order rows on disk, 10 % of them in RAM, gather + update of batches of 4,096 ids.
//
// The same batches go through the store, RocksDB and LMDB in turn, round by round: Zipf 1.15 and
// uniform, or a real stream. Beside the uniform rounds the disk is asked for random 4 KiB reads
// with the same number of pages written in long runs. The store's misses are compared with LRU,
// S3-FIFO and the offline optimum on the same stream of pages. At the end rows of every engine are
// compared with a plain sum of the gradients they were given, bit for bit.
//
// Reading order: main, run, play, engines.h, ids.h, policies.h.
//
// Threads: the store's, RocksDB's readers, the raw probe's.   Memory: about 30 bytes a row.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "bench/report.h"
#include "engines.h"
#include "ids.h"
#include "plimsoll/embedding_store.h"
#include "policies.h"

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
  void announce(std::span<const std::int64_t> ids) { store_->prefetch(ids); }

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

// What one stream gave.
struct Outcome {
  std::vector<std::vector<double>> rows_per_second;  // By engine, by round.
  std::vector<double> raw;                           // Reads a second, by round.
  std::vector<double> page_reads;                    // The store's, a second.
  std::int64_t misses{0}, lru{0}, s3_fifo{0}, best{0};
  std::int64_t frames{0};
};

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

// Runs batches [first, last) through one engine; returns rows a second.
double run_batches(w2::Engine& engine, StoreEngine* store, const Batches& batches,
                   std::size_t first, std::size_t last, std::int64_t numbered_from) {
  std::int64_t rows = 0;
  const auto began = Clock::now();
  for (std::size_t b = first; b < last; ++b) {
    if (store != nullptr) {
      for (std::size_t next = b == first ? b : b + kAhead; next <= b + kAhead; ++next) {
        if (next < last) {
          store->announce(batches[next]);
        }
      }
    }
    engine.step(batches[b], numbered_from + static_cast<std::int64_t>(b));
    rows += static_cast<std::int64_t>(batches[b].size());
  }
  return static_cast<double>(rows) / seconds_since(began);
}

Outcome play(const Settings& settings, const std::vector<std::unique_ptr<w2::Engine>>& engines,
             StoreEngine& store, const Batches& batches, std::int64_t numbered_from,
             const fs::path& raw_file) {
  Outcome outcome;
  outcome.rows_per_second.resize(engines.size());
  const auto warm = static_cast<std::size_t>(settings.warm);
  for (const auto& engine : engines) {
    StoreEngine* const ours = engine.get() == &store ? &store : nullptr;
    static_cast<void>(run_batches(*engine, ours, batches, 0, warm, numbered_from));
    engine->settle();
  }
  const auto before = store.stats();
  const auto size = (batches.size() - warm) / static_cast<std::size_t>(settings.rounds);
  std::size_t end = warm;
  for (int round = 0; round < settings.rounds; ++round) {
    const std::size_t first = warm + static_cast<std::size_t>(round) * size;
    end = first + size;
    for (std::size_t e = 0; e < engines.size(); ++e) {
      StoreEngine* const ours = engines[e].get() == &store ? &store : nullptr;
      const auto reads = store.stats().pages_read;
      const auto began = Clock::now();
      outcome.rows_per_second[e].push_back(
          run_batches(*engines[e], ours, batches, first, end, numbered_from));
      if (ours != nullptr) {
        outcome.page_reads.push_back(static_cast<double>(store.stats().pages_read - reads) /
                                     seconds_since(began));
      }
      engines[e]->settle();  // In no one's time.
    }
    if (!settings.misses_only) {
      outcome.raw.push_back(raw_reads(raw_file, settings.rows * 512, settings.io_threads,
                                      settings.smoke ? 2000 : 60'000));
    }
  }
  outcome.misses = store.stats().pages_read - before.pages_read;
  const auto stream =
      pages_of({batches.begin(), batches.begin() + static_cast<std::ptrdiff_t>(end)}, warm,
               settings.rows, store.stats().frames);
  outcome.frames = stream.frames;
  outcome.lru = w2::misses_of_lru(stream);
  outcome.s3_fifo = w2::misses_of_s3_fifo(stream);
  outcome.best = w2::misses_at_best(stream);
  return outcome;
}

// Compares rows of every engine with plain sums over what was played.
bool are_right(const std::vector<std::unique_ptr<w2::Engine>>& engines, const Settings& settings,
               const std::vector<std::pair<std::int64_t, Batches>>& played) {
  std::vector<float> plain(static_cast<std::size_t>(settings.rows));
  for (std::int64_t id = 0; id < settings.rows; ++id) {
    plain[static_cast<std::size_t>(id)] = w2::start_of(id);
  }
  std::vector<std::int64_t> used;
  for (const auto& [from, batches] : played) {
    for (std::size_t b = 0; b < batches.size(); ++b) {
      for (const std::int64_t id : batches[b]) {
        plain[static_cast<std::size_t>(id)] -=
            w2::kRate * w2::grad_of(id, from + static_cast<std::int64_t>(b));
      }
      used.insert(used.end(), batches[b].begin(), batches[b].end());
    }
  }
  std::mt19937_64 random(kSeed);
  for (int i = 0; i < 4000; ++i) {
    const auto id = i % 2 == 0 ? used[random() % used.size()]
                               : static_cast<std::int64_t>(random() % plain.size());
    for (const auto& engine : engines) {
      const auto row = engine->row(id);
      if (row != std::vector<float>(w2::kDim, plain[static_cast<std::size_t>(id)])) {
        std::cerr << "w2_skewed_ids: row " << id << " of " << engine->name() << " is wrong\n";
        return false;
      }
    }
  }
  return true;
}

// Prints one stream's figures and adds them to `peers`. Returns the store's rate to the best
// peer's.
double report(const std::string& what, const Outcome& outcome,
              const std::vector<std::unique_ptr<w2::Engine>>& engines, nlohmann::json& peers) {
  double best_peer = 0;
  for (std::size_t e = 0; e < engines.size(); ++e) {
    const double rate = bench::median(outcome.rows_per_second[e]);
    fmt::print("{}: {:8} {:10.0f} rows/s\n", what, engines[e]->name(), rate);
    peers[what + "_" + engines[e]->name() + "_rows_per_s"] = rate;
    best_peer = e == 0 ? 0 : std::max(best_peer, rate);
  }
  const auto to_best = [&](std::int64_t misses) {
    return static_cast<double>(misses) /
           static_cast<double>(std::max<std::int64_t>(outcome.best, 1));
  };
  fmt::print(
      "{}: {} frames; misses to the offline optimum ({} pages): store {:.3f}, S3-FIFO {:.3f}, "
      "LRU {:.3f}\n",
      what, outcome.frames, outcome.best, to_best(outcome.misses), to_best(outcome.s3_fifo),
      to_best(outcome.lru));
  peers[what + "_misses_to_best"] = to_best(outcome.misses);
  peers[what + "_s3_fifo_to_best"] = to_best(outcome.s3_fifo);
  peers[what + "_lru_to_best"] = to_best(outcome.lru);
  if (!outcome.raw.empty()) {
    const double raw = bench::median(outcome.raw);
    fmt::print("{}: {:.0f} pages read a second; the disk alone {:.0f}\n", what,
               bench::median(outcome.page_reads), raw);
    peers[what + "_reads_to_raw"] = bench::median(outcome.page_reads) / raw;
  }
  const double ratio = best_peer > 0 ? bench::median(outcome.rows_per_second[0]) / best_peer
                                     : 0;  // 0: there is none.
  peers[what + "_to_best_peer"] = ratio;
  return ratio;
}

int run(Settings settings, const fs::path& directory, const std::string& command) {
  auto governor = pl::Governor::create({}).or_throw();
  std::vector<std::pair<std::int64_t, Batches>> streams;  // Number of the first batch, batches.
  std::vector<std::string> names;
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
    streams.emplace_back(0, std::move(batches));
    names = {"real"};
  } else {
    settings.batch_rows = settings.batch_rows == 0 ? kBatchRows : settings.batch_rows;
    const int all = settings.warm + settings.batches * settings.rounds;
    streams.emplace_back(0,
                         w2::drawn_batches(settings.rows, kZipf, settings.batch_rows, all, kSeed));
    streams.emplace_back(all,
                         w2::drawn_batches(settings.rows, 0, settings.batch_rows, all, kSeed + 1));
    names = {"zipf", "uniform"};
  }
  std::vector<std::unique_ptr<w2::Engine>> engines;
  const auto add = [&](std::unique_ptr<w2::Engine> engine) {
    if (engine != nullptr) {
      engines.push_back(std::move(engine));
    }
  };
  auto made = std::make_unique<StoreEngine>(governor, directory / "store", settings);
  StoreEngine& store = *made;
  add(std::move(made));
  if (!settings.misses_only) {
    add(w2::make_rocksdb(directory / "rocksdb", settings.rows, store.slab_bytes(),
                         settings.readers));
    add(w2::make_lmdb(directory / "lmdb", settings.rows));
  }
  nlohmann::json peers{{"rows", settings.rows}};
  double value = 0;
  for (std::size_t s = 0; s < streams.size(); ++s) {
    auto& [from, batches] = streams[s];
    const auto outcome = play(settings, engines, store, batches, from, directory / "raw");
    const auto rounds = static_cast<std::size_t>(settings.rounds);
    const auto warm = static_cast<std::size_t>(settings.warm);
    batches.resize(warm + (batches.size() - warm) / rounds * rounds);  // What was played.
    const double ratio = report(names[s], outcome, engines, peers);
    value = s == 0 ? ratio : value;
  }
  const bool right = are_right(engines, settings, streams);
  const bool met = engines.size() > 1 && settings.ids.empty() && value >= 3.0 &&
                   peers["zipf_misses_to_best"] <= 1.35 && peers["uniform_reads_to_raw"] >= 0.85 &&
                   peers["uniform_to_best_peer"] > 1.0;
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
      settings = {.smoke = true, .rows = 50'000, .batches = 3, .warm = 4};
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
                              "[--batch N] [--misses]\n  [--ids FILE [--column N] [--blocks]]",
                              [](bench::Arguments& words) {
                                const Settings settings = settings_of(words);
                                const bench::Scratch scratch("w2");
                                return run(settings, scratch.path(), words.command());
                              });
}
