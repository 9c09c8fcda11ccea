// SPDX-License-Identifier: Apache-2.0
//
// What the directory of a table in sample order holds, read without opening it for training.
//
// Threads: pure functions of the directory.   Memory: one map and one extent, on the heap.
#pragma once

#include <filesystem>

#include "plimsoll/embedding_store.h"
#include "store/embedding_description.h"
#include "store/embedding_format.h"

namespace plimsoll {

/// Adds rows, epoch and cursor of a commit to `info`. Errors: kCorrupt when its map is not sound.
Result<void> inspect_timeline(const std::filesystem::path& directory, const TableDescription& table,
                              const Superblock& superblock, TableInfo& info);

/// Reads every extent and every inserted id of a commit and compares checksums. Errors: kCorrupt
/// naming the file.
Result<void> verify_timeline(const std::filesystem::path& directory, const TableDescription& table,
                             const Superblock& superblock, const ProgressFn& progress);

}  // namespace plimsoll
