// SPDX-License-Identifier: Apache-2.0
//
// decide_restart: whether a command that ended is started again, and after how long a pause.
//
// What was killed, or failed, is; not what was asked to end, nor what was used wrongly, nor what
// died twice with nothing committed in between (progress.h). The pause is 1, 2, 4, ... at most 60
// seconds.
//
// Threads: a pure function.   Memory: two strings of ProgressNote::kBytesMost at most.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace plimsoll {

/// How often a command was started again, and how far it had come when it ended the last time.
struct Restarts {
  std::int64_t most{0};
  std::int64_t done{0};
  std::string progress{};  ///< "": nothing was told.
};

/// How it ended this time.
struct CommandEnd {
  int status{0};        ///< Its exit status, or 128 + the signal that ended it.
  bool stopped{false};  ///< It was ended for its memory, or for its time.
  bool asked{false};    ///< Somebody asked it to end.
  std::string progress{};
};

struct RestartDecision {
  bool again{false};
  std::chrono::seconds pause{0};
  std::string why{};  ///< A line; "" when there was nothing to decide.
};

/// Counts the restart in `restarts` where there is one.
[[nodiscard]] RestartDecision decide_restart(const CommandEnd& end, Restarts& restarts);

}  // namespace plimsoll
