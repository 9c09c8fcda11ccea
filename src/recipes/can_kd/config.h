// SPDX-License-Identifier: Apache-2.0
//
// Every option of `plimsoll train can-kd`. docs/recipes/can-kd.md says what each one does.
//
// The defaults are those of KD-GAT; python/plimsoll/compat/_kd_gat.py reads its spellings.
// `teacher_` and `student_` before an architecture's keys say whose. Reading order: run/config.h
// (fields and settings), this file.
//
// Threads: a value.   Memory: a few kilobytes.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "run/config.h"
#include "run/recipe.h"

namespace plimsoll {

/// Architecture of one autoencoder and one classifier: the teacher's or the student's.
struct CanKdSizes {
  std::string vgae_hidden_dims{};  ///< "1024,512,96": widths of the encoder, the last the latent's.
  std::int64_t vgae_heads{0};      ///< Of the encoder's first layer; the decoder has 4.
  std::int64_t vgae_embedding_dim{0};
  std::int64_t gat_hidden{0};
  std::int64_t gat_layers{0};
  std::int64_t gat_heads{0};
  std::int64_t gat_embedding_dim{0};
  std::int64_t gat_fc_layers{0};
};

struct CanKdConfig : RunConfig {
  CanKdConfig() {
    seed = 42;
    checkpoint_every_n_steps = 200;
  }

  std::string teacher_path{};      ///< "": the teacher of this run. A run, a file, a folder.
  std::string stage{"all"};        ///< all autoencoder curriculum normal fusion evaluation.
  std::string model_size{"both"};  ///< both teacher student: whose stages are run.
  CanKdSizes teacher{"1024,512,96", 4, 64, 64, 5, 8, 32, 3};
  CanKdSizes student{"80,40,16", 1, 4, 24, 2, 4, 8, 1};
  std::string gat_jk{"cat"};  ///< cat | lstm: jumping knowledge.
  double vgae_dropout{0.15};
  double gat_dropout{0.2};
  std::int64_t batch_size{4096};      ///< Graphs a step; 0: "auto", …
  std::int64_t batch_size_max{8192};  ///< … which chooses at most so many.
  std::int64_t batch_nodes{0};        ///< At most so many nodes a step; 0: no bound.
  std::int64_t batch_edges{0};
  std::int64_t min_steps_per_epoch{8};
  std::int64_t max_epochs{300};
  std::int64_t patience{100};  ///< Epochs without improvement before a stage ends.
  std::int64_t student_gat_patience{50};
  double vgae_lr{0.002};
  double gat_lr{0.003};
  double fusion_lr{0.001};
  double weight_decay{1e-4};
  double gradient_clip{1.0};  ///< Norm; 0: none.
  std::int64_t accumulate_grad_batches{1};
  std::string precision{"32"};  ///< 32 | bf16-mixed | 16-mixed (bf16 on the CPU, with a note).
  bool use_scheduler{false};
  std::string scheduler_type{"cosine"};  ///< cosine | step | exponential.
  std::int64_t scheduler_t_max{300};
  std::int64_t scheduler_step_size{50};
  double scheduler_gamma{0.1};
  bool gradient_checkpointing{true};
  bool use_kd{true};
  double kd_temperature{4.0};
  double kd_alpha{0.7};
  double kd_vgae_latent_weight{0.5};
  double kd_vgae_recon_weight{0.5};
  bool use_teacher_cache{true};           ///< Teacher outputs kept on disk by graph.
  std::int64_t clear_cache_every_n{100};  ///< Steps between giving the cache's pages back.
  bool offload_teacher_to_cpu{false};     ///< The teacher's bytes are 0 between steps.
  double curriculum_start_ratio{1.0};
  double curriculum_end_ratio{10.0};
  double difficulty_percentile{75.0};
  double difficulty_percentile_end{95.0};
  bool use_vgae_mining{true};
  std::int64_t difficulty_cache_update{10};  ///< Epochs between scorings; 0: scored once.
  std::int64_t scoring_chunk{500};           ///< Graphs a forward pass when scoring.
  std::string fusion_gat{"curriculum"};      ///< curriculum | normal: which classifier is fused.
  std::int64_t fusion_episodes{500};
  std::int64_t fusion_hidden{128};
  std::int64_t fusion_batch{128};
  std::int64_t fusion_replay{10000};
  double fusion_gamma{0.9};
  double fusion_epsilon{0.2};
  double fusion_epsilon_decay{0.995};
  double fusion_epsilon_min{0.01};
  std::int64_t fusion_target_update{100};
  std::string original_students{};  ///< "": none. Published students, evaluated beside ours.
  bool run_test{true};
  std::int64_t test_every_n_epochs{5};  ///< Epochs between evaluations of the test files; 0: none.
  std::int64_t log_every_n_steps{50};
  std::int64_t save_top_k{1};    ///< 1: a stage ends with its best epoch; 0: its last.
  std::int64_t cache_bytes{-1};  ///< Of the graphs; -1: all of them when they fit.
};

template <>
const RecipeOptions& recipe_options<CanKdConfig>() noexcept;

namespace can_kd {
/// The files in python/plimsoll/recipes/can_kd/presets/.
[[nodiscard]] std::span<const Preset> presets() noexcept;
}  // namespace can_kd

using CanKdSettings = Settings<CanKdConfig>;

/// What the recipe is called, and its options; can_kd.h has what it does.
Recipe describe_can_kd();

}  // namespace plimsoll
