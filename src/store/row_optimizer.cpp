// SPDX-License-Identifier: Apache-2.0
#include "store/row_optimizer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <tuple>

#include <fmt/format.h>

#include "base/check.h"
#include "store/row_wide.h"

namespace plimsoll {
namespace {

// One row: what it holds, and its gradient. slot1 and slot2 are null where there are none.
struct Row {
  float* w;
  float* slot1;
  float* slot2;
  const float* grad;
  std::int64_t dim;
};

struct PlainNumbers {
  float rate;     // −lr
  float coupled;  // weight decay added to the gradient
  float epsilon;
  float momentum;
};

struct AdamNumbers {
  float decay;    // 1 − lr × weight_decay where it is decoupled
  float coupled;  // weight decay added to the gradient
  float weight1;  // 1 − beta1
  float beta2;
  float weight2;  // 1 − beta2
  float rate;     // −lr / (1 − beta1^t)
  float root2;    // sqrt(1 − beta2^t)
  float epsilon;
};

// torch's lerp switches formula at one half, so that a weight of 1 gives exactly the end.
PLIMSOLL_BODY float lerp(float from, float to, float weight, bool near) {
  return near ? from + weight * (to - from) : to - (to - from) * (1.0F - weight);
}

// How many partial sums a sum over a row has: element i belongs to sum i mod kPartialSums.
constexpr std::int64_t kPartialSums = 8;

// AdamW where decay is not 1 and coupled is 0; Adam where it is the other way round.
PLIMSOLL_BODY void adam_body(const Row& row, const AdamNumbers& n) {
  const AdamNumbers c = n;
  const bool near = c.weight1 < 0.5F;
  float* __restrict w = row.w;
  float* __restrict m = row.slot1;
  float* __restrict v = row.slot2;
  const float* __restrict g = row.grad;
  for (std::int64_t i = 0; i < row.dim; ++i) {
    const float grad = c.coupled != 0.0F ? g[i] + c.coupled * w[i] : g[i];
    const float weight = w[i] * c.decay;
    const float moment1 = lerp(m[i], grad, c.weight1, near);
    const float moment2 = v[i] * c.beta2 + c.weight2 * grad * grad;
    m[i] = moment1;
    v[i] = moment2;
    const float denominator = std::sqrt(moment2) / c.root2 + c.epsilon;
    w[i] = weight + c.rate * moment1 / denominator;
  }
}

PLIMSOLL_BODY void adamw_fresh_body(const Row& row, const AdamNumbers& n) {
  const AdamNumbers c = n;
  const bool near = c.weight1 < 0.5F;
  float* __restrict w = row.w;
  const float* __restrict g = row.grad;
  for (std::int64_t i = 0; i < row.dim; ++i) {
    const float grad = g[i];
    const float weight = w[i] * c.decay;
    const float moment1 = lerp(0.0F, grad, c.weight1, near);
    const float moment2 = c.weight2 * grad * grad;
    const float denominator = std::sqrt(moment2) / c.root2 + c.epsilon;
    w[i] = weight + c.rate * moment1 / denominator;
  }
}

PLIMSOLL_BODY void adagrad_body(const Row& row, const PlainNumbers& n) {
  const PlainNumbers c = n;
  float* __restrict w = row.w;
  float* __restrict sum = row.slot1;
  const float* __restrict g = row.grad;
  for (std::int64_t i = 0; i < row.dim; ++i) {
    const float grad = c.coupled != 0.0F ? g[i] + c.coupled * w[i] : g[i];
    const float total = sum[i] + grad * grad;
    sum[i] = total;
    w[i] = w[i] + c.rate * grad / (std::sqrt(total) + c.epsilon);
  }
}

PLIMSOLL_BODY void row_adagrad_body(const Row& row, const PlainNumbers& n) {
  const PlainNumbers c = n;
  float* __restrict w = row.w;
  const float* __restrict g = row.grad;
  std::array<float, kPartialSums> sums{};
  const std::int64_t whole = row.dim / kPartialSums * kPartialSums;
  for (std::int64_t i = 0; i < whole; i += kPartialSums) {
    for (std::int64_t k = 0; k < kPartialSums; ++k) {
      const float grad = c.coupled != 0.0F ? g[i + k] + c.coupled * w[i + k] : g[i + k];
      sums[static_cast<std::size_t>(k)] += grad * grad;
    }
  }
  for (std::int64_t i = whole; i < row.dim; ++i) {
    const float grad = c.coupled != 0.0F ? g[i] + c.coupled * w[i] : g[i];
    sums[static_cast<std::size_t>(i - whole)] += grad * grad;
  }
  for (std::size_t half = sums.size() / 2; half > 0; half /= 2) {
    for (std::size_t k = 0; k < half; ++k) {
      sums[k] += sums[k + half];
    }
  }
  const float total = *row.slot1 + sums[0] / static_cast<float>(row.dim);
  *row.slot1 = total;
  const float denominator = std::sqrt(total) + c.epsilon;
  for (std::int64_t i = 0; i < row.dim; ++i) {
    const float grad = c.coupled != 0.0F ? g[i] + c.coupled * w[i] : g[i];
    w[i] = w[i] + c.rate * grad / denominator;
  }
}

PLIMSOLL_BODY void sgd_body(const Row& row, const PlainNumbers& n) {
  const PlainNumbers c = n;
  float* __restrict w = row.w;
  const float* __restrict g = row.grad;
  for (std::int64_t i = 0; i < row.dim; ++i) {
    const float grad = c.coupled != 0.0F ? g[i] + c.coupled * w[i] : g[i];
    w[i] = w[i] + c.rate * grad;
  }
}

PLIMSOLL_BODY void sgd_momentum_body(const Row& row, const PlainNumbers& n) {
  const PlainNumbers c = n;
  float* __restrict w = row.w;
  float* __restrict velocity = row.slot1;
  const float* __restrict g = row.grad;
  for (std::int64_t i = 0; i < row.dim; ++i) {
    const float grad = c.coupled != 0.0F ? g[i] + c.coupled * w[i] : g[i];
    const float moved = velocity[i] * c.momentum + grad;
    velocity[i] = moved;
    w[i] = w[i] + c.rate * moved;
  }
}

PLIMSOLL_BODY bool finite_body(const float* values, std::int64_t count) {
  std::uint32_t bad = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto exponent = std::bit_cast<std::uint32_t>(values[i]) & 0x7F800000U;
    bad |= exponent == 0x7F800000U ? 1U : 0U;
  }
  return bad == 0;
}

// Both versions of one body.
#define PLIMSOLL_BOTH(name, Numbers)                                 \
  PLIMSOLL_WIDE void name##_wide(const Row& row, const Numbers& n) { \
    name##_body(row, n);                                             \
  }                                                                  \
  void name##_plain(const Row& row, const Numbers& n) {              \
    name##_body(row, n);                                             \
  }
