// SPDX-License-Identifier: Apache-2.0
#include "kernels/layers.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <cmath>
#include <tuple>
#include <utility>

#include "kernels/operators.h"
#include "kernels/row_loops.h"

namespace plimsoll::kernels {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Two = std::tuple<at::Tensor, at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

constexpr double kVarianceFloor = 1e-5;  // Added to the variance, as torch's BatchNorm does.

Extent extent_of(const at::Tensor& x) {
  return {x.size(0), x.size(1)};
}

Dropout dropout_of(double rate, const c10::SymInt& seed, const c10::SymInt& place) {
  return {static_cast<std::uint64_t>(seed.guard_int(__FILE__, __LINE__)),
          static_cast<std::uint64_t>(place.guard_int(__FILE__, __LINE__)), rate};
}

at::Tensor factors_like(const at::Tensor& x, double rate, c10::SymInt seed, c10::SymInt place) {
  static const auto op =
      operator_named<at::Tensor(const at::Tensor&, double, c10::SymInt, c10::SymInt)>(
          "plimsoll::dropout_factors");
  return op.call(x, rate, std::move(seed), std::move(place));
}

// ---- relu_dropout ----

using ReluOp = at::Tensor(const at::Tensor&, double, c10::SymInt, c10::SymInt);
const auto& relu_op() {
  static const auto op = operator_named<ReluOp>("plimsoll::relu_dropout");
  return op;
}

at::Tensor relu_below(const at::Tensor& given, double rate, c10::SymInt seed, c10::SymInt place) {
  check_floating(given, "relu_dropout: x");
  check_dropout(rate);
  if (!has_kernel(given)) {
    const auto y = at::relu(given);
    return rate > 0.0 ? y * factors_like(given, rate, std::move(seed), std::move(place)) : y;
  }
  const auto x = given.contiguous();
  auto y = at::empty_like(x);
  relu_dropout(floats(x), x.numel(), dropout_of(rate, seed, place), out_floats(y));
  return y;
}

at::Tensor relu_backward_cpu(const at::Tensor& given, const at::Tensor& y_given, double rate) {
  check_same(y_given, "y", given, "grad");
  const auto grad = given.contiguous();
  const auto y = y_given.contiguous();
  auto grad_x = at::empty_like(y);
  relu_dropout_backward(floats(y), floats(grad), y.numel(), Dropout{0, 0, rate}.scale(),
                        out_floats(grad_x));
  return grad_x;
}

struct ReluDropout : torch::autograd::Function<ReluDropout> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, double rate,
                            const c10::SymInt& seed, const c10::SymInt& place) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto y = relu_op().call(x, rate, seed, place);
    context->save_for_backward({y});
    context->saved_data["rate"] = rate;
    return y;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto y = context->get_saved_variables()[0];
    const BelowUnlessGraph below;
    static const auto op = operator_named<at::Tensor(const at::Tensor&, const at::Tensor&, double)>(
        "plimsoll::_relu_dropout_backward");
    return {op.call(gradients[0], y, context->saved_data["rate"].toDouble()), {}, {}, {}};
  }
};

at::Tensor relu_autograd(const at::Tensor& x, double rate, c10::SymInt seed, c10::SymInt place) {
  return has_kernel(x) ? ReluDropout::apply(x, rate, seed, place)
                       : relu_below(x, rate, std::move(seed), std::move(place));
}

// ---- column_moments and norm_relu_dropout ----

using MomentsOp = Two(const at::Tensor&);
const auto& moments_op() {
  static const auto op = operator_named<MomentsOp>("plimsoll::column_moments");
  return op;
}

void check_moments(const at::Tensor& x) {
  check_dims(x, 2, "column_moments: x");
  TORCH_CHECK_VALUE(x.sym_size(0) >= 1, "column_moments: x has no rows");
}

Two moments_below(const at::Tensor& given) {
  check_moments(given);
  if (!has_kernel(given)) {
    return {given.mean(0), given.var(0, /*unbiased=*/false)};
  }
  const auto x = given.contiguous();
  auto mean = at::empty({x.size(1)}, x.options());
  auto variance = at::empty({x.size(1)}, x.options());
  column_moments(floats(x), extent_of(x), out_floats(mean), out_floats(variance));
  return {mean, variance};
}

