// SPDX-License-Identifier: Apache-2.0
//
// The table of `can-kd` options. Keys that set others are in spellings.cpp.
#include "recipes/can_kd/config.h"

#include <array>

#include "recipes/can_kd/spellings.h"
#include "recipes/field_table.h"

namespace plimsoll {
namespace {

using C = CanKdConfig;
using S = CanKdSizes;
using F = FieldTable<CanKdConfig>;
constexpr auto kIdentity = FieldRole::kIdentity;
constexpr auto kFree = FieldRole::kFree;
constexpr auto kPlace = FieldRole::kPlace;
constexpr double kCountMax = 1e12;
constexpr double kWidthMax = 65536;
constexpr double kRateMax = 1e3;

constexpr std::array kFields{
    F::text<&C::data>("data", kPlace, "Graph set to train on (plimsoll import can)"),
    F::text<&C::out>("out", kPlace, "Run folder to make"),
    F::limit<&C::memory_limit>("memory_limit",
                               "Memory the whole process may hold; 768MiB, 6GB, 25%"),
    F::limit<&C::disk_limit>("disk_limit", "Disk the run may fill"),
    F::text<&C::teacher_path>("teacher_path", kPlace,
                              "The teacher: a run, a file or a folder; none: this run's own"),
    F::choice<&C::stage>("stage", "all|autoencoder|curriculum|normal|fusion|evaluation",
                         "What this call does of the run; the rest may follow later", kFree),
    F::choice<&C::model_size>("model_size", "both|teacher|student", "Whose stages this call does",
                              kFree),
    F::widths<&C::teacher, &S::vgae_hidden_dims>("teacher_vgae_hidden_dims", 1, kWidthMax,
                                                 "Widths of the encoder, the latent's last"),
    F::whole<&C::teacher, &S::vgae_heads>("teacher_vgae_heads", kIdentity, 1, 256,
                                          "Heads of the encoder's first layer"),
    F::whole<&C::teacher, &S::vgae_embedding_dim>("teacher_vgae_embedding_dim", kIdentity, 1,
                                                  kWidthMax, "Width of an id in the autoencoder"),
    F::whole<&C::teacher, &S::gat_hidden>("teacher_gat_hidden", kIdentity, 1, kWidthMax,
                                          "Width of one head of the classifier"),
    F::whole<&C::teacher, &S::gat_layers>("teacher_gat_layers", kIdentity, 1, 64,
                                          "Attention layers of the classifier"),
    F::whole<&C::teacher, &S::gat_heads>("teacher_gat_heads", kIdentity, 1, 256,
                                         "Heads of each of them"),
    F::whole<&C::teacher, &S::gat_embedding_dim>("teacher_gat_embedding_dim", kIdentity, 1,
                                                 kWidthMax, "Width of an id in the classifier"),
    F::whole<&C::teacher, &S::gat_fc_layers>("teacher_gat_fc_layers", kIdentity, 1, 16,
                                             "Dense layers after pooling"),
    F::widths<&C::student, &S::vgae_hidden_dims>("student_vgae_hidden_dims", 1, kWidthMax,
                                                 "The same of the student"),
    F::whole<&C::student, &S::vgae_heads>("student_vgae_heads", kIdentity, 1, 256,
                                          "The same of the student"),
    F::whole<&C::student, &S::vgae_embedding_dim>("student_vgae_embedding_dim", kIdentity, 1,
                                                  kWidthMax, "The same of the student"),
    F::whole<&C::student, &S::gat_hidden>("student_gat_hidden", kIdentity, 1, kWidthMax,
                                          "The same of the student"),
    F::whole<&C::student, &S::gat_layers>("student_gat_layers", kIdentity, 1, 64,
                                          "The same of the student"),
    F::whole<&C::student, &S::gat_heads>("student_gat_heads", kIdentity, 1, 256,
                                         "The same of the student"),
    F::whole<&C::student, &S::gat_embedding_dim>("student_gat_embedding_dim", kIdentity, 1,
                                                 kWidthMax, "The same of the student"),
    F::whole<&C::student, &S::gat_fc_layers>("student_gat_fc_layers", kIdentity, 1, 16,
                                             "The same of the student"),
    F::choice<&C::gat_jk>("gat_jk", "cat|lstm", "How the classifier joins its layers"),
    F::real<&C::vgae_dropout>("vgae_dropout", 0, 0.99, "Share of the autoencoder's values dropped"),
    F::real<&C::gat_dropout>("gat_dropout", 0, 0.99, "Share of the classifier's values dropped"),
    F::whole<&C::seed>("seed", kIdentity, 0, 9e15, "Decides every random choice"),
    F::whole_or_auto<&C::batch_size>("batch_size", 1, 1 << 20,
                                     "Graphs per step; auto: planned once, inside the limit"),
    F::whole<&C::batch_nodes>("batch_nodes", kIdentity, 0, kCountMax,
                              "Nodes per step, at most; 0: no bound"),
    F::whole<&C::batch_edges>("batch_edges", kIdentity, 0, kCountMax,
                              "Edges per step, at most; 0: no bound"),
    F::whole<&C::min_steps_per_epoch>("min_steps_per_epoch", kIdentity, 1, 1e6,
                                      "Smaller batches rather than fewer steps"),
    F::whole<&C::max_epochs>("max_epochs", kIdentity, 1, 1e6, "Of each stage, at most"),
    F::whole<&C::patience>("patience", kIdentity, 1, 1e6,
                           "Epochs without improvement that end a stage"),
    F::whole<&C::student_gat_patience>("student_gat_patience", kIdentity, 1, 1e6,
                                       "The same for the student's classifier"),
    F::real<&C::vgae_lr>("vgae_lr", 0, kRateMax, "Learning rate of the autoencoder"),
    F::real<&C::gat_lr>("gat_lr", 0, kRateMax, "Learning rate of the classifier"),
    F::real<&C::fusion_lr>("fusion_lr", 0, kRateMax, "Learning rate of the fusion"),
    F::real<&C::weight_decay>("weight_decay", 0, kRateMax, "Added to the gradients (L2)"),
    F::real<&C::gradient_clip>("gradient_clip", 0, 1e6, "Norm of a step's gradients; 0: unbounded"),
    F::whole<&C::accumulate_grad_batches>("accumulate_grad_batches", kIdentity, 1, 1e6,
                                          "Batches whose gradients make one step"),
    F::choice<&C::precision>("precision", "32|bf16-mixed|16-mixed",
                             "Of products; 16-mixed is computed as bf16-mixed on the CPU"),
    F::on_off<&C::use_scheduler>("use_scheduler", kIdentity, "Learning rates follow a schedule"),
    F::choice<&C::scheduler_type>("scheduler_type", "cosine|step|exponential", "Which schedule"),
    F::whole<&C::scheduler_t_max>("scheduler_t_max", kIdentity, -1, 1e6,
                                  "cosine: epochs to its lowest; -1: max_epochs"),
    F::whole<&C::scheduler_step_size>("scheduler_step_size", kIdentity, 1, 1e6,
                                      "step: epochs between two reductions"),
    F::real<&C::scheduler_gamma>("scheduler_gamma", 0, 1,
                                 "step, exponential: factor of a reduction"),
    F::on_off<&C::gradient_checkpointing>("gradient_checkpointing", kFree,
                                          "Layers are computed again for the gradients, not kept"),
    F::on_off<&C::use_kd>("use_kd", kIdentity, "The student also learns from the teacher"),
    F::real<&C::kd_temperature>("kd_temperature", 1e-3, 1e3, "Of both classifiers' answers"),
    F::real<&C::kd_alpha>("kd_alpha", 0, 1, "Weight of the teacher; the rest is the task's"),
    F::real<&C::kd_vgae_latent_weight>("kd_vgae_latent_weight", 0, 1e6,
                                       "Weight: latents like the teacher's"),
    F::real<&C::kd_vgae_recon_weight>("kd_vgae_recon_weight", 0, 1e6,
                                      "Weight: reconstructions like the teacher's"),
    F::on_off<&C::use_teacher_cache>("use_teacher_cache", kFree,
                                     "The teacher's outputs are kept on disk, by graph"),
    F::whole<&C::clear_cache_every_n>("clear_cache_every_n", kFree, 0, kCountMax,
                                      "Steps between giving that cache's memory back; 0: never"),
    F::on_off<&C::offload_teacher_to_cpu>("offload_teacher_to_cpu", kFree,
                                          "The teacher holds no memory between steps"),
    F::real<&C::curriculum_start_ratio>("curriculum_start_ratio", 0, 1e6,
                                        "Normal graphs per attack in the first epoch"),
    F::real<&C::curriculum_end_ratio>("curriculum_end_ratio", 0, 1e6, "The same in the last"),
    F::real<&C::difficulty_percentile>("difficulty_percentile", 0, 100,
                                       "Normal graphs are drawn from above it, in the first epoch"),
    F::real<&C::difficulty_percentile_end>("difficulty_percentile_end", 0, 100,
                                           "The same in the last"),
    F::on_off<&C::use_vgae_mining>(
        "use_vgae_mining", kIdentity,
        "Difficulty is the autoencoder's error; false: the classifier's loss"),
    F::whole<&C::difficulty_cache_update>("difficulty_cache_update", kIdentity, 0, 1e6,
                                          "Epochs between scorings; 0: scored once"),
    F::whole<&C::scoring_chunk>("scoring_chunk", kFree, 1, 1 << 20,
                                "Graphs scored at once; changes memory, no score"),
    F::choice<&C::fusion_gat>("fusion_gat", "curriculum|normal", "Whose classifier is fused"),
    F::whole<&C::fusion_episodes>("fusion_episodes", kIdentity, 1, 1e6, "Episodes of the fusion"),
    F::whole<&C::fusion_hidden>("fusion_hidden", kIdentity, 1, kWidthMax, "Width of its layers"),
    F::whole<&C::fusion_batch>("fusion_batch", kIdentity, 1, 1 << 20, "Memories per step"),
    F::whole<&C::fusion_replay>("fusion_replay", kIdentity, 1, 1e8, "Memories kept"),
    F::real<&C::fusion_gamma>("fusion_gamma", 0, 1, "Worth of the next reward"),
    F::real<&C::fusion_epsilon>("fusion_epsilon", 0, 1, "Share of random choices at first"),
    F::real<&C::fusion_epsilon_decay>("fusion_epsilon_decay", 0, 1, "Factor of it per episode"),
    F::real<&C::fusion_epsilon_min>("fusion_epsilon_min", 0, 1, "Never less of it"),
    F::whole<&C::fusion_target_update>("fusion_target_update", kIdentity, 1, kCountMax,
                                       "Steps between copies to the target network"),
    F::text<&C::original_students>(
        "original_students", kPlace,
        "Published students to evaluate beside ours: a .safetensors file, or a folder of them"),
    F::on_off<&C::run_test>("run_test", kFree, "Evaluate on the test files at the end"),
    F::whole<&C::test_every_n_epochs>("test_every_n_epochs", kFree, 0, 1e6,
                                      "Epochs between evaluations on them; 0: none on the way"),
    F::whole<&C::log_every_n_steps>("log_every_n_steps", kFree, 1, kCountMax,
                                    "Steps between recorded losses"),
    F::whole<&C::save_top_k>("save_top_k", kIdentity, 0, 1,
                             "1: a stage ends with its best epoch; 0: with its last"),
    F::whole<&C::checkpoint_every_n_steps>("checkpoint_every_n_steps", kFree, 0, kCountMax,
                                           "0: one at the end of each epoch"),
    F::whole<&C::keep_checkpoints>("keep_checkpoints", kFree, 1, 1e6, "The newest ones are kept"),
    F::whole<&C::cleanup_every_n_steps>("cleanup_every_n_steps", kFree, 0, kCountMax,
                                        "Steps between giving unused memory back; 0: only under "
                                        "pressure and after evaluations"),
    F::bytes<&C::cache_bytes>("cache_bytes", "Memory of the graphs; -1: of all, if they fit", -1),
    F::bytes<&C::foreign_bytes>("foreign_bytes", "Set aside for code and libraries' own memory"),
    F::whole<&C::compute_threads>("compute_threads", kFree, 0, 4096,
                                  "Threads that compute; 0: one per core. The result's bits do "
                                  "not depend on it"),
    F::on_off<&C::tensorboard>("tensorboard", kFree, "Write event files under RUN/metrics"),
};

}  // namespace

template <>
const RecipeOptions& recipe_options<CanKdConfig>() noexcept {
  static const RecipeOptions options{
      .recipe = "can-kd",
      .fields = kFields,
      .data_advice = "name a graph set with --data DIR; `plimsoll import can` makes one",
      .keys_advice = "`plimsoll train can-kd --help` lists every key",
      .shorthands = can_kd::shorthands(),
      .ignored = can_kd::ignored_keys(),
      .groups = can_kd::key_groups(),
      .leading = "model_size"};
  return options;
}

}  // namespace plimsoll
