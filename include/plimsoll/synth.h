// SPDX-License-Identifier: Apache-2.0
//
// Synthetic image-text pairs with structure that `cosir` can learn, of any number.
//
// Threads: free function; uses its own threads, and the result does not depend on them.
// Memory:  two blocks of rows and the writer's buffer, leased.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>

#include "plimsoll/feature_store.h"
#include "plimsoll/governor.h"
#include "plimsoll/result.h"

namespace plimsoll {

struct SynthOptions {
  std::int64_t rows{0};
  std::filesystem::path out{};  ///< Must not exist, or be empty.
  std::int64_t image_dim{512};
  std::int64_t text_dim{512};
  std::uint64_t seed{0};
  int threads{2};
};

/// Writes a FeatureStore with float32 columns "image" [image_dim] and "text" [text_dim], ids
/// 0 … rows−1, every vector of length 1.
///
/// A pair shares a 64-dimensional latent z. Both sides are fixed random linear maps of it (the same
/// map when the widths agree, as in CLIP's joint space) plus independent noise; the image also has
/// a component at a hidden angle per pair in a fixed plane, which the text lacks: what a
/// condition can learn. Row i depends on (seed, i) alone.
/// Errors: kInvalidArgument; those of FeatureWriter. `progress(done, total)` in rows; false
/// cancels.
Result<FeatureInfo> synth_cosir(Governor governor, const SynthOptions& options,
                                const std::function<bool(std::int64_t, std::int64_t)>& progress);

}  // namespace plimsoll
