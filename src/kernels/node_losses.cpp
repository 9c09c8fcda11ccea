// SPDX-License-Identifier: Apache-2.0
//
// Losses whose gradients are computed beside their values.
#include "kernels/node_losses.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/linear_rows.h"
#include "kernels/operators.h"
#include "kernels/row_loops.h"
#include "kernels/row_products.h"

namespace plimsoll::kernels {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Both = std::tuple<at::Tensor, at::Tensor>;
using Graded = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

constexpr std::int64_t kBlock = 1024;  // Rows whose logits are there at one time.

at::Tensor scalar(double value, const at::Tensor& like) {
  auto made = at::empty({}, like.options());
  *out_floats(made) = static_cast<float>(value);
  return made;
}

// ---- mean_square and normal_divergence ----

void check_pair(const at::Tensor& x, const char* name, const at::Tensor& y, const char* other) {
  check_floating(x, name);
  check_same(x, name, y, other);
  TORCH_CHECK_VALUE(x.sym_numel() > 0, name, ": no elements, whose mean is not a number");
}

at::Tensor square_below(const at::Tensor& x_given, const at::Tensor& y_given) {
  check_pair(x_given, "mean_square: x", y_given, "mean_square: y");
  if (!has_kernel(x_given)) {
    return (x_given - y_given).square().mean();
  }
  const auto x = x_given.contiguous();
  const auto y = y_given.contiguous();
  return scalar(
      sum_of_squared_differences(floats(x), floats(y), x.numel()) / static_cast<double>(x.numel()),
      x);
}

// The gradient of x; that of y is its negative.
at::Tensor square_backward(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& y) {
  return (x - y) * (grad * (2.0 / static_cast<double>(x.numel())));
}

at::Tensor divergence_below(const at::Tensor& mean_given, const at::Tensor& log_variance_given) {
  check_pair(mean_given, "normal_divergence: mean", log_variance_given,
             "normal_divergence: log_variance");
  if (!has_kernel(mean_given)) {
    return (1.0 + log_variance_given - mean_given.square() - log_variance_given.exp()).mean() *
           -0.5;
  }
  const auto mean = mean_given.contiguous();
  const auto log_variance = log_variance_given.contiguous();
  const auto sum = sum_of_divergences(floats(mean), floats(log_variance), mean.numel());
  return scalar(sum / static_cast<double>(mean.numel()), mean);
}

Both divergence_backward(const at::Tensor& grad, const at::Tensor& mean, const at::Tensor& given) {
  const auto log_variance = given.contiguous();
  const auto by = grad * (1.0 / static_cast<double>(mean.numel()));
  auto variance = at::empty_like(log_variance);
  exponential(floats(log_variance), variance.numel(), out_floats(variance));
  return {mean * by, (variance - 1.0) * (by * 0.5)};
}

at::Tensor scalar_meta(const at::Tensor& x, const at::Tensor& y) {
  check_pair(x, "the first argument", y, "the second");
  return at::empty({}, x.options());
}

using PairOp = at::Tensor(const at::Tensor&, const at::Tensor&);
const auto& square_op() {
  static const auto op = operator_named<PairOp>("plimsoll::mean_square");
  return op;
}
const auto& divergence_op() {
  static const auto op = operator_named<PairOp>("plimsoll::normal_divergence");
  return op;
}

struct MeanSquare : torch::autograd::Function<MeanSquare> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& y) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({x, y});
    return square_op().call(x, y);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const BelowUnlessGraph below;
    static const auto op =
        operator_named<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)>(
            "plimsoll::_mean_square_backward");
    const auto grad = op.call(gradients[0], saved[0], saved[1]);
    return {grad, context->needs_input_grad(1) ? -grad : at::Tensor{}};
  }
};

struct NormalDivergence : torch::autograd::Function<NormalDivergence> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& mean,
                            const at::Tensor& log_variance) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({mean, log_variance});
    return divergence_op().call(mean, log_variance);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const BelowUnlessGraph below;
    static const auto op =
        operator_named<Both(const at::Tensor&, const at::Tensor&, const at::Tensor&)>(
            "plimsoll::_normal_divergence_backward");
    const auto [mean, log_variance] = op.call(gradients[0], saved[0], saved[1]);
    return {mean, log_variance};
  }
};

at::Tensor square_autograd(const at::Tensor& x, const at::Tensor& y) {
  return has_kernel(x) && has_kernel(y) ? MeanSquare::apply(x, y) : square_below(x, y);
}

