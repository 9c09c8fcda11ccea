// SPDX-License-Identifier: Apache-2.0
//
// SynthModel: the random model behind synth_cosir(). A row is a function of (seed, row number).
//
// Random numbers are sums of four uniform bytes, and sums run in a fixed order without fused
// operations; so rows are the same bits for any thread count, instruction set and C library.
//
// Reading order: include/plimsoll/synth.h, this file, synth_model.cpp.
//
// Threads: immutable once made; fill() may be called concurrently.
// Memory:  64 × (image_dim + text_dim) floats, classes × 64 floats.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace plimsoll {

class SynthModel {
 public:
  static constexpr std::int64_t kLatent = 64;

  /// Requires: dims >= 2, classes >= 0.
  SynthModel(std::uint64_t seed, std::int64_t image_dim, std::int64_t text_dim,
             std::int64_t classes);

  /// Writes rows first, first + 1, … .
  /// Shape: image is [rows, image_dim], text is [rows, text_dim].
  void fill(std::int64_t first, std::span<float> image, std::span<float> text) const;

 private:
  struct Tile;
  void fill_tile(std::int64_t first, std::int64_t rows, float* image, float* text,
                 Tile& tile) const;

  std::uint64_t seed_;
  std::int64_t image_dim_;
  std::int64_t text_dim_;
  std::int64_t image_width_;  // Dims rounded up to whole vectors.
  std::int64_t text_width_;
  std::int64_t classes_;
  std::vector<float> image_map_;  // A, [kLatent, image_width_].
  std::vector<float> text_map_;   // B, [kLatent, text_width_].
  std::vector<float> plane_;      // The two directions of the condition, [2, text_width_].
  std::vector<float> centres_;    // [classes, kLatent].
};

}  // namespace plimsoll
