// SPDX-License-Identifier: Apache-2.0
//
// Losses whose gradients are computed beside their values.
//
// Threads: as torch operators.   Memory: see node_losses.h.
#include "recipes/can_kd/node_losses.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "recipes/can_kd/floats.h"
#include "recipes/can_kd/row_kernels.h"
#include "recipes/can_kd/row_products.h"

namespace plimsoll::can_kd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::int64_t kBlock = 1024;  // Rows whose logits are there at one time.

at::Tensor scalar(double value, const at::Tensor& like) {
  auto made = at::empty({}, like.options());
  *out_floats(made) = static_cast<float>(value);
  return made;
}

struct MeanSquare : torch::autograd::Function<MeanSquare> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& y) {
    context->save_for_backward({x, y});
    return scalar(sum_of_squared_differences(floats(x), floats(y), x.numel()) /
                      static_cast<double>(x.numel()),
                  x);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto grad =
        (saved[0] - saved[1]) * (gradients[0] * (2.0 / static_cast<double>(saved[0].numel())));
    return {grad, context->needs_input_grad(1) ? -grad : at::Tensor{}};
  }
};

struct NormalDivergence : torch::autograd::Function<NormalDivergence> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& mean,
                            const at::Tensor& log_variance) {
    context->save_for_backward({mean, log_variance});
    const auto sum = sum_of_divergences(floats(mean), floats(log_variance), mean.numel());
    return scalar(sum / static_cast<double>(mean.numel()), mean);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto by = gradients[0] * (1.0 / static_cast<double>(saved[0].numel()));
    auto variance = at::empty_like(saved[1]);
    exponential(floats(saved[1]), variance.numel(), out_floats(variance));
    return {saved[0] * by, (variance - 1.0) * (by * 0.5)};
  }
};

// What makes logits of a block into losses of its rows, and into `factor` times their gradients.
struct HeadKind {
  const std::int64_t* ids{nullptr};
  const Adjacency* adjacency{nullptr};  // Null: the loss is the id's own; else its targets'.
  bool bf16{false};
  bool gradient{false};
};

// Ids that the nodes from `first` on send to, each once a node: (row of the block, id).
std::vector<std::pair<std::int64_t, std::int64_t>> neighbour_ids(const HeadKind& kind,
                                                                 std::int64_t first,
                                                                 std::int64_t rows) {
  std::vector<std::pair<std::int64_t, std::int64_t>> found;
  const Adjacency& a = *kind.adjacency;
  for (std::int64_t r = 0; r < rows; ++r) {
    const auto v = static_cast<std::size_t>(first + r);
    const std::size_t before = found.size();
    for (std::int32_t k = a.out_ptr[v]; k < a.out_ptr[v + 1]; ++k) {
      const std::int64_t target = a.out_target[static_cast<std::size_t>(k)];
      if (target != first + r || a.self_edge[v] != 0) {
        found.emplace_back(r, kind.ids[target]);
      }
    }
    const auto begin = found.begin() + static_cast<std::ptrdiff_t>(before);
    std::sort(begin, found.end());
    found.erase(std::unique(begin, found.end()), found.end());
  }
  return found;
}

void block_losses(const HeadKind& kind, const at::Tensor& logits, std::int64_t first, double factor,
                  float* loss) {
  const Extent shape{logits.size(0), logits.size(1)};
  float* x = out_floats(logits);
  const auto by = static_cast<float>(factor);
  if (kind.adjacency == nullptr) {
    cross_entropy_rows(x, shape, kind.ids + first, by, loss);
    return;
  }
  const auto positive = neighbour_ids(kind, first, shape.rows);
  std::vector<float> of_positive(static_cast<std::size_t>(shape.rows), 0.0F);
  for (const auto& [r, id] : positive) {
    of_positive[static_cast<std::size_t>(r)] += x[r * shape.columns + id];
  }
  softplus_rows(x, shape, by, loss);
  for (std::int64_t r = 0; r < shape.rows; ++r) {
    loss[r] -= of_positive[static_cast<std::size_t>(r)];
  }
  for (const auto& [r, id] : positive) {
    x[r * shape.columns + id] -= by;
  }
}

