// SPDX-License-Identifier: Apache-2.0
//
// Of layers.h: what sums over runs of rows, steps of an LSTM, mixtures of layers.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <span>
#include <tuple>
#include <utility>

#include "kernels/edge_tensors.h"
#include "kernels/layers.h"
#include "kernels/operators.h"
#include "kernels/row_loops.h"

namespace plimsoll::kernels {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Two = std::tuple<at::Tensor, at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Maybe = std::optional<at::Tensor>;

// ---- segment_mean ----

void check_segments(const at::Tensor& x, const at::Tensor& ptr) {
  check_dims(x, 2, "segment_mean: x");
  TORCH_CHECK_TYPE(ptr.scalar_type() == at::kInt, "segment_mean: ptr: ", ptr.scalar_type(),
                   " is not int32");
  TORCH_CHECK_VALUE(ptr.dim() == 1 && ptr.sym_size(0) >= 1, "segment_mean: ptr: ", ptr.sym_sizes(),
                    " is not [runs + 1]");
  TORCH_CHECK_VALUE(ptr.device() == x.device(), "segment_mean: ptr: on ", ptr.device(),
                    ", but x is on ", x.device());
}

// Errors: IndexError unless it ascends from 0 to `rows`.
std::span<const std::int32_t> checked_runs(const at::Tensor& ptr, std::int64_t rows) {
  const std::span<const std::int32_t> list(ptr.const_data_ptr<std::int32_t>(),
                                           static_cast<std::size_t>(ptr.size(0)));
  bool good = list.front() == 0 && list.back() == rows;
  for (std::size_t g = 1; g < list.size(); ++g) {
    good = good && list[g] >= list[g - 1];
  }
  TORCH_CHECK_INDEX(good, "segment_mean: ptr does not ascend from 0 to ", rows);
  return list;
}

const auto& segment_op() {
  static const auto op =
      operator_named<at::Tensor(const at::Tensor&, const at::Tensor&)>("plimsoll::segment_mean");
  return op;
}

at::Tensor segment_below(const at::Tensor& given, const at::Tensor& ptr_given) {
  check_segments(given, ptr_given);
  if (!has_kernel(given)) {
    const auto whole = ptr_given.to(at::kLong);
    const auto runs = whole.sym_size(0) - 1;
    const auto of = nodes_of(ptr_given, given.slice(1, 0, 1).sum(1));
    const auto sum = at::zeros_symint({runs, given.sym_size(1)}, given.options());
    const auto count = (whole.slice_symint(0, 1) - whole.slice_symint(0, 0, runs)).clamp_min(1);
    return sum.index_add(0, of, given) / count.unsqueeze(1);
  }
  const auto x = given.contiguous();
  const auto ptr = ptr_given.contiguous();
  const auto runs = checked_runs(ptr, x.size(0));
  auto y = at::empty({ptr.size(0) - 1, x.size(1)}, x.options());
  mean_of_runs(floats(x), x.size(1), runs, out_floats(y));
  return y;
}

at::Tensor segment_meta(const at::Tensor& x, const at::Tensor& ptr) {
  check_segments(x, ptr);
  return at::empty_symint({ptr.sym_size(0) - 1, x.sym_size(1)}, x.options());
}

at::Tensor segment_backward_cpu(const at::Tensor& given, const at::Tensor& ptr_given,
                                std::int64_t rows) {
  check_segments(given, ptr_given);
  const auto grad = given.contiguous();
  const auto ptr = ptr_given.contiguous();
  TORCH_CHECK_VALUE(grad.size(0) == ptr.size(0) - 1, "segment_mean: a gradient of ", grad.size(0),
                    " runs, not ", ptr.size(0) - 1);
  auto grad_x = at::empty({rows, grad.size(1)}, grad.options());
  mean_of_runs_backward(floats(grad), grad.size(1), checked_runs(ptr, rows), out_floats(grad_x));
  return grad_x;
}

struct SegmentMean : torch::autograd::Function<SegmentMean> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& ptr) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({ptr});
    context->saved_data["rows"] = x.sym_size(0);
    return segment_op().call(x, ptr);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const BelowUnlessGraph below;
    static const auto op =
        operator_named<at::Tensor(const at::Tensor&, const at::Tensor&, c10::SymInt)>(
            "plimsoll::_segment_mean_backward");
    return {op.call(gradients[0], saved[0], context->saved_data["rows"].toSymInt()), at::Tensor{}};
  }
};

