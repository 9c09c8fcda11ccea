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

}  // namespace plimsoll