struct HeadLoss : torch::autograd::Function<HeadLoss> {
  static at::Tensor rounded(const at::Tensor& x, bool bf16) {
    return bf16 ? x.to(at::kBFloat16).to(at::kFloat) : x;
  }

  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows,
                            const at::Tensor& weight_given, const at::Tensor& bias,
                            const HeadKind& kind) {
    const std::int64_t count = rows.size(0);
    const auto weight = rounded(weight_given, kind.bf16);
    const double terms = static_cast<double>(count) *
                         (kind.adjacency == nullptr ? 1.0 : static_cast<double>(weight.size(0)));
    at::Tensor grad_rows;
    at::Tensor grad_weight;
    at::Tensor grad_bias;
    if (kind.gradient) {
      grad_rows = at::empty_like(rows);
      grad_weight = at::zeros_like(weight);
      grad_bias = at::zeros_like(bias);
    }
    double sum = 0.0;
    std::vector<float> loss(static_cast<std::size_t>(std::min(count, kBlock)));
    for (std::int64_t first = 0; first < count; first += kBlock) {
      const auto block = rounded(rows.narrow(0, first, std::min(kBlock, count - first)), kind.bf16);
      const std::int64_t here = block.size(0);
      const std::int64_t most = weight.size(0);
      const auto logits = at::empty({here, most}, rows.options());
      multiply_rows({here, rows.size(1), most, floats(block), floats(weight), floats(bias)},
                    out_floats(logits));
      block_losses(kind, logits, first, 1.0 / terms, loss.data());
      for (std::int64_t r = 0; r < here; ++r) {
        sum += static_cast<double>(loss[static_cast<std::size_t>(r)]);
      }
      if (kind.gradient) {
        const auto grad = rounded(logits, kind.bf16);
        multiply_rows({here, most, rows.size(1), floats(grad), floats(weight), nullptr, true},
                      out_floats(grad_rows) + first * rows.size(1));
        multiply_columns({here, most, rows.size(1), floats(grad), floats(block), true},
                         out_floats(grad_weight));
        auto columns = at::empty_like(grad_bias);
        sum_columns(floats(logits), {here, most}, out_floats(columns));
        grad_bias.add_(columns);
      }
    }
    context->save_for_backward({grad_rows, grad_weight, grad_bias});
    return scalar(sum / terms, rows);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    auto saved = context->get_saved_variables();
    variable_list made;
    for (const auto& x : saved) {
      made.push_back(x.defined() ? x * gradients[0] : x);
    }
    made.emplace_back();  // The kind's.
    return made;
  }
};

at::Tensor head_loss(const at::Tensor& rows, const Linear& head, HeadKind kind) {
  kind.gradient =
      c10::GradMode::is_enabled() && (rows.requires_grad() || head.weight.requires_grad());
  return HeadLoss::apply(rows.contiguous(), head.weight, head.bias, kind);
}

const std::int64_t* checked_ids(const at::Tensor& ids, const at::Tensor& rows, const Linear& head) {
  PLIMSOLL_CHECK(ids.is_contiguous() && ids.size(0) == rows.size(0), "one id per row");
  const auto* list = ids.const_data_ptr<std::int64_t>();
  const std::int64_t most = head.weight.size(0);
  PLIMSOLL_CHECK(std::all_of(list, list + ids.numel(),
                             [most](std::int64_t id) { return id >= 0 && id < most; }),
                 "an id's index lies within the head");
  return list;
}

}  // namespace

at::Tensor mean_square(const at::Tensor& x, const at::Tensor& y) {
  PLIMSOLL_CHECK(x.sizes() == y.sizes() && x.numel() > 0, "two tensors of one shape");
  return MeanSquare::apply(x.contiguous(), y.contiguous());
}

at::Tensor normal_divergence(const at::Tensor& mean, const at::Tensor& log_variance) {
  PLIMSOLL_CHECK(mean.sizes() == log_variance.sizes() && mean.numel() > 0,
                 "a log variance for each mean");
  return NormalDivergence::apply(mean.contiguous(), log_variance.contiguous());
}

at::Tensor id_cross_entropy(const at::Tensor& rows, const Linear& head, const at::Tensor& ids,
                            const Mode& mode) {
  return head_loss(rows, head, {checked_ids(ids, rows, head), nullptr, mode.bf16, false});
}

at::Tensor neighbour_cross_entropy(const at::Tensor& rows, const Linear& head,
                                   const at::Tensor& ids, const Adjacency& adjacency,
                                   const Mode& mode) {
  return head_loss(rows, head, {checked_ids(ids, rows, head), &adjacency, mode.bf16, false});
}

at::Tensor id_cross_entropy_rows(const at::Tensor& rows, const Linear& head,
                                 const at::Tensor& ids) {
  const c10::AutoGradMode off{false};
  const auto* wanted = checked_ids(ids, rows, head);
  const auto x = rows.contiguous();
  const std::int64_t count = x.size(0);
  const std::int64_t most = head.weight.size(0);
  auto loss = at::empty({count}, x.options());
  auto logits = at::empty({std::min(count, kBlock), most}, x.options());
  for (std::int64_t first = 0; first < count; first += kBlock) {
    const std::int64_t block = std::min(kBlock, count - first);
    multiply_rows({block, x.size(1), most, floats(x) + first * x.size(1), floats(head.weight),
                   floats(head.bias)},
                  out_floats(logits));
    cross_entropy_rows(out_floats(logits), {block, most}, wanted + first, 0.0F,
                       out_floats(loss) + first);
  }
  return loss;
}

}  // namespace plimsoll::can_kd
