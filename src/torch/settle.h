// SPDX-License-Identifier: Apache-2.0
//
// What comes before any run: torch made repeatable, the limit found, the arena attached.
//
// Threads: the thread that trains, with no torch operator running.
// Memory:  the governor's; libraries that a first operator loads are counted in its baseline.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "plimsoll/governor.h"
#include "plimsoll/result.h"
#include "run/run_folder.h"
#include "run/train_options.h"

namespace plimsoll {

struct SettleOptions {
  std::string memory_limit{};
  std::string disk_limit{};
  std::int64_t foreign_bytes{0};
  std::int64_t compute_threads{1};
  std::filesystem::path directory{};  ///< Whose disk the run fills.
  /// What this process began with where it has planned before: what came on top (code, kernels'
  /// scratch) is in the new baseline, and not set aside a second time.
  std::optional<std::int64_t> baseline_bytes{};
};

/// Settles torch first, then the limit, and attaches the arena: from now on tensors are leased.
/// Errors: those of make_deterministic() and Governor::create().
Result<Governor> settle(const SettleOptions& options);

/// What decides a run's bits: `options` that do, libraries, processor, data. Of libraries what took
/// effect, as far as they tell; otherwise what the environment asks of them.
/// Requires: settle() was called.
RunIdentity make_identity(std::span<const std::pair<std::string, std::string>> options,
                          const std::string& data_fingerprint);

/// What may differ in a resumption.
IdentityChanges identity_changes(const TrainOptions& options);

}  // namespace plimsoll
