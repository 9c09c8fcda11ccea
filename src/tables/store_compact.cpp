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
namespace {

// The run whose rows these are: RUN/embeddings, RUN/embeddings/items,
// RUN/embeddings-4-0/rank-2/items.
// "": none.
std::filesystem::path run_around(const std::filesystem::path& table) {
  std::filesystem::path above = std::filesystem::absolute(table / "").lexically_normal();
  for (int depth = 0; depth < 4; ++depth) {  // The first takes the "/" at the end away.
    above = above.parent_path();
    if (RunFolder::is_run(above)) {
      return above;
    }
  }
  return {};
}

}  // namespace

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
  const std::filesystem::path run = run_around(table);
  std::optional<RunFolder> folder;  // Holds the run's lock meanwhile.
  std::int64_t at_step = -1;
  if (!run.empty()) {
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
