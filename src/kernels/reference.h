// SPDX-License-Identifier: Apache-2.0
//
// The formulas of contrast.h as plain tensor operators, in any floating type: what kernels are
// compared with.
//
// Threads: as torch operators.   Memory: whatever the operators take; for tests only.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <numbers>
#include <utility>
#include <vector>

namespace plimsoll::kernels::reference {

inline at::Tensor unit(const at::Tensor& x) {
  return x / x.square().sum(-1, true).sqrt().clamp_min(1e-8);
}

inline at::Tensor combine(const at::Tensor& t, const at::Tensor& d, const at::Tensor& theta,
                          const at::Tensor& s) {
  const auto column = [](const at::Tensor& x) { return x.unsqueeze(1); };
  const auto u = unit(column(theta.cos()) * unit(t) + column(theta.sin()) * unit(d));
  return unit(column(s) * t.square().sum(1, true).sqrt() * u);
}

/// atan2(q, c₀) with q as the recipe defines it; no care for the origin.
inline at::Tensor angle(const at::Tensor& c) {
  const auto rest = c.narrow(1, 1, c.size(1) - 1);
  const auto q = c.size(1) == 2
                     ? c.select(1, 1)
                     : at::where(c.select(1, 1) < 0, -1.0, 1.0) * rest.square().sum(1).sqrt();
  return at::atan2(q, c.select(1, 0));
}

inline at::Tensor nce(const at::Tensor& out, const at::Tensor& image, const at::Tensor& groups,
                      double temperature) {
  auto s = at::matmul(out, image.t()) / temperature;
  const auto same = groups.unsqueeze(0) == groups.unsqueeze(1);
  const auto self = at::eye(s.size(0), at::kBool);
  s = s.masked_fill(same.logical_and(self.logical_not()), -1e30);
  const auto rows = -s.log_softmax(1).diagonal().mean();
  const auto columns = -s.log_softmax(0).diagonal().mean();
  return (rows + columns) * 0.5;
}

inline at::Tensor cosine(const at::Tensor& x, const at::Tensor& y) {
  const auto lengths = x.square().sum(1).sqrt() * y.square().sum(1).sqrt();
  return (x * y).sum(1) / lengths.clamp_min(1e-8);
}

struct Found {
  std::vector<std::vector<std::int64_t>> nearest;
  std::vector<std::int64_t> best_angle;
};

/// Every pair compared in the type given, ties by lower index.
template <class T>
Found neighbours(const at::Tensor& c) {
  const auto x = c.detach().to(c10::CppTypeToScalarType<T>::value).contiguous();
  const auto course = unit(x).contiguous();
  const std::int64_t rows = x.size(0);
  const std::int64_t width = x.size(1);
  Found found;
  for (std::int64_t i = 0; i < rows; ++i) {
    std::vector<std::pair<T, std::int64_t>> near;
    std::vector<std::pair<T, std::int64_t>> angle;
    for (std::int64_t j = 0; j < rows; ++j) {
      T square = 0;
      T dot = 0;
      for (std::int64_t l = 0; l < width; ++l) {
        const T by =
            x.template data_ptr<T>()[i * width + l] - x.template data_ptr<T>()[j * width + l];
        square += by * by;
        dot += course.template data_ptr<T>()[i * width + l] *
               course.template data_ptr<T>()[j * width + l];
      }
      if (i != j) {
        near.emplace_back(square, j);
        angle.emplace_back(-dot, j);
      }
    }
    std::sort(near.begin(), near.end());
    std::sort(angle.begin(), angle.end());
    found.nearest.emplace_back();
    for (std::size_t k = 0; k < std::min<std::size_t>(3, near.size()); ++k) {
      found.nearest.back().push_back(near[k].second);
    }
    found.best_angle.push_back(angle.front().second);
  }
  return found;
}

}  // namespace plimsoll::kernels::reference
