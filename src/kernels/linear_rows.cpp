// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear_rows.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <tuple>

#include "kernels/operators.h"
#include "kernels/row_loops.h"
#include "kernels/row_products.h"

namespace plimsoll::kernels {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using LinearSlopes = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Maybe = std::optional<at::Tensor>;

void check_linear(const at::Tensor& x, const at::Tensor& weight, const Maybe& bias, bool bf16) {
  check_dims(x, 2, "linear_rows: x");
  check_dims(weight, 2, "linear_rows: weight");
  check_alike(x, "x", weight, "linear_rows: weight");
  check_size(x, 1, "x", weight, 1, "linear_rows: weight");
  if (bias) {
    check_dims(*bias, 1, "linear_rows: bias");
    check_alike(x, "x", *bias, "linear_rows: bias");
    check_size(weight, 0, "weight", *bias, 0, "linear_rows: bias");
  }
  TORCH_CHECK_TYPE(!bf16 || x.scalar_type() == at::kFloat, "linear_rows: x: ", x.scalar_type(),
                   ", but bf16 takes float32");
}

// What a product reads and autograd keeps: float32, or bfloat16 that is widened for the product.
at::Tensor narrowed(const at::Tensor& x, bool bf16) {
  return bf16 ? x.to(at::kBFloat16) : x;
}
at::Tensor widened(const at::Tensor& x) {
  return x.scalar_type() == at::kBFloat16 ? x.to(at::kFloat) : x;
}

// x Wᵀ + b, or x W when `turned`. Requires: contiguous float32 on the CPU.
at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const Maybe& bias, bool turned) {
  const std::int64_t out = weight.size(turned ? 1 : 0);
  auto y = at::empty({x.size(0), out}, x.options());
  multiply_rows({x.size(0), x.size(1), out, floats(x), floats(weight),
                 bias ? floats(*bias) : nullptr, turned},
                out_floats(y));
  return y;
}

// x and weight may be bfloat16 here.
at::Tensor linear_part(const at::Tensor& x_given, const at::Tensor& weight_given,
                       const Maybe& bias_given) {
  const auto x = widened(x_given);
  const auto weight = widened(weight_given);
  check_linear(x, weight, bias_given, false);
  if (!has_kernel(x)) {
    return at::linear(x, weight, bias_given);
  }
  const Maybe bias = bias_given ? Maybe(bias_given->contiguous()) : std::nullopt;
  return product(x.contiguous(), weight.contiguous(), bias, false);
}

at::Tensor linear_part_meta(const at::Tensor& x, const at::Tensor& weight, const Maybe&) {
  return at::empty_symint(
      {x.sym_size(0), weight.sym_size(0)},
      x.options().dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
}

// Those gradients that are asked for; the others are empty.
LinearSlopes linear_backward(const at::Tensor& given, const at::Tensor& x_kept,
                             const at::Tensor& weight_kept, bool to_x, bool to_weight,
                             bool to_bias) {
  const bool bf16 = x_kept.scalar_type() == at::kBFloat16;
  const auto exact = given.contiguous();
  const auto grad = rounded_to_bf16(exact, bf16);
  const auto none = at::empty({0}, exact.options());
  LinearSlopes made{none, none, none};
  TORCH_CHECK_VALUE(exact.dim() == 2 && x_kept.dim() == 2 && weight_kept.dim() == 2 &&
                        exact.size(0) == x_kept.size(0) && exact.size(1) == weight_kept.size(0) &&
                        x_kept.size(1) == weight_kept.size(1),
                    "linear_rows: a gradient ", exact.sizes(), " of rows ", x_kept.sizes(),
                    " and weight ", weight_kept.sizes());
  if (to_x) {
    std::get<0>(made) = product(grad, widened(weight_kept).contiguous(), std::nullopt, true);
  }
  if (to_weight) {
    const auto x = widened(x_kept).contiguous();
    auto sum = at::empty({grad.size(1), x.size(1)}, grad.options());
    multiply_columns({grad.size(0), grad.size(1), x.size(1), floats(grad), floats(x), false},
                     out_floats(sum));
    std::get<1>(made) = sum;
  }
  if (to_bias) {
    auto sum = at::empty({exact.size(1)}, exact.options());
    sum_columns(floats(exact), {exact.size(0), exact.size(1)}, out_floats(sum));
    std::get<2>(made) = sum;
  }
  return made;
}

LinearSlopes linear_backward_composed(const at::Tensor& exact, const at::Tensor& x_kept,
                                      const at::Tensor& weight_kept, bool to_x, bool to_weight,
                                      bool to_bias) {
  const auto grad = rounded_to_bf16(exact, x_kept.scalar_type() == at::kBFloat16);
  const auto none = at::empty({0}, exact.options());
  return {to_x ? at::mm(grad, widened(weight_kept)) : none,
          to_weight ? at::mm(grad.t(), widened(x_kept)) : none, to_bias ? exact.sum(0) : none};
}

LinearSlopes linear_backward_meta(const at::Tensor& grad, const at::Tensor& x,
                                  const at::Tensor& weight, bool to_x, bool to_weight,
                                  bool to_bias) {
  const auto none = at::empty({0}, grad.options());
  return {to_x ? at::empty_symint(x.sym_sizes(), grad.options()) : none,
          to_weight ? at::empty_symint(weight.sym_sizes(), grad.options()) : none,
          to_bias ? at::empty_symint({weight.sym_size(0)}, grad.options()) : none};
}

struct LinearRows : torch::autograd::Function<LinearRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x_given,
                            const at::Tensor& weight_given, const Maybe& bias, bool bf16) {
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op =
        operator_named<at::Tensor(const at::Tensor&, const at::Tensor&, const Maybe&)>(
            "plimsoll::_linear_rows");
    const auto x = narrowed(x_given.contiguous(), bf16);
    const auto weight = narrowed(weight_given, bf16);
    context->save_for_backward({x, weight});
    context->saved_data["bias"] = bias.has_value();
    return op.call(x, weight, bias);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const BelowUnlessGraph below;
    static const auto op =
        operator_named<LinearSlopes(const at::Tensor&, const at::Tensor&, const at::Tensor&, bool,
                                    bool, bool)>("plimsoll::_linear_rows_backward");
    const bool to_x = context->needs_input_grad(0);
    const bool to_weight = context->needs_input_grad(1);
    const bool to_bias = context->saved_data["bias"].toBool() && context->needs_input_grad(2);
    const auto [x, weight, bias] =
        op.call(gradients[0], saved[0], saved[1], to_x, to_weight, to_bias);
    return {to_x ? x : at::Tensor{}, to_weight ? weight : at::Tensor{},
            to_bias ? bias : at::Tensor{}, at::Tensor{}};
  }
};

