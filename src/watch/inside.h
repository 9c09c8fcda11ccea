// SPDX-License-Identifier: Apache-2.0
//
// inside_now: what this process says of its own memory: leases, and what malloc() has.
//
// malloc() counts the free pieces that it keeps, 200 ns each, and holds its locks meanwhile. Where
// that takes more than 3 ms twice in a row (some 15,000 pieces), it is not asked any more.
//
// Threads: any.   Memory: none.
#pragma once

#include "watch/owners.h"

namespace plimsoll {

/// Tensors and leases of the process's governor, −1 without one; malloc()'s heap, in use and
/// retained, −1 where it is not asked. `python` stays −1: who counts Python's arenas fills it in.
[[nodiscard]] Inside inside_now();

}  // namespace plimsoll
