// SPDX-License-Identifier: Apache-2.0
#include "store/row_optimizer.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include <fmt/format.h>

#include "base/check.h"

// A function for each instruction set, chosen at run time, from one body. Not target_clones: the
// resolvers it makes run before a sanitizer is ready for them.
#if defined(__x86_64__)
#define PLIMSOLL_WIDE __attribute__((target("avx2")))
#define PLIMSOLL_HAS_WIDE __builtin_cpu_supports("avx2")
#else
#define PLIMSOLL_WIDE
#define PLIMSOLL_HAS_WIDE false
#endif
#define PLIMSOLL_BODY __attribute__((always_inline)) inline

namespace plimsoll {
namespace {

struct AdamNumbers {
  float decay;    // 1 − lr × weight_decay
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

PLIMSOLL_BODY void adamw_body(float* __restrict w, float* __restrict m, float* __restrict v,
                              const float* __restrict g, std::int64_t dim, const AdamNumbers& n) {
  const AdamNumbers c = n;
  const bool near = c.weight1 < 0.5F;
  for (std::int64_t i = 0; i < dim; ++i) {
    const float grad = g[i];
    const float weight = w[i] * c.decay;
    const float moment1 = lerp(m[i], grad, c.weight1, near);
    const float moment2 = v[i] * c.beta2 + c.weight2 * grad * grad;
    m[i] = moment1;
    v[i] = moment2;
    const float denominator = std::sqrt(moment2) / c.root2 + c.epsilon;
    w[i] = weight + c.rate * moment1 / denominator;
  }
}

PLIMSOLL_BODY void adamw_fresh_body(float* __restrict w, const float* __restrict g,
                                    std::int64_t dim, const AdamNumbers& n) {
  const AdamNumbers c = n;
  const bool near = c.weight1 < 0.5F;
  for (std::int64_t i = 0; i < dim; ++i) {
    const float grad = g[i];
    const float weight = w[i] * c.decay;
    const float moment1 = lerp(0.0F, grad, c.weight1, near);
    const float moment2 = c.weight2 * grad * grad;
    const float denominator = std::sqrt(moment2) / c.root2 + c.epsilon;
    w[i] = weight + c.rate * moment1 / denominator;
  }
}

PLIMSOLL_BODY void adagrad_body(float* __restrict w, float* __restrict sum,
                                const float* __restrict g, std::int64_t dim, float rate,
                                float decay, float epsilon) {
  for (std::int64_t i = 0; i < dim; ++i) {
    const float grad = decay != 0.0F ? g[i] + decay * w[i] : g[i];
    const float total = sum[i] + grad * grad;
    sum[i] = total;
    w[i] = w[i] + rate * grad / (std::sqrt(total) + epsilon);
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

PLIMSOLL_WIDE void adamw_wide(float* w, float* m, float* v, const float* g, std::int64_t dim,
                              const AdamNumbers& n) {
  adamw_body(w, m, v, g, dim, n);
}
void adamw_plain(float* w, float* m, float* v, const float* g, std::int64_t dim,
                 const AdamNumbers& n) {
  adamw_body(w, m, v, g, dim, n);
}
PLIMSOLL_WIDE void adamw_fresh_wide(float* w, const float* g, std::int64_t dim,
                                    const AdamNumbers& n) {
  adamw_fresh_body(w, g, dim, n);
}
void adamw_fresh_plain(float* w, const float* g, std::int64_t dim, const AdamNumbers& n) {
  adamw_fresh_body(w, g, dim, n);
}
PLIMSOLL_WIDE void adagrad_wide(float* w, float* sum, const float* g, std::int64_t dim, float rate,
                                float decay, float epsilon) {
  adagrad_body(w, sum, g, dim, rate, decay, epsilon);
}
void adagrad_plain(float* w, float* sum, const float* g, std::int64_t dim, float rate, float decay,
                   float epsilon) {
  adagrad_body(w, sum, g, dim, rate, decay, epsilon);
}
PLIMSOLL_WIDE bool finite_wide(const float* values, std::int64_t count) {
  return finite_body(values, count);
}
bool finite_plain(const float* values, std::int64_t count) {
  return finite_body(values, count);
}

}  // namespace

std::int64_t optimizer_slots(RowOptimizer kind) noexcept {
  switch (kind) {
    case RowOptimizer::kAdamW:
      return 2;
    case RowOptimizer::kAdamWFresh:
      return 0;
    case RowOptimizer::kAdagrad:
      return 1;
  }
  return 0;
}

const char* optimizer_name(RowOptimizer kind) noexcept {
  switch (kind) {
    case RowOptimizer::kAdamW:
      return "adamw";
    case RowOptimizer::kAdamWFresh:
      return "adamw_fresh";
    case RowOptimizer::kAdagrad:
      return "adagrad";
  }
  return "unknown";
}

Result<void> check_optimizer(const RowOptimizerOptions& options) {
  const auto refuse = [](const char* option, float value) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("optimizer.{} = {} makes no sense", option, value));
  };
  if (!(options.learning_rate >= 0.0F) || std::isinf(options.learning_rate)) {
    return refuse("learning_rate", options.learning_rate);
  }
  if (!(options.beta1 >= 0.0F && options.beta1 < 1.0F)) {
    return refuse("beta1", options.beta1);
  }
  if (!(options.beta2 >= 0.0F && options.beta2 < 1.0F)) {
    return refuse("beta2", options.beta2);
  }
  if (!(options.epsilon >= 0.0F) || std::isinf(options.epsilon)) {
    return refuse("epsilon", options.epsilon);
  }
  if (!(options.weight_decay >= 0.0F) || std::isinf(options.weight_decay)) {
    return refuse("weight_decay", options.weight_decay);
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

void RowOptimizerStep::step(float* values, const float* grad, std::uint32_t sequence,
                            double rate_scale) const noexcept {
  const double rate = static_cast<double>(options_.learning_rate) * rate_scale;
  if (options_.kind == RowOptimizer::kAdagrad) {
    const auto negative = static_cast<float>(-rate);
    (wide_ ? adagrad_wide : adagrad_plain)(values, values + dim_, grad, dim_, negative,
                                           options_.weight_decay, options_.epsilon);
    return;
  }
  const bool fresh = options_.kind == RowOptimizer::kAdamWFresh;
  const std::size_t before = fresh ? 0 : sequence;
  const AdamCorrection correction =
      before < corrections_.size()
          ? corrections_[before]
          : adam_correction(options_, static_cast<std::int64_t>(sequence) + 1);
  const AdamNumbers numbers{
      .decay = static_cast<float>(1.0 - rate * static_cast<double>(options_.weight_decay)),
      .weight1 = static_cast<float>(1.0 - static_cast<double>(options_.beta1)),
      .beta2 = options_.beta2,
      .weight2 = static_cast<float>(1.0 - static_cast<double>(options_.beta2)),
      .rate = static_cast<float>(-(rate / correction.bias1)),
      .root2 = correction.root2,
      .epsilon = options_.epsilon};
  if (fresh) {
    (wide_ ? adamw_fresh_wide : adamw_fresh_plain)(values, grad, dim_, numbers);
  } else {
    (wide_ ? adamw_wide : adamw_plain)(values, values + dim_, values + 2 * dim_, grad, dim_,
                                       numbers);
  }
}

bool all_finite(const float* values, std::int64_t count) noexcept {
  return PLIMSOLL_HAS_WIDE ? finite_wide(values, count) : finite_plain(values, count);
}

}  // namespace plimsoll
