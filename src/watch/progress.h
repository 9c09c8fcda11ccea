// SPDX-License-Identifier: Apache-2.0
//
// How far a command has come, told by it to whoever starts it again: `plimsoll run --restarts`.
//
// The one who starts it holds a ProgressNote and names it in the environment of the command; a run
// in the command, or in a process of it, writes its last committed step there. Nothing is kept on
// disk.
//
// Threads: tell_progress() any; a ProgressNote is single-owner.
// Memory:  one note of kBytesMost.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "plimsoll/result.h"

namespace plimsoll {

/// Replaces what the note says by `text`, cut to ProgressNote::kBytesMost. Does nothing where
/// nobody asked, or who asked is gone.
void tell_progress(const std::string& text) noexcept;

/// Whether somebody around this process asked to be told, and what it was told last.
[[nodiscard]] bool is_progress_asked() noexcept;
[[nodiscard]] std::string told_progress();

class ProgressNote {
 public:
  static constexpr std::size_t kBytesMost = 4096;
  /// The variable of the environment that names the note.
  static constexpr const char* kVariable = "PLIMSOLL_PROGRESS";

  /// Makes an empty note and names it in this process's environment, which its children inherit. A
  /// note that was named there before is told what read() finds.
  /// Errors: kIo. Requires: no other thread reads the environment.
  static Result<ProgressNote> create();
  ProgressNote(ProgressNote&& other) noexcept;
  ProgressNote& operator=(ProgressNote&&) = delete;
  /// Takes its name out of the environment; what was named there before is named again.
  /// Requires: as create().
  ~ProgressNote();

  /// What was told last; "" when nothing was. Who asked around this one hears it too.
  [[nodiscard]] std::string read() const;

 private:
  explicit ProgressNote(int descriptor, std::string around) noexcept
      : descriptor_(descriptor), around_(std::move(around)) {}
  int descriptor_;
  std::string around_;  // The note of a guard around this one; "": none.
};

}  // namespace plimsoll
