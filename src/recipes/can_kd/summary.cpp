// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "plimsoll/bytes.h"
#include "recipes/can_kd/can_kd.h"
#include "run/json_values.h"
#include "run/progress.h"

namespace plimsoll {
namespace {

/// "student_vgae" → "teacher_vgae", of the same stage; "" for a teacher's.
std::string teacher_of(const std::string& name) {
  constexpr std::string_view kStudent = "student_";
  return name.starts_with(kStudent) ? "teacher_" + name.substr(kStudent.size()) : "";
}

}  // namespace

std::string CanKdSummary::to_json() const {
  nlohmann::ordered_json json;
  json["status"] = status();
  json["run"] = run;
  if (stop) {
    json["stop_cause"] = stop->cause_name();
    json["stop_reason"] = stop->why;
  }
  json["step"] = step;
  json["models"] = nlohmann::ordered_json::object();
  for (const CanKdModel& model : models) {
    json["models"][model.name] = {{"parameters", model.parameters},
                                  {"epochs", model.epochs},
                                  {"held_out_loss", json_number(model.held_out_loss)}};
  }
  json["graphs_per_second"] = json_number(graphs_per_second);
  json["limit_bytes"] = limit_bytes;
  json["limit_source"] = limit_source;
  json["peak_resident_bytes"] = peak_resident_bytes;
  json["leased_peak_bytes"] = leased_peak_bytes;
  json["seconds"] = json_number(seconds);
  json["evaluation"] = json_object(evaluation_json);
  json["state_sha256"] = state_sha256;
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::string CanKdSummary::to_text() const {
  std::string text = fmt::format(
      "{}{} after step {} in {}\n"
      "  speed     {} graphs/s\n"
      "  memory    peak {} resident, {} leased; limit {}\n",
      status(), stop ? " by " + stop->why : "", step, format_duration(seconds),
      format_count(static_cast<std::int64_t>(graphs_per_second)), format_bytes(peak_resident_bytes),
      format_bytes(leased_peak_bytes), limit_source);
  for (const CanKdModel& model : models) {
    std::string share;
    for (const CanKdModel& other : models) {
      if (other.name == teacher_of(model.name) && other.parameters > 0) {
        share = fmt::format(
            ", {:.2f} % of the teacher's",
            100.0 * static_cast<double>(model.parameters) / static_cast<double>(other.parameters));
      }
    }
    text += fmt::format("  {:<22} {:>11} parameters{}; {} epochs, held out {:.5f}\n", model.name,
                        format_count(model.parameters), share, model.epochs, model.held_out_loss);
  }
  if (!evaluation_text.empty()) {
    text += "\n" + evaluation_text;
  }
  text += fmt::format("  state     {}\n  run       {}\n", state_sha256, run);
  return text;
}

}  // namespace plimsoll
