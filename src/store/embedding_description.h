// SPDX-License-Identifier: Apache-2.0
//
// TableDescription: what a table is and stays, as kept in table.json.
//
// Written once, last, when a table is created: a directory without it holds no table. It carries a
// checksum of its own, and its fingerprint is in every page and superblock.
//
// Threads: values.   Memory: a few hundred bytes of text.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <string>

#include "plimsoll/embedding_store.h"
#include "store/embedding_format.h"
#include "store/id_index.h"

namespace plimsoll {

struct TableDescription {
  std::int64_t dim{0};
  RowDType dtype{};
  RowOptimizer optimizer{};
  RowInit init{};
  IdIndexInfo ids{};
  RowLayout layout{};
  std::int64_t rows_max{0};  // Places for rows, if ids may come (any order: and go); else 0.
  // Sample order only.
  std::uint64_t order_seed{0};    // Of the first epoch.
  std::int64_t bucket_rows{0};    // Positions per bucket.
  std::int64_t segment_bytes{0};  // What rows.dat is divided into.

  /// Its rows are places: rows_max, or as many as there are ids.
  [[nodiscard]] TableShape shape() const noexcept;
  [[nodiscard]] GrowthShape growth() const noexcept { return {ids.rows, rows_max}; }
  /// Over every field.
  [[nodiscard]] std::uint64_t fingerprint() const noexcept;
};

namespace table_files {
inline constexpr const char* kDescription = "table.json";
inline constexpr const char* kRows = "rows.dat";
inline constexpr const char* kSuper = "super";
inline constexpr const char* kIds = "rows";         // rows.ids, rows.order
inline constexpr const char* kNewIds = "rows.new";  // Sample order: those inserted.
/// Every file that a table may have.
inline constexpr std::array kAll{kDescription, kRows,      kSuper,       "map.0",      "map.1",
                                 "map.2",      "rows.ids", "rows.order", "rows.spans", kNewIds};
inline constexpr const char* kGivenIds = "ids.npy";  // What a table that is copied is made from.
/// Every file that a process killed while it made a table may leave, too.
inline constexpr std::array kMade{
    kDescription,     kRows,         kSuper,        "map.0",      "map.1",
    "map.2",          "rows.ids",    "rows.order",  "rows.spans", kNewIds,
    "table.json.new", "rows.runs.0", "rows.runs.1", kGivenIds,    "ids.npy.partial",
    ".lock"};
[[nodiscard]] std::filesystem::path map_path(const std::filesystem::path& directory, int number);
}  // namespace table_files

/// "float32", "bfloat16".
[[nodiscard]] const char* row_dtype_name(RowDType dtype) noexcept;
/// "any_order", "sample_order".
[[nodiscard]] const char* layout_name(RowLayout layout) noexcept;

/// Errors: kNotFound (there is no table), kCorrupt, kIo.
Result<TableDescription> read_description(const std::filesystem::path& directory);

/// Durably; the table exists from then on. Errors: kIo.
Result<void> write_description(const std::filesystem::path& directory,
                               const TableDescription& description);

/// Compares what the caller asks for with what the table is. `ids`: nullptr when none were given.
/// Of a table whose ids may come and go, rows and ids are not compared.
/// Errors: kInvalidArgument naming the file, both values and the option.
Result<void> compare_description(const std::filesystem::path& directory,
                                 const TableDescription& table,
                                 const EmbeddingStoreOptions& options, const IdIndexInfo* ids);

}  // namespace plimsoll
