// SPDX-License-Identifier: Apache-2.0
//
// Settling torch and the limit; evaluating a run that has been trained.
//
// Threads: see cosir_settle.h.   Memory: see cosir_settle.h.
#include "recipes/cosir/settle.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>

#include "base/check.h"
#include "plimsoll/torch.h"
#include "recipes/cosir/cosir.h"
#include "recipes/cosir/data.h"
#include "recipes/cosir/loss.h"
#include "recipes/cosir/state.h"
#include "torch/admission.h"
#include "torch/settle.h"

namespace plimsoll {
namespace cosir {

Result<Governor> settle(const CosirConfig& config, const std::filesystem::path& directory,
                        std::optional<std::int64_t> baseline_bytes) {
  if (config.temperature < kernels::kTemperatureMin) {
    return fail(
        ErrorCode::kInvalidArgument,
        fmt::format("temperature = {} is below {}", config.temperature, kernels::kTemperatureMin),
        "raise temperature");
  }
  return plimsoll::settle({.memory_limit = config.memory_limit,
                           .disk_limit = config.disk_limit,
                           .foreign_bytes = config.foreign_bytes,
                           .compute_threads = config.compute_threads,
                           .directory = directory,
                           .baseline_bytes = baseline_bytes});
}

EvalOptions eval_options(const CosirConfig& config, std::int64_t angles) {
  return {.angles = angles,
          .batch_rows = config.batch_size,
          .seed = seed_for(static_cast<std::uint64_t>(config.seed), Purpose::kOrder)};
}

}  // namespace cosir

Result<RecipeReport> eval_cosir(const CosirSettings& settings) {
  using namespace cosir;
  const CosirConfig& config = settings.config();
  PLIMSOLL_TRY(RunFolder folder, RunFolder::open_to_read(config.out));
  PLIMSOLL_TRY(const auto step, folder.published_step());
  if (!step) {
    return fail(ErrorCode::kNotFound, config.out + ": no checkpoint to evaluate", "train it first");
  }
  PLIMSOLL_TRY(Governor governor, settle(config, folder.root()));
  RecipeReport scores;
  const auto done = without_refusal([&]() -> Result<void> {
    PLIMSOLL_TRY(
        auto data,
        Data::open(governor, config,
                   {.embeddings = folder.embeddings(), .at_step = *step, .loader = false}));
    PLIMSOLL_TRY_VOID(folder.check_data(config.data, data->features().info().fingerprint));
    PLIMSOLL_TRY(const ModelShape shape,
                 resolve_shape(config, data->image_dim(), data->text_dim()));
    State state{config, shape};
    PLIMSOLL_TRY_VOID(state.load(folder, *step));
    PLIMSOLL_TRY(const auto result, evaluate(state.model, data->held_out(config.eval_pairs),
                                             data->trained(), eval_options(config, kFinalAngles)));
    nlohmann::ordered_json j{{"step", *step}, {"epoch", state.at.loader.epoch}};
    j["recall"] = nlohmann::ordered_json::parse(result.to_json());
    scores = {.json = j.dump(),
              .text = fmt::format("step {}, epoch {}\n{}", *step, state.at.loader.epoch,
                                  result.to_text())};
    return {};
  });
  TensorArena::detach();
  PLIMSOLL_TRY_VOID(done);
  return scores;
}

}  // namespace plimsoll
