// SPDX-License-Identifier: Apache-2.0
//
// TreeLooker: looks at a process tree again and again, at 1 % of a core.
//
// A look has two tiers. The short one reads the resident sizes of each process, which takes 12 µs
// whatever they hold: added up they are never less than what the tree holds, but count what
// processes share once for each of them. The close one reads proportional shares, in which a shared
// page counts once, and takes 3 ms at 200 MB, 110 ms at 10 GB. Of that 1 % four tenths are for
// close looks, a quarter each for short ones and for finding the processes (os/pace.h), a tenth for
// what no process has resident (os/mappings.h); between two close ones the growth of resident sizes
// is added to the last. A close look comes sooner, after ten times what the last took, while the
// tree may have come above a size that the caller names or has new processes, as long as all looks
// together stay below 1 % of the time since the start and kAdvance.
//
// Who looks at itself waits meanwhile, and takes a look into its steps: a quarter of 1 % at most
// each for close looks and for what no process has resident, 0.03 % for finding processes, and the
// caller says how often the short one is made. As long as there is one process, and nothing was
// found that none has resident, 0.02 % is for that.
//
// Judged is what no file stands behind: anonymous and shared memory. Shares of files move when
// other programs map the same libraries, and the kernel takes file pages back.
//
// Reading order: os/process_tree.h, this file, owners.h, trend.h.
//
// Threads: single-owner.
// Memory:  TreeUse, and 32 bytes for each of TreeUse::kNamedMost processes.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "os/pace.h"
#include "os/process_tree.h"
#include "plimsoll/limits.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// What a tree holds.
struct TreeLook {
  TreeUse tree{};               ///< At the last close look, and what has come and gone since.
  std::int64_t bound_bytes{0};  ///< Anonymous and shared memory are never more than this.
  std::int64_t in_flight_bytes{
      0};             ///< Of tree.shared: resident in no process, as a batch on its way.
  Resident root{};    ///< Of the root alone, exact; zero when it is left out.
  bool close{false};  ///< Proportional shares were read just now.
};

class TreeLooker {
 public:
  enum class Root : std::uint8_t { kCounted, kLeftOut };
  static constexpr std::chrono::seconds kAdvance{1};  ///< Of the processor, for looks in a hurry.

  static constexpr std::chrono::seconds kSearched{1};  ///< New processes are looked for so often.

  /// `root`: the process whose descendants are the tree; itself counted or left out.
  TreeLooker(int root, Root counted);

  /// Takes a short look, whenever it is called, and a close one where it is time. `close_bytes`:
  /// the tree is looked at closely in a hurry while it may hold more; INT64_MAX for never. Errors:
  /// kNotFound when the root has ended, or its pid is another process now; kIo when /proc
  ///         cannot be listed.
  Result<TreeLook> look(std::int64_t close_bytes);

  /// From when on another look keeps to 1 % of a core, ½ % of one's own; of the clock of now_ns().
  [[nodiscard]] std::int64_t next_ns() const noexcept;

  /// What all looks took of the processor so far.
  [[nodiscard]] std::int64_t spent_ns() const noexcept { return rare_ns() + sizing_.spent_ns(); }
  /// Of that, what not every look does: finding the processes and what none of them has resident,
  /// and looking closely.
  [[nodiscard]] std::int64_t rare_ns() const noexcept {
    return finding_.spent_ns() + sharing_.spent_ns() + closing_.spent_ns();
  }

 private:
  struct Sizes {
    std::int64_t anonymous{0};
    std::int64_t file{0};
    std::int64_t shared{0};
  };
  struct Known {
    int pid{0};
    Sizes at_look{};  // Resident, when it was looked at closely.
  };

  Result<void> find();
  void size();
  void share();
  void add_in_flight();
  void look_closely();
  void add_growth(std::size_t named, const Resident& now);
  [[nodiscard]] bool affords(const Pace& pace, std::int64_t now) const noexcept;
  [[nodiscard]] bool stale(std::int64_t now) const noexcept;
  [[nodiscard]] bool hurried(std::int64_t now, std::int64_t close_bytes) const noexcept;

  const int root_;
  const bool counted_;
  const bool own_;            // Who looks at itself.
  const std::int64_t times_;  // All looks take a share of a core that is so much smaller.
  const std::int64_t began_ns_;
  std::int64_t root_began_{0};  // In ticks: which process the pid was.
  std::vector<int> pids_;
  bool changed_{true};        // Processes have come since the last close look.
  TreeUse at_look_{};         // As the last close look saw it.
  std::vector<Known> known_;  // Of at_look_.largest, in its order.
  TreeLook now_{};
  Pace finding_;
  Pace sizing_;
  Pace sharing_;
  Pace closing_;
};

}  // namespace plimsoll
