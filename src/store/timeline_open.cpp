// SPDX-License-Identifier: Apache-2.0
//
// Opening and creating a table in sample order. As in any order, table.json is written last.
//
// Threads: see embedding_store.h.   Memory: one slab, taken here and divided once.
#include <algorithm>
#include <string>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/crc32c.h"
#include "store/id_source.h"
#include "store/timeline.h"

namespace plimsoll {

EmbeddingStore::Timeline::Timeline(const EmbeddingStoreOptions& options,
                                   const TableDescription& table, const TimelineLayout& layout)
    : Engine(options, table, layout.plan, std::min(options.io_threads, 1)),
      layout_(layout),
      grid_(layout_.shape),
      rows_per_chunk_(extent_rows(grid_.record_bytes, layout.chunk_bytes)),
      count_(table.ids.rows),
      order_seed_(options.order_seed) {}

Result<std::unique_ptr<EmbeddingStore::Engine>> EmbeddingStore::Timeline::open(
    const Governor& governor, const EmbeddingStoreOptions& options, const TableDescription& table,
    const IdSource* source) {
  PLIMSOLL_TRY(TimelineLayout layout, plan_timeline(table, source == nullptr, options));
  if (source != nullptr) {  // Its buckets are chosen: from now on its floor is that of these.
    EmbeddingStoreOptions later = options;
    later.store_bytes = 0;
    PLIMSOLL_TRY(const TimelineLayout again, plan_timeline(table, true, later));
    layout.plan.floor_bytes = again.plan.floor_bytes;
  }
  auto made = std::make_unique<Timeline>(options, table, layout);
  PLIMSOLL_TRY_VOID(made->take_memory(governor));
  if (source != nullptr) {
    PLIMSOLL_TRY_VOID(create_table_files(options.directory, table, *source, made->scratch_));
  }
  PLIMSOLL_TRY_VOID(made->open_table(options));
  PLIMSOLL_TRY_VOID(made->open_commit(options.at_step));
  // Last: from here on threads use what was opened.
  made->io_ = std::make_unique<TimelineIo>(TimelineIo::Setup{.shape = layout.shape,
                                                             .fingerprint = table.fingerprint(),
                                                             .file = &made->rows_file_,
                                                             .pool = &made->pool_,
                                                             .space = &made->space_,
                                                             .threads = options.io_threads},
                                           layout, made->slab_);
  return std::unique_ptr<Engine>(std::move(made));
}

// Divides the slab, but for TimelineIo's part. What this takes is what plan_timeline() counted.
Result<void> EmbeddingStore::Timeline::take_memory(const Governor& governor) {
  PLIMSOLL_TRY_VOID(take_slab(governor));
  space_ = TimelineSpace(grid_, layout_.sizes, slab_);
  if (grid_.grows) {
    const auto known = slab_.take<std::byte>(table_.growth().bytes());
    std::fill(known.begin(), known.end(), std::byte{0});
    growing_.emplace(table_.growth(), ids_, known, slab_);
  }
  open_ = slab_.take<std::uint32_t>(2 * grid_.buckets);
  std::fill(open_.begin(), open_.end(), kNone);
  take_scratch();
  staging_ = slab_.take<std::byte>(layout_.staging_rows * grid_.record_bytes);
  wanted_ = slab_.take<Wanted>(layout_.staging_rows);
  scratch_ = slab_.take<std::byte>(layout_.scratch_bytes, kBlockUnit);
  map_ = slab_.take<std::byte>(layout_.map_bytes, kBlockUnit);
  return {};
}

Result<void> EmbeddingStore::Timeline::open_table(const EmbeddingStoreOptions& options) {
  PLIMSOLL_TRY_VOID(open_files(options, layout_.id_pages));
  PLIMSOLL_TRY(const std::int64_t bytes, rows_file_.size());
  reserved_ = bytes / grid_.segment_bytes;
  if (growing_) {
    PLIMSOLL_TRY(new_ids_file_, File::open(directory_ / table_files::kNewIds,
                                           pinned_ ? FileMode::kRead : FileMode::kReadWrite));
  }
  return {};
}

Result<void> EmbeddingStore::Timeline::open_commit(std::int64_t at_step) {
  PLIMSOLL_TRY(const int slot, choose_commit(kAnyPages, at_step));
  if (slot < 0) {
    const EpochKey first{table_.order_seed, 0, count_};
    follow(first, first, {order_seed_, 1, count_});
    return {};
  }
  if (const int other = 1 - slot; !pinned_ && holds_commit(other)) {  // Who reads needs no room.
    PLIMSOLL_TRY_VOID(keep_other_commit(other));
  }
  PLIMSOLL_TRY(const auto map, read_map(slot));
  auto state = space_.adopt(slot, map);
  if (!state) {
    Error error = std::move(state).error();
    error.detail = bad_map(slot, *error.detail).value().detail;
    return tl::unexpected(std::move(error));
  }
  PLIMSOLL_TRY_VOID(read_new_ids(*state));
  opened(slot);
  PLIMSOLL_TRY_VOID(pinned_ ? check_still_there() : super_.settle(slot));
  count_ = state->rows;
  cursor_ = state->cursor;
  follow(state->source, state->parent, state->target);
  return {};
}

// Marks the segments of the commit that was not opened.
Result<void> EmbeddingStore::Timeline::keep_other_commit(int slot) {
  const auto map = read_map(slot);
  if (!map && map.error().code != ErrorCode::kCorrupt) {
    return tl::unexpected(map.error());
  }
  if (!map || !space_.keep(slot, *map)) {
    space_.forget(slot);  // Damaged: it is gone.
  }
  return {};
}

// The map of one commit, its checksum compared.
Result<std::span<const std::byte>> EmbeddingStore::Timeline::read_map(int slot) {
  const Superblock& root = superblock(slot);
  if (root.pages < 0 || root.pages % kBlockUnit != 0 || root.pages > std::ssize(map_)) {
    return bad_map(slot, "has an impossible size");
  }
  if (!map_file(root.map).valid()) {
    return bad_map(slot, "is not there");
  }
  const auto bytes = map_.first(static_cast<std::size_t>(root.pages));
  PLIMSOLL_TRY_VOID(map_file(root.map).read_at(0, bytes));
  if (crc32c(bytes) != root.map_crc) {
    return bad_map(slot, "fails its checksum");
  }
  return std::span<const std::byte>(bytes);
}

}  // namespace plimsoll
