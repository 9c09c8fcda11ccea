// SPDX-License-Identifier: Apache-2.0
//
// A look as text for Prometheus.
// Source: "Exposition formats", version 0.0.4, of the documentation of Prometheus.
//
// Threads: a pure function.   Memory: the text.
#pragma once

#include <string>
#include <vector>

#include "run/run_folder.h"
#include "watch/room.h"
#include "watch/watch.h"

namespace plimsoll {

/// `target`: the label of all lines. `step`: below 0 where there are no steps. `devices`: those of
/// the run that have a limit.
[[nodiscard]] std::string metrics_text(const std::string& target, double step, Watch& watch,
                                       const Room& room, const std::vector<DeviceStatus>& devices);

}  // namespace plimsoll
