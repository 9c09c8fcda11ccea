// SPDX-License-Identifier: Apache-2.0
//
// Values as the JSON documents of runs have them.
//
// Threads: pure functions.   Memory: the value.
#pragma once

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>

namespace plimsoll {

/// A number; null for one that is not finite, which JSON cannot say.
[[nodiscard]] inline nlohmann::ordered_json json_number(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json(nullptr);
}

/// The object that `text` is; {} for anything else.
[[nodiscard]] inline nlohmann::ordered_json json_object(const std::string& text) {
  auto parsed = nlohmann::ordered_json::parse(text, nullptr, false);
  return parsed.is_object() ? parsed : nlohmann::ordered_json::object();
}

}  // namespace plimsoll
