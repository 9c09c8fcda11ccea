// SPDX-License-Identifier: Apache-2.0
//
// What comes before a run or an evaluation of `cosir`.
//
// Threads: the thread that trains, with no torch operator running.
// Memory:  the governor's; libraries that a first operator loads are counted in its baseline.
#pragma once

#include <filesystem>
#include <optional>

#include "plimsoll/governor.h"
#include "plimsoll/result.h"
#include "recipes/cosir/config.h"
#include "recipes/cosir/eval.h"

namespace plimsoll::cosir {

/// settle() of settle.h with these options. Errors: kInvalidArgument for options that no run has.
Result<Governor> settle(const CosirConfig& config, const std::filesystem::path& directory,
                        std::optional<std::int64_t> baseline_bytes = {});

/// How a run with these options is evaluated.
EvalOptions eval_options(const CosirConfig& config, std::int64_t angles);

}  // namespace plimsoll::cosir
