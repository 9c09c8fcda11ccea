// SPDX-License-Identifier: Apache-2.0
//
// Recorder: a thread that keeps the looks of a run in RUN/looks.bin, for `plimsoll why` and
// `plimsoll report`.
//
// Once a second, four times a second near the limit. It measures nothing that the governor does
// not: what children hold is as of the governor's last look; of itself the process reads resident
// sizes, and of each child the same to tell which is which.
//
// Reading order: watch/look_history.h, watch/tree_record.h, this file.
//
// Threads: note() and phase() any; one thread of its own (pl-record). In a forked child it does
//          nothing.
// Memory:  that of a Watch.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "os/fork.h"
#include "plimsoll/governor.h"
#include "plimsoll/result.h"
#include "run/run_folder.h"
#include "watch/owners.h"
#include "watch/watch.h"

namespace plimsoll {

class Recorder {
 public:
  /// `inside`: what the process says of itself; called from the thread.   Errors: kIo.
  static Result<std::unique_ptr<Recorder>> start(const std::filesystem::path& run,
                                                 Governor governor, std::function<Inside()> inside);
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;
  ~Recorder();  ///< After a last look.

  /// Where the run is, for the looks from now on.
  void note(const RunStatus& status);

  /// A verdict that has changed to a leak, a retention or one that fills up; once, and the newest.
  [[nodiscard]] std::optional<Finding> news();

  /// What its loop does from now on; "": trains. A look is taken of what ends.
  void phase(std::string_view name);

 private:
  struct State;
  explicit Recorder(std::unique_ptr<State> state);
  static void work(State& state);
  static void look(State& state, std::string_view phase);

  std::unique_ptr<State> state_;  // Left as it is in a forked child, where its thread is not.
  ForkMark mark_{};
};

}  // namespace plimsoll
