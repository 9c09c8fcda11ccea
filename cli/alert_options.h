// SPDX-License-Identifier: Apache-2.0
//
// The options of alerts, which `run` and `watch` have.
//
// Threads: single-owner.   Memory: a few strings.
#pragma once

#include <cstdint>
#include <string>

#include <CLI/CLI.hpp>

#include "plimsoll/result.h"
#include "watch/alerts.h"

namespace plimsoll {

struct AlertTexts {
  std::string size{};
  std::string file{};
  std::string command{};
  std::string signals{};
  std::string reserve{};
};

/// Adds --alert, --alert-file, --alert-command, --signal and --reserve. `whom` gets the signal.
void add_alert_options(CLI::App& command, AlertTexts& texts, const std::string& whom);

/// Errors: kInvalidArgument naming the option.
[[nodiscard]] Result<AlertOptions> parse_alerts(const AlertTexts& texts);

/// What --alert says, in bytes; 0: it was not given. Errors: as parse_alerts().
[[nodiscard]] Result<std::int64_t> parse_alert_size(const AlertTexts& texts);

/// "holds 41.2 GiB, more than 40.0 GiB".
[[nodiscard]] std::string size_text(std::int64_t held_bytes, std::int64_t alert_bytes);

/// What the helps of both say of them.
inline constexpr const char* kAlertsHelp =
    R"(Alerts are of the least bound: the limit, a cgroup's, or what the machine has. They are
raised when less than 15 % of it is left, when less than 5 % or the reserve is left or soon will be
(then the signal is sent, if there is one), for a leak, and when more is held than --alert says.
The file gets a line of JSON each, 2 MiB at most (FILE and FILE.1). The command runs by `sh -c` with
the line on its standard input, one at a time, for at most 10 seconds, and at most every 30 seconds
except when it is time to act.)";

}  // namespace plimsoll
