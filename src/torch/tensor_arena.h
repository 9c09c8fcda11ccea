// SPDX-License-Identifier: Apache-2.0
//
// The pages behind torch's CPU allocator, for what else in this folder looks at them.
//
// Threads: as ArenaPages.   Memory: as ArenaPages.
#pragma once

#include "torch/arena_pages.h"

namespace plimsoll {

/// The one arena of the process; not open before TensorArena::install().
ArenaPages& tensor_arena_pages() noexcept;

}  // namespace plimsoll
