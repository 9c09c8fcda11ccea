// SPDX-License-Identifier: Apache-2.0
#include "kernels/contrast_composed.h"

#include <ATen/ATen.h>

#include <limits>

#include "kernels/contrast_loops.h"

namespace plimsoll::kernels::composed {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor lengths(const at::Tensor& x) {
  return at::linalg_vector_norm(x, 2, at::IntArrayRef{1}, /*keepdim=*/true);
}

at::Tensor unit(const at::Tensor& x, const at::Tensor& length) {
  return x / length.clamp_min(kNormFloor);
}

// True on the diagonal of a square matrix [B, B].
at::Tensor own(const at::Tensor& matrix) {
  const auto place =
      at::ones_like(matrix.select(1, 0), matrix.options().dtype(at::kLong)).cumsum(0);
  return place.unsqueeze(1) == place.unsqueeze(0);
}

// Σ_l f(x_l, x_lᵀ) over the columns of x in order, [B, B].
template <class F>
at::Tensor over_columns(const at::Tensor& x, const F& f) {
  at::Tensor sum;
  for (const auto& column : x.unbind(1)) {
    const auto term = f(column.unsqueeze(1), column.unsqueeze(0));
    sum = sum.defined() ? sum + term : term;
  }
  return sum;
}

}  // namespace

at::Tensor normalize_rows(const at::Tensor& x) {
  return unit(x, lengths(x));
}

Pair polar_coordinates(const at::Tensor& x) {
  const auto radius = lengths(x).squeeze(1);
  const auto columns = x.unbind(1);
  // At the origin there is no angle: 0, without a gradient.
  const auto first = at::where(radius.detach() == 0, at::ones_like(columns[0]), columns[0]);
  if (columns.size() == 1) {
    return {radius, at::atan2(at::zeros_like(first), first)};
  }
  if (columns.size() == 2) {
    return {radius, at::atan2(columns[1], first)};
  }
  const auto rest = lengths(x.narrow(1, 1, static_cast<std::int64_t>(columns.size()) - 1));
  return {radius, at::atan2(at::copysign(rest.squeeze(1), columns[1].detach()), first)};
}

Pair rotate_toward(const at::Tensor& x, const at::Tensor& direction, const at::Tensor& angle,
                   const at::Tensor& scale) {
  const auto length = lengths(x);
  const auto straight = unit(x, length);
  const auto aside = unit(direction, lengths(direction));
  const auto turned = angle.cos().unsqueeze(1) * straight + angle.sin().unsqueeze(1) * aside;
  const auto stretched = scale.unsqueeze(1) * length * unit(turned, lengths(turned));
  return {unit(stretched, lengths(stretched)), straight};
}

at::Tensor symmetric_info_nce(const at::Tensor& a, const at::Tensor& b, const at::Tensor& groups,
                              double temperature) {
  const auto s = at::matmul(a, b.t()) / temperature;
  const auto same = groups.unsqueeze(0) == groups.unsqueeze(1);
  const auto compared = s.masked_fill(same.logical_and(own(s).logical_not()), -kInfinity);
  const auto found = at::log_softmax(compared, 1) + at::log_softmax(compared, 0);
  return found.diagonal().mean() * -0.5;
}

Triple nearest_neighbors(const at::Tensor& given) {
  const auto x = given.detach();
  const auto distance =
      over_columns(x, [](const auto& p, const auto& q) { return (p - q).square(); });
  const auto cosine =
      over_columns(normalize_rows(x), [](const auto& p, const auto& q) { return p * q; });
  const auto self = own(distance);
  // Three that are infinitely far, so that there are as many of few rows too.
  const auto none = at::full_like(distance.narrow(1, 0, 1), kInfinity).expand({-1, kNeighbors});
  const auto all = at::cat({distance.masked_fill(self, kInfinity), none}, 1);
  const auto [far, order] = all.sort(/*stable=*/true, 1, /*descending=*/false);
  const auto nearest = order.narrow(1, 0, kNeighbors);
  const auto others = cosine.masked_fill(self, -kInfinity);
  const auto best = others.argmax(1);
  return {nearest.masked_fill(far.narrow(1, 0, kNeighbors) == kInfinity, -1), best,
          others.gather(1, best.unsqueeze(1)).squeeze(1)};
}

Triple displacement_cosines(const at::Tensor& a, const at::Tensor& b,
                            const std::optional<at::Tensor>& pairs0,
                            const std::optional<at::Tensor>& pairs1) {
  const auto moved = a - b;
  const auto length = lengths(moved).squeeze(1);
  const auto cosine = [&](const std::optional<at::Tensor>& pairs) {
    if (!pairs) {
      return at::zeros_like(length);
    }
    const auto both = length * length.index_select(0, *pairs);
    return (moved * moved.index_select(0, *pairs)).sum(1) / both.clamp_min(kNormFloor);
  };
  return {length, cosine(pairs0), cosine(pairs1)};
}

}  // namespace plimsoll::kernels::composed
