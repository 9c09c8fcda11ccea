// SPDX-License-Identifier: Apache-2.0
//
// W5: how long a commit holds the training thread, the worst of a thousand too, and what that
// depends on.
//
// A table is written whole, then updated at random: between two commits as many rows as make
// `--dirty-mib` of pages dirty, every row's new value a pure function of its id and the step. The
// same is done on a table of an eighth of the size, in turn, and beside each commit the same bytes
// are written to a plain file with as many syncs. At the end the table is opened again and compared
// with a plain array of the step each row was written at last.
//
// Reading order: main, run, Table.
//
// Threads: the store's.   Memory: a quarter of the table, and 4 bytes a row.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "bench/report.h"
#include "plimsoll/embedding_store.h"

namespace {

namespace pl = plimsoll;
using Clock = std::chrono::steady_clock;

constexpr double kBarMs = 50;
constexpr double kWorstBarMs = 100;
constexpr std::int64_t kDim = 124;  // 512 bytes a record.
constexpr std::int64_t kRecordBytes = 512;
constexpr std::int64_t kRowsPerPage = 7;
constexpr std::int64_t kPageBytes = 4096;
constexpr std::int64_t kBatchRows = 4096;
constexpr std::uint64_t kSeed = 20240613;

struct Settings {
  bool smoke{false};
  std::int64_t table_bytes{4LL << 30};
  std::int64_t dirty_bytes{16LL << 20};
  int commits{1000};
  [[nodiscard]] std::int64_t rows() const { return table_bytes / kRecordBytes; }
};

double milliseconds_since(Clock::time_point began) {
  return std::chrono::duration<double, std::milli>(Clock::now() - began).count();
}

float value_of(std::int64_t id, std::int32_t step) {
  return static_cast<float>(step) + static_cast<float>(id % 1024) / 1024.0F;
}

// A table and the plain array it must agree with.
class Table {
 public:
  Table(const pl::Governor& governor, std::filesystem::path directory, std::int64_t rows,
        std::int64_t dirty_bytes)
      : governor_(governor),
        options_{.directory = std::move(directory),
                 .dim = kDim,
                 .optimizer = {.kind = pl::RowOptimizer::kSgd},
                 .init = {.kind = pl::RowInitKind::kZeros},
                 .rows = rows,
                 .batch_rows = kBatchRows,
                 .io_threads = 8,
                 .dirty_bytes = std::max(dirty_bytes, std::int64_t{1} << 20)},
        written_at_(static_cast<std::size_t>(rows), 0),
        random_(kSeed) {
    const auto plan = pl::EmbeddingStore::plan(options_).or_throw();
    options_.store_bytes = plan.floor_bytes + rows * kRecordBytes / 4;
    store_.emplace(pl::EmbeddingStore::open(governor_, options_).or_throw());
    std::vector<std::int64_t> ids(kBatchRows);
    for (std::int64_t first = 0; first < rows; first += kBatchRows) {
      ids.resize(static_cast<std::size_t>(std::min(kBatchRows, rows - first)));
      std::iota(ids.begin(), ids.end(), first);
      write(ids);
    }
    commit();
  }

  // Writes rows of `bytes` of pages, no two in one page, at random.
  void make_dirty(std::int64_t bytes) {
    const std::int64_t pages = options_.rows / kRowsPerPage;
    for (std::int64_t left = std::min(bytes / kPageBytes, pages / 2); left > 0;) {
      std::vector<std::int64_t> ids(static_cast<std::size_t>(std::min(left, kBatchRows)));
      for (auto& id : ids) {
        id =
            static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(pages)) * kRowsPerPage;
      }
      left -= static_cast<std::int64_t>(ids.size());
      write(ids);
    }
  }

  // Returns how long the caller was held, in milliseconds.
  double commit() {
    const auto began = Clock::now();
    store_->commit(++step_).or_throw();
    return milliseconds_since(began);
  }

  // Opens the table again and compares a sample of its rows, and those written last.
  bool is_right() {
    store_.reset();
    store_.emplace(pl::EmbeddingStore::open(governor_, options_).or_throw());
    if (store_->last_commit() != step_) {
      return false;
    }
    std::vector<float> row(kDim);
    for (int i = 0; i < 20'000; ++i) {
      const auto id = static_cast<std::int64_t>(random_() % written_at_.size());
      store_->gather({&id, 1}, row).or_throw();
      const float wanted = value_of(id, written_at_[static_cast<std::size_t>(id)]);
      if (std::any_of(row.begin(), row.end(), [&](float v) { return v != wanted; })) {
        std::cerr << "w5_commit_stall: row " << id << " is not what was written last\n";
        return false;
      }
    }
    return true;
  }
  [[nodiscard]] const pl::EmbeddingStore& store() const { return *store_; }

 private:
  void write(const std::vector<std::int64_t>& ids) {
    values_.resize(ids.size() * kDim);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      written_at_[static_cast<std::size_t>(ids[i])] = step_;
      std::fill_n(values_.begin() + static_cast<std::ptrdiff_t>(i * kDim), kDim,
                  value_of(ids[i], step_));
    }
    store_->update(ids, values_).or_throw();
  }

  pl::Governor governor_;
  pl::EmbeddingStoreOptions options_;
  std::optional<pl::EmbeddingStore> store_;
  std::vector<std::int32_t> written_at_;
  std::vector<float> values_;
  std::mt19937_64 random_;
  std::int32_t step_{0};
};

