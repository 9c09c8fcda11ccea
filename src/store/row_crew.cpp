// SPDX-License-Identifier: Apache-2.0
#include "store/row_crew.h"

#include <algorithm>
#include <csignal>
#include <string>

#include <pthread.h>

namespace plimsoll {

RowCrew::RowCrew(int threads) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);  // Signals belong to the program's own threads.
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (int member = 1; member < threads; ++member) {
    members_.emplace_back([this, member] { work(member); });
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

RowCrew::~RowCrew() {
  stopping_.store(true, std::memory_order_relaxed);
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
}

void RowCrew::run_erased(std::int64_t count, std::int64_t grain, Erased body, void* context) {
  if (members_.empty() || count <= grain) {
    if (count > 0) {
      body(context, 0, count, 0);
    }
    return;
  }
  body_ = body;
  context_ = context;
  count_ = count;
  grain_ = grain;
  next_.store(0, std::memory_order_relaxed);
  working_.store(static_cast<std::int32_t>(members_.size()), std::memory_order_relaxed);
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  take_rows(0);
  for (std::int32_t left = working_.load(std::memory_order_acquire); left != 0;
       left = working_.load(std::memory_order_acquire)) {
    working_.wait(left, std::memory_order_acquire);
  }
}

void RowCrew::take_rows(int member) noexcept {
  for (;;) {
    const std::int64_t begin = next_.fetch_add(grain_, std::memory_order_relaxed);
    if (begin >= count_) {
      return;
    }
    body_(context_, begin, std::min(begin + grain_, count_), member);
  }
}

void RowCrew::work(int member) noexcept {
  pthread_setname_np(pthread_self(), ("pl-row-" + std::to_string(member)).c_str());
  for (std::uint32_t seen = 0;; ++seen) {
    round_.wait(seen, std::memory_order_acquire);
    if (stopping_.load(std::memory_order_relaxed)) {
      return;
    }
    take_rows(member);
    if (working_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      working_.notify_all();
    }
  }
}

}  // namespace plimsoll
