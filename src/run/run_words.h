// SPDX-License-Identifier: Apache-2.0
//
// RunFolder::Words: the files that a run tells of itself with, and what a full disk keeps from
// them.
//
// Nothing in them is needed to go on, so a full disk ends no run by them: events wait here, in
// their order, and are written when there is room; a status is written over the one before it,
// which takes no room, or left out.
//
// Threads: thread-safe. The lock is held while a line or a status is written: by the thread that
//          trains, and by a write that begins or ends to wait for room.
// Memory:  kKeptMost of events; what comes then is counted and left out.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

#include "base/mutex.h"
#include "os/fork.h"
#include "run/run_folder.h"

namespace plimsoll {

struct RunFolder::Words {
  static constexpr std::size_t kKeptMost = 256 << 10;

  explicit Words(std::filesystem::path run) : root(std::move(run)) {}

  /// Appends a line to events.jsonl, after those that wait.
  Result<void> append(std::string_view line) PLIMSOLL_REQUIRES(mutex);
  /// Writes what waits, as far as there is room.
  Result<void> flush() PLIMSOLL_REQUIRES(mutex);
  /// Replaces status.json.
  Result<void> put() PLIMSOLL_REQUIRES(mutex);
  /// A write waits for room now; "": none does any more.
  void wait_for_room(const std::string& what);
  /// When the folder is closed: what waits is written if it can be.
  void close() noexcept;

  const std::filesystem::path root;
  ForkMark mark{};
  Mutex mutex;
  OwnDescriptor events PLIMSOLL_GUARDED_BY(mutex);  // Of events.jsonl, O_APPEND.
  std::string kept PLIMSOLL_GUARDED_BY(mutex);      // Events that found no room.
  std::int64_t left_out PLIMSOLL_GUARDED_BY(mutex){0};
  RunStatus status PLIMSOLL_GUARDED_BY(mutex){};
  std::string waits PLIMSOLL_GUARDED_BY(mutex);  // For room; "": nothing does.
  std::int64_t status_written_ms PLIMSOLL_GUARDED_BY(mutex){0};
};

}  // namespace plimsoll
