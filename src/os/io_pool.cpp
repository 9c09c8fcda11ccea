// SPDX-License-Identifier: Apache-2.0
#include "os/io_pool.h"

#include <algorithm>
#include <array>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <pthread.h>

#include <fmt/core.h>

#include "base/check.h"
#include "base/mutex.h"
#include "os/aio_transfers.h"
#include "os/background_thread.h"
#include "os/blocked_signals.h"
#include "os/file_faults.h"
#include "os/power_loss.h"

namespace plimsoll {

namespace {

constexpr int kMaxBatches = 16;

Result<void> read_parts(const IoRequest& request) {
  std::int64_t offset = request.offset;
  for (const iovec& part : request.parts()) {
    PLIMSOLL_TRY_VOID(request.file->read_at(
        offset, std::span(static_cast<std::byte*>(part.iov_base), part.iov_len)));
    offset += static_cast<std::int64_t>(part.iov_len);
  }
  return {};
}

Result<void> carry_out(const IoRequest& request) noexcept {
  try {
    switch (request.kind) {
      case IoKind::kRead:
        return request.file->read_at(request.offset, request.bytes);
      case IoKind::kReadParts:
        return read_parts(request);
      case IoKind::kWrite:
        return request.file->write_at(request.offset, request.bytes);
      case IoKind::kSync:
        return request.file->sync();
      case IoKind::kWriteAndSync:
        PLIMSOLL_TRY_VOID(request.file->write_at(request.offset, request.bytes));
        return request.file->sync();
    }
    PLIMSOLL_CHECK(false, "an unknown kind of request");
  } catch (const std::exception&) {  // Only for want of memory for an error's text.
    Error error;
    error.code = ErrorCode::kIo;
    error.advice = "a block could not be transferred, and no memory was left to say why";
    return tl::unexpected(std::move(error));
  }
}

// The ledger of what a power failure may undo is kept by File.
bool fits_a_batch(IoKind kind) noexcept {
  return kind == IoKind::kRead || kind == IoKind::kReadParts ||
         (kind == IoKind::kWrite && !recording_unsynced());
}

// One call of run(), on its caller's stack. All members are guarded by the pool's mutex.
struct Batch {
  std::span<IoRequest> requests;
  std::size_t next{0};  // The first request nobody has begun.
  std::size_t done{0};
  std::size_t failed_at{SIZE_MAX};  // The lowest index that failed, so the answer is repeatable.
  std::optional<Error> error{};
};

}  // namespace

class IoPool::Impl {
 public:
  explicit Impl(int threads) {
    const BlockedSignals blocked;
    for (int i = 0; i < threads; ++i) {
      workers_.emplace_back([this, i] { work(i); });
    }
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Result<void> run(std::span<IoRequest> requests) {
    Batch batch{.requests = requests};
    MutexLock lock(mutex_);
    Batch** slot = free_slot();
    while (slot == nullptr) {
      batch_ended_.wait(mutex_);
      slot = free_slot();
    }
    *slot = &batch;
    for (std::size_t i = 1; i < std::min(requests.size(), workers_.size() + 1); ++i) {
      work_came_.notify_one();
    }
    while (batch.next < requests.size()) {
      step(batch);
    }
    while (batch.done < requests.size()) {
      batch_ended_.wait(mutex_);
    }
    *slot = nullptr;
    batch_ended_.notify_all();
    if (batch.error) {
      return tl::unexpected(*std::move(batch.error));
    }
    return {};
  }

  // Whether all requests were carried out, `done` being the answer, without a thread.
  bool transfer_at_once(std::span<IoRequest> requests,
                        const std::function<void(std::size_t)>& ended, Result<void>& done) {
    const bool fit = !file_fault_armed() &&
                     std::all_of(requests.begin(), requests.end(), [](const IoRequest& r) {
                       return fits_a_batch(r.kind) && r.file->direct();
                     });
    std::size_t failed_at = SIZE_MAX;
    const auto take = [&](std::size_t i, bool whole) {
      auto result = whole ? Result<void>{} : carry_out(requests[i]);
      if (result && ended) {
        ended(i);
      } else if (!result && i < failed_at) {
        failed_at = i;
        done = std::move(result);
      }
    };
    return fit && aio_.run(requests, std::cref(take));  // A reference: nothing is allocated.
  }

  [[nodiscard]] bool empty() const noexcept { return workers_.empty(); }

 private:
  Batch** free_slot() PLIMSOLL_REQUIRES(mutex_) {
    for (Batch*& slot : batches_) {
      if (slot == nullptr) {
        return &slot;
      }
    }
    return nullptr;
  }

  Batch* batch_with_work() PLIMSOLL_REQUIRES(mutex_) {
    for (Batch* batch : batches_) {
      if (batch != nullptr && batch->next < batch->requests.size()) {
        return batch;
      }
    }
    return nullptr;
  }

  // Carries out one request of `batch`, with the lock released meanwhile. The batch cannot end
  // before its last request has been counted as done, so it outlives this call.
  void step(Batch& batch) PLIMSOLL_REQUIRES(mutex_) {
    const std::size_t index = batch.next++;
    mutex_.unlock();
    auto result = carry_out(batch.requests[index]);
    mutex_.lock();
    if (!result && index < batch.failed_at) {
      batch.failed_at = index;
      batch.error = std::move(result).error();
    }
    if (++batch.done == batch.requests.size()) {
      batch_ended_.notify_all();
    }
  }

  void work(int index) {
    enter_background(fmt::format("pl-io-{}", index));
    MutexLock lock(mutex_);
    while (!stopping_) {
      if (Batch* batch = batch_with_work(); batch != nullptr) {
        step(*batch);
      } else {
        work_came_.wait(mutex_);
      }
    }
  }

  AioTransfers aio_;
  Mutex mutex_;
  CondVar work_came_;
  CondVar batch_ended_;
  bool stopping_ PLIMSOLL_GUARDED_BY(mutex_){false};
  std::array<Batch*, kMaxBatches> batches_ PLIMSOLL_GUARDED_BY(mutex_){};  // Borrowed from callers.
  std::vector<std::jthread> workers_;  // Joined before what is above is destroyed.

  // Destroyed first, also when not every thread could be started: tells those there are to end.
  struct Ending {
    Impl& pool;
    ~Ending() {
      {
        MutexLock lock(pool.mutex_);
        pool.stopping_ = true;
      }
      pool.work_came_.notify_all();
    }
  };
  Ending ending_{*this};
};

IoPool::IoPool(int threads) : impl_(std::make_unique<Impl>(threads)) {}

IoPool::~IoPool() = default;

Result<void> IoPool::run(std::span<IoRequest> requests,
                         const std::function<void(std::size_t)>& ended) {
  Result<void> first;
  const bool together = requests.size() > 1 && !impl_->empty();
  if (together && impl_->transfer_at_once(requests, ended, first)) {
    return first;
  }
  if (together) {
    PLIMSOLL_TRY_VOID(impl_->run(requests));
  }
  for (std::size_t i = 0; i < requests.size(); ++i) {
    auto result = together ? Result<void>{} : carry_out(requests[i]);
    if (result && ended) {
      ended(i);
    } else if (!result && first) {
      first = std::move(result);
    }
  }
  return first;
}

}  // namespace plimsoll
