// SPDX-License-Identifier: Apache-2.0
#include "jobs/job.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kFormat = 1;
constexpr std::array kStateNames{"waiting", "running", "done", "failed", "cancelled"};

// Reads members of a known type; what is missing or of another type makes the record none.
class Members {
 public:
  explicit Members(const Json& object) : object_(object) {}

  template <class T>
  void get(const char* key, T& value) {
    const auto found = object_.find(key);
    if (found == object_.end() || !fits(*found, value)) {
      sound_ = false;
      return;
    }
    value = found->template get<T>();
  }
  [[nodiscard]] bool sound() const noexcept { return sound_; }

 private:
  static bool fits(const Json& found, const std::string& /*as*/) { return found.is_string(); }
  static bool fits(const Json& found, bool /*as*/) { return found.is_boolean(); }
  static bool fits(const Json& found, double /*as*/) { return found.is_number(); }
  static bool fits(const Json& found, std::int64_t /*as*/) {
    return found.is_number_integer() &&
           (!found.is_number_unsigned() || found.get<std::uint64_t>() <= INT64_MAX);
  }
  static bool fits(const Json& found, int /*as*/) {
    return found.is_number_integer() && found >= INT32_MIN && found <= INT32_MAX;
  }
  static bool fits(const Json& found, const std::vector<std::string>& /*as*/) {
    return found.is_array() &&
           std::ranges::all_of(found, [](const Json& one) { return one.is_string(); });
  }

  const Json& object_;
  bool sound_{true};
};

bool read_state(const std::string& name, JobState& state) {
  const auto* const found = std::ranges::find(kStateNames, name);
  state = static_cast<JobState>(found - kStateNames.begin());
  return found != kStateNames.end();
}

bool read_incidents(const Json& object, std::vector<Incident>& incidents) {
  const auto found = object.find("incidents");
  if (found == object.end() || !found->is_array() || found->size() > Job::kIncidentsMost) {
    return false;
  }
  for (const Json& one : *found) {
    if (!one.is_object()) {
      return false;
    }
    Incident incident;
    Members members(one);
    members.get("rule", incident.rule);
    members.get("evidence", incident.evidence);
    members.get("then", incident.then);
    if (!members.sound()) {
      return false;
    }
    incidents.push_back(std::move(incident));
  }
  return true;
}

}  // namespace

const char* job_state_name(JobState state) noexcept {
  return kStateNames[static_cast<std::size_t>(state)];
}

Health health_of(const Job& job) {
  Health health;
  const auto lose = [&](std::int64_t points, std::string reason) {
    health.score = std::max(health.score - static_cast<int>(points), 0);
    health.reasons.push_back(std::move(reason));
  };
  if (job.state == JobState::kFailed) {
    lose(50, "failed");
  }
  if (job.deaths > 0) {
    lose(std::min<std::int64_t>(10 * job.deaths, 40),
         fmt::format("died {} {}", job.deaths, job.deaths == 1 ? "time" : "times"));
  }
  if (!job.incidents.empty()) {
    lose(20, "incident: " + job.incidents.back().rule);
  }
  if (job.limit_bytes > 0 && job.peak_bytes > job.limit_bytes - job.limit_bytes / 20) {
    lose(10, fmt::format("{} its limit: {} at its peak, of {}",
                         job.peak_bytes > job.limit_bytes ? "passed" : "came near",
                         format_bytes(job.peak_bytes), format_bytes(job.limit_bytes)));
  }
  if (job.stalled_seconds > job.seconds / 10) {
    lose(20, fmt::format("waited {:.0f} s for memory", job.stalled_seconds));
  }
  return health;
}

std::string to_json(const Job& job) {
  Json incidents = Json::array();
  for (const Incident& one : job.incidents) {
    incidents.push_back({{"rule", one.rule}, {"evidence", one.evidence}, {"then", one.then}});
  }
  const Json json{{"format", kFormat},
                  {"id", job.id},
                  {"state", job_state_name(job.state)},
                  {"command", job.command},
                  {"directory", job.directory},
                  {"memory_limit", job.memory_limit},
                  {"timeout_seconds", job.timeout_seconds},
                  {"restarts_most", job.restarts.most},
                  {"restarts", job.restarts.done},
                  {"restart_progress", job.restarts.progress},
                  {"cancel", job.cancel},
                  {"starts", job.starts},
                  {"deaths", job.deaths},
                  {"added", job.added},
                  {"not_before", job.not_before},
                  {"started", job.started},
                  {"ended", job.ended},
                  {"guard", job.guard},
                  {"guard_began", job.guard_began},
                  {"progress", job.progress},
                  {"why", job.why},
                  {"ending", job.ending},
                  {"status", job.status},
                  {"seconds", job.seconds},
                  {"limit_bytes", job.limit_bytes},
                  {"peak_bytes", job.peak_bytes},
                  {"stalled_seconds", job.stalled_seconds},
                  {"advice", job.advice},
                  {"incidents", incidents}};
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Result<Job> job_from_json(const std::string& text, const std::string& where) {
  const Json json = Json::parse(text, nullptr, false);
  Job job;
  std::int64_t format = 0;
  std::string state;
  bool sound = json.is_object();
  if (sound) {
    Members members(json);
    members.get("format", format);
    members.get("id", job.id);
    members.get("state", state);
    members.get("command", job.command);
    members.get("directory", job.directory);
    members.get("memory_limit", job.memory_limit);
    members.get("timeout_seconds", job.timeout_seconds);
    members.get("restarts_most", job.restarts.most);
    members.get("restarts", job.restarts.done);
    members.get("restart_progress", job.restarts.progress);
    members.get("cancel", job.cancel);
    members.get("starts", job.starts);
    members.get("deaths", job.deaths);
    members.get("added", job.added);
    members.get("not_before", job.not_before);
    members.get("started", job.started);
    members.get("ended", job.ended);
    members.get("guard", job.guard);
    members.get("guard_began", job.guard_began);
    members.get("progress", job.progress);
    members.get("why", job.why);
    members.get("ending", job.ending);
    members.get("status", job.status);
    members.get("seconds", job.seconds);
    members.get("limit_bytes", job.limit_bytes);
    members.get("peak_bytes", job.peak_bytes);
    members.get("stalled_seconds", job.stalled_seconds);
    members.get("advice", job.advice);
    sound = members.sound() && format == kFormat && read_state(state, job.state) &&
            read_incidents(json, job.incidents) && !job.command.empty() && job.id > 0;
  }
  if (!sound) {
    return fail(ErrorCode::kCorrupt, fmt::format("{}: no job of format {}", where, kFormat),
                "remove the file, and add the job again");
  }
  return job;
}

}  // namespace plimsoll