Two moments_meta(const at::Tensor& x) {
  check_moments(x);
  return {at::empty_symint({x.sym_size(1)}, x.options()),
          at::empty_symint({x.sym_size(1)}, x.options())};
}

Two moments_autograd(const at::Tensor& x) {  // No gradient comes of it.
  const at::AutoDispatchBelowADInplaceOrView below;
  return moments_op().call(x.detach());
}

void check_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                const at::Tensor& mean, const at::Tensor& variance, double rate) {
  check_dims(x, 2, "norm_relu_dropout: x");
  for (const auto& [one, name] : {std::pair(&weight, "norm_relu_dropout: weight"),
                                  {&bias, "norm_relu_dropout: bias"},
                                  {&mean, "norm_relu_dropout: mean"},
                                  {&variance, "norm_relu_dropout: variance"}}) {
    check_dims(*one, 1, name);
    check_alike(x, "x", *one, name);
    check_size(x, 1, "x", *one, 0, name);
  }
  check_dropout(rate);
}

at::Tensor norm_composed(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                         const at::Tensor& mean_given, const at::Tensor& variance_given,
                         bool of_batch, double rate, c10::SymInt seed, c10::SymInt place) {
  const auto mean = of_batch ? x.mean(0) : mean_given;
  const auto variance = of_batch ? x.var(0, /*unbiased=*/false) : variance_given;
  const auto y = at::relu((x - mean) * (variance + kVarianceFloor).rsqrt() * weight + bias);
  return rate > 0.0 ? y * factors_like(x, rate, std::move(seed), std::move(place)) : y;
}

// 1/σ of each column.
at::Tensor inverse_deviation(const at::Tensor& variance) {
  auto inverse = at::empty_like(variance);
  const float* from = floats(variance);
  float* to = out_floats(inverse);
  for (std::int64_t c = 0; c < variance.numel(); ++c) {
    to[c] = static_cast<float>(1.0 / std::sqrt(static_cast<double>(from[c]) + kVarianceFloor));
  }
  return inverse;
}

// The result, and 1/σ of each column.
Two norm_cpu(const at::Tensor& x_given, const at::Tensor& weight_given,
             const at::Tensor& bias_given, const at::Tensor& mean_given,
             const at::Tensor& variance_given, double rate, std::int64_t seed, std::int64_t place) {
  check_norm(x_given, weight_given, bias_given, mean_given, variance_given, rate);
  const auto x = x_given.contiguous();
  const auto weight = weight_given.contiguous();
  const auto bias = bias_given.contiguous();
  const auto mean = mean_given.contiguous();
  const auto inverse = inverse_deviation(variance_given.contiguous());
  auto line = at::empty({2, x.size(1)}, x.options());
  float* by = out_floats(line);
  float* plus = by + x.size(1);
  for (std::int64_t c = 0; c < x.size(1); ++c) {
    by[c] = floats(weight)[c] * floats(inverse)[c];
    plus[c] = floats(bias)[c] - floats(mean)[c] * by[c];
  }
  auto y = at::empty_like(x);
  scale_relu_dropout(floats(x), extent_of(x), by, plus, dropout_of(rate, seed, place),
                     out_floats(y));
  return {y, inverse};
}

Two norm_meta(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
              const at::Tensor& mean, const at::Tensor& variance, double rate, c10::SymInt,
              c10::SymInt) {
  check_norm(x, weight, bias, mean, variance, rate);
  return {empty_as(x), empty_as(variance)};
}

