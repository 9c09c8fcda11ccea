// SPDX-License-Identifier: Apache-2.0
#include "tables/store_compact.h"

#include <optional>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "plimsoll/feature_store.h"
#include "run/run_folder.h"
#include "tables/describe.h"
#include "tables/describe_tables.h"

namespace plimsoll {

Result<Compacted> compact_store(Governor governor, const std::filesystem::path& directory,
                                const ProgressFn& progress, std::int64_t rows_max) {
  const auto table = store_directory(directory);
  if (is_feature_store(table)) {
    if (rows_max > 0) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("{}: a feature store has no largest number of rows", table.string()),
                  "leave --rows-max out");
    }
    PLIMSOLL_TRY(const FeatureInfo before, FeatureStore::inspect(table));
    PLIMSOLL_TRY_VOID(FeatureStore::join(std::move(governor), table, progress));
    PLIMSOLL_TRY(const FeatureInfo after, FeatureStore::inspect(table));
    return Compacted{.bytes_before = before.disk_bytes, .bytes = after.disk_bytes};
  }
  if (!is_embedding_store(table)) {
    return tl::unexpected(no_store_at(table));
  }
  const auto run = RunFolder::is_run(directory) ? directory : table.parent_path();
  std::optional<RunFolder> folder;  // Holds the run's lock meanwhile.
  std::int64_t at_step = -1;
  if (RunFolder::is_run(run)) {
    PLIMSOLL_TRY(auto opened, RunFolder::open_at_rest(run));
    folder.emplace(std::move(opened));
    PLIMSOLL_TRY(const auto published, folder->published_step());
    at_step = published.value_or(-1);
  }
  PLIMSOLL_TRY(const TableInfo before, EmbeddingStore::inspect(table));
  PLIMSOLL_TRY_VOID(
      EmbeddingStore::compact(std::move(governor), table, at_step, progress, rows_max));
  PLIMSOLL_TRY(const TableInfo after, EmbeddingStore::inspect(table));
  return Compacted{.bytes_before = before.disk_bytes, .bytes = after.disk_bytes};
}

}  // namespace plimsoll
