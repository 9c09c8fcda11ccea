// SPDX-License-Identifier: Apache-2.0
//
// RunControl: how a run is asked to stop or pause, by signal or by file.
//
// SIGINT, SIGTERM and SIGUSR1 set a flag; the trainer looks at it between steps, together with
// RUN/.stop and RUN/.pause. A second SIGINT ends the process at once.
//
// Threads: a RunControl is for one thread at a time; the signal handler touches atomics only.
// Memory:  none beyond the paths.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>

#include "plimsoll/result.h"

namespace plimsoll {

enum class Request : std::uint8_t { kNone, kStop, kPause };

class RunControl;

/// Holds the signal handlers while alive and puts the old ones back. One at a time per process.
class StopSignals {
 public:
  /// `run`: its requests count in asked(), too. `keeps`: a signal that came before, while another
  /// StopSignals was there, still counts.
  explicit StopSignals(RunControl* run = nullptr, bool keeps = false);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// Whether one is: for any thread.
  [[nodiscard]] static bool there() noexcept;

  /// Number of the signal that asked to stop, or 0.
  [[nodiscard]] static int requested() noexcept;
  static void clear() noexcept;

  /// Whether the process is asked to stop, by a signal or by `plimsoll stop`; false while no
  /// StopSignals is there. For the thread that trains: work that leaves no trace (an evaluation, a
  /// plan) asks between its parts, and returns given_up() then.
  [[nodiscard]] static bool asked() noexcept;
  /// Behind such work, with the old handlers back: hands the signal on to them, once.
  static void pass_on() noexcept;
};

/// The error of work that ended as StopSignals::asked() said so: "WHAT was given up, as asked".
[[nodiscard]] tl::unexpected<Error> given_up(const char* what);
[[nodiscard]] bool was_given_up(const Error& error) noexcept;

class RunControl {
 public:
  explicit RunControl(const std::filesystem::path& run);

  /// What is asked for now. Costs two stat() calls; call it once per step.
  [[nodiscard]] Request poll() noexcept;

  /// Who asked for the stop: "SIGINT", "SIGTERM", "SIGUSR1", ".stop"; "" for nobody.
  [[nodiscard]] const char* reason() const noexcept { return reason_; }

  /// Waits while .pause is there; returns early when a stop is asked for. `tick` runs about every
  /// half second (status, progress).
  Request wait_while_paused(const std::function<void()>& tick);

 private:
  std::filesystem::path stop_;
  std::filesystem::path pause_;
  const char* reason_{""};
};

/// What `plimsoll stop|pause|continue RUN` do: leave or remove the file that poll() looks for.
/// False: no process trains there, and nothing was left behind.
/// Errors: kNotFound (no run there), kIo.
Result<bool> ask_to_stop(const std::filesystem::path& run);
Result<bool> ask_to_pause(const std::filesystem::path& run);
Result<bool> ask_to_continue(const std::filesystem::path& run);

}  // namespace plimsoll
