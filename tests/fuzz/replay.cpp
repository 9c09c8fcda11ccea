// SPDX-License-Identifier: Apache-2.0
//
// fuzz_replay: the fuzz targets without a fuzzer: seeds, a corpus, and seeded mutations of both.
//
//   fuzz_replay [--runs N] [--seed S] [--seconds T] [--target NAME] [--write-corpus DIR] [FILE…]
//
// Each target gets a share of N that follows its speed (the ones that open whole tables are some
// hundred times slower). FILEs are replayed first. --write-corpus writes the seeds for libFuzzer:
//   build/fuzz/bin/fuzz_superblock corpus/superblock
// The input in progress is in the file fuzz-input beside the process when it dies.
//
// Threads: single-owner.   Memory: one input and its seeds.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <filesystem>
#include <random>

#include <fcntl.h>
#include <unistd.h>

#include <fmt/format.h>

#include "tests/fuzz/target.h"
#include "tests/support/array_files.h"

namespace plimsoll::fuzz {

std::string input_now;  // For the report of a crash.

namespace {

namespace fs = std::filesystem;

struct Options {
  std::int64_t runs{200'000};
  std::uint64_t seed{1};
  double seconds{0.0};
  std::string target{};
  fs::path corpus{};
  std::vector<fs::path> files{};
};

// Share of all runs, in percent.
std::int64_t share_of(const std::string& target) {
  if (target == "superblock" || target == "page" || target == "id_page" || target == "extent") {
    return 16;
  }
  if (target == "timeline_map" || target == "growing_map") {
    return 5;
  }
  return target.starts_with("open") || target.ends_with("_files") ? 1 : 7;
}

void save_input() noexcept {
  const int file = ::open("fuzz-input", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file >= 0) {
    static_cast<void>(!::write(file, input_now.data(), input_now.size()));
    ::close(file);
  }
}

void on_signal(int signal) {
  save_input();
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

std::uint64_t telling_number(std::mt19937_64& random) {
  constexpr std::array<std::uint64_t, 8> kTelling{0,          1,          0x7FFFFFFF, 0x80000000,
                                                  0xFFFFFFFF, UINT64_MAX, 1ULL << 63, 4096};
  return random() % 3 == 0 ? std::uint64_t{1} << random() % 64 : kTelling[random() % 8];
}

// One to eight changes.
std::string mutate(std::string text, const std::vector<std::string>& seeds,
                   std::mt19937_64& random) {
  for (std::uint64_t n = 1 + random() % 8; n > 0 && !text.empty(); --n) {
    const std::size_t at = random() % text.size();
    switch (random() % 6) {
      case 0:
        text[at] = static_cast<char>(text[at] ^ (1 << random() % 8));
        break;
      case 1: {
        const std::uint64_t number = telling_number(random);
        const std::size_t width = std::size_t{1} << random() % 4;
        const std::size_t from = at / width * width;
        std::memcpy(text.data() + from, &number, std::min(width, text.size() - from));
        break;
      }
      case 2:
        text[at] = static_cast<char>(random());
        break;
      case 3: {  // A piece of another seed.
        const std::string& other = seeds[random() % seeds.size()];
        const std::size_t from = other.empty() ? 0 : random() % other.size();
        const std::size_t size = std::min({random() % 256, other.size() - from, text.size() - at});
        std::memcpy(text.data() + at, other.data() + from, size);
        break;
      }
      case 4:
        if (random() % 16 == 0) {
          text.resize(at);
        }
        break;
      default: {  // Two runs change places.
        const std::size_t size = std::min<std::size_t>(random() % 64, (text.size() - at) / 2);
        std::swap_ranges(text.begin() + static_cast<std::ptrdiff_t>(at),
                         text.begin() + static_cast<std::ptrdiff_t>(at + size),
                         text.begin() + static_cast<std::ptrdiff_t>(at + size));
      }
    }
  }
  return text;
}

void run_one(const Target& target, std::string input) {
  input_now = std::move(input);
  try {
    target.one_input(std::as_bytes(std::span(input_now)));
  } catch (const std::exception& problem) {
    contradiction(target.name, problem.what());
  }
}

double now() {
  timespec at{};
  ::clock_gettime(CLOCK_MONOTONIC, &at);
  return static_cast<double>(at.tv_sec) + static_cast<double>(at.tv_nsec) * 1e-9;
}

std::int64_t run_target(const Target& target, const Options& options, double seconds_each) {
  const auto seeds = target.seeds();
  std::int64_t done = 0;
  for (const fs::path& file : options.files) {
    run_one(target, test::slurp(file));
    ++done;
  }
  for (const std::string& seed : seeds) {
    run_one(target, seed);
    ++done;
  }
  std::mt19937_64 random(options.seed);
  const double began = now();
  const std::int64_t wanted =
      options.target.empty() ? options.runs * share_of(target.name) / 100 : options.runs;
  for (; done < wanted; ++done) {
    if (seconds_each > 0 && done % 64 == 0 && now() - began > seconds_each) {
      break;
    }
    run_one(target, mutate(seeds[random() % seeds.size()], seeds, random));
  }
  return done;
}

void write_corpus(const Target& target, const fs::path& corpus) {
  const fs::path directory = corpus / target.name;
  fs::create_directories(directory);
  std::size_t number = 0;
  for (const std::string& seed : target.seeds()) {
    test::spill(directory / fmt::format("seed-{}", number++), seed);
  }
}

int run(const Options& options) {
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGABRT, SIGILL}) {
    ::signal(signal, on_signal);
  }
  const auto targets = all_targets();
  const double began = now();
  std::int64_t total = 0;
  std::string counts;
  for (const Target& target : targets) {
    if (!options.target.empty() && options.target != target.name) {
      continue;
    }
    if (!options.corpus.empty()) {
      write_corpus(target, options.corpus);
      continue;
    }
    const std::int64_t done =
        run_target(target, options, options.seconds / static_cast<double>(targets.size()));
    counts += fmt::format("{}\"{}\": {}", counts.empty() ? "" : ", ", target.name, done);
    total += done;
  }
  fmt::print(
      "{{\"test\": \"fuzz_replay\", \"seed\": {}, \"executions\": {}, {}, \"seconds\": {:.1f}, "
      "\"findings\": 0}}\n",
      options.seed, total, counts, now() - began);
  return 0;
}

int parse_and_run(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (!name.starts_with("--")) {
      options.files.emplace_back(name);
      continue;
    }
    const char* value = i + 1 < argc ? argv[++i] : "";
    if (name == "--runs") {
      options.runs = std::atoll(value);
    } else if (name == "--seed") {
      options.seed = std::strtoull(value, nullptr, 10);
    } else if (name == "--seconds") {
      options.seconds = std::atof(value);
    } else if (name == "--target") {
      options.target = value;
    } else if (name == "--write-corpus") {
      options.corpus = value;
    } else {
      fmt::print(stderr, "fuzz_replay: {} is no option\n", name);
      return 2;
    }
  }
  return run(options);
}

}  // namespace

void contradiction(const char* target, const std::string& what) {
  fmt::print(stderr, "{}: {}\nthe input is in fuzz-input\n", target, what);
  std::abort();
}

}  // namespace plimsoll::fuzz

int main(int argc, char** argv) {
  try {
    return plimsoll::fuzz::parse_and_run(argc, argv);
  } catch (const std::exception& problem) {
    fmt::print(stderr, "fuzz_replay: {}\n", problem.what());
    return 1;
  }
}
