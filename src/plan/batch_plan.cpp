// SPDX-License-Identifier: Apache-2.0
//
// See batch_plan.h. Order here: regions, the planner's rounds, advice.
#include "plan/batch_plan.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "plan/device_allocator.h"
#include "plan/step_peak.h"
#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kMiB = 1LL << 20;
constexpr int kRoundsMax = 5;
// The second run of a size knows the sizes beside it. A third says nothing new: what a thread of
// its own allocates comes at another moment each time.
constexpr std::int64_t kRunsOfOneSizeMost = 2;
constexpr int kHalvings = 4;  // Real steps between the largest that fits and one that does not.
constexpr std::size_t kLadderMax = 9;
constexpr std::int64_t kRowsMost = 1LL
                                   << 40;  // More than fit anywhere; sums of bytes do not overflow.

// Room for what a step of another size may do otherwise: an eighth of what is not static.
constexpr std::int64_t kUnverifiedShare = 8;

// One object, by whose address a refusal of the device is known.
constexpr char kDeviceAdvice[] =
    "raise --device-memory-limit (device_memory_limit), or make the model smaller";

// Room for what the device's kernels do otherwise: half of what is not static. Seen on an H200:
// 0.46 of it, for a step of four layers (decision 0014).
DevicePeak with_bound(DevicePeak peak) {
  const std::int64_t room = (peak.reserved_bytes - peak.static_bytes) / 2;
  peak.bound_bytes = peak.reserved_bytes + (room + kSegmentUnit - 1) / kSegmentUnit * kSegmentUnit;
  return peak;
}

}  // namespace

bool refused_by_device(const Error& error) noexcept {
  return error.code == ErrorCode::kOverBudget && error.advice == kDeviceAdvice;
}

const char* label_name(PlanLabel label) noexcept {
  switch (label) {
    case PlanLabel::kExact:
      return "exact";
    case PlanLabel::kBounded:
      return "bounded";
  }
  return "";
}

// ---- Regions ----

Result<void> StepRegions::add(StepTrace trace) {
  if (traces_ == kTracesMax) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("a step is traced at {} sizes at most", kTracesMax));
  }
  for (Region& region : regions_) {
    if (!aligned(region.traces.front(), trace)) {
      continue;
    }
    const bool seen =
        std::any_of(region.traces.begin(), region.traces.end(),
                    [&trace](const StepTrace& other) { return other.size == trace.size; });
    if (seen) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("a step of {} rows was traced already", trace.size.rows));
    }
    region.traces.push_back(std::move(trace));
    PLIMSOLL_TRY(region.model, StepModel::fit(region.traces));
    ++traces_;
    return {};
  }
  Region region;
  region.traces.push_back(std::move(trace));
  PLIMSOLL_TRY(region.model, StepModel::fit(region.traces));
  regions_.push_back(std::move(region));
  ++traces_;
  return {};
}

std::int64_t StepRegions::most_aligned() const noexcept {
  std::int64_t most = 0;
  for (const Region& region : regions_) {
    most = std::max(most, static_cast<std::int64_t>(region.traces.size()));
  }
  return most;
}

std::vector<const StepRegions::Region*> StepRegions::answering(std::int64_t rows) const {
  const Region* below = nullptr;  // Among those that end at or before `rows`, the last to end.
  const Region* above = nullptr;  // Among those that begin at or after it, the first to begin.
  std::vector<const Region*> within;
  for (const Region& region : regions_) {
    if (region.traces.size() < 2) {
      if (region.model.rows_least() != rows) {
        continue;  // One trace says nothing of other sizes.
      }
    }
    if (region.model.rows_least() <= rows && rows <= region.model.rows_most()) {
      within.push_back(&region);
    } else if (region.model.rows_most() < rows) {
      below =
          below == nullptr || region.model.rows_most() > below->model.rows_most() ? &region : below;
    } else {
      above = above == nullptr || region.model.rows_least() < above->model.rows_least() ? &region
                                                                                        : above;
    }
  }
  if (!within.empty()) {
    return within;
  }
  if (below == nullptr && above == nullptr) {
    // No two traces are alike: a larger step stands above what this size needs.
    for (const Region& region : regions_) {
      const bool nearer = above == nullptr || region.model.rows_least() < above->model.rows_least();
      above = region.model.rows_least() >= rows && nearer ? &region : above;
    }
  }
  std::vector<const Region*> found;
  if (below != nullptr) {
    found.push_back(below);
  }
  if (above != nullptr) {
    found.push_back(above);
  }
  return found;
}

