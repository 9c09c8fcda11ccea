// SPDX-License-Identifier: Apache-2.0
//
// insert and erase: ids that come and go.
//
// An insert writes the row that its id begins with into the page of its place; an erase changes
// nothing but the set of ids. Both are durable with the next commit, in the map of its slot.
//
// Reading order: embedding_growing_ids.h, this file.
//
// Threads: see embedding_store.h.   Memory: the scratch in embedding_store_impl.h.
#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "store/embedding_store_impl.h"
#include "store/row_init.h"

namespace plimsoll {

Result<void> EmbeddingStore::Impl::check_growing(const char* what) const {
  if (growing_) {
    return cache_->poisoned();
  }
  return fail(
      ErrorCode::kInvalidArgument,
      fmt::format("{}: {} of a table that was made without rows_max", directory_.string(), what),
      "compact it with a rows_max, or make it with one");
}

Result<std::int64_t> EmbeddingStore::Impl::insert(std::span<const std::int64_t> ids) {
  PLIMSOLL_TRY_VOID(check_growing("insert()"));
  found_.forget();
  PLIMSOLL_TRY(const std::int64_t added, growing_->add(ids, found_.ids));
  if (added < 0) {
    const std::int64_t erased = growing_->erased();
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: no place for all of the new ids: rows_max is {}, {} rows are there"
                            ", and {} erased ones keep their places until the table is compacted",
                            directory_.string(), table_.rows_max, growing_->rows(), erased),
                "nothing was inserted: erase rows, or compact the table with a larger rows_max");
  }
  PLIMSOLL_TRY_VOID(cache_->begin_request());
  bool changed = false;
  if (auto done = write_new_rows(changed); !done) {
    if (changed) {
      cache_->poison(done.error());  // Half a request: nobody may see or keep it.
    } else {
      growing_->undo();
    }
    return tl::unexpected(std::move(done).error());
  }
  growing_->settle();
  return added;
}

// In the order of their places, so that each page is loaded once.
Result<void> EmbeddingStore::Impl::write_new_rows(bool& changed) {
  for (std::int64_t place = growing_->next_new(0); place >= 0;) {
    std::size_t count = 0;
    for (; place >= 0 && count < keys_.size(); place = growing_->next_new(place + 1)) {
      keys_[count++] = static_cast<std::uint64_t>(place) << 32;
    }
    for (auto keys = keys_.first(count); !keys.empty();) {
      PLIMSOLL_TRY(const std::int64_t pinned, cache_->pin(keys, true, records_));
      for (std::int64_t i = 0; i < pinned; ++i) {
        const std::int64_t id = growing_->id_at(static_cast<std::int64_t>(keys[i] >> 32));
        init_record(shape_, table_.init, id, id, records_[i]);
      }
      changed = true;
      cache_->unpin();
      keys = keys.subspan(static_cast<std::size_t>(pinned));
    }
  }
  return {};
}

Result<void> EmbeddingStore::Impl::erase(std::span<const std::int64_t> ids) {
  PLIMSOLL_TRY_VOID(check_growing("erase()"));
  const std::size_t most = found_.ids.size();
  PLIMSOLL_TRY_VOID(resolve_ahead(ids, most, [this](const auto some) { return resolve(some); }));
  bool changed = false;
  while (!ids.empty()) {
    const std::size_t count = std::min(ids.size(), most);
    auto done = erase_piece(ids.first(count), changed);
    if (!done) {
      if (changed) {
        cache_->poison(done.error());  // Half a request: nobody may see or keep it.
      }
      return done;
    }
    changed = true;
    ids = ids.subspan(count);
  }
  return {};
}

// `again`: some of these may have been erased just now, being in the request twice.
Result<void> EmbeddingStore::Impl::erase_piece(std::span<const std::int64_t> ids, bool again) {
  if (!again) {
    PLIMSOLL_TRY_VOID(resolve(ids));
    for (const std::uint32_t place : found_.ordinals.first(ids.size())) {
      growing_->remove(place);
    }
    found_.forget();
    return {};
  }
  found_.forget();
  const auto places = found_.ids.first(ids.size());
  PLIMSOLL_TRY_VOID(growing_->find(ids, places));
  for (const std::int64_t place : places) {
    if (place >= 0) {
      growing_->remove(place);
    }
  }
  return {};
}

}  // namespace plimsoll
