// SPDX-License-Identifier: Apache-2.0
#include "watch/inside.h"

#include <algorithm>
#include <cstdint>

#include <malloc.h>

#include "memory/ledger.h"
#include "memory/look.h"
#include "os/clock.h"

namespace plimsoll {
namespace {

constexpr int kLongestRest = 20;  // Doublings: beyond all runs.
constinit MallocPatience patience;

}  // namespace

void MallocPatience::answered(std::int64_t now_ns, std::int64_t took_ns,
                              std::int64_t pieces) noexcept {
  if (took_ns <= kTookMostNs || pieces <= kPiecesMost) {
    dear_ = 0;
  } else if (++dear_ >= kDearMost) {
    rests_until_ = now_ns + ((kRest * took_ns) << std::min<int>(rests_++, kLongestRest));
  }
}

Inside inside_now(bool ask_malloc) {
  Inside inside{.malloc_later = !ask_malloc};
  if (ask_malloc && patience.asks(now_ns())) {
    const std::int64_t began = thread_cpu_ns();
    const struct mallinfo2 heap = ::mallinfo2();
    patience.answered(now_ns(), thread_cpu_ns() - began,
                      static_cast<std::int64_t>(heap.ordblks + heap.smblks));
    inside.native = static_cast<std::int64_t>(heap.uordblks + heap.hblkhd);
    inside.retained = static_cast<std::int64_t>(heap.fordblks);
  }
  if (const auto ledger = current_ledger(); ledger != nullptr) {
    const LedgerState state = ledger->state();
    inside.tensors = state.pools[static_cast<std::size_t>(Tag::kTensor)].leased_bytes;
    inside.leased = state.leased_bytes - inside.tensors;
  }
  return inside;
}

}  // namespace plimsoll
