// SPDX-License-Identifier: Apache-2.0
//
// Synthetic data with something in it to learn, for the `cosir` recipe.
//
// A pair has a latent vector z (64 numbers, around one of `classes` centres) and a hidden
// condition, a direction in a plane. image = norm(A z + noise); text = norm(B z + the condition
// along two fixed directions + noise). A and B are alike where the widths are, so text and image
// are partly aligned, as CLIP's are; rotating each text by its own two-dimensional condition aligns
// them better.
//
// Reading order: feature_store.h, this file, src/data/synth_model.h.
//
// Threads: runs `threads` of its own. A row depends on (seed, its number) alone.
// Memory:  (threads + 1) × 4 MiB and the writer's buffer, leased (Tag::kOther).
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>

#include "plimsoll/feature_store.h"
#include "plimsoll/governor.h"
#include "plimsoll/result.h"

namespace plimsoll {

struct CosirSynthOptions {
  std::int64_t rows{0};
  std::filesystem::path out{};  ///< Must not exist, or be empty.
  std::int64_t image_dim{512};
  std::int64_t text_dim{512};
  std::int64_t classes{1000};  ///< Centres of the latent vectors; 0: none.
  std::uint64_t seed{0};
  int threads{2};
};

/// Writes columns "image" and "text" (float32, unit length) for dense ids 0 … rows−1.
///
/// `progress(done, total)` in rows is called now and then; returning false cancels.
/// Errors: kInvalidArgument, kOverBudget, kIo (disk full, or too little space to begin with).
Result<FeatureInfo> synth_cosir(Governor governor, const CosirSynthOptions& options,
                                const std::function<bool(std::int64_t, std::int64_t)>& progress);

}  // namespace plimsoll
