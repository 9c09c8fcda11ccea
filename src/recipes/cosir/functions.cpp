// SPDX-License-Identifier: Apache-2.0
//
// Autograd functions over cosir_kernels.h.
//
// Threads: as torch operators.   Memory: see cosir_functions.h.
#include "recipes/cosir/functions.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/check.h"
#include "recipes/cosir/kernels.h"

namespace plimsoll::cosir {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const float* floats(const at::Tensor& x) {
  return x.const_data_ptr<float>();
}
float* out_floats(const at::Tensor& x) {
  return x.data_ptr<float>();
}

at::Tensor dense(const at::Tensor& gradient, const at::Tensor& like) {
  return gradient.defined() ? gradient.contiguous() : at::zeros_like(like);
}

struct NormaliseRows : torch::autograd::Function<NormaliseRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    PLIMSOLL_CHECK(x.is_contiguous() && x.dim() == 2, "normalise_rows wants a contiguous matrix");
    auto unit = at::empty_like(x);
    auto length = at::empty({x.size(0)}, x.options());
    unit_rows(floats(x), x.size(0), x.size(1), out_floats(unit), out_floats(length));
    context->save_for_backward({unit, length});
    return unit;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto g = gradients[0].contiguous();
    auto grad_x = at::empty_like(g);
    unit_rows_backward(floats(g), floats(saved[0]), floats(saved[1]), g.size(0), g.size(1),
                       out_floats(grad_x));
    return {grad_x};
  }
};

struct PolarRows : torch::autograd::Function<PolarRows> {
  static variable_list forward(AutogradContext* context, const at::Tensor& c) {
    auto radius = at::empty({c.size(0)}, c.options());
    auto angle = at::empty({c.size(0)}, c.options());
    polar_rows(floats(c), c.size(0), c.size(1), out_floats(radius), out_floats(angle));
    context->save_for_backward({c});
    return {radius, angle};
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto c = context->get_saved_variables()[0];
    const auto like = at::zeros({c.size(0)}, c.options());
    const auto grad_radius = dense(gradients[0], like);
    const auto grad_angle = dense(gradients[1], like);
    auto grad_c = at::empty_like(c);
    polar_rows_backward(floats(c), floats(grad_radius), floats(grad_angle), c.size(0), c.size(1),
                        out_floats(grad_c));
    return {grad_c};
  }
};

CombineRows combine_input(const at::Tensor& text, const at::Tensor& direction,
                          const at::Tensor& theta, const at::Tensor& scale) {
  return {text.size(0),      text.size(1),  floats(text),
          floats(direction), floats(theta), floats(scale)};
}

struct Combine : torch::autograd::Function<Combine> {
  static variable_list forward(AutogradContext* context, const at::Tensor& text,
                               const at::Tensor& direction, const at::Tensor& theta,
                               const at::Tensor& scale) {
    PLIMSOLL_CHECK(text.is_contiguous() && direction.is_contiguous(), "combine wants dense rows");
    auto out = at::empty_like(text);
    auto text_unit = at::empty_like(text);
    combine_rows(combine_input(text, direction, theta, scale), out_floats(out),
                 out_floats(text_unit));
    context->save_for_backward({text, direction, theta, scale});
    if (!text.requires_grad()) {
      context->mark_non_differentiable({text_unit});
    }
    return {out, text_unit};
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const bool to_text = context->needs_input_grad(0);
    const auto grad_out = dense(gradients[0], saved[0]);
    const auto grad_unit =
        to_text && gradients[1].defined() ? gradients[1].contiguous() : at::Tensor{};
    auto grad_text = to_text ? at::empty_like(saved[0]) : at::Tensor{};
    auto grad_direction = at::empty_like(saved[1]);
    auto grad_theta = at::empty_like(saved[2]);
    auto grad_scale = at::empty_like(saved[3]);
    combine_rows_backward(combine_input(saved[0], saved[1], saved[2], saved[3]),
                          {floats(grad_out), grad_unit.defined() ? floats(grad_unit) : nullptr,
                           to_text ? out_floats(grad_text) : nullptr, out_floats(grad_direction),
                           out_floats(grad_theta), out_floats(grad_scale)});
    return {grad_text, grad_direction, grad_theta, grad_scale};
  }
};

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

