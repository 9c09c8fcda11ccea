// SPDX-License-Identifier: Apache-2.0
//
// Operators over rows that are compared with each other: contrastive losses, and what turns rows.
//
// Each is torch.ops.plimsoll.NAME too (operators.h says what runs where). A kernel replaces a chain
// of torch's operators: fewer passes, fewer temporaries, sums in a fixed order, and so the same
// bits for any number of threads. norm(x) = x / max(‖x‖, 1e-8). Gradients of gradients are refused.
// Reading order: this file, contrast_loops.h, contrast_composed.cpp.
//
// Threads: as torch operators.   Memory: outputs, and what backward needs, stated per function.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace plimsoll::kernels {

/// Refused below: exponentials of similarities would underflow. See exponentiate().
inline constexpr double kTemperatureMin = 0.025;

/// norm(x), row-wise. Saves its output and one float a row.
/// Shape: x is [B, D].
at::Tensor normalize_rows(const at::Tensor& x);

/// Radius ‖x‖ and angle atan2(q, x₀), q = copysign(‖(x₁ …)‖, x₁), [B] each.
struct Polar {
  at::Tensor radius;
  at::Tensor angle;
};
/// Shape: x is [B, L]. Gradients are 0 wherever they are undefined.
Polar polar_coordinates(const at::Tensor& x);

/// Turned rows, and norm(x), both [B, D].
struct Rotated {
  at::Tensor out;
  at::Tensor unit;  ///< Takes no gradient where x takes none.
};
/// out = norm(scale·‖x‖·norm(cos(angle)·norm(x) + sin(angle)·norm(direction))). Saves its inputs
/// alone. Shape: x, direction [B, D]; angle, scale [B].
Rotated rotate_toward(const at::Tensor& x, const at::Tensor& direction, const at::Tensor& angle,
                      const at::Tensor& scale);

/// Symmetric InfoNCE of rows of norm 1: the mean of both cross entropies of a·bᵀ / temperature,
/// each row's own the target. Rows i ≠ j of one group are no negatives of each other. Computes its
/// gradients at once, so that the [B, B] matrix is gone when it returns. Shape: a, b [B, D]; groups
/// int64 [B]. Returns a scalar. Requires: B >= 2 and temperature >= kTemperatureMin. Source: van
/// den Oord et al., "Representation Learning with Contrastive Predictive Coding" (2018);
///         both ways as Radford et al., "Learning Transferable Visual Models" (2021).
at::Tensor symmetric_info_nce(const at::Tensor& a, const at::Tensor& b, const at::Tensor& groups,
                              double temperature);

/// Neighbours of rows; no gradients.
struct Neighbors {
  at::Tensor nearest;      ///< int64 [B, 3], nearest first; −1 where there are fewer.
  at::Tensor best_angle;   ///< int64 [B]: the other row of the largest cosine.
  at::Tensor best_cosine;  ///< [B]
};
/// By Euclidean distance; ties by lower index. Shape: x is [B, L]. Requires: B >= 2.
Neighbors nearest_neighbors(const at::Tensor& x);

/// Lengths of Δ = a − b, and cos(Δ_i, Δ_{pairs_k[i]}) for two lists, [B] each.
struct Displacement {
  at::Tensor length;
  at::Tensor cosine0;  ///< Undefined when its list is.
  at::Tensor cosine1;
};
/// Shape: a, b [B, D]; pairs int64 [B] or undefined. Saves its inputs and its outputs.
Displacement displacement_cosines(const at::Tensor& a, const at::Tensor& b,
                                  const at::Tensor& pairs0, const at::Tensor& pairs1);

}  // namespace plimsoll::kernels
