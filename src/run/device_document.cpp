// SPDX-License-Identifier: Apache-2.0
#include "run/device_document.h"

#include <fmt/format.h>

#include "plimsoll/bytes.h"

namespace plimsoll {

std::string device_words(const DeviceStatus& device) {
  return fmt::format("{} held (peak {}): tensors {}, cache {}, context {}; limit {}{}{}",
                     format_bytes(device.context_bytes + device.reserved_bytes),
                     format_bytes(device.peak_bytes), format_bytes(device.allocated_bytes),
                     format_bytes(device.reserved_bytes - device.allocated_bytes),
                     format_bytes(device.context_bytes), format_bytes(device.limit_bytes),
                     device.others.empty() ? "" : "; ", device.others);
}

nlohmann::ordered_json device_document(const DeviceStatus& device) {
  return {{"name", device.name},
          {"kind", device.kind},
          {"limit_bytes", device.limit_bytes},
          {"context_bytes", device.context_bytes},
          {"allocated_bytes", device.allocated_bytes},
          {"reserved_bytes", device.reserved_bytes},
          {"peak_bytes", device.peak_bytes},
          {"others_bytes", device.others_bytes < 0 ? nlohmann::ordered_json(nullptr)
                                                   : nlohmann::ordered_json(device.others_bytes)},
          {"others", device.others}};
}

}  // namespace plimsoll
