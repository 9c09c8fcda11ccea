// SPDX-License-Identifier: Apache-2.0
//
// W3: everything in RAM, gather + fused optimizer against a memcpy of the same bytes.
//
// A table of 4 GiB of records (dim 128; AdamW unless --optimizer names another), batches of 4,096
// random distinct rows, whose ids are 0 … N−1 or, with --ids sparse, random 64-bit numbers. The
// store gathers the rows and applies random gradients. The memcpy works on a region of its own laid
// out as the store's frames are (same strides, same huge pages, same order of rows): for each id it
// copies the weights out, then reads the whole record into a buffer and writes it back in place.
// Both are timed in turn, batch set by batch set, with one thread and with two; the value is the
// worse of the two medians of the ratio. Before that the store's rows are compared, bit for bit,
// with plain loops.
//
// Reading order: main, measure, check_answer.
//
// Threads: one or two.   Memory: twice the table (16 MiB with --smoke).
#include <algorithm>
#include <array>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <sys/mman.h>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "bench/report.h"
#include "plimsoll/embedding_store.h"
#include "tests/support/embedding_oracle.h"

namespace {

namespace pl = plimsoll;
using Clock = std::chrono::steady_clock;

constexpr double kBar = 1.5;
constexpr std::uint64_t kSeed = 20240611;
constexpr std::int64_t kDim = 128;
constexpr std::int64_t kBatchRows = 4096;
constexpr std::size_t kRowBytes = kDim * sizeof(float);
constexpr std::size_t kRecordBytesMost = 16 + 3 * kRowBytes;
constexpr std::size_t kRecordsAt = 32;  // The page header before them.

// What a row keeps beside its weights, in floats.
struct Kind {
  const char* name;
  pl::RowOptimizer kind;
  std::int64_t state;
};
constexpr std::array kKinds{Kind{"adamw", pl::RowOptimizer::kAdamW, 2 * kDim},
                            Kind{"adamw_fresh", pl::RowOptimizer::kAdamWFresh, 0},
                            Kind{"adam", pl::RowOptimizer::kAdam, 2 * kDim},
                            Kind{"adagrad", pl::RowOptimizer::kAdagrad, kDim},
                            Kind{"row_adagrad", pl::RowOptimizer::kRowAdagrad, 1},
                            Kind{"sgd", pl::RowOptimizer::kSgd, 0},
                            Kind{"sgd_momentum", pl::RowOptimizer::kSgdMomentum, kDim}};

const pl::RowInit kInit{.kind = pl::RowInitKind::kUniform, .scale = 0.1F};

struct Settings {
  bool smoke{false};
  std::int64_t table_bytes{4LL << 30};
  int batches{16};  // Per probe.
  int probes{15};
  Kind optimizer{kKinds.front()};
  bool sparse{false};  // Whether ids are random 64-bit numbers.
  [[nodiscard]] std::int64_t record_bytes() const {
    return (16 + static_cast<std::int64_t>(sizeof(float)) * (kDim + optimizer.state) + 7) / 8 * 8;
  }
  [[nodiscard]] std::int64_t rows() const { return table_bytes / record_bytes(); }
  // Of the row at a position. Sparse ones are distinct and as good as random: odd numbers times a
  // constant.
  [[nodiscard]] std::int64_t id_of(std::int64_t position) const {
    return sparse ? static_cast<std::int64_t>((2 * static_cast<std::uint64_t>(position) + 1) *
                                              0x9E3779B97F4A7C15ULL)
                  : position;
  }
};

// Batches used round and round: their rows' positions and ids, and gradients.
struct Work {
  std::vector<std::vector<std::int64_t>> positions;
  std::vector<std::vector<std::int64_t>> ids;
  std::vector<std::vector<float>> grads;
  std::vector<float> out = std::vector<float>(kBatchRows * kDim);
};

Work make_work(const Settings& settings, std::uint64_t seed) {
  Work work;
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<bool> taken(static_cast<std::size_t>(settings.rows()));
  for (int b = 0; b < settings.batches; ++b) {
    std::vector<std::int64_t> positions;
    std::vector<std::int64_t> ids;
    std::fill(taken.begin(), taken.end(), false);
    while (static_cast<std::int64_t>(ids.size()) < kBatchRows) {
      const auto id = random() % taken.size();
      if (!taken[id]) {
        taken[id] = true;
        positions.push_back(static_cast<std::int64_t>(id));
        ids.push_back(settings.id_of(positions.back()));
      }
    }
    std::vector<float> grads(kBatchRows * kDim);
    for (float& grad : grads) {
      grad = normal(random);
    }
    work.positions.push_back(std::move(positions));
    work.ids.push_back(std::move(ids));
    work.grads.push_back(std::move(grads));
  }
  return work;
}

// ---- The answer ----

// Applies the first batches to the store and to a plain map; says whether they agree in every bit.
bool check_answer(pl::EmbeddingStore& store, Work& work, const pl::RowOptimizerOptions& optimizer) {
  pl::test::EmbeddingOracle plain(kDim, optimizer, kInit);
  const std::size_t batches = std::min<std::size_t>(work.ids.size(), 3);
  for (int round = 0; round < 2; ++round) {
    for (std::size_t b = 0; b < batches; ++b) {
      store.apply(work.ids[b], work.grads[b]).or_throw();
      plain.apply(work.ids[b], work.grads[b]);
    }
  }
  for (std::size_t b = 0; b < batches; ++b) {
    store.gather(work.ids[b], work.out).or_throw();
    for (std::size_t i = 0; i < work.ids[b].size(); ++i) {
      const auto& weights = plain.row(work.ids[b][i]).weights;
      if (std::memcmp(weights.data(), work.out.data() + i * kDim, kRowBytes) != 0) {
        std::cerr << "w3_update: row " << work.ids[b][i] << " is not what a plain loop gives\n";
        return false;
      }
    }
  }
  return true;
}

// ---- The memcpy ----

// A region laid out as the store's frames, in huge pages where there are any.
class Mirror {
 public:
  explicit Mirror(const pl::TableInfo& table)
      : page_bytes_(static_cast<std::size_t>(table.page_bytes)),
        rows_per_page_(static_cast<std::size_t>(table.rows_per_page)),
        record_bytes_(static_cast<std::size_t>(table.record_bytes)),
        bytes_((static_cast<std::size_t>(table.rows) / rows_per_page_ + 1) * page_bytes_) {
    void* memory =
        ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      throw std::runtime_error("w3_update: not enough memory for the memcpy's region");
    }
    ::madvise(memory, bytes_, MADV_HUGEPAGE);
    std::memset(memory, 1, bytes_);
    data_ = static_cast<std::byte*>(memory);
  }
  ~Mirror() { ::munmap(data_, bytes_); }
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  [[nodiscard]] std::size_t record_bytes() const { return record_bytes_; }
  [[nodiscard]] std::byte* record(std::int64_t position) const {
    const auto at = static_cast<std::size_t>(position);
    return data_ + at / rows_per_page_ * page_bytes_ + kRecordsAt +
           at % rows_per_page_ * record_bytes_;
  }

