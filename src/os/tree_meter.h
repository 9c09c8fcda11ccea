// SPDX-License-Identifier: Apache-2.0
//
// TreeMeter: what this process's descendants hold, read again and again at 1 % of a core.
//
// Where the process and its descendants are alone in a memory cgroup, the cgroup's own figures say
// it exactly (memory.stat). Else proportional shares are added up (process_tree.h), which costs 15
// ms a GiB; between two such looks the growth of resident sizes is added, which costs microseconds.
// Every reading is repeated only after a hundred times of what it took.
//
// Reading order: process_tree.h, pace.h, this file, tree_meter.cpp.
//
// Threads: single-owner.
// Memory:  what process_tree.h needs while a reading lasts; 24 bytes a descendant, up to
// kKnownMost.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "os/pace.h"
#include "plimsoll/tree_memory.h"

namespace plimsoll {

class TreeMeter {
 public:
  static constexpr std::size_t kKnownMost = 1024;  ///< Further ones count at whole looks only.

  TreeMeter() = default;
  TreeMeter(std::filesystem::path proc_root, const std::filesystem::path& cgroup_root);

  /// `own`: of this process, read just now. Above `close_bytes` in all, looks are taken at a tenth
  /// of a core.
  TreeMemory read(const Resident& own, std::int64_t close_bytes);

 private:
  struct Child {
    int pid{0};
    std::int64_t resident{0};           // Anonymous and shared, at the last short reading.
    std::int64_t resident_at_look{-1};  // −1: it came since.
  };

  void find_children();
  void find_group();
  void look(const Resident& own);
  [[nodiscard]] std::int64_t growth(const Resident& own);

  std::filesystem::path proc_;
  std::filesystem::path group_of_all_;  // The cgroup this process is in; empty: none.
  bool group_is_ours_{false};
  std::vector<Child> children_;
  bool changed_{true};            // Who is in children_, since the last look.
  std::int64_t beside_bytes_{0};  // At the last look: all that is held, less this process's own.
  std::int64_t in_flight_bytes_{0};
  std::int64_t mapped_bytes_{0};
  std::int64_t mapped_at_file_bytes_{-1};
  std::int64_t grown_bytes_{0};
  Pace finding_{200'000'000};
  Pace sizing_{1'000'000};
  Pace looking_{20'000'000};
  Pace grouping_{1'000'000};
  Pace mapping_{20'000'000};
};

}  // namespace plimsoll
