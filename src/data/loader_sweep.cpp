// SPDX-License-Identifier: Apache-2.0
//
// BatchSweep: see loader_sweep.h.
//
// Threads, Memory: as the header says.
#include "data/loader_sweep.h"

#include <algorithm>
#include <exception>
#include <utility>

#include <fmt/core.h>

#include "base/check.h"
#include "base/round.h"

namespace plimsoll {

BatchSweep::BatchSweep(FeatureStore* store, std::int64_t batches, std::int64_t batch_rows,
                       OrdinalsOf ordinals_of)
    : store_(store),
      batches_(batches),
      batch_rows_(batch_rows),
      ordinals_of_(std::move(ordinals_of)) {}

Result<std::unique_ptr<BatchSweep>> BatchSweep::create(const Governor& governor,
                                                       FeatureStore* store, std::int64_t batches,
                                                       std::int64_t batch_rows,
                                                       OrdinalsOf ordinals_of) {
  // One window is being read while the one before it is handed out.
  const std::int64_t blocks = std::min(2 * batches * batch_rows, store->info().blocks);
  const std::int64_t frames = store->stats().frames;
  if (blocks > frames) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("sweep_batches = {} of {} rows need room for {} blocks of features; "
                            "there is room for {}",
                            batches, batch_rows, blocks, frames),
                "lower sweep_batches, or raise the feature store's cache_bytes");
  }
  auto sweep = std::unique_ptr<BatchSweep>(
      new BatchSweep(store, batches, batch_rows, std::move(ordinals_of)));
  const std::int64_t bytes = round_up(batches * batch_rows * 8, 4096);
  PLIMSOLL_TRY_VOID(sweep->admission_.take(governor, Tag::kLoader, bytes, "sweep_batches"));
  PLIMSOLL_TRY(sweep->slab_, Slab::create(governor, Tag::kLoader, bytes));
  sweep->ordinals_ = sweep->slab_.take<std::int64_t>(batches * batch_rows);
  return sweep;
}

void BatchSweep::before(const BatchRing::Claim& claim) {
  const std::int64_t window = claim.number / batches_;
  MutexLock lock(mutex_);
  if (claim.generation > generation_) {
    generation_ = claim.generation;
    swept_ = 0;
  }
  while (claim.generation == generation_ && swept_ <= window) {
    if (sweeping_) {
      sweep_ended_.wait(mutex_);
    } else {
      sweep_next(claim);
    }
  }
}

void BatchSweep::sweep_next(const BatchRing::Claim& claim) {
  sweeping_ = true;
  const std::int64_t window = swept_;
  mutex_.unlock();
  sweep(claim.origin, window);
  mutex_.lock();
  sweeping_ = false;
  swept_ += claim.generation == generation_ ? 1 : 0;
  sweep_ended_.notify_all();
}

void BatchSweep::sweep(const LoaderState& origin, std::int64_t window) noexcept {
  try {
    std::int64_t count = 0;
    for (std::int64_t b = 0; b < batches_; ++b) {
      const auto rest =
          ordinals_.subspan(static_cast<std::size_t>(count), static_cast<std::size_t>(batch_rows_));
      count += ordinals_of_(origin, window * batches_ + b, rest);
    }
    const auto wanted = ordinals_.first(static_cast<std::size_t>(count));
    std::sort(wanted.begin(), wanted.end());  // The store sorts no more than 4096 at once.
    static_cast<void>(store_->prefetch_ordinals(wanted).has_value());
  } catch (const std::exception&) {  // A hint: whoever fills the batch meets the error itself.
  }
}

}  // namespace plimsoll
