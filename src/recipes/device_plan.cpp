// SPDX-License-Identifier: Apache-2.0
//
// See device_plan.h.
#include "recipes/device_plan.h"

#include <unordered_set>

#include "plimsoll/torch.h"
#include "torch/arena_pages.h"

namespace plimsoll {

DeviceMemory device_memory(const DeviceBackend& device, const std::vector<NamedTensor>& staying) {
  DeviceMemory memory;
  memory.name = device.name();
  memory.limit_bytes = device.limit_bytes();
  std::unordered_set<const void*> seen;  // An entry a tensor.
  for (const auto& [name, tensor] : staying) {
    if (!tensor.defined() || tensor.storage().nbytes() == 0 ||
        !seen.insert(tensor.storage().data()).second) {
      continue;
    }
    const auto bytes = static_cast<std::int64_t>(tensor.storage().nbytes());
    memory.static_blocks.push_back(bytes);
    memory.static_listed_bytes +=
        TensorArena::owns(tensor.storage().data()) ? arena_block_bytes(bytes) : 0;
  }
  return memory;
}

Result<Lease> lease_pinned(Governor governor, std::int64_t batch_bytes) {
  return governor.reserve(Tag::kPinned, 2 * batch_bytes);
}

}  // namespace plimsoll
