// SPDX-License-Identifier: Apache-2.0
//
// The recipes of ours. src/recipes/CMakeLists.txt has their names and writes the one function
// below, twice: for programs with LibTorch, and for those that can only describe recipes.
//
// Reading order: run/recipe.h, this file.
//
// Threads: while a program starts, on one thread.   Memory: a few kilobytes.
#pragma once

namespace plimsoll {

/// Adds every recipe to recipes(). Idempotent.
void add_recipes();

}  // namespace plimsoll
