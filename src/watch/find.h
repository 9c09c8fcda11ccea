// SPDX-License-Identifier: Apache-2.0
//
// find_trainers: processes that train, found by what they are: torch is mapped, or the lock of a
// run's folder is held. Never by their names: a path with "train" in it is no training.
//
// Threads: pure functions over files.   Memory: kTrainersMost of a few hundred bytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "plimsoll/result.h"

namespace plimsoll {

inline constexpr std::size_t kTrainersMost = 256;

struct Trainer {
  int pid{0};
  int parent{0};
  std::string command{};        ///< Cut to 200 bytes.
  std::filesystem::path run{};  ///< Whose lock it holds; empty: none.
  bool torch{false};
  std::int64_t resident_bytes{0};  ///< Anonymous and shared memory of the process alone.
};

/// The largest first, without the workers of another: what was forked from it, or started by
/// Python's multiprocessing. A program that a launcher or a test started is one of its own, whether
/// or not its parent has torch too. Processes that may not be read are left out, and this one.
/// Errors: kIo when /proc cannot be listed.
[[nodiscard]] Result<std::vector<Trainer>> find_trainers(
    const std::filesystem::path& proc = "/proc");

}  // namespace plimsoll
