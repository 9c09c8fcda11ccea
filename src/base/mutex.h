// SPDX-License-Identifier: Apache-2.0
//
// Mutex, MutexLock and CondVar: the standard ones, annotated for clang's -Wthread-safety.
//
// libstdc++ does not annotate std::mutex, so a member could not be declared as guarded by one.
// Every lock of the library and its rank is listed in docs/CONCURRENCY.md.
//
// Threads: that is what it is for.   Memory: as std::mutex; nothing is allocated.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define PLIMSOLL_ANNOTATE(x) __attribute__((x))
#else
#define PLIMSOLL_ANNOTATE(x)
#endif
#define PLIMSOLL_GUARDED_BY(x) PLIMSOLL_ANNOTATE(guarded_by(x))
#define PLIMSOLL_REQUIRES(...) PLIMSOLL_ANNOTATE(requires_capability(__VA_ARGS__))
#define PLIMSOLL_EXCLUDES(...) PLIMSOLL_ANNOTATE(locks_excluded(__VA_ARGS__))

namespace plimsoll {

class PLIMSOLL_ANNOTATE(capability("mutex")) Mutex {
 public:
  void lock() PLIMSOLL_ANNOTATE(acquire_capability()) { native_.lock(); }
  void unlock() PLIMSOLL_ANNOTATE(release_capability()) { native_.unlock(); }

 private:
  friend class CondVar;
  std::mutex native_;
};

/// Holds a Mutex for a scope. unlock() and lock() let a caller step outside it to call out.
class PLIMSOLL_ANNOTATE(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) PLIMSOLL_ANNOTATE(acquire_capability(mutex)) : mutex_(mutex) {
    mutex_.lock();
  }
  ~MutexLock() PLIMSOLL_ANNOTATE(release_capability()) {
    if (held_) {
      mutex_.unlock();
    }
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void unlock() PLIMSOLL_ANNOTATE(release_capability()) {
    held_ = false;
    mutex_.unlock();
  }
  void lock() PLIMSOLL_ANNOTATE(acquire_capability()) {
    mutex_.lock();
    held_ = true;
  }

 private:
  Mutex& mutex_;
  bool held_{true};
};

class CondVar {
 public:
  /// Waits for a notification; may wake without one. Requires: `mutex` is held.
  void wait(Mutex& mutex) PLIMSOLL_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.native_, std::adopt_lock);
    native_.wait(lock);
    lock.release();
  }
  /// As wait(), but no longer than until `deadline`. False: it has passed.
  bool wait_until(Mutex& mutex, std::chrono::steady_clock::time_point deadline)
      PLIMSOLL_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.native_, std::adopt_lock);
    const bool in_time = native_.wait_until(lock, deadline) == std::cv_status::no_timeout;
    lock.release();
    return in_time;
  }
  void notify_one() noexcept { native_.notify_one(); }
  void notify_all() noexcept { native_.notify_all(); }

 private:
  std::condition_variable native_;
};

}  // namespace plimsoll
