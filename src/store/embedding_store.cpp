// SPDX-License-Identifier: Apache-2.0
//
// gather, apply and update: a request is resolved to ordinals, its pages are pinned (as many at a
// time as the slab allows), and its rows are copied or changed outside any lock.
//
// Threads: see embedding_store.h.   Memory: the scratch in embedding_store_impl.h.
#include "plimsoll/embedding_store.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "store/embedding_store_impl.h"
#include "store/row_ahead.h"

namespace plimsoll {
namespace {

constexpr std::uint32_t kEmptyPlace = 0xFFFFFFFFU;

std::uint32_t position_of(std::uint64_t key) {
  return static_cast<std::uint32_t>(key);
}

std::uint32_t place_of(std::uint32_t ordinal, std::size_t places) {
  return static_cast<std::uint32_t>((ordinal * 0x9E3779B97F4A7C15ULL) >> 32) &
         static_cast<std::uint32_t>(places - 1);
}

// What a read came to, its error being told by what it means to who reads a pinned commit.
Result<void> explained(const auto& engine, Result<void> done) {
  return done ? done : Result<void>(tl::unexpected(engine.explained(std::move(done).error())));
}

}  // namespace

// ---- Resolving --------------------------------------------------------------------------------

// Sorts keys by page when they may not all be pinned at once, so that each page is loaded once.
void EmbeddingStore::Impl::order_by_page(std::span<std::uint64_t> keys) const {
  if (static_cast<std::int64_t>(keys.size()) > cache_->pin_limit()) {
    std::sort(keys.begin(), keys.end());
  }
}

// ---- gather and update ------------------------------------------------------------------------

Result<void> EmbeddingStore::Impl::gather(std::span<const std::int64_t> ids, std::span<float> out) {
  PLIMSOLL_TRY_VOID(check_rows("out", ids.size(), out.size()));
  look_ahead_->reached(ids);
  PLIMSOLL_TRY_VOID(cache_->begin_request());
  while (!ids.empty()) {
    const std::size_t count = std::min(ids.size(), keys_.size());
    PLIMSOLL_TRY_VOID(resolve(ids.first(count)));
    for (std::size_t i = 0; i < count; ++i) {
      keys_[i] = std::uint64_t{found_.ordinals[i]} << 32 | i;
    }
    auto keys = keys_.first(count);
    order_by_page(keys);
    while (!keys.empty()) {
      PLIMSOLL_TRY(const std::int64_t pinned, cache_->pin(keys, false, records_));
      crew_->run(pinned, kGrain, [&](std::int64_t begin, std::int64_t end, int) {
        for (std::int64_t i = begin; i < end; ++i) {
          if (i + kRecordsAhead < end) {
            fetch_ahead(records_[i + kRecordsAhead] + kRowHeaderBytes, shape_.weight_bytes());
          }
          read_weights(shape_, records_[i], out.data() + position_of(keys[i]) * shape_.dim);
        }
      });
      cache_->unpin();
      keys = keys.subspan(static_cast<std::size_t>(pinned));
    }
    ids = ids.subspan(count);
    out = out.subspan(count * static_cast<std::size_t>(shape_.dim));
  }
  return {};
}

Result<void> EmbeddingStore::Impl::update(std::span<const std::int64_t> ids,
                                          std::span<const float> rows) {
  PLIMSOLL_TRY_VOID(check_rows("rows", ids.size(), rows.size()));
  return set_rows(ids, {}, rows, shape_.dim);
}

Result<void> EmbeddingStore::Impl::restore(std::span<const std::int64_t> ids,
                                           std::span<const std::uint32_t> sequences,
                                           std::span<const float> values) {
  PLIMSOLL_TRY_VOID(check_records(ids.size(), sequences.size(), values.size()));
  return set_rows(ids, sequences, values, shape_.floats());
}

// Sets the first `width` floats of each record and zeroes those behind them; no sequences: all 0.
Result<void> EmbeddingStore::Impl::set_rows(std::span<const std::int64_t> ids,
                                            std::span<const std::uint32_t> sequences,
                                            std::span<const float> values, std::int64_t width) {
  PLIMSOLL_TRY_VOID(cache_->begin_request());
  PLIMSOLL_TRY_VOID(
      resolve_ahead(ids, keys_.size(), [this](const auto some) { return resolve(some); }));
  bool changed = false;
  while (!ids.empty()) {
    const std::size_t count = std::min(ids.size(), keys_.size());
    auto done = resolve(ids.first(count));
    if (done) {
      done = set_piece(static_cast<std::int64_t>(count), sequences, values, width, changed);
    }
    if (!done) {
      if (changed) {
        cache_->poison(done.error());  // Half a request: nobody may see or keep it.
      }
      return done;
    }
    ids = ids.subspan(count);
    sequences = sequences.empty() ? sequences : sequences.subspan(count);
    values = values.subspan(count * static_cast<std::size_t>(width));
  }
  return {};
}

// The first `count` rows found.
Result<void> EmbeddingStore::Impl::set_piece(std::int64_t count,
                                             std::span<const std::uint32_t> sequences,
                                             std::span<const float> values, std::int64_t width,
                                             bool& changed) {
  auto keys = keys_.first(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < keys.size(); ++i) {
    keys[i] = std::uint64_t{found_.ordinals[i]} << 32 | i;
  }
  order_by_page(keys);
  while (!keys.empty()) {
    PLIMSOLL_TRY(const std::int64_t pinned, cache_->pin(keys, true, records_));
    for (std::int64_t i = 0; i < pinned; ++i) {  // In request order: the last of an id wins.
      const std::uint32_t place = position_of(keys[i]);
      write_values(shape_, sequences.empty() ? 0 : sequences[place], values.data() + place * width,
                   width, records_[i]);
    }
    changed = true;
    cache_->unpin();
    keys = keys.subspan(static_cast<std::size_t>(pinned));
  }
  return {};
}

// ---- apply ------------------------------------------------------------------------------------

// Finds equal ordinals among the first `count`; returns how many different ones there are. Unique
// rows are numbered in order of first appearance, positions of one row joined in request order.
std::int64_t EmbeddingStore::Impl::find_duplicates(std::int64_t count) {
  std::memset(hash_.data(), 0xFF, hash_.size_bytes());
  std::uint32_t unique = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint32_t ordinal = found_.ordinals[i];
    std::uint32_t place = place_of(ordinal, hash_.size());
    while (hash_[place] != kEmptyPlace &&
           static_cast<std::uint32_t>(keys_[hash_[place]] >> 32) != ordinal) {
      place = (place + 1) & static_cast<std::uint32_t>(hash_.size() - 1);
    }
    if (const std::uint32_t seen = hash_[place]; seen != kEmptyPlace) {
      next_[last_[seen]] = i;
      last_[seen] = i;
      continue;
    }
    hash_[place] = unique;
    keys_[unique] = std::uint64_t{ordinal} << 32 | unique;
    first_[unique] = i;
    last_[unique] = i;
    ++unique;
  }
  return unique;
}

