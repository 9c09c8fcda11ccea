// SPDX-License-Identifier: Apache-2.0
//
// Building and applying the model of `cosir`.
//
// Threads: as torch operators.   Memory: see cosir_model.h.
#include "recipes/cosir/model.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <cmath>
#include <numbers>

#include "base/check.h"
#include "base/philox.h"

namespace plimsoll::cosir {
namespace {

constexpr std::int64_t kHidden = 64;
constexpr std::int64_t kDefaultDim = 256;

Branch make_branch(std::uint64_t seed, std::uint64_t& stream) {
  Branch b;
  random_linear(b.in_weight, b.in_bias, kHidden, 1, seed, stream);
  b.norm_weight = at::ones({kHidden}, at::kFloat).set_requires_grad(true);
  b.norm_bias = at::zeros({kHidden}, at::kFloat).set_requires_grad(true);
  random_linear(b.out_weight, b.out_bias, 1, kHidden, seed, stream);
  random_linear(b.skip_weight, b.skip_bias, 1, 1, seed, stream);
  return b;
}

// Orthonormal columns: modified Gram–Schmidt in double on normal columns, each taken twice.
at::Tensor orthonormal(std::int64_t dim, std::int64_t columns, std::uint64_t seed,
                       std::uint64_t stream) {
  auto normals = random_normal({columns, dim}, 1.0, seed, stream).to(at::kDouble);
  auto* x = normals.data_ptr<double>();
  for (std::int64_t k = 0; k < columns; ++k) {
    double* column = x + k * dim;
    for (int pass = 0; pass < 2; ++pass) {
      for (std::int64_t j = 0; j < k; ++j) {
        double along = 0.0;
        for (std::int64_t d = 0; d < dim; ++d) {
          along += column[d] * x[j * dim + d];
        }
        for (std::int64_t d = 0; d < dim; ++d) {
          column[d] -= along * x[j * dim + d];
        }
      }
    }
    double square = 0.0;
    for (std::int64_t d = 0; d < dim; ++d) {
      square += column[d] * column[d];
    }
    for (std::int64_t d = 0; d < dim; ++d) {
      column[d] /= std::sqrt(square);
    }
  }
  return normals.t().to(at::kFloat).contiguous();
}

at::Tensor apply_branch(const Branch& b, const at::Tensor& x) {
  const auto column = x.unsqueeze(1);
  auto hidden = at::relu(at::linear(column, b.in_weight, b.in_bias));
  hidden = at::layer_norm(hidden, {kHidden}, b.norm_weight, b.norm_bias);
  const auto y =
      at::linear(hidden, b.out_weight, b.out_bias) + at::linear(column, b.skip_weight, b.skip_bias);
  return y.squeeze(1);
}

at::Tensor scale_at(const Branch& branch, const at::Tensor& radius) {
  return apply_branch(branch, radius) * 0.4 + 0.8;
}

// The last norm cancels the scale up to its sign, and with a negative one every text would start
// turned around: such a start is mirrored.
void set_upright(Model& m) {
  const c10::AutoGradMode off{false};
  if (scale_at(m.radius, at::ones({1}, at::kFloat)).item<float>() <= 0.0F) {
    for (const auto& x :
         {m.radius.out_weight, m.radius.out_bias, m.radius.skip_weight, m.radius.skip_bias}) {
      x.neg_();
    }
  }
}

void add_branch(std::vector<NamedTensor>& list, const std::string& name, const Branch& b) {
  list.push_back({name + ".in.weight", b.in_weight});
  list.push_back({name + ".in.bias", b.in_bias});
  list.push_back({name + ".norm.weight", b.norm_weight});
  list.push_back({name + ".norm.bias", b.norm_bias});
  list.push_back({name + ".out.weight", b.out_weight});
  list.push_back({name + ".out.bias", b.out_bias});
  list.push_back({name + ".skip.weight", b.skip_weight});
  list.push_back({name + ".skip.bias", b.skip_bias});
}

}  // namespace

std::uint64_t seed_for(std::uint64_t seed, Purpose purpose) noexcept {
  return mix64(seed ^ mix64(static_cast<std::uint64_t>(purpose)));
}

Result<ModelShape> resolve_shape(const CosirConfig& config, std::int64_t image_dim,
                                 std::int64_t text_dim) {
  ModelShape shape{image_dim, text_dim, config.dim, config.label_dim, false};
  if (shape.dim == 0) {
    shape.dim = image_dim == text_dim ? image_dim : kDefaultDim;
  }
  const bool aligned = image_dim == shape.dim && text_dim == shape.dim;
  shape.projections = config.projections == "auto" ? !aligned : config.projections == "true";
  if (!shape.projections && !aligned) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("projections = false needs image, text and dim of one width, but they "
                            "are {}, {} and {}",
                            image_dim, text_dim, shape.dim),
                "set projections = \"auto\"");
  }
  if (shape.label_dim < 2 || shape.label_dim > shape.dim) {
    return fail(
        ErrorCode::kInvalidArgument,
        fmt::format("label_dim = {} must lie between 2 and dim = {}", shape.label_dim, shape.dim),
        "change label_dim");
  }
  return shape;
}

