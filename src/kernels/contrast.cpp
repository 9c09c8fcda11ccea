// SPDX-License-Identifier: Apache-2.0
#include "kernels/contrast.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/contrast_composed.h"
#include "kernels/contrast_loops.h"
#include "kernels/operators.h"

namespace plimsoll::kernels {
namespace {

using composed::Pair;
using composed::Triple;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Four = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Maybe = std::optional<at::Tensor>;

at::Tensor row_of_numbers(const at::Tensor& x) {  // [B], uninitialised.
  return at::empty_symint({x.sym_size(0)}, x.options());
}

// ---- normalize_rows ----

void check_normalize(const at::Tensor& x) {
  check_dims(x, 2, "normalize_rows: x");
}

Pair normalize_cpu(const at::Tensor& given) {
  check_normalize(given);
  const auto x = given.contiguous();
  auto unit = at::empty_like(x);
  auto length = row_of_numbers(x);
  unit_rows(floats(x), x.size(0), x.size(1), out_floats(unit), out_floats(length));
  return {unit, length};
}

Pair normalize_meta(const at::Tensor& x) {
  check_normalize(x);
  return {at::empty_symint(x.sym_sizes(), x.options()), row_of_numbers(x)};
}

at::Tensor normalize_backward_cpu(const at::Tensor& grad, const at::Tensor& unit,
                                  const at::Tensor& length) {
  check_same(unit, "unit", grad, "grad");
  check_size(unit, 0, "unit", length, 0, "length");
  const auto g = grad.contiguous();
  auto grad_x = at::empty_like(g);
  unit_rows_backward(floats(g), floats(unit), floats(length), g.size(0), g.size(1),
                     out_floats(grad_x));
  return grad_x;
}

at::Tensor normalize_backward_meta(const at::Tensor& grad, const at::Tensor&, const at::Tensor&) {
  return at::empty_symint(grad.sym_sizes(), grad.options());
}

struct NormalizeRows : torch::autograd::Function<NormalizeRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = operator_named<Pair(const at::Tensor&)>("plimsoll::_normalize_rows");
    const auto [unit, length] = op.call(x);
    context->save_for_backward({unit, length});
    return unit;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const BelowUnlessGraph below;
    static const auto op =
        operator_named<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)>(
            "plimsoll::_normalize_rows_backward");
    return {op.call(gradients[0], saved[0], saved[1])};
  }
};

at::Tensor normalize_autograd(const at::Tensor& x) {
  check_normalize(x);
  return has_kernel(x) ? NormalizeRows::apply(x) : composed::normalize_rows(x);
}

at::Tensor normalize_below(const at::Tensor& x) {
  check_normalize(x);
  return has_kernel(x) ? std::get<0>(normalize_cpu(x)) : composed::normalize_rows(x);
}

// ---- polar_coordinates ----

void check_polar(const at::Tensor& x) {
  check_dims(x, 2, "polar_coordinates: x");
  TORCH_CHECK_VALUE(x.sym_size(1) >= 1, "polar_coordinates: x has no columns");
}

Pair polar_below(const at::Tensor& given) {
  check_polar(given);
  if (!has_kernel(given)) {
    return composed::polar_coordinates(given);
  }
  const auto x = given.contiguous();
  auto radius = row_of_numbers(x);
  auto angle = row_of_numbers(x);
  polar_rows(floats(x), x.size(0), x.size(1), out_floats(radius), out_floats(angle));
  return {radius, angle};
}

Pair polar_meta(const at::Tensor& x) {
  check_polar(x);
  return {row_of_numbers(x), row_of_numbers(x)};
}

at::Tensor polar_backward_cpu(const at::Tensor& grad_radius, const at::Tensor& grad_angle,
                              const at::Tensor& given) {
  check_size(given, 0, "x", grad_radius, 0, "grad_radius");
  check_size(given, 0, "x", grad_angle, 0, "grad_angle");
  const auto x = given.contiguous();
  const auto by_radius = grad_radius.contiguous();
  const auto by_angle = grad_angle.contiguous();
  auto grad_x = at::empty_like(x);
  polar_rows_backward(floats(x), floats(by_radius), floats(by_angle), x.size(0), x.size(1),
                      out_floats(grad_x));
  return grad_x;
}

at::Tensor polar_backward_meta(const at::Tensor&, const at::Tensor&, const at::Tensor& x) {
  return at::empty_symint(x.sym_sizes(), x.options());
}