Result<StepPrediction> StepRegions::predict(const StepSize& size) const {
  const auto regions = answering(size.rows);
  if (regions.empty()) {
    return fail(ErrorCode::kNotFound, "no two steps did the same things: nothing to predict from");
  }
  StepPrediction highest;
  for (const Region* region : regions) {
    StepPrediction one;
    one.peak = region->model.replay(size, block_bytes_);
    one.traces = static_cast<std::int64_t>(region->traces.size());
    one.rows_most = region->model.rows_most();
    const std::int64_t moving = one.peak.bytes - one.peak.parts.static_bytes;
    const std::int64_t share = region->model.confirmed() ? kUnverifiedShare : kUnverifiedShare / 2;
    one.bound_bytes = one.peak.bytes + moving / share + kMiB;
    if (one.bound_bytes > highest.bound_bytes) {
      highest = std::move(one);
    }
  }
  return highest;
}

Result<DevicePeak> StepRegions::predict_on_device(const StepSize& size,
                                                  const DeviceMemory& memory) const {
  const auto regions = answering(size.rows);
  if (regions.empty()) {
    return fail(ErrorCode::kNotFound, "no two steps did the same things: nothing to predict from");
  }
  DevicePeak highest;
  for (const Region* region : regions) {
    const DevicePeak one = with_bound(replay_on_device(region->model, size, memory));
    highest = one.bound_bytes > highest.bound_bytes ? one : highest;
  }
  return highest;
}

bool StepRegions::predicts(const StepTrace& trace) const {
  const auto regions = answering(trace.size.rows);
  return std::any_of(regions.begin(), regions.end(),
                     [&trace](const Region* region) { return region->model.predicts(trace); });
}

// ---- The planner ----

namespace {

class Planner {
 public:
  Planner(const TraceStep& trace, const PlanOptions& options)
      : trace_(trace), options_(options), regions_(options.block_bytes) {
    plan_.available_bytes = options.available_bytes;
    most_ = options.most_rows;
  }

  Result<BatchPlan> plan() {
    PLIMSOLL_TRY_VOID(check_options());
    PLIMSOLL_TRY_VOID(climb_ladder());
    if (plan_.traced_rows.empty() && too_long_) {
      return tl::unexpected(*too_long_);
    }
    for (int round = 0; round < kRoundsMax;) {
      PLIMSOLL_TRY(const std::int64_t rows, largest());
      if (rows < options_.least_rows) {
        return tl::unexpected(refusal());
      }
      PLIMSOLL_TRY(const bool fits, verify(rows, /*opens_region=*/true));
      if (fits && (plan_.label == PlanLabel::kExact || runs_of(rows) == kRunsOfOneSizeMost)) {
        break;
      }
      round += rows < too_long_rows_ ? 1 : 0;  // One that was too long leaves half of the sizes.
    }
    if (plan_.batch_size == 0) {
      return tl::unexpected(refusal());
    }
    if (regions_.most_aligned() < 2) {
      PLIMSOLL_TRY_VOID(try_real_steps());
    }
    return finish();
  }

