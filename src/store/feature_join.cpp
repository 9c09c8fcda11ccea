// SPDX-License-Identifier: Apache-2.0
//
// FeatureStore::join: the parts of a store become one. A new store is written beside it, at
// DIRECTORY.joined, and exchanged for it in one step; what it was is removed then.
//
// Threads: one caller. Who joins holds the lock of the next part, so that none is added meanwhile.
// Memory:  as the header says.
#include <algorithm>
#include <numeric>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/core.h>

#include "base/check.h"
#include "memory/slab.h"
#include "os/crash_point.h"
#include "os/directories.h"
#include "os/file.h"
#include "plimsoll/feature_store.h"
#include "store/feature_parts.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kJoinChunkBytes = 4 << 20;

// Records on their way from one store to another.
class RecordChunk {
 public:
  static Result<RecordChunk> create(Governor& governor, const FeatureInfo& info) {
    RecordChunk chunk;
    chunk.rows_ = std::max<std::int64_t>(1, kJoinChunkBytes / (info.record_bytes + 24));
    const auto columns = static_cast<std::int64_t>(info.columns.size());
    const auto ragged = std::count_if(info.columns.begin(), info.columns.end(),
                                      [](const ColumnSpec& column) { return column.ragged(); });
    PLIMSOLL_TRY(chunk.slab_, Slab::create(governor, Tag::kOther,
                                           chunk.rows_ * (info.record_bytes + 24 + 8 * ragged) +
                                               (columns + ragged + 3) * 64));
    for (std::int64_t k = 0; k < columns; ++k) {
      const ColumnSpec& column = info.columns[static_cast<std::size_t>(k)];
      chunk.columns_.push_back(static_cast<int>(k));
      chunk.buffers_.push_back(chunk.slab_.take<std::byte>(chunk.rows_ * column.bytes_max()));
      if (column.ragged()) {
        chunk.lengths_.push_back(chunk.slab_.take<std::int64_t>(chunk.rows_));
      }
    }
    chunk.ordinals_ = chunk.slab_.take<std::int64_t>(chunk.rows_);
    chunk.ids_ = chunk.slab_.take<std::int64_t>(chunk.rows_);
    chunk.groups_ = chunk.slab_.take<std::int64_t>(chunk.rows_);
    return chunk;
  }

  // Copies all records, in order; groups are named by their number.
  Result<void> copy(FeatureStore& from, FeatureWriter& to,
                    const std::function<bool(std::int64_t, std::int64_t)>& progress) {
    const FeatureInfo& info = from.info();
    std::int64_t group = -1;
    std::int64_t group_end = 0;
    for (std::int64_t first = 0; first < info.rows; first += rows_) {
      const auto count = static_cast<std::size_t>(std::min(rows_, info.rows - first));
      const auto ordinals = ordinals_.first(count);
      std::iota(ordinals.begin(), ordinals.end(), first);
      for (std::size_t i = 0; i < count && info.groups > 0; ++i) {
        if (ordinals[i] == group_end) {
          PLIMSOLL_TRY(const auto bounds, from.group(++group));
          group_end = bounds.first + bounds.second;
        }
        groups_[i] = group;
      }
      std::vector<std::span<std::byte>> out;
      std::vector<std::span<const std::int64_t>> lengths;
      for (std::size_t k = 0; k < buffers_.size(); ++k) {
        auto elements = static_cast<std::int64_t>(count);
        if (info.columns[k].ragged()) {
          const auto of_records = lengths_[lengths.size()].first(count);
          PLIMSOLL_TRY_VOID(from.lengths(ordinals, columns_[k], of_records));
          elements = std::accumulate(of_records.begin(), of_records.end(), std::int64_t{0});
          lengths.emplace_back(of_records);
        }
        out.push_back(
            buffers_[k].first(static_cast<std::size_t>(elements * info.columns[k].bytes())));
      }
      PLIMSOLL_TRY_VOID(from.read_ordinals(ordinals, columns_, out));
      PLIMSOLL_TRY_VOID(from.ids_of(ordinals, ids_.first(count)));
      const std::vector<std::span<const std::byte>> in(out.begin(), out.end());
      PLIMSOLL_TRY_VOID(
          to.append(ids_.first(count), in, groups_.first(info.groups > 0 ? count : 0), lengths));
      if (progress && !progress(first + static_cast<std::int64_t>(count), info.rows)) {
        return fail(ErrorCode::kInvalidArgument, "cancelled");
      }
    }
    return {};
  }

 private:
  RecordChunk() = default;
  Slab slab_;
  std::int64_t rows_{0};
  std::vector<int> columns_;
  std::vector<std::span<std::byte>> buffers_;
  std::vector<std::span<std::int64_t>> lengths_;  // Of ragged columns.
  std::span<std::int64_t> ordinals_;
  std::span<std::int64_t> ids_;
  std::span<std::int64_t> groups_;
};

}  // namespace

Result<void> FeatureStore::join(Governor governor, const fs::path& directory,
                                const std::function<bool(std::int64_t, std::int64_t)>& progress) {
  PLIMSOLL_TRY(const FeatureInfo info, inspect(directory));
  PLIMSOLL_TRY(const PartialDirectory next,
               start_partial(feature_part_path(directory, info.parts)));
  const fs::path target = next.target().parent_path();
  const fs::path joined = target.string() + ".joined";
  std::error_code status;
  if (fs::exists(joined, status)) {
    return fail(ErrorCode::kInvalidArgument,
                joined.string() + ": in the way; a compaction that was killed leaves a copy there",
                "remove it, or name it otherwise if it is yours");
  }
  if (info.parts == 1) {
    return {};
  }
  PLIMSOLL_TRY_VOID(expect_only_features(target, info.parts));  // What else is there would be gone.
  {
    PLIMSOLL_TRY(FeatureStore from,
                 open(governor,
                      {.directory = target, .cache_bytes = info.floor_bytes, .parts = info.parts}));
    PLIMSOLL_TRY(FeatureWriter to,
                 FeatureWriter::create(governor, {.directory = joined,
                                                  .columns = info.columns,
                                                  .grouped = info.groups > 0,
                                                  .allow_non_finite = true,
                                                  .compression = info.compression}));
    PLIMSOLL_TRY(RecordChunk chunk, RecordChunk::create(governor, info));
    PLIMSOLL_TRY_VOID(chunk.copy(from, to, progress));
    PLIMSOLL_TRY_VOID(to.finish());
  }
  PLIMSOLL_TRY_VOID(expect_only_features(target, info.parts));  // It took a while.
  PLIMSOLL_TRY_VOID(exchange_names(joined, target));
  PLIMSOLL_TRY_VOID(sync_directory(target.parent_path()));
  crash_point("features.join.exchanged");
  return remove_tree(joined);
}

}  // namespace plimsoll
