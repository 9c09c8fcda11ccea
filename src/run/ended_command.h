// SPDX-License-Identifier: Apache-2.0
//
// EndedCommand: what `plimsoll run` knows of a command that has ended: `--json`, and ending.json in
// the folder of its run.
//
// Threads: pure functions.   Memory: the strings.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "plimsoll/result.h"
#include "watch/guard.h"
#include "watch/verdict.h"

namespace plimsoll {

struct EndedCommand {
  static constexpr const char* kFile = "ending.json";

  std::vector<std::string> command{};
  std::string ending{};  ///< As ending_name() has it.
  int status{0};
  double time{0};  ///< Of its end, in seconds since 1970.
  double seconds{0};
  std::int64_t limit_bytes{0};  ///< 0: none.
  std::int64_t peak_bytes{0};
  std::int64_t oom_kills{0};
  std::int64_t killer_limit_bytes{0};  ///< Of the cgroup around it, where that was the killer.
  std::int64_t machine_oom_kills{0};
  std::string killed{};  ///< As GuardReport has it.
  bool asked{false};
  std::string summary{};
  std::vector<std::string> advice{};
};

/// One line of JSON. `restarts`: how often it was started again.
[[nodiscard]] std::string ended_json(const GuardReport& report, const Verdict& verdict,
                                     const GuardOptions& options, std::int64_t restarts);

/// Leaves the line in a folder.   Errors: kIo.
Result<void> write_ended(const std::filesystem::path& folder, const std::string& json);

/// What is there; nothing where no command has ended, or the file is another's.
[[nodiscard]] std::optional<EndedCommand> read_ended(const std::filesystem::path& folder);

}  // namespace plimsoll
