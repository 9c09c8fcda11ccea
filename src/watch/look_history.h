// SPDX-License-Identifier: Apache-2.0
//
// LookHistory: the looks of a run, kept in one file of fixed size, for who asks how it ended.
//
// Written look by look into slots of their own, each with a checksum: whoever is killed between
// two looks, or within one, leaves all looks but that one. Every fourth look is kept four times as
// long, every sixteenth sixteen times, …: the newest kSlots / 3 × 4 looks are all there, and of
// those before fewer the older they are, down to one of 16,384. At a look a second that reaches
// back for 24 days. Format: docs/formats/look_history.md.
//
// Threads: single-owner; a reader may read while another process writes.
// Memory:  one record; a reader has kBytes. On disk kBytes, taken at the start.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "os/file.h"
#include "plimsoll/result.h"
#include "watch/owners.h"
#include "watch/trend.h"

namespace plimsoll {

/// The phase of a look that a run takes after its last step, when its workers have ended.
inline constexpr const char* kEndingPhase = "ending";

/// One look, as it is kept: bytes to the KiB, names cut to 15 characters.
struct KeptLook {
  static constexpr std::size_t kProcessesMost = 4;
  struct Process {
    int pid{0};
    std::string name{};
    std::int64_t bytes{0};
  };
  std::int64_t number{0};  ///< Counts on in all lives of a run; given by add().
  std::int32_t life{0};    ///< Which start of the program saw it; given by add().
  double time{0};          ///< Seconds since 1970.
  std::int64_t step{0};    ///< Of a command that tells none: seconds since it began.
  std::int32_t epoch{0};
  double loss{0};
  double rows_per_second{0};
  std::int64_t limit_bytes{0};                     ///< 0: none.
  std::int64_t held_bytes{0};                      ///< Of the tree, anonymous and shared memory.
  std::array<std::int64_t, kOwnerCount> owners{};  ///< −1: not known apart.
  std::string phase{};                             ///< "train", "evaluating", or one of the loop's.
  Course course{Course::kTooShort};                ///< The verdict at this look, …
  Owner owner{Owner::kHeap};                       ///< … whose it is, …
  double bytes_per_unit{0};                        ///< … and by how much it grows, of a leak.
  std::int64_t cgroup_oom_kills{0};                ///< In the program's own cgroup so far.
  std::int64_t machine_oom_kills{0};               ///< On the machine since it started.
  std::int64_t booted{0};                          ///< When that was, in seconds since 1970.
  std::vector<Process> largest{};                  ///< Largest first, up to kProcessesMost.
};

/// One start of the program.
struct KeptLife {
  std::int32_t number{0};  ///< From 1; given by open().
  int pid{0};
  double began{0};        ///< Seconds since 1970.
  bool steps{true};       ///< KeptLook::step counts steps; false: seconds.
  std::string cgroup{};   ///< Folder of the memory cgroup that it is in; "": none.
  std::string command{};  ///< Cut to 900 bytes.
};

class LookHistory {
 public:
  static constexpr std::int64_t kBytes = 256 << 10;
  static constexpr std::int64_t kLevels = 8;
  static constexpr std::int64_t kSlots = 126;  ///< Of a level.
  static constexpr const char* kFile = "looks.bin";

  /// Goes on with the file, or makes it where there is none or one that is no history.
  /// Errors: kIo.
  static Result<LookHistory> open(const std::filesystem::path& path, KeptLife life);

  /// Keeps a look; number and life are its own. An error leaves the other looks as they are.
  /// Errors: kIo.
  Result<void> add(KeptLook look);

  /// Everything that is kept: looks by number, and the newest life.
  struct Kept {
    KeptLife life{};
    std::vector<KeptLook> looks{};
  };
  /// What is damaged or half-written is left out. Errors: kNotFound; kCorrupt when it is no
  /// history.
  static Result<Kept> read(const std::filesystem::path& path);

 private:
  LookHistory(File file, std::int32_t life, std::int64_t next) noexcept
      : file_(std::move(file)), life_(life), next_(next) {}
  File file_;
  std::int32_t life_;
  std::int64_t next_;  // Number of the next look.
};

/// When the machine started, in seconds since 1970; 0 where the kernel does not tell.
[[nodiscard]] std::int64_t boot_seconds();

}  // namespace plimsoll
