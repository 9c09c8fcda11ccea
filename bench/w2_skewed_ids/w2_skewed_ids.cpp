// SPDX-License-Identifier: Apache-2.0
//
// W2: any-order rows on disk, 10 % of them in RAM, gather + update of batches of 4,096 ids.
//
// The same batches go through the store, RocksDB, the store again and LMDB: Zipf 1.15 and uniform,
// or a real stream; first with batches announced ahead to everyone, then without. Each is a process
// of its own and has the disk to itself; its files are removed when its turn is over. Beside each
// of the store's rounds the disk is asked for random 4 KiB reads of a file as large and as new as
// the table, with the same number of pages written in long runs (raw_disk.h). The store's misses
// are compared with LRU, S3-FIFO and the offline optimum on the same stream of pages. At the end of
// a turn rows are compared with a plain sum of the gradients they were given, bit for bit.
//
// Reading order: main, run, in_child, take_turn, play, bench/engines.h, ids.h, policies.h.
//
// Threads: the store's, the peers'.   Memory: about 30 bytes a row.
#include <algorithm>
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
#include <stdexcept>
#include <string>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "bench/engines.h"
#include "bench/raw_disk.h"
#include "bench/report.h"
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
constexpr std::int64_t kDim = 124;
constexpr std::int64_t kRowsPerPage = 7;  // Of 512 bytes with the header, in 4 KiB.
constexpr std::int64_t kPageBytes = 4096;
constexpr std::uint64_t kSeed = 20240617;
constexpr double kZipf = 1.15;

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
  double skew{kZipf};
  std::uint64_t seed{kSeed};  // Of the streams that are drawn.
  bool blocks{false};         // The ids are of blocks: each has a page of its own.
  bool misses_only{false};    // The store alone; nothing else is timed.
};

double seconds_since(Clock::time_point began) {
  return std::chrono::duration<double>(Clock::now() - began).count();
}

// The store, as an engine; announces kAhead batches.
class StoreEngine final : public bench::Engine {
 public:
  StoreEngine(const pl::Governor& governor, const fs::path& directory, const Settings& settings)
      : governor_(governor) {
    pl::EmbeddingStoreOptions options{
        .directory = directory,
        .dim = kDim,
        .optimizer = {.kind = pl::RowOptimizer::kSgd, .learning_rate = bench::kRate},
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
        values.insert(values.end(), kDim, bench::start_of(id));
      }
      store_->update(ids, values).or_throw();
    }
    store_->commit(1).or_throw();
  }

  [[nodiscard]] std::string name() const override { return "store"; }

  void step(std::span<const std::int64_t> ids, std::int64_t batch) override {
    rows_.resize(ids.size() * kDim);
    grads_.clear();
    store_->gather(ids, rows_).or_throw();
    for (const std::int64_t id : ids) {
      grads_.insert(grads_.end(), kDim, bench::grad_of(id, batch));
    }
    store_->apply(ids, grads_).or_throw();
  }
  void announce(std::span<const std::int64_t> ids) override { store_->prefetch(ids); }

  std::vector<float> row(std::int64_t id) override {
    std::vector<float> weights(kDim);
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

// The disk alone: pages at random from a file as large as the table, and as many written in runs.
bench::RawDiskWork raw_work(const Settings& settings, const fs::path& directory) {
  return {.directory = directory,
          .file_bytes = settings.rows * 512,
          .bytes = 2 * kPageBytes * (settings.smoke ? 2000 : 30'000),
          .read_bytes = kPageBytes,
          .write_bytes = 64 * kPageBytes,
          .random = true};
}

// A stream as it is played.
struct Played {
  std::string name;
  Batches batches;
  std::int64_t numbered_from{0};  // The number of its first batch.
  std::size_t announced{0};       // Its first batches, played with look-ahead; the others without.
};

// What one engine made of one stream.
struct Outcome {
  std::vector<double> rows_per_second;  // By round.
  std::vector<double> alone;            // The same without look-ahead.
  std::vector<double> raw;              // Reads a second, by round; the store's alone.
  std::vector<double> page_reads;       // The store's, a second.
  std::int64_t misses{0};
  std::int64_t pages_written{0};  // The store's, in the rounds that `misses` are of.
};

// One engine's turn: its outcomes by stream, and whether its rows were right at the end.
struct Turn {
  std::string engine;
  std::vector<Outcome> outcomes;
  bool right{false};
  std::int64_t slab_bytes{0};  // The store's.
  std::int64_t frames{0};      // The store's.
};

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Outcome, rows_per_second, alone, raw, page_reads, misses,
                                   pages_written)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Turn, engine, outcomes, right, slab_bytes, frames)

