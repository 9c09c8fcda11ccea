// SPDX-License-Identifier: Apache-2.0
//
// FeatureParts: what a feature store's directory holds: a store, and those that were added to it.
//
// Each part is a store by itself and never changes: the first in the directory, the others in
// part-000001, part-000002, … of it. Ordinals and groups go on from one part to the next. A part
// names the fingerprint of all before it, so none can stand where it was not written for.
//
// Reading order: docs/formats/feature_store.md, feature_format.h, this file, feature_plan.h.
//
// Threads: values and pure functions.   Memory: a header a part, some hundred bytes each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "os/directories.h"
#include "plimsoll/feature_store.h"
#include "plimsoll/result.h"
#include "store/feature_format.h"

namespace plimsoll {

inline constexpr std::int64_t kFeaturePartsMax = 64;

struct FeaturePart {
  std::filesystem::path directory{};
  FeatureHeader header{};
  std::int64_t first_row{0};
  std::int64_t first_group{0};
};

struct FeatureParts {
  std::vector<FeaturePart> parts{};  // At least one; columns and compression are the same in all.
  std::int64_t rows{0};
  std::int64_t blocks{0};
  std::int64_t records_file_bytes{0};
  std::int64_t groups{0};
  std::int64_t uniform_group{0};  // Records a group when all are equal, else 0.
  std::string fingerprint{};      // Of the first part alone when there is no other.

  [[nodiscard]] const FeatureHeader& first() const noexcept { return parts.front().header; }
  /// The part that has a record. Requires: 0 <= ordinal < rows.
  [[nodiscard]] std::size_t part_of(std::int64_t ordinal) const noexcept;
  [[nodiscard]] FeatureInfo info() const;
};

/// Where part `number` of a store is, 0 being the first.
[[nodiscard]] std::filesystem::path feature_part_path(const std::filesystem::path& directory,
                                                      std::int64_t number);

/// Begins a store or a part at `target`: the only one to do so until this ends. What a killed
/// writer left is removed. Errors: as PartialDirectory::create().
Result<PartialDirectory> start_partial(const std::filesystem::path& target);

/// Errors: kInvalidArgument naming what a store's directory holds beside the store; kIo.
Result<void> expect_only_features(const std::filesystem::path& directory, std::int64_t parts);

/// Reads the headers of the first `wanted` parts, of all when it is 0.
/// Errors: kNotFound when there is no store, or not so many parts; kInvalidArgument for the
///         directory of a part; kCorrupt (also for a part that is missing, or does not follow those
///         before it), naming the file; kIo.
Result<FeatureParts> read_feature_parts(const std::filesystem::path& directory,
                                        std::int64_t wanted = 0);

}  // namespace plimsoll
