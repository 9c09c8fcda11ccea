// SPDX-License-Identifier: Apache-2.0
//
// What the two layouts do alike with a table's directory: make it, choose a commit, find rows.
//
// Threads: the table's owner.   Memory: the caller's scratch.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <span>

#include "os/folder_lock.h"
#include "plimsoll/result.h"
#include "store/embedding_description.h"
#include "store/embedding_format.h"
#include "store/embedding_growing_ids.h"
#include "store/id_index.h"

namespace plimsoll {

class IdSource;

/// Makes the files of an empty table, `table.json` last, all durable. When that fails the
/// directory is left without a table.
/// Requires: the directory is there, and locked; scratch of at least 64 KiB, for sorting ids.
/// Errors: kIo; kCorrupt when table.json alone is missing there.
Result<void> create_table_files(const std::filesystem::path& directory,
                                const TableDescription& table, const IdSource& source,
                                std::span<std::byte> scratch);

/// The right to change the table in `directory`, which is made when there is none.
/// Errors: as FolderLock::take().
Result<FolderLock> lock_table(const std::filesystem::path& directory);

/// The files map.N. A writer makes those that are missing: older tables have two; to a reader they
/// are not valid then. Errors: kIo.
Result<std::array<File, kMaps>> open_maps(const std::filesystem::path& directory, bool writable);

inline constexpr std::int64_t kAnyPages = -1;

/// The slot of the commit to open, or −1 when there is none and none was asked for (at_step < 0).
/// `pages`: what the superblock's field of that name must say.
/// Errors: kNotFound naming the steps that are there; kCorrupt.
Result<int> choose_commit(const SuperFile& super, const std::filesystem::path& directory,
                          std::uint64_t fingerprint, std::int64_t pages, std::int64_t at_step);

/// Ordinals of ids. Shape: both [n], or more ordinals. Errors: kNotFound naming the first unknown
/// id; kCorrupt; kIo.
Result<void> find_rows(const IdIndex& index, std::int64_t rows,
                       const std::filesystem::path& directory, std::span<const std::int64_t> ids,
                       std::span<std::uint32_t> ordinals);
/// The same in a table whose ids come and go.
Result<void> find_rows(const GrowingIds& index, const std::filesystem::path& directory,
                       std::span<const std::int64_t> ids, std::span<std::uint32_t> ordinals);

}  // namespace plimsoll
