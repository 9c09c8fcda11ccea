// SPDX-License-Identifier: Apache-2.0
//
// gather, apply and update of rows in any order: the pages of a request are pinned (as many at a
// time as the slab allows), and its rows are copied or changed outside any lock. An insert writes
// the row that its id begins with into the page of its place; an erase changes nothing but the set
// of ids. Both are durable with the next commit, in its map.
//
// Threads: see embedding_store.h.   Memory: the scratch in embedding_store_impl.h.
#include "plimsoll/embedding_store.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "store/embedding_store_impl.h"
#include "store/row_ahead.h"
#include "store/row_init.h"

namespace plimsoll {
namespace {

std::size_t home_of(std::uint32_t ordinal, std::size_t places) {
  return static_cast<std::uint32_t>((ordinal * 0x9E3779B97F4A7C15ULL) >> 32) & (places - 1);
}

// What a read came to, its error being told by what it means to who reads a pinned commit.
Result<void> explained(const auto& engine, Result<void> done) {
  return done ? done : Result<void>(tl::unexpected(engine.explained(std::move(done).error())));
}

}  // namespace

Result<void> EmbeddingStore::Impl::begin_request(std::span<const std::int64_t> ids, bool reads) {
  if (reads) {
    look_ahead_->reached(ids);
  }
  return cache_->begin_request();
}

// Sorts keys by page when they may not all be pinned at once, so that each page is loaded once.
void EmbeddingStore::Impl::order_by_page(std::span<std::uint64_t> keys) const {
  if (static_cast<std::int64_t>(keys.size()) > cache_->pin_limit()) {
    std::sort(keys.begin(), keys.end());
  }
}

Result<void> EmbeddingStore::Impl::gather_piece(std::span<const std::int64_t> ids,
                                                std::span<float> out) {
  auto keys = keys_.first(ids.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    keys[i] = std::uint64_t{found_.ordinals[i]} << 32 | i;
  }
  order_by_page(keys);
  while (!keys.empty()) {
    PLIMSOLL_TRY(const std::int64_t pinned, cache_->pin(keys, false, records_));
    crew_.run(pinned, kGrain, [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t i = begin; i < end; ++i) {
        if (i + kRecordsAhead < end) {
          fetch_ahead(records_[i + kRecordsAhead] + kRowHeaderBytes, shape_.weight_bytes());
        }
        read_weights(shape_, records_[i], out.data() + place_of(keys[i]) * shape_.dim);
      }
    });
    cache_->unpin();
    keys = keys.subspan(static_cast<std::size_t>(pinned));
  }
  return {};
}

// Keys are ordinal << 32 | first place, in the order of first appearance.
std::int64_t EmbeddingStore::Impl::find_unique(std::int64_t count) {
  std::memset(hash_.data(), 0xFF, hash_.size_bytes());
  std::uint32_t unique = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint32_t ordinal = found_.ordinals[i];
    std::size_t home = home_of(ordinal, hash_.size());
    while (hash_[home] != kNone &&
           static_cast<std::uint32_t>(keys_[hash_[home]] >> 32) != ordinal) {
      home = (home + 1) & (hash_.size() - 1);
    }
    next_[i] = kNone;
    if (const std::uint32_t seen = hash_[home]; seen != kNone) {
      next_[last_[seen]] = i;
      last_[seen] = i;
      continue;
    }
    hash_[home] = unique;
    keys_[unique] = std::uint64_t{ordinal} << 32 | i;
    last_[unique++] = i;
  }
  return unique;
}

// The hot loop of apply().
Result<void> EmbeddingStore::Impl::change(std::int64_t unique, const Change& how, bool& changed) {
  auto keys = keys_.first(static_cast<std::size_t>(unique));
  order_by_page(keys);
  while (!keys.empty()) {
    PLIMSOLL_TRY(const std::int64_t pinned, cache_->pin(keys, true, records_));
    crew_.run(pinned, kGrain, [&](std::int64_t begin, std::int64_t end, int member) {
      for (std::int64_t i = begin; i < end; ++i) {
        if (i + kRecordsAhead < end) {
          fetch_ahead<1>(records_[i + kRecordsAhead], shape_.record_bytes);
        }
        how.row(keys[i], records_[i], member);
      }
    });
    changed = true;
    cache_->unpin();
    keys = keys.subspan(static_cast<std::size_t>(pinned));
  }
  return {};
}

// ---- Ids that come and go ---------------------------------------------------------------------

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

// ---- The public face --------------------------------------------------------------------------

