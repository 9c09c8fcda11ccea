// SPDX-License-Identifier: Apache-2.0
//
// Attention: the CPU's fused kernel, where the CPU would choose it. See kernels.h.
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <torch/library.h>

#include "tests/device/kernels.h"

namespace sim {
namespace {

using at::Tensor;
using Mask = std::optional<Tensor>;
using Scale = std::optional<double>;

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>
attention(const Tensor& q, const Tensor& k, const Tensor& v, const Mask& mask, double dropout,
          bool causal, bool /*debug*/, Scale scale) {
  auto [out, lse] =
      at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, mask, scale);
  const auto none = at::empty({0}, q.options());
  return {out, lse, none, none, q.sym_size(2), k.sym_size(2), none, none, none};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
    std::array<bool, 4> /*wanted*/, const Tensor& out, const Tensor& lse, const Tensor& /*q ends*/,
    const Tensor& /*k ends*/, c10::SymInt /*q max*/, c10::SymInt /*k max*/, double dropout,
    bool causal, const Tensor& /*seed*/, const Tensor& /*offset*/, Scale scale) {
  auto [gq, gk, gv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, q, k, v, out, lse, dropout, causal, mask.defined() ? Mask(mask) : std::nullopt, scale);
  return {gq, gk, gv, Tensor()};
}

std::int64_t choice(const Tensor& q, const Tensor& k, const Tensor& v, const Mask& mask,
                    double dropout, bool causal, Scale scale, bool gqa) {
  const bool fused = !(mask && mask->requires_grad()) &&
                     at::_fused_sdp_choice(q, k, v, mask, dropout, causal, scale, gqa) ==
                         std::int64_t(at::SDPBackend::flash_attention);
  return std::int64_t(fused ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
}

}  // namespace

std::int64_t choice_of_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                 const Mask& mask, double dropout, bool causal, Scale scale,
                                 bool gqa) {
  return choice(q, k, v, mask, dropout, causal, scale, gqa);
}

}  // namespace sim
namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choice_of_attention)
}
