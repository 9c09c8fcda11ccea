// SPDX-License-Identifier: Apache-2.0
//
// Loops of contrastive losses over rows and their neighbours: plain float arrays in and out.
//
// Each kernel makes one pass where a chain of tensor operators would make many, and allocates
// nothing. Work is cut into fixed blocks and sums run in a fixed order, so results do not depend
// on the number of threads. contrast.h states the formulas.
//
// Reading order: lanes.h, this file, contrast.h.
//
// Threads: pure functions; each uses torch's own threads (at::parallel_for).
// Memory:  none; scratch is passed in.
#pragma once

#include <cstdint>

namespace plimsoll::kernels {

inline constexpr float kNormFloor = 1e-8F;  ///< norm(x) = x / max(‖x‖, kNormFloor).
inline constexpr int kNeighbors = 3;
inline constexpr std::int64_t kPairBlock = 32;  ///< Rows per unit of work.

[[nodiscard]] constexpr std::int64_t row_blocks(std::int64_t rows) noexcept {
  return (rows + kPairBlock - 1) / kPairBlock;
}

[[nodiscard]] constexpr std::int64_t padded_rows(std::int64_t rows) noexcept {
  return (rows + kPairBlock - 1) / kPairBlock * kPairBlock;
}

/// unit = norm(x), length = ‖x‖, row by row. `unit` may be `x`.
void unit_rows(const float* x, std::int64_t rows, std::int64_t dim, float* unit, float* length);

/// Gradient of unit_rows: grad_x from grad_unit (they may be the same array).
void unit_rows_backward(const float* grad_unit, const float* unit, const float* length,
                        std::int64_t rows, std::int64_t dim, float* grad_x);

/// radius = ‖c‖ and angle = atan2(q, c₀), q = copysign(‖(c₁ … c_{L−1})‖, c₁), row by row.
void polar_rows(const float* c, std::int64_t rows, std::int64_t label_dim, float* radius,
                float* angle);
/// Gradient of polar_rows; 0 wherever it is undefined.
void polar_rows_backward(const float* c, const float* grad_radius, const float* grad_angle,
                         std::int64_t rows, std::int64_t label_dim, float* grad_c);

/// out = norm(s·‖t‖·u), u = norm(cosθ·norm(t) + sinθ·norm(d)), row by row.
struct RotateRows {
  std::int64_t rows{0};
  std::int64_t dim{0};
  const float* x{nullptr};          ///< t, [rows, dim].
  const float* direction{nullptr};  ///< d = cWᵀ + b, [rows, dim].
  const float* theta{nullptr};      ///< [rows].
  const float* scale{nullptr};      ///< s, [rows].
};
void rotate_rows(const RotateRows& in, float* out, float* unit);

/// Gradients of rotate_rows. `grad_unit`, `grad_x` may be null.
struct RotateGradients {
  const float* grad_out{nullptr};
  const float* grad_unit{nullptr};
  float* grad_x{nullptr};
  float* grad_direction{nullptr};
  float* grad_theta{nullptr};
  float* grad_scale{nullptr};
};
void rotate_rows_backward(const RotateRows& in, const RotateGradients& grads);

/// Turns cosine similarities into exponentials: e = exp((s − 1)/τ) in place, −∞ giving 0.
/// Shape: s is [rows, rows]; column_parts is [row_blocks(rows), rows] scratch; row_sum,
/// column_sum and diagonal (the similarities s_ii before) are [rows].
/// Requires: |s| <= 1 + rounding and τ >= 0.025, so that nothing underflows.
void exponentiate(float* s, std::int64_t rows, float temperature, float* column_parts,
                  float* row_sum, float* column_sum, double* diagonal);

/// Turns those exponentials into the gradient of the symmetric InfoNCE, in place.
void nce_gradient(float* e, std::int64_t rows, float temperature, const float* row_sum,
                  const float* column_sum);

/// For each row of c: its kNeighbors nearest others by Euclidean distance (fewer when there are
/// fewer: −1), nearest first, and the other with the largest cosine; ties by lower index.
/// Shape: c is [rows, label_dim]; transposed is [2, label_dim, padded_rows(rows)] scratch; nearest
/// is
///        [rows, kNeighbors]; best_angle and best_cosine are [rows].
/// Requires: rows >= 2.
void find_neighbors(const float* c, std::int64_t rows, std::int64_t label_dim, float* transposed,
                    std::int64_t* nearest, std::int64_t* best_angle, float* best_cosine);

/// With Δ = a − b: cosine[k][i] = cos(Δ_i, Δ_{pair[k][i]}) for two lists of pairs, length = ‖Δ‖.
struct Displacements {
  std::int64_t rows{0};
  std::int64_t dim{0};
  const float* a{nullptr};
  const float* b{nullptr};
  const std::int64_t* pair[2]{nullptr, nullptr};  ///< A null list is left out.
};
void displace_rows(const Displacements& in, float* length, float* cosine0, float* cosine1);

/// Gradient with respect to a (that of b is its negative).
/// Shape: grad_* and scratch [3 × rows]: coefficient of Δ_i itself, then one per list.
struct DisplacementGradients {
  const float* length{nullptr};
  const float* cosine[2]{nullptr, nullptr};
  const float* grad_length{nullptr};              ///< May be null.
  const float* grad_cosine[2]{nullptr, nullptr};  ///< Null with its list.
  float* scratch{nullptr};
  float* grad_a{nullptr};
};
void displace_rows_backward(const Displacements& in, const DisplacementGradients& grads);

}  // namespace plimsoll::kernels
