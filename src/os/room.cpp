// SPDX-License-Identifier: Apache-2.0
#include "os/room.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include <fmt/core.h>

#include "base/mutex.h"
#include "plimsoll/bytes.h"
#include "plimsoll/limits.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kLookEvery{100};
constexpr std::chrono::milliseconds kTriedAgain{1000};  // A quota is seen by no look.
constexpr std::chrono::seconds kPatience{10};  // Of a program that was asked to end before.

fs::path plain(const fs::path& path) {
  return fs::absolute(path).lexically_normal();
}

Mutex& places_mutex() {
  static Mutex mutex;
  return mutex;
}

// Of this process; guarded by places_mutex().
std::vector<std::shared_ptr<RoomWait::State>>& all_places() {
  static std::vector<std::shared_ptr<RoomWait::State>> states;
  return states;
}

}  // namespace

struct RoomWait::State {
  State(std::vector<fs::path> below, Hooks asked) : hooks(std::move(asked)) {
    for (const fs::path& one : below) {
      places.push_back(plain(one).string());
    }
  }

  [[nodiscard]] bool holds(const std::string& path) const {
    return std::ranges::any_of(places,
                               [&](const std::string& one) { return path.starts_with(one); });
  }

  void begin(const fs::path& path, std::int64_t bytes) PLIMSOLL_REQUIRES(mutex) {
    if (waiting++ > 0) {
      return;
    }
    since = Clock::now();
    asked_before = hooks.stops();
    if (hooks.tell) {
      hooks.tell(fmt::format("{}: waits for {} of room", path.string(), format_bytes(bytes)));
    }
  }

  void end() PLIMSOLL_REQUIRES(mutex) {
    if (--waiting == 0 && hooks.tell) {
      hooks.tell("");
    }
    changed.notify_all();
  }

  // Whoever asked while it waited knows of the full disk; else it may be over in a moment.
  void look_for_stop() PLIMSOLL_REQUIRES(mutex) {
    const bool late = !asked_before || Clock::now() - since > kPatience;
    if (!given_up && late && hooks.stops()) {
      given_up = true;
      changed.notify_all();
    }
  }

  const Hooks hooks;
  std::vector<std::string> places;
  Mutex mutex;
  CondVar changed;
  int waiting PLIMSOLL_GUARDED_BY(mutex){0};
  bool asked_before PLIMSOLL_GUARDED_BY(mutex){false};
  bool given_up PLIMSOLL_GUARDED_BY(mutex){false};  // For good: a table may be behind another.
  Clock::time_point since PLIMSOLL_GUARDED_BY(mutex){};
};

RoomWait::RoomWait(std::vector<fs::path> places, Hooks hooks)
    : state_(std::make_shared<State>(std::move(places), std::move(hooks))) {
  const MutexLock lock(places_mutex());
  all_places().push_back(state_);
}

RoomWait::~RoomWait() {
  if (mark_.forked()) {
    return;
  }
  {
    const MutexLock lock(places_mutex());
    std::erase(all_places(), state_);
  }
  MutexLock lock(state_->mutex);
  state_->given_up = true;
  state_->changed.notify_all();
  while (state_->waiting > 0) {
    state_->changed.wait(state_->mutex);
  }
}

bool RoomWait::waits() const {
  const MutexLock lock(state_->mutex);
  return state_->waiting > 0;
}

bool RoomWait::wait_until_written() const {
  MutexLock lock(state_->mutex);
  while (state_->waiting > 0 && !state_->given_up) {
    state_->changed.wait(state_->mutex);
  }
  return !state_->given_up;
}

bool RoomNeed::wait(std::int64_t bytes) {
  const bool first = state_ == nullptr;
  if (first) {
    const MutexLock lock(places_mutex());
    const std::string path = plain(path_).string();
    const auto at =
        std::ranges::find_if(all_places(), [&](const auto& one) { return one->holds(path); });
    if (at == all_places().end()) {
      return false;
    }
    state_ = *at;
  }
  RoomWait::State& state = *state_;
  MutexLock lock(state.mutex);
  if (first) {
    if (state.given_up || !state.hooks.may_wait()) {
      state_.reset();
      return false;
    }
    state.begin(path_, bytes);
  }
  const auto again = Clock::now() + kTriedAgain;
  for (bool room = false; !room && !state.given_up;) {
    state.changed.wait_until(state.mutex, Clock::now() + kLookEvery);
    state.look_for_stop();
    const auto free = free_disk_bytes(plain(path_).parent_path());
    room = Clock::now() >= again || (free && *free >= bytes);
  }
  return !state.given_up;
}

RoomNeed::~RoomNeed() {
  if (state_ != nullptr) {
    const MutexLock lock(state_->mutex);
    state_->end();
  }
}

bool is_full(int os_errno) noexcept {
  return os_errno == ENOSPC || os_errno == EDQUOT;
}

}  // namespace plimsoll