PLIMSOLL_BOTH(adam, AdamNumbers)
PLIMSOLL_BOTH(adamw_fresh, AdamNumbers)
PLIMSOLL_BOTH(adagrad, PlainNumbers)
PLIMSOLL_BOTH(row_adagrad, PlainNumbers)
PLIMSOLL_BOTH(sgd, PlainNumbers)
PLIMSOLL_BOTH(sgd_momentum, PlainNumbers)
#undef PLIMSOLL_BOTH
PLIMSOLL_WIDE bool finite_wide(const float* values, std::int64_t count) {
  return finite_body(values, count);
}
bool finite_plain(const float* values, std::int64_t count) {
  return finite_body(values, count);
}

// By RowOptimizer: its name, and floats of state per weight and per row.
struct Kind {
  const char* name;
  std::int64_t slots;
  std::int64_t row_slots;
};
const Kind& kind_of(RowOptimizer kind) noexcept {
  static constexpr std::array<Kind, 7> kKinds{{{"adamw", 2, 0},
                                               {"adamw_fresh", 0, 0},
                                               {"adagrad", 1, 0},
                                               {"sgd", 0, 0},
                                               {"sgd_momentum", 1, 0},
                                               {"row_adagrad", 0, 1},
                                               {"adam", 2, 0}}};
  return kKinds[static_cast<std::size_t>(kind)];
}

}  // namespace

std::int64_t optimizer_slots(RowOptimizer kind) noexcept {
  return kind_of(kind).slots;
}
std::int64_t optimizer_row_slots(RowOptimizer kind) noexcept {
  return kind_of(kind).row_slots;
}
const char* optimizer_name(RowOptimizer kind) noexcept {
  return kind_of(kind).name;
}