 private:
  std::size_t page_bytes_;
  std::size_t rows_per_page_;
  std::size_t record_bytes_;
  std::size_t bytes_;
  std::byte* data_{nullptr};
};

// `ahead`: how many records ahead the next ones are fetched into the cache; 0: not at all.
void copy_rows(const Mirror& mirror, Work& work, std::size_t batch, std::size_t begin,
               std::size_t end, std::size_t ahead) {
  const auto& positions = work.positions[batch];
  const auto fetch = [&](std::size_t i, std::size_t bytes) {
    for (std::size_t line = 0; ahead > 0 && i + ahead < end && line < bytes; line += 64) {
      __builtin_prefetch(mirror.record(positions[i + ahead]) + line, 1);
    }
  };
  for (std::size_t i = begin; i < end; ++i) {
    fetch(i, 16 + kRowBytes);
    std::memcpy(work.out.data() + i * kDim, mirror.record(positions[i]) + 16, kRowBytes);
  }
  const std::size_t whole = mirror.record_bytes();
  std::array<std::byte, kRecordBytesMost> buffer;
  for (std::size_t i = begin; i < end; ++i) {
    fetch(i, whole);
    std::byte* const record = mirror.record(positions[i]);
    std::memcpy(buffer.data(), record, whole);
    asm volatile("" : : "r"(buffer.data()) : "memory");  // The copy is needed, says nobody else.
    std::memcpy(record, buffer.data(), whole);
  }
}

