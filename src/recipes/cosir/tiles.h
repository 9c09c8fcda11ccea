// SPDX-License-Identifier: Apache-2.0
//
// Tiles: rows of a step that are encoded together, and whose gradients are taken together.
//
// Sums over rows go tile by tile, so that they are the same whether a tile's graph was kept or is
// made again, and whichever process has made it. Source: Gao et al., "Scaling Deep Contrastive
// Learning Batch Size under Memory Limited Setup" (RepL4NLP 2021), section 3.
// Reading order: loss.h, this file, hands.h, step.h.
//
// Threads: as torch operators.
// Memory:  of a tile that is kept its graph; with gradient_caching none is, and a second pass makes
//          the same bits.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "recipes/cosir/loss.h"
#include "recipes/cosir/model.h"

namespace plimsoll::cosir {

/// Rows whose graph is one.
inline constexpr std::int64_t kTileRows = 512;

[[nodiscard]] constexpr std::int64_t tiles_of(std::int64_t rows) noexcept {
  return (rows + kTileRows - 1) / kTileRows;
}

/// Of a loss by encoded rows, contiguous; undefined where there is none.
struct Slopes {
  at::Tensor out, text_unit, image;  ///< [rows, dim]
  at::Tensor text;                   ///< Of the first tile's first rows.
};

/// Room for all encoded rows of a step; `text` and `radius` are undefined. Image: where InfoNCE
/// compares it.
[[nodiscard]] Encoded empty_encoded(const Model& model, const LossOptions& options,
                                    std::int64_t rows);

/// What the combiner and the projections are trained by, in that order.
[[nodiscard]] std::vector<at::Tensor> trained_parameters(const Model& model);

class Tiles {
 public:
  /// Of one step; borrows the model. `in`: the whole batch.
  Tiles(const Model& model, const LossOptions& options, bool gradient_caching, const LossInput& in);

  [[nodiscard]] std::int64_t count() const noexcept { return tiles_of(rows_); }

  /// Encodes a tile into its rows of `all`; the first one also makes all.text.
  void encode(std::int64_t tile, Encoded& all);

  /// Gradients of the tile's conditions, then of trained_parameters(). Undefined where there is
  /// none; empty where the slopes reach nothing of it. Requires: encode() of that tile.
  [[nodiscard]] std::vector<at::Tensor> gradients(std::int64_t tile, const Slopes& slopes);

  [[nodiscard]] static std::int64_t first_row(std::int64_t tile) noexcept {
    return tile * kTileRows;
  }
  [[nodiscard]] std::int64_t rows_of(std::int64_t tile) const noexcept;

 private:
  struct Tile {
    LossInput in;
    Encoded rows;
  };
  [[nodiscard]] Tile made(std::int64_t tile) const;

  const Model& model_;
  LossOptions options_;
  bool caching_;
  LossInput in_;
  std::int64_t rows_;
  at::Tensor values_;  // Of the conditions.
  std::vector<std::optional<Tile>> kept_;
};

}  // namespace plimsoll::cosir
