// SPDX-License-Identifier: Apache-2.0
//
// The table of `can-kd` options.
#include "recipes/can_kd/config.h"

#include <array>
#include <memory>

#include "run/field_table.h"

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
    F::data("Graph set to train on (plimsoll import can)"),
    F::out(),
    F::memory_limit(),
    F::disk_limit(),
    F::text<&C::teacher_path>(
        "teacher_path", kPlace,
        "Teacher to distil from: a run, a weights file or a folder; empty: this run's own teacher"),
    F::choice<&C::stage>(
        "stage", "all|autoencoder|curriculum|normal|fusion|evaluation",
        "Stage of training that this call does; the others may follow by later calls", kFree),
    F::choice<&C::model_size>("model_size", "both|teacher|student",
                              "Model that this call trains: the teacher, the student or both",
                              kFree),
    F::widths<&C::teacher, &S::vgae_hidden_dims>(
        "teacher_vgae_hidden_dims", 1, kWidthMax,
        "Widths of the teacher autoencoder's layers, the latent's last"),
    F::whole<&C::teacher, &S::vgae_heads>(
        "teacher_vgae_heads", kIdentity, 1, 256,
        "Attention heads of the teacher autoencoder's first layer"),
    F::whole<&C::teacher, &S::vgae_embedding_dim>(
        "teacher_vgae_embedding_dim", kIdentity, 1, kWidthMax,
        "Width of the CAN-id embedding in the teacher autoencoder"),
    F::whole<&C::teacher, &S::gat_hidden>("teacher_gat_hidden", kIdentity, 1, kWidthMax,
                                          "Width of one attention head of the teacher classifier"),
    F::whole<&C::teacher, &S::gat_layers>("teacher_gat_layers", kIdentity, 1, 64,
                                          "Number of attention layers of the teacher classifier"),
    F::whole<&C::teacher, &S::gat_heads>("teacher_gat_heads", kIdentity, 1, 256,
                                         "Attention heads of each layer of the teacher classifier"),
    F::whole<&C::teacher, &S::gat_embedding_dim>(
        "teacher_gat_embedding_dim", kIdentity, 1, kWidthMax,
        "Width of the CAN-id embedding in the teacher classifier"),
    F::whole<&C::teacher, &S::gat_fc_layers>(
        "teacher_gat_fc_layers", kIdentity, 1, 16,
        "Number of dense layers after pooling in the teacher classifier"),
    F::widths<&C::student, &S::vgae_hidden_dims>(
        "student_vgae_hidden_dims", 1, kWidthMax,
        "Widths of the student autoencoder's layers, the latent's last"),
    F::whole<&C::student, &S::vgae_heads>(
        "student_vgae_heads", kIdentity, 1, 256,
        "Attention heads of the student autoencoder's first layer"),
    F::whole<&C::student, &S::vgae_embedding_dim>(
        "student_vgae_embedding_dim", kIdentity, 1, kWidthMax,
        "Width of the CAN-id embedding in the student autoencoder"),
    F::whole<&C::student, &S::gat_hidden>("student_gat_hidden", kIdentity, 1, kWidthMax,
                                          "Width of one attention head of the student classifier"),
    F::whole<&C::student, &S::gat_layers>("student_gat_layers", kIdentity, 1, 64,
                                          "Number of attention layers of the student classifier"),
    F::whole<&C::student, &S::gat_heads>("student_gat_heads", kIdentity, 1, 256,
                                         "Attention heads of each layer of the student classifier"),
    F::whole<&C::student, &S::gat_embedding_dim>(
        "student_gat_embedding_dim", kIdentity, 1, kWidthMax,
        "Width of the CAN-id embedding in the student classifier"),
    F::whole<&C::student, &S::gat_fc_layers>(
        "student_gat_fc_layers", kIdentity, 1, 16,
        "Number of dense layers after pooling in the student classifier"),
    F::choice<&C::gat_jk>(
        "gat_jk", "cat|lstm",
        "Jumping knowledge of the classifier: how the outputs of its layers are joined"),
    F::real<&C::vgae_dropout>("vgae_dropout", 0, 0.99, "Dropout rate of the autoencoder"),
    F::real<&C::gat_dropout>("gat_dropout", 0, 0.99, "Dropout rate of the classifier"),
    F::seed(),
    F::whole_or_auto<&C::batch_size>("batch_size", 1, 1 << 20,
                                     "Batch size, in graphs; auto: the largest that fits, planned "
                                     "once (`plimsoll plan can-kd`)"),
    F::whole<&C::batch_size_max>("batch_size_max", kFree, 1, 1 << 20,
                                 "Most graphs that batch_size = auto chooses"),
    F::whole<&C::batch_nodes>("batch_nodes", kIdentity, 0, kCountMax,
                              "Most nodes of a batch; 0: no bound"),
    F::whole<&C::batch_edges>("batch_edges", kIdentity, 0, kCountMax,
                              "Most edges of a batch; 0: no bound"),
    F::whole<&C::min_steps_per_epoch>(
        "min_steps_per_epoch", kIdentity, 1, 1e6,
        "Least steps of an epoch: batches are made smaller rather than fewer"),
    F::whole<&C::max_epochs>("max_epochs", kIdentity, 1, 1e6, "Most epochs of a stage"),
    F::whole<&C::patience>("patience", kIdentity, 1, 1e6,
                           "Epochs without improvement that end a stage early"),
    F::whole<&C::student_gat_patience>(
        "student_gat_patience", kIdentity, 1, 1e6,
        "Epochs without improvement that end the student classifier's stages early"),
    F::real<&C::vgae_lr>("vgae_lr", 0, kRateMax, "Learning rate of the autoencoder"),
    F::real<&C::gat_lr>("gat_lr", 0, kRateMax, "Learning rate of the classifier"),
    F::real<&C::fusion_lr>("fusion_lr", 0, kRateMax, "Learning rate of the fusion's Q-network"),
    F::real<&C::weight_decay>("weight_decay", 0, kRateMax,
                              "Weight decay, added to the gradients (L2)"),
    F::real<&C::gradient_clip>("gradient_clip", 0, 1e6,
                               "Largest norm of a step's gradients (clipping); 0: no clipping"),
    F::whole<&C::accumulate_grad_batches>(
        "accumulate_grad_batches", kIdentity, 1, 1e6,
        "Number of batches whose gradients are accumulated for one optimizer step"),
    F::choice<&C::precision>(
        "precision", "32|bf16-mixed|16-mixed",
        "Precision of matrix products; on the CPU 16-mixed is computed as bf16-mixed"),
    F::on_off<&C::use_scheduler>(
        "use_scheduler", kIdentity,
        "Learning-rate schedule: true to use scheduler_type, false for constant rates"),
    F::choice<&C::scheduler_type>("scheduler_type", "cosine|step|exponential",
                                  "Kind of learning-rate schedule"),
    F::whole<&C::scheduler_t_max>(
        "scheduler_t_max", kIdentity, -1, 1e6,
        "Epochs until the cosine schedule is at its lowest; -1: max_epochs"),
    F::whole<&C::scheduler_step_size>("scheduler_step_size", kIdentity, 1, 1e6,
                                      "Epochs between two reductions of the step schedule"),
    F::real<&C::scheduler_gamma>("scheduler_gamma", 0, 1,
                                 "Factor of one reduction of the step and exponential schedules"),
    F::on_off<&C::gradient_checkpointing>(
        "gradient_checkpointing", kFree,
        "Gradient checkpointing: layers are computed again for their gradients; less memory"),
    F::on_off<&C::use_kd>("use_kd", kIdentity,
                          "Knowledge distillation: the student also learns from the teacher"),
    F::real<&C::kd_temperature>("kd_temperature", 1e-3, 1e3,
                                "Softmax temperature for distillation"),
    F::real<&C::kd_alpha>("kd_alpha", 0, 1,
                          "Weight of the distillation loss; the task's loss has the rest"),
    F::real<&C::kd_vgae_latent_weight>(
        "kd_vgae_latent_weight", 0, 1e6,
        "Weight of the distillation loss on the autoencoder's latent values"),
    F::real<&C::kd_vgae_recon_weight>(
        "kd_vgae_recon_weight", 0, 1e6,
        "Weight of the distillation loss on the autoencoder's reconstructions"),
    F::on_off<&C::use_teacher_cache>("use_teacher_cache", kFree,
                                     "Cache on disk of the teacher's outputs, by graph"),
    F::whole<&C::clear_cache_every_n>(
        "clear_cache_every_n", kFree, 0, kCountMax,
        "Steps between returns of the teacher cache's memory to the system; 0: never"),
    F::on_off<&C::offload_teacher_to_cpu>(
        "offload_teacher_to_cpu", kFree,
        "Teacher weights are read for each step and hold no memory between steps"),
    F::real<&C::curriculum_start_ratio>(
        "curriculum_start_ratio", 0, 1e6,
        "Normal graphs per attack graph in the first epoch of the curriculum"),
    F::real<&C::curriculum_end_ratio>(
        "curriculum_end_ratio", 0, 1e6,
        "Normal graphs per attack graph in the last epoch of the curriculum"),
    F::real<&C::difficulty_percentile>(
        "difficulty_percentile", 0, 100,
        "Percentile of difficulty above which normal graphs are drawn, in the first epoch"),
    F::real<&C::difficulty_percentile_end>(
        "difficulty_percentile_end", 0, 100,
        "Percentile of difficulty above which normal graphs are drawn, in the last epoch"),
    F::on_off<&C::use_vgae_mining>(
        "use_vgae_mining", kIdentity,
        "Difficulty of a graph is the autoencoder's error (true) or the classifier's loss (false)"),
    F::whole<&C::difficulty_cache_update>(
        "difficulty_cache_update", kIdentity, 0, 1e6,
        "Epochs between scorings of all graphs' difficulty; 0: scored once"),
    F::whole<&C::scoring_chunk>("scoring_chunk", kFree, 1, 1 << 20,
                                "Number of graphs scored at once; changes memory, not the scores"),
    F::choice<&C::fusion_gat>(
        "fusion_gat", "curriculum|normal",
        "Classifier that the fusion uses: the one of the curriculum or of the normal stage"),
    F::whole<&C::fusion_episodes>("fusion_episodes", kIdentity, 1, 1e6,
                                  "Number of episodes of the fusion's Q-learning"),
    F::whole<&C::fusion_hidden>("fusion_hidden", kIdentity, 1, kWidthMax,
                                "Width of the Q-network's hidden layers"),
    F::whole<&C::fusion_batch>(
        "fusion_batch", kIdentity, 1, 1 << 20,
        "Batch size of the Q-network, in transitions from the replay buffer"),
    F::whole<&C::fusion_replay>("fusion_replay", kIdentity, 1, 1e8,
                                "Replay buffer size, in transitions"),
    F::real<&C::fusion_gamma>("fusion_gamma", 0, 1, "Discount factor of the Q-network"),
    F::real<&C::fusion_epsilon>("fusion_epsilon", 0, 1,
                                "Exploration rate (epsilon) of the Q-learning at first"),
    F::real<&C::fusion_epsilon_decay>("fusion_epsilon_decay", 0, 1,
                                      "Factor of the exploration rate from episode to episode"),
    F::real<&C::fusion_epsilon_min>("fusion_epsilon_min", 0, 1,
                                    "Lowest exploration rate of the Q-learning"),
    F::whole<&C::fusion_target_update>(
        "fusion_target_update", kIdentity, 1, kCountMax,
        "Steps between copies of the Q-network to its target network"),
    F::text<&C::original_students>("original_students", kPlace,
                                   "Published students to evaluate beside this run's: a "
                                   ".safetensors file, or a folder of them"),
    F::on_off<&C::run_test>("run_test", kFree, "Evaluation on the test files at the end"),
    F::whole<&C::test_every_n_epochs>(
        "test_every_n_epochs", kFree, 0, 1e6,
        "Epochs between evaluations on the test files during training; 0: none"),
    F::whole<&C::log_every_n_steps>("log_every_n_steps", kFree, 1, kCountMax,
                                    "Steps between recorded losses"),
    F::whole<&C::save_top_k>("save_top_k", kIdentity, 0, 1,
                             "Model kept of a stage: 1: of its best epoch; 0: of its last"),
    F::checkpoint_every_n_steps(),
    F::keep_checkpoints(),
    F::cleanup_every_n_steps(),
    F::bytes<&C::cache_bytes>(
        "cache_bytes", "Memory of the graphs; 0: read from disk; -1: all graphs, if they fit", -1),
    F::foreign_bytes(),
    F::compute_threads(
        kFree,
        "Number of threads that compute; 0: one per core. The result's bits do not depend on it"),
    F::tensorboard(),
};

}  // namespace

template <>
const RecipeOptions& recipe_options<CanKdConfig>() noexcept {
  static const RecipeOptions options{
      .recipe = "can-kd",
      .fields = kFields,
      .data_advice = "name a graph set with --data DIR; `plimsoll import can` makes one",
      .keys_advice = "`plimsoll train can-kd --help` lists every key",
      .presets = can_kd::presets()};
  return options;
}

Recipe describe_can_kd() {
  return {
      .name = recipe_options<CanKdConfig>().recipe,
      .about = "Intrusion detection on CAN-bus graphs: a teacher, and a student of it",
      .unit = "graphs",
      .train_examples =
          "  plimsoll train can-kd --data data/ --out run/ --memory-limit 1GiB --config small\n"
          "  plimsoll resume run/ --stage fusion --json       the next stage of the same run\n"
          "  plimsoll train can-kd --config can_kd.toml --model-size student --teacher-path "
          "teacher/",
      .plan_example = "plimsoll plan can-kd --data data/ --memory-limit 1GiB --stage curriculum",
      .choices = "checkpointing, precision, where the teacher is",
      .effective_batch = true,
      .settings = [] { return std::make_unique<CanKdSettings>(); }};
}

}  // namespace plimsoll
