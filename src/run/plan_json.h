// SPDX-License-Identifier: Apache-2.0
//
// What every recipe's plan says of a batch, and of choices that were weighed, as JSON and as text.
//
// Reading order: plan/batch_plan.h, plan_choice.h, this file.
//
// Threads: pure functions.   Memory: the value.
#pragma once

#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "plan/batch_plan.h"
#include "plimsoll/bytes.h"
#include "run/plan_choice.h"

namespace plimsoll {

/// {"batch_size", "label", "peak_bytes", …, "parts": {…}}; `per_row` names the bytes of one row
/// more: "bytes_per_row", "bytes_per_graph".
[[nodiscard]] inline nlohmann::ordered_json batch_json(const BatchPlan& batch,
                                                       const char* per_row) {
  const PeakParts& parts = batch.peak.parts;
  nlohmann::ordered_json json{{"batch_size", batch.batch_size},
                              {"label", label_name(batch.label)},
                              {"peak_bytes", batch.peak.bytes},
                              {"leased_bytes", batch.leased_bytes},
                              {"available_bytes", batch.available_bytes},
                              {per_row, batch.bytes_per_row},
                              {"operator", batch.peak.op},
                              {"phase", phase_name(batch.peak.phase)},
                              {"parts",
                               {{"static", parts.static_bytes},
                                {"gradients", parts.gradient_bytes},
                                {"activations", parts.activation_bytes},
                                {"temporaries", parts.temporary_bytes}}}};
  if (batch.device) {
    const DevicePeak& device = *batch.device;
    json["device"] = {{"name", device.name},
                      {"limit_bytes", device.limit_bytes},
                      {"bound_bytes", device.bound_bytes},
                      {"reserved_bytes", device.reserved_bytes},
                      {"allocated_bytes", device.allocated_bytes},
                      {"fragmentation_bytes", device.fragmentation_bytes},
                      {"static_bytes", device.static_bytes},
                      {"steady", device.steady}};
    json["pinned_bytes"] = device.pinned_bytes;
  }
  return json;
}

/// What a step would hold on a device, a line each; "" without one.
[[nodiscard]] inline std::string device_text(const BatchPlan& batch) {
  if (!batch.device) {
    return "";
  }
  const DevicePeak& device = *batch.device;
  std::string text;
  const auto line = [&text](const char* name, std::int64_t bytes, const std::string& note) {
    text += fmt::format("  {:<14}{:>12}   {}\n", name, format_bytes(bytes), note);
  };
  line("device", device.reserved_bytes,
       "reserved on " + device.name + ": segments of its allocator");
  line("  allocated", device.allocated_bytes, "in blocks, at most");
  line("  fragments", device.fragmentation_bytes, "reserved and free when it reserved most");
  line("  bound", device.bound_bytes, "with room for what its kernels do otherwise");
  line("  limit", device.limit_bytes, "of the device (--device-memory-limit)");
  line("pinned", device.pinned_bytes, "two batches on their way there, of the process's limit");
  return text;
}

/// [{"options", "batch_size", …}, …]; `row` is what a row is called: "row", "graph".
[[nodiscard]] inline nlohmann::ordered_json choices_json(const std::vector<PlanChoice>& choices,
                                                         const std::string& row) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const PlanChoice& choice : choices) {
    list.push_back({{"options", choice.options},
                    {"batch_size", choice.batch.batch_size},
                    {"label", label_name(choice.batch.label)},
                    {"peak_bytes", choice.batch.peak.bytes},
                    {"bytes_per_" + row, choice.batch.bytes_per_row},
                    {row + "s_per_second", choice.rows_per_second},
                    {"configured", choice.configured}});
  }
  return list;
}

/// The same as a table under "choices for WHAT"; "" without choices.
[[nodiscard]] inline std::string choices_text(const std::vector<PlanChoice>& choices,
                                              const std::string& what, const std::string& row) {
  if (choices.empty()) {
    return "";
  }
  std::string text = fmt::format("\nchoices for {}\n  {:>6}{:>12}{:>12}{:>11}\n", what, row + "s",
                                 "peak", "per " + row, row + "s/s");
  for (const PlanChoice& choice : choices) {
    text += fmt::format("  {:>6}{:>12}{:>12}{:>11.0f}   {}{}\n", choice.batch.batch_size,
                        format_bytes(choice.batch.peak.bytes),
                        format_bytes(choice.batch.bytes_per_row), choice.rows_per_second,
                        choice.options, choice.configured ? "  (as configured)" : "");
  }
  return text;
}

}  // namespace plimsoll
