// SPDX-License-Identifier: Apache-2.0
//
// What a fork() leaves a child: which objects are its own, and which descriptors it must not keep.
//
// A forked child has the memory of its parent and none of its threads: an object with threads,
// locks or files of its own cannot go on there, and two processes that go on with one would undo
// each other's work. Such an object holds a ForkMark, and refuses in a child.
// A lock of an open file description lasts until every descriptor of it is closed, a child's copy
// too: an OwnDescriptor is closed in a child, so that the lock ends with the process that took it.
//
// Threads: any; an OwnDescriptor has one owner at a time.   Memory: an OwnDescriptor is 24 bytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>

#include "plimsoll/result.h"

namespace plimsoll {

/// How many forks lie between this process and the one that loaded the library. A relaxed load.
[[nodiscard]] std::uint64_t fork_generation() noexcept;

/// Remembers the process that made it.
class ForkMark {
 public:
  ForkMark() noexcept {}  // Not defaulted: clang 14 would have no const one made by it.
  /// Whether this process is a forked child (or its child) of the one that made the mark.
  [[nodiscard]] bool forked() const noexcept { return generation_ != fork_generation(); }
  /// Errors: kInvalidArgument in a forked child: `call`() of what was `opened`.
  [[nodiscard]] Result<void> check(const std::filesystem::path& opened, const char* call,
                                   const char* advice = "open it in this process") const;

 private:
  std::uint64_t generation_{fork_generation()};
};

/// Destroys what `held` owns; in a forked child of the process that made `mark` leaves it as it is,
/// as its threads cannot be joined there and its files are another process's.
template <class T>
void destroy_if_own(std::unique_ptr<T>& held, const ForkMark& mark) noexcept {
  if (mark.forked()) {
    static_cast<void>(held.release());
  }
  held.reset();
}

/// A descriptor that a forked child does not inherit: there get() is −1.
class OwnDescriptor {
 public:
  /// open(2), made again when interrupted, with O_CLOEXEC. get() is −1 and errno set on an error.
  static OwnDescriptor open(const std::filesystem::path& path, int flags) noexcept;
  /// memfd_create(2), closed by exec. get() is −1 and errno set on an error.
  static OwnDescriptor in_memory(const char* name) noexcept;

  OwnDescriptor() noexcept = default;
  OwnDescriptor(OwnDescriptor&& other) noexcept;
  OwnDescriptor& operator=(OwnDescriptor&& other) noexcept;
  OwnDescriptor(const OwnDescriptor&) = delete;
  OwnDescriptor& operator=(const OwnDescriptor&) = delete;
  ~OwnDescriptor();

  [[nodiscard]] int get() const noexcept { return descriptor_; }

 private:
  friend void close_own_descriptors_in_child() noexcept;  // fork.cpp, for pthread_atfork().
  void take(OwnDescriptor& other) noexcept;
  void close() noexcept;
  void enlist() noexcept;
  void delist() noexcept;

  int descriptor_{-1};
  // All that are open make a list, which a child walks: nothing may be allocated there.
  OwnDescriptor* before_{nullptr};
  OwnDescriptor* after_{nullptr};
};

}  // namespace plimsoll
