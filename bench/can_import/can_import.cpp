// SPDX-License-Identifier: Apache-2.0
//
// can_import: frames a second that become graphs, and the memory it takes as the input grows.
//
// Each import runs in a process of its own, with one thread, on an uncompressed CSV that is in the
// page cache; the time includes making the set durable. Before that a small set is compared with
// plain loops over its frames.
//
// Reading order: main, run, check_answer.
//
// Threads: one.   Memory: one repetition of the text, and what the import takes.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "bench/report.h"
#include "plimsoll/can_import.h"
#include "plimsoll/limits.h"
#include "tests/support/can_traffic.h"

namespace {

namespace pl = plimsoll;
namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr double kBar = 2e6;
constexpr std::uint64_t kSeed = 20240623;
constexpr std::uint32_t kIds = 50;
constexpr std::int64_t kPeakSlackBytes = 4 << 20;  // Code and names; not growth.

struct Settings {
  bool smoke{false};
  std::int64_t frames{2'000'000};  // Of a timed import.
  std::int64_t base{200'000};      // Once, ten times and a hundred times for the memory.
  int probes{5};
};

// What one import in a child took.
struct Taken {
  double seconds{0};
  double cpu_seconds{0};  // Of the process, in the kernel too.
  std::int64_t peak_bytes{0};
  std::int64_t graphs{0};
};

Taken import_in_child(const fs::path& csv, const fs::path& out) {
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) {
    throw std::runtime_error("no pipe");
  }
  const pid_t child = ::fork();
  if (child == 0) {
    Taken taken;
    try {
      pl::Governor governor = pl::Governor::create({.memory_limit = "512MiB"}).or_throw();
      const auto began = Clock::now();
      taken.graphs =
          pl::import_can(governor, {.inputs = {csv}, .out = out, .rebuild = true}, nullptr)
              .or_throw()
              .info.graphs;
      taken.seconds = std::chrono::duration<double>(Clock::now() - began).count();
      rusage usage{};
      ::getrusage(RUSAGE_SELF, &usage);
      taken.cpu_seconds =
          static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
          static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
      // VmHWM is inherited from before the fork only as far as pages were touched there.
      taken.peak_bytes = pl::read_resident().or_throw().peak;
    } catch (const std::exception& error) {
      std::cerr << "can_import: " << error.what() << '\n';
    }
    const bool told = ::write(ends[1], &taken, sizeof(taken)) == sizeof(taken);
    ::_exit(told && taken.graphs > 0 ? 0 : 1);
  }
  ::close(ends[1]);
  Taken taken;
  const bool read = ::read(ends[0], &taken, sizeof(taken)) == sizeof(taken);
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (!read || status != 0) {
    throw std::runtime_error("an import failed");
  }
  return taken;
}

// One file of `times` repetitions of the frames.
void write_repeated(const fs::path& path, const std::string& text, std::int64_t times) {
  std::ofstream out(path, std::ios::binary);
  const auto header = text.find('\n') + 1;
  out << text.substr(0, header);
  for (std::int64_t i = 0; i < times; ++i) {
    out.write(text.data() + header, static_cast<std::streamsize>(text.size() - header));
  }
  if (!out.flush()) {
    throw std::runtime_error("no room for " + path.string());
  }
}

// ---- The answer ----

struct Row {
  std::uint32_t id;
  std::array<double, 8> bytes;
  int attack;
};

std::vector<Row> rows_of(const std::string& text) {
  std::vector<Row> rows;
  for (std::size_t at = text.find('\n') + 1; at < text.size();) {
    const std::size_t end = text.find('\n', at);
    const std::string line = text.substr(at, end - at);
    const std::size_t id = line.find(',') + 1;
    const std::size_t data = line.find(',', id) + 1;
    const std::size_t label = line.rfind(',') + 1;
    Row row{static_cast<std::uint32_t>(std::stoul(line.substr(id), nullptr, 16)), {}, 0};
    for (std::size_t b = 0; data + 2 * b + 1 < label; ++b) {
      row.bytes[b] = std::stoi(line.substr(data + 2 * b, 2), nullptr, 16);
    }
    row.attack = line[label] - '0';
    rows.push_back(row);
    at = end + 1;
  }
  return rows;
}

bool near(double a, double b) {
  return std::abs(a - b) <= 1e-6 * std::max(1.0, std::abs(b));
}

// Nodes, edges, means and counts of every window, by plain loops.
bool check_answer(const fs::path& scratch) {
  const std::string text = pl::test::can_csv(4'321, 20, kSeed);
  pl::test::spill(scratch / "small.csv", text);
  pl::Governor governor = pl::Governor::create({.memory_limit = "512MiB"}).or_throw();
  pl::import_can(governor, {.inputs = {scratch / "small.csv"}, .out = scratch / "small"}, nullptr)
      .or_throw();
  const auto set = pl::GraphSet::open(governor, {.directory = scratch / "small"}).or_throw();
  const std::vector<Row> rows = rows_of(text);
  const auto windows = static_cast<std::int64_t>((rows.size() - 1 - 100) / 100 + 1);
  bool right = set.graphs() == windows;
  for (std::int64_t g = 0; right && g < windows; ++g) {
    const std::span window(rows.data() + g * 100, 101);
    std::set<std::uint32_t> nodes;
    std::map<std::pair<std::uint32_t, std::uint32_t>, int> edges;
    int attack = 0;
    for (std::size_t i = 0; i < 100; ++i) {
      nodes.insert({window[i].id, window[i + 1].id});
      ++edges[{window[i].id, window[i + 1].id}];
      attack |= window[i].attack;
    }
    pl::test::GraphMemory memory(set.counts(g));
    static_cast<void>(set.gather(std::span(&g, 1), memory.buffers()).or_throw());
    right = set.counts(g).nodes == static_cast<std::int64_t>(nodes.size()) &&
            set.counts(g).edges == static_cast<std::int64_t>(edges.size()) &&
            memory.labels[0] == attack;
    std::size_t edge = 0;
    for (const auto& [pair, count] : edges) {
      right = right && near(memory.edge_attr[edge++ * 11], count);
    }
    std::size_t node = 0;
    for (const std::uint32_t id : nodes) {
      double sum = 0;
      int count = 0;
      for (std::size_t i = 0; i < 100; ++i) {
        sum += window[i].id == id ? window[i].bytes[3] / 255.0 : 0.0;
        count += window[i].id == id ? 1 : 0;
      }
      right = right && near(memory.x[node++ * 11 + 4], count > 0 ? sum / count : 0.0);
    }
  }
  if (!right) {
    std::cerr << "can_import: a graph is not what plain loops give\n";
  }
  governor.close();
  return right;
}

int run(const Settings& settings, const fs::path& scratch, const std::string& command) {
  const bool right = check_answer(scratch);
  const std::string text = pl::test::can_csv(settings.base, kIds, kSeed);
  const fs::path csv = scratch / "train.csv";
  std::map<int, Taken> by_size;
  for (const int times : {1, 10, settings.smoke ? 20 : 100}) {
    write_repeated(csv, text, times);
    by_size[times] = import_in_child(csv, scratch / "set");
    std::printf("%3d ×: %.1f M frames, peak %.1f MiB, %.2f M frames/s\n", times,
                static_cast<double>(settings.base * times) / 1e6,
                static_cast<double>(by_size[times].peak_bytes) / (1 << 20),
                static_cast<double>(settings.base * times) / by_size[times].seconds / 1e6);
  }
  const std::int64_t peak = by_size.begin()->second.peak_bytes;
  const std::int64_t peak_last = by_size.rbegin()->second.peak_bytes;
  const bool flat = peak_last <= peak + kPeakSlackBytes;

  const std::int64_t times = std::max<std::int64_t>(1, settings.frames / settings.base);
  write_repeated(csv, text, times);
  std::vector<double> rates;
  std::vector<double> cpu_rates;
  for (int probe = 0; probe < settings.probes; ++probe) {
    const Taken taken = import_in_child(csv, scratch / "set");
    rates.push_back(static_cast<double>(times * settings.base) / taken.seconds);
    cpu_rates.push_back(static_cast<double>(times * settings.base) / taken.cpu_seconds);
  }
  const double rate = bench::median(rates);
  return bench::Report{.name = "can_import",
                       .value = rate,
                       .unit = "frames/s on one core, set durable",
                       .bar = kBar,
                       .pass = right && flat && (settings.smoke || rate >= kBar),
                       .peers = {{"frames_per_s_min", bench::quantile(rates, 0.0)},
                                 {"frames_per_s_max", bench::quantile(rates, 1.0)},
                                 {"frames_per_cpu_s", bench::median(cpu_rates)},
                                 {"peak_bytes_once", peak},
                                 {"peak_bytes_most", peak_last},
                                 {"repetitions_most", by_size.rbegin()->first},
                                 {"frames", times * settings.base}},
                       .seed = kSeed,
                       .command = command}
      .print();
}

Settings settings_of(bench::Arguments& words) {
  Settings settings;
  while (words.next()) {
    if (words.is("--smoke")) {
      settings = {.smoke = true, .frames = 40'000, .base = 20'000, .probes = 1};
    } else if (words.is("--frames")) {
      settings.frames = words.number(1000, 1'000'000'000);
    } else if (words.is("--base-frames")) {
      settings.base = words.number(1000, 10'000'000);
    } else if (words.is("--probes")) {
      settings.probes = static_cast<int>(words.number(1, 1000));
    } else {
      words.refuse();
    }
  }
  return settings;
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_in_scratch<Settings>(argc, argv, "can_import",
                                         "[--smoke] [--frames N] [--base-frames N] [--probes N]",
                                         &settings_of, &run);
}