at::Tensor segment_autograd(const at::Tensor& x, const at::Tensor& ptr) {
  check_segments(x, ptr);
  return has_kernel(x) ? SegmentMean::apply(x, ptr) : segment_below(x, ptr);
}

// ---- lstm_cell ----

void check_lstm(const at::Tensor& gates, const Maybe& before) {
  check_dims(gates, 2, "lstm_cell: gates");
  TORCH_CHECK_VALUE(gates.sym_size(1) % 4 == 0, "lstm_cell: gates: ", gates.sym_size(1),
                    " columns, not four of each hidden one");
  if (before) {
    check_dims(*before, 2, "lstm_cell: before");
    check_alike(gates, "gates", *before, "lstm_cell: before");
    TORCH_CHECK_VALUE(
        before->sym_size(0) == gates.sym_size(0) && before->sym_size(1) * 4 == gates.sym_size(1),
        "lstm_cell: before: ", before->sym_sizes(), " does not fit gates, ", gates.sym_sizes());
  }
}

Two lstm_composed(const at::Tensor& gates, const Maybe& before) {
  const auto part = gates.chunk(4, 1);
  auto cell = part[0].sigmoid() * part[2].tanh();
  if (before) {
    cell = part[1].sigmoid() * *before + cell;
  }
  return {part[3].sigmoid() * cell.tanh(), cell};
}

// hidden, cell, and the gates after their functions.
Three lstm_cpu(const at::Tensor& gates, const Maybe& before_given) {
  check_lstm(gates, before_given);
  const auto before = before_given ? before_given->contiguous() : at::Tensor{};
  auto made = gates.contiguous().clone();
  auto cell = at::empty({gates.size(0), gates.size(1) / 4}, gates.options());
  auto hidden = at::empty_like(cell);
  lstm_cell(out_floats(made), {cell.size(0), cell.size(1)},
            before.defined() ? floats(before) : nullptr, out_floats(cell), out_floats(hidden));
  return {hidden, cell, made};
}

Three lstm_meta(const at::Tensor& gates, const Maybe& before) {
  check_lstm(gates, before);
  const auto state = [&] {
    return at::empty_symint({gates.sym_size(0), gates.sym_size(1) / 4}, gates.options());
  };
  return {state(), state(), empty_as(gates)};
}

// The gradient of `before` is empty where it was absent.
Two lstm_backward_cpu(const at::Tensor& by_hidden, const at::Tensor& by_cell,
                      const at::Tensor& made, const Maybe& before_given, const at::Tensor& cell) {
  check_lstm(made, cell);
  check_lstm(made, before_given);
  check_same(cell, "cell", by_hidden, "grad_hidden");
  check_same(cell, "cell", by_cell, "grad_cell");
  const auto grad_hidden = by_hidden.contiguous();
  const auto grad_cell = by_cell.contiguous();
  const auto before = before_given ? before_given->contiguous() : at::Tensor{};
  auto grad_gates = at::empty_like(made);
  auto grad_before = before_given ? at::empty_like(cell) : at::empty({0}, cell.options());
  LstmGradient in;
  in.shape = {cell.size(0), cell.size(1)};
  in.gates = floats(made);
  in.before = before.defined() ? floats(before) : nullptr;
  in.cell = floats(cell);
  in.grad_cell = floats(grad_cell);
  in.grad_hidden = floats(grad_hidden);
  in.grad_gates = out_floats(grad_gates);
  in.grad_before = before.defined() ? out_floats(grad_before) : nullptr;
  lstm_cell_backward(in);
  return {grad_gates, grad_before};
}

struct LstmCell : torch::autograd::Function<LstmCell> {
  static variable_list forward(AutogradContext* context, const at::Tensor& gates,
                               const Maybe& before) {
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op =
        operator_named<Three(const at::Tensor&, const Maybe&)>("plimsoll::_lstm_cell");
    const auto [hidden, cell, made] = op.call(gates, before);
    context->save_for_backward({made, or_undefined(before), cell});
    return {hidden, cell};
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const BelowUnlessGraph below;
    static const auto op =
        operator_named<Two(const at::Tensor&, const at::Tensor&, const at::Tensor&, const Maybe&,
                           const at::Tensor&)>("plimsoll::_lstm_cell_backward");
    const auto [gates, before] =
        op.call(gradients[0], gradients[1], saved[0], present(saved[1]), saved[2]);
    return {gates, saved[1].defined() ? before : at::Tensor{}};
  }
};

