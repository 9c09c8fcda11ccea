// SPDX-License-Identifier: Apache-2.0
//
// LookAhead: a bounded queue of ids that will be asked for soon, and the thread that loads them.
//
// Ids are served in the order in which they were hinted. A tick passes between two hints, unless
// the first was a small part of a request. When half of the frames are hinted and not used yet, the
// thread waits for the owner; when the queue is full, further hints are dropped. So are hints of a
// request that is being made before they were served: the page of a late one would keep its frame
// for a use that has been.
//
// Threads: hint() from any thread; reached() for the owner; one thread of its own.
// Memory:  memory_bytes(), from the slab, and one stack.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <thread>

#include "base/mutex.h"
#include "memory/slab.h"
#include "store/embedding_growing_ids.h"
#include "store/embedding_page_cache.h"
#include "store/id_index.h"

namespace plimsoll {

class LookAhead {
 public:
  static std::int64_t memory_bytes(std::int64_t queue_ids) noexcept {
    return queue_ids * 12 + 2 * 64;
  }

  /// `growing`: of a table whose ids come and go, else nullptr.
  /// Requires: cache, ids and growing outlive this.
  LookAhead(PageCache& cache, const IdIndex& ids, const GrowingIds* growing,
            std::int64_t rows_per_page, std::int64_t queue_ids, Slab& slab);
  ~LookAhead();
  LookAhead(const LookAhead&) = delete;
  LookAhead& operator=(const LookAhead&) = delete;

  void hint(std::span<const std::int64_t> ids) noexcept;

  /// A request of `ids` is about to be made. Where a hint announced just these, it and all before
  /// it are forgotten.
  void reached(std::span<const std::int64_t> ids) noexcept;

 private:
  static constexpr std::size_t kMarks = 64;  // Twice the ticks that the queue may hold.

  void work() noexcept;
  // Waits for hints; 0: stop.
  std::size_t take(std::span<std::int64_t> ids, std::span<std::uint32_t> ticks);
  void serve(std::span<const std::int64_t> ids, std::span<const std::uint32_t> ticks);
  [[nodiscard]] bool stopping();

  PageCache& cache_;
  const IdIndex& ids_;
  const GrowingIds* const growing_;
  const std::int64_t rows_per_page_;
  Mutex mutex_;
  CondVar came_;
  std::span<std::int64_t> ring_ PLIMSOLL_GUARDED_BY(mutex_);
  std::span<std::uint32_t> ticks_ PLIMSOLL_GUARDED_BY(mutex_);  // Of the ids in ring_.
  std::uint32_t tick_ PLIMSOLL_GUARDED_BY(mutex_){0};
  std::size_t in_tick_ PLIMSOLL_GUARDED_BY(mutex_){0};              // Ids of the tick so far.
  std::uint32_t reached_ PLIMSOLL_GUARDED_BY(mutex_){0xFFFFFFFFU};  // Tick of the last request.
  std::array<std::uint64_t, kMarks> marks_ PLIMSOLL_GUARDED_BY(mutex_){};  // Last hint of a tick.
  std::size_t head_ PLIMSOLL_GUARDED_BY(mutex_){0};
  std::size_t count_ PLIMSOLL_GUARDED_BY(mutex_){0};
  bool stopping_ PLIMSOLL_GUARDED_BY(mutex_){false};
  std::jthread thread_;  // Last: joined before the rest is destroyed.
};

}  // namespace plimsoll
