// SPDX-License-Identifier: Apache-2.0
//
// The two ways crc32c() is computed, named so that a test can compare them.
//
// Everyone else calls crc32c() (crc32c.h), which picks one at the first call.
//
// Threads: pure functions.   Memory: 5 KiB of constant tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace plimsoll {

/// Whether this CPU has the CRC-32C instruction (SSE4.2).
[[nodiscard]] bool crc32c_has_instruction() noexcept;

/// Requires: crc32c_has_instruction() on x86-64; elsewhere the same as the table.
[[nodiscard]] std::uint32_t crc32c_by_instruction(std::span<const std::byte> bytes,
                                                  std::uint32_t seed) noexcept;

[[nodiscard]] std::uint32_t crc32c_by_table(std::span<const std::byte> bytes,
                                            std::uint32_t seed) noexcept;

}  // namespace plimsoll