Three norm_backward_cpu(const at::Tensor& given, const at::Tensor& x_given, const at::Tensor& y,
                        const at::Tensor& mean_given, const at::Tensor& inverse,
                        const at::Tensor& weight_given, double rate, bool of_batch) {
  check_norm(x_given, weight_given, weight_given, mean_given, inverse, rate);
  check_same(x_given, "x", given, "grad");
  check_same(x_given, "x", y, "y");
  const auto grad = given.contiguous();
  const auto x = x_given.contiguous();
  const auto mean = mean_given.contiguous();
  const auto weight = weight_given.contiguous();
  auto grad_x = at::empty_like(x);
  auto grad_weight = at::empty_like(weight);
  auto grad_bias = at::empty_like(weight);
  NormGradient in;
  in.shape = extent_of(x);
  in.x = floats(x);
  in.y = floats(y);
  in.grad = floats(grad);
  in.mean = floats(mean);
  in.inverse = floats(inverse);
  in.weight = floats(weight);
  in.scale = Dropout{0, 0, rate}.scale();
  in.batch = of_batch;
  in.grad_x = out_floats(grad_x);
  in.grad_weight = out_floats(grad_weight);
  in.grad_bias = out_floats(grad_bias);
  norm_relu_dropout_backward(in);
  return {grad_x, grad_weight, grad_bias};
}

struct NormReluDropout : torch::autograd::Function<NormReluDropout> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias, const Moments& moments, bool of_batch,
                            double rate, const c10::SymInt& seed, const c10::SymInt& place) {
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op =
        operator_named<Two(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                           const at::Tensor&, const at::Tensor&, double, c10::SymInt, c10::SymInt)>(
            "plimsoll::_norm_relu_dropout");
    const auto [y, inverse] =
        op.call(x, weight, bias, moments.mean, moments.variance, rate, seed, place);
    context->save_for_backward({x, y, moments.mean, inverse, weight});
    context->saved_data["rate"] = rate;
    context->saved_data["of_batch"] = of_batch;
    return y;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto s = context->get_saved_variables();
    const BelowUnlessGraph below;
    static const auto op =
        operator_named<Three(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                             const at::Tensor&, const at::Tensor&, const at::Tensor&, double,
                             bool)>("plimsoll::_norm_relu_dropout_backward");
    const auto [x, weight, bias] =
        op.call(gradients[0], s[0], s[1], s[2], s[3], s[4], context->saved_data["rate"].toDouble(),
                context->saved_data["of_batch"].toBool());
    return {x, weight, bias, {}, {}, {}, {}, {}};
  }
};

at::Tensor norm_autograd(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                         const at::Tensor& mean, const at::Tensor& variance, bool of_batch,
                         double rate, c10::SymInt seed, c10::SymInt place) {
  check_norm(x, weight, bias, mean, variance, rate);
  return has_kernel(x) ? NormReluDropout::apply(x, weight, bias, Moments{mean, variance}, of_batch,
                                                rate, seed, place)
                       : norm_composed(x, weight, bias, mean, variance, of_batch, rate,
                                       std::move(seed), std::move(place));
}

at::Tensor norm_below(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      const at::Tensor& mean, const at::Tensor& variance, bool of_batch,
                      double rate, c10::SymInt seed, c10::SymInt place) {
  check_norm(x, weight, bias, mean, variance, rate);
  return has_kernel(x) ? std::get<0>(norm_cpu(x, weight, bias, mean, variance, rate,
                                              seed.guard_int(__FILE__, __LINE__),
                                              place.guard_int(__FILE__, __LINE__)))
                       : norm_composed(x, weight, bias, mean, variance, of_batch, rate,
                                       std::move(seed), std::move(place));
}

// ---- logistic ----

const auto& logistic_op() {
  static const auto op = operator_named<at::Tensor(const at::Tensor&)>("plimsoll::logistic");
  return op;
}

at::Tensor logistic_below(const at::Tensor& given) {
  check_floating(given, "logistic: x");
  if (!has_kernel(given)) {
    return at::sigmoid(given);
  }
  const auto x = given.contiguous();
  auto y = at::empty_like(x);
  sigmoid(floats(x), x.numel(), out_floats(y));
  return y;
}

struct Logistic : torch::autograd::Function<Logistic> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto y = logistic_op().call(x);
    context->save_for_backward({y});
    return y;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto y = context->get_saved_variables()[0];
    return {gradients[0] * y * (1.0 - y)};
  }
};

at::Tensor logistic_autograd(const at::Tensor& x) {
  return has_kernel(x) ? Logistic::apply(x) : logistic_below(x);
}

