// SPDX-License-Identifier: Apache-2.0
//
// `cosir` as the program and Python start it.
#include "base/check.h"
#include "recipes/cosir/cosir.h"
#include "recipes/cosir/hands.h"
#include "recipes/cosir/plan.h"
#include "torch/rank_crew.h"

namespace plimsoll {
namespace {

const CosirSettings& own(const AnySettings& settings) {
  return static_cast<const CosirSettings&>(settings);
}

}  // namespace

Recipe cosir_recipe() {
  Recipe recipe = describe_cosir();
  recipe.train = [](const AnySettings& settings,
                    const TrainOptions& options) -> Result<RecipeReport> {
    return with_crew(
        [&](RankCrew* crew) -> Result<RecipeReport> {
          PLIMSOLL_TRY(const RunSummary summary,
                       train_cosir(own(settings),
                                   started_again(options, crew, own(settings).config().out), crew));
          return RecipeReport{summary.to_json(), summary.to_text(), ended_by_memory(summary.stop)};
        },
        [&](RankCrew& crew) { return cosir::lend_a_hand(crew, own(settings).config()); });
  };
  recipe.evaluate = [](const AnySettings& settings) { return eval_cosir(own(settings)); };
  recipe.plan = [](const AnySettings& settings, const PlanQuestion& asked) -> Result<RecipeReport> {
    PLIMSOLL_TRY(const CosirPlan plan, plan_cosir(own(settings), asked.choices, asked.device));
    return RecipeReport{plan.to_json(), plan.to_text()};
  };
  return recipe;
}

}  // namespace plimsoll
