// SPDX-License-Identifier: Apache-2.0
//
// Options of `toy`: the smallest recipe there can be. It fits y = w·x to the lines "x y" of a file,
// a line a step.
//
// Threads: a value.   Memory: a few words.
#pragma once

#include <cstdint>

#include "run/config.h"
#include "run/recipe.h"

namespace plimsoll {

struct ToyConfig : RunConfig {
  std::int64_t steps{10};
  double lr{0.5};
};

template <>
const RecipeOptions& recipe_options<ToyConfig>() noexcept;

using ToySettings = Settings<ToyConfig>;

Recipe describe_toy();

}  // namespace plimsoll
