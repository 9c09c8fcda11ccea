// SPDX-License-Identifier: Apache-2.0
#include "cli/alert_options.h"

#include <utility>

#include "plimsoll/bytes.h"
#include "plimsoll/limits.h"

namespace plimsoll {

void add_alert_options(CLI::App& command, AlertTexts& texts, const std::string& whom) {
  command.add_option("--alert", texts.size,
                     "Size above which a line says how much " + whom + " holds: 40GiB, 50%");
  command.add_option("--alert-file", texts.file, "File for alerts: lines of JSON, 2 MiB at most");
  command.add_option("--alert-command", texts.command,
                     "Shell command for alerts, which reads one from its standard input");
  command.add_option("--signal", texts.signals,
                     "Signal to " + whom +
                         " before memory runs out, and a second one 10 seconds later: TERM,KILL");
  command.add_option("--reserve", texts.reserve,
                     "Size that is left when the signal is sent, at least (32MiB)");
}

Result<AlertOptions> parse_alerts(const AlertTexts& texts) {
  AlertOptions options{.file = texts.file, .command = texts.command};
  if (!texts.signals.empty()) {
    auto signals = parse_signals(texts.signals);
    if (!signals) {
      return fail(ErrorCode::kInvalidArgument, "--signal: " + signals.error().to_string());
    }
    options.signals = std::move(*signals);
  }
  if (!texts.reserve.empty()) {
    auto bytes = parse_bytes(texts.reserve);
    if (!bytes) {
      return fail(ErrorCode::kInvalidArgument, "--reserve: " + bytes.error().to_string());
    }
    options.reserve_bytes = *bytes;
  }
  return options;
}

Result<std::int64_t> parse_alert_size(const AlertTexts& texts) {
  if (texts.size.empty()) {
    return 0;
  }
  const auto found = find_limit({.user_limit = texts.size, .user_source = "--alert"});
  if (!found) {
    return tl::unexpected(found.error());
  }
  return found->candidates.front().bytes;  // A share is one of the machine.
}

std::string size_text(std::int64_t held_bytes, std::int64_t alert_bytes) {
  return "holds " + format_bytes(held_bytes) + ", more than " + format_bytes(alert_bytes);
}

}  // namespace plimsoll
