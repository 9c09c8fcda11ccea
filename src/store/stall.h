// SPDX-License-Identifier: Apache-2.0
//
// Stall: adds the time of a scope to a count of nanoseconds.
//
// Threads: made and destroyed under the mutex that guards the count.   Memory: 24 bytes.
#pragma once

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

}  // namespace plimsoll
