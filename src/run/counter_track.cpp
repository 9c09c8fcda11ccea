// SPDX-License-Identifier: Apache-2.0
#include "run/counter_track.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "os/file.h"
#include "watch/look_history.h"

namespace plimsoll {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kMicroseconds = 1e6;

Json counter(const KeptLook& look, int pid, const char* name, Json values) {
  return {{"ph", "C"},
          {"ts", std::llround(look.time * kMicroseconds)},
          {"pid", pid},
          {"name", name},
          {"args", std::move(values)}};
}

void add_counters(Json& events, const KeptLook& look, int pid) {
  Json owners = Json::object();
  for (std::size_t at = 0; at < kOwnerCount; ++at) {
    if (look.owners[at] >= 0) {
      owners[owner_name(static_cast<Owner>(at))] = look.owners[at];
    }
  }
  events.push_back(counter(look, pid, "memory by owner", std::move(owners)));
  events.push_back(counter(look, pid, "held", {{"bytes", look.held_bytes}}));
  if (look.limit_bytes > 0) {
    events.push_back(counter(look, pid, "limit", {{"bytes", look.limit_bytes}}));
  }
  if (look.rows_per_second > 0) {
    events.push_back(counter(look, pid, "rows per second", {{"rows", look.rows_per_second}}));
  }
  if (look.step > 0 && std::isfinite(look.loss)) {
    events.push_back(counter(look, pid, "loss", {{"loss", look.loss}}));
  }
}

}  // namespace

Result<void> write_counter_tracks(const std::filesystem::path& root,
                                  const std::filesystem::path& file) {
  PLIMSOLL_TRY(const LookHistory::Kept kept, LookHistory::read(root / LookHistory::kFile));
  const int pid = kept.life.pid;
  Json events = Json::array();
  events.push_back({{"ph", "M"},
                    {"pid", pid},
                    {"name", "process_name"},
                    {"args", {{"name", kept.life.command}}}});
  for (std::size_t at = 0; at < kept.looks.size(); ++at) {
    const KeptLook& look = kept.looks[at];
    add_counters(events, look, pid);
    const bool went_on = at > 0 && kept.looks[at - 1].life == look.life;
    if (went_on && !look.phase.empty()) {  // Since the look before; the clock may have gone back.
      const double before = std::min(kept.looks[at - 1].time, look.time);
      events.push_back({{"ph", "X"},
                        {"ts", std::llround(before * kMicroseconds)},
                        {"dur", std::llround((look.time - before) * kMicroseconds)},
                        {"pid", pid},
                        {"tid", 0},
                        {"name", look.phase},
                        {"args", {{"step", look.step}}}});
    }
  }
  const Json trace{{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}};
  // What a program calls itself need not be UTF-8.
  return replace_file(file, trace.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n",
                      Durable::kNo);
}

}  // namespace plimsoll
