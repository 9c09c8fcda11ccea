// SPDX-License-Identifier: Apache-2.0
//
// Imports: a user's own feature files become a FeatureStore.
//
// Reading order: feature_store.h, this file, src/data/dataset_import.cpp.
//
// Threads: one import runs on its caller's thread.
// Memory:  about 12 MiB, leased (Tag::kOther), however large the files are.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <vector>

#include "plimsoll/feature_store.h"
#include "plimsoll/governor.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// Where the two columns of the `cosir` recipe, its ids and its groups come from.
///
/// Features are .npy or .safetensors files of shape [rows, width], float32 or float16. Each list
/// may name files and directories (all .npy and .safetensors in them); the shards are joined in
/// the order of their file names, numbers in names compared as numbers (part2 before part10). A
/// .safetensors shard holds one tensor, or one named after the column: "image", "image_features".
struct CosirImportOptions {
  std::vector<std::filesystem::path> image_features{};
  std::vector<std::filesystem::path> text_features{};
  std::filesystem::path ids{};     ///< int64 [rows], any order, distinct; empty: 0, 1, 2, ….
  std::filesystem::path groups{};  ///< int64 [rows], the image of each caption; empty: none.
  std::filesystem::path out{};     ///< Must not exist, or be empty, unless `append`.
  /// Adds the pairs to the store that is in `out`, as a part (FeatureWriter::extend). Columns and
  /// groups must be as it has them; without ids they go on from its number of records.
  bool append{false};
  BlockCompression compression{BlockCompression::kNone};  ///< With `append` the store's own.
};

/// Writes columns "image" and "text". Nothing is left behind on an error.
///
/// `progress(done, total)` in rows is called now and then; returning false cancels.
/// Errors: kNotFound, kCorrupt (truncated shard), kInvalidArgument (wrong type or width, NaN,
///         row counts that differ, duplicate ids, cancelled), naming the file and the row; kIo.
Result<FeatureInfo> import_cosir(Governor governor, const CosirImportOptions& options,
                                 const std::function<bool(std::int64_t, std::int64_t)>& progress);

}  // namespace plimsoll
