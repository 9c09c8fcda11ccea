// SPDX-License-Identifier: Apache-2.0
//
// describe_tables(): the tables of a plimsoll.Run, in one folder, or dealt to ranks.
//
//   embeddings/items                one process's
//   embeddings-4-0/rank-2/items     what rank 2 of 4 has of it
//
// Threads: pure function of the path.   Memory: headers; no row is read.
#pragma once

#include <filesystem>
#include <vector>

#include "plimsoll/result.h"
#include "tables/describe.h"

namespace plimsoll {

/// True when `directory` holds tables, or folders of ranks that do.
[[nodiscard]] bool is_tables_folder(const std::filesystem::path& directory);

/// Those of a run folder, in the order of their names: several while another number of ranks goes
/// on.
[[nodiscard]] std::vector<std::filesystem::path> tables_folders(const std::filesystem::path& run);

/// That no store of one's own is at `path`; where tables are, it names them.
[[nodiscard]] Error no_store_at(const std::filesystem::path& path);

/// A line for each table; those of its name in all ranks are one.
/// Errors: kCorrupt, kIo.
Result<Description> describe_tables(const std::filesystem::path& directory);

}  // namespace plimsoll