at::Tensor divergence_autograd(const at::Tensor& mean, const at::Tensor& log_variance) {
  return has_kernel(mean) && has_kernel(log_variance) ? NormalDivergence::apply(mean, log_variance)
                                                      : divergence_below(mean, log_variance);
}

// ---- Losses of a head ----

void check_head(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias,
                const at::Tensor& ids, at::TensorList edges) {
  check_dims(rows, 2, "cross entropy: rows");
  check_dims(weight, 2, "cross entropy: weight");
  check_dims(bias, 1, "cross entropy: bias");
  check_alike(rows, "rows", weight, "cross entropy: weight");
  check_alike(rows, "rows", bias, "cross entropy: bias");
  check_size(rows, 1, "rows", weight, 1, "cross entropy: weight");
  check_size(weight, 0, "weight", bias, 0, "cross entropy: bias");
  check_list(rows, "rows", ids, "cross entropy: ids");
  TORCH_CHECK_VALUE(rows.sym_size(0) > 0, "cross entropy: no rows, whose mean is not a number");
  if (!edges.empty()) {
    check_edge_tensors(edges, rows);
  }
}

// What makes logits of a block into losses of its rows, and into `factor` times their gradients.
struct HeadKind {
  const std::int64_t* ids{nullptr};
  const std::int32_t* out_ptr{nullptr};  // Null: the loss is the id's own; else its targets'.
  const std::int32_t* out_target{nullptr};
  const std::uint8_t* self_edge{nullptr};
};