Two lstm_autograd(const at::Tensor& gates, const Maybe& before) {
  check_lstm(gates, before);
  if (!has_kernel(gates)) {
    return lstm_composed(gates, before);
  }
  const auto both = LstmCell::apply(gates, before);
  return {both[0], both[1]};
}

Two lstm_below(const at::Tensor& gates, const Maybe& before) {
  check_lstm(gates, before);
  if (!has_kernel(gates)) {
    return lstm_composed(gates, before);
  }
  const auto [hidden, cell, made] = lstm_cpu(gates, before);
  return {hidden, cell};
}

// ---- mix_layers ----

void check_mix(at::TensorList layers, const at::Tensor& scores) {
  TORCH_CHECK_VALUE(!layers.empty(), "mix_layers: layers: none");
  check_dims(layers[0], 2, "mix_layers: layers");
  for (const auto& one : layers) {
    check_same(layers[0], "the first of layers", one, "mix_layers: layers");
  }
  check_dims(scores, 2, "mix_layers: scores");
  check_alike(layers[0], "layers", scores, "mix_layers: scores");
  check_size(layers[0], 0, "layers", scores, 0, "mix_layers: scores");
  TORCH_CHECK_VALUE(scores.sym_size(1) == static_cast<std::int64_t>(layers.size()),
                    "mix_layers: scores: ", scores.sym_sizes(), " for ", layers.size(), " layers");
}

at::Tensor mix_composed(at::TensorList layers, const at::Tensor& scores) {
  const auto weights = at::softmax(scores, 1).unbind(1);
  at::Tensor y;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const auto part = weights[l].unsqueeze(1) * layers[l];
    y = y.defined() ? y + part : part;
  }
  return y;
}

std::vector<at::Tensor> dense_list(at::TensorList list) {
  std::vector<at::Tensor> made;
  for (const auto& one : list) {
    made.push_back(one.contiguous());
  }
  return made;
}

std::vector<const float*> pointers(const std::vector<at::Tensor>& list) {
  std::vector<const float*> all;
  for (const auto& one : list) {
    all.push_back(floats(one));
  }
  return all;
}

// The result and the weights.
Two mix_cpu(at::TensorList given, const at::Tensor& scores_given) {
  check_mix(given, scores_given);
  const auto layers = dense_list(given);
  const auto scores = scores_given.contiguous();
  auto weights = at::empty_like(scores);
  auto y = at::empty_like(layers[0]);
  mix_rows(pointers(layers), {y.size(0), y.size(1)}, floats(scores), out_floats(weights),
           out_floats(y));
  return {y, weights};
}

Two mix_meta(at::TensorList layers, const at::Tensor& scores) {
  check_mix(layers, scores);
  return {empty_as(layers[0]), empty_as(scores)};
}

// Those of layers, then that of scores.
std::vector<at::Tensor> mix_backward_cpu(const at::Tensor& grad_given, at::TensorList given,
                                         const at::Tensor& weights) {
  check_mix(given, weights);
  check_same(given[0], "layers", grad_given, "grad");
  const auto layers = dense_list(given);
  const auto grad = grad_given.contiguous();
  std::vector<at::Tensor> made;
  std::vector<float*> to;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    made.push_back(at::empty_like(grad));
    to.push_back(out_floats(made.back()));
  }
  made.push_back(at::empty_like(weights));
  mix_rows_backward(pointers(layers), {grad.size(0), grad.size(1)}, floats(weights), floats(grad),
                    to, out_floats(made.back()));
  return made;
}

std::vector<at::Tensor> mix_backward_meta(const at::Tensor& grad, at::TensorList layers,
                                          const at::Tensor& weights) {
  std::vector<at::Tensor> made;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    made.push_back(empty_as(grad));
  }
  made.push_back(empty_as(weights));
  return made;
}

// Inputs: the layers, then the scores.
struct MixLayers : torch::autograd::Function<MixLayers> {
  static at::Tensor forward(AutogradContext* context, at::TensorList inputs) {
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op =
        operator_named<Two(at::TensorList, const at::Tensor&)>("plimsoll::_mix_layers");
    const auto layers = inputs.slice(0, inputs.size() - 1);
    const auto [y, weights] = op.call(layers, inputs.back());
    variable_list saved = layers.vec();
    saved.push_back(weights);
    context->save_for_backward(saved);
    return y;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const BelowUnlessGraph below;
    static const auto op = operator_named<std::vector<at::Tensor>(
        const at::Tensor&, at::TensorList, const at::Tensor&)>("plimsoll::_mix_layers_backward");
    return op.call(gradients[0], at::TensorList(saved).slice(0, saved.size() - 1), saved.back());
  }
};

