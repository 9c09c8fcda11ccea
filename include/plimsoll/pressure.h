// SPDX-License-Identifier: Apache-2.0
//
// What the governor does when memory runs short: the moves, who makes them, and what they did.
//
// Reading order: limits.h, this file, governor.h.
//
// Threads: plain values, but for Reclaimer, which says so itself.   Memory: fixed.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "plimsoll/limits.h"

namespace plimsoll {

inline constexpr int kEvictionsMax = 24;

/// The moves under pressure, in the order they are tried.
enum class PressureMove : std::uint8_t {
  kPurge,   ///< Give back cached free memory: the arena's cache, the heap's top.
  kShrink,  ///< Shrink caches and queues. Never changes arithmetic.
  kStop,    ///< Checkpoint and stop at this step boundary.
};

[[nodiscard]] const char* move_name(PressureMove move) noexcept;  ///< "purge", "shrink", "stop".

/// Something that can give memory back. Called from step_boundary(), reserve() and set_limit(), on
/// the calling thread, one call at a time, with no lock held; must not wait on another thread that
/// may be in reserve().
class Reclaimer {
 public:
  virtual ~Reclaimer() = default;
  /// Gives back up to `wanted_bytes`; returns the bytes really given back (0 is an answer).
  virtual std::int64_t reclaim(PressureMove move, std::int64_t wanted_bytes) noexcept = 0;
  /// Takes again up to `room_bytes` of what kShrink gave back; returns how many. A refusal means to
  /// stay small. From step_boundary() and set_limit() alone.
  virtual std::int64_t grow_back(std::int64_t /*room_bytes*/) noexcept { return 0; }
  /// A short static name for events: "arena", "features".
  [[nodiscard]] virtual const char* name() const noexcept = 0;
};

/// One owner's answer to one move. Resident bytes are those of the whole process, read before and
/// after it, so that what was said can be held against what was freed.
struct Eviction {
  const char* owner{""};  ///< Static.
  PressureMove move{PressureMove::kPurge};
  std::int64_t wanted_bytes{0};
  std::int64_t given_bytes{0};  ///< As the owner says.
  std::int64_t before_bytes{0};
  std::int64_t after_bytes{0};
  [[nodiscard]] std::int64_t freed_bytes() const noexcept { return before_bytes - after_bytes; }
};

/// Those that gave anything, oldest first; what does not fit is counted only.
class EvictionLog {
 public:
  void add(const Eviction& eviction) noexcept {
    if (count_ < kEvictionsMax) {
      entries_[static_cast<std::size_t>(count_++)] = eviction;
    } else {
      ++left_out_;
    }
  }
  [[nodiscard]] std::span<const Eviction> entries() const noexcept {
    return std::span(entries_).first(static_cast<std::size_t>(count_));
  }
  [[nodiscard]] int left_out() const noexcept { return left_out_; }

 private:
  std::array<Eviction, kEvictionsMax> entries_{};
  int count_{0};
  int left_out_{0};
};

/// What the kernel says of memory, beside what this process holds.
enum class KernelPressure : std::uint8_t {
  kNone,
  kTight,    ///< A cgroup met its bound (memory.events), or tasks of the machine wait for memory.
  kStalled,  ///< This cgroup's tasks wait for memory (PSI), or one of them was refused it.
};

/// What step_boundary() saw and did.
struct PressureReport {
  Resident resident{};
  std::int64_t unexplained_bytes{0};  ///< Anonymous resident − leased (our ranges) − baseline.
  bool pressure{false};               ///< Resident above pressure_fraction with no lease for it.
  KernelPressure kernel{KernelPressure::kNone};  ///< Purges, and shrinks when stalled; never stops.
  bool stop{false};                              ///< kStop was reached: checkpoint and end the run.
  std::int64_t needed_bytes{0};  ///< When `stop`: the smallest limit that would do just now.
  std::int64_t purged_bytes{0};
  std::int64_t shrunk_bytes{0};
  std::int64_t grown_bytes{0};  ///< Taken again of what earlier pressure had made shrink.
  EvictionLog evictions{};
};

/// What a change of the limit did, in bytes.
struct LimitChange {
  std::int64_t before_bytes{0};  ///< In force until now.
  std::int64_t asked_bytes{0};   ///< The smallest of what was asked for and every other bound.
  std::int64_t limit_bytes{0};   ///< In force now; above asked_bytes as long as that does not fit.
  std::int64_t purged_bytes{0};
  std::int64_t shrunk_bytes{0};
  std::int64_t grown_bytes{0};
  Resident resident{};  ///< After it.
  EvictionLog evictions{};
  [[nodiscard]] bool settled() const noexcept { return limit_bytes == asked_bytes; }
};

}  // namespace plimsoll
