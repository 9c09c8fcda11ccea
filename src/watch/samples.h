// SPDX-License-Identifier: Apache-2.0
//
// Samples: which lines of the program allocated what is still alive, by a sample of allocations.
//
// Of all bytes that pass by, each has the same chance to be sampled: the distance between two
// sampled ones is exponential with a mean of mean_bytes, and an allocation of n bytes that holds a
// sampled one stands for n / (1 − exp(−n / mean_bytes)) bytes, so that sums over a line are
// unbiased. Whoever hooks an allocator calls allocated() and freed(); while nothing is searched for
// both return after one load. An allocation that is not sampled costs a subtraction, a free that
// was not sampled one load of a counting filter. Where the program is, a function says that holds
// no lock and allocates nothing (Python's bindings have one that reads the frames of its thread).
//
// Sampling slows itself down: once samples took more than 1/200 of the time, the mean doubles; and
// so it does, with every second sample forgotten and the others counted twice, when the table is
// full.
//
// Source: Poisson sampling as in tcmalloc's heap profiler (its design document, "sampling").
//
// Threads: thread-safe. A forked child does not sample, until it begins a search of its own.
// Memory:  1.6 MiB from the first search on; 64 KiB of filter before.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace plimsoll {

/// A line of the program.
struct Place {
  static constexpr std::size_t kFileMost = 256;
  std::array<char, kFileMost> file{};  ///< Zero-terminated; the end of a longer one; "" for none.
  int line{0};
};

/// Writes where the calling thread is. Holds no lock, allocates nothing.
using PlaceNow = void (*)(Place& place) noexcept;

class Samples {
 public:
  static constexpr double kMeanBytes = 512 * 1024;
  static constexpr std::size_t kMost = 1 << 14;        ///< Samples alive at a time.
  static constexpr std::size_t kPlacesMost = 1 << 11;  ///< Lines; what comes from others has none.
  static constexpr std::size_t kFilesMost = 512;

  /// A line and what it allocated that is alive.
  struct Site {
    std::string site{};  ///< "path/to/file.py:12"; "" where no line was known.
    std::int64_t bytes{0};
    std::int64_t samples{0};
  };
  /// A sampled allocation that is alive.
  struct Live {
    std::uintptr_t address{0};
    std::size_t bytes{0};
    double stands_for{0};
    std::uint32_t place{0};
    std::uint32_t step{0};  ///< In which it was allocated.
  };

  /// Forgets everything and samples from now on, with that mean.
  static void begin(double mean_bytes, PlaceNow place_now);
  /// Whether the arena of tensors shows what it allocates; begin() turns it off.
  static void show_tensors(bool shown) noexcept;
  [[nodiscard]] static bool tensors_shown() noexcept;
  /// Samples no more, and forgets everything.
  static void end() noexcept;
  /// Whether a search is under way.
  [[nodiscard]] static bool on() noexcept;

  /// What is allocated from now on belongs to this step.
  static void step(std::uint32_t step) noexcept;

  static void allocated(void* pointer, std::size_t bytes) noexcept;
  static void freed(void* pointer) noexcept;
  /// realloc() of what was at `address`: what was sampled stays so, with its step, and belongs to
  /// the newest line.
  static void moved(std::uintptr_t address, void* pointer, std::size_t bytes) noexcept;

  /// What is alive of the steps [from, to).
  [[nodiscard]] static std::vector<Live> alive(std::uint32_t from, std::uint32_t to);
  /// The same by line, at most `most` of them: first those that allocated most in both halves of
  /// the steps, as a leak does and one large table does not.
  [[nodiscard]] static std::vector<Site> by_site(const std::vector<Live>& alive, std::size_t most);
  /// "path/to/file.py:12" of a place of alive(); "" where no line was known.
  [[nodiscard]] static std::string site(std::uint32_t place);

  [[nodiscard]] static double mean_bytes() noexcept;
  /// What taking samples took so far in this search, over all threads.
  [[nodiscard]] static std::int64_t spent_ns() noexcept;
};

}  // namespace plimsoll
