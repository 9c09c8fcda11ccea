// SPDX-License-Identifier: Apache-2.0
//
// Hands: ranks that encode tiles of a step, and take gradients through them, for the one that has
// the run (decision 0052).
//
//   rank 0   lays out inputs and model → order → its tiles → compares → its tiles → sums, applies
//   others             wait for an order → their tiles → wait        → their tiles
//
// Tile t is rank t mod count's. Gradients of each tile are laid side by side and summed by rank 0
// in the order of tiles, as one process does it, so that the bits are its.
//
// Reading order: torch/rank_crew.h, tiles.h, this file, step.h.
//
// Threads: the thread that trains.
// Memory:  StepRoom::bytes_of(), shared, and leased by each rank; a tile's graph where it is made.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "plimsoll/governor.h"
#include "plimsoll/result.h"
#include "recipes/cosir/config.h"
#include "recipes/cosir/tiles.h"
#include "torch/rank_crew.h"

namespace plimsoll::cosir {

/// Tensors over shared memory: what a step passes between ranks. Built alike by all.
class StepRoom {
 public:
  /// Of steps of at most so many rows. `room` null: only its size is of interest.
  StepRoom(const Model& model, std::int64_t rows_most, std::shared_ptr<RankRows> room);
  [[nodiscard]] std::int64_t bytes() const noexcept { return used_; }

  at::Tensor image, text, conditions;  ///< [rows_most, width]
  at::Tensor groups, ids;              ///< int64 [rows_most]
  at::Tensor out, text_unit, encoded_image;
  at::Tensor out_slope, text_unit_slope, image_slope;
  at::Tensor of_conditions;               ///< Gradients, [rows_most, label_dim].
  std::vector<at::Tensor> of_parameters;  ///< Gradients, [tiles, …] for each parameter.
  at::Tensor defined;             ///< uint8: of three slopes; then for each tile of each gradient.
  std::vector<at::Tensor> model;  ///< Frozen, then trained.

 private:
  at::Tensor next(at::IntArrayRef shape, at::ScalarType kind);

  std::shared_ptr<RankRows> room_;
  std::int64_t used_{0};
};

class Hands {
 public:
  /// On all ranks at once. Borrows the crew and the model. Errors: kOverBudget; of the crew.
  static Result<std::unique_ptr<Hands>> open(RankCrew& crew, const CosirConfig& config,
                                             const Model& model, std::int64_t rows_most,
                                             Governor& governor);

  // ---- Of rank 0 ----

  /// The others are let go.
  ~Hands();
  Hands(const Hands&) = delete;
  Hands& operator=(const Hands&) = delete;

  /// Lays out a step and orders it. Gives what its tiles work on: in shared memory.
  /// Errors: of the crew; of another rank.
  Result<LossInput> begin(const LossInput& in);
  /// Room for the step's encoded rows.
  [[nodiscard]] Encoded encoded(std::int64_t rows) const;
  /// All ranks encode their tiles. Errors: as RankCrew::agree(), as those below.
  Result<void> encode(Tiles& tiles, Encoded& all);
  /// Does `compare`, which gives slopes, and lays them out.
  Result<void> compare(const std::function<Slopes()>& compare);
  /// All ranks take the gradients of their tiles.
  Result<void> differentiate(Tiles& tiles, const Slopes& slopes);
  /// Of a tile, as Tiles::gradients() has them.
  [[nodiscard]] std::vector<at::Tensor> gradients(const Tiles& tiles, std::int64_t tile) const;
  /// The others have their share of a step admitted. Errors: kOverBudget naming the rank.
  Result<void> admit();

  // ---- Of the others ----

  /// Makes their part of every step until rank 0 lets them go. Errors: as agree(), where a rank
  /// has ended.
  Result<void> serve();

 private:
  Hands(RankCrew& crew, const CosirConfig& config, const Model& model, Governor governor,
        StepRoom room);
  Result<void> step(std::int64_t rows, std::int64_t epoch);
  [[nodiscard]] LossInput input(std::int64_t rows, std::int64_t epoch) const;
  [[nodiscard]] bool own(std::int64_t tile) const noexcept;
  void lay(const Tiles& tiles, std::int64_t tile, const std::vector<at::Tensor>& made);

  RankCrew& crew_;
  const CosirConfig& config_;
  const Model& model_;
  LossOptions loss_;
  Governor governor_;
  StepRoom room_;
};

/// The run of a rank that is not the first, within with_crew(). Errors: of settling and of Hands.
Result<void> lend_a_hand(RankCrew& crew, const CosirConfig& config);

}  // namespace plimsoll::cosir
