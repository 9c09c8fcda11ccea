// SPDX-License-Identifier: Apache-2.0
//
// Stall: adds the time of a scope to a count of nanoseconds. commit_seconds(): how long one may be.
//
// Threads: made and destroyed under the mutex that guards the count.   Memory: 24 bytes.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace plimsoll {

class Stall {
 public:
  explicit Stall(std::int64_t& total, bool counts = true) : total_(total), counts_(counts) {}
  ~Stall() {
    const auto now = std::chrono::steady_clock::now();
    total_ += counts_ ? std::chrono::nanoseconds(now - began_).count() : 0;
  }
  Stall(const Stall&) = delete;
  Stall& operator=(const Stall&) = delete;

 private:
  std::int64_t& total_;
  bool counts_;
  std::chrono::steady_clock::time_point began_{std::chrono::steady_clock::now()};
};

/// What a commit may take to write what waited for it: a hundredth of the time since the one before
/// it, 50 ms to 1 s.
inline double commit_seconds(std::int64_t ns_since_last) noexcept {
  return std::clamp(static_cast<double>(ns_since_last) * 1e-9 * 0.01, 0.05, 1.0);
}

}  // namespace plimsoll
