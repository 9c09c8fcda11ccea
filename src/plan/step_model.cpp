// SPDX-License-Identifier: Apache-2.0
//
// See step_model.h. Order here: formulas, fitting, what blocks are, replay.
#include "plan/step_model.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"

namespace plimsoll {
namespace {

constexpr std::size_t kFactors = 5;
constexpr double kBlockMost = 1LL << 48;  // No address reaches further.

std::array<double, kFactors> terms_of(const StepSize& size) noexcept {
  const auto rows = static_cast<double>(size.rows);
  return {1.0, rows, rows * rows, static_cast<double>(size.nodes), static_cast<double>(size.edges)};
}

// The kinds of formula, simplest first; each lists the factors that may be other than zero.
struct Shape {
  std::array<std::size_t, 4> factors;
  std::size_t count;
};
constexpr std::array<Shape, 3> kOfRows{{{{0}, 1}, {{0, 1}, 2}, {{0, 1, 2}, 3}}};
constexpr std::array<Shape, 5> kOfGraphs{
    {{{0}, 1}, {{0, 1}, 2}, {{0, 3}, 2}, {{0, 3, 4}, 3}, {{0, 1, 3, 4}, 4}}};

// Solves shape through the first `count` of the samples, by elimination with row exchanges.
// False when they do not determine it.
bool solve(const Shape& shape, std::span<const StepSize* const> sizes,
           std::span<const std::int64_t> bytes, SizeFormula* formula) {
  std::array<std::array<long double, 5>, 4> rows{};
  for (std::size_t r = 0; r < shape.count; ++r) {
    const auto terms = terms_of(*sizes[r]);
    for (std::size_t c = 0; c < shape.count; ++c) {
      rows[r][c] = terms[shape.factors[c]];
    }
    rows[r][shape.count] = static_cast<long double>(bytes[r]);
  }
  for (std::size_t c = 0; c < shape.count; ++c) {
    std::size_t best = c;
    for (std::size_t r = c + 1; r < shape.count; ++r) {
      best = std::fabs(rows[r][c]) > std::fabs(rows[best][c]) ? r : best;
    }
    std::swap(rows[c], rows[best]);
    if (std::fabs(rows[c][c]) < 1e-9L) {
      return false;
    }
    for (std::size_t r = 0; r < shape.count; ++r) {
      const long double share = r == c ? 0.0L : rows[r][c] / rows[c][c];
      for (std::size_t k = c; share != 0.0L && k <= shape.count; ++k) {
        rows[r][k] -= share * rows[c][k];
      }
    }
  }
  formula->factors = {};
  for (std::size_t c = 0; c < shape.count; ++c) {
    formula->factors[shape.factors[c]] = static_cast<double>(rows[c][shape.count] / rows[c][c]);
  }
  return true;
}

// Rising from nothing, above every sample: what is known of a block that no formula fits.
SizeFormula envelope_of(std::span<const StepSize* const> sizes,
                        std::span<const std::int64_t> bytes) {
  SizeFormula formula;
  formula.envelope = true;
  for (std::size_t k = 0; k < bytes.size(); ++k) {
    formula.factors[0] = std::max(formula.factors[0], static_cast<double>(bytes[k]));
    const auto rows = static_cast<double>(std::max<std::int64_t>(1, sizes[k]->rows));
    formula.factors[1] = std::max(formula.factors[1], static_cast<double>(bytes[k]) / rows);
  }
  return formula;
}

SizeFormula fit_formula(std::span<const Shape> shapes, std::span<const StepSize* const> sizes,
                        std::span<const std::int64_t> bytes) {
  for (const Shape& shape : shapes) {
    SizeFormula formula;
    if (shape.count > bytes.size() || !solve(shape, sizes, bytes, &formula)) {
      continue;
    }
    bool fits = true;
    for (std::size_t k = 0; k < bytes.size() && fits; ++k) {
      fits = formula.at(*sizes[k]) == bytes[k];
    }
    if (fits) {
      formula.confirmed = bytes.size() > shape.count;
      return formula;
    }
  }
  return envelope_of(sizes, bytes);
}

}  // namespace

std::int64_t SizeFormula::at(const StepSize& size) const noexcept {
  if (envelope) {
    const double line = std::max(factors[0], factors[1] * static_cast<double>(size.rows));
    return static_cast<std::int64_t>(std::ceil(std::min(line, kBlockMost)));
  }
  const auto terms = terms_of(size);
  double bytes = 0.0;
  for (std::size_t k = 0; k < kFactors; ++k) {
    bytes += factors[k] * terms[k];
  }
  return std::llround(std::clamp(bytes, 0.0, kBlockMost));
}

Result<StepModel> StepModel::fit(std::span<const StepTrace> traces) {
  if (traces.empty()) {
    return fail(ErrorCode::kInvalidArgument, "a step is modelled from at least one trace");
  }
  std::vector<const StepSize*> sizes;
  bool graphs = false;
  for (const StepTrace& trace : traces) {
    if (!aligned(trace, traces.front())) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("steps of {} and {} rows differ in their operators",
                              traces.front().size.rows, trace.size.rows));
    }
    graphs = graphs || trace.size.nodes > 0 || trace.size.edges > 0;
    for (const StepSize* other : sizes) {
      if (*other == trace.size) {
        return fail(ErrorCode::kInvalidArgument,
                    fmt::format("two traces of a step of {} rows", trace.size.rows));
      }
    }
    sizes.push_back(&trace.size);
  }
  StepModel model;
  model.shape_ = traces.front();
  const auto shapes = graphs ? std::span<const Shape>(kOfGraphs) : std::span<const Shape>(kOfRows);
  std::vector<std::int64_t> bytes(traces.size());
  for (std::size_t block = 0; block < model.shape_.blocks.size(); ++block) {
    for (std::size_t k = 0; k < traces.size(); ++k) {
      bytes[k] = traces[k].blocks[block].bytes;
    }
    model.formulas_.push_back(fit_formula(shapes, sizes, bytes));
  }
  const auto by_rows = [](const StepTrace& x, const StepTrace& y) {
    return x.size.rows < y.size.rows;
  };
  const auto [least, most] = std::minmax_element(traces.begin(), traces.end(), by_rows);
  model.rows_least_ = least->size.rows;
  model.rows_most_ = most->size.rows;
  for (const StepTrace& trace : traces) {
    model.shape_.static_bytes = std::max(model.shape_.static_bytes, trace.static_bytes);
    model.shape_.other_threads_bytes =
        std::max(model.shape_.other_threads_bytes, trace.other_threads_bytes);
  }
  model.classify();
  return model;
}

