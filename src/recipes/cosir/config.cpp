// SPDX-License-Identifier: Apache-2.0
//
// The table of `cosir` options.
#include "recipes/cosir/config.h"

#include <array>
#include <memory>

#include "run/field_table.h"

namespace plimsoll {
namespace {

using C = CosirConfig;
using F = FieldTable<CosirConfig>;
constexpr auto kIdentity = FieldRole::kIdentity;
constexpr auto kFree = FieldRole::kFree;
constexpr double kCountMax = 1e12;
constexpr double kRateMax = 1e3;

constexpr std::array kFields{
    F::data("Feature store to train on (plimsoll import, plimsoll synth)"),
    F::out(),
    F::memory_limit(),
    F::disk_limit(),
    F::whole<&C::epochs>("epochs", kIdentity, 1, 1e6, "Number of passes over the training pairs"),
    F::whole_or_auto<&C::batch_size>(
        "batch_size", 2, 1 << 20,
        "Batch size, in pairs; auto: the largest that fits, planned once (`plimsoll plan cosir`)"),
    F::on_off<&C::gradient_caching>(
        "gradient_caching", kFree,
        "Gradient caching: encodes 512 pairs at a time, twice; less memory, the same bits"),
    F::seed(),
    F::whole<&C::dim>("dim", kIdentity, 0, 65536,
                      "Width of the shared embedding space; 0: the width of the features"),
    F::whole<&C::label_dim>("label_dim", kIdentity, 2, 4096,
                            "Width of the trainable row (condition vector) of each pair"),
    F::choice<&C::projections>(
        "projections", "auto|true|false",
        "Trainable linear projections of image and text features to dim; auto: if widths differ"),
    F::real<&C::temperature>("temperature", 1e-6, 1e3,
                             "Softmax temperature of the contrastive loss"),
    F::real<&C::loss_infonce>("loss_infonce", 0, 1e6, "Weight of the contrastive (InfoNCE) loss"),
    F::real<&C::loss_laplacian>("loss_laplacian", 0, 1e6,
                                "Weight of the Laplacian loss: close rows act alike"),
    F::real<&C::loss_angular>("loss_angular", 0, 1e6,
                              "Weight of the angular loss: rows of equal angle act alike"),
    F::real<&C::loss_radius>("loss_radius", 0, 1e6,
                             "Weight of the radius loss: a row of larger radius acts more"),
    F::real<&C::loss_rotation>(
        "loss_rotation", 0, 1e6,
        "Weight of the rotation loss: rows a quarter turn apart act orthogonally"),
    F::real<&C::loss_boundary>("loss_boundary", 0, 1e6,
                               "Weight of the boundary loss: the radius of a row stays below 10"),
    F::real<&C::lr>("lr", 0, kRateMax,
                    "Learning rate of the combiner (the network that applies a row to a text)"),
    F::real<&C::projection_lr>("projection_lr", 0, kRateMax, "Learning rate of the projections"),
    F::real<&C::weight_decay>("weight_decay", 0, kRateMax,
                              "Weight decay of the combiner and the projections"),
    F::choice<&C::label_dtype>(
        "label_dtype", "float32|bfloat16",
        "Number format of the rows, on disk and in memory; bfloat16 halves them"),
    F::choice<&C::label_optimizer>("label_optimizer", "adamw|adamw_fresh|adagrad",
                                   "Optimizer of the rows"),
    F::real<&C::label_lr>("label_lr", 0, kRateMax, "Learning rate of the rows"),
    F::real<&C::label_weight_decay>("label_weight_decay", 0, kRateMax, "Weight decay of the rows"),
    F::choice<&C::label_init>("label_init", "normal|zeros|uniform",
                              "Distribution of the rows' initial values"),
    F::real<&C::label_init_scale>(
        "label_init_scale", 0, 1e6,
        "Scale of the rows' initial values: standard deviation (normal), half-width (uniform)"),
    F::choice<&C::label_schedule>("label_schedule", "constant|cosine",
                                  "Schedule of label_lr over the steps"),
    F::choice<&C::label_layout>(
        "label_layout", "auto|any_order|sample_order",
        "Order of a new run's rows on disk; auto: any_order if the rows fit into memory", kFree),
    F::on_off<&C::drop_last>("drop_last", kIdentity,
                             "Last batch of an epoch is skipped when it is not full"),
    F::whole<&C::holdout>("holdout", kIdentity, -1, kCountMax,
                          "Number of images (groups) held out for evaluation; -1: 5,000 pairs' "
                          "worth, at most a fifth"),
    F::whole<&C::eval_pairs>("eval_pairs", kFree, 0, kCountMax,
                             "Number of held-out pairs evaluated, at most"),
    F::whole<&C::eval_every_n_epochs>(
        "eval_every_n_epochs", kFree, 0, 1e6,
        "Epochs between evaluations; 0: only before and after training"),
    F::whole<&C::oracle_angles>("oracle_angles", kFree, 1, 3600,
                                "Number of angles of the grid that the oracle evaluation searches"),
    F::whole<&C::phase2_epochs>(
        "phase2_epochs", kIdentity, 0, 1e6,
        "Number of epochs of phase 2, a classifier that predicts rows; 0: no phase 2"),
    F::real<&C::phase2_lr>("phase2_lr", 0, kRateMax, "Learning rate of the classifier of phase 2"),
    F::checkpoint_every_n_steps(),
    F::keep_checkpoints(),
    F::cleanup_every_n_steps(),
    F::bytes<&C::queue_bytes>("queue_bytes",
                              "Memory of the queue of batches read ahead; 0: chosen"),
    F::bytes<&C::store_bytes>("store_bytes", "Memory of the rows (their page cache); 0: chosen"),
    F::bytes<&C::cache_bytes>("cache_bytes",
                              "Memory of the features (their page cache); 0: chosen"),
    F::foreign_bytes(),
    F::whole<&C::loader_threads>("loader_threads", kFree, 1, 256,
                                 "Number of threads that read batches"),
    F::compute_threads(
        kIdentity, "Number of threads that compute, part of the result's bits; 0: one per core"),
    F::whole<&C::io_threads>("io_threads", kFree, 1, 256,
                             "Number of threads that read and write rows"),
    F::whole<&C::stats_every_n_epochs>("stats_every_n_epochs", kFree, 0, 1e6,
                                       "Epochs between printed cache statistics; 0: never"),
    F::whole<&C::metrics_every_n_steps>("metrics_every_n_steps", kFree, 1, kCountMax,
                                        "Steps between recorded losses"),
    F::tensorboard(),
};

constexpr RecipeOptions kOptions{
    .recipe = "cosir",
    .fields = kFields,
    .data_advice =
        "name a feature store with --data DIR; plimsoll synth and plimsoll import make one",
    .keys_advice = "`plimsoll train cosir --help` lists every key"};

}  // namespace

template <>
const RecipeOptions& recipe_options<CosirConfig>() noexcept {
  return kOptions;
}

Recipe describe_cosir() {
  return {.name = kOptions.recipe,
          .about = "One trainable condition vector per image-text pair, for retrieval",
          .train_examples =
              "  plimsoll train cosir --data data/ --out run/ --memory-limit 768MiB --epochs 1\n"
              "  plimsoll train cosir --config cosir.toml --set label_dim=128 --json",
          .plan_example = "plimsoll plan cosir --data data/ --memory-limit 768MiB --label-dim 128",
          .choices = "gradient caching",
          .settings = [] { return std::make_unique<CosirSettings>(); }};
}

}  // namespace plimsoll
