// SPDX-License-Identifier: Apache-2.0
//
// MemorySignals: what the kernel says of memory pressure, read again and again.
//
//   memory.events  of this process's cgroup (version 2) and its ancestors: how often one met its
//                  bound (high, max) or had to refuse memory (oom); version 1: memory.failcnt
//   memory.pressure, or /proc/pressure/memory where the cgroup has none: the share of the last ten
//                  seconds in which every task waited for memory (PSI, "full")
//
// A cgroup that fills up with page cache meets its bound all the time and comes to no harm, so that
// alone is tightness; waiting is what hurts.
//
// Reading order: cgroup.h, this file, memory_signals.cpp.
//
// Threads: single-owner.   Memory: at most kFilesMax descriptors; read() allocates nothing.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>

#include "plimsoll/pressure.h"

namespace plimsoll {

class MemorySignals {
 public:
  static constexpr int kFilesMax = 8;
  static constexpr double kStalledPercent = 10.0;

  /// Opens what there is; nothing found is no error and reads as kNone.
  static MemorySignals open(const std::filesystem::path& proc_root,
                            const std::filesystem::path& cgroup_root);

  MemorySignals() noexcept = default;
  MemorySignals(MemorySignals&& other) noexcept;
  MemorySignals& operator=(MemorySignals&& other) noexcept;
  MemorySignals(const MemorySignals&) = delete;
  MemorySignals& operator=(const MemorySignals&) = delete;
  ~MemorySignals();

  /// What has happened since the last read; the first one only remembers where counters stand.
  KernelPressure read() noexcept;

 private:
  struct Counters {
    int file{-1};
    bool version2{false};
    std::int64_t met{0};      // high + max, or failcnt, when last read.
    std::int64_t refused{0};  // oom.
  };
  void add(const std::filesystem::path& folder, bool version2);

  std::array<Counters, kFilesMax> counters_{};
  int count_{0};
  int stalls_{-1};   // The file of PSI.
  bool own_{false};  // It speaks of this cgroup, not of the machine.
};

}  // namespace plimsoll