Model make_model(const ModelShape& shape, std::uint64_t run_seed) {
  const std::uint64_t seed = seed_for(run_seed, Purpose::kModel);
  std::uint64_t stream = 0;
  Model m;
  m.shape = shape;
  m.direction_weight = orthonormal(shape.dim, shape.label_dim, seed, stream++);
  m.direction_bias =
      random_uniform({shape.dim}, 1.0 / std::sqrt(static_cast<double>(shape.dim)), seed, stream++);
  m.radius = make_branch(seed, stream);
  m.angle = make_branch(seed, stream);
  set_upright(m);
  if (shape.projections) {
    random_linear(m.image_weight, m.image_bias, shape.dim, shape.image_dim, seed, stream);
    random_linear(m.text_weight, m.text_bias, shape.dim, shape.text_dim, seed, stream);
  }
  return m;
}

std::vector<NamedTensor> combiner_parameters(const Model& model) {
  std::vector<NamedTensor> list;
  add_branch(list, "radius", model.radius);
  add_branch(list, "angle", model.angle);
  return list;
}

std::vector<NamedTensor> projection_parameters(const Model& model) {
  if (!model.shape.projections) {
    return {};
  }
  return {{"projection.image.weight", model.image_weight},
          {"projection.image.bias", model.image_bias},
          {"projection.text.weight", model.text_weight},
          {"projection.text.bias", model.text_bias}};
}

std::vector<NamedTensor> frozen_parameters(const Model& model) {
  return {{"direction.weight", model.direction_weight}, {"direction.bias", model.direction_bias}};
}

Turn turn(const Model& model, const kernels::Polar& polar) {
  return {scale_at(model.radius, polar.radius),
          apply_branch(model.angle, polar.angle) * (std::numbers::pi / 6.0)};
}

at::Tensor direction(const Model& model, const at::Tensor& conditions) {
  return at::addmm(model.direction_bias, conditions, model.direction_weight.t());
}

at::Tensor project_image(const Model& model, const at::Tensor& image) {
  if (!model.shape.projections) {
    return image;
  }
  return at::linear(kernels::normalize_rows(image), model.image_weight, model.image_bias);
}

at::Tensor project_text(const Model& model, const at::Tensor& text) {
  if (!model.shape.projections) {
    return text;
  }
  return at::linear(kernels::normalize_rows(text), model.text_weight, model.text_bias);
}

kernels::Rotated modulate(const Model& model, const at::Tensor& text,
                          const at::Tensor& conditions) {
  const Turn by = turn(model, kernels::polar_coordinates(conditions));
  return kernels::rotate_toward(text, direction(model, conditions), by.theta, by.scale);
}

}  // namespace plimsoll::cosir
