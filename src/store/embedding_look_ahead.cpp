// SPDX-License-Identifier: Apache-2.0
#include "store/embedding_look_ahead.h"

#include <algorithm>
#include <array>
#include <bit>
#include <exception>

#include <pthread.h>

#include "os/background_thread.h"
#include "os/blocked_signals.h"

namespace plimsoll {
namespace {

constexpr std::size_t kHintsAtOnce = 1024;  // What they miss is read together.
constexpr std::size_t kTicksInQueue = 32;   // At most: as many as a page remembers.

// What a request is recognised by. Taking one for another costs hints, not rows.
std::uint64_t mark_of(std::span<const std::int64_t> ids) {
  constexpr std::uint64_t kMix = 0x9E3779B97F4A7C15ULL;
  std::uint64_t mark = ids.size();
  for (const std::int64_t id : {ids.front(), ids[ids.size() / 2], ids.back()}) {
    mark = std::rotl(mark * kMix, 32) ^ static_cast<std::uint64_t>(id);
  }
  return mark * kMix | 1;  // Never 0, which stands for none.
}

}  // namespace

LookAhead::LookAhead(PageCache& cache, const IdIndex& ids, const GrowingIds* growing,
                     std::int64_t rows_per_page, std::int64_t queue_ids, Slab& slab)
    : cache_(cache),
      ids_(ids),
      growing_(growing),
      rows_per_page_(rows_per_page),
      ring_(slab.take<std::int64_t>(queue_ids)),
      ticks_(slab.take<std::uint32_t>(queue_ids)) {
  const BlockedSignals blocked;
  thread_ = std::jthread([this] { work(); });
}

LookAhead::~LookAhead() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  came_.notify_all();
  cache_.stop();
}

void LookAhead::hint(std::span<const std::int64_t> ids) noexcept {
  if (ids.empty()) {
    return;
  }
  {
    const MutexLock lock(mutex_);
    if (in_tick_ > ring_.size() / kTicksInQueue || tick_ == reached_) {
      ++tick_;
      in_tick_ = 0;
    }
    marks_[tick_ % kMarks] = mark_of(ids);
    for (const std::int64_t id : ids) {
      if (count_ == ring_.size()) {
        break;
      }
      const std::size_t place = (head_ + count_++) % ring_.size();
      ring_[place] = id;
      ticks_[place] = tick_;
      ++in_tick_;
    }
  }
  came_.notify_one();
}

void LookAhead::reached(std::span<const std::int64_t> ids) noexcept {
  if (ids.empty()) {
    return;
  }
  std::uint32_t tick = 0;
  {
    const MutexLock lock(mutex_);
    const std::uint32_t before = reached_;
    const std::uint32_t known = std::min(tick_ - before, static_cast<std::uint32_t>(kMarks));
    const std::uint64_t mark = known > 0 ? mark_of(ids) : 0;
    // From the oldest on: of equal requests the others are still to come.
    for (std::uint32_t left = known; left > 0 && reached_ == before; --left) {
      tick = tick_ - left + 1;
      reached_ = marks_[tick % kMarks] == mark ? tick : before;
    }
    if (reached_ == before) {
      return;
    }
    while (count_ > 0 && ticks_[head_] - before <= tick - before) {
      head_ = (head_ + 1) % ring_.size();
      --count_;
    }
  }
  cache_.reached(tick);
}

std::size_t LookAhead::take(std::span<std::int64_t> ids, std::span<std::uint32_t> ticks) {
  const MutexLock lock(mutex_);
  while (count_ == 0 && !stopping_) {
    came_.wait(mutex_);
  }
  if (stopping_) {
    return 0;
  }
  const std::size_t taken = std::min(ids.size(), count_);
  for (std::size_t i = 0; i < taken; ++i) {
    ids[i] = ring_[head_];
    ticks[i] = ticks_[head_];
    head_ = (head_ + 1) % ring_.size();
  }
  count_ -= taken;
  return taken;
}

bool LookAhead::stopping() {
  const MutexLock lock(mutex_);
  return stopping_;
}

void LookAhead::serve(std::span<const std::int64_t> ids, std::span<const std::uint32_t> ticks) {
  std::array<std::int64_t, kHintsAtOnce> ordinals;
  const auto found = std::span(ordinals).first(ids.size());
  if (!(growing_ != nullptr ? growing_->find(ids, found) : ids_.find(ids, found))) {
    return;  // The owner will meet the error when it asks for these ids.
  }
  std::array<PageCache::Hint, kHintsAtOnce> hints;
  std::size_t count = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ordinals[i] >= 0) {
      hints[count++] = {static_cast<std::uint32_t>(ordinals[i] / rows_per_page_), ticks[i]};
    }
  }
  for (std::size_t done = 0; done < count && !stopping();) {
    done += cache_.load_hinted(std::span(hints).subspan(done, count - done));
    if (done < count) {
      cache_.wait_for_room();
    }
  }
}

void LookAhead::work() noexcept {
  enter_background("pl-ahead");
  std::array<std::int64_t, kHintsAtOnce> ids;
  std::array<std::uint32_t, kHintsAtOnce> ticks;
  while (const std::size_t count = take(ids, ticks)) {
    try {
      serve(std::span(ids).first(count), std::span(ticks).first(count));
    } catch (const std::exception& problem) {
      // A broken invariant, or no memory for an error's text: the owner is told at its next call.
      cache_.poison(make_error(ErrorCode::kInternal, problem.what()));
      return;
    }
  }
}

}  // namespace plimsoll
