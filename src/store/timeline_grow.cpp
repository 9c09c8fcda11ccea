// SPDX-License-Identifier: Apache-2.0
//
// insert into a table in sample order: ids that come and stay.
//
// A new row is written nowhere: like every row that was never changed, its initialiser gives it. So
// an insert is an id and a number of rows. An epoch to which nothing was written yet takes the row
// into its order; in those under way it stands behind. Ids are appended to rows.new by the commit
// that first names them; a commit knows how many of them are its own.
//
// Reading order: epoch_order.h, embedding_growing_ids.h, this file.
//
// Threads: see embedding_store.h.   Memory: the slab's, for as many ids as rows_max leaves room
// for.
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/crc32c.h"
#include "os/crash_point.h"
#include "store/timeline.h"

namespace plimsoll {

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
