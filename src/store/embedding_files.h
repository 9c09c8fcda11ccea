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

/// Where the rows of a request are, and of which ids that was: apply() of the ids that were just
/// gathered looks none of them up. In the slab, batch_rows of each.
struct FoundRows {
  std::span<std::uint32_t> ordinals{};
  std::span<std::int64_t> ids{};  ///< Scratch too. None where ids are dense and stay.
  std::size_t known{0};           ///< So many of `ids` have their ordinals beside them.

  /// Ids came or went.
  void forget() noexcept { known = 0; }
  /// How many `ids` a table has: as many as ordinals, or none.
  static std::int64_t ids_of(const TableDescription& table, std::int64_t batch_rows) noexcept {
    return table.ids.dense && table.rows_max == 0 ? 0 : batch_rows;
  }
};

}  // namespace plimsoll
