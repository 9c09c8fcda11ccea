// SPDX-License-Identifier: Apache-2.0
//
// TrainOptions: how a run is started, whatever its recipe; none of it is part of the run.
//
// Threads: a value.   Memory: a few words.
#pragma once

#include "run/progress.h"

namespace plimsoll {

struct TrainOptions {
  bool resume{false};  ///< Go on with the run in config().out.
  /// Go on although the processor, or the kernels that libraries choose for it, are others than the
  /// run began with: from here on its bits are those of another run. Written to events.jsonl.
  bool accept_other_processor{false};
  ProgressOptions progress{};
};

}  // namespace plimsoll