// The same bytes to a plain file: data, sync, a block, sync, a block, sync.
class PlainFile {
 public:
  PlainFile(const std::filesystem::path& path, std::int64_t bytes)
      : file_(::open(path.c_str(), O_RDWR | O_CREAT | O_DIRECT, 0600)),
        bytes_(static_cast<std::size_t>(bytes)),
        memory_(static_cast<std::byte*>(std::aligned_alloc(4096, bytes_ + 4096))) {
    if (file_ < 0 || memory_ == nullptr) {
      throw std::runtime_error("w5_commit_stall: no direct I/O in " + path.string());
    }
    std::memset(memory_, 1, bytes_ + 4096);
    static_cast<void>(write_and_sync());
  }
  ~PlainFile() {
    ::close(file_);
    std::free(memory_);
  }
  PlainFile(const PlainFile&) = delete;
  PlainFile& operator=(const PlainFile&) = delete;

  double write_and_sync() {
    const auto began = Clock::now();
    constexpr std::size_t kPiece = 1 << 20;
    for (std::size_t at = 0; at < bytes_; at += kPiece) {
      put(at, std::min(kPiece, bytes_ - at));
    }
    sync();
    put(bytes_, 4096);
    sync();
    put(bytes_, 4096);
    sync();
    return milliseconds_since(began);
  }

 private:
  void put(std::size_t at, std::size_t size) const {
    if (::pwrite(file_, memory_, size, static_cast<off_t>(at)) != static_cast<ssize_t>(size)) {
      throw std::runtime_error("w5_commit_stall: a plain write failed");
    }
  }
  void sync() const {
    if (::fdatasync(file_) != 0) {
      throw std::runtime_error("w5_commit_stall: a plain sync failed");
    }
  }
  int file_;
  std::size_t bytes_;
  std::byte* memory_;
};

int run(const Settings& settings, const std::filesystem::path& directory,
        const std::string& command) {
  auto governor = pl::Governor::create({}).or_throw();
  const auto began = Clock::now();
  Table table(governor, directory / "table", settings.rows(), settings.dirty_bytes);
  Table small(governor, directory / "small", settings.rows() / 8, settings.dirty_bytes);
  PlainFile plain(directory / "plain", settings.dirty_bytes);
  const double filled = milliseconds_since(began) / 1000;
  std::vector<double> ours;
  std::vector<double> on_small;
  std::vector<double> on_plain;
  for (int i = 0; i < settings.commits; ++i) {
    table.make_dirty(settings.dirty_bytes);
    ours.push_back(table.commit());
    if (i % 10 == 0) {
      small.make_dirty(settings.dirty_bytes);
      on_small.push_back(small.commit());
      on_plain.push_back(plain.write_and_sync());
    }
  }
  const double played = milliseconds_since(began) / 1000 - filled;
  const auto stats = table.store().stats();
  const bool right = table.is_right() && small.is_right();
  const double p99 = bench::quantile(ours, 0.99);
  const double worst = bench::quantile(ours, 1.0);
  std::printf("%d commits of up to %lld MiB dirty on %lld MiB: p50 %.2f, p99 %.2f, most %.2f ms\n",
              settings.commits, static_cast<long long>(settings.dirty_bytes >> 20),
              static_cast<long long>(settings.table_bytes >> 20), bench::quantile(ours, 0.5), p99,
              worst);
  std::printf("the tables were filled in %.0f s; one commit to the next took %.0f ms\n", filled,
              played * 1000 / settings.commits);
  std::printf("an eighth of the table: p50 %.2f ms; the same bytes to a plain file: p50 %.2f ms\n",
              bench::quantile(on_small, 0.5), bench::quantile(on_plain, 0.5));
  return bench::Report{.name = "w5_commit_stall",
                       .value = p99,
                       .unit = "ms at the 99th percentile",
                       .bar = kBarMs,
                       .pass = right && (settings.smoke || (p99 <= kBarMs && worst <= kWorstBarMs &&
                                                            settings.commits >= 1000)),
                       .peers = {{"commit_ms_p50", bench::quantile(ours, 0.5)},
                                 {"commit_ms_max", worst},
                                 {"commit_ms_max_bar", kWorstBarMs},
                                 {"small_table_ms_p50", bench::quantile(on_small, 0.5)},
                                 {"plain_file_ms_p50", bench::quantile(on_plain, 0.5)},
                                 {"plain_file_ms_p99", bench::quantile(on_plain, 0.99)},
                                 {"plain_file_ms_max", bench::quantile(on_plain, 1.0)},
                                 {"commits", settings.commits},
                                 {"table_mib", settings.table_bytes >> 20},
                                 {"dirty_mib_max", stats.dirty_bytes_max >> 20}},
                       .seed = kSeed,
                       .command = command}
      .print();
}

Settings settings_of(bench::Arguments& words) {
  Settings settings;
  while (words.next()) {
    if (words.is("--smoke")) {
      settings = {.smoke = true, .table_bytes = 16LL << 20, .dirty_bytes = 1 << 20, .commits = 20};
    } else if (words.is("--table-mib")) {
      settings.table_bytes = words.number(8, 1 << 20) << 20;
    } else if (words.is("--dirty-mib")) {
      settings.dirty_bytes = words.number(1, 64) << 20;
    } else if (words.is("--commits")) {
      settings.commits = static_cast<int>(words.number(1, 1'000'000));
    } else {
      words.refuse();
    }
  }
  return settings;
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_in_scratch<Settings>(argc, argv, "w5_commit_stall",
                                         "[--smoke] [--table-mib N] [--dirty-mib N] [--commits N]",
                                         &settings_of, &run);
}
