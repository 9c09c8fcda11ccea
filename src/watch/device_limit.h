// SPDX-License-Identifier: Apache-2.0
//
// limit_devices: the limit of a GPU's memory, for a command that is about to begin.
//
// A run of plimsoll in the command keeps it as its own device_memory_limit. Any other program of
// torch 2.11 or later is told a share of the GPU, by PYTORCH_CUDA_ALLOC_CONF: torch's allocator
// keeps it, and the context, some hundred MiB, is not part of it. A size becomes a share of the
// largest GPU, whose memory NVIDIA's driver tells.
//
// Threads: one, before others begin (setenv).   Memory: the driver's library, while it is asked.
#pragma once

#include <string>

#include "plimsoll/result.h"

namespace plimsoll {

inline constexpr const char* kDeviceLimitVariable = "PLIMSOLL_DEVICE_MEMORY_LIMIT";

/// Sets both variables in this process's environment. `limit`: "20GiB", "80%". Returns what the
/// user has to know, "" for nothing.   Errors: kInvalidArgument.
[[nodiscard]] Result<std::string> limit_devices(const std::string& limit);

}  // namespace plimsoll
