// SPDX-License-Identifier: Apache-2.0
//
// The two clocks that the project measures itself by.
//
// Threads: any.   Memory: none.
#pragma once

#include <chrono>
#include <cstdint>
#include <ctime>

namespace plimsoll {

// Of the steady clock, which never goes back; its beginning says nothing.
inline std::int64_t now_ns() noexcept {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

// What the calling thread has had of the processors: it stands while others keep the thread
// waiting.
inline std::int64_t thread_cpu_ns() noexcept {
  timespec used{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return used.tv_sec * 1'000'000'000 + used.tv_nsec;
}

}  // namespace plimsoll