// The gradient of a unique row: its only one, or the sum in `sum`, added up in request order.
const float* EmbeddingStore::Impl::gradient_of(std::uint32_t unique, std::span<const float> grads,
                                               std::span<float> sum) const noexcept {
  const float* const only = grads.data() + first_[unique] * shape_.dim;
  if (first_[unique] == last_[unique]) {
    return only;
  }
  std::memcpy(sum.data(), only, sum.size_bytes());
  for (std::uint32_t at = first_[unique]; at != last_[unique];) {
    at = next_[at];
    const float* const more = grads.data() + at * shape_.dim;
    for (std::size_t k = 0; k < sum.size(); ++k) {
      sum[k] += more[k];
    }
  }
  return sum.data();
}

// Refuses NaN and infinity, in a gradient or in a sum of gradients, before anything is changed.
Result<void> EmbeddingStore::Impl::check_gradients(std::span<const std::int64_t> ids,
                                                   std::span<const float> grads,
                                                   std::int64_t unique) {
  const auto dim = static_cast<std::size_t>(shape_.dim);
  std::atomic<bool> sound{true};
  // A sum of finite numbers may overflow, and a sum with an infinite one is not finite: one look
  // at what will be used is enough.
  crew_->run(unique, kGrain, [&](std::int64_t begin, std::int64_t end, int member) {
    const auto sum = sums_.subspan(static_cast<std::size_t>(member) * dim, dim);
    for (std::int64_t u = begin; u < end; ++u) {
      if (!all_finite(gradient_of(static_cast<std::uint32_t>(u), grads, sum), shape_.dim)) {
        sound.store(false, std::memory_order_relaxed);
      }
    }
  });
  if (sound.load(std::memory_order_relaxed)) {
    return {};
  }
  std::uint32_t bad = 0;
  while (all_finite(gradient_of(bad, grads, sums_.first(dim)), shape_.dim)) {
    ++bad;
  }
  return fail(
      ErrorCode::kInvalidArgument,
      fmt::format("{}: the gradient of id {} is not finite", directory_.string(), ids[first_[bad]]),
      "nothing was changed: skip this step, or lower the learning rate");
}

