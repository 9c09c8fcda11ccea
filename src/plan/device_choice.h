// SPDX-License-Identifier: Apache-2.0
//
// DeviceChoice: the device that a plan is made for, as the user names it.
//
// Threads: a value.   Memory: two strings.
#pragma once

#include <string>

#include "plimsoll/result.h"

namespace plimsoll {

/// --device and --device-memory-limit.
struct DeviceChoice {
  std::string device{"cpu"};   ///< "cpu", "simulated", "cuda".
  std::string memory_limit{};  ///< "8GiB"; of cuda also "80%", and "" for what is free now.
};

/// Errors: kInvalidArgument, naming the option, for a device that is not known, a limit without a
/// device, a simulated device without one, a limit that is no size. Opens nothing.
Result<void> check_device(const DeviceChoice& choice);

}  // namespace plimsoll
