// SPDX-License-Identifier: Apache-2.0
#include "os/crash_point.h"

#include <array>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include <unistd.h>

#include "base/mutex.h"

namespace plimsoll {

namespace {

enum class Armed : int { kUnknown, kNo, kYes };

constexpr std::size_t kNamesMax = 64;   // Distinct names; further ones count only towards "*".
constexpr std::size_t kTargetMax = 96;  // Bytes of PLIMSOLL_CRASH's name.

// Constant-initialised and trivially destroyed but for the mutex, so usable at any time.
struct CrashState {
  std::atomic<Armed> armed{Armed::kUnknown};  // Written under mutex; read by anyone.
  Mutex mutex;
  std::array<char, kTargetMax> target PLIMSOLL_GUARDED_BY(mutex){};
  long passage PLIMSOLL_GUARDED_BY(mutex){0};
  long total PLIMSOLL_GUARDED_BY(mutex){0};
  std::array<const char*, kNamesMax> names PLIMSOLL_GUARDED_BY(mutex){};
  std::array<long, kNamesMax> counts PLIMSOLL_GUARDED_BY(mutex){};
};

CrashState state;
std::atomic<CrashHook> crash_hook{nullptr};  // Written by tests; read by anyone.

void read_environment() PLIMSOLL_REQUIRES(state.mutex) {
  state.total = 0;
  state.names = {};
  state.counts = {};
  state.passage = 0;
  state.target = {};
  const char* text = std::getenv("PLIMSOLL_CRASH");
  if (text == nullptr || *text == '\0') {
    state.armed.store(Armed::kNo, std::memory_order_relaxed);
    return;
  }
  const char* colon = std::strrchr(text, ':');
  const std::size_t length =
      colon == nullptr ? std::strlen(text) : static_cast<std::size_t>(colon - text);
  std::memcpy(state.target.data(), text, length < kTargetMax ? length : kTargetMax - 1);
  state.passage = colon == nullptr ? 1 : std::strtol(colon + 1, nullptr, 10);
  state.armed.store(Armed::kYes, std::memory_order_relaxed);
}

// The counter of `name`, or nullptr when the table is full.
long* counter_of(const char* name) PLIMSOLL_REQUIRES(state.mutex) {
  for (std::size_t i = 0; i < kNamesMax; ++i) {
    if (state.names[i] == nullptr) {
      state.names[i] = name;
    }
    if (std::strcmp(state.names[i], name) == 0) {
      return &state.counts[i];
    }
  }
  return nullptr;
}

void count_and_maybe_die(const char* name) noexcept {
  MutexLock lock(state.mutex);
  if (state.armed.load(std::memory_order_relaxed) == Armed::kUnknown) {
    read_environment();
  }
  if (state.armed.load(std::memory_order_relaxed) == Armed::kNo) {
    return;
  }
  ++state.total;
  long* const count = counter_of(name);
  if (count != nullptr) {
    ++*count;
  }
  const bool any = std::strcmp(state.target.data(), "*") == 0;
  const bool ours = count != nullptr && std::strcmp(state.target.data(), name) == 0;
  if ((any && state.total == state.passage) || (ours && *count == state.passage)) {
    if (const CrashHook hook = crash_hook.load(std::memory_order_relaxed); hook != nullptr) {
      hook(name, true);
    }
    ::kill(::getpid(), SIGKILL);
    for (;;) {
      ::pause();  // SIGKILL takes effect before this thread could do more harm.
    }
  }
}

}  // namespace

void set_crash_hook(CrashHook hook) noexcept {
  crash_hook.store(hook, std::memory_order_relaxed);
}

void crash_point(const char* name) noexcept {
  if (const CrashHook hook = crash_hook.load(std::memory_order_relaxed); hook != nullptr)
      [[unlikely]] {
    hook(name, false);
  }
  if (state.armed.load(std::memory_order_relaxed) != Armed::kNo) [[unlikely]] {
    count_and_maybe_die(name);
  }
}

long crash_point_count(const char* name) noexcept {
  MutexLock lock(state.mutex);
  if (std::strcmp(name, "*") == 0) {
    return state.total;
  }
  for (std::size_t i = 0; i < kNamesMax && state.names[i] != nullptr; ++i) {
    if (std::strcmp(state.names[i], name) == 0) {
      return state.counts[i];
    }
  }
  return 0;
}

void reload_crash_points() noexcept {
  MutexLock lock(state.mutex);
  read_environment();
}

}  // namespace plimsoll
