// SPDX-License-Identifier: Apache-2.0
//
// Coming: how much more memory is expected before somebody who is told to stop has ended.
//
// As much as came in the last one to two of `ahead`; of looks further apart, that part of it. For
// the watcher of a governor, and for who watches other programs (src/watch/alerts.h).
//
// Threads: single-owner.   Memory: 48 bytes.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace plimsoll {

class Coming {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Coming(std::chrono::milliseconds ahead) noexcept : ahead_(ahead) {}

  /// `bytes` are held at `now`; what is expected to come. `now` never goes back.
  std::int64_t add(Clock::time_point now, std::int64_t bytes) noexcept {
    if (at_ == Clock::time_point{}) {
      at_ = earlier_at_ = now;
      bytes_ = earlier_ = bytes;
    } else if (now - at_ >= ahead_) {
      earlier_at_ = at_;
      at_ = now;
      earlier_ = bytes_;
      bytes_ = bytes;
    }
    const std::int64_t came = std::max<std::int64_t>(0, bytes - earlier_);
    const double seconds = std::chrono::duration<double>(now - earlier_at_).count();
    const double most = 2 * std::chrono::duration<double>(ahead_).count();
    return seconds <= most ? came
                           : static_cast<std::int64_t>(static_cast<double>(came) * most / seconds);
  }

 private:
  std::chrono::milliseconds ahead_;
  Clock::time_point at_{};
  Clock::time_point earlier_at_{};
  std::int64_t bytes_{0};    // Held then: `ahead` ago, or longer.
  std::int64_t earlier_{0};  // And before that.
};

}  // namespace plimsoll
