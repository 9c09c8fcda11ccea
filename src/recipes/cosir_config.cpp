// SPDX-License-Identifier: Apache-2.0
//
// The table of `cosir` options.
#include "recipes/cosir_config.h"

#include <array>

#include "recipes/field_table.h"

namespace plimsoll {
namespace {

using C = CosirConfig;
using F = FieldTable<CosirConfig>;
constexpr auto kIdentity = FieldRole::kIdentity;
constexpr auto kFree = FieldRole::kFree;
constexpr auto kPlace = FieldRole::kPlace;
constexpr double kCountMax = 1e12;
constexpr double kRateMax = 1e3;

constexpr std::array kFields{
    F::text<&C::data>("data", kPlace,
                      "Feature store to train on (plimsoll import, plimsoll synth)"),
    F::text<&C::out>("out", kPlace, "Run folder to make"),
    F::limit<&C::memory_limit>("memory_limit",
                               "Memory the whole process may hold; 768MiB, 6GB, 25%"),
    F::limit<&C::disk_limit>("disk_limit", "Disk the run may fill"),
    F::whole<&C::epochs>("epochs", kIdentity, 1, 1e6, "Passes over the training pairs"),
    F::whole_or_auto<&C::batch_size>(
        "batch_size", 2, 1 << 20, "Pairs per step; auto: planned once, see `plimsoll plan cosir`"),
    F::on_off<&C::gradient_caching>(
        "gradient_caching", kFree,
        "Encode pairs 512 at a time and again for their gradients: less memory, the same bits"),
    F::whole<&C::seed>("seed", kIdentity, 0, 9e15, "Decides every random choice"),
    F::whole<&C::dim>("dim", kIdentity, 0, 65536,
                      "Width of the shared space; 0: from the features"),
    F::whole<&C::label_dim>("label_dim", kIdentity, 2, 4096,
                            "Width of a sample's condition vector"),
    F::choice<&C::projections>("projections", "auto|true|false",
                               "Trainable linear maps of both features to dim"),
    F::real<&C::temperature>("temperature", 1e-6, 1e3, "Of the contrastive loss"),
    F::real<&C::loss_infonce>("loss_infonce", 0, 1e6, "Weight of the contrastive loss"),
    F::real<&C::loss_laplacian>("loss_laplacian", 0, 1e6, "Weight: neighbours act alike"),
    F::real<&C::loss_angular>("loss_angular", 0, 1e6, "Weight: equal angles act alike"),
    F::real<&C::loss_radius>("loss_radius", 0, 1e6, "Weight: a larger radius acts more"),
    F::real<&C::loss_rotation>("loss_rotation", 0, 1e6, "Weight: quarter turns act orthogonally"),
    F::real<&C::loss_boundary>("loss_boundary", 0, 1e6, "Weight: the radius stays below 10"),
    F::real<&C::lr>("lr", 0, kRateMax, "Learning rate of the combiner"),
    F::real<&C::projection_lr>("projection_lr", 0, kRateMax, "Learning rate of the projections"),
    F::real<&C::weight_decay>("weight_decay", 0, kRateMax, "Of the model"),
    F::choice<&C::label_dtype>("label_dtype", "float32|bfloat16",
                               "Condition vectors on disk and in memory; bfloat16 halves them"),
    F::choice<&C::label_optimizer>("label_optimizer", "adamw|adamw_fresh|adagrad",
                                   "How a condition vector follows its gradient"),
    F::real<&C::label_lr>("label_lr", 0, kRateMax, "Learning rate of the condition vectors"),
    F::real<&C::label_weight_decay>("label_weight_decay", 0, kRateMax, "Of the condition vectors"),
    F::choice<&C::label_init>("label_init", "normal|zeros|uniform", "Condition vectors at first"),
    F::real<&C::label_init_scale>("label_init_scale", 0, 1e6, "Deviation or half-width at first"),
    F::choice<&C::label_schedule>("label_schedule", "constant|cosine",
                                  "Of label_lr over the steps"),
    F::choice<&C::label_layout>(
        "label_layout", "auto|any_order|sample_order",
        "Of a new run's condition vectors on disk; auto: any order if they fit into memory", kFree),
    F::on_off<&C::drop_last>("drop_last", kIdentity, "Skip an epoch's last, partial batch"),
    F::whole<&C::holdout>(
        "holdout", kIdentity, -1, kCountMax,
        "Groups held out for evaluation; -1: 5,000 pairs' worth, at most a fifth"),
    F::whole<&C::eval_pairs>("eval_pairs", kFree, 0, kCountMax,
                             "Held-out pairs evaluated, at most"),
    F::whole<&C::eval_every_n_epochs>("eval_every_n_epochs", kFree, 0, 1e6,
                                      "0: only before and after training"),
    F::whole<&C::oracle_angles>("oracle_angles", kFree, 1, 3600, "Of the evaluation's polar grid"),
    F::whole<&C::phase2_epochs>("phase2_epochs", kIdentity, 0, 1e6,
                                "Epochs of the classifier of conditions"),
    F::real<&C::phase2_lr>("phase2_lr", 0, kRateMax, "Learning rate of that classifier"),
    F::whole<&C::checkpoint_every_n_steps>(
        "checkpoint_every_n_steps", kFree, 0, kCountMax,
        "Steps between commits; 0: one at the end of each epoch"),
    F::whole<&C::keep_checkpoints>("keep_checkpoints", kFree, 1, 1e6,
                                   "The newest ones are kept; of the rows two commits"),
    F::whole<&C::cleanup_every_n_steps>(
        "cleanup_every_n_steps", kFree, 0, kCountMax,
        "Steps between giving unused memory back; 0: after evaluations and under pressure only"),
    F::bytes<&C::queue_bytes>("queue_bytes", "The loader's ring; 0: chosen"),
    F::bytes<&C::store_bytes>("store_bytes", "Memory of the condition vectors; 0: chosen"),
    F::bytes<&C::cache_bytes>("cache_bytes", "Memory of the features; 0: chosen"),
    F::bytes<&C::foreign_bytes>("foreign_bytes", "Set aside for code and libraries' own memory"),
    F::whole<&C::loader_threads>("loader_threads", kFree, 1, 256, "Threads that read batches"),
    F::whole<&C::compute_threads>(
        "compute_threads", kIdentity, 0, 4096,
        "Threads that compute; 0: one per core. Part of the result's bits"),
    F::whole<&C::io_threads>("io_threads", kFree, 1, 256, "Threads that read and write rows"),
    F::whole<&C::stats_every_n_epochs>("stats_every_n_epochs", kFree, 0, 1e6,
                                       "Cache statistics in words; 0: never"),
    F::whole<&C::metrics_every_n_steps>("metrics_every_n_steps", kFree, 1, kCountMax,
                                        "Steps between recorded losses"),
    F::on_off<&C::tensorboard>("tensorboard", kFree, "Write event files under RUN/metrics"),
};

// In the run.toml of runs that are older.
constexpr IgnoredKey kIgnored[] = {
    {"mlflow", "in Python, plimsoll.log_to_mlflow(RUN) brings a run to MLflow"}};

constexpr RecipeOptions kOptions{
    .recipe = "cosir",
    .fields = kFields,
    .data_advice =
        "name a feature store with --data DIR; plimsoll synth and plimsoll import make one",
    .keys_advice = "`plimsoll train cosir --help` lists every key",
    .ignored = kIgnored};

}  // namespace

template <>
const RecipeOptions& recipe_options<CosirConfig>() noexcept {
  return kOptions;
}

}  // namespace plimsoll
