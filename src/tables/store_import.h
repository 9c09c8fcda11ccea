// SPDX-License-Identifier: Apache-2.0
//
// Imports rows from files of other programs into a new embedding table, streaming; Megatron's into
// a token set.
//
//   .safetensors  "ids" i64 [rows], "rows" f32 or bf16 [rows, dim]   as `store export` writes them
//   .npy          f32 [rows, dim]; ids in NAME.ids.npy, or 0, 1, 2, … over all files if asked for
//   .csv          id, then the floats; a first line that begins with no number is a heading
//   .pt           {id: f32 [dim]} by torch.save: the original's embeddings_chunk_<k>.pt; read in
//                 Python (python/plimsoll/data/importers/_saved_rows.py)
//
//   .idx, .bin    Megatron's two files, or format = megatron: a token set (src/data/megatron.h)
//
// Several files are shards of one table, in the order given. Optimizer slots begin at zero. The
// table is built in OUT.partial and renamed: a process that is killed leaves no table.
//
// Threads: free function.
// Memory:  the table's slab and one block of rows; beside them the ids of all .pt, leased, and what
//          the reader of one takes. Else nothing grows with the files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "plimsoll/embedding_store.h"

namespace plimsoll {

/// Shape: as many ids as rows; float32 [n, dim], or no floats where only ids are wanted.
using VisitRows =
    std::function<Result<void>(std::span<const std::int64_t>, std::span<const float>)>;
/// Visits every row of a .pt in the order of its dict, or its ids alone. Returns the width.
/// Errors: kCorrupt naming the file (not of torch.save, a class in it, not a dict of whole numbers
///         to float32 [dim]); kNotFound; kIo; kOverBudget.
using ReadSavedRows = std::function<Result<std::int64_t>(
    const Governor&, const std::filesystem::path&, bool with_rows, const VisitRows&)>;
/// Requires: no import is at work.
void set_saved_rows_reader(ReadSavedRows read);

struct ImportOptions {
  std::vector<std::filesystem::path> files{};
  std::filesystem::path out{};  ///< The table's folder; must be new or empty. A token set's file.
  std::string format{};  ///< safetensors, npy, csv, pt or megatron; "": by each file's extension.
  RowOptimizer optimizer{RowOptimizer::kAdamW};
  RowDType dtype{};         ///< Of the table.
  bool number_rows{false};  ///< Rows of a .npy without NAME.ids.npy get the ids 0, 1, 2, ….
};

/// What may train a table, by the name that `store info` gives: "adamw", "sgd", "row_adagrad", ….
std::map<std::string, RowOptimizer> optimizers_by_name();

/// Returns the number of rows. The table is committed at step 0, or not there at all.
/// Errors: kInvalidArgument (a form, width or element type; an id twice, or no ids; `out` is not
///         empty, or another process imports into it),
///         kCorrupt naming the file, and the line of a .csv; kNotFound; kIo.
Result<std::int64_t> import_store(Governor governor, const ImportOptions& options,
                                  const ProgressFn& progress);

}  // namespace plimsoll
