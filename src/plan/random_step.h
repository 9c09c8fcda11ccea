// SPDX-License-Identifier: Apache-2.0
//
// A made-up training step for tests: random blocks, random lifetimes, and its true peak.
//
// Threads: a value.   Memory: some hundred blocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "plan/step_trace.h"

namespace plimsoll {

/// Blocks rounded up to 64 bytes, as a stand-in for an allocator.
inline std::int64_t rounded_to_64(std::int64_t bytes) {
  return (bytes + 63) / 64 * 64;
}

class RandomStep {
 public:
  static constexpr std::int64_t kStatic = 1 << 20;

  explicit RandomStep(std::uint64_t seed, std::int64_t other_algorithm_from = INT64_MAX)
      : random_(seed), other_algorithm_from_(other_algorithm_from) {
    const auto pick = [this](std::uint64_t n) { return static_cast<std::int64_t>(random_() % n); };
    const std::int64_t blocks = 20 + pick(100);
    std::vector<std::int32_t> open;
    for (std::int64_t k = 0; k < blocks; ++k) {
      Block block{pick(5000), pick(4) == 0 ? 0 : 4 * pick(400), pick(6) == 0 ? 4 * pick(4) : 0,
                  k < blocks / 2 ? StepPhase::kForward : StepPhase::kBackward,
                  static_cast<std::uint32_t>(1 + pick(3))};
      const auto index = static_cast<std::int32_t>(blocks_.size());
      blocks_.push_back(block);
      events_.push_back(index);
      open.push_back(index);
      while (!open.empty() && pick(2) == 0) {
        std::swap(open[static_cast<std::size_t>(pick(open.size()))], open.back());
        events_.push_back(-1 - open.back());
        open.pop_back();
      }
    }
    kept_ = std::move(open);
  }

  /// The trace of the second of two steps of so many rows.
  [[nodiscard]] StepTrace trace(std::int64_t rows) const {
    std::vector<TraceEvent> events;
    std::vector<std::uint64_t> kept;
    std::int64_t second_begins = 0;
    std::uint64_t next = 1000;
    for (int step = 0; step < 2; ++step) {
      second_begins = static_cast<std::int64_t>(events.size());
      for (const std::uint64_t address : kept) {  // The next step frees what this one kept.
        events.push_back({address, 0, 0, 1, TraceKind::kFree, StepPhase::kForward});
      }
      kept.clear();
      std::vector<std::uint64_t> at(blocks_.size());
      const auto free_block = [&](std::size_t k) {
        events.push_back({at[k], bytes_of(k, rows), 0, 1, TraceKind::kFree, StepPhase::kForward});
      };
      for (const std::int32_t event : events_) {
        if (event >= 0) {
          const auto k = static_cast<std::size_t>(event);
          at[k] = next++;
          events.push_back(
              {at[k], bytes_of(k, rows), blocks_[k].op, 1, TraceKind::kAllocate, blocks_[k].born});
          if (k == 5 && rows >= other_algorithm_from_) {  // Scratch of another algorithm.
            events.push_back({7, scratch(rows), 3, 1, TraceKind::kAllocate, StepPhase::kForward});
            events.push_back({7, 0, 0, 1, TraceKind::kFree, StepPhase::kForward});
          }
        } else {
          free_block(static_cast<std::size_t>(-1 - event));
        }
      }
      for (const std::int32_t k : kept_) {
        kept.push_back(at[static_cast<std::size_t>(k)]);
      }
    }
    TracedSteps steps;
    steps.size = {rows, 0, 0};
    steps.events = events;
    steps.second_begins = second_begins;
    steps.live_at_begin = kStatic;
    steps.thread = 1;
    steps.ops = {"", "matmul", "relu", "convolution"};
    StepTrace trace = build_step_trace(steps, &rounded_to_64).or_throw();
    trace.live_peak_bytes = peak(rows);
    trace.leased_peak_bytes = trace.live_peak_bytes;
    trace.seconds = 1e-3 * static_cast<double>(rows);
    return trace;
  }

  /// Counted directly, by the definition.
  [[nodiscard]] std::int64_t peak(std::int64_t rows) const {
    std::int64_t live = kStatic;
    for (const std::int32_t k : kept_) {
      live += rounded_to_64(bytes_of(static_cast<std::size_t>(k), rows));
    }
    std::int64_t highest = live;
    for (const std::int32_t k : kept_) {
      live -= rounded_to_64(bytes_of(static_cast<std::size_t>(k), rows));
    }
    for (const std::int32_t event : events_) {
      const auto k = static_cast<std::size_t>(event >= 0 ? event : -1 - event);
      live += (event >= 0 ? 1 : -1) * rounded_to_64(bytes_of(k, rows));
      const bool scratched = event == 5 && rows >= other_algorithm_from_;
      highest = std::max(highest, live + (scratched ? rounded_to_64(scratch(rows)) : 0));
    }
    return highest;
  }

 private:
  struct Block {
    std::int64_t constant, per_row, per_row_squared;
    StepPhase born;
    std::uint32_t op;
  };
  [[nodiscard]] std::int64_t bytes_of(std::size_t k, std::int64_t rows) const {
    const Block& block = blocks_[k];
    return 1 + block.constant + block.per_row * rows + block.per_row_squared * rows * rows;
  }
  static std::int64_t scratch(std::int64_t rows) { return 100'000 + 512 * rows; }

  std::mt19937_64 random_;
  std::int64_t other_algorithm_from_;
  std::vector<Block> blocks_;
  std::vector<std::int32_t> events_;
  std::vector<std::int32_t> kept_;
};

}  // namespace plimsoll
