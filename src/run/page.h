// SPDX-License-Identifier: Apache-2.0
//
// RUN/report.html: one page that says what became of a run, and who held its memory.
//
// It stands alone: no script, and nothing is loaded from anywhere. What comes from the run is
// escaped. Also of a folder of `plimsoll run --record`, where it has looks and an ending alone.
//
// Reading order: why.h, page_events.h, watch/picture.h, this file.
//
// Threads: pure functions over files.
// Memory:  what why.h and page_events.h have, and the page: kPageBytesMost at most.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

#include "plimsoll/result.h"

namespace plimsoll {

inline constexpr const char* kReportFile = "report.html";
inline constexpr std::size_t kPageBytesMost = 1'500'000;

/// The page.   Errors: as explain_end().
[[nodiscard]] Result<std::string> report_page(const std::filesystem::path& root);

/// Writes it to `file`; an empty path: to RUN/report.html. Returns where it is.   Errors: the same;
/// kIo.
Result<std::filesystem::path> write_report(const std::filesystem::path& root,
                                           const std::filesystem::path& file = {});

}  // namespace plimsoll
