// SPDX-License-Identifier: Apache-2.0
//
// A meeting: processes that wait for one another at a counter in memory that they share.
//
// Each adds one when it comes. What it wrote before is seen by whoever has met it, so that the
// counter orders all other memory that they share. Who waits sleeps in the kernel (a futex), for a
// bounded time: one that is killed before it comes, or before it wakes the others, holds up nobody
// who looks again.
//
// Reading order: this file, meeting.cpp, rank_board.h.
//
// Threads: any, of any process. The counter is written by come() alone.
// Memory:  4 bytes, the caller's.
#pragma once

#include <cstdint>

namespace plimsoll {

/// Adds one to `counter`; who makes it `all` wakes those that wait. Behind 2³² − 1 comes 0.
void come(std::uint32_t& counter, std::uint32_t all) noexcept;

/// Waits until `all` have come. False: `most_ms` milliseconds have passed, or somebody woke this
/// one before. Requires: less than 2³¹ between `counter` and `all`.
[[nodiscard]] bool met(std::uint32_t& counter, std::uint32_t all, std::int64_t most_ms) noexcept;

/// Has all that wait at `counter` look again.
void wake(std::uint32_t& counter) noexcept;

}  // namespace plimsoll