using PolarOp = Pair(const at::Tensor&);
const auto& polar_op() {
  static const auto op = operator_named<PolarOp>("plimsoll::polar_coordinates");
  return op;
}

struct PolarRows : torch::autograd::Function<PolarRows> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [radius, angle] = polar_op().call(x);
    context->save_for_backward({x});
    return {radius, angle};
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const BelowUnlessGraph below;
    static const auto op =
        operator_named<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)>(
            "plimsoll::_polar_coordinates_backward");
    return {op.call(gradients[0], gradients[1], saved[0])};
  }
};

Pair polar_autograd(const at::Tensor& x) {
  check_polar(x);
  if (!has_kernel(x)) {
    return composed::polar_coordinates(x);
  }
  const auto both = PolarRows::apply(x);
  return {both[0], both[1]};
}

// ---- rotate_toward ----

void check_rotate(const at::Tensor& x, const at::Tensor& direction, const at::Tensor& angle,
                  const at::Tensor& scale) {
  check_dims(x, 2, "rotate_toward: x");
  check_same(x, "x", direction, "rotate_toward: direction");
  for (const auto& [one, name] :
       {std::pair(angle, "rotate_toward: angle"), {scale, "rotate_toward: scale"}}) {
    check_dims(one, 1, name);
    check_alike(x, "x", one, name);
    check_size(x, 0, "x", one, 0, name);
  }
}

Pair rotate_below(const at::Tensor& x_given, const at::Tensor& direction_given,
                  const at::Tensor& angle_given, const at::Tensor& scale_given) {
  check_rotate(x_given, direction_given, angle_given, scale_given);
  if (!has_kernel(x_given)) {
    return composed::rotate_toward(x_given, direction_given, angle_given, scale_given);
  }
  const auto x = x_given.contiguous();
  const auto direction = direction_given.contiguous();
  const auto angle = angle_given.contiguous();
  const auto scale = scale_given.contiguous();
  auto out = at::empty_like(x);
  auto unit = at::empty_like(x);
  rotate_rows({x.size(0), x.size(1), floats(x), floats(direction), floats(angle), floats(scale)},
              out_floats(out), out_floats(unit));
  return {out, unit};
}

Pair rotate_meta(const at::Tensor& x, const at::Tensor& direction, const at::Tensor& angle,
                 const at::Tensor& scale) {
  check_rotate(x, direction, angle, scale);
  return {at::empty_symint(x.sym_sizes(), x.options()),
          at::empty_symint(x.sym_sizes(), x.options())};
}

// The gradient of x is empty unless asked for.
Four rotate_backward_cpu(const at::Tensor& grad_out_given, const at::Tensor& grad_unit_given,
                         const at::Tensor& x_given, const at::Tensor& direction_given,
                         const at::Tensor& angle_given, const at::Tensor& scale_given, bool to_x) {
  check_rotate(x_given, direction_given, angle_given, scale_given);
  check_same(x_given, "x", grad_out_given, "grad_out");
  check_same(x_given, "x", grad_unit_given, "grad_unit");
  const auto x = x_given.contiguous();
  const auto direction = direction_given.contiguous();
  const auto angle = angle_given.contiguous();
  const auto scale = scale_given.contiguous();
  const auto grad_out = grad_out_given.contiguous();
  const auto grad_unit = to_x ? grad_unit_given.contiguous() : at::Tensor{};
  auto grad_x = to_x ? at::empty_like(x) : at::empty({0}, x.options());
  auto grad_direction = at::empty_like(direction);
  auto grad_angle = at::empty_like(angle);
  auto grad_scale = at::empty_like(scale);
  rotate_rows_backward(
      {x.size(0), x.size(1), floats(x), floats(direction), floats(angle), floats(scale)},
      {floats(grad_out), to_x ? floats(grad_unit) : nullptr, to_x ? out_floats(grad_x) : nullptr,
       out_floats(grad_direction), out_floats(grad_angle), out_floats(grad_scale)});
  return {grad_x, grad_direction, grad_angle, grad_scale};
}

Four rotate_backward_meta(const at::Tensor&, const at::Tensor&, const at::Tensor& x,
                          const at::Tensor& direction, const at::Tensor& angle,
                          const at::Tensor& scale, bool to_x) {
  return {to_x ? at::empty_symint(x.sym_sizes(), x.options()) : at::empty({0}, x.options()),
          at::empty_symint(direction.sym_sizes(), x.options()),
          at::empty_symint(angle.sym_sizes(), x.options()),
          at::empty_symint(scale.sym_sizes(), x.options())};
}

