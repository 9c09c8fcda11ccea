// SPDX-License-Identifier: Apache-2.0
//
// BatchSweep: brings the features of several coming batches into the store's slab in one pass over
// the file, before the first of them is filled.
//
// The more records are wanted at once, the nearer they stand to one another on disk, and the more
// of them share a block or a read. What batches hold does not change: fillers read as without it,
// and find their blocks in the slab.
//
// Reading order: include/plimsoll/loader.h, loader_ring.h, this file, loader.cpp.
//
// Threads: before() from any number of fillers; one sweeps, the others wait for it. The mutex is
//          held across no I/O.
// Memory:  8 bytes a row of the window, leased (Tag::kLoader) at creation.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "base/mutex.h"
#include "data/loader_ring.h"
#include "memory/admission.h"
#include "memory/slab.h"
#include "plimsoll/feature_store.h"

namespace plimsoll {

class BatchSweep {
 public:
  static constexpr std::int64_t kBatchesMax = 4096;

  /// Writes the ordinals of batch `number`, counted from `origin`, and returns how many there are.
  using OrdinalsOf = std::function<std::int64_t(const LoaderState& origin, std::int64_t number,
                                                std::span<std::int64_t> ordinals)>;

  /// Requires: `store` outlives the sweep.
  /// Errors: kInvalidArgument when two windows do not fit the store's frames; kOverBudget.
  static Result<std::unique_ptr<BatchSweep>> create(const Governor& governor, FeatureStore* store,
                                                    std::int64_t batches, std::int64_t batch_rows,
                                                    OrdinalsOf ordinals_of);

  /// Returns when the window of this batch has been swept, or is no longer wanted. A failed read is
  /// left for the filler to meet.
  void before(const BatchRing::Claim& claim);

 private:
  BatchSweep(FeatureStore* store, std::int64_t batches, std::int64_t batch_rows,
             OrdinalsOf ordinals_of);
  void sweep_next(const BatchRing::Claim& claim) PLIMSOLL_REQUIRES(mutex_);
  void sweep(const LoaderState& origin, std::int64_t window) noexcept;

  FeatureStore* store_;
  std::int64_t batches_;
  std::int64_t batch_rows_;
  OrdinalsOf ordinals_of_;
  Admission admission_;
  Slab slab_;
  std::span<std::int64_t> ordinals_{};  // Of one window; the sweeping filler's.

  Mutex mutex_;
  CondVar sweep_ended_;
  std::uint64_t generation_ PLIMSOLL_GUARDED_BY(mutex_){
      0};                                              // Of the ring, whose windows these are.
  std::int64_t swept_ PLIMSOLL_GUARDED_BY(mutex_){0};  // Windows of it.
  bool sweeping_ PLIMSOLL_GUARDED_BY(mutex_){false};
};

}  // namespace plimsoll
