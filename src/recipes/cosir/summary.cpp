// SPDX-License-Identifier: Apache-2.0
#include "recipes/cosir/summary.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "plimsoll/bytes.h"
#include "run/json_values.h"
#include "run/progress.h"

namespace plimsoll {
namespace {

/// "R@1 12.3  R@5 33.0  R@10 47.1  mean rank 21.4" of one direction; "" when not evaluated.
std::string describe(const nlohmann::ordered_json& recall, const char* form, const char* way) {
  const auto* at = &recall;
  for (const char* key : {form, way}) {
    if (!at->is_object() || !at->contains(key)) {
      return "";
    }
    at = &(*at)[key];
  }
  const auto read = [&](const char* key) {
    return at->is_object() && at->contains(key) && (*at)[key].is_number() ? (*at)[key].get<double>()
                                                                          : std::nan("");
  };
  return fmt::format("R@1 {:5.1f}  R@5 {:5.1f}  R@10 {:5.1f}  mean rank {:.1f}", read("r1"),
                     read("r5"), read("r10"), read("mean_rank"));
}

}  // namespace

std::string RunSummary::to_json() const {
  nlohmann::ordered_json json;
  json["status"] = status();
  json["run"] = run;
  if (stop) {
    json["stop_cause"] = stop->cause_name();
    json["stop_reason"] = stop->why;
  }
  json["step"] = step;
  json["epoch"] = epoch;
  json["loss"] = json_number(loss);
  json["rows_per_second"] = json_number(rows_per_second);
  json["limit_bytes"] = limit_bytes;
  json["limit_source"] = limit_source;
  json["peak_resident_bytes"] = peak_resident_bytes;
  json["leased_peak_bytes"] = leased_peak_bytes;
  json["hit_rate"] = json_number(hit_rate);
  json["feature_hit_rate"] = json_number(feature_hit_rate);
  json["commits"] = commits;
  json["seconds"] = json_number(seconds);
  json["stall_seconds"] = json_number(stall_seconds);
  json["rows_skipped"] = rows_skipped;
  json["recall"] = json_object(recall_json);
  json["recall_before"] = json_object(recall_before_json);
  json["phase2"] = json_object(phase2_json);
  json["state_sha256"] = state_sha256;
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::string RunSummary::to_text() const {
  std::string text = fmt::format(
      "{}{} after step {} ({} epochs) in {}\n"
      "  loss      {:.4f}\n"
      "  speed     {} rows/s\n"
      "  memory    peak {} resident, {} leased; limit {}\n"
      "  store     {:.1f} % hits, {} commits\n",
      status(), stop ? " by " + stop->why : "", step, epoch, format_duration(seconds), loss,
      format_count(static_cast<std::int64_t>(rows_per_second)), format_bytes(peak_resident_bytes),
      format_bytes(leased_peak_bytes), limit_source, 100 * hit_rate, commits);
  const auto before = json_object(recall_before_json);
  const auto after = json_object(recall_json);
  for (const char* way : {"t2i", "i2t"}) {
    for (const char* form : {"raw", "oracle"}) {
      const auto line = describe(after, form, way);
      if (!line.empty()) {
        text += fmt::format("  {:<6} {}  {}\n", form, way, line);
        const auto earlier = describe(before, form, way);
        text += earlier.empty() ? "" : fmt::format("    before    {}\n", earlier);
      }
    }
  }
  text += fmt::format("  state     {}\n  run       {}\n", state_sha256, run);
  return text;
}

}  // namespace plimsoll