 private:
  Result<void> check_options() const {
    if (options_.least_rows < 1 || options_.most_rows < options_.least_rows ||
        options_.multiple < 1 || options_.block_bytes == nullptr ||
        options_.leased_bytes == nullptr) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("a batch between {} and {} rows, in multiples of {}: no such size",
                              options_.least_rows, options_.most_rows, options_.multiple),
                  "min_batch_size, max_batch_size");
    }
    return {};
  }

  [[nodiscard]] StepSize size_of(std::int64_t rows) const {
    return options_.size_of ? options_.size_of(rows) : StepSize{rows, 0, 0};
  }

  // Runs a real step. None: it was refused, or is too long to trace.
  Result<std::optional<StepTrace>> real_step(std::int64_t rows) {
    auto traced = trace_(size_of(rows));
    if (traced) {
      return std::move(*traced);
    }
    if (too_long_to_trace(traced.error())) {
      too_long_rows_ = std::min(too_long_rows_, rows);
      too_long_ = std::move(traced).error();
    } else if (traced.error().code != ErrorCode::kOverBudget) {
      return tl::unexpected(std::move(traced).error());
    }
    return std::nullopt;
  }

  // Small steps until three of them do the same things.
  Result<void> climb_ladder() {
    std::int64_t unit = std::max<std::int64_t>(1, options_.first_rows / 4);
    while (4 * unit < options_.least_rows) {
      unit *= 2;
    }
    std::vector<std::int64_t> ladder;
    for (; ladder.size() < kLadderMax; unit *= 2) {
      for (const std::int64_t quarter : {4, 6}) {
        ladder.push_back(unit * quarter);
      }
    }
    for (std::size_t k = 0; k < ladder.size(); ++k) {
      const std::int64_t rows = std::min(ladder[k], options_.most_rows);
      if (!plan_.traced_rows.empty() && plan_.traced_rows.back() >= rows) {
        break;  // The largest size allowed has been traced.
      }
      PLIMSOLL_TRY(const bool ran, look_at(rows));
      if (!ran && plan_.traced_rows.empty()) {
        return descend(rows / 2);
      }
      if (!ran || regions_.most_aligned() >= 3) {
        break;
      }
    }
    return {};
  }

  // Even the first was refused: halves of it, and what lies below the one that fits.
  Result<void> descend(std::int64_t rows) {
    bool ran = false;
    for (; !ran && rows >= options_.least_rows; rows = ran ? rows : rows / 2) {
      PLIMSOLL_TRY(ran, look_at(rows));
    }
    for (const std::int64_t part : {3, 2}) {
      const std::int64_t less = rows * part / 4;
      if (ran && less >= options_.least_rows && less < plan_.traced_rows.back()) {
        PLIMSOLL_TRY_VOID(look_at(less));
      }
    }
    return {};
  }

  // Traces one size. False: there is no trace, and larger ones need not be tried.
  Result<bool> look_at(std::int64_t rows) {
    PLIMSOLL_TRY(auto traced, real_step(rows));
    if (!traced) {
      most_ = std::min(most_, rows - 1);
      refused_rows_ = std::min(refused_rows_, rows);
      return false;
    }
    plan_.traced_rows.push_back(rows);
    PLIMSOLL_TRY_VOID(regions_.add(std::move(*traced)));
    return true;
  }

  [[nodiscard]] Result<bool> fits(std::int64_t rows) const {
    const auto predicted = regions_.predict(size_of(rows));
    const std::int64_t needed =
        predicted ? options_.leased_bytes(predicted->peak.bytes) : INT64_MAX;
    if (needed > options_.available_bytes || !fits_device(rows)) {
      return false;
    }
    if (!options_.room_for) {
      return true;
    }
    PLIMSOLL_TRY(const std::int64_t room, options_.room_for(rows));
    return needed <= room;
  }

  [[nodiscard]] bool fits_device(std::int64_t rows) const {
    if (!options_.device) {
      return true;
    }
    const auto peak = regions_.predict_on_device(size_of(rows), *options_.device);
    return peak && peak->bound_bytes <= peak->limit_bytes;
  }

  // The device's part of the answer, from its prediction or, where it did something else, from the
  // very step that ran. False: it does not fit.
  Result<bool> settle_device(const StepTrace& traced, bool as_predicted) {
    if (!options_.device) {
      return true;
    }
    DevicePeak peak;
    if (as_predicted) {
      PLIMSOLL_TRY(peak, regions_.predict_on_device(traced.size, *options_.device));
    } else {
      PLIMSOLL_TRY(const StepModel model, StepModel::fit({&traced, 1}));
      peak = with_bound(replay_on_device(model, traced.size, *options_.device));
    }
    if (peak.bound_bytes <= peak.limit_bytes) {
      plan_.device = peak;
      return true;
    }
    refused_ = {traced.size.rows, peak.bound_bytes};
    return false;
  }

  // The largest size allowed that is predicted to fit; 0 for none.
  [[nodiscard]] Result<std::int64_t> largest() const {
    if (most_ < options_.least_rows) {
      return 0;
    }
    PLIMSOLL_TRY(const bool any, fits(options_.least_rows));
    if (!any) {
      return 0;
    }
    // In units of the multiple; 0 stands for least_rows itself.
    std::int64_t low = 0;
    std::int64_t high = most_ / options_.multiple;
    while (low < high) {
      const std::int64_t middle = low + (high - low + 1) / 2;
      PLIMSOLL_TRY(const bool good,
                   fits(std::max(options_.least_rows, middle * options_.multiple)));
      low = good ? middle : low;
      high = good ? high : middle - 1;
    }
    return std::max(options_.least_rows, low * options_.multiple);
  }

  // Runs a real step of this size. True: it fits, and is the answer so far.
  Result<bool> verify(std::int64_t rows, bool opens_region) {
    const StepSize size = size_of(rows);
    const auto predicted = regions_.predict(size);
    VerifiedStep step{rows, predicted ? predicted->peak.bytes : 0, 0, false};
    PLIMSOLL_TRY(auto traced, real_step(rows));
    if (!traced) {
      plan_.verified.push_back(step);
      does_not_fit(rows);
      return false;
    }
    step.measured_bytes = traced->live_peak_bytes;
    step.as_predicted = predicted && predicted->traces >= 2 && regions_.predicts(*traced) &&
                        predicted->peak.bytes == traced->live_peak_bytes;
    plan_.verified.push_back(step);
    std::int64_t room = options_.available_bytes;
    if (options_.room_for) {
      PLIMSOLL_TRY(room, options_.room_for(rows));
    }
    if (traced->leased_peak_bytes > room) {
      does_not_fit(rows);
      return false;
    }
    PLIMSOLL_TRY(const bool on_device, settle_device(*traced, step.as_predicted));
    if (on_device) {
      PLIMSOLL_TRY_VOID(accept(*traced, step.as_predicted, room));
    } else {
      does_not_fit(rows);
    }
    if (opens_region && !(on_device && step.as_predicted)) {
      (void)regions_.add(std::move(*traced));  // One more of a size known: it says nothing new.
      PLIMSOLL_TRY_VOID(widen(rows));
    }
    return on_device;
  }

  [[nodiscard]] std::int64_t runs_of(std::int64_t rows) const {
    return std::count_if(plan_.verified.begin(), plan_.verified.end(),
                         [rows](const VerifiedStep& one) { return one.rows == rows; });
  }

  void does_not_fit(std::int64_t rows) {
    // How long a step is grows as its rows do, or not at all: far less is tried.
    const std::int64_t less = rows >= too_long_rows_ ? rows / 2 : rows / 16;
    most_ = rows - std::max<std::int64_t>(1, less);
    refused_rows_ = std::min(refused_rows_, rows);
  }

  Result<void> accept(const StepTrace& traced, bool as_predicted, std::int64_t room) {
    // Of a step that was not predicted the trace tells who holds its peak.
    PLIMSOLL_TRY(const StepModel model, StepModel::fit({&traced, 1}));
    plan_.peak = model.replay(traced.size, options_.block_bytes);
    plan_.peak.bytes = std::max(plan_.peak.bytes, traced.live_peak_bytes);
    plan_.batch_size = traced.size.rows;
    plan_.available_bytes = room;
    plan_.leased_bytes =
        std::max(options_.leased_bytes(traced.live_peak_bytes), traced.leased_peak_bytes);
    plan_.step_seconds = traced.seconds;
    accepted_ = model;
    plan_.label = as_predicted ? PlanLabel::kExact : PlanLabel::kBounded;
    return {};
  }

  // Where no two traces are alike nothing can be predicted, and only real steps tell: twice the
  // size until one does not fit, then sizes between.
  Result<void> try_real_steps() {
    const auto allowed = [this](std::int64_t rows) {
      return rows / options_.multiple * options_.multiple;
    };
    const std::int64_t end = std::min(refused_rows_, options_.most_rows + 1);
    std::int64_t low = plan_.batch_size;
    std::int64_t high = end;
    for (bool doubling = true; doubling;) {
      const std::int64_t next = allowed(std::min(2 * low, high - 1));
      doubling = next > low;
      if (doubling) {
        PLIMSOLL_TRY(doubling, verify(next, /*opens_region=*/false));
        (doubling ? low : high) = next;
      }
    }
    for (int k = 0; k < kHalvings; ++k) {
      const std::int64_t middle = allowed(low + (high - low) / 2);
      if (middle <= low || high > options_.most_rows) {
        break;
      }
      PLIMSOLL_TRY(const bool fits, verify(middle, /*opens_region=*/false));
      (fits ? low : high) = middle;
    }
    return {};
  }

  // Two more sizes beside one that did something new, so that its region has a model.
  Result<void> widen(std::int64_t rows) {
    for (const std::int64_t part : {14, 12}) {
      const std::int64_t near = std::max(options_.least_rows, rows * part / 16);
      const auto& known = plan_.traced_rows;
      if (near < rows && std::find(known.begin(), known.end(), near) == known.end()) {
        PLIMSOLL_TRY_VOID(look_at(near));
      }
    }
    return {};
  }

  // A step that was not as predicted is believed when a second one of its size does the same.
  Result<void> repeat() {
    PLIMSOLL_TRY(const auto again, real_step(plan_.batch_size));
    if (!again) {
      return {};
    }
    const bool same = accepted_.predicts(*again) && again->live_peak_bytes == plan_.peak.bytes;
    plan_.peak.bytes = std::max(plan_.peak.bytes, again->live_peak_bytes);
    plan_.leased_bytes = std::max(
        {plan_.leased_bytes, again->leased_peak_bytes, options_.leased_bytes(plan_.peak.bytes)});
    plan_.label = same ? PlanLabel::kExact : PlanLabel::kBounded;
    return {};
  }

  Result<BatchPlan> finish() {
    if (plan_.label != PlanLabel::kExact && !plan_.device) {
      PLIMSOLL_TRY_VOID(repeat());
    }
    const std::int64_t rows = plan_.batch_size;
    const std::int64_t units = (6 * rows + 5 * options_.multiple - 1) / (5 * options_.multiple);
    plan_.larger_rows = units * options_.multiple;
    const std::int64_t before = std::max<std::int64_t>(1, rows * 7 / 8);
    const auto less = regions_.predict(size_of(before));
    const auto same = regions_.predict(size_of(rows));
    const auto more = regions_.predict(size_of(plan_.larger_rows));
    if (rows > before && less && same) {
      plan_.bytes_per_row =
          std::max<std::int64_t>(0, (same->peak.bytes - less->peak.bytes) / (rows - before));
    }
    // Of a few rows there may be one trace, which says nothing of other sizes: in proportion.
    plan_.larger_leased_bytes = more ? options_.leased_bytes(more->peak.bytes)
                                     : plan_.leased_bytes / rows * plan_.larger_rows;
    plan_.larger_leased_bytes = std::max(plan_.larger_leased_bytes, plan_.leased_bytes);
    plan_.at_most_rows = rows + options_.multiple > options_.most_rows;
    plan_.advice = advice();
    if (plan_.device) {
      plan_.label = PlanLabel::kBounded;  // No step has run there.
      PLIMSOLL_TRY_VOID(advise_on_device());
    }
    return plan_;
  }

  // Where the device holds the batch, its limit is what to change.
  Result<void> advise_on_device() {
    if (plan_.at_most_rows) {
      return {};
    }
    Wanted wanted = refused_.rows > plan_.batch_size ? refused_ : Wanted{};
    if (wanted.rows == 0) {
      const std::int64_t next = (plan_.batch_size / options_.multiple + 1) * options_.multiple;
      if (fits_device(next)) {
        return {};
      }
      // Fragmentation may be worse at the next size than at a larger one.
      for (const std::int64_t rows : {next, plan_.larger_rows}) {
        PLIMSOLL_TRY(const DevicePeak peak,
                     regions_.predict_on_device(size_of(rows), *options_.device));
        wanted = {rows, std::max(wanted.bytes, peak.bound_bytes)};
      }
    }
    plan_.advice = fmt::format(
        "the device holds the batch at {} rows: {} rows want a --device-memory-limit "
        "of {}MiB; {}",
        plan_.batch_size, wanted.rows, wanted.bytes / kMiB, plan_.advice);
    return {};
  }

  [[nodiscard]] std::string advice() const {
    if (plan_.at_most_rows) {
      return fmt::format(
          "memory is not what holds the batch at {} rows: max_batch_size (or the data) is",
          plan_.batch_size);
    }
    const PeakParts& parts = plan_.peak.parts;
    const std::int64_t rest = plan_.peak.bytes;
    const auto share = [rest](std::int64_t bytes) { return rest > 0 ? 100 * bytes / rest : 0; };
    std::string what;
    if (parts.activation_bytes >= parts.static_bytes &&
        parts.activation_bytes >= parts.gradient_bytes) {
      what = fmt::format(
          "activations are {} % of the peak: checkpointing segments of the model, bfloat16 "
          "autocast, or accumulating over smaller micro-batches would buy the most room",
          share(parts.activation_bytes));
    } else if (parts.static_bytes >= parts.gradient_bytes + parts.temporary_bytes) {
      what = fmt::format(
          "what stays from step to step (parameters, optimizer states, teacher) is {} % of the "
          "peak: a teacher that is offloaded or whose outputs are cached, an optimizer with fewer "
          "states, or a smaller model would buy the most room",
          share(parts.static_bytes));
    } else {
      what = fmt::format("gradients and temporaries are {} % of the peak, made in {}",
                         share(parts.gradient_bytes + parts.temporary_bytes),
                         plan_.peak.op.empty() ? "no operator" : plan_.peak.op);
    }
    if (too_long_) {
      return fmt::format(
          "a step of {} rows is too long to be planned: batch_size would take it; {}",
          too_long_rows_, what);
    }
    if (plan_.bytes_per_row > 0) {
      what += fmt::format(
          "; a limit {} larger would take {} rows more",
          format_bytes(std::max<std::int64_t>(kMiB, plan_.bytes_per_row * plan_.batch_size / 4)),
          std::max<std::int64_t>(1, plan_.batch_size / 4));
    }
    return what;
  }

  // Of what is refused although the process has room for it.
  [[nodiscard]] Error device_refusal(const DevicePeak& peak) const {
    Error error = make_error(
        ErrorCode::kOverBudget,
        fmt::format("a step of {} rows would make the device reserve {}, and its limit is {}; "
                    "--device-memory-limit {}MiB would do",
                    options_.least_rows, format_bytes(peak.bound_bytes),
                    format_bytes(peak.limit_bytes), peak.bound_bytes / kMiB),
        kDeviceAdvice);
    error.tag = Tag::kTensor;
    error.requested_bytes = peak.bound_bytes;
    error.available_bytes = peak.limit_bytes;
    error.limit_bytes = peak.limit_bytes;
    error.smallest_limit_bytes = peak.bound_bytes;
    return error;
  }

  // What the least step lacks on the device, if that is all that it lacks.
  [[nodiscard]] std::optional<DevicePeak> lacking_on_device() const {
    const auto on_host = regions_.predict(size_of(options_.least_rows));
    if (!options_.device || !on_host ||
        options_.leased_bytes(on_host->peak.bytes) > options_.available_bytes) {
      return std::nullopt;
    }
    const auto peak = regions_.predict_on_device(size_of(options_.least_rows), *options_.device);
    return peak && peak->bound_bytes > peak->limit_bytes ? std::optional(*peak) : std::nullopt;
  }

  [[nodiscard]] Error refusal() const {
    if (const auto lacking = lacking_on_device()) {
      return device_refusal(*lacking);
    }
    const auto predicted = regions_.predict(size_of(options_.least_rows));
    // Without a prediction only this is known: what there is was not enough.
    std::int64_t room = options_.available_bytes;
    std::int64_t needed = 2 * room;
    if (!predicted && options_.estimate_least) {
      needed = options_.estimate_least().value_or(needed);
    }
    needed = std::max(needed, room + kMiB);
    if (predicted) {
      needed = options_.leased_bytes(predicted->bound_bytes);
      if (options_.room_for) {
        room = options_.room_for(options_.least_rows).value_or(0);
      }
      needed = std::max(needed, room + 1);
    }
    const std::int64_t limit = smallest_limit(options_.limit_bytes, room, needed);
    Error error = make_error(
        ErrorCode::kOverBudget,
        fmt::format("a step of {} rows needs about {} of tensors, and {} is left for them; a limit "
                    "of {} MiB would do",
                    options_.least_rows, format_bytes(needed), format_bytes(room), limit / kMiB),
        "raise the limit, lower min_batch_size, or make the model smaller");
    error.tag = Tag::kTensor;
    error.requested_bytes = needed;
    error.available_bytes = room;
    error.limit_bytes = options_.limit_bytes;
    error.smallest_limit_bytes = limit;
    return error;
  }

  // What a size wants of the device.
  struct Wanted {
    std::int64_t rows{0};
    std::int64_t bytes{0};
  };

  const TraceStep& trace_;
  const PlanOptions& options_;
  Wanted refused_;  // The last size that ran, and that the device does not hold.
  StepRegions regions_;
  BatchPlan plan_;
  StepModel accepted_;  // Of the very step that plan_ is of.
  std::int64_t most_{0};
  std::int64_t refused_rows_{INT64_MAX};   // The least size of which a real step did not fit.
  std::int64_t too_long_rows_{INT64_MAX};  // The least that was too long to trace, …
  std::optional<Error> too_long_;          // … and what was said of the last such.
};

}  // namespace

Result<BatchPlan> plan_batch(const TraceStep& trace, const PlanOptions& options) {
  PlanOptions bounded = options;
  bounded.most_rows = std::min(options.most_rows, kRowsMost);
  return Planner(trace, bounded).plan();
}

}  // namespace plimsoll
