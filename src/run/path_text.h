// SPDX-License-Identifier: Apache-2.0
//
// is_path_text: whether a path may be written into run.toml and the JSON files of a run.
//
// Threads: a pure function.   Memory: none.
#pragma once

#include <string_view>

#include "base/utf8.h"

namespace plimsoll {

[[nodiscard]] inline bool is_path_text(std::string_view path) noexcept {
  return is_utf8(path);
}

}  // namespace plimsoll