using RotateOp = Pair(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&);
const auto& rotate_op() {
  static const auto op = operator_named<RotateOp>("plimsoll::rotate_toward");
  return op;
}

struct RotateToward : torch::autograd::Function<RotateToward> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x,
                               const at::Tensor& direction, const at::Tensor& angle,
                               const at::Tensor& scale) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [out, unit] = rotate_op().call(x, direction, angle, scale);
    context->save_for_backward({x, direction, angle, scale});
    if (!x.requires_grad()) {
      context->mark_non_differentiable({unit});
    }
    return {out, unit};
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const BelowUnlessGraph below;
    static const auto op =
        operator_named<Four(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, const at::Tensor&, const at::Tensor&, bool)>(
            "plimsoll::_rotate_toward_backward");
    const bool to_x = context->needs_input_grad(0);
    const auto made =
        op.call(gradients[0], gradients[1], saved[0], saved[1], saved[2], saved[3], to_x);
    return {to_x ? std::get<0>(made) : at::Tensor{}, std::get<1>(made), std::get<2>(made),
            std::get<3>(made)};
  }
};

Pair rotate_autograd(const at::Tensor& x, const at::Tensor& direction, const at::Tensor& angle,
                     const at::Tensor& scale) {
  check_rotate(x, direction, angle, scale);
  if (!has_kernel(x)) {
    return composed::rotate_toward(x, direction, angle, scale);
  }
  const auto both = RotateToward::apply(x, direction, angle, scale);
  return {both[0], both[1]};
}

// ---- symmetric_info_nce ----

void check_nce(const at::Tensor& a, const at::Tensor& b, const at::Tensor& groups,
               double temperature) {
  check_dims(a, 2, "symmetric_info_nce: a");
  check_same(a, "a", b, "symmetric_info_nce: b");
  check_list(a, "a", groups, "symmetric_info_nce: groups");
  TORCH_CHECK_VALUE(a.sym_size(0) >= 2,
                    "symmetric_info_nce: a has fewer than two rows, which have "
                    "nothing to be compared with");
  TORCH_CHECK_VALUE(temperature >= kTemperatureMin, "symmetric_info_nce: temperature ", temperature,
                    " is below ", kTemperatureMin, ": exponentials would underflow");
}

// −∞ where two different rows share a group. Groups are found by sorting, not by comparing pairs.
void mask_groups(const at::Tensor& groups, const at::Tensor& s) {
  const std::int64_t rows = groups.size(0);
  const auto* group = groups.const_data_ptr<std::int64_t>();
  auto order = at::empty({rows}, groups.options());
  auto* begin = order.data_ptr<std::int64_t>();
  std::iota(begin, begin + rows, std::int64_t{0});
  std::sort(begin, begin + rows, [group](std::int64_t x, std::int64_t y) {
    return group[x] != group[y] ? group[x] < group[y] : x < y;
  });
  float* at_s = out_floats(s);
  for (std::int64_t run = 0; run < rows;) {
    std::int64_t next = run + 1;
    while (next < rows && group[begin[next]] == group[begin[run]]) {
      ++next;
    }
    for (std::int64_t x = run; x < next; ++x) {
      for (std::int64_t y = run; y < next; ++y) {
        if (x != y) {
          at_s[begin[x] * rows + begin[y]] = -std::numeric_limits<float>::infinity();
        }
      }
    }
    run = next;
  }
}

