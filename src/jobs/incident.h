// SPDX-License-Identifier: Apache-2.0
//
// Incident rules: which end of a job is an incident, by evidence, and what follows from it.
//
//   [[rule]]
//   name = "CUDA is out of memory"
//   pattern = "CUDA out of memory"    # of a line that the job printed: an extended regular
//   then = "fail"                     # expression of whole words; case counts
//
//   [[rule]]
//   name = "our licence server is away"
//   status = [75, 69]                 # exit statuses, or 128 + a signal
//   then = "retry"
//
//   [[rule]]
//   name = "killed for memory"
//   event = ["killed_for_limit"]      # as `plimsoll run --json` says how it ended, or "timeout"
//   then = "note"
//
// A rule has one of pattern, status and event. Patterns are of whole words, so that OOM is not
// found in "classroom" and "room". A kill for memory leaves no line to match: the kernel's counters
// tell of it as an event.
//
// Threads: thread-compatible.
// Memory:  at most kRulesMost rules, and what regcomp() makes of patterns of kPatternMost bytes.
#pragma once

#include <regex.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "jobs/job.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// What follows: nothing but that it is told; another start, within --restarts, whatever the
/// status; no other start.
enum class Consequence : std::uint8_t { kNote, kRetry, kFail };

class IncidentRule {
 public:
  static constexpr std::size_t kPatternMost = 256;

  struct Sources {
    std::string name{};
    Consequence then{Consequence::kNote};
    std::string pattern{};
    std::vector<int> statuses{};
    std::vector<std::string> events{};
  };
  /// Errors: kInvalidArgument, saying what is wrong, without the file.
  static Result<IncidentRule> make(Sources sources);

  [[nodiscard]] const std::string& name() const noexcept { return sources_.name; }
  [[nodiscard]] Consequence then() const noexcept { return sources_.then; }
  [[nodiscard]] bool has_pattern() const noexcept { return compiled_ != nullptr; }
  /// `line`: without a zero byte.
  [[nodiscard]] bool matches_line(const std::string& line) const noexcept;
  /// The evidence: "status 137", "event killed_for_limit"; nothing where it does not match.
  [[nodiscard]] std::optional<std::string> matches_end(int status, std::string_view event) const;

 private:
  Sources sources_{};
  std::shared_ptr<const regex_t> compiled_{};  // Shared, as a regex_t cannot be copied.
};

class IncidentRules {
 public:
  static constexpr std::size_t kRulesMost = 64;
  static constexpr std::int64_t kFileBytesMost = 256 << 10;

  /// Those that are always there: of kills for memory and of time-outs. Those of a file come first.
  static IncidentRules usual();
  /// Errors: kInvalidArgument with file and line; kNotFound; kIo.
  static Result<IncidentRules> read(const std::filesystem::path& file);
  /// `name`: of the file, for errors.
  static Result<IncidentRules> parse(const std::string& name, const std::string& text);

  [[nodiscard]] const std::vector<IncidentRule>& all() const noexcept { return rules_; }

  /// The first rule that matches how a job ended, or a line that it printed.
  /// `lines`: of each rule of all(), what of the output matched; "" for nothing.
  [[nodiscard]] std::optional<Incident> find(int status, std::string_view event,
                                             const std::vector<std::string>& lines) const;

 private:
  std::vector<IncidentRule> rules_{};
};

/// "note", "retry", "fail".
[[nodiscard]] const char* consequence_name(Consequence then) noexcept;

}  // namespace plimsoll
