// SPDX-License-Identifier: Apache-2.0
//
// is_utf8: whether a text may be written into JSON and TOML files; as_utf8: so that it may.
//
// Threads: pure functions.   Memory: of as_utf8, four bytes for each of the text at most.
#pragma once

#include <string>
#include <string_view>

namespace plimsoll {

/// True for well-formed UTF-8 without surrogates. Source: RFC 3629, section 4.
[[nodiscard]] bool is_utf8(std::string_view text) noexcept;

/// The text, with "\\xe9" for each byte that belongs to nothing well-formed.
[[nodiscard]] std::string as_utf8(std::string text);

}  // namespace plimsoll
