// SPDX-License-Identifier: Apache-2.0
#include "os/meeting.h"

#include <atomic>
#include <climits>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace plimsoll {
namespace {

// Both on this side of `all`, wherever they are in the circle of 2³².
bool reached(std::uint32_t counter, std::uint32_t all) noexcept {
  return static_cast<std::int32_t>(counter - all) >= 0;
}

}  // namespace

void come(std::uint32_t& counter, std::uint32_t all) noexcept {
  const std::uint32_t before = std::atomic_ref(counter).fetch_add(1, std::memory_order_acq_rel);
  if (before + 1 == all) {
    wake(counter);
  }
}

bool met(std::uint32_t& counter, std::uint32_t all, std::int64_t most_ms) noexcept {
  const std::atomic_ref shared(counter);
  const std::timespec most{.tv_sec = most_ms / 1000, .tv_nsec = most_ms % 1000 * 1'000'000};
  for (std::uint32_t now = shared.load(std::memory_order_acquire); !reached(now, all);) {
    // Returns at once where another has come since; without FUTEX_PRIVATE_FLAG, for all processes.
    const long woken = ::syscall(SYS_futex, &counter, FUTEX_WAIT, now, &most, nullptr, 0);
    const std::uint32_t then = shared.load(std::memory_order_acquire);
    if (then == now || woken == 0) {
      return reached(then, all);
    }
    now = then;
  }
  return true;
}

void wake(std::uint32_t& counter) noexcept {
  ::syscall(SYS_futex, &counter, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace plimsoll
