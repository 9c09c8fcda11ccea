// SPDX-License-Identifier: Apache-2.0
//
// plan_batch: the largest batch whose step fits, from real steps at a few sizes.
//
// It traces small steps, models them (step_model.h), searches the largest size that the model
// admits, and runs one real step of that size. Where that step did something else than predicted
// (kernels choose other algorithms for other sizes), its trace opens a new region of sizes and the
// search goes on there. Where no prediction comes true (a Python loop over the rows does something
// else at every size), real steps of twice the size are run until one does not fit, then of sizes
// between. Source: docs/decisions/0011-plans-from-replayed-traces.md.
// Reading order: step_trace.h, step_model.h, this file.
//
// Threads: the thread that trains.
// Memory:  at most kTracesMax traces (step_trace.h), each with a model of its own (step_model.h)
// when
//          no two are alike: 89 bytes an event, 6 MiB for 32 traces of 2,000 events, 712 MiB if
//          each filled the ring. Not leased: it is given back before anything is admitted.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "plan/device_replay.h"
#include "plan/step_model.h"
#include "plan/step_trace.h"
#include "plimsoll/result.h"

namespace plimsoll {

inline constexpr int kTracesMax = 32;

/// How far an answer may be trusted.
enum class PlanLabel : std::uint8_t {
  kExact,    ///< A real step of this size did, block by block, what two other sizes or more said,
             ///< or what a second one of this size did.
  kBounded,  ///< A real step of this size fitted, and another did something else.
};

/// "exact" or "bounded". (A plan from shapes alone, made in Python, says "estimate".)
[[nodiscard]] const char* label_name(PlanLabel label) noexcept;

/// What is said of a step of one size, before it has run.
struct StepPrediction {
  ReplayedPeak peak{};  ///< As replayed.
  /// Room for other algorithms on top of the peak: an eighth of what is not static (a quarter
  /// where a block's formula has no trace to confirm it) and 1 MiB. A step may pass it.
  std::int64_t bound_bytes{0};
  std::int64_t traces{0};     ///< Of so many sizes; of 1, it is that very step.
  std::int64_t rows_most{0};  ///< The largest of them.
};

/// Traces of one step at several sizes, in regions within which it does the same things.
class StepRegions {
 public:
  explicit StepRegions(BlockBytes block_bytes) : block_bytes_(block_bytes) {}

  /// Errors: kInvalidArgument for a size already there, or the kTracesMax + 1st.
  Result<void> add(StepTrace trace);

  /// Errors: kNotFound while no two traces are of one region.
  [[nodiscard]] Result<StepPrediction> predict(const StepSize& size) const;

  /// What a device would hold; the larger answer where two regions speak for a size. Errors: as
  /// predict().
  [[nodiscard]] Result<DevicePeak> predict_on_device(const StepSize& size,
                                                     const DeviceMemory& memory) const;

  /// Whether the region that would answer for the trace's size predicts it to the byte.
  [[nodiscard]] bool predicts(const StepTrace& trace) const;

  /// The most traces any region has.
  [[nodiscard]] std::int64_t most_aligned() const noexcept;
  [[nodiscard]] std::int64_t regions() const noexcept {
    return static_cast<std::int64_t>(regions_.size());
  }

 private:
  struct Region {
    std::vector<StepTrace> traces;
    StepModel model;
  };
  // The regions that speak for a size: one, or two neighbours when it lies between them.
  [[nodiscard]] std::vector<const Region*> answering(std::int64_t rows) const;

  BlockBytes block_bytes_;
  std::vector<Region> regions_;
  int traces_{0};
};

/// A real step that was compared with its prediction.
struct VerifiedStep {
  std::int64_t rows{0};
  std::int64_t predicted_bytes{0};
  std::int64_t measured_bytes{0};  ///< 0: it was refused.
  bool as_predicted{false};
};

struct BatchPlan {
  std::int64_t batch_size{0};
  PlanLabel label{PlanLabel::kBounded};
  ReplayedPeak peak{};
  std::int64_t leased_bytes{0};     ///< What to admit for tensors.
  std::int64_t available_bytes{0};  ///< What tensors may have.
  std::int64_t bytes_per_row{0};    ///< One row more at this size, in bytes of peak.
  double step_seconds{0.0};
  bool at_most_rows{false};             ///< The memory would take more rows than were allowed.
  std::int64_t larger_rows{0};          ///< A fifth more rows, up to the next multiple, …
  std::int64_t larger_leased_bytes{0};  ///< … and what they would lease, as predicted.
  std::vector<std::int64_t> traced_rows;
  std::vector<VerifiedStep> verified;
  std::string advice;  ///< What would buy more room.
  /// With PlanOptions::device. The label is then kBounded: no step has run on the device.
  std::optional<DevicePeak> device{};
};

struct PlanOptions {
  std::int64_t least_rows{1};
  std::int64_t most_rows{8192};
  /// The first size traced: where the step already does all that it does at larger ones.
  std::int64_t first_rows{8};
  std::int64_t multiple{1};         ///< The answer is a multiple of this, or least_rows.
  std::int64_t available_bytes{0};  ///< What tensors may lease in all.
  std::int64_t limit_bytes{0};      ///< Of which available_bytes is the tensors' part.
  BlockBytes block_bytes{nullptr};
  /// The most that the allocator leases for so many live bytes.
  BlockBytes leased_bytes{nullptr};
  /// What is left for tensors at a size, where more than tensors grows with it; 0: the size does
  /// not fit. Asked only of sizes whose tensors fit into available_bytes.
  std::function<Result<std::int64_t>(std::int64_t)> room_for{};
  /// What least_rows need, for when not even they can be traced. Default: twice what there is.
  std::function<Result<std::int64_t>()> estimate_least{};
  /// The largest step of so many rows. Default: rows alone.
  std::function<StepSize(std::int64_t)> size_of{};
  /// The step must fit this device too: its bound_bytes into limit_bytes. What a device reserves
  /// does not rise with every row: the answer fits, and the size after it does not.
  std::optional<DeviceMemory> device{};
};

/// Whether a plan was refused because of the device; its smallest_limit_bytes is the device's.
[[nodiscard]] bool refused_by_device(const Error& error) noexcept;

/// Runs two steps of so many rows and traces the second.
using TraceStep = std::function<Result<StepTrace>(const StepSize&)>;

/// Errors: kOverBudget when not even least_rows fit, naming the smallest limit that would do (of
/// the process; of the device, when only that is too small: refused_by_device()); kInvalidArgument
/// for options that exclude every size; trace_too_long() when every size is; what else `trace`
/// returns, but for refusals. A size that is too long to trace holds the batch below it.
Result<BatchPlan> plan_batch(const TraceStep& trace, const PlanOptions& options);

}  // namespace plimsoll