// The loss, and those gradients that are asked for: else they are empty.
Triple nce_cpu(const at::Tensor& a, const at::Tensor& b, const at::Tensor& groups,
               double temperature, bool to_a, bool to_b) {
  check_nce(a, b, groups, temperature);
  const std::int64_t rows = a.size(0);
  const auto tau = static_cast<float>(temperature);
  auto s = at::mm(a, b.t());
  mask_groups(groups.contiguous(), s);
  auto row_sum = at::empty({rows}, a.options());
  auto column_sum = at::empty({rows}, a.options());
  auto diagonal = at::empty({rows}, a.options().dtype(at::kDouble));
  {
    auto parts = at::empty({row_blocks(rows), rows}, a.options());
    exponentiate(out_floats(s), rows, tau, out_floats(parts), out_floats(row_sum),
                 out_floats(column_sum), diagonal.data_ptr<double>());
  }
  double loss = 0.0;
  for (std::int64_t i = 0; i < rows; ++i) {
    loss += 0.5 * (std::log(static_cast<double>(floats(row_sum)[i])) +
                   std::log(static_cast<double>(floats(column_sum)[i]))) -
            (diagonal.const_data_ptr<double>()[i] - 1.0) / static_cast<double>(tau);
  }
  if (to_a || to_b) {
    nce_gradient(out_floats(s), rows, tau, floats(row_sum), floats(column_sum));
  }
  auto grad_a = to_a ? at::mm(s, b) : at::empty({0}, a.options());
  auto grad_b = to_b ? at::mm(s.t(), a) : at::empty({0}, a.options());
  auto result = at::empty({}, a.options());
  *out_floats(result) = static_cast<float>(loss / static_cast<double>(rows));
  return {result, grad_a, grad_b};
}

Triple nce_meta(const at::Tensor& a, const at::Tensor& b, const at::Tensor& groups,
                double temperature, bool to_a, bool to_b) {
  check_nce(a, b, groups, temperature);
  const auto like = [&](bool asked) {
    return asked ? at::empty_symint(a.sym_sizes(), a.options()) : at::empty({0}, a.options());
  };
  return {at::empty({}, a.options()), like(to_a), like(to_b)};
}

struct SymmetricInfoNce : torch::autograd::Function<SymmetricInfoNce> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& a, const at::Tensor& b,
                            const at::Tensor& groups, double temperature, bool to_a, bool to_b) {
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op =
        operator_named<Triple(const at::Tensor&, const at::Tensor&, const at::Tensor&, double, bool,
                              bool)>("plimsoll::_symmetric_info_nce");
    const auto [loss, grad_a, grad_b] = op.call(a, b, groups, temperature, to_a, to_b);
    context->save_for_backward({to_a ? grad_a : at::Tensor{}, to_b ? grad_b : at::Tensor{}});
    return loss;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    TORCH_CHECK_NOT_IMPLEMENTED(!c10::GradMode::is_enabled(),
                                "symmetric_info_nce: create_graph=True asks for a gradient of its "
                                "gradient, which it does not have");
    const auto saved = context->get_saved_variables();
    const auto times = [&](const at::Tensor& x) {
      return x.defined() ? x * gradients[0] : at::Tensor{};
    };
    return {times(saved[0]), times(saved[1]), {}, {}, {}, {}};
  }
};

at::Tensor nce_autograd(const at::Tensor& a, const at::Tensor& b, const at::Tensor& groups,
                        double temperature) {
  check_nce(a, b, groups, temperature);
  if (!has_kernel(a)) {
    return composed::symmetric_info_nce(a, b, groups, temperature);
  }
  return SymmetricInfoNce::apply(a, b, groups, temperature, wants_gradient(a), wants_gradient(b));
}

at::Tensor nce_below(const at::Tensor& a, const at::Tensor& b, const at::Tensor& groups,
                     double temperature) {
  check_nce(a, b, groups, temperature);
  return has_kernel(a) ? std::get<0>(nce_cpu(a, b, groups, temperature, false, false))
                       : composed::symmetric_info_nce(a, b, groups, temperature);
}

// ---- nearest_neighbors ----

void check_neighbors(const at::Tensor& x) {
  check_dims(x, 2, "nearest_neighbors: x");
  TORCH_CHECK_VALUE(x.sym_size(0) >= 2, "nearest_neighbors: x has fewer than two rows");
  TORCH_CHECK_VALUE(x.sym_size(1) >= 1, "nearest_neighbors: x has no columns");
}

Triple neighbors_below(const at::Tensor& given) {
  check_neighbors(given);
  if (!has_kernel(given)) {
    return composed::nearest_neighbors(given);
  }
  const auto x = given.contiguous();
  const std::int64_t rows = x.size(0);
  const auto whole = x.options().dtype(at::kLong);
  auto nearest = at::empty({rows, kNeighbors}, whole);
  auto best_angle = at::empty({rows}, whole);
  auto best_cosine = at::empty({rows}, x.options());
  auto scratch = at::empty({2, x.size(1), padded_rows(rows)}, x.options());
  find_neighbors(floats(x), rows, x.size(1), out_floats(scratch), nearest.data_ptr<std::int64_t>(),
                 best_angle.data_ptr<std::int64_t>(), out_floats(best_cosine));
  return {nearest, best_angle, best_cosine};
}

