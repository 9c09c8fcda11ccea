// SPDX-License-Identifier: Apache-2.0
//
// The classifier, its noise and its step.
//
// Threads: as torch operators.   Memory: see cosir_phase2.h.
#include "recipes/cosir/phase2.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/check.h"
#include "base/philox.h"
#include "kernels/contrast_loops.h"
#include "torch/random_tensors.h"

namespace plimsoll::cosir {
namespace {

constexpr double kClassWeight = 0.9;
constexpr double kNceWeight = 0.1;

// Which noise of a step: a mask per layer with dropout, and the Gumbel noise.
enum Noise : std::uint64_t { kImageDropout, kTextDropout, kHeadDropout, kGumbel };

void fill_norm(at::Tensor& weight, at::Tensor& bias, std::int64_t dim) {
  weight = at::ones({dim}, at::kFloat).set_requires_grad(true);
  bias = at::zeros({dim}, at::kFloat).set_requires_grad(true);
}

Encoder make_encoder(std::int64_t dim, std::uint64_t seed, std::uint64_t& stream) {
  Encoder e;
  random_linear(e.in_weight, e.in_bias, dim, dim, seed, stream);
  fill_norm(e.norm_weight, e.norm_bias, dim);
  random_linear(e.out_weight, e.out_bias, dim, dim, seed, stream);
  return e;
}

// One step's noise: philox keyed by (seed, use), the sample's id, and (epoch, mode, place).
struct NoiseSource {
  std::span<const std::int64_t> ids;
  const NoiseKey* key;
  Mode mode;

  // Calls each(i, j, word) for every element of [ids.size(), width].
  template <class F>
  void fill(Noise use, std::int64_t width, const F& each) const {
    const std::uint64_t seed = mix64(key->seed ^ mix64(use * 4 + static_cast<std::uint64_t>(mode)));
    const auto epoch = static_cast<std::uint64_t>(key->epoch) << 32;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      for (std::int64_t j = 0; j < width; j += 4) {
        const auto words = philox(seed, static_cast<std::uint64_t>(ids[i]),
                                  epoch + static_cast<std::uint64_t>(j / 4));
        for (std::int64_t k = 0; k < 4 && j + k < width; ++k) {
          each(static_cast<std::int64_t>(i), j + k, words[static_cast<std::size_t>(k)]);
        }
      }
    }
  }

  // Dropout at one half: kept values are doubled. Without a key, nothing.
  at::Tensor dropout(const at::Tensor& x, Noise use) const {
    if (key == nullptr) {
      return x;
    }
    auto mask = at::empty(x.sizes(), at::kFloat);
    float* to = mask.data_ptr<float>();
    const std::int64_t width = x.size(1);
    fill(use, width, [&](std::int64_t i, std::int64_t j, std::uint32_t word) {
      to[i * width + j] = (word >> 31) != 0 ? 2.0F : 0.0F;
    });
    return x * mask;
  }
  at::Tensor gumbel() const {
    auto noise = at::empty({static_cast<std::int64_t>(ids.size()), kRepresentatives}, at::kFloat);
    float* to = noise.data_ptr<float>();
    fill(kGumbel, kRepresentatives, [&](std::int64_t i, std::int64_t j, std::uint32_t word) {
      to[i * kRepresentatives + j] = -std::log(-std::log(uniform01(word)));
    });
    return noise;
  }
};

at::Tensor encode(const Encoder& e, const at::Tensor& x, const NoiseSource& noise, Noise use) {
  auto h = at::gelu(at::linear(x, e.in_weight, e.in_bias));
  h = at::layer_norm(h, {h.size(1)}, e.norm_weight, e.norm_bias);
  return at::linear(noise.dropout(h, use), e.out_weight, e.out_bias);
}

void add_encoder(std::vector<NamedTensor>& list, const std::string& name, const Encoder& e) {
  list.push_back({name + ".in.weight", e.in_weight});
  list.push_back({name + ".in.bias", e.in_bias});
  list.push_back({name + ".norm.weight", e.norm_weight});
  list.push_back({name + ".norm.bias", e.norm_bias});
  list.push_back({name + ".out.weight", e.out_weight});
  list.push_back({name + ".out.bias", e.out_bias});
}

at::Tensor logits_of(const Classifier& c, const at::Tensor& image_unit, const at::Tensor& text_unit,
                     const NoiseSource& noise) {
  const auto fill_in = [&](const at::Tensor& mask) {
    return mask.unsqueeze(0).expand({image_unit.size(0), c.dim});
  };
  const auto image = noise.mode == Mode::kText ? fill_in(c.image_mask)
                                               : encode(c.image, image_unit, noise, kImageDropout);
  const auto text = noise.mode == Mode::kImage ? fill_in(c.text_mask)
                                               : encode(c.text, text_unit, noise, kTextDropout);
  auto h = at::gelu(at::linear(at::cat({image, text}, 1), c.in_weight, c.in_bias));
  h = at::layer_norm(h, {c.dim}, c.norm_weight, c.norm_bias);
  return at::linear(noise.dropout(h, kHeadDropout), c.out_weight, c.out_bias);
}

}  // namespace

