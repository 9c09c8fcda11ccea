// SPDX-License-Identifier: Apache-2.0
#include "watch/inside.h"

#include <cstdint>

#include <malloc.h>

#include "memory/ledger.h"
#include "memory/look.h"

namespace plimsoll {

Inside inside_now() {
  const struct mallinfo2 heap = ::mallinfo2();
  Inside inside{.native = static_cast<std::int64_t>(heap.uordblks + heap.hblkhd),
                .retained = static_cast<std::int64_t>(heap.fordblks)};
  if (const auto ledger = current_ledger(); ledger != nullptr) {
    const LedgerState state = ledger->state();
    inside.tensors = state.pools[static_cast<std::size_t>(Tag::kTensor)].leased_bytes;
    inside.leased = state.leased_bytes - inside.tensors;
  }
  return inside;
}

}  // namespace plimsoll