EmbeddingStore::EmbeddingStore(std::unique_ptr<Engine> impl) noexcept : impl_(std::move(impl)) {}
EmbeddingStore::EmbeddingStore(EmbeddingStore&&) noexcept = default;
EmbeddingStore& EmbeddingStore::operator=(EmbeddingStore&& other) noexcept {
  std::swap(impl_, other.impl_);
  const EmbeddingStore replaced(std::move(other));  // Gone at once, and its lock with it.
  return *this;
}
EmbeddingStore::~EmbeddingStore() {
  if (impl_ != nullptr) {
    destroy_if_own(impl_, impl_->mark());
  }
}

Result<EmbeddingStore> EmbeddingStore::open(Governor governor,
                                            const EmbeddingStoreOptions& options) {
  PLIMSOLL_TRY(auto impl, Impl::open(governor, options));
  return EmbeddingStore(std::move(impl));
}

Result<void> EmbeddingStore::gather(std::span<const std::int64_t> ids, std::span<float> out) {
  PLIMSOLL_TRY_VOID(impl_->check_process("gather"));
  return explained(*impl_, impl_->gather(ids, out));
}
Result<void> EmbeddingStore::apply(std::span<const std::int64_t> ids, std::span<const float> grads,
                                   float rate_scale) {
  PLIMSOLL_TRY_VOID(impl_->check_writable("apply"));
  return impl_->apply(ids, grads, rate_scale);
}
Result<void> EmbeddingStore::update(std::span<const std::int64_t> ids,
                                    std::span<const float> rows) {
  PLIMSOLL_TRY_VOID(impl_->check_writable("update"));
  return impl_->update(ids, rows);
}
Result<void> EmbeddingStore::restore(std::span<const std::int64_t> ids,
                                     std::span<const std::uint32_t> sequences,
                                     std::span<const float> values) {
  PLIMSOLL_TRY_VOID(impl_->check_writable("restore"));
  return impl_->restore(ids, sequences, values);
}
void EmbeddingStore::prefetch(std::span<const std::int64_t> ids) noexcept {
  if (!impl_->forked()) {
    impl_->prefetch(ids);
  }
}
Result<void> EmbeddingStore::begin_epoch(std::int64_t epoch) {
  PLIMSOLL_TRY_VOID(impl_->check_process("begin_epoch"));
  return impl_->begin_epoch(epoch);
}
Result<std::int64_t> EmbeddingStore::insert(std::span<const std::int64_t> ids) {
  PLIMSOLL_TRY_VOID(impl_->check_writable("insert"));
  return impl_->insert(ids);
}
Result<void> EmbeddingStore::erase(std::span<const std::int64_t> ids) {
  PLIMSOLL_TRY_VOID(impl_->check_writable("erase"));
  return impl_->erase(ids);
}
Result<void> EmbeddingStore::commit(std::int64_t step) {
  PLIMSOLL_TRY_VOID(impl_->check_writable("commit"));
  return impl_->commit(step);
}
Result<void> EmbeddingStore::scan(const RowVisit& visit) {
  PLIMSOLL_TRY_VOID(impl_->check_process("scan"));
  return explained(*impl_, impl_->scan(visit));
}
Result<void> EmbeddingStore::visit_rows(const RowVisit& visit) {
  PLIMSOLL_TRY_VOID(impl_->check_process("visit_rows"));
  return explained(*impl_, impl_->visit_rows(visit));
}
Result<void> EmbeddingStore::set_optimizer(const RowOptimizerOptions& options) {
  PLIMSOLL_TRY_VOID(impl_->check_process("set_optimizer"));
  return impl_->set_optimizer(options);
}
std::int64_t EmbeddingStore::shrink(std::int64_t wanted_bytes) noexcept {
  return impl_->forked() ? 0 : impl_->shrink(wanted_bytes);
}
std::int64_t EmbeddingStore::grow_back(std::int64_t wanted_bytes) noexcept {
  return impl_->forked() ? 0 : impl_->grow_back(wanted_bytes);
}
std::int64_t EmbeddingStore::rows() const noexcept {
  return impl_->rows();
}
std::int64_t EmbeddingStore::rows_max() const noexcept {
  return impl_->plan().rows_max;
}
std::int64_t EmbeddingStore::dim() const noexcept {
  return impl_->shape().dim;
}
std::int64_t EmbeddingStore::slots() const noexcept {
  return impl_->shape().slots;
}
std::int64_t EmbeddingStore::state_floats() const noexcept {
  return impl_->shape().state_floats();
}
std::int64_t EmbeddingStore::last_commit() const noexcept {
  return impl_->last_commit();
}
SlabPlan EmbeddingStore::plan() const {
  SlabPlan plan = impl_->plan();
  const std::int64_t given = impl_->forked() ? 0 : impl_->given_bytes();
  plan.total_bytes -= given;
  plan.frame_bytes -= given;
  return plan;
}
StoreStats EmbeddingStore::stats() const {
  return impl_->forked() ? StoreStats{} : impl_->stats();
}

}  // namespace plimsoll
