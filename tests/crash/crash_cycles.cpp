// SPDX-License-Identifier: Apache-2.0
//
// crash_cycles: kills a training process over and over, and compares what it left with an oracle.
//
//   crash_cycles [--cycles 10000] [--seed 1] [--directory DIR] [--seconds 0] [--lying-disk 1]
//
// A cycle: a forked child opens the tables of a life (life.h) with a slab, batches and threads of
// its own, trains, commits, evicts, and dies at a crash point (before and after every write, sync,
// truncation, rename, superblock and manifest), each passed with probability 1/N of dying, N drawn
// anew; or dies of a power failure there, which undoes part of what was not synced; or is killed
// from outside. Half of those that are killed have company: processes that they fork once their
// tables are open, and that outlive them: forked workers that use their handles, second trainers
// and compactions, all of which must be refused, and readers, each of which must see one commit, or
// that it is gone. Now and then a process compacts instead of training. The parent then opens what
// is left: every row and slot must be those of one step, the last that was acknowledged or the one
// being committed. No exec: a cycle costs a few milliseconds. A line is printed for every thousand
// cycles, and one of JSON at the end. The first failure stops it, keeps the directory and prints
// the command that repeats it.
//
// Threads: the child's own.   Memory: one small table or two.
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <random>
#include <set>

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/format.h>

#include "base/check.h"
#include "base/philox.h"
#include "os/crash_point.h"
#include "os/file_faults.h"
#include "os/power_loss.h"
#include "tests/crash/life.h"

namespace plimsoll::test {
namespace {

namespace fs = std::filesystem;

constexpr int kHungSeconds = 120;
constexpr int kMismatch = 3;
// A child forked while other threads allocate inherits GCC 12's AddressSanitizer with a lock that
// nobody will give back, and waits for it for ever: there, processes have no company.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kForksBesideThreads = false;
#else
constexpr bool kForksBesideThreads = true;
#endif

struct Options {
  std::int64_t cycles{300};
  std::uint64_t seed{1};
  double seconds{0.0};  // Stops then, if not 0.
  fs::path directory{};
  bool lying_disk{false};
};

struct Tally {
  std::int64_t cycles{0};
  std::int64_t killed{0};
  std::int64_t power_losses{0};
  std::int64_t ended{0};  // Reached the end of their work before dying.
  std::int64_t lives{0};
  std::int64_t runs{0};  // Lives of two tables, checkpoints and a manifest.
  std::int64_t steps{0};
  std::int64_t advanced{0};  // Cycles after which a later step was found.
};

std::uint64_t strike_seed = 0;  // Of the child's power failure.

// Each sector or change survives or not by its own coin; how often is drawn first.
void lose_power(const char* /*name*/, bool dies) noexcept {
  if (!dies) {
    return;
  }
  std::mt19937_64 random(strike_seed);
  const std::uint64_t share = random() % 5;  // None, a quarter, … all.
  strike_and_freeze([&](std::size_t, std::int64_t) { return random() % 4 < share; });
}

[[noreturn]] void be_child(Life& life, const Process& process, LastWords& words, bool lying_disk) {
  ::alarm(kHungSeconds);
  int status = 0;
  try {
    if (process.passage > 0) {
      ::setenv("PLIMSOLL_CRASH", ("*:" + std::to_string(process.passage)).c_str(), 1);
      reload_crash_points();
    }
    if (process.death == Death::kPowerLoss) {
      strike_seed = process.seed;
      set_crash_hook(lose_power);
      record_unsynced({});
    }
    if (lying_disk) {
      set_file_fault({.call = FileCall::kSync, .nth = 1, .os_errno = 0, .keeps_failing = true});
    }
    life.work(process, words);
  } catch (const std::exception& problem) {
    std::snprintf(words.failure, sizeof words.failure, "%s", problem.what());
    status = kMismatch;
  }
  ::_exit(status);
}

// Runs one process of a life; returns "" or what went wrong other than its death.
std::string run_process(Life& life, const Process& process, LastWords& words, Tally& tally,
                        bool lying_disk) {
  words.failure[0] = '\0';
  words.steps = 0;
  words.rolled_back = -1;
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);  // Whoever of its company outlives it is waited for here.
  const pid_t child = ::fork();
  if (child == 0) {
    be_child(life, process, words, lying_disk);
  }
  if (process.death == Death::kFromAside) {
    ::usleep(static_cast<useconds_t>(mix64(process.seed) % 6000));
    ::kill(child, SIGKILL);
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0) {
  }
  std::string beside;
  for (int other = 0; ::waitpid(-1, &other, 0) > 0;) {
    if (WIFSIGNALED(other)) {
      beside = WTERMSIG(other) == SIGALRM
                   ? fmt::format("one beside it hung for {} s", kHungSeconds)
                   : fmt::format("one beside it died of signal {}", WTERMSIG(other));
    } else if (WEXITSTATUS(other) != 0) {
      beside = static_cast<const char*>(words.failure);
    }
  }
  tally.steps += words.steps;
  if (!beside.empty()) {
    return beside;
  }
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) {
    return fmt::format("it hung for {} s", kHungSeconds);
  }
  if (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL) {
    return fmt::format("it died of signal {}", WTERMSIG(status));
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) != 0) {
    return fmt::format("it gave up: {}", words.failure);
  }
  tally.killed += WIFSIGNALED(status) ? 1 : 0;
  tally.ended += WIFSIGNALED(status) ? 0 : 1;
  tally.power_losses += WIFSIGNALED(status) && process.death == Death::kPowerLoss ? 1 : 0;
  return "";
}

