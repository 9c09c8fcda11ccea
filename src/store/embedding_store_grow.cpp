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

// The row that the id of a new place begins with.
class EmbeddingStore::Impl::NewRow final : public Change {
 public:
  explicit NewRow(const Impl& table) : table_(table) {}
  void row(std::uint64_t key, std::byte* record, int) const noexcept override {
    const std::int64_t id = table_.growing_->id_at(static_cast<std::int64_t>(key >> 32));
    init_record(table_.shape_, table_.table_.init, id, id, record);
  }

 private:
  const Impl& table_;
};

// In the order of their places, so that each page is loaded once.
Result<void> EmbeddingStore::Impl::write_new_rows(std::int64_t, bool& changed) {
  PLIMSOLL_TRY_VOID(cache_->begin_request());
  for (std::int64_t place = growing_->next_new(0); place >= 0;) {
    std::int64_t count = 0;
    for (; place >= 0 && count < std::ssize(keys_); place = growing_->next_new(place + 1)) {
      keys_[static_cast<std::size_t>(count++)] = static_cast<std::uint64_t>(place) << 32;
    }
    PLIMSOLL_TRY_VOID(change(count, NewRow(*this), changed));
  }
  return {};
}

Result<void> EmbeddingStore::Impl::erase(std::span<const std::int64_t> ids) {
  PLIMSOLL_TRY_VOID(check_growing("erase()"));
  PLIMSOLL_TRY_VOID(resolve_ahead(ids));
  bool changed = false;
  while (!ids.empty()) {
    const std::size_t count = std::min(ids.size(), batch_rows());
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
