// SPDX-License-Identifier: Apache-2.0
#include "watch/restarts.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

namespace plimsoll {
namespace {

constexpr std::int64_t kPauseMost = 60;  // Seconds.
constexpr std::int64_t kDoublings = 6;   // Until then.
// Statuses that another try would give again: of a wrong use, and of a shell that cannot start it.
constexpr std::array kNoUse{2, 126, 127};

}  // namespace

RestartDecision decide_restart(const CommandEnd& end, Restarts& restarts) {
  const bool failed = end.stopped || end.status != 0;
  if (restarts.most == 0 || !failed || end.asked || std::ranges::count(kNoUse, end.status) > 0) {
    return {};
  }
  if (restarts.done > 0 && !end.progress.empty() && end.progress == restarts.progress) {
    return {.why = "ended twice without getting further (" + end.progress + "): not started again"};
  }
  if (restarts.done >= restarts.most) {
    return {
        .why = fmt::format("not started again: that was the last of --restarts {}", restarts.most)};
  }
  const std::int64_t pause =
      std::min(std::int64_t{1} << std::min(restarts.done, kDoublings), kPauseMost);
  restarts.progress = end.progress;
  ++restarts.done;
  return {.again = true,
          .pause = std::chrono::seconds(pause),
          .why = fmt::format("started again in {} s ({} of {}){}", pause, restarts.done,
                             restarts.most, end.progress.empty() ? "" : ", from " + end.progress)};
}

}  // namespace plimsoll