Triple neighbors_meta(const at::Tensor& x) {
  check_neighbors(x);
  const auto whole = x.options().dtype(at::kLong);
  return {at::empty_symint({x.sym_size(0), kNeighbors}, whole),
          at::empty_symint({x.sym_size(0)}, whole), row_of_numbers(x)};
}

using NeighborsOp = Triple(const at::Tensor&);
const auto& neighbors_op() {
  static const auto op = operator_named<NeighborsOp>("plimsoll::nearest_neighbors");
  return op;
}

Triple neighbors_autograd(const at::Tensor& x) {  // No gradient comes of it.
  const at::AutoDispatchBelowADInplaceOrView below;
  return neighbors_op().call(x.detach());
}

// ---- displacement_cosines ----

void check_displacement(const at::Tensor& a, const at::Tensor& b, const Maybe& pairs0,
                        const Maybe& pairs1) {
  check_dims(a, 2, "displacement_cosines: a");
  check_same(a, "a", b, "displacement_cosines: b");
  for (const auto& [pairs, name] : {std::pair(pairs0, "displacement_cosines: pairs0"),
                                    {pairs1, "displacement_cosines: pairs1"}}) {
    if (pairs) {
      check_list(a, "a", *pairs, name);
    }
  }
}

// What the kernels take: dense, and lists that name rows.
struct DisplacementInput {
  DisplacementInput(const at::Tensor& a_given, const at::Tensor& b_given, const Maybe& first,
                    const Maybe& second)
      : a(a_given.contiguous()), b(b_given.contiguous()) {
    for (const Maybe* pairs : {&first, &second}) {
      lists.push_back(*pairs ? (*pairs)->contiguous() : at::Tensor{});
      if (*pairs) {
        check_range(lists.back(), a.size(0), "displacement_cosines: pairs");
      }
    }
  }
  [[nodiscard]] Displacements rows() const {
    const auto list = [&](std::size_t k) {
      return lists[k].defined() ? lists[k].const_data_ptr<std::int64_t>() : nullptr;
    };
    return {a.size(0), a.size(1), floats(a), floats(b), {list(0), list(1)}};
  }
  at::Tensor a;
  at::Tensor b;
  std::vector<at::Tensor> lists;
};

Triple displacement_below(const at::Tensor& a, const at::Tensor& b, const Maybe& pairs0,
                          const Maybe& pairs1) {
  check_displacement(a, b, pairs0, pairs1);
  if (!has_kernel(a)) {
    return composed::displacement_cosines(a, b, pairs0, pairs1);
  }
  const DisplacementInput in(a, b, pairs0, pairs1);
  auto length = at::empty({a.size(0)}, a.options());
  auto cosine0 = at::zeros({a.size(0)}, a.options());
  auto cosine1 = at::zeros({a.size(0)}, a.options());
  displace_rows(in.rows(), out_floats(length), out_floats(cosine0), out_floats(cosine1));
  return {length, cosine0, cosine1};
}

Triple displacement_meta(const at::Tensor& a, const at::Tensor& b, const Maybe& pairs0,
                         const Maybe& pairs1) {
  check_displacement(a, b, pairs0, pairs1);
  return {row_of_numbers(a), row_of_numbers(a), row_of_numbers(a)};
}

// The gradient of a; that of b is its negative.
at::Tensor displacement_backward_cpu(const at::Tensor& by_length, const at::Tensor& by_cosine0,
                                     const at::Tensor& by_cosine1, const at::Tensor& a,
                                     const at::Tensor& b, const Maybe& pairs0, const Maybe& pairs1,
                                     const at::Tensor& length, const at::Tensor& cosine0,
                                     const at::Tensor& cosine1) {
  check_displacement(a, b, pairs0, pairs1);
  for (const at::Tensor* one :
       {&by_length, &by_cosine0, &by_cosine1, &length, &cosine0, &cosine1}) {
    check_size(a, 0, "a", *one, 0, "a gradient or a result");
  }
  const DisplacementInput in(a, b, pairs0, pairs1);
  const auto grad_length = by_length.contiguous();
  const auto grad_cosine0 = by_cosine0.contiguous();
  const auto grad_cosine1 = by_cosine1.contiguous();
  auto scratch = at::empty({3, a.size(0)}, a.options());
  auto grad_a = at::empty_like(in.a);
  displace_rows_backward(in.rows(), {floats(length),
                                     {floats(cosine0), floats(cosine1)},
                                     floats(grad_length),
                                     {floats(grad_cosine0), floats(grad_cosine1)},
                                     out_floats(scratch),
                                     out_floats(grad_a)});
  return grad_a;
}

