// SPDX-License-Identifier: Apache-2.0
//
// The differentiable pieces of `cosir` as autograd functions over the kernels.
//
// Each replaces a chain of tensor operators: fewer passes, fewer temporaries, fixed sums. Their
// values and gradients are compared with plain tensor operators in cosir_functions_test.cpp.
// Reading order: docs/recipes/cosir.md, this file, cosir_kernels.h.
//
// Threads: as torch operators.   Memory: outputs, and what backward needs, stated per function.
#pragma once

#include <ATen/core/Tensor.h>

namespace plimsoll::cosir {

/// norm(x), row-wise. Saves its output and one float a row.
/// Shape: x is contiguous float32 [B, D].
at::Tensor normalise_rows(const at::Tensor& x);

/// Radius and angle of the conditions, [B] each.
struct Polar {
  at::Tensor radius;
  at::Tensor angle;
};
/// Shape: c is float32 [B, L]. Gradients at the origin are 0.
Polar polar(const at::Tensor& c);

/// The modulated text and norm(text), both [B, D].
struct Combined {
  at::Tensor out;
  at::Tensor text_unit;
};
/// out = norm(s·‖t‖·norm(cosθ·norm(t) + sinθ·norm(direction))). Saves its inputs alone.
/// Shape: text, direction [B, D]; theta, scale [B].
Combined combine(const at::Tensor& text, const at::Tensor& direction, const at::Tensor& theta,
                 const at::Tensor& scale);

/// Symmetric InfoNCE of rows of norm 1. Rows i ≠ j of one group are no negatives of each other.
/// Computes its gradients at once, so that the [B, B] matrix is gone when it returns.
/// Shape: out, image [B, D]; groups int64 [B]. Returns a scalar.
/// Requires: B >= 2 and temperature >= 0.025.
at::Tensor symmetric_nce(const at::Tensor& out, const at::Tensor& image, const at::Tensor& groups,
                         double temperature);

/// Neighbours of conditions; no gradients.
struct Neighbours {
  at::Tensor nearest;      ///< int64 [B, 3]; −1 where there are fewer.
  at::Tensor best_angle;   ///< int64 [B].
  at::Tensor best_cosine;  ///< float32 [B].
};
Neighbours find_neighbours(const at::Tensor& c);

/// Of Δ = out − text_unit: cos(Δ_i, Δ_{pairs_k[i]}) for two lists, and ‖Δ‖, [B] each.
struct Deltas {
  at::Tensor length;
  at::Tensor cosine0;  ///< Undefined when its list is.
  at::Tensor cosine1;
};
Deltas deltas(const at::Tensor& out, const at::Tensor& text_unit, const at::Tensor& pairs0,
              const at::Tensor& pairs1);

}  // namespace plimsoll::cosir
