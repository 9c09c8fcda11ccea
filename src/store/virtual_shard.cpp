// SPDX-License-Identifier: Apache-2.0
#include "plimsoll/virtual_shard.h"

#include "base/philox.h"

namespace plimsoll {

std::int64_t virtual_shard(std::int64_t id) noexcept {
  constexpr int kHashBits = 64;
  constexpr int kShardBits = 12;
  static_assert(std::int64_t{1} << kShardBits == kVirtualShards);
  return static_cast<std::int64_t>(mix64(static_cast<std::uint64_t>(id)) >>
                                   (kHashBits - kShardBits));
}

}  // namespace plimsoll
