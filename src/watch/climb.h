// SPDX-License-Identifier: Apache-2.0
//
// Climb: how a process tree came to the most it held.
//
// A look is kept when the tree holds a twenty-fifth more than at the look kept before. A leak
// leaves many such looks on its way up, whether it takes seconds or days; a large batch leaves one
// or two.
//
// Threads: single-owner.   Memory: at most kKeptMost looks of a few kilobytes each.
#pragma once

#include <cstdint>
#include <deque>
#include <string>

#include "os/process_tree.h"

namespace plimsoll {

/// The last third of the way up, of processes that were there all the while.
struct Growth {
  std::int64_t bytes{0};        ///< 0: it did not grow steadily.
  double seconds{0};            ///< How long that took.
  double ended_at{0};           ///< When the top was reached, in seconds since the start.
  std::string name{};           ///< The processes of one name and parent that grew most, …
  int processes{0};             ///< … how many they are, …
  std::int64_t group_bytes{0};  ///< … and by how much they grew together.
};

class Climb {
 public:
  static constexpr std::size_t kKeptMost = 24;

  /// Takes a look at `seconds` since the start.
  void add(double seconds, TreeUse tree);

  /// The look that saw most.
  [[nodiscard]] const TreeUse& peak() const noexcept { return peak_; }
  [[nodiscard]] Growth growth() const;

 private:
  struct Look {
    double seconds{0};
    TreeUse tree{};
  };
  std::deque<Look> kept_{};  // Each holds a twenty-fifth more than the one before.
  TreeUse peak_{};
};

}  // namespace plimsoll
