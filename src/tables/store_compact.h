// SPDX-License-Identifier: Apache-2.0
//
// Compacts the rows of a table or of a run: see EmbeddingStore::compact(). Joins the parts of a
// feature store: see FeatureStore::join().
//
// A run is compacted at the step its manifest names, under its lock.
//
// Threads: free function.   Memory: the slabs of two tables.
#pragma once

#include <cstdint>
#include <filesystem>

#include "plimsoll/embedding_store.h"

namespace plimsoll {

struct Compacted {
  std::int64_t bytes_before{0};  ///< Of the table's folder.
  std::int64_t bytes{0};
};

/// `rows_max`: of the table from then on; 0: as it was, and always for features.
/// Errors: kNotFound (no store there), kInvalidArgument (another process trains in the run, or adds
///         to the features), those of EmbeddingStore::compact() and FeatureStore::join().
Result<Compacted> compact_store(Governor governor, const std::filesystem::path& directory,
                                const ProgressFn& progress, std::int64_t rows_max = 0);

}  // namespace plimsoll
