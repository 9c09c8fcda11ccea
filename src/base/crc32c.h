// SPDX-License-Identifier: Apache-2.0
//
// CRC-32C (Castagnoli), by the CPU's instruction where there is one.
// Source: RFC 3720, appendix B.4 (check value of "123456789": 0xE3069283).
//
// Threads: pure function.   Memory: 5 KiB of constant tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace plimsoll {

/// The CRC of `bytes`, continuing from `seed` (a CRC returned earlier; 0 to begin).
[[nodiscard]] std::uint32_t crc32c(std::span<const std::byte> bytes,
                                   std::uint32_t seed = 0) noexcept;

}  // namespace plimsoll