at::Tensor displacement_backward_meta(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                      const at::Tensor& a, const at::Tensor&, const Maybe&,
                                      const Maybe&, const at::Tensor&, const at::Tensor&,
                                      const at::Tensor&) {
  return at::empty_symint(a.sym_sizes(), a.options());
}

using DisplacementOp = Triple(const at::Tensor&, const at::Tensor&, const Maybe&, const Maybe&);
const auto& displacement_op() {
  static const auto op = operator_named<DisplacementOp>("plimsoll::displacement_cosines");
  return op;
}

// One value as far as autograd is concerned: lists are no inputs of the function, and may be
// absent.
struct PairLists {
  Maybe first;
  Maybe second;
};

struct DisplacementCosines : torch::autograd::Function<DisplacementCosines> {
  static variable_list forward(AutogradContext* context, const at::Tensor& a, const at::Tensor& b,
                               const PairLists& pairs) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [length, cosine0, cosine1] = displacement_op().call(a, b, pairs.first, pairs.second);
    context->save_for_backward(
        {a, b, or_undefined(pairs.first), or_undefined(pairs.second), length, cosine0, cosine1});
    return {length, cosine0, cosine1};
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const BelowUnlessGraph below;
    static const auto op =
        operator_named<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                  const at::Tensor&, const at::Tensor&, const Maybe&, const Maybe&,
                                  const at::Tensor&, const at::Tensor&, const at::Tensor&)>(
            "plimsoll::_displacement_cosines_backward");
    const auto grad_a = op.call(gradients[0], gradients[1], gradients[2], saved[0], saved[1],
                                present(saved[2]), present(saved[3]), saved[4], saved[5], saved[6]);
    return {grad_a, context->needs_input_grad(1) ? grad_a.neg() : at::Tensor{}, at::Tensor{}};
  }
};

Triple displacement_autograd(const at::Tensor& a, const at::Tensor& b, const Maybe& pairs0,
                             const Maybe& pairs1) {
  check_displacement(a, b, pairs0, pairs1);
  if (!has_kernel(a)) {
    return composed::displacement_cosines(a, b, pairs0, pairs1);
  }
  const auto all = DisplacementCosines::apply(a, b, PairLists{pairs0, pairs1});
  return {all[0], all[1], all[2]};
}

}  // namespace

at::Tensor normalize_rows(const at::Tensor& x) {
  static const auto op = operator_named<at::Tensor(const at::Tensor&)>("plimsoll::normalize_rows");
  return op.call(x);
}

Polar polar_coordinates(const at::Tensor& x) {
  const auto [radius, angle] = polar_op().call(x);
  return {radius, angle};
}

Rotated rotate_toward(const at::Tensor& x, const at::Tensor& direction, const at::Tensor& angle,
                      const at::Tensor& scale) {
  const auto [out, unit] = rotate_op().call(x, direction, angle, scale);
  return {out, unit};
}

at::Tensor symmetric_info_nce(const at::Tensor& a, const at::Tensor& b, const at::Tensor& groups,
                              double temperature) {
  static const auto op =
      operator_named<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, double)>(
          "plimsoll::symmetric_info_nce");
  return op.call(a, b, groups, temperature);
}

Neighbors nearest_neighbors(const at::Tensor& x) {
  const auto [nearest, best_angle, best_cosine] = neighbors_op().call(x);
  return {nearest, best_angle, best_cosine};
}

Displacement displacement_cosines(const at::Tensor& a, const at::Tensor& b,
                                  const at::Tensor& pairs0, const at::Tensor& pairs1) {
  const auto [length, cosine0, cosine1] =
      displacement_op().call(a, b, present(pairs0), present(pairs1));
  return {length, pairs0.defined() ? cosine0 : at::Tensor{},
          pairs1.defined() ? cosine1 : at::Tensor{}};
}

}  // namespace plimsoll::kernels

