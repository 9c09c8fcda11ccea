// SPDX-License-Identifier: Apache-2.0
#include "run/page_events.h"

#include <algorithm>
#include <fstream>
#include <string_view>

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "plimsoll/bytes.h"
#include "run/json_values.h"
#include "run/run_folder.h"

namespace plimsoll {
namespace {

using EventJson = nlohmann::ordered_json;

constexpr std::string_view kStepEvent = R"("event":"step")";

double real_in(const EventJson& event, const char* key) {
  const auto at = event.find(key);
  return at != event.end() && at->is_number() ? at->get<double>() : 0.0;
}

std::int64_t integer_in(const EventJson& event, const char* key) {
  const auto at = event.find(key);
  return at != event.end() && at->is_number_integer() ? at->get<std::int64_t>() : 0;
}

std::string text_in(const EventJson& event, const char* key) {
  const auto at = event.find(key);
  return at != event.end() && at->is_string() ? at->get<std::string>() : std::string();
}

void keep_newest(std::vector<PageEvents::Line>& lines, const EventJson& event, std::string text) {
  if (lines.size() == PageEvents::kLinesMost) {
    lines.erase(lines.begin());
  }
  lines.push_back(
      {.time = real_in(event, "time"), .step = integer_in(event, "step"), .text = std::move(text)});
}

std::string limit_text(const EventJson& event) {
  return event.contains("message") ? fmt::format("{} was asked for, and refused: {}",
                                                 text_in(event, "asked"), text_in(event, "message"))
                                   : fmt::format("{}{}{}, was {}", text_in(event, "device"),
                                                 event.contains("device") ? ": " : "",
                                                 format_bytes(integer_in(event, "limit_bytes")),
                                                 format_bytes(integer_in(event, "before_bytes")));
}

// "cuda/reserved_bytes" and the context of the same device.
void take_devices(PageEvents& found, const EventJson& event) {
  constexpr std::string_view kReserved = "/reserved_bytes";
  for (const auto& [key, value] : event.items()) {
    if (!key.ends_with(kReserved) || !value.is_number_integer()) {
      continue;
    }
    const std::string name = key.substr(0, key.size() - kReserved.size());
    if (found.devices.contains(name) || found.devices.size() < PageEvents::kDevicesMost) {
      const std::int64_t context = integer_in(event, (name + "/context_bytes").c_str());
      found.devices[name].add(real_in(event, "time"),
                              static_cast<double>(value.get<std::int64_t>() + context));
    }
  }
}

void take_eviction(PageEvents& found, const EventJson& event) {
  ++found.eviction_count;
  found.eviction_times.add(real_in(event, "time"), real_in(event, "given_bytes"));
  const std::pair key(text_in(event, "owner"), text_in(event, "move"));
  if (found.evictions.contains(key) || found.evictions.size() < PageEvents::kOwnersMost) {
    PageEvents::Given& given = found.evictions[key];
    ++given.times;
    given.bytes += integer_in(event, "given_bytes");
  }
}

void take(PageEvents& found, const EventJson& event) {
  const std::string name = text_in(event, "event");
  const double time = real_in(event, "time");
  if (name == "step") {
    if (const auto loss = event.find("loss"); loss != event.end() && loss->is_number()) {
      found.loss.add(time, loss->get<double>());
    }
  } else if (name == "commit") {
    ++found.commit_count;
    found.commits.add(time, real_in(event, "step"));
    found.commit_seconds_most = std::max(found.commit_seconds_most, real_in(event, "seconds"));
    found.stall_seconds += event.contains("stall_seconds") ? real_in(event, "stall_seconds")
                                                           : real_in(event, "seconds");
  } else if (name == "refusal") {
    ++found.refusal_count;
    const std::string why = text_in(event, "message");
    keep_newest(found.refusals, event, why.empty() ? text_in(event, "refusal") : why);
  } else if (name == "evict") {
    take_eviction(found, event);
  } else if (name == "reclaim") {
    ++found.reclaims;
  } else if (name == "cleanup") {
    ++found.cleanups;
    found.cleanup_bytes += std::max<std::int64_t>(integer_in(event, "freed_bytes"), 0);
  } else if (name == "device") {
    take_devices(found, event);
  } else if (name == "limit") {
    keep_newest(found.limits, event, limit_text(event));
  } else if (name == "verdict") {
    std::string text = text_in(event, "text");
    for (const char* key : {"site", "holder"}) {
      const std::string more = text_in(event, key);
      text += more.empty() ? "" : fmt::format("; {} {}", key, more);
    }
    keep_newest(found.verdicts, event, std::move(text));
  } else if (name == "warning") {
    keep_newest(found.warnings, event, text_in(event, "message"));
  }
}

}  // namespace

void ThinnedSeries::add(double time, double value) {
  if (seen_++ % every_ != 0) {
    return;
  }
  if (points_.size() == kPointsMost) {
    for (std::size_t at = 0; 2 * at < points_.size(); ++at) {
      points_[at] = points_[2 * at];
    }
    points_.resize(kPointsMost / 2);
    every_ *= 2;
  }
  points_.emplace_back(time, value);
}

Result<PageEvents> read_page_events(const std::filesystem::path& run) {
  PageEvents found;
  std::ifstream file(run / "events.jsonl");
  std::string line;
  std::string buffer(64 << 10, '\0');
  bool whole = true;  // Of the line that is being read: a longer one is no event of ours.
  while (file) {
    file.read(buffer.data(), std::ssize(buffer));
    std::string_view part(buffer.data(), static_cast<std::size_t>(file.gcount()));
    while (!part.empty()) {
      const std::size_t end = part.find('\n');
      whole = whole && line.size() + std::min(end, part.size()) <= kEventBytesMax;
      if (whole) {
        line += part.substr(0, end);
      }
      if (end == std::string_view::npos) {
        break;
      }
      if (whole && !found.loss.wants() && line.find(kStepEvent) != std::string::npos) {
        found.loss.skip();  // Most lines of a long run, and most of them are not drawn.
      } else if (whole) {
        take(found, json_object(line));
      }
      line.clear();
      whole = true;
      part.remove_prefix(end + 1);
    }
  }
  if (file.bad()) {
    return fail(ErrorCode::kIo, (run / "events.jsonl").string() + ": cannot be read");
  }
  return found;
}

}  // namespace plimsoll
