// SPDX-License-Identifier: Apache-2.0
//
// What comes before a run or an evaluation of `cosir`: torch made repeatable, the limit found.
//
// Threads: the thread that trains, with no torch operator running.
// Memory:  the governor's; libraries that a first operator loads are counted in its baseline.
#pragma once

#include <filesystem>
#include <optional>

#include "plimsoll/governor.h"
#include "plimsoll/result.h"
#include "recipes/cosir_config.h"
#include "recipes/cosir_eval.h"

namespace plimsoll::cosir {

/// Settles torch first, then the limit, and attaches the arena: from now on tensors are leased.
/// `baseline_bytes` is what this process began with where it has planned before: what came on top
/// (code, kernels' scratch) is in the new baseline, and not set aside a second time.
/// Errors: kInvalidArgument (options, MKL_CBWR unset); those of Governor::create().
Result<Governor> settle(const CosirConfig& config, const std::filesystem::path& directory,
                        std::optional<std::int64_t> baseline_bytes = {});

/// How a run with these options is evaluated.
EvalOptions eval_options(const CosirConfig& config, std::int64_t angles);

}  // namespace plimsoll::cosir
