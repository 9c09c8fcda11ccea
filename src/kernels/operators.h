// SPDX-License-Identifier: Apache-2.0
//
// What operators of torch.library have alike: their handles, and the checks of their arguments.
//
// An operator X runs a kernel of ours on float32 tensors of the CPU, and is a composition of
// torch's own operators for float64 and on any other device:
//
//   Autograd    an autograd function around X or _X and its _X_backward, or the composition
//   CPU         the kernel             Meta    shapes alone, for FakeTensor and torch.compile
//   any other   the composition, which torch differentiates
//
// Shapes are compared in symbols, so that a compiled graph may have any. For sources of this folder
// alone. Reading order: lanes.h, this file, contrast.h.
//
// Threads: free functions.   Memory: none.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstdint>
#include <optional>

#include "kernels/floats.h"

namespace plimsoll::kernels {

/// The handle of "plimsoll::NAME"; keep it, for the search takes a lock.
template <class Signature>
c10::TypedOperatorHandle<Signature> operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Signature>();
}

/// Whether our kernel computes with it; all else is composed of torch's operators.
inline bool has_kernel(const at::Tensor& x) {
  return x.device().is_cpu() && x.scalar_type() == at::kFloat;
}

/// Whether autograd wants a gradient of it.
inline bool wants_gradient(const at::Tensor& x) {
  return c10::GradMode::is_enabled() && x.requires_grad();
}

/// While one lives in a backward pass, operators are called below autograd, unless a gradient of
/// the gradient is asked for (create_graph): then autograd refuses it. Made after what was saved is
/// read: torch.utils.checkpoint computes a layer again as it is, with gradients.
class BelowUnlessGraph {
 public:
  BelowUnlessGraph() {
    if (!c10::GradMode::is_enabled()) {
      below_.emplace();
    }
  }

 private:
  std::optional<at::AutoDispatchBelowADInplaceOrView> below_;
};

/// A tensor like x without numbers.
inline at::Tensor empty_as(const at::Tensor& x) {
  return at::empty_symint(x.sym_sizes(), x.options());
}

/// An absent tensor as torch's operators have it, and as autograd's functions do.
inline std::optional<at::Tensor> present(const at::Tensor& x) {
  return x.defined() ? std::optional<at::Tensor>(x) : std::nullopt;
}
inline at::Tensor or_undefined(const std::optional<at::Tensor>& x) {
  return x.value_or(at::Tensor{});
}

/// Errors: TypeError unless x is float32 or float64.
inline void check_floating(const at::Tensor& x, const char* name) {
  TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble, name, ": ",
                   x.scalar_type(), " is neither float32 nor float64");
}

/// Errors: ValueError unless x has so many dimensions; TypeError as check_floating().
inline void check_dims(const at::Tensor& x, std::int64_t dims, const char* name) {
  check_floating(x, name);
  TORCH_CHECK_VALUE(x.dim() == dims, name, ": ", x.dim(), " dimensions, not ", dims);
}

/// Errors: TypeError unless both have one dtype, ValueError unless they are on one device.
inline void check_alike(const at::Tensor& x, const char* name, const at::Tensor& y,
                        const char* other) {
  TORCH_CHECK_TYPE(x.scalar_type() == y.scalar_type(), other, ": ", y.scalar_type(), ", but ", name,
                   " is ", x.scalar_type());
  TORCH_CHECK_VALUE(x.device() == y.device(), other, ": on ", y.device(), ", but ", name, " is on ",
                    x.device());
}

/// Errors: ValueError unless dimension `at` of y is dimension `of` of x.
inline void check_size(const at::Tensor& x, std::int64_t of, const char* name, const at::Tensor& y,
                       std::int64_t at, const char* other) {
  TORCH_CHECK_VALUE(y.dim() > at && y.sym_size(at) == x.sym_size(of), other, ": ", y.sym_sizes(),
                    " does not fit ", name, ", ", x.sym_sizes());
}

/// Errors: as check_alike(); ValueError unless y has the shape of x.
inline void check_same(const at::Tensor& x, const char* name, const at::Tensor& y,
                       const char* other) {
  check_alike(x, name, y, other);
  TORCH_CHECK_VALUE(y.sym_sizes() == x.sym_sizes(), other, ": ", y.sym_sizes(),
                    " is not the shape of ", name, ", ", x.sym_sizes());
}

/// Errors: TypeError unless `list` is int64, ValueError unless it has a number for each row of x.
inline void check_list(const at::Tensor& x, const char* name, const at::Tensor& list,
                       const char* other) {
  TORCH_CHECK_TYPE(list.scalar_type() == at::kLong, other, ": ", list.scalar_type(),
                   " is not int64");
  TORCH_CHECK_VALUE(list.dim() == 1, other, ": ", list.dim(), " dimensions, not 1");
  TORCH_CHECK_VALUE(x.device() == list.device(), other, ": on ", list.device(), ", but ", name,
                    " is on ", x.device());
  check_size(x, 0, name, list, 0, other);
}

/// Errors: ValueError unless it is a share that dropout can drop.
inline void check_dropout(double rate) {
  TORCH_CHECK_VALUE(rate >= 0.0 && rate < 1.0, "dropout: ", rate, " is not from 0 to below 1");
}

/// Errors: IndexError naming the first that is not from 0 to most − 1. Requires: int64 on the CPU.
inline void check_range(const at::Tensor& list, std::int64_t most, const char* name) {
  const auto* at = list.const_data_ptr<std::int64_t>();
  for (std::int64_t k = 0; k < list.numel(); ++k) {
    TORCH_CHECK_INDEX(at[k] >= 0 && at[k] < most, name, ": ", at[k], " at place ", k,
                      " is not from 0 to ", most - 1);
  }
}

}  // namespace plimsoll::kernels
