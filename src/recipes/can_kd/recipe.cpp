// SPDX-License-Identifier: Apache-2.0
//
// `can-kd` as the program and Python start it.
#include <fmt/format.h>

#include "base/check.h"
#include "recipes/can_kd/can_kd.h"
#include "torch/rendezvous.h"

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
    PLIMSOLL_TRY(const auto launched, launched_rank());
    if (launched) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("can-kd is one process yet, and these are {} ranks", launched->count),
                  "start it without torchrun; compute_threads has it use more cores");
    }
    PLIMSOLL_TRY(const CanKdSummary summary, train_can_kd(own(settings), options));
    return RecipeReport{summary.to_json(), summary.to_text(), ended_by_memory(summary.stop)};
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
