// SPDX-License-Identifier: Apache-2.0
//
// trace_off: what it costs a step that the arena could be traced, while it is not.
//
// This source is built twice, with arena_pages.cpp as it is and without its comparisons. Each child
// takes a step per line it reads; the parent lets the two take turns. See README.md.
//
// Reading order: main, measure, one_round, serve.
//
// Threads: one in each process.   Memory: 256 MiB of blocks in a child; a figure a round.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/philox.h"
#include "bench/report.h"
#include "bench/turns.h"
#include "plimsoll/governor.h"
#include "torch/arena_pages.h"

namespace {

constexpr double kBar = 1.005;  // Upper 95 % bound.
constexpr std::uint64_t kSeed = 20261122;
constexpr std::int64_t kBlocks = 800;
constexpr std::int64_t kWritten = 16 << 10;  // Of a block, at most: stays within caches.
constexpr int kStepsATurn = 16;

struct Settings {
  bool smoke{false};
  int rounds{100};
  int pairs{25};
  int warm{3};
};

// ---- The child ----

double cpu_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// 256 B to 1 MiB, evenly in their logarithm, most of them small as a step's are.
std::vector<std::int64_t> block_sizes() {
  std::vector<std::int64_t> sizes;
  for (std::int64_t k = 0; k < kBlocks; ++k) {
    const auto words = plimsoll::philox(kSeed, 0, static_cast<std::uint64_t>(k));
    const double share = static_cast<double>(words[0]) / 4294967296.0;
    sizes.push_back(static_cast<std::int64_t>(256.0 * std::exp2(12.0 * share)));
  }
  return sizes;
}

// The lightest step there is: each block is written once, or its first pages. Returns a sum over
// their places.
std::uint64_t step(plimsoll::ArenaPages& arena, const std::vector<std::int64_t>& sizes,
                   std::vector<void*>& kept, std::uintptr_t base) {
  std::uint64_t places = 0;
  const auto make = [&](std::int64_t bytes) {
    void* data = arena.allocate(bytes).or_throw().data;
    std::memset(data, 1, static_cast<std::size_t>(std::min(bytes, kWritten)));
    places = places * 31 + (reinterpret_cast<std::uintptr_t>(data) - base);
    return data;
  };
  for (const std::int64_t bytes : sizes) {  // Forward: every other block is kept for backward.
    void* data = make(bytes);
    if (kept.size() % 2 == 0) {
      kept.push_back(data);
    } else {
      kept.push_back(nullptr);
      arena.free(data);
    }
  }
  while (!kept.empty()) {
    if (kept.back() != nullptr) {
      arena.free(make(4096));
      arena.free(kept.back());
    }
    kept.pop_back();
  }
  return places;
}

int serve() {
  plimsoll::Governor governor = plimsoll::Governor::create({.memory_limit = "2GiB"}).or_throw();
  plimsoll::ArenaPages arena;
  arena.open(std::int64_t{4} << 30).or_throw();
  arena.attach(governor, std::int64_t{1} << 30).or_throw();
  const auto sizes = block_sizes();
  std::vector<void*> kept;
  kept.reserve(sizes.size());
  const auto base = reinterpret_cast<std::uintptr_t>(arena.allocate(64).or_throw().data);
  for (std::string line; std::getline(std::cin, line) && line == "steps";) {
    std::uint64_t places = 0;
    const double begin = cpu_seconds();
    for (int k = 0; k < kStepsATurn; ++k) {
      places = places * 31 + step(arena, sizes, kept, base);
    }
    const double took = cpu_seconds() - begin;
    std::cout << took << ' ' << places << std::endl;
  }
  return 0;
}

// ---- The parent ----

// The median logarithm of the ratio between two new processes: where their memory lies differs from
// pair to pair of them by more than what is measured.
double one_round(const std::string& self, const Settings& settings, int round) {
  const bool first = round % 2 == 0;
  bench::Child one({first ? self : self + "_without", "--serve"});
  bench::Child other({first ? self + "_without" : self, "--serve"});
  bench::Child& with = first ? one : other;
  bench::Child& without = first ? other : one;
  std::vector<double> logs;
  for (int pair = -settings.warm; pair < settings.pairs; ++pair) {
    std::string ours;
    std::string plain;
    if (pair % 2 == 0) {
      ours = with.ask("steps");
      plain = without.ask("steps");
    } else {
      plain = without.ask("steps");
      ours = with.ask("steps");
    }
    // Where the blocks were comes after the seconds.
    if (ours.substr(ours.find(' ')) != plain.substr(plain.find(' '))) {
      throw std::runtime_error("trace_off: the two did not place their blocks alike");
    }
    if (pair >= 0) {
      logs.push_back(std::log(std::stod(ours) / std::stod(plain)));
    }
  }
  return bench::median(logs);
}

int measure(const Settings& settings, const std::string& command) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  std::vector<double> logs;
  for (int round = 0; round < settings.rounds; ++round) {
    logs.push_back(one_round(self, settings, round));
  }
  const bench::Ratio ratio = bench::ratio_of(logs);
  bench::Report report;
  report.name = "trace_off";
  report.value = ratio.bound;
  report.unit = "of the time without, upper 95 % bound";
  report.bar = kBar;
  report.pass = settings.smoke || ratio.bound <= kBar;
  report.peers = {{"mean", ratio.mean},
                  {"rounds", settings.rounds},
                  {"pairs_a_round", settings.pairs},
                  {"blocks_a_step", kBlocks}};
  report.seed = kSeed;
  report.command = command;
  std::printf("traceable, not traced: %.4f of the time without, 95 %% bound %.4f\n", ratio.mean,
              ratio.bound);
  return report.print();
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_benchmark(argc, argv, "trace_off", "[--smoke] [--rounds N]",
                              [](bench::Arguments& words) {
                                Settings settings;
                                while (words.next()) {
                                  if (words.is("--serve")) {
                                    return serve();
                                  }
                                  if (words.is("--smoke")) {
                                    settings.smoke = true;
                                    settings.rounds = 3;
                                    settings.pairs = 4;
                                  } else if (words.is("--rounds")) {
                                    settings.rounds = static_cast<int>(words.number(2));
                                  } else {
                                    words.refuse();
                                  }
                                }
                                return measure(settings, words.command());
                              });
}