// Operators whose names begin with `_` are parts of the others, and not for callers.
TORCH_LIBRARY_FRAGMENT(plimsoll, m) {
  m.def("normalize_rows(Tensor x) -> Tensor");
  m.def("_normalize_rows(Tensor x) -> (Tensor, Tensor)");
  m.def("_normalize_rows_backward(Tensor grad, Tensor unit, Tensor length) -> Tensor");
  m.def("polar_coordinates(Tensor x) -> (Tensor radius, Tensor angle)");
  m.def("_polar_coordinates_backward(Tensor grad_radius, Tensor grad_angle, Tensor x) -> Tensor");
  m.def(
      "rotate_toward(Tensor x, Tensor direction, Tensor angle, Tensor scale)"
      " -> (Tensor out, Tensor unit)");
  m.def(
      "_rotate_toward_backward(Tensor grad_out, Tensor grad_unit, Tensor x, Tensor direction,"
      " Tensor angle, Tensor scale, bool to_x) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("symmetric_info_nce(Tensor a, Tensor b, Tensor groups, float temperature) -> Tensor");
  m.def(
      "_symmetric_info_nce(Tensor a, Tensor b, Tensor groups, float temperature, bool to_a,"
      " bool to_b) -> (Tensor, Tensor, Tensor)");
  m.def("nearest_neighbors(Tensor x) -> (Tensor nearest, Tensor best_angle, Tensor best_cosine)");
  m.def(
      "displacement_cosines(Tensor a, Tensor b, Tensor? pairs0, Tensor? pairs1)"
      " -> (Tensor length, Tensor cosine0, Tensor cosine1)");
  m.def(
      "_displacement_cosines_backward(Tensor grad_length, Tensor grad_cosine0, Tensor grad_cosine1,"
      " Tensor a, Tensor b, Tensor? pairs0, Tensor? pairs1, Tensor length, Tensor cosine0,"
      " Tensor cosine1) -> Tensor");
}

TORCH_LIBRARY_IMPL(plimsoll, Autograd, m) {
  using namespace plimsoll::kernels;
  m.impl("normalize_rows", &normalize_autograd);
  m.impl("polar_coordinates", &polar_autograd);
  m.impl("rotate_toward", &rotate_autograd);
  m.impl("symmetric_info_nce", &nce_autograd);
  m.impl("nearest_neighbors", &neighbors_autograd);
  m.impl("displacement_cosines", &displacement_autograd);
  for (const char* name :
       {"_normalize_rows", "_normalize_rows_backward", "_polar_coordinates_backward",
        "_rotate_toward_backward", "_symmetric_info_nce", "_displacement_cosines_backward"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}

TORCH_LIBRARY_IMPL(plimsoll, CompositeExplicitAutograd, m) {
  using namespace plimsoll::kernels;
  m.impl("normalize_rows", &normalize_below);
  m.impl("polar_coordinates", &polar_below);
  m.impl("rotate_toward", &rotate_below);
  m.impl("symmetric_info_nce", &nce_below);
  m.impl("nearest_neighbors", &neighbors_below);
  m.impl("displacement_cosines", &displacement_below);
}

TORCH_LIBRARY_IMPL(plimsoll, CPU, m) {
  using namespace plimsoll::kernels;
  m.impl("_normalize_rows", &normalize_cpu);
  m.impl("_normalize_rows_backward", &normalize_backward_cpu);
  m.impl("_polar_coordinates_backward", &polar_backward_cpu);
  m.impl("_rotate_toward_backward", &rotate_backward_cpu);
  m.impl("_symmetric_info_nce", &nce_cpu);
  m.impl("_displacement_cosines_backward", &displacement_backward_cpu);
}

TORCH_LIBRARY_IMPL(plimsoll, Meta, m) {
  using namespace plimsoll::kernels;
  m.impl("_normalize_rows", &normalize_meta);
  m.impl("_normalize_rows_backward", &normalize_backward_meta);
  m.impl("polar_coordinates", &polar_meta);
  m.impl("_polar_coordinates_backward", &polar_backward_meta);
  m.impl("rotate_toward", &rotate_meta);
  m.impl("_rotate_toward_backward", &rotate_backward_meta);
  m.impl("_symmetric_info_nce", &nce_meta);
  m.impl("nearest_neighbors", &neighbors_meta);
  m.impl("displacement_cosines", &displacement_meta);
  m.impl("_displacement_cosines_backward", &displacement_backward_meta);
}
