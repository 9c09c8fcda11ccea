// SPDX-License-Identifier: Apache-2.0
#include "kernels/graph_attention.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <array>
#include <limits>
#include <tuple>
#include <utility>

#include "kernels/attention_loops.h"
#include "kernels/edge_tensors.h"
#include "kernels/linear_rows.h"
#include "kernels/operators.h"
#include "kernels/row_loops.h"

namespace plimsoll::kernels {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Attended = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using AttentionSlopes = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

constexpr double kLeak = 0.2;

// ---- dropout_factors ----

at::Tensor factors_of(at::IntArrayRef sizes, const at::TensorOptions& options, double rate,
                      std::int64_t seed, std::int64_t place) {
  auto keep = at::empty(sizes, options.dtype(at::kFloat));
  const Dropout dropout{static_cast<std::uint64_t>(seed), static_cast<std::uint64_t>(place), rate};
  dropout_factors(dropout, keep.numel(), out_floats(keep));
  return keep;
}

at::Tensor factors_cpu(const at::Tensor& like, double rate, std::int64_t seed, std::int64_t place) {
  check_floating(like, "dropout_factors: like");
  check_dropout(rate);
  return factors_of(like.sizes(), like.options(), rate, seed, place).to(like.scalar_type());
}

at::Tensor factors_meta(const at::Tensor& like, double rate, c10::SymInt, c10::SymInt) {
  check_floating(like, "dropout_factors: like");
  check_dropout(rate);
  return at::empty_symint(like.sym_sizes(), like.options());
}

using FactorsOp = at::Tensor(const at::Tensor&, double, c10::SymInt, c10::SymInt);
const auto& factors_op() {
  static const auto op = operator_named<FactorsOp>("plimsoll::dropout_factors");
  return op;
}

// Numbers of the CPU, moved: the same mask on any device.
at::Tensor factors_composed(const at::Tensor& like, double rate, c10::SymInt seed,
                            c10::SymInt place) {
  const auto there = at::empty_symint(like.sym_sizes(), like.options().device(at::kCPU));
  return factors_op().call(there, rate, std::move(seed), std::move(place)).to(like.device());
}

at::Tensor factors_autograd(const at::Tensor& like, double rate, c10::SymInt seed,
                            c10::SymInt place) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return factors_op().call(like.detach(), rate, std::move(seed), std::move(place));
}

// ---- gat_attention: from h on; the product before it is linear_rows()'s ----

// What is no tensor of floats, as one value in autograd's eyes.
struct How {
  EdgeTensors edges;  // As sort_edges() has them.
  bool concat{true};
  double dropout{0};
  c10::SymInt seed;
  c10::SymInt place;
};

void check_attention(const at::Tensor& h, const at::Tensor& att_source,
                     const at::Tensor& att_target, const at::Tensor& bias, const How& how) {
  check_dims(h, 2, "gat_conv: h");
  check_dims(att_source, 2, "gat_conv: att_source");
  check_same(att_source, "att_source", att_target, "gat_conv: att_target");
  check_alike(h, "h", att_source, "gat_conv: att_source");
  check_alike(h, "h", bias, "gat_conv: bias");
  const auto heads = att_source.sym_size(0);
  const auto out = att_source.sym_size(1);
  TORCH_CHECK_VALUE(heads >= 1 && heads <= kHeadsMax, "gat_conv: ", heads, " heads, not 1 to ",
                    kHeadsMax);
  TORCH_CHECK_VALUE(h.sym_size(1) == heads * out, "gat_conv: rows of ", h.sym_size(1),
                    " do not fit att_source, ", att_source.sym_sizes());
  TORCH_CHECK_VALUE(bias.dim() == 1 && bias.sym_size(0) == (how.concat ? heads * out : out),
                    "gat_conv: bias: ", bias.sym_sizes(), " does not fit att_source, ",
                    att_source.sym_sizes(), how.concat ? "" : ", of heads whose mean is taken");
  check_dropout(how.dropout);
  check_edge_tensors(how.edges, h);
}

at::Tensor keep_factors(const How& how, const at::Tensor& h, std::int64_t heads) {
  if (how.dropout <= 0.0) {
    return {};
  }
  return factors_of({how.edges[kInSource].size(0), heads}, h.options(), how.dropout,
                    how.seed.guard_int(__FILE__, __LINE__),
                    how.place.guard_int(__FILE__, __LINE__));
}

Attention attention(const How& how, const at::Tensor& h, const at::Tensor& att_source,
                    const at::Tensor& scores, const at::Tensor& keep) {
  const float* score = floats(scores);
  const std::int64_t heads = att_source.size(0);
  return {checked_edges(how.edges),
          heads,
          att_source.size(1),
          how.concat,
          floats(h),
          score,
          score + h.size(0) * heads,
          keep.defined() ? floats(keep) : nullptr};
}