// Rounding of gradients is no operator of torch's: with bf16 the function is one on any device.
at::Tensor linear_autograd(const at::Tensor& x, const at::Tensor& weight, const Maybe& bias,
                           bool bf16) {
  check_linear(x, weight, bias, bf16);
  return has_kernel(x) || bf16 ? LinearRows::apply(x, weight, bias, bf16)
                               : at::linear(x, weight, bias);
}

at::Tensor linear_below(const at::Tensor& x, const at::Tensor& weight, const Maybe& bias,
                        bool bf16) {
  check_linear(x, weight, bias, bf16);
  return linear_part(narrowed(x, bf16), narrowed(weight, bf16), bias);
}

}  // namespace

at::Tensor linear_rows(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                       bool bf16) {
  static const auto op =
      operator_named<at::Tensor(const at::Tensor&, const at::Tensor&, const Maybe&, bool)>(
          "plimsoll::linear_rows");
  return op.call(x, weight, present(bias), bf16);
}

at::Tensor rounded_to_bf16(const at::Tensor& x, bool bf16) {
  return bf16 ? x.to(at::kBFloat16).to(x.scalar_type()) : x;
}

}  // namespace plimsoll::kernels

TORCH_LIBRARY_FRAGMENT(plimsoll, m) {
  m.def("linear_rows(Tensor x, Tensor weight, Tensor? bias=None, bool bf16=False) -> Tensor");
  m.def("_linear_rows(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def(
      "_linear_rows_backward(Tensor grad, Tensor x, Tensor weight, bool to_x, bool to_weight,"
      " bool to_bias) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(plimsoll, Autograd, m) {
  m.impl("linear_rows", &plimsoll::kernels::linear_autograd);
  m.impl("_linear_rows", torch::autograd::autogradNotImplementedFallback());
  m.impl("_linear_rows_backward", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(plimsoll, CompositeExplicitAutograd, m) {
  m.impl("linear_rows", &plimsoll::kernels::linear_below);
  m.impl("_linear_rows", &plimsoll::kernels::linear_part);
  m.impl("_linear_rows_backward", &plimsoll::kernels::linear_backward_composed);
}

TORCH_LIBRARY_IMPL(plimsoll, CPU, m) {
  m.impl("_linear_rows_backward", &plimsoll::kernels::linear_backward);
}

TORCH_LIBRARY_IMPL(plimsoll, Meta, m) {
  m.impl("_linear_rows", &plimsoll::kernels::linear_part_meta);
  m.impl("_linear_rows_backward", &plimsoll::kernels::linear_backward_meta);
}
