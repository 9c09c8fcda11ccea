// SPDX-License-Identifier: Apache-2.0
//
// What a `cosir` run says of limits: which would do, and what was admitted under this one.
//
// Reading order: admission.h, this file, cosir.cpp.
//
// Threads: the thread that trains.   Memory: a few strings.
#pragma once

#include <cstdint>
#include <string>

#include "plimsoll/governor.h"
#include "plimsoll/result.h"
#include "recipes/cosir/data.h"

namespace plimsoll::cosir {

/// The refusal of a run before its first step, with a limit under which it begins: tensors as
/// `error` says where a rehearsed step was refused, otherwise as tensors_at_most() does, beside all
/// parts (`shares`; nullptr while nothing is open). `baseline_bytes`: the process before the run.
Error refused_before_start(const CosirConfig& config, std::int64_t baseline_bytes,
                           const DataShares* shares, Error error);

/// The limit, in bytes, with which a run as this one, opened anew, has room for its tensors: what
/// they were promised, and `shares` of the rest.
std::int64_t limit_to_resume(const Governor& governor, const DataShares& shares);

/// The table printed before the first step: limit, baseline, and each part's promise and share.
std::string admitted_table(const Governor& governor, std::int64_t step_peak,
                           std::int64_t batch_rows);

}  // namespace plimsoll::cosir
