// SPDX-License-Identifier: Apache-2.0
//
// RoomWait: while one is there, a write below its places that finds the disk full waits for room.
//
// A write that failed for want of room has changed nothing, so the same write again is as good as
// the first: nobody above it hears of a full disk, no file is left half written, and no table is
// poisoned. A sync that fails is another matter, and is not made again.
//
// Reading order: this file, file.cpp.
//
// Threads: any write; a RoomWait is made and destroyed by one. Its lock is held while it tells.
// Memory:  a few strings.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "os/fork.h"

namespace plimsoll {

class RoomWait {
 public:
  struct Hooks {
    std::function<bool()>
        may_wait;                 ///< False: a write fails at once, as nobody could end its wait.
    std::function<bool()> stops;  ///< Whether the program is asked to end.
    /// What is waited for; "": nothing any more. May be empty.
    std::function<void(const std::string& what)> tell;
  };

  /// places: paths, of which those below and those that begin alike are meant.
  RoomWait(std::vector<std::filesystem::path> places, Hooks hooks);
  RoomWait(const RoomWait&) = delete;
  RoomWait& operator=(const RoomWait&) = delete;
  ~RoomWait();  ///< Writes that wait fail.

  /// Whether a write waits.
  [[nodiscard]] bool waits() const;
  /// Waits while one does. False: it was given up, as the program is asked to end.
  bool wait_until_written() const;

  struct State;  // Shared with the writes that wait.

 private:
  std::shared_ptr<State> state_;
  ForkMark mark_{};
};

/// One write's want of room, until it was made or has failed.
class RoomNeed {
 public:
  /// `path` must outlive this.
  explicit RoomNeed(const std::filesystem::path& path) noexcept : path_(path) {}
  RoomNeed(const RoomNeed&) = delete;
  RoomNeed& operator=(const RoomNeed&) = delete;
  ~RoomNeed();

  /// After a write of `bytes` failed with ENOSPC or EDQUOT. True: there may be room, try again.
  /// False: nobody waits there, or the program is asked to end.
  bool wait(std::int64_t bytes);

 private:
  const std::filesystem::path& path_;
  std::shared_ptr<RoomWait::State> state_{};
};

/// Whether `os_errno` says that there is no room.
[[nodiscard]] bool is_full(int os_errno) noexcept;

}  // namespace plimsoll