Classifier make_classifier(std::int64_t dim, std::uint64_t run_seed) {
  const std::uint64_t seed = seed_for(run_seed, Purpose::kClassifier);
  std::uint64_t stream = 0;
  Classifier c;
  c.dim = dim;
  c.image = make_encoder(dim, seed, stream);
  c.text = make_encoder(dim, seed, stream);
  const double width = 1.0 / std::sqrt(static_cast<double>(dim));
  c.image_mask = random_normal({dim}, width, seed, stream++).set_requires_grad(true);
  c.text_mask = random_normal({dim}, width, seed, stream++).set_requires_grad(true);
  random_linear(c.in_weight, c.in_bias, dim, 2 * dim, seed, stream);
  fill_norm(c.norm_weight, c.norm_bias, dim);
  random_linear(c.out_weight, c.out_bias, kRepresentatives, dim, seed, stream);
  return c;
}

std::vector<NamedTensor> classifier_parameters(const Classifier& c) {
  std::vector<NamedTensor> list;
  add_encoder(list, "classifier.image", c.image);
  add_encoder(list, "classifier.text", c.text);
  list.push_back({"classifier.image_mask", c.image_mask});
  list.push_back({"classifier.text_mask", c.text_mask});
  list.push_back({"classifier.in.weight", c.in_weight});
  list.push_back({"classifier.in.bias", c.in_bias});
  list.push_back({"classifier.norm.weight", c.norm_weight});
  list.push_back({"classifier.norm.bias", c.norm_bias});
  list.push_back({"classifier.out.weight", c.out_weight});
  list.push_back({"classifier.out.bias", c.out_bias});
  return list;
}

Representatives make_representatives(const Model& model, double radius) {
  const c10::AutoGradMode off{false};
  const auto conditions = polar_grid(kRepresentatives, {radius}, model.shape.label_dim);
  return {conditions, direction(model, conditions),
          turn(model, kernels::polar_coordinates(conditions))};
}

at::Tensor targets(const Representatives& chosen, const at::Tensor& image_unit,
                   const at::Tensor& text) {
  const c10::AutoGradMode off{false};
  const std::int64_t rows = text.size(0);
  auto similarity = at::empty({rows, kRepresentatives}, at::kFloat);
  for (std::int64_t k = 0; k < kRepresentatives; ++k) {
    const auto row = [&](const at::Tensor& x) {
      return x.narrow(0, k, 1).expand({rows}).contiguous();
    };
    const auto course = chosen.directions.narrow(0, k, 1).expand({rows, text.size(1)}).contiguous();
    const auto made =
        kernels::rotate_toward(text, course, row(chosen.turn.theta), row(chosen.turn.scale));
    similarity.select(1, k).copy_((made.out * image_unit).sum(1));
  }
  return at::argmax(similarity, 1);
}

at::Tensor classify(const Classifier& classifier, Mode mode, const at::Tensor& image_unit,
                    const at::Tensor& text_unit, std::span<const std::int64_t> ids,
                    const NoiseKey* key) {
  return logits_of(classifier, image_unit, text_unit, NoiseSource{ids, key, mode});
}