// ---- sample_normal ----

void check_sample(const at::Tensor& mean, const at::Tensor& log_variance) {
  check_floating(mean, "sample_normal: mean");
  check_same(mean, "mean", log_variance, "sample_normal: log_variance");
}

// The sample, and what was added to the mean.
Two sample_cpu(const at::Tensor& mean_given, const at::Tensor& log_variance, std::int64_t seed,
               std::int64_t place) {
  check_sample(mean_given, log_variance);
  const auto mean = mean_given.contiguous();
  auto apart = at::empty_like(mean);
  normals(static_cast<std::uint64_t>(seed), static_cast<std::uint64_t>(place), mean.numel(),
          out_floats(apart));
  auto deviation = log_variance.contiguous() * 0.5;
  exponential(floats(deviation), deviation.numel(), out_floats(deviation));
  apart.mul_(deviation);
  return {mean + apart, apart};
}

// Numbers of the CPU, moved: the same noise on any device.
at::Tensor sample_composed(const at::Tensor& mean, const at::Tensor& log_variance, c10::SymInt seed,
                           c10::SymInt place) {
  static const auto op =
      operator_named<Two(const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt)>(
          "plimsoll::_sample_normal");
  const auto zeros = at::zeros_symint(mean.sym_sizes(), at::TensorOptions(at::kFloat));
  const auto noise = std::get<0>(op.call(zeros, zeros, std::move(seed), std::move(place)));
  return mean + noise.to(mean.options()) * (log_variance * 0.5).exp();
}

struct SampleNormal : torch::autograd::Function<SampleNormal> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& mean,
                            const at::Tensor& log_variance, const c10::SymInt& seed,
                            const c10::SymInt& place) {
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op =
        operator_named<Two(const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt)>(
            "plimsoll::_sample_normal");
    const auto [made, apart] = op.call(mean, log_variance, seed, place);
    context->save_for_backward({apart});
    return made;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    TORCH_CHECK_NOT_IMPLEMENTED(!c10::GradMode::is_enabled(),
                                "sample_normal: create_graph=True asks for a gradient of its "
                                "gradient, which it does not have");
    const auto apart = context->get_saved_variables()[0];
    return {gradients[0], gradients[0] * apart * 0.5, at::Tensor{}, at::Tensor{}};
  }
};

at::Tensor sample_autograd(const at::Tensor& mean, const at::Tensor& log_variance, c10::SymInt seed,
                           c10::SymInt place) {
  check_sample(mean, log_variance);
  return has_kernel(mean) ? SampleNormal::apply(mean, log_variance, seed, place)
                          : sample_composed(mean, log_variance, std::move(seed), std::move(place));
}

at::Tensor sample_below(const at::Tensor& mean, const at::Tensor& log_variance, c10::SymInt seed,
                        c10::SymInt place) {
  check_sample(mean, log_variance);
  return has_kernel(mean)
             ? std::get<0>(sample_cpu(mean, log_variance, seed.guard_int(__FILE__, __LINE__),
                                      place.guard_int(__FILE__, __LINE__)))
             : sample_composed(mean, log_variance, std::move(seed), std::move(place));
}

}  // namespace

at::Tensor relu_dropout(const at::Tensor& x, const Noise& noise) {
  return relu_op().call(x, noise.rate, noise.seed, noise.place);
}

Moments column_moments(const at::Tensor& x) {
  const auto [mean, variance] = moments_op().call(x);
  return {mean, variance};
}

at::Tensor norm_relu_dropout(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                             const Moments& moments, bool of_batch, const Noise& noise) {
  static const auto op = operator_named<at::Tensor(
      const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
      bool, double, c10::SymInt, c10::SymInt)>("plimsoll::norm_relu_dropout");
  return op.call(x, weight, bias, moments.mean, moments.variance, of_batch, noise.rate, noise.seed,
                 noise.place);
}

at::Tensor logistic(const at::Tensor& x) {
  return logistic_op().call(x);
}

