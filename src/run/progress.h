// SPDX-License-Identifier: Apache-2.0
//
// Progress: a live bar on a terminal, plain lines at a bounded rate elsewhere. Always to stderr.
//
//   epoch 3/30 ▕██████▏ step 410/1200  loss 4.8127  31,204 rows/s  02:10 left
//   memory ▕██████▏ rows 64.0 MiB, features 32.0 MiB … resident 512.3 of 768.0 MiB
//
// Threads: single-owner.   Memory: one string of a few hundred bytes, reused.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#include "run/run_folder.h"

namespace plimsoll {

struct ProgressOptions {
  std::FILE* stream{stderr};
  int terminal{-1};            ///< 1: a terminal; 0: not; −1: ask the stream.
  int columns{0};              ///< Width; 0: ask the terminal.
  double live_seconds{0.1};    ///< Least time between redraws of the bar.
  double plain_seconds{10.0};  ///< Least time between plain lines.
  bool quiet{false};           ///< Prints nothing but text().
};

class Progress {
 public:
  explicit Progress(const ProgressOptions& options = {});
  ~Progress();  ///< Leaves the cursor on a fresh line.
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Shows where the run is; drops updates that come too fast, unless `force`. `epoch_fraction` is
  /// the part of the current epoch that is done.
  void update(const RunStatus& status, double epoch_fraction, bool force = false);

  /// Prints text (several lines are fine) above the bar, or plainly.
  void text(std::string_view message);

  /// Removes the bar; later updates bring it back.
  void clear();

  [[nodiscard]] bool live() const noexcept { return live_; }

 private:
  ProgressOptions options_;
  bool live_{false};
  int lines_shown_{0};
  double last_seconds_{-1e9};
  std::string buffer_{};
};

/// Progress of work that has an amount and no steps: "synth   42 %  00:10 left".
class WorkMeter {
 public:
  explicit WorkMeter(std::string label, const ProgressOptions& options = {});
  ~WorkMeter();  ///< Leaves the cursor on a fresh line.
  WorkMeter(const WorkMeter&) = delete;
  WorkMeter& operator=(const WorkMeter&) = delete;

  void update(std::int64_t done, std::int64_t total);

 private:
  std::string label_;
  ProgressOptions options_;
  bool live_{false};
  bool shown_{false};
  double began_seconds_{0.0};
  double last_seconds_{0.0};
};

/// "4.8127"; "-" where there is none, or it is no number.
[[nodiscard]] std::string loss_text(double loss);
/// The two lines of the bar, at most `columns` wide; for Progress and its test.
[[nodiscard]] std::string draw_progress(const RunStatus& status, double epoch_fraction,
                                        int columns);
/// One plain line.
[[nodiscard]] std::string plain_progress(const RunStatus& status);

/// "02:10", "1:02:10", "3 d 04 h".
[[nodiscard]] std::string format_duration(double seconds);

/// "31,204".
[[nodiscard]] std::string format_count(std::int64_t n);

}  // namespace plimsoll
