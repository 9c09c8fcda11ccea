// SPDX-License-Identifier: Apache-2.0
//
// commit of a table in sample order: the open chunks as short extents, new ids, the map, with an
// fdatasync of each, and the superblock, with another. Nothing that a commit refers to is ever
// written again.
//
// Threads: see embedding_store.h.   Memory: map_, in the slab.
#include <array>

#include <fmt/format.h>

#include "base/check.h"
#include "base/crc32c.h"
#include "os/crash_point.h"
#include "os/io_pool.h"
#include "store/timeline.h"

namespace plimsoll {

void EmbeddingStore::Timeline::poison(const Error& error) {
  if (!poison_) {
    poison_ = error;
  }
}

Result<void> EmbeddingStore::Timeline::commit(std::int64_t step) {
  PLIMSOLL_TRY_VOID(sound());
  PLIMSOLL_TRY_VOID(check_step(directory_, step));
  auto done = make_durable(step);
  if (!done) {
    poison(done.error());
  }
  return done;
}

// A newer commit than the one opened has its last extents where ours go on: it goes before anything
// is written, so that it is never found half gone.
Result<void> EmbeddingStore::Timeline::drop_newer_commit() {
  const int slot = slot_ == 0 ? 1 : 0;
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
  const int slot = slot_ == 0 ? 1 : 0;
  const int number = super_.free_map();
  File& map_file = map_files_[static_cast<std::size_t>(number)];
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
      IoRequest{.file = &map_file, .bytes = map, .kind = IoKind::kWriteAndSync}};
  PLIMSOLL_TRY_VOID(pool_.run(both));
  map_bytes_written_ += static_cast<std::int64_t>(map.size());
  crash_point("store.commit.map");

  crash_point("store.commit.superblock.before");
  PLIMSOLL_TRY_VOID(super_.write(slot, {.step = step,
                                        .fingerprint = table_.fingerprint(),
                                        .pages = static_cast<std::int64_t>(map.size()),
                                        .blocks_used = space_.used_segments(),
                                        .map_crc = crc32c(map),
                                        .map = number}));
  crash_point("store.commit.superblock.after");
  space_.committed(slot);
  slot_ = slot;
  last_commit_ = step;
  commits_ += 1;
  return {};
}

}  // namespace plimsoll
