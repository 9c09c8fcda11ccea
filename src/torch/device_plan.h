// SPDX-License-Identifier: Apache-2.0
//
// What a recipe's plan tells the planner of a device, and holds of the host for it.
//
// The recipes' steps run on the CPU: a plan for a device says what one of them would make it
// reserve. Batches would go there through page-locked memory, two at a time, so that one is copied
// while the other is filled; the plan leases as much (Tag::kPinned) from the host's limit.
// Reading order: torch/device_backend.h, plan/device_replay.h, this file.
//
// Threads: the thread that trains.   Memory: 8 bytes a tensor that stays.
#pragma once

#include <cstdint>
#include <vector>

#include "plimsoll/governor.h"
#include "torch/checkpoint.h"
#include "torch/device_backend.h"

namespace plimsoll {

/// device_memory() of the tensors that would stay on it from step to step.
[[nodiscard]] DeviceMemory device_memory(const DeviceBackend& device,
                                         const std::vector<NamedTensor>& staying);

/// Two batches of page-locked memory. Errors: kOverBudget.
Result<Lease> lease_pinned(Governor governor, std::int64_t batch_bytes);

}  // namespace plimsoll
