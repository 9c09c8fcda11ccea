// SPDX-License-Identifier: Apache-2.0
//
// Exports a store to a file that other programs read: .safetensors, .npy or .csv, streaming.
//
// Of a table in any order whoever trains in it may go on: what is exported is one commit, pinned.
//
//   embedding store  .safetensors: "ids" i64 [rows], "rows" f32 or, as the table's, bf16 [rows,
//   dim]
//                    .npy: the rows; their ids in NAME.ids.npy       .csv: id, then the floats
//   feature store    .safetensors: "ids" and every column
//                    .npy: one column; ids in NAME.ids.npy           .csv: id, one column's numbers
//   token set        .idx, or format = megatron: NAME.bin and NAME.idx (src/data/megatron.h)
//
// Threads: free function.
// Memory:  the store's slab and one block of rows; nothing grows with the store.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "plimsoll/governor.h"
#include "plimsoll/result.h"

namespace plimsoll {

struct ExportOptions {
  std::filesystem::path directory{};  ///< A store, or a run folder (its embeddings).
  std::filesystem::path out{};        ///< Must not exist.
  std::string format{};    ///< safetensors, npy, csv or megatron; "": by the extension of `out`.
  std::string column{};    ///< Of a feature store, for .npy and .csv.
  std::int64_t since{-1};  ///< Only rows changed since this commit of the table.
  std::int64_t step{-1};   ///< Of a table, the commit to export; −1: the newest.
};

/// "safetensors", "npy" or "csv", as `format` or else the file's name has it.
/// Errors: kInvalidArgument.
[[nodiscard]] Result<std::string> store_file_form(const std::filesystem::path& file,
                                                  const std::string& format);

/// Whether that is Megatron's form, which token sets have.
[[nodiscard]] bool is_megatron(const std::filesystem::path& file, const std::string& format);

/// Returns the number of rows written. The file appears whole or not at all.
/// Errors: kInvalidArgument (form, column, file exists), those of the stores, kIo.
Result<std::int64_t> export_store(Governor governor, const ExportOptions& options,
                                  const std::function<bool(std::int64_t, std::int64_t)>& progress);

/// Reads every page or block and compares checksums; any kind of store.
Result<void> verify_store(const std::filesystem::path& directory,
                          const std::function<bool(std::int64_t, std::int64_t)>& progress);

}  // namespace plimsoll
