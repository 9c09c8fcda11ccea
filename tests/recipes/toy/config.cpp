// SPDX-License-Identifier: Apache-2.0
#include "tests/recipes/toy/config.h"

#include <array>
#include <memory>

#include "run/field_table.h"

namespace plimsoll {
namespace {

using C = ToyConfig;
using F = FieldTable<ToyConfig>;

constexpr std::array kFields{
    F::data("File of lines \"x y\" to fit"),
    F::out(),
    F::memory_limit(),
    F::seed(),
    F::checkpoint_every_n_steps(),
    F::keep_checkpoints(),
    F::compute_threads(FieldRole::kFree, "Number of threads that compute; 0: one per core"),
    F::whole<&C::steps>("steps", FieldRole::kIdentity, 1, 1e6, "Number of steps, a line each"),
    F::real<&C::lr>("lr", 0, 1e3, "Learning rate"),
};

constexpr RecipeOptions kOptions{.recipe = "toy",
                                 .fields = kFields,
                                 .data_advice = "name a file of lines \"x y\" with --data FILE",
                                 .keys_advice = "`plimsoll train toy --help` lists every key"};

}  // namespace

template <>
const RecipeOptions& recipe_options<ToyConfig>() noexcept {
  return kOptions;
}

Recipe describe_toy() {
  return {.name = kOptions.recipe,
          .about = "A line through points",
          .unit = "lines",
          .train_examples = "  plimsoll train toy --data points.txt --out run/ --steps 10",
          .plan_example = "plimsoll plan toy --data points.txt",
          .settings = [] { return std::make_unique<ToySettings>(); }};
}

}  // namespace plimsoll