Phase2Step phase2_step(const Model& model, const Classifier& classifier,
                       const Representatives& chosen, const LossInput& in, double temperature,
                       const NoiseKey& key) {
  at::Tensor image_unit;
  at::Tensor text;
  at::Tensor text_unit;
  {
    const c10::AutoGradMode off{false};
    image_unit = kernels::normalize_rows(project_image(model, in.image));
    text = project_text(model, in.text).contiguous();
    text_unit = kernels::normalize_rows(text);
  }
  const auto target = targets(chosen, image_unit, text);
  std::vector<at::Tensor> parameters;
  for (auto& [name, tensor] : classifier_parameters(classifier)) {
    parameters.push_back(tensor);
  }
  Phase2Step step;
  step.gradients.resize(parameters.size());
  for (int m = 0; m < kModes; ++m) {
    const NoiseSource noise{in.ids, &key, static_cast<Mode>(m)};
    const auto logits = logits_of(classifier, image_unit, text_unit, noise);
    const auto share = at::softmax(logits + noise.gumbel(), 1);
    const auto turned = modulate(model, text, at::mm(share, chosen.conditions)).out;
    const auto loss =
        (at::cross_entropy_loss(logits, target) * kClassWeight +
         kernels::symmetric_info_nce(turned, image_unit, in.groups, temperature) * kNceWeight) *
        (1.0 / kModes);
    step.loss += loss.item<double>();
    // In mode "img" the text encoder is not used, and the other way round.
    const auto gradients = torch::autograd::grad({loss}, parameters, {}, std::nullopt, false,
                                                 /*allow_unused=*/true);
    const c10::AutoGradMode off{false};
    for (std::size_t k = 0; k < gradients.size(); ++k) {
      auto& sum = step.gradients[k];
      if (gradients[k].defined()) {
        sum = sum.defined() ? sum.add_(gradients[k]) : gradients[k].clone();
      }
    }
  }
  return step;
}

std::string Phase2Accuracy::to_json() const {
  nlohmann::ordered_json j;
  for (std::size_t m = 0; m < kModes; ++m) {
    j[kModeNames[m]] = accuracy[m];
  }
  j["chance"] = 100.0 / static_cast<double>(kRepresentatives);
  j["commonest"] = commonest;
  j["pairs"] = pairs;
  return j.dump();
}

Result<Phase2Accuracy> phase2_accuracy(const Model& model, const Classifier& classifier,
                                       const Representatives& chosen, const PairSource& source) {
  const c10::AutoGradMode off{false};
  Phase2Accuracy result;
  result.pairs = source.pairs;
  std::array<std::int64_t, kModes> right{};
  std::array<std::int64_t, kRepresentatives> count{};
  for (std::int64_t begin = 0; begin < source.pairs; begin += kQueryBlock) {
    std::vector<std::int64_t> pairs(
        static_cast<std::size_t>(std::min(kQueryBlock, source.pairs - begin)));
    std::iota(pairs.begin(), pairs.end(), begin);
    PLIMSOLL_TRY(const auto image, source.images(pairs));
    PLIMSOLL_TRY(const auto raw_text, source.texts(pairs));
    const auto image_unit = kernels::normalize_rows(project_image(model, image));
    const auto text = project_text(model, raw_text).contiguous();
    const auto text_unit = kernels::normalize_rows(text);
    const auto target = targets(chosen, image_unit, text);
    for (std::int64_t i = 0; i < target.size(0); ++i) {
      ++count[static_cast<std::size_t>(target.const_data_ptr<std::int64_t>()[i])];
    }
    for (int m = 0; m < kModes; ++m) {
      const auto guess = at::argmax(
          classify(classifier, static_cast<Mode>(m), image_unit, text_unit, {}, nullptr), 1);
      right[static_cast<std::size_t>(m)] += (guess == target).sum().item<std::int64_t>();
    }
  }
  const auto percent = [&](std::int64_t n) {
    return 100.0 * static_cast<double>(n) /
           static_cast<double>(std::max<std::int64_t>(1, source.pairs));
  };
  for (std::size_t m = 0; m < kModes; ++m) {
    result.accuracy[m] = percent(right[m]);
  }
  result.commonest = percent(*std::max_element(count.begin(), count.end()));
  return result;
}

}  // namespace plimsoll::cosir