Result<void> check_optimizer(const RowOptimizerOptions& options) {
  const auto is_rate = [](float value) { return value >= 0.0F && !std::isinf(value); };
  const auto is_part = [](float value) { return value >= 0.0F && value < 1.0F; };
  for (const auto& [option, value, sound] :
       {std::tuple{"learning_rate", options.learning_rate, is_rate(options.learning_rate)},
        std::tuple{"beta1", options.beta1, is_part(options.beta1)},
        std::tuple{"beta2", options.beta2, is_part(options.beta2)},
        std::tuple{"epsilon", options.epsilon, is_rate(options.epsilon)},
        std::tuple{"weight_decay", options.weight_decay, is_rate(options.weight_decay)},
        std::tuple{"momentum", options.momentum, is_part(options.momentum)}}) {
    if (!sound) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("optimizer.{} = {} makes no sense", option, value));
    }
  }
  return {};
}

AdamCorrection adam_correction(const RowOptimizerOptions& options, std::int64_t t) noexcept {
  const auto steps = static_cast<double>(t);
  const double bias2 = 1.0 - std::pow(static_cast<double>(options.beta2), steps);
  return {.bias1 = 1.0 - std::pow(static_cast<double>(options.beta1), steps),
          .root2 = static_cast<float>(std::sqrt(bias2))};
}

RowOptimizerStep::RowOptimizerStep(const RowOptimizerOptions& options,
                                   std::span<AdamCorrection> corrections, std::int64_t dim) noexcept
    : options_(options), corrections_(corrections), dim_(dim), wide_(PLIMSOLL_HAS_WIDE) {
  for (std::size_t i = 0; i < corrections.size(); ++i) {
    corrections[i] = adam_correction(options, static_cast<std::int64_t>(i) + 1);
  }
}

void RowOptimizerStep::step(float* weights, float* slots, const float* grad, std::uint32_t sequence,
                            double rate_scale) const noexcept {
  const double rate = static_cast<double>(options_.learning_rate) * rate_scale;
  const PlainNumbers numbers{.rate = static_cast<float>(-rate),
                             .coupled = options_.weight_decay,
                             .epsilon = options_.epsilon,
                             .momentum = options_.momentum};
  const Row row{weights, slots, slots + dim_, grad, dim_};
  switch (options_.kind) {
    case RowOptimizer::kAdamW:
    case RowOptimizer::kAdamWFresh:
    case RowOptimizer::kAdam:
      return step_adam(weights, slots, grad, sequence, rate);
    case RowOptimizer::kAdagrad:
      return (wide_ ? adagrad_wide : adagrad_plain)(row, numbers);
    case RowOptimizer::kRowAdagrad:
      return (wide_ ? row_adagrad_wide : row_adagrad_plain)(row, numbers);
    case RowOptimizer::kSgd:
      return (wide_ ? sgd_wide : sgd_plain)(row, numbers);
    case RowOptimizer::kSgdMomentum:
      return (wide_ ? sgd_momentum_wide : sgd_momentum_plain)(row, numbers);
  }
}

void RowOptimizerStep::step_adam(float* weights, float* slots, const float* grad,
                                 std::uint32_t sequence, double rate) const noexcept {
  const bool fresh = options_.kind == RowOptimizer::kAdamWFresh;
  const bool coupled = options_.kind == RowOptimizer::kAdam;
  const std::size_t before = fresh ? 0 : sequence;
  const AdamCorrection correction =
      before < corrections_.size()
          ? corrections_[before]
          : adam_correction(options_, static_cast<std::int64_t>(sequence) + 1);
  const auto decay = static_cast<double>(options_.weight_decay);
  const AdamNumbers numbers{
      .decay = coupled ? 1.0F : static_cast<float>(1.0 - rate * decay),
      .coupled = coupled ? options_.weight_decay : 0.0F,
      .weight1 = static_cast<float>(1.0 - static_cast<double>(options_.beta1)),
      .beta2 = options_.beta2,
      .weight2 = static_cast<float>(1.0 - static_cast<double>(options_.beta2)),
      .rate = static_cast<float>(-(rate / correction.bias1)),
      .root2 = correction.root2,
      .epsilon = options_.epsilon};
  const Row row{weights, slots, slots + dim_, grad, dim_};
  if (fresh) {
    (wide_ ? adamw_fresh_wide : adamw_fresh_plain)(row, numbers);
  } else {
    (wide_ ? adam_wide : adam_plain)(row, numbers);
  }
}

bool all_finite(const float* values, std::int64_t count) noexcept {
  return PLIMSOLL_HAS_WIDE ? finite_wide(values, count) : finite_plain(values, count);
}

}  // namespace plimsoll