w2::Stream pages_of(std::span<const std::vector<std::int64_t>> batches, std::size_t warm,
                    std::int64_t rows, std::int64_t frames) {
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
double run_batches(bench::Engine& engine, const Played& stream, std::size_t first,
                   std::size_t last) {
  std::int64_t rows = 0;
  const auto began = Clock::now();
  for (std::size_t b = first; b < last; ++b) {
    const std::size_t ahead = b + bench::kAhead;
    for (std::size_t next = b == first ? b : ahead; next <= ahead; ++next) {
      if (next < std::min(last, stream.announced)) {
        engine.announce(stream.batches[next]);
      }
    }
    engine.step(stream.batches[b], stream.numbered_from + static_cast<std::int64_t>(b));
    rows += static_cast<std::int64_t>(stream.batches[b].size());
  }
  return static_cast<double>(rows) / seconds_since(began);
}

// `store` is the engine where that is ours, and `raw_files` then where the disk is asked.
Outcome play(const Settings& settings, bench::Engine& engine, const StoreEngine* store,
             const Played& stream, const fs::path& raw_files) {
  Outcome outcome;
  std::optional<bench::RawDisk> raw;
  const auto warm = static_cast<std::size_t>(settings.warm);
  const auto stats = [&] { return store != nullptr ? store->stats() : pl::StoreStats{}; };
  static_cast<void>(run_batches(engine, stream, 0, warm));
  engine.settle();
  const auto before = stats();
  const auto size = (stream.announced - warm) / static_cast<std::size_t>(settings.rounds);
  for (int round = 0; round < settings.rounds; ++round) {
    const std::size_t first = warm + static_cast<std::size_t>(round) * size;
    const auto reads = stats().pages_read;
    const auto began = Clock::now();
    outcome.rows_per_second.push_back(run_batches(engine, stream, first, first + size));
    if (store != nullptr) {
      outcome.page_reads.push_back(static_cast<double>(stats().pages_read - reads) /
                                   seconds_since(began));
    }
    engine.settle();  // In no one's time.
    if (store != nullptr && !settings.misses_only) {
      if (!raw) {
        raw.emplace(raw_work(settings, raw_files));
      }
      outcome.raw.push_back(raw->measure().bytes_per_second / 2 / kPageBytes);
    }
  }
  outcome.misses = stats().pages_read - before.pages_read;
  outcome.pages_written = stats().pages_written - before.pages_written;
  for (std::size_t first = stream.announced; first < stream.batches.size(); first += size) {
    outcome.alone.push_back(run_batches(engine, stream, first, first + size));
    engine.settle();
  }
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
    expected.weights[static_cast<std::size_t>(id)] = bench::start_of(id);
  }
  for (const Played& stream : streams) {
    for (std::size_t b = 0; b < stream.batches.size(); ++b) {
      for (const std::int64_t id : stream.batches[b]) {
        expected.weights[static_cast<std::size_t>(id)] -=
            bench::kRate * bench::grad_of(id, stream.numbered_from + static_cast<std::int64_t>(b));
      }
      expected.used.insert(expected.used.end(), stream.batches[b].begin(), stream.batches[b].end());
    }
  }
  return expected;
}