at::Tensor mix_autograd(at::TensorList layers, const at::Tensor& scores) {
  check_mix(layers, scores);
  if (!has_kernel(scores)) {
    return mix_composed(layers, scores);
  }
  variable_list inputs = layers.vec();
  inputs.push_back(scores);
  return MixLayers::apply(at::TensorList(inputs));
}

at::Tensor mix_below(at::TensorList layers, const at::Tensor& scores) {
  check_mix(layers, scores);
  return has_kernel(scores) ? std::get<0>(mix_cpu(layers, scores)) : mix_composed(layers, scores);
}

}  // namespace

at::Tensor segment_mean(const at::Tensor& x, const at::Tensor& ptr) {
  return segment_op().call(x, ptr);
}

LstmState lstm_cell(const at::Tensor& gates, const at::Tensor& before) {
  static const auto op =
      operator_named<Two(const at::Tensor&, const Maybe&)>("plimsoll::lstm_cell");
  const auto [hidden, cell] = op.call(gates, present(before));
  return {hidden, cell};
}

at::Tensor mix_layers(const std::vector<at::Tensor>& layers, const at::Tensor& scores) {
  static const auto op =
      operator_named<at::Tensor(at::TensorList, const at::Tensor&)>("plimsoll::mix_layers");
  return op.call(layers, scores);
}

}  // namespace plimsoll::kernels

TORCH_LIBRARY_FRAGMENT(plimsoll, m) {
  m.def("segment_mean(Tensor x, Tensor ptr) -> Tensor");
  m.def("_segment_mean_backward(Tensor grad, Tensor ptr, SymInt rows) -> Tensor");
  m.def("lstm_cell(Tensor gates, Tensor? before=None) -> (Tensor hidden, Tensor cell)");
  m.def("_lstm_cell(Tensor gates, Tensor? before) -> (Tensor, Tensor, Tensor)");
  m.def(
      "_lstm_cell_backward(Tensor grad_hidden, Tensor grad_cell, Tensor made, Tensor? before,"
      " Tensor cell) -> (Tensor, Tensor)");
  m.def("mix_layers(Tensor[] layers, Tensor scores) -> Tensor");
  m.def("_mix_layers(Tensor[] layers, Tensor scores) -> (Tensor, Tensor)");
  m.def("_mix_layers_backward(Tensor grad, Tensor[] layers, Tensor weights) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(plimsoll, Autograd, m) {
  using namespace plimsoll::kernels;
  m.impl("segment_mean", &segment_autograd);
  m.impl("lstm_cell", &lstm_autograd);
  m.impl("mix_layers", &mix_autograd);
  for (const char* name : {"_segment_mean_backward", "_lstm_cell", "_lstm_cell_backward",
                           "_mix_layers", "_mix_layers_backward"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}

TORCH_LIBRARY_IMPL(plimsoll, CompositeExplicitAutograd, m) {
  using namespace plimsoll::kernels;
  m.impl("segment_mean", &segment_below);
  m.impl("lstm_cell", &lstm_below);
  m.impl("mix_layers", &mix_below);
}

TORCH_LIBRARY_IMPL(plimsoll, CPU, m) {
  using namespace plimsoll::kernels;
  m.impl("_segment_mean_backward", &segment_backward_cpu);
  m.impl("_lstm_cell", &lstm_cpu);
  m.impl("_lstm_cell_backward", &lstm_backward_cpu);
  m.impl("_mix_layers", &mix_cpu);
  m.impl("_mix_layers_backward", &mix_backward_cpu);
}

TORCH_LIBRARY_IMPL(plimsoll, Meta, m) {
  using namespace plimsoll::kernels;
  m.impl("segment_mean", &segment_meta);
  m.impl("_segment_mean_backward",
         [](const at::Tensor& grad, const at::Tensor&, c10::SymInt rows) -> at::Tensor {
           return at::empty_symint({std::move(rows), grad.sym_size(1)}, grad.options());
         });
  m.impl("_lstm_cell", &lstm_meta);
  m.impl("_lstm_cell_backward",
         [](const at::Tensor&, const at::Tensor&, const at::Tensor& made, const Maybe& before,
            const at::Tensor& cell) -> Two {
           return {empty_as(made), before ? empty_as(cell) : at::empty({0}, cell.options())};
         });
  m.impl("_mix_layers", &mix_meta);
  m.impl("_mix_layers_backward", &mix_backward_meta);
}
