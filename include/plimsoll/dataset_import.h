// SPDX-License-Identifier: Apache-2.0
//
// Imports features that other programs wrote (.npy, .safetensors) into a FeatureStore.
//
// Threads: free function.
// Memory:  one block of rows and the writer's buffer, leased; file headers.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <vector>

#include "plimsoll/feature_store.h"
#include "plimsoll/governor.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// A column's shards: files, or folders whose .npy and .safetensors files are taken in name order.
/// A .safetensors file must hold exactly one tensor, or one named like the column.
using ShardPaths = std::vector<std::filesystem::path>;

struct ImportCosirOptions {
  ShardPaths image_features{};  ///< [rows, width] float32 or float16, kept as it is.
  ShardPaths text_features{};
  ShardPaths ids{};     ///< int64 [rows], distinct, in any order; empty: 0 … rows−1.
  ShardPaths groups{};  ///< int64 [rows]; rows of one group are consecutive; empty: no groups.
  std::filesystem::path out{};
};

/// Writes a FeatureStore with columns "image" and "text". Leaves nothing behind on an error.
/// Errors: kNotFound (a missing file), kInvalidArgument (row counts that disagree, naming both; an
///         element type or width that does not fit; NaN or infinity; a duplicate id), kCorrupt
///         (a truncated shard). `progress(done, total)` in rows; false cancels.
Result<FeatureInfo> import_cosir(Governor governor, const ImportCosirOptions& options,
                                 const std::function<bool(std::int64_t, std::int64_t)>& progress);

}  // namespace plimsoll