// Ids that the nodes from `first` on send to, each once a node: (row of the block, id).
std::vector<std::pair<std::int64_t, std::int64_t>> neighbor_ids(const HeadKind& kind,
                                                                std::int64_t first,
                                                                std::int64_t rows) {
  std::vector<std::pair<std::int64_t, std::int64_t>> found;
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t v = first + r;
    const std::size_t before = found.size();
    for (std::int32_t k = kind.out_ptr[v]; k < kind.out_ptr[v + 1]; ++k) {
      const std::int64_t target = kind.out_target[k];
      if (target != v || kind.self_edge[v] != 0) {
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
  if (kind.out_ptr == nullptr) {
    cross_entropy_rows(x, shape, kind.ids + first, by, loss);
    return;
  }
  const auto positive = neighbor_ids(kind, first, shape.rows);
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

// The loss and, with `gradient`, those of rows, weight and bias; else they are empty.
Graded head_cpu(const at::Tensor& rows_given, const at::Tensor& weight_given,
                const at::Tensor& bias_given, const at::Tensor& ids_given, at::TensorList edges,
                bool bf16, bool gradient) {
  check_head(rows_given, weight_given, bias_given, ids_given, edges);
  const auto rows = rows_given.contiguous();
  const auto weight = rounded_to_bf16(weight_given.contiguous(), bf16);
  const auto bias = bias_given.contiguous();
  const auto ids = ids_given.contiguous();
  check_range(ids, weight.size(0), "cross entropy: ids");
  HeadKind kind;
  kind.ids = ids.const_data_ptr<std::int64_t>();
  if (!edges.empty()) {
    const Edges list = checked_edges(edges);
    kind.out_ptr = list.out_ptr;
    kind.out_target = list.out_target;
    kind.self_edge = edges[kSelfEdge].const_data_ptr<std::uint8_t>();
  }
  const std::int64_t count = rows.size(0);
  const double terms =
      static_cast<double>(count) * (edges.empty() ? 1.0 : static_cast<double>(weight.size(0)));
  const auto none = [&] { return at::empty({0}, rows.options()); };
  auto grad_rows = gradient ? at::empty_like(rows) : none();
  auto grad_weight = gradient ? at::zeros_like(weight) : none();
  auto grad_bias = gradient ? at::zeros_like(bias) : none();
  double sum = 0.0;
  std::vector<float> loss(static_cast<std::size_t>(std::min(count, kBlock)));
  for (std::int64_t first = 0; first < count; first += kBlock) {
    const auto block =
        rounded_to_bf16(rows.narrow(0, first, std::min(kBlock, count - first)), bf16);
    const std::int64_t here = block.size(0);
    const std::int64_t most = weight.size(0);
    const auto logits = at::empty({here, most}, rows.options());
    multiply_rows({here, rows.size(1), most, floats(block), floats(weight), floats(bias)},
                  out_floats(logits));
    block_losses(kind, logits, first, 1.0 / terms, loss.data());
    for (std::int64_t r = 0; r < here; ++r) {
      sum += static_cast<double>(loss[static_cast<std::size_t>(r)]);
    }
    if (gradient) {
      const auto grad = rounded_to_bf16(logits, bf16);
      multiply_rows({here, most, rows.size(1), floats(grad), floats(weight), nullptr, true},
                    out_floats(grad_rows) + first * rows.size(1));
      multiply_columns({here, most, rows.size(1), floats(grad), floats(block), true},
                       out_floats(grad_weight));
      auto columns = at::empty_like(grad_bias);
      sum_columns(floats(logits), {here, most}, out_floats(columns));
      grad_bias.add_(columns);
    }
  }
  return {scalar(sum / terms, rows), grad_rows, grad_weight, grad_bias};
}

// 1 where a node sends to a node of an id, like logits.
at::Tensor sent_ids(at::TensorList edges, const at::Tensor& ids, const at::Tensor& logits) {
  const auto target = edges[kOutTarget].to(at::kLong);
  const auto source = nodes_of(edges[kOutPtr], target);
  const auto with_itself = at::cat({edges[kSelfEdge].to(at::kLong), ids.slice(0, 0, 1) * 0});
  const auto counts = at::logical_or(source != target, with_itself.index_select(0, source) != 0);
  // A node's own edge that was not there, and places behind the last, are of one behind the last.
  const auto row = at::where(counts, source, at::zeros_like(source) + ids.sym_size(0));
  const auto all = at::cat({at::zeros_like(logits), at::zeros_like(logits.slice(0, 0, 1))});
  return all.index_put({row, ids.index_select(0, target)}, at::ones({}, logits.options()))
      .slice_symint(0, 0, ids.sym_size(0));
}

// All logits at once. The gradients are written out, since torch has none that rounds.
Graded head_composed(const at::Tensor& rows_given, const at::Tensor& weight_given,
                     const at::Tensor& bias, const at::Tensor& ids, at::TensorList edges, bool bf16,
                     bool gradient) {
  check_head(rows_given, weight_given, bias, ids, edges);
  const auto rows = rounded_to_bf16(rows_given, bf16);
  const auto weight = rounded_to_bf16(weight_given, bf16);
  const auto logits = at::linear(rows, weight, bias);
  at::Tensor loss;
  at::Tensor slope;
  if (edges.empty()) {
    const auto chosen = ids.unsqueeze(1);
    const auto log_share = at::log_softmax(logits, 1);
    loss = -log_share.gather(1, chosen).mean();
    slope = (log_share.exp() - at::zeros_like(logits).scatter(1, chosen, 1.0)) / rows.sym_size(0);
  } else {
    const auto sent = sent_ids(edges, ids, logits);
    loss = (at::softplus(logits) - sent * logits).mean();
    slope = (logits.sigmoid() - sent) / logits.sym_numel();
  }
  const auto none = at::empty({0}, rows.options());
  if (!gradient) {
    return {loss, none, none, none};
  }
  const auto grad = rounded_to_bf16(slope, bf16);
  return {loss, at::mm(grad, weight), at::mm(grad.t(), rows), slope.sum(0)};
}

Graded head_below(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias,
                  const at::Tensor& ids, at::TensorList edges, bool bf16, bool gradient) {
  return has_kernel(rows) ? head_cpu(rows, weight, bias, ids, edges, bf16, gradient)
                          : head_composed(rows, weight, bias, ids, edges, bf16, gradient);
}

Graded head_meta(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias,
                 const at::Tensor& ids, at::TensorList edges, bool, bool gradient) {
  check_head(rows, weight, bias, ids, edges);
  const auto like = [&](const at::Tensor& x) {
    return gradient ? at::empty_symint(x.sym_sizes(), x.options()) : at::empty({0}, x.options());
  };
  return {at::empty({}, rows.options()), like(rows), like(weight), like(bias)};
}

using HeadPart = Graded(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                        at::TensorList, bool, bool);
const auto& head_part() {
  static const auto op = operator_named<HeadPart>("plimsoll::_head_loss");
  return op;
}

struct HeadLoss : torch::autograd::Function<HeadLoss> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows,
                            const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& ids,
                            const EdgeTensors& edges, bool bf16, bool gradient) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [loss, of_rows, of_weight, of_bias] =
        head_part().call(rows, weight, bias, ids, edges, bf16, gradient);
    if (gradient) {
      context->save_for_backward({of_rows, of_weight, of_bias});
    }
    return loss;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    TORCH_CHECK_NOT_IMPLEMENTED(!c10::GradMode::is_enabled(),
                                "cross entropy of ids: create_graph=True asks for a gradient of "
                                "its gradient, which it does not have");
    variable_list made;
    for (const auto& x : context->get_saved_variables()) {
      made.push_back(x * gradients[0]);
    }
    made.resize(7);  // Of what is no tensor of floats none.
    return made;
  }
};

