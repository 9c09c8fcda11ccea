// SPDX-License-Identifier: Apache-2.0
#include "store/row_crew.h"

#include <algorithm>
#include <chrono>
#include <string>

#include <pthread.h>

#include "base/check.h"
#include "os/blocked_signals.h"

namespace plimsoll {
namespace {

// How long one looks before it sleeps. The kernel takes tens of microseconds to wake a thread, and
// the jobs of a batch (gather; gradients checked; rows stepped) are as short, one right after
// another. Source: bench/w3_update, one and two threads.
constexpr auto kLook = std::chrono::microseconds(100);

// Returns when `word` is no longer `seen`.
void await_change(const std::atomic<std::uint32_t>& word, std::uint32_t seen) noexcept {
  const auto until = std::chrono::steady_clock::now() + kLook;
  while (word.load(std::memory_order_acquire) == seen) {
    if (std::chrono::steady_clock::now() >= until) {
      word.wait(seen, std::memory_order_acquire);
      return;
    }
    std::this_thread::yield();  // To whoever else wants this core.
  }
}

}  // namespace

RowCrew::RowCrew(int threads) {
  const BlockedSignals blocked;
  for (int member = 1; member < threads; ++member) {
    members_.emplace_back([this, member] { work(member); });
  }
}

RowCrew::Ending::~Ending() {
  crew.stopping_.store(true, std::memory_order_relaxed);
  crew.round_.fetch_add(1, std::memory_order_release);
  crew.round_.notify_all();
}

void RowCrew::run_erased(std::int64_t count, std::int64_t grain, Erased body, void* context) {
  if (members_.empty() || count <= grain) {
    if (count > 0) {
      body(context, 0, count, 0);
    }
    return;
  }
  PLIMSOLL_CHECK(count <= 0xFFFFFFFFLL, "rows are counted in 32 bits");
  body_ = body;
  context_ = context;
  count_ = count;
  grain_.store(static_cast<std::uint32_t>(grain), std::memory_order_relaxed);
  left_.store(static_cast<std::uint32_t>(count), std::memory_order_relaxed);
  const std::uint64_t job = (tickets_.load(std::memory_order_relaxed) >> 32) + 1;
  tickets_.store(job << 32 | static_cast<std::uint64_t>(count), std::memory_order_release);
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  while (take_rows(0)) {
  }
  for (std::uint32_t left = left_.load(std::memory_order_acquire); left != 0;
       left = left_.load(std::memory_order_acquire)) {
    await_change(left_, left);
  }
}

// Takes and does one portion. Having taken rows keeps their job from ending, so its fields may be
// read only then. False: there were none.
bool RowCrew::take_rows(int member) noexcept {
  std::uint64_t seen = tickets_.load(std::memory_order_relaxed);
  std::uint32_t taken = 0;
  do {
    taken = std::min(static_cast<std::uint32_t>(seen), grain_.load(std::memory_order_relaxed));
    if (taken == 0) {
      return false;
    }
  } while (!tickets_.compare_exchange_weak(seen, seen - taken, std::memory_order_acq_rel,
                                           std::memory_order_relaxed));
  const std::int64_t begin = count_ - static_cast<std::uint32_t>(seen);
  body_(context_, begin, begin + taken, member);
  if (left_.fetch_sub(taken, std::memory_order_acq_rel) == taken) {
    left_.notify_all();
  }
  return true;
}

void RowCrew::work(int member) noexcept {
  pthread_setname_np(pthread_self(), ("pl-row-" + std::to_string(member)).c_str());
  for (std::uint32_t seen = 0;;) {
    await_change(round_, seen);
    if (stopping_.load(std::memory_order_relaxed)) {
      return;
    }
    seen = round_.load(std::memory_order_acquire);
    while (take_rows(member)) {
    }
  }
}

}  // namespace plimsoll
