// SPDX-License-Identifier: Apache-2.0
//
// Why, as text and as JSON.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "run/device_document.h"
#include "run/json_values.h"
#include "run/why.h"

namespace plimsoll {

std::string Why::to_json() const {
  nlohmann::ordered_json json{{"cause", cause_name(cause)}, {"incident", incident()},
                              {"memory", memory()},         {"summary", summary},
                              {"evidence", evidence},       {"advice", advice}};
  auto& who = json["grower"] = nullptr;
  if (grower) {
    who = {{"pid", grower->pid},
           {"name", grower->name},
           {"worker", grower->child},
           {"grown_bytes", grower->bytes},
           {"seconds", json_number(grower->seconds)},
           {"epoch", grower->epoch},
           {"phase", grower->phase}};
  }
  if (const KeptLook* last = last_look(); last != nullptr) {
    json["held_bytes"] = last->held_bytes;
    json["limit_bytes"] = last->limit_bytes;
    json["step"] = last->step;
  }
  if (command) {
    json["status"] = command->status;
    json["oom_kills"] = command->oom_kills;
  }
  if (run) {
    json["checkpoint_step"] = run->status.checkpoint_step;
    auto& devices = json["devices"] = nlohmann::ordered_json::array();
    for (const DeviceStatus& device : run->status.devices) {
      devices.push_back(device_document(device));
    }
  }
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::string Why::to_text() const {
  std::string text = summary + "\n";
  for (const std::string& line : evidence) {
    text += fmt::format("  {}\n", line);
  }
  for (const std::string& line : advice) {
    text += fmt::format("  would help: {}\n", line);
  }
  return text;
}

}  // namespace plimsoll