struct SymmetricNce : torch::autograd::Function<SymmetricNce> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& out,
                            const at::Tensor& image, const at::Tensor& groups, double temperature) {
    const std::int64_t rows = out.size(0);
    const auto tau = static_cast<float>(temperature);
    auto s = at::mm(out, image.t());
    mask_groups(groups, s);
    auto row_sum = at::empty({rows}, out.options());
    auto column_sum = at::empty({rows}, out.options());
    auto diagonal = at::empty({rows}, out.options().dtype(at::kDouble));
    {
      auto parts = at::empty({row_blocks(rows), rows}, out.options());
      exponentiate(out_floats(s), rows, tau, out_floats(parts), out_floats(row_sum),
                   out_floats(column_sum), diagonal.data_ptr<double>());
    }
    double loss = 0.0;
    for (std::int64_t i = 0; i < rows; ++i) {
      loss += 0.5 * (std::log(static_cast<double>(floats(row_sum)[i])) +
                     std::log(static_cast<double>(floats(column_sum)[i]))) -
              (diagonal.const_data_ptr<double>()[i] - 1.0) / static_cast<double>(tau);
    }
    if (out.requires_grad() || image.requires_grad()) {
      nce_gradient(out_floats(s), rows, tau, floats(row_sum), floats(column_sum));
      const auto grad_out = out.requires_grad() ? at::mm(s, image) : at::Tensor{};
      const auto grad_image = image.requires_grad() ? at::mm(s.t(), out) : at::Tensor{};
      context->save_for_backward({grad_out, grad_image});
    }
    auto result = at::empty({}, out.options());
    *out_floats(result) = static_cast<float>(loss / static_cast<double>(rows));
    return result;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    auto saved = context->get_saved_variables();
    const auto times = [&](const at::Tensor& x) {
      return x.defined() ? x * gradients[0] : at::Tensor{};
    };
    return {times(saved[0]), times(saved[1]), at::Tensor{}, at::Tensor{}};
  }
};

DeltaRows delta_input(const at::Tensor& out, const at::Tensor& text_unit, const at::Tensor& pairs0,
                      const at::Tensor& pairs1) {
  const auto list = [](const at::Tensor& pairs) {
    return pairs.defined() ? pairs.const_data_ptr<std::int64_t>() : nullptr;
  };
  return {out.size(0), out.size(1), floats(out), floats(text_unit), {list(pairs0), list(pairs1)}};
}

// One value as far as autograd is concerned: lists are no inputs of the function, and may be
// absent.
struct PairLists {
  at::Tensor first;
  at::Tensor second;
};

struct DeltaTerms : torch::autograd::Function<DeltaTerms> {
  static variable_list forward(AutogradContext* context, const at::Tensor& out,
                               const at::Tensor& text_unit, const PairLists& pairs) {
    const auto input = delta_input(out, text_unit, pairs.first, pairs.second);
    auto length = at::empty({input.rows}, out.options());
    auto cosine0 = at::zeros({input.rows}, out.options());
    auto cosine1 = at::zeros({input.rows}, out.options());
    delta_rows(input, out_floats(length), out_floats(cosine0), out_floats(cosine1));
    context->save_for_backward(
        {out, text_unit, pairs.first, pairs.second, length, cosine0, cosine1});
    return {length, cosine0, cosine1};
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto input = delta_input(saved[0], saved[1], saved[2], saved[3]);
    const auto grad_length = dense(gradients[0], saved[4]);
    const auto grad_cosine0 = dense(gradients[1], saved[4]);
    const auto grad_cosine1 = dense(gradients[2], saved[4]);
    auto scratch = at::empty({3, input.rows}, saved[0].options());
    auto grad_out = at::empty_like(saved[0]);
    delta_rows_backward(input, {floats(saved[4]),
                                {floats(saved[5]), floats(saved[6])},
                                floats(grad_length),
                                {floats(grad_cosine0), floats(grad_cosine1)},
                                out_floats(scratch),
                                out_floats(grad_out)});
    const auto grad_unit = context->needs_input_grad(1) ? grad_out.neg() : at::Tensor{};
    return {grad_out, grad_unit, at::Tensor{}};
  }
};

}  // namespace

at::Tensor normalise_rows(const at::Tensor& x) {
  return NormaliseRows::apply(x);
}

Polar polar(const at::Tensor& c) {
  const auto both = PolarRows::apply(c.contiguous());
  return {both[0], both[1]};
}

Combined combine(const at::Tensor& text, const at::Tensor& direction, const at::Tensor& theta,
                 const at::Tensor& scale) {
  const auto both = Combine::apply(text, direction, theta.contiguous(), scale.contiguous());
  return {both[0], both[1]};
}

at::Tensor symmetric_nce(const at::Tensor& out, const at::Tensor& image, const at::Tensor& groups,
                         double temperature) {
  PLIMSOLL_CHECK(out.size(0) >= 2, "InfoNCE needs two rows");
  return SymmetricNce::apply(out, image, groups, temperature);
}

Neighbours find_neighbours(const at::Tensor& c) {
  const auto dense_c = c.detach().contiguous();
  const std::int64_t rows = c.size(0);
  const auto whole = dense_c.options().dtype(at::kLong);
  Neighbours found{at::empty({rows, kNeighbours}, whole), at::empty({rows}, whole),
                   at::empty({rows}, dense_c.options())};
  auto scratch = at::empty({2, c.size(1), padded_rows(rows)}, dense_c.options());
  find_neighbours(floats(dense_c), rows, c.size(1), out_floats(scratch),
                  found.nearest.data_ptr<std::int64_t>(), found.best_angle.data_ptr<std::int64_t>(),
                  out_floats(found.best_cosine));
  return found;
}

Deltas deltas(const at::Tensor& out, const at::Tensor& text_unit, const at::Tensor& pairs0,
              const at::Tensor& pairs1) {
  const auto all = DeltaTerms::apply(out, text_unit, PairLists{pairs0, pairs1});
  return {all[0], pairs0.defined() ? all[1] : at::Tensor{},
          pairs1.defined() ? all[2] : at::Tensor{}};
}

}  // namespace plimsoll::cosir
