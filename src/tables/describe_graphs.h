// SPDX-License-Identifier: Apache-2.0
//
// describe_graphs(): what a set of graphs holds, and what was odd about the files it came from.
//
// Threads: pure function of the path.   Memory: the header; no graph is read.
#pragma once

#include <filesystem>

#include "plimsoll/result.h"
#include "tables/describe.h"

namespace plimsoll {

/// True when `directory` holds a GraphSet.
[[nodiscard]] bool is_graph_set(const std::filesystem::path& directory);

/// Errors: kNotFound, kCorrupt, kIo.
Result<Description> describe_graphs(const std::filesystem::path& directory);

}  // namespace plimsoll
