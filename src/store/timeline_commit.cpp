// SPDX-License-Identifier: Apache-2.0
//
// commit of a table in sample order: the open chunks as short extents, new ids, the map, with an
// fdatasync of each, and the superblock, with another. Nothing that a commit refers to is ever
// written again.
//
// A new row is written nowhere: like every row that was never changed, its initialiser gives it. So
// an insert is an id and a number of rows. An epoch to which nothing was written yet takes the row
// into its order; in those under way it stands behind (epoch_order.h). Ids are appended to rows.new
// by the commit that first names them; a commit knows how many of them are its own.
//
// Threads: see embedding_store.h.   Memory: map_, in the slab.
#include <array>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/crc32c.h"
#include "os/crash_point.h"
#include "os/io_pool.h"
#include "store/timeline.h"

namespace plimsoll {

// A newer commit than the one opened has its last extents where ours go on: it goes before anything
// is written, so that it is never found half gone.
Result<void> EmbeddingStore::Timeline::drop_newer_commit() {
  const int slot = other_slot();
  if (!super_.may_be_after(slot, last_commit_)) {
    return {};
  }
  syncs_ += 1;
  auto cleared = super_.clear(slot);
  if (!cleared) {
    poison(cleared.error());  // A second sync would succeed and mean nothing.
    return cleared;
  }
  space_.forget(slot);
  return {};
}

Result<void> EmbeddingStore::Timeline::make_durable(std::int64_t step) {
  PLIMSOLL_TRY_VOID(keep_room());
  for (std::uint32_t& open : open_) {
    if (open != kNone) {
      PLIMSOLL_TRY_VOID(flush(open));
    }
  }
  PLIMSOLL_TRY_VOID(io_->drain());
  crash_point("store.commit.rows");
  syncs_ += 3;

  PLIMSOLL_TRY_VOID(drop_newer_commit());
  PLIMSOLL_TRY_VOID(save_new_ids());
  const int slot = other_slot();
  const int number = super_.free_map();
  const auto map = space_.save({.source = source_key_,
                                .parent = parent_key_,
                                .target = target_key_,
                                .cursor = cursor_,
                                .rows = count_,
                                .new_ids = new_ids_crc_},
                               source_side_, map_);
  // Beside each other: no superblock refers to this map yet.
  std::array<IoRequest, 2> both{
      IoRequest{.file = &rows_file_, .kind = IoKind::kSync},
      IoRequest{.file = &map_file(number), .bytes = map, .kind = IoKind::kWriteAndSync}};
  PLIMSOLL_TRY_VOID(pool_.run(both));
  map_bytes_written_ += static_cast<std::int64_t>(map.size());
  crash_point("store.commit.map");

  PLIMSOLL_TRY_VOID(write_superblock({.step = step,
                                      .pages = std::ssize(map),
                                      .blocks_used = space_.used_segments(),
                                      .map_crc = crc32c(map),
                                      .map = number}));
  space_.committed(slot);
  commits_ += 1;
  return {};
}

// ---- Ids that come ----------------------------------------------------------------------------

Result<void> EmbeddingStore::Timeline::write_new_rows(std::int64_t added, bool&) {
  requests_ += added;
  count_ += added;
  if (cursor_ == 0 && target_is_empty()) {
    aim({target_key_.seed, target_key_.epoch, count_});
  }
  return {};
}

Result<void> EmbeddingStore::Timeline::erase(std::span<const std::int64_t> /*ids*/) {
  return fail(ErrorCode::kInvalidArgument,
              directory_.string() + ": erase() from a table in sample order",
              "its rows come and stay; make the table in any order, with rows_max");
}

Result<std::int64_t> EmbeddingStore::Timeline::id_of(std::int64_t ordinal) const {
  if (ordinal >= table_.ids.rows) {
    return growing_->id_at(ordinal);
  }
  std::int64_t id = 0;
  PLIMSOLL_TRY_VOID(ids_.ids_at(ordinal, {&id, 1}));
  return id;
}

// ---- rows.new ---------------------------------------------------------------------------------

Result<void> EmbeddingStore::Timeline::read_new_ids(const TimelineState& state) {
  if (!growing_) {
    return {};
  }
  const auto corrupt = [this](const std::string& why) {
    return fail(ErrorCode::kCorrupt, fmt::format("{}: {}", new_ids_file_.path().string(), why),
                "name another step to open (at_step), or restore the file");
  };
  const std::int64_t count = state.rows - table_.ids.rows;
  if (count < 0) {
    return corrupt("the commit has fewer rows than the table was made with");
  }
  const auto ids = growing_->inserted().first(static_cast<std::size_t>(count));
  PLIMSOLL_TRY_VOID(new_ids_file_.read_at(0, std::as_writable_bytes(ids)));
  new_ids_crc_ = crc32c(std::as_bytes(ids));
  if (new_ids_crc_ != state.new_ids) {
    return corrupt("the inserted ids fail their checksum");
  }
  if (auto adopted = growing_->adopt_first(count); !adopted) {
    return corrupt(*adopted.error().detail);
  }
  new_ids_saved_ = count;
  return {};
}

// Requires: no other commit than the one this state grew from, and the one before, may be opened.
Result<void> EmbeddingStore::Timeline::save_new_ids() {
  const std::int64_t count = count_ - table_.ids.rows;
  if (new_ids_saved_ == count) {
    return {};
  }
  const auto saved = static_cast<std::size_t>(new_ids_saved_);
  const auto ids =
      std::as_bytes(growing_->inserted().subspan(saved, static_cast<std::size_t>(count) - saved));
  PLIMSOLL_TRY_VOID(new_ids_file_.write_at(8 * new_ids_saved_, ids));
  crash_point("store.commit.ids");
  syncs_ += 1;
  PLIMSOLL_TRY_VOID(new_ids_file_.sync());
  new_ids_crc_ = crc32c(ids, new_ids_crc_);
  new_ids_saved_ = count;
  return {};
}

}  // namespace plimsoll