Attended attend_cpu(const at::Tensor& h_given, const at::Tensor& source_given,
                    const at::Tensor& target_given, const at::Tensor& bias_given, const How& how) {
  check_attention(h_given, source_given, target_given, bias_given, how);
  const auto h = h_given.contiguous();
  const auto att_source = source_given.contiguous();
  const auto att_target = target_given.contiguous();
  const auto bias = bias_given.contiguous();
  const std::int64_t nodes = h.size(0);
  const std::int64_t heads = att_source.size(0);
  auto scores = at::empty({2, nodes, heads}, h.options());
  const auto keep = keep_factors(how, h, heads);
  const Attention in = attention(how, h, att_source, scores, keep);
  float* score = out_floats(scores);
  node_scores(in, floats(att_source), floats(att_target), score, score + nodes * heads);
  auto weights = at::empty({in.edges.count, heads}, h.options());
  const std::int64_t used = in.edges.in_ptr[nodes];
  weights.narrow(0, used, in.edges.count - used).zero_();  // What is there is the same each time.
  auto result = at::empty({nodes, in.width()}, h.options());
  attend(in, floats(bias), out_floats(weights), out_floats(result));
  return {result, scores, weights};
}

AttentionSlopes attend_backward_cpu(const at::Tensor& grad_given, const at::Tensor& h_given,
                                    const at::Tensor& source_given, const at::Tensor& target_given,
                                    const at::Tensor& scores, const at::Tensor& weights,
                                    const How& how) {
  const auto h = h_given.contiguous();
  const auto att_source = source_given.contiguous();
  const auto att_target = target_given.contiguous();
  const auto grad = grad_given.contiguous();
  const std::int64_t nodes = h.size(0);
  const std::int64_t heads = att_source.size(0);
  const auto keep = keep_factors(how, h, heads);
  const auto empty = [&](at::IntArrayRef sizes) { return at::empty(sizes, h.options()); };
  const std::int64_t width = how.concat ? h.size(1) : att_source.size(1);
  auto grad_bias = empty({width});
  check_attention(h, att_source, att_target, grad_bias, how);
  check_size(h, 0, "h", grad, 0, "grad");
  check_size(grad_bias, 0, "bias", grad, 1, "grad");
  TORCH_CHECK_VALUE(scores.numel() == 2 * nodes * heads && scores.is_contiguous() &&
                        weights.numel() == how.edges[kInSource].size(0) * heads &&
                        weights.is_contiguous(),
                    "gat_conv: scores and weights are not the forward's");
  const Attention in = attention(how, h, att_source, scores, keep);
  auto edge_scratch = empty({2, in.edges.count, heads});
  auto node_scratch = empty({2, nodes, heads});
  auto block_scratch = empty({node_blocks(nodes), 2 * in.row() + in.width()});
  auto grad_h = at::empty_like(h);
  auto grad_source = at::empty_like(att_source);
  auto grad_target = at::empty_like(att_target);
  attend_backward(in, {.weights = floats(weights),
                       .grad = floats(grad),
                       .att_source = floats(att_source),
                       .att_target = floats(att_target),
                       .edge_scratch = out_floats(edge_scratch),
                       .node_scratch = out_floats(node_scratch),
                       .block_scratch = out_floats(block_scratch),
                       .grad_h = out_floats(grad_h),
                       .grad_att_source = out_floats(grad_source),
                       .grad_att_target = out_floats(grad_target),
                       .grad_bias = out_floats(grad_bias)});
  return {grad_h, grad_source, grad_target, grad_bias};
}

// Places behind the last edge belong to a node behind the last one, which is cut off.
at::Tensor attend_composed(const at::Tensor& h_flat, const at::Tensor& att_source,
                           const at::Tensor& att_target, const at::Tensor& bias, const How& how) {
  check_attention(h_flat, att_source, att_target, bias, how);
  const auto nodes = h_flat.sym_size(0);
  const auto heads = att_source.sym_size(0);
  const auto h = h_flat.view_symint({nodes, heads, att_source.sym_size(1)});
  const auto source = how.edges[kInSource].to(at::kLong);
  const auto target = nodes_of(how.edges[kInPtr], source);
  const auto behind = at::zeros_symint({1, heads}, h.options());
  const auto of_source = (h * att_source).sum(2);
  const auto of_target = at::cat({(h * att_target).sum(2), behind});
  const auto score =
      at::leaky_relu(of_source.index_select(0, source) + of_target.index_select(0, target), kLeak);
  const auto lanes = target.unsqueeze(1).expand_as(score);
  const auto top = at::zeros_symint({nodes + 1, heads}, h.options())
                       .scatter_reduce(0, lanes, score.detach(), "amax", /*include_self=*/false);
  const auto e = (score - top.index_select(0, target)).exp();
  const auto sum = at::zeros_symint({nodes + 1, heads}, h.options()).index_add(0, target, e);
  auto weight = e / sum.index_select(0, target);
  if (how.dropout > 0.0) {
    weight = weight * factors_op().call(weight, how.dropout, how.seed, how.place);
  }
  const auto sent = weight.unsqueeze(2) * h.index_select(0, source);
  const auto all = at::zeros_symint({nodes + 1, heads, att_source.sym_size(1)}, h.options())
                       .index_add(0, target, sent)
                       .slice_symint(0, 0, nodes);
  return (how.concat ? all.flatten(1) : all.mean(1)) + bias;
}

