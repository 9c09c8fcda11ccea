// SPDX-License-Identifier: Apache-2.0
#include "memory/watcher.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include <pthread.h>

#include "base/check.h"
#include "base/mutex.h"
#include "memory/coming.h"
#include "memory/ledger.h"
#include "memory/look.h"
#include "os/blocked_signals.h"
#include "os/clock.h"

namespace plimsoll {
namespace {

using Clock = std::chrono::steady_clock;

// How fast memory may grow: one thread that touches fresh pages takes 1 to 2 GiB a second here.
constexpr std::int64_t kGrowthPerMs = (4LL << 30) / 1000;
// A look is repeated after so many times what it took of the processor; and sooner where what comes
// in kGrowing times as long as it was watched would pass the limit.
constexpr int kCostTimes = 100;
constexpr int kCostTimesNear = 10;
constexpr int kGrowing = 4;
constexpr int kRisen = 2;
constexpr std::int64_t kRise = 256 << 10;

// What comes before the loop's next step boundary, where `soon` comes in kSoon. A way that is
// longer already than any lately is expected to take as long again.
std::int64_t before_boundary(Ledger& ledger, std::int64_t now_ns, std::int64_t soon) {
  const Ledger::Course& course = ledger.course();
  const std::int64_t stepped = course.stepped_ns;
  if (stepped == INT64_MIN) {
    return ledger.state().limit_bytes;
  }
  const std::int64_t longest = course.interval_ns;
  const std::int64_t gone = std::max<std::int64_t>(0, now_ns - stepped);
  const std::int64_t left = gone < longest ? longest - gone : std::max(longest, gone);
  const std::chrono::duration<double> each = Watcher::kSoon;
  const double times = static_cast<double>(left) / 1e9 / each.count();
  return static_cast<std::int64_t>(
      std::min(static_cast<double>(soon) * times, static_cast<double>(ledger.state().limit_bytes)));
}

}  // namespace

struct Watcher::State {
  State(std::shared_ptr<Ledger> watched, std::function<void(bool)> told)
      : ledger(std::move(watched)), notify(std::move(told)) {}

  const std::shared_ptr<Ledger> ledger;
  const std::function<void(bool)> notify;
  Mutex mutex{};
  CondVar changed{};
  bool ended PLIMSOLL_GUARDED_BY(mutex){false};
  std::optional<News> news PLIMSOLL_GUARDED_BY(mutex){};
  bool averted PLIMSOLL_GUARDED_BY(mutex){false};  // The last stop, since.
  std::chrono::milliseconds pause{kLookMost};      // This and the rest: the thread's own.
  Clock::time_point warned{};
  Clock::time_point stopped{};
  Coming coming{kAhead};  // Of what is held without a lease.
  Coming soon{kSoon};
  std::int64_t before{0};             // Held without a lease at the last look.
  int risen{0};                       // Looks in a row that saw more than the one before.
  std::atomic<bool> deferred{false};  // Written by who hears of a stop; read here.
  std::thread thread{};
};

Watcher::Watcher(std::function<void(bool stop)> notify)
    : state_(std::make_unique<State>(current_ledger(), std::move(notify))) {
  PLIMSOLL_CHECK(state_->ledger != nullptr, "a watcher without a governor");
  const BlockedSignals all;  // They belong to the program's own threads.
  state_->thread = std::thread([state = state_.get()] { watch(*state); });
}

Watcher::~Watcher() {
  if (mark_.forked()) {
    static_cast<void>(state_.release());
    return;
  }
  {
    MutexLock lock(state_->mutex);
    state_->ended = true;
  }
  state_->changed.notify_all();
  state_->thread.join();
}

std::optional<Watcher::News> Watcher::take() {
  if (mark_.forked()) {
    return std::nullopt;
  }
  MutexLock lock(state_->mutex);
  return std::exchange(state_->news, std::nullopt);
}

void Watcher::avert() {
  if (!mark_.forked()) {
    MutexLock lock(state_->mutex);
    state_->averted = true;
  }
}

void Watcher::defer() noexcept {
  if (!mark_.forked()) {
    state_->deferred = true;
  }
}

void Watcher::watch(State& state) {
  ::pthread_setname_np(::pthread_self(), "pl-watch");
  for (;;) {
    auto news = judge(state);
    const bool told = news.has_value();
    const bool stop = told && news->stop;
    {
      MutexLock lock(state.mutex);
      if (told) {
        state.news = news;
      }
    }
    if (told) {
      state.notify(stop);
    }
    const auto next = Clock::now() + state.pause;
    MutexLock lock(state.mutex);
    while (!state.ended && state.changed.wait_until(state.mutex, next)) {
    }
    if (state.ended) {
      return;
    }
    if (std::exchange(state.averted, false)) {
      state.stopped = {};
    }
  }
}

// Looks, acts if nobody else does, and finds what there is to say.
std::optional<Watcher::News> Watcher::judge(State& state) {
  const auto begin = Clock::now();
  const std::int64_t spent_ns = thread_cpu_ns();
  Look now = look(*state.ledger);
  const std::int64_t limit = state.ledger->state().limit_bytes;
  const std::int64_t stepped = state.ledger->course().stepped_ns;
  const std::int64_t begin_ns = begin.time_since_epoch() / std::chrono::nanoseconds(1);
  const bool attended =
      stepped != INT64_MIN && begin_ns - stepped < std::chrono::nanoseconds(kAttended).count();
  const std::int64_t coming = state.coming.add(begin, now.seen.unexplained_bytes);
  const std::int64_t soon = state.soon.add(begin, now.seen.unexplained_bytes);
  const std::int64_t ahead = attended ? coming : limit;  // Any other loop: without waiting.
  if (now.report.pressure && now.seen.held_bytes() + ahead > limit) {
    now = look_and_act(*state.ledger, /*wait=*/false);
  }
  const std::int64_t held = now.seen.held_bytes();
  const int times = held + kGrowing * coming > limit ? kCostTimesNear : kCostTimes;
  const auto took = std::chrono::ceil<std::chrono::milliseconds>(
      std::chrono::nanoseconds((thread_cpu_ns() - spent_ns) * times));
  const std::chrono::milliseconds reached{std::max<std::int64_t>(0, limit - held) / kGrowthPerMs};
  state.pause = std::max(std::clamp(reached, kLookLeast, kLookMost), std::min(took, kLookMost));
  // What grows fast passes the last per cents while one look is waited for. What came at once may
  // have come whole.
  const std::int64_t unexplained = now.seen.unexplained_bytes;
  state.risen = unexplained > state.before + kRise ? state.risen + 1 : 0;
  state.before = unexplained;
  const bool fast = attended && now.report.pressure && state.risen >= kRisen && held + soon > limit;
  const bool over = fast || (now.report.stop && held + ahead > limit);
  const bool late = held + soon + before_boundary(*state.ledger, begin_ns, soon) > limit;
  const auto since = begin - state.stopped;
  const bool again = state.deferred && (late || since > kDeferred);
  if (over && (state.stopped == Clock::time_point{} || since > kAgain || again)) {
    state.stopped = state.warned = begin;
    state.deferred = false;
    now.report.needed_bytes = std::max(now.report.needed_bytes, held) + coming;
    return News{.stop = true, .late = late, .seen = now.seen, .report = now.report};
  }
  if (now.report.pressure && !over && !attended &&
      (state.warned == Clock::time_point{} || begin - state.warned > kAgain)) {
    state.warned = begin;
    return News{.stop = false, .seen = now.seen, .report = now.report};
  }
  return std::nullopt;
}

}  // namespace plimsoll
