// SPDX-License-Identifier: Apache-2.0
//
// Counter tracks: the looks of a run in the trace format that Perfetto and chrome://tracing open,
// to lie beside what torch.profiler writes: memory by owner, the limit, loss and throughput as
// counters, phases as slices.
//
// Source: "Trace Event Format" (Chromium), counter and complete events; times in microseconds since
// 1970, as torch.profiler's are.
//
// Threads: a pure function over files.
// Memory:  the looks, and some 2 KB of text for each: 2 MB.
#pragma once

#include <filesystem>

#include "plimsoll/result.h"

namespace plimsoll {

/// Writes the looks of a run, or of `plimsoll run --record`, to `file`.
/// Errors: kNotFound where there are none; kCorrupt; kIo.
Result<void> write_counter_tracks(const std::filesystem::path& root,
                                  const std::filesystem::path& file);

}  // namespace plimsoll
