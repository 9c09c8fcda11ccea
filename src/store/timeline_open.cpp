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
    : directory_(options.directory),
      table_(table),
      rows_(table.shape()),
      layout_(layout),
      shape_(layout_.shape),
      rows_per_chunk_(extent_rows(shape_.record_bytes, layout.chunk_bytes)),
      pinned_(options.pinned),
      pool_(std::min(options.io_threads, 1)),
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
  PLIMSOLL_TRY_VOID(check_disk(governor, options, layout.plan));
  auto made = std::make_unique<Timeline>(options, table, layout);
  made->crew_ = std::make_unique<RowCrew>(options.compute_threads);
  PLIMSOLL_TRY_VOID(made->take_memory(governor));
  if (source != nullptr) {
    PLIMSOLL_TRY_VOID(made->create_files(*source));
  }
  PLIMSOLL_TRY_VOID(made->open_files(options));
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
  const std::int64_t bytes = layout_.plan.total_bytes;
  PLIMSOLL_TRY_VOID(admission_.take(governor, Tag::kEmbedding, bytes, "store_bytes"));
  PLIMSOLL_TRY(slab_, Slab::create(governor, Tag::kEmbedding, bytes, true));
  space_ = TimelineSpace(shape_, layout_.sizes, slab_);
  if (shape_.grows) {
    const auto known = slab_.take<std::byte>(table_.growth().bytes());
    std::fill(known.begin(), known.end(), std::byte{0});
    growing_.emplace(table_.growth(), ids_, known, slab_);
  }
  open_ = slab_.take<std::uint32_t>(2 * shape_.buckets);
  std::fill(open_.begin(), open_.end(), kNone);
  const std::int64_t rows = layout_.batch_rows;
  found_.ordinals = slab_.take<std::uint32_t>(rows);
  found_.ids = slab_.take<std::int64_t>(FoundRows::ids_of(table_, rows));
  keys_ = slab_.take<std::uint64_t>(rows);
  unique_ = slab_.take<std::uint32_t>(rows + 1);
  sums_ = slab_.take<float>(crew_->threads() * shape_.dim);
  wide_ = slab_.take<float>(crew_->threads() * rows_.scratch_floats());
  corrections_ = slab_.take<AdamCorrection>(RowOptimizerStep::kCorrections);
  staging_ = slab_.take<std::byte>(layout_.staging_rows * shape_.record_bytes);
  wanted_ = slab_.take<Wanted>(layout_.staging_rows);
  scratch_ = slab_.take<std::byte>(layout_.scratch_bytes, kBlockUnit);
  map_ = slab_.take<std::byte>(layout_.map_bytes, kBlockUnit);
  return {};
}

Result<void> EmbeddingStore::Timeline::open_files(const EmbeddingStoreOptions& options) {
  PLIMSOLL_TRY(ids_, IdIndex::open(directory_, table_files::kIds, table_.ids, slab_,
                                   layout_.id_pages, pool_));
  const FileMode mode = pinned_ ? FileMode::kRead : FileMode::kReadWrite;
  PLIMSOLL_TRY(rows_file_, File::open(directory_ / table_files::kRows, mode, true));
  PLIMSOLL_TRY(const std::int64_t bytes, rows_file_.size());
  reserved_ = bytes / shape_.segment_bytes;
  PLIMSOLL_TRY(map_files_, open_maps(directory_, !pinned_));
  if (growing_) {
    PLIMSOLL_TRY(new_ids_file_, File::open(directory_ / table_files::kNewIds, mode));
  }
  PLIMSOLL_TRY(super_, SuperFile::open(directory_ / table_files::kSuper, !pinned_));
  optimizer_ = RecordStep(rows_, table_.init, options.optimizer, corrections_);
  return {};
}

Result<void> EmbeddingStore::Timeline::open_commit(std::int64_t at_step) {
  PLIMSOLL_TRY(const int slot,
               choose_commit(super_, directory_, table_.fingerprint(), kAnyPages, at_step));
  for (int other = 0; other < 2 && !pinned_; ++other) {  // Who only reads needs no room.
    if (other != slot &&
        super_.slots()[static_cast<std::size_t>(other)].state == SuperFile::SlotState::kValid) {
      PLIMSOLL_TRY_VOID(keep_other_commit(other));
    }
  }
  if (slot < 0) {
    const EpochKey first{table_.order_seed, 0, count_};
    follow(first, first, {order_seed_, 1, count_});
    return {};
  }
  const auto at = static_cast<std::size_t>(slot);
  PLIMSOLL_TRY(const auto map, read_map(slot));
  auto state = space_.adopt(slot, map);
  if (!state) {
    Error error = std::move(state).error();
    error.detail = std::make_shared<std::string>(
        fmt::format("{}: the map of commit {} {}",
                    table_files::map_path(directory_, super_.slots()[at].superblock.map).string(),
                    super_.slots()[at].superblock.step, error.detail ? *error.detail : ""));
    return tl::unexpected(std::move(error));
  }
  PLIMSOLL_TRY_VOID(read_new_ids(*state));
  slot_ = slot;
  last_commit_ = super_.slots()[at].superblock.step;
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

// For a reader: what has been read until now is of its commit, if that is still in its slot. What a
// commit refers to is written again only after another has replaced it there.
Result<void> EmbeddingStore::Timeline::check_still_there() const {
  if (!pinned_ || slot_ < 0) {
    return {};
  }
  PLIMSOLL_TRY(const bool there, super_.still_holds(slot_));
  return there
             ? Result<void>{}
             : fail(ErrorCode::kNotFound,
                    fmt::format("{}: commit {} is gone: somebody trained in the table while it was "
                                "being read",
                                directory_.string(), last_commit_),
                    "read a newer commit, from the start");
}

Error EmbeddingStore::Timeline::explained(Error error) const {
  if (error.code == ErrorCode::kCorrupt) {
    if (auto there = check_still_there(); !there) {
      return std::move(there).error();
    }
  }
  return error;
}

// The map of one commit, its checksum compared.
Result<std::span<const std::byte>> EmbeddingStore::Timeline::read_map(int slot) {
  const auto at = static_cast<std::size_t>(slot);
  const Superblock& superblock = super_.slots()[at].superblock;
  const File& file = map_files_[static_cast<std::size_t>(superblock.map)];
  const auto corrupt = [&](const char* why) {
    return fail(ErrorCode::kCorrupt,
                fmt::format("{}: the map of commit {} {}",
                            table_files::map_path(directory_, superblock.map).string(),
                            superblock.step, why),
                "name another step to open (at_step), or restore the file");
  };
  if (superblock.pages < 0 || superblock.pages % kBlockUnit != 0 ||
      superblock.pages > static_cast<std::int64_t>(map_.size())) {
    return corrupt("has an impossible size");
  }
  const auto bytes = map_.first(static_cast<std::size_t>(superblock.pages));
  if (!file.valid()) {
    return corrupt("is not there");
  }
  PLIMSOLL_TRY_VOID(file.read_at(0, bytes));
  if (crc32c(bytes) != superblock.map_crc) {
    return corrupt("fails its checksum");
  }
  return std::span<const std::byte>(bytes);
}

}  // namespace plimsoll
