// SPDX-License-Identifier: Apache-2.0
//
// The recipe `toy`. Threads: one run at a time.   Memory: one line.
#pragma once

#include "tests/recipes/toy/config.h"

namespace plimsoll {

/// describe_toy() and what it does.
Recipe toy_recipe();

}  // namespace plimsoll
