// SPDX-License-Identifier: Apache-2.0
//
// `can-kd` as the program and Python start it.
#include "base/check.h"
#include "recipes/can_kd/can_kd.h"
#include "recipes/can_kd/hands.h"
#include "torch/rank_crew.h"

namespace plimsoll {
namespace {

const CanKdSettings& own(const AnySettings& settings) {
  return static_cast<const CanKdSettings&>(settings);
}

}  // namespace

Recipe can_kd_recipe() {
  Recipe recipe = describe_can_kd();
  recipe.train = [](const AnySettings& settings,
                    const TrainOptions& options) -> Result<RecipeReport> {
    return with_crew(
        [&](RankCrew* crew) -> Result<RecipeReport> {
          PLIMSOLL_TRY(
              const CanKdSummary summary,
              train_can_kd(own(settings), started_again(options, crew, own(settings).config().out),
                           crew));
          return RecipeReport{summary.to_json(), summary.to_text(), ended_by_memory(summary.stop)};
        },
        [&](RankCrew& crew) { return can_kd::lend_a_hand(crew, own(settings).config()); });
  };
  recipe.evaluate = [](const AnySettings& settings) { return eval_can_kd(own(settings)); };
  recipe.plan = [](const AnySettings& settings, const PlanQuestion& asked) -> Result<RecipeReport> {
    PLIMSOLL_TRY(const CanKdPlan plan,
                 plan_can_kd(own(settings), asked.choices, asked.device, asked.effective_batch));
    return RecipeReport{plan.to_json(), plan.to_text()};
  };
  return recipe;
}

}  // namespace plimsoll
