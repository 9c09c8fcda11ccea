// SPDX-License-Identifier: Apache-2.0
//
// trace_off: what it costs a step that the arena could be traced, while it is not.
//
// This source is built twice, with arena_pages.cpp as it is and without its comparisons. Each child
// takes a step per line it reads; the parent lets the two take turns. See README.md.
//
// Reading order: main, measure, Child, serve.
//
// Threads: one in each process.   Memory: 256 MiB of blocks in a child; two figures a pair.
#include <sys/wait.h>
#include <unistd.h>

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
#include "plimsoll/governor.h"
#include "torch/arena_pages.h"

namespace {

constexpr double kBar = 1.005;  // Upper 95 % bound.
constexpr std::uint64_t kSeed = 20261122;
constexpr std::int64_t kBlocks = 800;
constexpr int kStepsATurn = 4;

struct Settings {
  bool smoke{false};
  int pairs{400};
  int warm{10};
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

// The lightest step there is: each block is written once. Returns a sum over their places.
std::uint64_t step(plimsoll::ArenaPages& arena, const std::vector<std::int64_t>& sizes,
                   std::vector<void*>& kept, std::uintptr_t base) {
  std::uint64_t places = 0;
  const auto make = [&](std::int64_t bytes) {
    void* data = arena.allocate(bytes).or_throw().data;
    std::memset(data, 1, static_cast<std::size_t>(bytes));
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

class Child {
 public:
  explicit Child(const std::filesystem::path& program) {
    int down[2];
    int up[2];
    if (::pipe(down) != 0 || ::pipe(up) != 0) {
      throw std::runtime_error("trace_off: no pipe");
    }
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(down[0], 0);
      ::dup2(up[1], 1);
      for (const int end : {down[0], down[1], up[0], up[1]}) {
        ::close(end);
      }
      ::execl(program.c_str(), program.c_str(), "--serve", nullptr);
      ::_exit(127);
    }
    ::close(down[0]);
    ::close(up[1]);
    to_ = ::fdopen(down[1], "w");
    from_ = ::fdopen(up[0], "r");
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    std::fclose(to_);
    std::fclose(from_);
    ::waitpid(pid_, nullptr, 0);
  }

  double turn() {
    std::fputs("steps\n", to_);
    std::fflush(to_);
    double seconds = 0;
    if (std::fscanf(from_, "%lf %llu", &seconds, &places_) != 2) {
      throw std::runtime_error("trace_off: a child ended");
    }
    return seconds;
  }
  // Where the blocks of the last turn were.
  [[nodiscard]] unsigned long long places() const noexcept { return places_; }

 private:
  pid_t pid_{-1};
  std::FILE* to_{nullptr};
  std::FILE* from_{nullptr};
  unsigned long long places_{0};
};

int measure(const Settings& settings, const std::string& command) {
  const auto self = std::filesystem::read_symlink("/proc/self/exe");
  Child with(self);
  Child without(self.string() + "_without");
  std::vector<double> logs;
  for (int pair = 0; pair < settings.pairs + settings.warm; ++pair) {
    double ours = 0;
    double plain = 0;
    if (pair % 2 == 0) {
      ours = with.turn();
      plain = without.turn();
    } else {
      plain = without.turn();
      ours = with.turn();
    }
    if (with.places() != without.places()) {
      throw std::runtime_error("trace_off: the two did not place their blocks alike");
    }
    if (pair >= settings.warm) {
      logs.push_back(std::log(ours / plain));
    }
  }
  // A turn that something interrupted says nothing of the other: the middle nine tenths count.
  std::sort(logs.begin(), logs.end());
  const auto cut = static_cast<std::ptrdiff_t>(logs.size() / 20);
  const std::vector<double> kept(logs.begin() + cut, logs.end() - cut);
  double mean = 0;
  for (const double one : kept) {
    mean += one / static_cast<double>(kept.size());
  }
  double square = 0;
  for (const double one : kept) {
    square += (one - mean) * (one - mean);
  }
  const double error = std::sqrt(square / std::max(1.0, static_cast<double>(kept.size()) - 1.0) /
                                 static_cast<double>(kept.size()));
  bench::Report report;
  report.name = "trace_off";
  report.value = std::exp(mean + 1.96 * error);
  report.unit = "of the time without, upper 95 % bound";
  report.bar = kBar;
  report.pass = settings.smoke || report.value <= kBar;
  report.peers = {{"mean", std::exp(mean)},
                  {"lower_bound", std::exp(mean - 1.96 * error)},
                  {"pairs", kept.size()},
                  {"allocations_a_step", kBlocks + kBlocks / 2}};
  report.seed = kSeed;
  report.command = command;
  std::printf("traceable, untraced: %.4f of the time without (95 %%: %.4f to %.4f)\n",
              std::exp(mean), std::exp(mean - 1.96 * error), report.value);
  return report.print();
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_benchmark(argc, argv, "trace_off", "[--smoke] [--pairs N]",
                              [](bench::Arguments& words) {
                                Settings settings;
                                while (words.next()) {
                                  if (words.is("--serve")) {
                                    return serve();
                                  }
                                  if (words.is("--smoke")) {
                                    settings.smoke = true;
                                    settings.pairs = 20;
                                  } else if (words.is("--pairs")) {
                                    settings.pairs = static_cast<int>(words.number(20));
                                  } else {
                                    words.refuse();
                                  }
                                }
                                return measure(settings, words.command());
                              });
}
