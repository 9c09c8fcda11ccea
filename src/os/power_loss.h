// SPDX-License-Identifier: Apache-2.0
//
// PowerLoss: what a power failure may undo, for tests of recovery.
//
// While recording, File tells this ledger of every write, truncation and change of a name before it
// is carried out, and of every sync. What has not been synced may survive a power failure whole, in
// part, or not at all, each sector for itself: strike() picks, and changes the files accordingly.
// Names (files and directories made, removed, renamed, exchanged) become durable when the directory
// that holds them is synced; a directory that goes takes all that is in it along.
// A sync that failed makes nothing durable, and no later sync repairs it (the kernel has marked
// those pages clean). Syncs are not passed on while recording, so a test runs at memory speed.
//
//   record_unsynced({.sector_bytes = 512});
//   … work …
//   strike(unsynced_changes(), choose, {});   // in the crashed process, or on a copy of its files
//
// Threads: thread-safe; one ledger per process.   Memory: the earlier bytes of what is unsynced.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace plimsoll {

/// One change that no sync has made durable yet.
struct UnsyncedChange {
  enum class Kind : std::uint8_t {
    kWrite,
    kResize,
    kCreate,
    kRename,
    kMakeDirectory,
    kRemove,
    kExchange
  };
  Kind kind{Kind::kWrite};
  std::string path{};               ///< At that time; of a rename, the new name. Absolute.
  std::string from{};               ///< Of a rename: the old name. Of an exchange: the other one.
  std::int64_t offset{0};           ///< Of a write.
  std::int64_t size{0};             ///< Of a write.
  std::int64_t file_bytes{0};       ///< How long the file was before.
  std::vector<std::byte> before{};  ///< A write: what was there. A resize: what was cut off. A
                                    ///< removal, a rename: what the file that went held.
  bool replaced{false};             ///< A rename: there was something of the new name.
  bool directory{false};            ///< A removal, a rename: what went was an empty directory.
  bool lost{false};                 ///< A sync of it failed: no later one makes it durable.
};

struct PowerLossOptions {
  std::int64_t sector_bytes{512};  ///< What a disk writes whole or not at all.
};

/// Begins with an empty ledger, or with one that was interrupted; or ends.
void record_unsynced(const PowerLossOptions& options, std::vector<UnsyncedChange> unsynced = {});
void stop_recording_unsynced() noexcept;
[[nodiscard]] bool recording_unsynced() noexcept;

/// What is unsynced now, oldest first.
[[nodiscard]] std::vector<UnsyncedChange> unsynced_changes();

/// Whether the change (its index in the list) survives; of a write, whether its n-th sector does.
using SurvivesFn = std::function<bool(std::size_t change, std::int64_t sector)>;

/// Undoes what does not survive, newest first. A sector that kept a newer write keeps it.
/// `moved`: the same files elsewhere (a copy), by replacing the first path by the second.
void strike(const std::vector<UnsyncedChange>& changes, const SurvivesFn& survives,
            std::int64_t sector_bytes,
            const std::pair<std::filesystem::path, std::filesystem::path>& moved = {});

/// Sectors that a write touches.
[[nodiscard]] std::int64_t sectors_of(const UnsyncedChange& write, std::int64_t sector_bytes);

/// For a process about to die: strikes with `survives` and lets no further change through.
void strike_and_freeze(const SurvivesFn& survives) noexcept;

// ---- For file.cpp and directories.cpp ----

/// Held by File over one change: notes it in the ledger, and lets it go on alone.
class UnsyncedGuard {
 public:
  static UnsyncedGuard of_write(const std::filesystem::path& path, std::int64_t offset,
                                std::size_t bytes);
  static UnsyncedGuard of_resize(const std::filesystem::path& path, std::int64_t bytes);
  static UnsyncedGuard of_create(const std::filesystem::path& path);
  static UnsyncedGuard of_rename(const std::filesystem::path& from,
                                 const std::filesystem::path& to);
  static UnsyncedGuard of_exchange(const std::filesystem::path& one,
                                   const std::filesystem::path& other);
  static UnsyncedGuard of_make_directory(const std::filesystem::path& path);
  static UnsyncedGuard of_remove(const std::filesystem::path& path);

 private:
  UnsyncedGuard();
  std::unique_lock<std::mutex> lock_;  // Of the ledger; empty when nothing is recorded.
};

/// A file's data has been synced, or failed to be; or a directory's names.
void note_sync(const std::filesystem::path& path, bool failed) noexcept;
void note_directory_sync(const std::filesystem::path& directory) noexcept;

}  // namespace plimsoll
