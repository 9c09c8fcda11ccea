// SPDX-License-Identifier: Apache-2.0
#include "run/ended_command.h"

#include <chrono>

#include <nlohmann/json.hpp>

#include "os/file.h"
#include "run/json_values.h"

namespace plimsoll {

std::string ended_json(const GuardReport& report, const Verdict& verdict,
                       const GuardOptions& options, std::int64_t restarts) {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  return nlohmann::ordered_json{{"command", options.command},
                                {"time", now.count()},
                                {"ending", ending_name(verdict.ending)},
                                {"status", report.status},
                                {"seconds", report.seconds},
                                {"limit_bytes", options.limit_bytes},
                                {"peak_bytes", report.peak_bytes()},
                                {"process_peak_bytes", report.process_peak_bytes},
                                {"charged_peak_bytes", report.charged_peak_bytes},
                                {"seen_peak_bytes", report.peak.bytes},
                                {"grown_bytes", report.growth.bytes},
                                {"grown_seconds", report.growth.seconds},
                                {"stalled_seconds", report.stalled_seconds},
                                {"major_faults", report.major_faults},
                                {"in_cgroup", report.in_cgroup},
                                {"oom_kills", report.oom_kills},
                                {"killed", report.killed},
                                {"killer_limit_bytes", report.killer_limit_bytes},
                                {"machine_oom_kills", report.machine_oom_kills},
                                {"asked", report.asked},
                                {"left_behind", report.left_behind},
                                {"restarts", restarts},
                                {"summary", verdict.summary},
                                {"advice", verdict.advice}}
      .dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

Result<void> write_ended(const std::filesystem::path& folder, const std::string& json) {
  return replace_file(folder / EndedCommand::kFile, json + "\n", Durable::kNo);
}

std::optional<EndedCommand> read_ended(const std::filesystem::path& folder) {
  const auto text = read_small_file(folder / EndedCommand::kFile);
  if (!text) {
    return std::nullopt;
  }
  const auto json = json_object(*text);
  if (!json.contains("ending")) {
    return std::nullopt;
  }
  const auto texts = [&](const char* key) {
    std::vector<std::string> found;
    const auto at = json.find(key);
    for (std::size_t k = 0; at != json.end() && at->is_array() && k < at->size(); ++k) {
      if (at->at(k).is_string()) {
        found.push_back(at->at(k).get<std::string>());
      }
    }
    return found;
  };
  const auto word = [&](const char* key) {
    const auto at = json.find(key);
    return at != json.end() && at->is_string() ? at->get<std::string>() : std::string();
  };
  const auto integer = [&](const char* key) {
    const auto at = json.find(key);
    return at != json.end() && at->is_number_integer() ? at->get<std::int64_t>() : 0;
  };
  const auto real = [&](const char* key) {
    const auto at = json.find(key);
    return at != json.end() && at->is_number() ? at->get<double>() : 0.0;
  };
  const auto asked = json.find("asked");
  return EndedCommand{.command = texts("command"),
                      .ending = word("ending"),
                      .status = static_cast<int>(integer("status")),
                      .time = real("time"),
                      .seconds = real("seconds"),
                      .limit_bytes = integer("limit_bytes"),
                      .peak_bytes = integer("peak_bytes"),
                      .oom_kills = integer("oom_kills"),
                      .killer_limit_bytes = integer("killer_limit_bytes"),
                      .machine_oom_kills = integer("machine_oom_kills"),
                      .killed = word("killed"),
                      .asked = asked != json.end() && asked->is_boolean() && asked->get<bool>(),
                      .summary = word("summary"),
                      .advice = texts("advice")};
}

}  // namespace plimsoll