using AttentionOp = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, at::TensorList, bool, double, c10::SymInt,
                               c10::SymInt);
using AttentionPart = Attended(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, at::TensorList, bool, double, c10::SymInt,
                               c10::SymInt);
using AttentionBack = AttentionSlopes(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                      const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                      at::TensorList, bool, double, c10::SymInt, c10::SymInt);

struct GatAttention : torch::autograd::Function<GatAttention> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& h,
                            const at::Tensor& att_source, const at::Tensor& att_target,
                            const at::Tensor& bias, const How& how) {
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = operator_named<AttentionPart>("plimsoll::_gat_attention");
    const auto [result, scores, weights] = op.call(h, att_source, att_target, bias, how.edges,
                                                   how.concat, how.dropout, how.seed, how.place);
    variable_list saved{h, att_source, att_target, scores, weights};
    saved.insert(saved.end(), how.edges.begin(), how.edges.end());
    context->save_for_backward(saved);
    context->saved_data["concat"] = how.concat;
    context->saved_data["dropout"] = how.dropout;
    context->saved_data["seed"] = how.seed;
    context->saved_data["place"] = how.place;
    return result;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto s = context->get_saved_variables();
    const BelowUnlessGraph below;
    static const auto op = operator_named<AttentionBack>("plimsoll::_gat_attention_backward");
    const auto [h, source, target, bias] =
        op.call(gradients[0], s[0], s[1], s[2], s[3], s[4], at::TensorList(s).slice(5),
                context->saved_data["concat"].toBool(), context->saved_data["dropout"].toDouble(),
                context->saved_data["seed"].toSymInt(), context->saved_data["place"].toSymInt());
    return {h, source, target, bias, at::Tensor{}};
  }
};

at::Tensor attention_autograd(const at::Tensor& h, const at::Tensor& att_source,
                              const at::Tensor& att_target, const at::Tensor& bias,
                              at::TensorList edges, bool concat, double dropout, c10::SymInt seed,
                              c10::SymInt place) {
  const How how{edges.vec(), concat, dropout, std::move(seed), std::move(place)};
  check_attention(h, att_source, att_target, bias, how);
  return has_kernel(h) ? GatAttention::apply(h, att_source, att_target, bias, how)
                       : attend_composed(h, att_source, att_target, bias, how);
}

at::Tensor attention_below(const at::Tensor& h, const at::Tensor& att_source,
                           const at::Tensor& att_target, const at::Tensor& bias,
                           at::TensorList edges, bool concat, double dropout, c10::SymInt seed,
                           c10::SymInt place) {
  const How how{edges.vec(), concat, dropout, std::move(seed), std::move(place)};
  check_attention(h, att_source, att_target, bias, how);
  return has_kernel(h) ? std::get<0>(attend_cpu(h, att_source, att_target, bias, how))
                       : attend_composed(h, att_source, att_target, bias, how);
}

Attended attention_part_cpu(const at::Tensor& h, const at::Tensor& att_source,
                            const at::Tensor& att_target, const at::Tensor& bias,
                            at::TensorList edges, bool concat, double dropout, c10::SymInt seed,
                            c10::SymInt place) {
  return attend_cpu(h, att_source, att_target, bias,
                    {edges.vec(), concat, dropout, std::move(seed), std::move(place)});
}

Attended attention_part_meta(const at::Tensor& h, const at::Tensor& att_source,
                             const at::Tensor& att_target, const at::Tensor& bias,
                             at::TensorList edges, bool concat, double dropout, c10::SymInt seed,
                             c10::SymInt place) {
  check_attention(h, att_source, att_target, bias,
                  {edges.vec(), concat, dropout, std::move(seed), std::move(place)});
  const auto heads = att_source.sym_size(0);
  return {at::empty_symint({h.sym_size(0), bias.sym_size(0)}, h.options()),
          at::empty_symint({2, h.sym_size(0), heads}, h.options()),
          at::empty_symint({edges[kInSource].sym_size(0), heads}, h.options())};
}

