// SPDX-License-Identifier: Apache-2.0
//
// linear_rows: a product whose rows have the same bits beside any others, as an operator.
//
// row_products.h says why it is not torch's. Reading order: operators.h, this file, row_products.h.
//
// Threads: as torch operators.   Memory: keeps x and weight, in bfloat16 with bf16.
#pragma once

#include <ATen/core/Tensor.h>

namespace plimsoll::kernels {

/// x Wᵀ (+ b when defined). With bf16 the product takes x, weight and the gradient rounded to
/// bfloat16, sums in float32 and gives float32. Shape: x [rows, in]; weight [out, in]; bias [out].
at::Tensor linear_rows(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                       bool bf16);

/// x as a product with bf16 has it, in its own dtype.
at::Tensor rounded_to_bf16(const at::Tensor& x, bool bf16);

}  // namespace plimsoll::kernels
