// SPDX-License-Identifier: Apache-2.0
//
// is_utf8: whether a text may be written into JSON and TOML files.
//
// Threads: a pure function.   Memory: none.
#pragma once

#include <string_view>

namespace plimsoll {

/// True for well-formed UTF-8 without surrogates. Source: RFC 3629, section 4.
[[nodiscard]] bool is_utf8(std::string_view text) noexcept;

}  // namespace plimsoll
