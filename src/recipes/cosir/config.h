// SPDX-License-Identifier: Apache-2.0
//
// Every option of `plimsoll train cosir`. docs/recipes/cosir.md says what each one does.
//
// Reading order: run/config.h (fields and settings), this file, then config.cpp.
//
// Threads: a value.   Memory: a few kilobytes.
#pragma once

#include <cstdint>
#include <string>

#include "run/config.h"
#include "run/recipe.h"

namespace plimsoll {

struct CosirConfig : RunConfig {
  std::int64_t epochs{30};
  std::int64_t batch_size{2048};  ///< 0: "auto", until train_cosir() has planned it.
  std::int64_t dim{0};            ///< 0: the features' own width when both agree, else 256.
  std::int64_t label_dim{2};
  std::string projections{"auto"};  ///< auto | true | false.
  bool gradient_caching{false};
  double temperature{0.07};
  double loss_infonce{1.0};
  double loss_laplacian{0.7};
  double loss_angular{0.3};
  double loss_radius{0.3};
  double loss_rotation{0.3};
  double loss_boundary{0.0};
  double lr{1e-5};
  double projection_lr{1e-3};
  double weight_decay{0.05};
  std::string label_dtype{"float32"};    ///< float32 | bfloat16.
  std::string label_optimizer{"adamw"};  ///< adamw | adamw_fresh | adagrad.
  double label_lr{0.1};
  double label_weight_decay{0.05};
  std::string label_init{"normal"};  ///< normal | zeros | uniform.
  double label_init_scale{0.1};
  std::string label_schedule{"constant"};  ///< constant | cosine.
  std::string label_layout{"auto"};        ///< auto | any_order | sample_order.
  bool drop_last{false};
  std::int64_t holdout{-1};  ///< Groups; −1: 5,000 pairs' worth, at most a fifth of the groups.
  std::int64_t eval_pairs{5000};
  std::int64_t eval_every_n_epochs{5};  ///< 0: only before and after training.
  std::int64_t oracle_angles{12};
  std::int64_t phase2_epochs{0};
  double phase2_lr{1e-5};
  std::int64_t queue_bytes{0};  ///< 0: chosen by the loader.
  std::int64_t store_bytes{0};  ///< 0: chosen within the limit.
  std::int64_t cache_bytes{0};  ///< 0: chosen within the limit.
  std::int64_t loader_threads{2};
  std::int64_t io_threads{8};
  std::int64_t stats_every_n_epochs{1};
  std::int64_t metrics_every_n_steps{10};
};

template <>
const RecipeOptions& recipe_options<CosirConfig>() noexcept;

using CosirSettings = Settings<CosirConfig>;

/// What the recipe is called, and its options; cosir.h has what it does.
Recipe describe_cosir();

}  // namespace plimsoll