// From the first thread's start to the last one's end, by their own clocks: this thread may be held
// up for longer than they take.
double seconds_of_memcpy(const Mirror& mirror, Work& work, int threads, std::size_t ahead = 0) {
  const auto count = static_cast<std::size_t>(threads);
  const std::size_t share = kBatchRows / count;
  std::barrier start(threads);
  std::vector<Clock::time_point> begun(count);
  std::vector<Clock::time_point> done(count);
  std::vector<std::jthread> crew;
  for (std::size_t t = 0; t < count; ++t) {
    crew.emplace_back([&, t] {
      start.arrive_and_wait();
      begun[t] = Clock::now();
      for (std::size_t b = 0; b < work.ids.size(); ++b) {
        copy_rows(mirror, work, b, t * share, (t + 1) * share, ahead);
      }
      done[t] = Clock::now();
    });
  }
  crew.clear();
  return std::chrono::duration<double>(*std::max_element(done.begin(), done.end()) -
                                       *std::min_element(begun.begin(), begun.end()))
      .count();
}

double seconds_of_store(pl::EmbeddingStore& store, Work& work) {
  const auto begin = Clock::now();
  for (std::size_t b = 0; b < work.ids.size(); ++b) {
    store.gather(work.ids[b], work.out).or_throw();
    store.apply(work.ids[b], work.grads[b]).or_throw();
  }
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// ---- The measurement ----

struct Outcome {
  bool right{false};
  double ratio{0};     // Median over probes.
  double store_ns{0};  // Per row, medians.
  double memcpy_ns{0};
  double fetched_memcpy_ns{0};  // With the records fetched ahead, as the store does. Not judged.
};

Outcome measure(const Settings& settings, pl::Governor& governor,
                const std::filesystem::path& directory, Work& work, int threads) {
  const pl::RowOptimizerOptions optimizer{
      .kind = settings.optimizer.kind, .learning_rate = 1e-3F, .weight_decay = 0.01F};
  std::filesystem::remove_all(directory);
  std::vector<std::int64_t> ids(static_cast<std::size_t>(settings.rows()));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    ids[i] = settings.id_of(static_cast<std::int64_t>(i));
  }
  pl::EmbeddingStoreOptions options{
      .directory = directory,
      .dim = kDim,
      .optimizer = optimizer,
      .init = kInit,
      .store_bytes = 64LL << 30,  // All it can use; it takes what it needs.
      .batch_rows = kBatchRows,
      .compute_threads = threads};
  if (settings.sparse) {
    options.ids = ids;
  } else {
    options.rows = settings.rows();
  }
  auto store = pl::EmbeddingStore::open(governor, options).or_throw();
  const auto table = pl::EmbeddingStore::inspect(directory).or_throw();
  if (table.record_bytes != settings.record_bytes()) {
    throw std::runtime_error(
        fmt::format("the store's records have {} bytes, not {}: the memcpy would differ",
                    table.record_bytes, settings.record_bytes()));
  }
  const Mirror mirror(table);
  for (std::size_t first = 0; first < ids.size(); first += kBatchRows) {  // Into RAM, in order.
    const auto some =
        std::span(ids).subspan(first, std::min<std::size_t>(kBatchRows, ids.size() - first));
    store.gather(some, std::span(work.out).first(some.size() * kDim)).or_throw();
  }
  Outcome outcome;
  outcome.right = check_answer(store, work, optimizer);
  if (!outcome.right) {
    return outcome;
  }
  static_cast<void>(seconds_of_memcpy(mirror, work, threads));  // Both warm.
  static_cast<void>(seconds_of_store(store, work));
  std::vector<double> ratios;
  std::vector<double> ours;
  std::vector<double> theirs;
  std::vector<double> fetched;
  const double rows = static_cast<double>(kBatchRows) * static_cast<double>(work.ids.size());
  for (int probe = 0; probe < settings.probes; ++probe) {
    const double before = seconds_of_memcpy(mirror, work, threads);
    const double seconds = seconds_of_store(store, work);
    const double after = seconds_of_memcpy(mirror, work, threads);
    const double plain = (before + after) / 2;
    fetched.push_back(seconds_of_memcpy(mirror, work, threads, 4) * 1e9 / rows);
    ratios.push_back(seconds / plain);
    ours.push_back(seconds * 1e9 / rows);
    theirs.push_back(plain * 1e9 / rows);
  }
  outcome.ratio = bench::median(ratios);
  outcome.store_ns = bench::median(ours);
  outcome.memcpy_ns = bench::median(theirs);
  outcome.fetched_memcpy_ns = bench::median(fetched);
  std::printf(
      "%d thread%s: store %.0f ns/row, memcpy %.0f ns/row (%.0f with records fetched ahead)"
      ", ratio %.3f (%.3f … %.3f)\n",
      threads, threads == 1 ? "" : "s", outcome.store_ns, outcome.memcpy_ns,
      outcome.fetched_memcpy_ns, outcome.ratio, *std::min_element(ratios.begin(), ratios.end()),
      *std::max_element(ratios.begin(), ratios.end()));
  if (store.stats().pages_read != 0 || store.stats().pages_written != 0) {
    std::printf("  (the table did not stay in RAM: %s)\n", store.plan().to_string().c_str());
    outcome.right = false;
  }
  return outcome;
}

