// SPDX-License-Identifier: Apache-2.0
//
// A fuzz target: bytes that a file of ours might hold, and what must be true of whatever reads
// them.
//
// one_input() aborts when a reader accepts what it must not, or contradicts itself; a crash, a
// sanitizer's report or a hang is a finding too. Seeds are real files, made by the stores
// themselves. Most mutations die at a checksum, so a target also repairs the checksum and reads
// again: the code behind it must stand anything.
//
// Threads: single-owner.   Memory: a small table in memory or under the temporary directory.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "plimsoll/governor.h"

namespace plimsoll::fuzz {

struct Target {
  const char* name;
  std::vector<std::string> (*seeds)();
  void (*one_input)(std::span<const std::byte> bytes);
};

std::vector<Target> store_targets();
std::vector<Target> timeline_targets();
std::vector<Target> feature_targets();
std::vector<Target> graph_targets();
std::vector<Target> run_targets();
std::vector<Target> token_targets();
std::vector<Target> image_targets();

/// Every target there is.
inline std::vector<Target> all_targets() {
  auto targets = store_targets();
  for (const auto& more : {timeline_targets(), feature_targets(), graph_targets(), run_targets(),
                           token_targets(), image_targets()}) {
    targets.insert(targets.end(), more.begin(), more.end());
  }
  return targets;
}

/// The one that this process has.
Governor& process_governor();

/// Ends the process, saying what was contradicted.
[[noreturn]] void contradiction(const char* target, const std::string& what);

}  // namespace plimsoll::fuzz
