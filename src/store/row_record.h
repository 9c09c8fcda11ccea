// SPDX-License-Identifier: Apache-2.0
//
// What is behind a record's header, whatever its weights are stored as: read, set, changed by one
// optimizer step. Everything else about a record is the same bytes to the store.
//
// Reading order: docs/formats/embedding_store.md, embedding_format.h, this file, row_bfloat16.h.
//
// Threads: pure functions of the record, which one thread uses at a time; RecordStep is const.
// Memory:  none; a step of bfloat16 rows needs dim floats of the caller's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "plimsoll/embedding_store.h"
#include "store/embedding_format.h"
#include "store/row_optimizer.h"

namespace plimsoll {

/// Copies the weights out. Shape: weights is float32 [dim].
void read_weights(const TableShape& shape, const std::byte* record, float* weights) noexcept;

/// Copies weights and slots out. Shape: values is float32 [dim + state_floats].
void read_values(const TableShape& shape, const std::byte* record, float* values) noexcept;

/// Sets the sequence and the first `width` floats, weights rounded to nearest, and zeroes those
/// behind them. Requires: width is dim or dim + state_floats.
void write_values(const TableShape& shape, std::uint32_t sequence, const float* values,
                  std::int64_t width, std::byte* record) noexcept;

/// One optimizer step of a record.
class RecordStep {
 public:
  /// Requires: as RowOptimizerStep.
  RecordStep(const TableShape& shape, const RowInit& init, const RowOptimizerOptions& optimizer,
             std::span<AdamCorrection> corrections) noexcept;
  RecordStep() noexcept = default;

  /// Changes weights and slots, and counts the step. `id`: of the row; it decides how a bfloat16
  /// weight is rounded. `scratch`: float32 [shape.scratch_floats()].
  void step(std::byte* record, std::int64_t id, const float* grad, double rate_scale,
            float* scratch) const noexcept;

 private:
  TableShape shape_{};
  std::uint64_t seed_{0};
  RowOptimizerStep step_;
};

}  // namespace plimsoll
