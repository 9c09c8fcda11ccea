// SPDX-License-Identifier: Apache-2.0
//
// DeviceStatus as JSON has it: in status.json, of `plimsoll watch` and `plimsoll why`.
//
// Threads: pure functions.   Memory: the document.
#pragma once

#include <nlohmann/json.hpp>

#include "run/run_folder.h"

namespace plimsoll {

[[nodiscard]] nlohmann::ordered_json device_document(const DeviceStatus& device);

}  // namespace plimsoll