Process draw_process(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Process process{.seed = random()};
  const auto kind = random() % 8;
  process.death = kind == 0 ? Death::kFromAside : kind < 5 ? Death::kPowerLoss : Death::kKilled;
  if (process.death != Death::kFromAside) {
    // Dying with probability 1/N at every passage: the passage is geometrically distributed.
    constexpr std::array<double, 4> kEvery{15, 60, 200, 600};
    const double n = kEvery[random() % kEvery.size()];
    const double u = (static_cast<double>(random() >> 11) + 0.5) * 0x1p-53;
    process.passage = 1 + static_cast<std::int64_t>(std::log(u) / std::log(1.0 - 1.0 / n));
  }
  if (process.death != Death::kPowerLoss) {  // No process outlives a power failure.
    const int company = random() % 2 == 0 ? 0 : 1 + static_cast<int>(random() % 3);
    process.company = kForksBesideThreads ? company : 0;
  }
  process.compacts = random() % 4 == 0;
  return process;
}

double now() {
  timespec at{};
  ::clock_gettime(CLOCK_MONOTONIC, &at);
  return static_cast<double>(at.tv_sec) + static_cast<double>(at.tv_nsec) * 1e-9;
}

void print_result(const Options& options, const Tally& tally, const LastWords& words,
                  double seconds, bool sound) {
  fmt::print(
      "{{\"test\": \"crash_cycles\", \"seed\": {}, \"cycles\": {}, \"killed\": {}, "
      "\"power_losses\": {}, \"lives\": {}, \"runs\": {}, \"steps\": {}, \"advanced\": {}, "
      "\"refused\": {}, \"read_beside\": {}, \"gone\": {}, \"compacted\": {}, "
      "\"seconds\": {:.1f}, \"cycles_per_second\": {:.0f}, \"wrong_rows\": {}}}\n",
      options.seed, tally.cycles, tally.killed, tally.power_losses, tally.lives, tally.runs,
      tally.steps, tally.advanced, words.refused.load(), words.read.load(), words.gone.load(),
      words.compacted.load(), seconds, static_cast<double>(tally.cycles) / std::max(seconds, 1e-9),
      sound ? 0 : 1);
}

int run(const Options& options) {
  // NOLINTNEXTLINE(cppcoreguidelines-owning-memory): processes share it to their end.
  auto* words = new (::mmap(nullptr, sizeof(LastWords), PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS, -1, 0)) LastWords();
  Tally tally;
  const double began = now();
  std::string wrong;
  for (std::uint64_t number = 0; wrong.empty() && tally.cycles < options.cycles; ++number) {
    const std::uint64_t life_seed = mix64(options.seed ^ mix64(number));
    const fs::path directory = options.directory / fmt::format("life-{}", number);
    fs::remove_all(directory);
    Life life(directory, life_seed);
    ++tally.lives;
    tally.runs += life.is_run() ? 1 : 0;
    words->acknowledged = 0;
    words->attempted = 0;
    const std::uint64_t deaths = 1 + mix64(life_seed) % 24;
    for (std::uint64_t death = 0; death < deaths && tally.cycles < options.cycles; ++death) {
      const Process process = draw_process(mix64(life_seed ^ mix64(death)));
      const std::int64_t before = life.step();
      wrong = run_process(life, process, *words, tally, options.lying_disk);
      if (wrong.empty()) {
        wrong = life.judge(*words);
      }
      if (!wrong.empty()) {
        fmt::print("life {} death {} (passage {}, way {}): {}\n{} is kept; repeat with --seed {}\n",
                   number, death, process.passage, static_cast<int>(process.death), wrong,
                   directory.string(), options.seed);
        break;
      }
      words->acknowledged = life.step();
      words->attempted = life.step();
      ++tally.cycles;
      tally.advanced += life.step() > before ? 1 : 0;
      if (tally.cycles % 1000 == 0) {
        fmt::print("{} cycles, {:.0f} s, seed {}\n", tally.cycles, now() - began, options.seed);
        std::fflush(stdout);
      }
    }
    if (wrong.empty()) {
      fs::remove_all(directory);
    }
    if (options.seconds > 0 && now() - began > options.seconds) {
      break;
    }
  }
  print_result(options, tally, *words, now() - began, wrong.empty());
  const bool meant = tally.advanced * 10 > tally.cycles;  // Else they died before doing anything.
  return wrong.empty() && meant ? 0 : 1;
}

int parse_and_run(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--cycles") {
      options.cycles = std::atoll(argv[i + 1]);
    } else if (name == "--seed") {
      options.seed = std::strtoull(argv[i + 1], nullptr, 10);
    } else if (name == "--seconds") {
      options.seconds = std::atof(argv[i + 1]);
    } else if (name == "--lying-disk") {
      options.lying_disk = std::atoi(argv[i + 1]) != 0;
    } else if (name == "--directory") {
      options.directory = argv[i + 1];
    } else {
      fmt::print(stderr, "crash_cycles: {} is no option\n", name);
      return 2;
    }
  }
  const bool own = options.directory.empty();
  if (own) {
    options.directory = fs::temp_directory_path() / fmt::format("plimsoll-crash-{}", ::getpid());
  }
  fs::create_directories(options.directory);
  const int status = run(options);
  if (own && status == 0) {
    fs::remove_all(options.directory);
  }
  return status;
}

}  // namespace
}  // namespace plimsoll::test

int main(int argc, char** argv) {
  try {
    return plimsoll::test::parse_and_run(argc, argv);
  } catch (const std::exception& problem) {
    fmt::print(stderr, "crash_cycles: {}\n", problem.what());
    return 1;
  }
}