at::Tensor graded_head(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias,
                       const at::Tensor& ids, at::TensorList edges, bool bf16) {
  check_head(rows, weight, bias, ids, edges);
  const bool gradient = wants_gradient(rows) || wants_gradient(weight) || wants_gradient(bias);
  return HeadLoss::apply(rows, weight, bias, ids, edges.vec(), bf16, gradient);
}

at::Tensor own_autograd(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias,
                        const at::Tensor& ids, bool bf16) {
  return graded_head(rows, weight, bias, ids, {}, bf16);
}

at::Tensor own_below(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias,
                     const at::Tensor& ids, bool bf16) {
  return std::get<0>(head_part().call(rows, weight, bias, ids, {}, bf16, false));
}

at::Tensor neighbors_of_autograd(const at::Tensor& rows, const at::Tensor& weight,
                                 const at::Tensor& bias, const at::Tensor& ids,
                                 at::TensorList edges, bool bf16) {
  TORCH_CHECK_VALUE(!edges.empty(), "cross entropy: edges: none; sort_edges() makes them");
  return graded_head(rows, weight, bias, ids, edges, bf16);
}

at::Tensor neighbors_of_below(const at::Tensor& rows, const at::Tensor& weight,
                              const at::Tensor& bias, const at::Tensor& ids, at::TensorList edges,
                              bool bf16) {
  TORCH_CHECK_VALUE(!edges.empty(), "cross entropy: edges: none; sort_edges() makes them");
  return std::get<0>(head_part().call(rows, weight, bias, ids, edges, bf16, false));
}

// ---- id_cross_entropy_rows ----

at::Tensor rows_below(const at::Tensor& given, const at::Tensor& weight_given,
                      const at::Tensor& bias_given, const at::Tensor& ids_given) {
  check_head(given, weight_given, bias_given, ids_given, {});
  if (!has_kernel(given)) {
    const auto logits = at::linear(given, weight_given, bias_given);
    return -at::log_softmax(logits, 1).gather(1, ids_given.unsqueeze(1)).squeeze(1);
  }
  const auto rows = given.contiguous();
  const auto weight = weight_given.contiguous();
  const auto bias = bias_given.contiguous();
  const auto ids = ids_given.contiguous();
  const std::int64_t count = rows.size(0);
  const std::int64_t most = weight.size(0);
  check_range(ids, most, "cross entropy: ids");
  auto loss = at::empty({count}, rows.options());
  auto logits = at::empty({std::min(count, kBlock), most}, rows.options());
  for (std::int64_t first = 0; first < count; first += kBlock) {
    const std::int64_t block = std::min(kBlock, count - first);
    multiply_rows({block, rows.size(1), most, floats(rows) + first * rows.size(1), floats(weight),
                   floats(bias)},
                  out_floats(logits));
    cross_entropy_rows(out_floats(logits), {block, most},
                       ids.const_data_ptr<std::int64_t>() + first, 0.0F, out_floats(loss) + first);
  }
  return loss;
}

at::Tensor rows_meta(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias,
                     const at::Tensor& ids) {
  check_head(rows, weight, bias, ids, {});
  return at::empty_symint({rows.sym_size(0)}, rows.options());
}

using RowsOp = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                          const at::Tensor&);
const auto& rows_op() {
  static const auto op = operator_named<RowsOp>("plimsoll::id_cross_entropy_rows");
  return op;
}

at::Tensor rows_autograd(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias,
                         const at::Tensor& ids) {  // No gradient comes of it.
  const at::AutoDispatchBelowADInplaceOrView below;
  return rows_op().call(rows.detach(), weight.detach(), bias.detach(), ids);
}

}  // namespace

at::Tensor mean_square(const at::Tensor& x, const at::Tensor& y) {
  return square_op().call(x, y);
}

