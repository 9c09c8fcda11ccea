// SPDX-License-Identifier: Apache-2.0
#include "plan/device_choice.h"

#include <cstdint>

#include "plimsoll/bytes.h"

namespace plimsoll {

Result<void> check_device(const DeviceChoice& choice) {
  if (choice.device != "cpu" && choice.device != "simulated" && choice.device != "cuda") {
    return fail(ErrorCode::kInvalidArgument, "--device " + choice.device + ": no such device",
                "cpu, simulated or cuda");
  }
  if (choice.memory_limit.empty()) {
    if (choice.device != "simulated") {
      return {};
    }
    return fail(ErrorCode::kInvalidArgument,
                "--device simulated: nothing says how much memory it has",
                "give it a --device-memory-limit, as 8GiB");
  }
  if (choice.device == "cpu") {
    return fail(ErrorCode::kInvalidArgument,
                "--device-memory-limit " + choice.memory_limit + ": there is no device to limit",
                "name one with --device cuda or --device simulated");
  }
  // A share is one of what is there.
  const auto limit = parse_bytes(choice.memory_limit, choice.device == "cuda" ? INT64_MAX : 0);
  if (!limit || *limit < 1) {
    return fail(ErrorCode::kInvalidArgument,
                "--device-memory-limit: " + (limit ? choice.memory_limit + " is no memory at all"
                                                   : limit.error().to_string()),
                "a size, as 8GiB");
  }
  return {};
}

}  // namespace plimsoll
