// SPDX-License-Identifier: Apache-2.0
//
// The values of a tensor of float32, for kernels that take pointers.
//
// Threads: pure functions.   Memory: none.
#pragma once

#include <ATen/core/Tensor.h>

namespace plimsoll::kernels {

inline const float* floats(const at::Tensor& x) {
  return x.const_data_ptr<float>();
}
inline float* out_floats(const at::Tensor& x) {
  return x.data_ptr<float>();
}

}  // namespace plimsoll::kernels
