// SPDX-License-Identifier: Apache-2.0
//
// See device_plan.h.
#include "torch/device_plan.h"

namespace plimsoll {

DeviceMemory device_memory(const DeviceBackend& device, const std::vector<NamedTensor>& staying) {
  std::vector<StayingBlock> blocks;
  for (const auto& [name, tensor] : staying) {
    if (tensor.defined()) {
      const auto& storage = tensor.storage();
      blocks.push_back({storage.data(), static_cast<std::int64_t>(storage.nbytes())});
    }
  }
  return device_memory(device, blocks);
}

Result<Lease> lease_pinned(Governor governor, std::int64_t batch_bytes) {
  return governor.reserve(Tag::kPinned, 2 * batch_bytes);
}

}  // namespace plimsoll