at::Tensor normal_divergence(const at::Tensor& mean, const at::Tensor& log_variance) {
  return divergence_op().call(mean, log_variance);
}

at::Tensor id_cross_entropy(const at::Tensor& rows, const Head& head, const at::Tensor& ids) {
  static const auto op =
      operator_named<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                const at::Tensor&, bool)>("plimsoll::id_cross_entropy");
  return op.call(rows, head.weight, head.bias, ids, head.bf16);
}

at::Tensor neighbor_cross_entropy(const at::Tensor& rows, const Head& head, const at::Tensor& ids,
                                  const EdgeTensors& edges) {
  static const auto op =
      operator_named<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                const at::Tensor&, at::TensorList, bool)>(
          "plimsoll::neighbor_cross_entropy");
  return op.call(rows, head.weight, head.bias, ids, edges, head.bf16);
}

at::Tensor id_cross_entropy_rows(const at::Tensor& rows, const Head& head, const at::Tensor& ids) {
  return rows_op().call(rows, head.weight, head.bias, ids);
}

}  // namespace plimsoll::kernels

TORCH_LIBRARY_FRAGMENT(plimsoll, m) {
  m.def("mean_square(Tensor x, Tensor y) -> Tensor");
  m.def("_mean_square_backward(Tensor grad, Tensor x, Tensor y) -> Tensor");
  m.def("normal_divergence(Tensor mean, Tensor log_variance) -> Tensor");
  m.def(
      "_normal_divergence_backward(Tensor grad, Tensor mean, Tensor log_variance)"
      " -> (Tensor, Tensor)");
  m.def(
      "id_cross_entropy(Tensor rows, Tensor weight, Tensor bias, Tensor ids, bool bf16=False)"
      " -> Tensor");
  m.def(
      "neighbor_cross_entropy(Tensor rows, Tensor weight, Tensor bias, Tensor ids, Tensor[] edges,"
      " bool bf16=False) -> Tensor");
  m.def(
      "_head_loss(Tensor rows, Tensor weight, Tensor bias, Tensor ids, Tensor[] edges, bool bf16,"
      " bool gradient) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("id_cross_entropy_rows(Tensor rows, Tensor weight, Tensor bias, Tensor ids) -> Tensor");
}

TORCH_LIBRARY_IMPL(plimsoll, Autograd, m) {
  using namespace plimsoll::kernels;
  m.impl("mean_square", &square_autograd);
  m.impl("normal_divergence", &divergence_autograd);
  m.impl("id_cross_entropy", &own_autograd);
  m.impl("neighbor_cross_entropy", &neighbors_of_autograd);
  m.impl("id_cross_entropy_rows", &rows_autograd);
  for (const char* name : {"_mean_square_backward", "_normal_divergence_backward", "_head_loss"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}

TORCH_LIBRARY_IMPL(plimsoll, CompositeExplicitAutograd, m) {
  using namespace plimsoll::kernels;
  m.impl("mean_square", &square_below);
  m.impl("normal_divergence", &divergence_below);
  m.impl("id_cross_entropy", &own_below);
  m.impl("neighbor_cross_entropy", &neighbors_of_below);
  m.impl("_head_loss", &head_below);
  m.impl("id_cross_entropy_rows", &rows_below);
}

TORCH_LIBRARY_IMPL(plimsoll, CPU, m) {
  using namespace plimsoll::kernels;
  m.impl("_mean_square_backward", &square_backward);
  m.impl("_normal_divergence_backward", &divergence_backward);
}

TORCH_LIBRARY_IMPL(plimsoll, Meta, m) {
  using namespace plimsoll::kernels;
  m.impl("mean_square", &scalar_meta);
  m.impl("_mean_square_backward",
         [](const at::Tensor&, const at::Tensor& x, const at::Tensor&) -> at::Tensor {
           return at::empty_symint(x.sym_sizes(), x.options());
         });
  m.impl("normal_divergence", &scalar_meta);
  m.impl("_normal_divergence_backward",
         [](const at::Tensor&, const at::Tensor& x, const at::Tensor& y) -> Both {
           return {at::empty_symint(x.sym_sizes(), x.options()),
                   at::empty_symint(y.sym_sizes(), y.options())};
         });
  m.impl("_head_loss", &head_meta);
  m.impl("id_cross_entropy_rows", &rows_meta);
}