void StepModel::classify() {
  const auto& blocks = shape_.blocks;
  const auto end = static_cast<std::int64_t>(shape_.events.size());
  std::vector<std::int64_t> freed(blocks.size(), end);
  std::int64_t backward = end;
  std::int64_t backward_ends = 0;
  for (std::int64_t k = 0; k < end; ++k) {
    const std::int32_t event = shape_.events[static_cast<std::size_t>(k)];
    if (event < 0) {
      freed[static_cast<std::size_t>(-1 - event)] = k;
    } else if (blocks[static_cast<std::size_t>(event)].born == StepPhase::kBackward) {
      backward = std::min(backward, k);
      backward_ends = k;
    }
  }
  parts_.clear();
  for (std::size_t k = 0; k < blocks.size(); ++k) {
    const bool carried = static_cast<std::int64_t>(k) < shape_.carried;
    const auto outlives = [&](std::int64_t event) { return carried || freed[k] > event; };
    Part part = Part::kTemporary;
    if (blocks[k].born == StepPhase::kBackward && outlives(backward_ends)) {
      part = Part::kGradient;
    } else if (blocks[k].born == StepPhase::kForward && outlives(backward)) {
      part = Part::kActivation;
    } else if (blocks[k].born == StepPhase::kOptimizer && (carried || freed[k] == end)) {
      part = Part::kOptimizer;
    }
    parts_.push_back(part);
  }
}

ReplayedPeak StepModel::replay(const StepSize& size, BlockBytes block_bytes) const {
  std::array<std::int64_t, 4> live{};
  const auto bytes_of = [&](std::size_t block) { return block_bytes(formulas_[block].at(size)); };
  const auto add = [&](std::size_t block, std::int64_t sign) {
    live[static_cast<std::size_t>(parts_[block])] += sign * bytes_of(block);
  };
  for (std::size_t block = 0; block < static_cast<std::size_t>(shape_.carried); ++block) {
    add(block, 1);
  }
  const auto sum = [&live] { return live[0] + live[1] + live[2] + live[3]; };
  std::array<std::int64_t, 4> at_peak = live;
  std::int64_t highest = sum();
  std::int64_t block_at_peak = -1;
  for (const std::int32_t event : shape_.events) {
    if (event < 0) {
      add(static_cast<std::size_t>(-1 - event), -1);
      continue;
    }
    add(static_cast<std::size_t>(event), 1);
    if (sum() > highest) {
      highest = sum();
      at_peak = live;
      block_at_peak = event;
    }
  }
  ReplayedPeak peak;
  peak.parts = {shape_.static_bytes, at_peak[0], at_peak[1],
                at_peak[2],          at_peak[3], shape_.other_threads_bytes};
  peak.bytes = shape_.static_bytes + highest + shape_.other_threads_bytes;
  if (block_at_peak >= 0) {
    const StepBlock& block = shape_.blocks[static_cast<std::size_t>(block_at_peak)];
    peak.op = shape_.ops[block.op];
    peak.phase = block.born;
  }
  return peak;
}

std::vector<std::int64_t> StepModel::block_sizes(const StepSize& size) const {
  std::vector<std::int64_t> sizes;
  sizes.reserve(formulas_.size());
  for (const SizeFormula& formula : formulas_) {
    sizes.push_back(formula.at(size));
  }
  return sizes;
}

bool StepModel::predicts(const StepTrace& trace) const {
  if (!aligned(trace, shape_) || trace.static_bytes != shape_.static_bytes ||
      trace.other_threads_bytes != 0 || shape_.other_threads_bytes != 0) {
    return false;
  }
  for (std::size_t k = 0; k < formulas_.size(); ++k) {
    if (formulas_[k].at(trace.size) != trace.blocks[k].bytes) {
      return false;
    }
  }
  return true;
}

bool StepModel::confirmed() const noexcept {
  return std::all_of(formulas_.begin(), formulas_.end(),
                     [](const SizeFormula& f) { return f.confirmed; });
}

}  // namespace plimsoll