bool is_right(bench::Engine& engine, const Expected& expected) {
  std::mt19937_64 random(kSeed);
  for (int i = 0; i < 4000; ++i) {
    const auto id = i % 2 == 0 ? expected.used[random() % expected.used.size()]
                               : static_cast<std::int64_t>(random() % expected.weights.size());
    const auto row = engine.row(id);
    if (row != std::vector<float>(kDim, expected.weights[static_cast<std::size_t>(id)])) {
      std::cerr << "w2_skewed_ids: row " << id << " of " << engine.name() << " is wrong\n";
      return false;
    }
  }
  return true;
}

Turn take_turn(const Settings& settings, bench::Engine& engine, const StoreEngine* store,
               const std::vector<Played>& streams, const Expected& expected,
               const fs::path& raw_files) {
  Turn turn;
  turn.engine = engine.name();
  for (const Played& stream : streams) {
    turn.outcomes.push_back(play(settings, engine, store, stream, raw_files));
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
  const auto pages = pages_of(std::span(stream.batches).first(stream.announced),
                              static_cast<std::size_t>(settings.warm), settings.rows, frames);
  const auto best = static_cast<double>(std::max<std::int64_t>(w2::misses_at_best(pages), 1));
  double ours = std::numeric_limits<double>::max();
  double ours_alone = std::numeric_limits<double>::max();
  double best_peer = 0;
  double best_peer_alone = 0;
  double misses = 0;
  double to_raw = std::numeric_limits<double>::max();
  for (const Turn& turn : turns) {
    const Outcome& outcome = turn.outcomes[at];
    const double rate = bench::median(outcome.rows_per_second);
    const double alone = bench::median(outcome.alone);
    if (outcome.page_reads.empty()) {
      best_peer = std::max({best_peer, rate, alone});
      best_peer_alone = std::max(best_peer_alone, alone);
      peers[stream.name + "_" + turn.engine + "_rows_per_s"] = rate;
      peers[stream.name + "_" + turn.engine + "_alone_rows_per_s"] = alone;
      continue;
    }
    ours = std::min(ours, rate);
    ours_alone = std::min(ours_alone, alone);
    peers[stream.name + "_store_rows_per_s"].push_back(rate);
    peers[stream.name + "_store_alone_rows_per_s"].push_back(alone);
    misses = std::max(misses, static_cast<double>(outcome.misses));
    peers[stream.name + "_pages_written_to_read"].push_back(
        static_cast<double>(outcome.pages_written) /
        static_cast<double>(std::max<std::int64_t>(outcome.misses, 1)));
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
  peers[stream.name + "_alone_to_best_peer"] =
      best_peer_alone > 0 ? ours_alone / best_peer_alone : 0;
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
    const auto rounds = static_cast<std::size_t>(settings.rounds);  // Whole ones.
    const auto warm = static_cast<std::size_t>(settings.warm);
    const std::size_t whole = warm + (batches.size() - warm) / rounds * rounds;
    batches.resize(whole);
    streams.push_back({"real", std::move(batches), 0, whole});
  } else {
    settings.batch_rows = settings.batch_rows == 0 ? kBatchRows : settings.batch_rows;
    const int announced = settings.warm + settings.batches * settings.rounds;
    const int all = announced + settings.batches * settings.rounds;
    const auto drawn = [&](double skew, std::uint64_t seed) {
      return w2::drawn_batches(settings.rows, skew, settings.batch_rows, all, seed);
    };
    const auto first = static_cast<std::size_t>(announced);
    streams.push_back({"zipf", drawn(settings.skew, settings.seed), 0, first});
    streams.push_back({"uniform", drawn(0, settings.seed + 1), all, first});
  }
  const Expected expected = plain_sums(settings.rows, streams);
  std::vector<Turn> turns;
  const auto take = [&](const std::function<std::optional<Turn>(const fs::path&)>& work) {
    if (auto turn = in_child(directory, work)) {
      for (std::size_t s = 0; s < streams.size(); ++s) {
        fmt::print("{}: {:8} {:10.0f} rows/s, without look-ahead {:10.0f}\n", streams[s].name,
                   turn->engine, bench::median(turn->outcomes[s].rows_per_second),
                   bench::median(turn->outcomes[s].alone));
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
  const auto take_peer = [&](const std::unique_ptr<bench::Engine>& peer) -> std::optional<Turn> {
    if (peer == nullptr) {
      return std::nullopt;
    }
    return take_turn(settings, *peer, nullptr, streams, expected, {});
  };
  take(take_store);
  if (!settings.misses_only) {
    const auto options_in = [&](const fs::path& path) {
      return bench::EngineOptions{.directory = path / "peer",
                                  .rows = settings.rows,
                                  .dim = kDim,
                                  .memory_bytes = turns.front().slab_bytes,
                                  .readers = settings.readers};
    };
    take([&](const fs::path& path) { return take_peer(bench::make_rocksdb(options_in(path))); });
    take(take_store);
    take([&](const fs::path& path) { return take_peer(bench::make_lmdb(options_in(path))); });
  }
  nlohmann::json peers{{"rows", settings.rows}};
  double value = 0;
  for (std::size_t s = 0; s < streams.size(); ++s) {
    const double ratio = report(streams[s], s, turns, settings, turns.front().frames, peers);
    value = s == 0 ? ratio : value;
  }
  const bool right =
      std::all_of(turns.begin(), turns.end(), [](const Turn& turn) { return turn.right; });
  bench::Report result{.name = "w2_skewed_ids",
                       .value = value,
                       .unit = "x best peer",
                       .bar = 3.0,
                       .peers = peers,
                       .seed = settings.seed,
                       .command = command};
  const std::string& first = streams.front().name;
  const double to_s3_fifo = peers[first + "_misses_to_best"].get<double>() /
                            peers[first + "_s3_fifo_to_best"].get<double>();
  const bool judged = !settings.smoke && settings.ids.empty();
  if (settings.misses_only) {
    result.value = to_s3_fifo;
    result.unit = "x S3-FIFO's misses";
    result.bar = 1.0;
    result.pass = right && (!judged || to_s3_fifo < 1.0);
  } else {
    const bool met =
        !judged || (value >= 3.0 && to_s3_fifo < 1.0 && peers["zipf_misses_to_best"] <= 1.35 &&
                    peers["uniform_reads_to_raw"] >= 0.85 && peers["uniform_to_best_peer"] > 1.0);
    result.pass = right && met;
  }
  return result.print();
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
    } else if (words.is("--readers")) {
      settings.readers = static_cast<int>(words.number(1, 256));
    } else if (words.is("--ids")) {
      settings.ids = words.word();
    } else if (words.is("--column")) {
      settings.column = static_cast<int>(words.number(0, 1000));
    } else if (words.is("--skew")) {
      settings.skew = static_cast<double>(words.number(1, 1000)) / 100;
      if (settings.skew == 1.0) {
        throw std::invalid_argument("--skew may not be 100: w2::Zipf is of exponents other than 1");
      }
    } else if (words.is("--seed")) {
      settings.seed = static_cast<std::uint64_t>(words.number(0, 1'000'000'000));
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
  return bench::run_benchmark(
      argc, argv, "w2_skewed_ids",
      "[--smoke] [--rows N] [--batches N] [--warm N] [--io-threads N] "
      "[--readers N] [--batch N] [--misses]\n  [--skew PERCENT] [--seed N]\n  "
      "[--ids FILE [--column N] [--blocks]]\n  "
      "--ids sparse [--smoke] [--rows N] [--batches N]",
      [](bench::Arguments& words) {
        const Settings settings = settings_of(words);
        const bench::Scratch scratch("w2");
        if (settings.ids == "sparse") {
          return w2::run_sparse(settings.rows, settings.batches, settings.smoke, scratch.path(),
                                words.command());
        }
        return run(settings, scratch.path(), words.command());
      });
}
