// SPDX-License-Identifier: Apache-2.0
//
// inside_now: what this process says of its own memory: leases, and what malloc() has.
//
// Threads: any.   Memory: none. Takes the longer the more pieces malloc() keeps, some 10 µs to 1
// ms.
#pragma once

#include "watch/owners.h"

namespace plimsoll {

/// Tensors and leases of the process's governor, −1 without one; malloc()'s heap, in use and
/// retained. `python` stays −1: who counts Python's arenas fills it in.
[[nodiscard]] Inside inside_now();

}  // namespace plimsoll