int run(const Settings& settings, const std::string& command) {
  auto governor = pl::Governor::create({}).or_throw();
  const bench::Scratch scratch("w3");
  Work work = make_work(settings, kSeed);
  fmt::print("{}, {} ids: {} rows of {} bytes, {} batches of {} rows per probe, {} probes\n",
             settings.optimizer.name, settings.sparse ? "sparse" : "dense", settings.rows(),
             settings.record_bytes(), settings.batches, kBatchRows, settings.probes);
  nlohmann::json peers = nlohmann::json::parse(bench::from_environment("PLIMSOLL_PEERS", "{}"));
  peers["optimizer"] = settings.optimizer.name;
  peers["ids"] = settings.sparse ? "sparse" : "dense";
  double worst = 0;
  double store_ns = 0;  // Of the number of threads before.
  double speedup = 0;   // Two threads' to one's.
  bool right = true;
  for (const int threads : {1, 2}) {
    const Outcome outcome = measure(settings, governor, scratch.path() / "table", work, threads);
    right = right && outcome.right;
    worst = std::max(worst, outcome.ratio);
    speedup = store_ns / outcome.store_ns;
    store_ns = outcome.store_ns;
    peers[fmt::format("store_{}_threads_ns_per_row", threads)] = outcome.store_ns;
    peers[fmt::format("memcpy_{}_threads_ns_per_row", threads)] = outcome.memcpy_ns;
    peers[fmt::format("fetched_memcpy_{}_threads_ns_per_row", threads)] = outcome.fetched_memcpy_ns;
    peers[fmt::format("ratio_{}_threads", threads)] = outcome.ratio;
  }
  peers["speedup_of_2_threads"] = speedup;
  return bench::Report{.name = "w3_update",
                       .value = worst,
                       .unit = "x memcpy",
                       .bar = kBar,
                       .pass = right && (settings.smoke || (worst <= kBar && speedup > 1)),
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
      settings.table_bytes = 16LL << 20;
      settings.batches = 4;
      settings.probes = 3;
    } else if (words.is("--optimizer")) {
      const std::string name = words.word();
      const auto* const found = std::find_if(kKinds.begin(), kKinds.end(),
                                             [&](const Kind& kind) { return name == kind.name; });
      if (found == kKinds.end()) {
        words.refuse();
      }
      settings.optimizer = *found;
    } else if (words.is("--ids")) {
      const std::string kind = words.word();
      settings.sparse = kind == "sparse";
      if (!settings.sparse && kind != "dense") {
        words.refuse();
      }
    } else if (words.is("--table-mib")) {
      settings.table_bytes = words.number(8, 1 << 20) << 20;
    } else if (words.is("--probes")) {
      settings.probes = static_cast<int>(words.number(1, 100'000));
    } else {
      words.refuse();
    }
  }
  return settings;
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_benchmark(
      argc, argv, "w3_update",
      "[--smoke] [--table-mib N] [--probes N] [--ids dense|sparse]\n  [--optimizer "
      "adamw|adamw_fresh|adam|adagrad|row_adagrad|sgd|sgd_momentum]",
      [](bench::Arguments& words) { return run(settings_of(words), words.command()); });
}
