// SPDX-License-Identifier: Apache-2.0
//
// describe(): what any Plimsoll directory or file holds; for `plimsoll info` and `store info`.
//
// Threads: pure function of the path.   Memory: headers only; no tensor or row is read.
#pragma once

#include <filesystem>
#include <string>

#include "plimsoll/feature_store.h"
#include "plimsoll/limits.h"
#include "plimsoll/result.h"

namespace plimsoll {

struct Description {
  std::string kind{};  ///< run, embedding_store, tables, feature_store, checkpoint, …
  std::string text{};  ///< For a reader: a few aligned lines.
  std::string json{};  ///< The same as one object with "kind" and "path".
};

/// Errors: kNotFound (nothing there, or nothing we know), kCorrupt, kIo.
Result<Description> describe(const std::filesystem::path& path);

/// The same of a feature store that is open, and may read fewer parts than are there.
Description describe_features(const std::filesystem::path& path, const FeatureInfo& info);

/// Every candidate for the memory limit and the winner; for `plimsoll limits`.
Description describe_limits(const LimitReport& report);

/// The directory of rows that `path` means: a run's `embeddings`, or `path` itself.
[[nodiscard]] std::filesystem::path store_directory(const std::filesystem::path& path);

/// True when `directory` holds an embedding store, or a feature store.
[[nodiscard]] bool is_embedding_store(const std::filesystem::path& directory);
[[nodiscard]] bool is_feature_store(const std::filesystem::path& directory);

}  // namespace plimsoll
