// SPDX-License-Identifier: Apache-2.0
#include "tests/recipes/toy/toy.h"

#include <fmt/format.h>

#include <cstdlib>
#include <fstream>

#include "base/check.h"
#include "os/directories.h"
#include "run/run_folder.h"
#include "run/sealed_file.h"

namespace plimsoll {
namespace {

const ToyConfig& own(const AnySettings& settings) {
  return static_cast<const ToySettings&>(settings).config();
}

RecipeReport report_of(std::int64_t step, double weight) {
  return {.json = fmt::format("{{\"step\": {}, \"weight\": \"{:a}\"}}", step, weight),
          .text = fmt::format("weight {:.6f} after {} steps", weight, step)};
}

Result<void> commit(RunFolder& folder, std::int64_t step, double weight, std::int64_t keep) {
  const auto path = folder.checkpoint_path(step);
  PLIMSOLL_TRY_VOID(make_directories(path));
  PLIMSOLL_TRY_VOID(write_sealed(path / "weight.toml", fmt::format("{:a}\n", weight)));
  return folder.publish(step, keep);
}

Result<double> weight_at(const RunFolder& folder, std::int64_t step) {
  PLIMSOLL_TRY(const std::string text, read_sealed(folder.checkpoint_path(step) / "weight.toml"));
  return std::strtod(text.c_str(), nullptr);
}

Result<RecipeReport> train(const AnySettings& settings, const TrainOptions& options) {
  const ToyConfig& config = own(settings);
  PLIMSOLL_TRY(RunFolder folder, options.resume
                                     ? RunFolder::open(config.out)
                                     : RunFolder::create(config.out, settings.to_toml()));
  PLIMSOLL_TRY(const auto published, folder.published_step());
  const std::int64_t begun = published.value_or(0);
  double weight = 0;
  if (published) {
    PLIMSOLL_TRY(weight, weight_at(folder, *published));
  }
  std::ifstream lines(config.data);
  double x = 0;
  double y = 0;
  for (std::int64_t step = 1; step <= config.steps; ++step) {
    if (!(lines >> x >> y)) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("{}:{}: not a line \"x y\"", config.data, step));
    }
    if (step > begun) {
      weight -= config.lr * (weight * x - y) * x;
      if (step == config.steps || step % config.checkpoint_every_n_steps == 0) {
        PLIMSOLL_TRY_VOID(commit(folder, step, weight, config.keep_checkpoints));
      }
    }
  }
  return report_of(config.steps, weight);
}

Result<RecipeReport> evaluate(const AnySettings& settings) {
  PLIMSOLL_TRY(const RunFolder folder, RunFolder::open_to_read(own(settings).out));
  PLIMSOLL_TRY(const auto step, folder.published_step());
  if (!step) {
    return fail(ErrorCode::kNotFound, own(settings).out + ": no checkpoint to evaluate");
  }
  PLIMSOLL_TRY(const double weight, weight_at(folder, *step));
  return report_of(*step, weight);
}

}  // namespace

Recipe toy_recipe() {
  Recipe recipe = describe_toy();
  recipe.train = train;
  recipe.evaluate = evaluate;
  recipe.plan = [](const AnySettings&, const PlanQuestion& asked) -> Result<RecipeReport> {
    return RecipeReport{.json = R"({"batch_size": 1})",
                        .text = "one line a step, on " + asked.device.device};
  };
  return recipe;
}

}  // namespace plimsoll