at::Tensor sample_normal(const at::Tensor& mean, const at::Tensor& log_variance,
                         const Noise& noise) {
  static const auto op =
      operator_named<at::Tensor(const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt)>(
          "plimsoll::sample_normal");
  return op.call(mean, log_variance, noise.seed, noise.place);
}

}  // namespace plimsoll::kernels

TORCH_LIBRARY_FRAGMENT(plimsoll, m) {
  m.def("relu_dropout(Tensor x, float rate, SymInt seed, SymInt place) -> Tensor");
  m.def("_relu_dropout_backward(Tensor grad, Tensor y, float rate) -> Tensor");
  m.def("column_moments(Tensor x) -> (Tensor mean, Tensor variance)");
  m.def(
      "norm_relu_dropout(Tensor x, Tensor weight, Tensor bias, Tensor mean, Tensor variance,"
      " bool of_batch, float rate, SymInt seed, SymInt place) -> Tensor");
  m.def(
      "_norm_relu_dropout(Tensor x, Tensor weight, Tensor bias, Tensor mean, Tensor variance,"
      " float rate, SymInt seed, SymInt place) -> (Tensor, Tensor)");
  m.def(
      "_norm_relu_dropout_backward(Tensor grad, Tensor x, Tensor y, Tensor mean, Tensor inverse,"
      " Tensor weight, float rate, bool of_batch) -> (Tensor, Tensor, Tensor)");
  m.def("logistic(Tensor x) -> Tensor");
  m.def("sample_normal(Tensor mean, Tensor log_variance, SymInt seed, SymInt place) -> Tensor");
  m.def(
      "_sample_normal(Tensor mean, Tensor log_variance, SymInt seed, SymInt place)"
      " -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(plimsoll, Autograd, m) {
  using namespace plimsoll::kernels;
  m.impl("relu_dropout", &relu_autograd);
  m.impl("column_moments", &moments_autograd);
  m.impl("norm_relu_dropout", &norm_autograd);
  m.impl("logistic", &logistic_autograd);
  m.impl("sample_normal", &sample_autograd);
  for (const char* name : {"_relu_dropout_backward", "_norm_relu_dropout",
                           "_norm_relu_dropout_backward", "_sample_normal"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}

TORCH_LIBRARY_IMPL(plimsoll, CompositeExplicitAutograd, m) {
  using namespace plimsoll::kernels;
  m.impl("relu_dropout", &relu_below);
  m.impl("column_moments", &moments_below);
  m.impl("norm_relu_dropout", &norm_below);
  m.impl("logistic", &logistic_below);
  m.impl("sample_normal", &sample_below);
}

TORCH_LIBRARY_IMPL(plimsoll, CPU, m) {
  using namespace plimsoll::kernels;
  m.impl("_relu_dropout_backward", &relu_backward_cpu);
  m.impl("_norm_relu_dropout", &norm_cpu);
  m.impl("_norm_relu_dropout_backward", &norm_backward_cpu);
  m.impl("_sample_normal", &sample_cpu);
}

TORCH_LIBRARY_IMPL(plimsoll, Meta, m) {
  using namespace plimsoll::kernels;
  m.impl("relu_dropout", [](const at::Tensor& x, double, c10::SymInt, c10::SymInt) -> at::Tensor {
    return empty_as(x);
  });
  m.impl("_relu_dropout_backward",
         [](const at::Tensor&, const at::Tensor& y, double) -> at::Tensor { return empty_as(y); });
  m.impl("column_moments", &moments_meta);
  m.impl("_norm_relu_dropout", &norm_meta);
  m.impl("_norm_relu_dropout_backward",
         [](const at::Tensor&, const at::Tensor& x, const at::Tensor&, const at::Tensor&,
            const at::Tensor&, const at::Tensor& weight, double, bool) -> Three {
           return {empty_as(x), empty_as(weight), empty_as(weight)};
         });
  m.impl("logistic", [](const at::Tensor& x) -> at::Tensor { return empty_as(x); });
  m.impl(
      "_sample_normal",
      [](const at::Tensor& mean, const at::Tensor& log_variance, c10::SymInt, c10::SymInt) -> Two {
        check_sample(mean, log_variance);
        return {empty_as(mean), empty_as(mean)};
      });
}
