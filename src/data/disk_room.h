// SPDX-License-Identifier: Apache-2.0
//
// check_disk_room: refuses to begin writing what will not fit.
//
// Threads: pure function.   Memory: none.
#pragma once

#include <cstdint>
#include <filesystem>

#include "plimsoll/governor.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// Compares `bytes` with the free space of `directory` and with the governor's disk limit.
/// Errors: kIo (ENOSPC) or kOverBudget, naming the directory and both numbers.
Result<void> check_disk_room(const Governor& governor, const std::filesystem::path& directory,
                             std::int64_t bytes);

}  // namespace plimsoll
