// SPDX-License-Identifier: Apache-2.0
//
// The operators of contrast.h composed of torch's own: any device, float32 and float64.
//
// Torch differentiates them. Sizes are never read as numbers, so that compiled graphs may have any.
// For sources of this folder alone. Reading order: contrast.h, this file.
//
// Threads: as torch operators.   Memory: what autograd keeps of each of torch's operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace plimsoll::kernels::composed {

using Pair = std::tuple<at::Tensor, at::Tensor>;
using Triple = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

at::Tensor normalize_rows(const at::Tensor& x);
Pair polar_coordinates(const at::Tensor& x);
Pair rotate_toward(const at::Tensor& x, const at::Tensor& direction, const at::Tensor& angle,
                   const at::Tensor& scale);
at::Tensor symmetric_info_nce(const at::Tensor& a, const at::Tensor& b, const at::Tensor& groups,
                              double temperature);
Triple nearest_neighbors(const at::Tensor& x);
Triple displacement_cosines(const at::Tensor& a, const at::Tensor& b,
                            const std::optional<at::Tensor>& pairs0,
                            const std::optional<at::Tensor>& pairs1);

}  // namespace plimsoll::kernels::composed