AttentionSlopes attention_back_cpu(const at::Tensor& grad, const at::Tensor& h,
                                   const at::Tensor& att_source, const at::Tensor& att_target,
                                   const at::Tensor& scores, const at::Tensor& weights,
                                   at::TensorList edges, bool concat, double dropout,
                                   c10::SymInt seed, c10::SymInt place) {
  return attend_backward_cpu(grad, h, att_source, att_target, scores, weights,
                             {edges.vec(), concat, dropout, std::move(seed), std::move(place)});
}

AttentionSlopes attention_back_meta(const at::Tensor& grad, const at::Tensor& h,
                                    const at::Tensor& att_source, const at::Tensor& att_target,
                                    const at::Tensor&, const at::Tensor&, at::TensorList, bool,
                                    double, c10::SymInt, c10::SymInt) {
  return {at::empty_symint(h.sym_sizes(), h.options()),
          at::empty_symint(att_source.sym_sizes(), h.options()),
          at::empty_symint(att_target.sym_sizes(), h.options()),
          at::empty_symint({grad.sym_size(1)}, h.options())};
}

at::Tensor gat_conv_composed(const at::Tensor& x, const at::Tensor& weight,
                             const at::Tensor& att_source, const at::Tensor& att_target,
                             const at::Tensor& bias, at::TensorList edges, bool concat,
                             double dropout, c10::SymInt seed, c10::SymInt place, bool bf16) {
  static const auto op = operator_named<AttentionOp>("plimsoll::gat_attention");
  return op.call(linear_rows(x, weight, {}, bf16), att_source, att_target, bias, edges, concat,
                 dropout, std::move(seed), std::move(place));
}

}  // namespace

at::Tensor gat_conv(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& att_source,
                    const at::Tensor& att_target, const at::Tensor& bias, const EdgeTensors& edges,
                    const GatOptions& options) {
  using Op =
      at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                 const at::Tensor&, at::TensorList, bool, double, c10::SymInt, c10::SymInt, bool);
  static const auto op = operator_named<Op>("plimsoll::gat_conv");
  return op.call(x, weight, att_source, att_target, bias, edges, options.concat, options.dropout,
                 options.seed, options.place, options.bf16);
}

at::Tensor dropout_factors(const at::Tensor& like, double rate, std::int64_t seed,
                           std::int64_t place) {
  return factors_op().call(like, rate, seed, place);
}

}  // namespace plimsoll::kernels

TORCH_LIBRARY_FRAGMENT(plimsoll, m) {
  m.def("dropout_factors(Tensor like, float rate, SymInt seed, SymInt place) -> Tensor");
  m.def(
      "gat_conv(Tensor x, Tensor weight, Tensor att_source, Tensor att_target, Tensor bias,"
      " Tensor[] edges, bool concat=True, float dropout=0.0, SymInt seed=0, SymInt place=0, bool "
      "bf16=False)"
      " -> Tensor");
  m.def(
      "gat_attention(Tensor h, Tensor att_source, Tensor att_target, Tensor bias,"
      " Tensor[] edges, bool concat, float dropout, SymInt seed, SymInt place) -> Tensor");
  m.def(
      "_gat_attention(Tensor h, Tensor att_source, Tensor att_target, Tensor bias,"
      " Tensor[] edges, bool concat, float dropout, SymInt seed, SymInt place) -> (Tensor, Tensor, "
      "Tensor)");
  m.def(
      "_gat_attention_backward(Tensor grad, Tensor h, Tensor att_source, Tensor att_target,"
      " Tensor scores, Tensor weights, Tensor[] edges, bool concat, float dropout, SymInt seed, "
      "SymInt place)"
      " -> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(plimsoll, CompositeImplicitAutograd, m) {
  m.impl("gat_conv", &plimsoll::kernels::gat_conv_composed);
}

TORCH_LIBRARY_IMPL(plimsoll, Autograd, m) {
  using namespace plimsoll::kernels;
  m.impl("dropout_factors", &factors_autograd);
  m.impl("gat_attention", &attention_autograd);
  m.impl("_gat_attention", torch::autograd::autogradNotImplementedFallback());
  m.impl("_gat_attention_backward", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(plimsoll, CompositeExplicitAutograd, m) {
  using namespace plimsoll::kernels;
  m.impl("dropout_factors", &factors_composed);
  m.impl("gat_attention", &attention_below);
}

TORCH_LIBRARY_IMPL(plimsoll, CPU, m) {
  using namespace plimsoll::kernels;
  m.impl("dropout_factors", &factors_cpu);
  m.impl("_gat_attention", &attention_part_cpu);
  m.impl("_gat_attention_backward", &attention_back_cpu);
}

TORCH_LIBRARY_IMPL(plimsoll, Meta, m) {
  using namespace plimsoll::kernels;
  m.impl("dropout_factors", &factors_meta);
  m.impl("_gat_attention", &attention_part_meta);
  m.impl("_gat_attention_backward", &attention_back_meta);
}
