// SPDX-License-Identifier: Apache-2.0
//
// The JSON of our own headers, which is a few levels deep: dump() takes a frame of the stack for
// each level, and a damaged file may have as many as it has bytes.
//
// Threads: pure functions.   Memory: the value.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

namespace plimsoll {

/// What is nested deeper than 16 levels is left out, and a checksum over the rest will tell.
/// Errors: discarded when `text` is no JSON; with `throws` what nlohmann/json throws.
inline nlohmann::json parse_shallow(const std::string& text, bool throws = false) {
  constexpr int kLevels = 16;
  const auto keeps = [](int depth, nlohmann::json::parse_event_t, const nlohmann::json&) {
    return depth <= kLevels;
  };
  return nlohmann::json::parse(text, keeps, throws);
}

}  // namespace plimsoll
