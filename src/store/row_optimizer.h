// SPDX-License-Identifier: Apache-2.0
//
// RowOptimizerStep: one optimizer step of one row, in place, with the bits of a plain loop.
//
// The order of operations is that of torch.optim's single-tensor code. No operation is fused or
// reassociated, so the vectorised and the scalar code give the same bits.
// Source: Kingma and Ba, "Adam" (ICLR 2015);
//         Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (ICLR 2019);
//         Duchi et al., "Adaptive Subgradient Methods" (JMLR 12, 2011);
//         row-wise: Mudigere et al., "Software-Hardware Co-design ..." (ISCA 2022), section 4.1.2.
//
// Threads: step() is const and thread-safe.
// Memory:  kCorrections bias corrections in memory the caller provides.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "plimsoll/embedding_store.h"

namespace plimsoll {

inline constexpr std::array kRowOptimizers{RowOptimizer::kAdamW,       RowOptimizer::kAdamWFresh,
                                           RowOptimizer::kAdagrad,     RowOptimizer::kSgd,
                                           RowOptimizer::kSgdMomentum, RowOptimizer::kRowAdagrad,
                                           RowOptimizer::kAdam};

/// Optimizer floats kept per weight: 0, 1 or 2.
[[nodiscard]] std::int64_t optimizer_slots(RowOptimizer kind) noexcept;
/// Optimizer floats kept per row beside them: 0 or 1.
[[nodiscard]] std::int64_t optimizer_row_slots(RowOptimizer kind) noexcept;
/// "adamw", "adamw_fresh", "adagrad", "sgd", "sgd_momentum", "row_adagrad", "adam".
[[nodiscard]] const char* optimizer_name(RowOptimizer kind) noexcept;
/// Errors: kInvalidArgument naming the number that makes no sense.
[[nodiscard]] Result<void> check_optimizer(const RowOptimizerOptions& options);

/// AdamW's bias corrections after t steps: 1 − beta1^t and sqrt(1 − beta2^t).
struct AdamCorrection {
  double bias1{1.0};
  float root2{1.0F};
};
[[nodiscard]] AdamCorrection adam_correction(const RowOptimizerOptions& options,
                                             std::int64_t t) noexcept;

class RowOptimizerStep {
 public:
  /// How many steps' corrections are kept; a row beyond them has its own computed each time.
  static constexpr std::int64_t kCorrections = 1024;

  /// Requires: corrections.size() == kCorrections; they are filled in here.
  RowOptimizerStep(const RowOptimizerOptions& options, std::span<AdamCorrection> corrections,
                   std::int64_t dim) noexcept;
  RowOptimizerStep() noexcept = default;

  /// Changes weights and slots of one row that has had `sequence` steps before.
  /// Shape: weights and grad are float32 [dim], slots float32 [dim × slots + row slots].
  void step(float* weights, float* slots, const float* grad, std::uint32_t sequence,
            double rate_scale) const noexcept;

 private:
  void step_adam(float* weights, float* slots, const float* grad, std::uint32_t sequence,
                 double rate) const noexcept;

  RowOptimizerOptions options_{};
  std::span<const AdamCorrection> corrections_{};
  std::int64_t dim_{0};
  bool wide_{false};  // The CPU has AVX2.
};

/// Whether every value is neither NaN nor infinite.
[[nodiscard]] bool all_finite(const float* values, std::int64_t count) noexcept;

}  // namespace plimsoll