// The hot loop: rows [begin, end) of what is pinned.
void EmbeddingStore::Impl::step_rows(std::int64_t begin, std::int64_t end,
                                     std::span<const std::uint64_t> keys,
                                     std::span<const float> grads, int member,
                                     double rate_scale) noexcept {
  const auto dim = static_cast<std::size_t>(shape_.dim);
  const auto sum = sums_.subspan(static_cast<std::size_t>(member) * dim, dim);
  float* const wide = wide_.data() + member * shape_.scratch_floats();
  for (std::int64_t i = begin; i < end; ++i) {
    if (i + kRecordsAhead < end) {
      fetch_ahead<1>(records_[i + kRecordsAhead], shape_.record_bytes);
    }
    std::int64_t id = 0;
    std::memcpy(&id, records_[i], sizeof id);
    optimizer_.step(records_[i], id, gradient_of(position_of(keys[i]), grads, sum), rate_scale,
                    wide);
  }
}

Result<void> EmbeddingStore::Impl::apply(std::span<const std::int64_t> ids,
                                         std::span<const float> grads, float rate_scale) {
  PLIMSOLL_TRY_VOID(check_rows("grads", ids.size(), grads.size()));
  if (ids.size() > keys_.size()) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: apply() of {} rows, but batch_rows is {}", directory_.string(),
                            ids.size(), keys_.size()),
                "raise batch_rows");
  }
  PLIMSOLL_TRY_VOID(cache_->begin_request());
  PLIMSOLL_TRY_VOID(resolve(ids));
  const std::int64_t unique = find_duplicates(static_cast<std::int64_t>(ids.size()));
  PLIMSOLL_TRY_VOID(check_gradients(ids, grads, unique));
  auto keys = keys_.first(static_cast<std::size_t>(unique));
  order_by_page(keys);
  bool changed = false;
  while (!keys.empty()) {
    auto pinned = cache_->pin(keys, true, records_);
    if (!pinned) {
      if (changed) {
        cache_->poison(pinned.error());  // Half a step: nobody may see or keep it.
      }
      return tl::unexpected(std::move(pinned).error());
    }
    crew_->run(*pinned, kGrain, [&](std::int64_t begin, std::int64_t end, int member) {
      step_rows(begin, end, keys, grads, member, rate_scale);
    });
    changed = true;
    cache_->unpin();
    keys = keys.subspan(static_cast<std::size_t>(*pinned));
  }
  return {};
}

Result<void> EmbeddingStore::Impl::set_optimizer(const RowOptimizerOptions& options) {
  if (options.kind != table_.optimizer) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: optimizer.kind is {}, but {} was asked for",
                            (directory_ / table_files::kDescription).string(),
                            optimizer_name(table_.optimizer), optimizer_name(options.kind)));
  }
  PLIMSOLL_TRY_VOID(check_optimizer(options));
  optimizer_ = RecordStep(shape_, table_.init, options, corrections_);
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
