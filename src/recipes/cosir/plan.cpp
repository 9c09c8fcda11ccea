// SPDX-License-Identifier: Apache-2.0
//
// See cosir_plan.h.
//
// Threads: the thread that trains.   Memory: see cosir_plan.h.
#include "recipes/cosir/plan.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/check.h"
#include "plimsoll/bytes.h"
#include "plimsoll/torch.h"
#include "recipes/cosir/data.h"
#include "recipes/cosir/eval.h"
#include "recipes/cosir/loss.h"
#include "recipes/cosir/rehearsal.h"
#include "recipes/cosir/settle.h"
#include "recipes/cosir/state.h"
#include "recipes/cosir/step.h"
#include "run/plan_json.h"
#include "torch/admission.h"
#include "torch/arena_pages.h"
#include "torch/device_plan.h"
#include "torch/step_tracer.h"

namespace plimsoll {
namespace {

using namespace cosir;

constexpr std::int64_t kFirstRows = 256;  // Steps up to this size are traced on one batch.
constexpr std::int64_t kTracedFrom =
    96;  // Rotation and radius terms look at 64 and 50 rows at most.
constexpr std::int64_t kMultiple = 16;
constexpr int kAttemptsMax = 4;
constexpr std::size_t kOpenedMax = 64;  // Sizes whose room is remembered.

// A folder for a table that nobody trains, removed with this object.
class ScratchFolder {
 public:
  static Result<ScratchFolder> make(const std::filesystem::path& beside) {
    ScratchFolder folder;
    folder.path_ = beside;
    folder.path_ += fmt::format(".plan-{}", ::getpid());
    std::error_code failed;
    std::filesystem::create_directories(folder.path_, failed);
    if (failed) {
      return fail_io(failed.value(), folder.path_.string(), "name another --out");
    }
    return folder;
  }
  ScratchFolder() = default;
  ScratchFolder(ScratchFolder&& other) noexcept : path_(std::exchange(other.path_, {})) {}
  ScratchFolder& operator=(ScratchFolder&& other) noexcept {
    std::swap(path_, other.path_);
    return *this;
  }
  ~ScratchFolder() {
    std::error_code ignored;
    if (!path_.empty()) {
      std::filesystem::remove_all(path_, ignored);
    }
  }
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// What a run admits for so many live bytes: see with_margin() and Run::admit().
std::int64_t admitted_bytes(std::int64_t live_bytes) {
  return with_margin(arena_leased_bytes(live_bytes));
}

class Planning {
 public:
  // `device`: nullptr for the host alone.
  Planning(const CosirConfig& config, Governor governor, std::filesystem::path folder,
           const DeviceBackend* device)
      : config_(config),
        governor_(std::move(governor)),
        folder_(std::move(folder)),
        device_(device) {}

  Result<CosirPlan> plan() {
    PLIMSOLL_TRY_VOID(open(kFirstRows));
    const std::int64_t train_rows = data_->split().train_rows();
    std::int64_t most = std::min(kAutoRowsMax, train_rows / kAutoStepsMin);
    most = std::max(std::min<std::int64_t>(most / kMultiple * kMultiple, train_rows),
                    std::min<std::int64_t>(kMultiple, train_rows));
    for (int attempt = 0; attempt < kAttemptsMax; ++attempt) {
      PLIMSOLL_TRY(CosirPlan plan, plan_up_to(most));
      plan.train_rows = train_rows;
      PLIMSOLL_TRY(const bool fits, evaluation_fits(&plan));
      if (fits) {
        if (plan.batch.at_most_rows) {
          plan.batch.advice =
              fmt::format("memory would take more: auto keeps to {} rows, and to {} steps an epoch",
                          kAutoRowsMax, kAutoStepsMin);
        }
        return plan;
      }
      most = std::max<std::int64_t>(2, plan.batch.batch_size * 7 / 8 / kMultiple * kMultiple);
    }
    return fail(ErrorCode::kOverBudget, "no batch was found whose evaluation fits too",
                "raise --memory-limit or lower --eval-pairs");
  }

 private:
  // Data for batches of so many rows, as a run would open it, and its first batch.
  Result<void> open(std::int64_t rows) {
    stepper_.reset();
    batch_.reset();
    pinned_ = {};
    data_.reset();
    TensorArena::purge();
    std::error_code ignored;
    std::filesystem::remove_all(folder_ / "embeddings", ignored);
    config_.batch_size = rows;
    PLIMSOLL_TRY(data_, Data::open(governor_, config_,
                                   {.embeddings = folder_ / "embeddings", .at_step = -1}));
    if (!state_) {
      PLIMSOLL_TRY(const ModelShape shape,
                   resolve_shape(config_, data_->image_dim(), data_->text_dim()));
      state_.emplace(config_, shape);
    }
    stepper_.emplace(config_, &*state_, data_.get());
    PLIMSOLL_TRY_VOID(data_->rows().begin_epoch(0));
    if (device_ != nullptr) {
      PLIMSOLL_TRY(pinned_, lease_pinned(governor_, data_->loader().slot_bytes()));
    }
    opened_rows_ = rows;
    return {};
  }

  // The device as the data is open: a batch of the loader is a block on it.
  DeviceMemory memory_of_device() {
    DeviceMemory memory = device_memory(*device_, state_->tensors());
    const std::int64_t slot = data_->loader().slot_bytes();
    const std::int64_t row_bytes = (slot + opened_rows_ - 1) / opened_rows_;
    memory.batch_bytes = [row_bytes](std::int64_t rows) { return rows * row_bytes; };
    return memory;
  }

  Result<void> first_batch() {
    if (batch_ == nullptr) {
      batch_ = std::make_shared<Batch>();
      PLIMSOLL_TRY_VOID(data_->loader().next(*batch_));
    }
    return {};
  }

  Result<StepTrace> trace(const StepSize& size) {
    if (size.rows > opened_rows_ || opened_rows_ > std::max(kFirstRows, size.rows)) {
      PLIMSOLL_TRY_VOID(open(std::max(kFirstRows, size.rows)));
    }
    PLIMSOLL_TRY_VOID(first_batch());
    const std::int64_t rows = std::min(size.rows, batch_->rows());
    return trace_step(size, [&]() -> Result<void> {
      Gradients made;
      PLIMSOLL_TRY(made, stepper_->phase1(batch_, rows));
      if (config_.phase2_epochs > 0) {
        made = Gradients{};
        PLIMSOLL_TRY(made, stepper_->phase2(batch_, rows));
      }
      return {};
    });
  }

  // What a run of this batch size leaves for tensors; 0 when its data does not fit.
  Result<std::int64_t> room_for(std::int64_t rows) {
    const auto known = room_.find(rows);
    if (known != room_.end()) {
      return known->second;
    }
    std::int64_t room = 0;
    const auto opened = open(rows);
    if (opened) {
      room = left_for_tensors(governor_.state());
    } else if (opened.error().code != ErrorCode::kOverBudget) {
      return tl::unexpected(opened.error());
    } else {
      PLIMSOLL_TRY_VOID(open(kFirstRows));
    }
    if (room_.size() < kOpenedMax) {
      room_.emplace(rows, room);
    }
    return room;
  }

  Result<CosirPlan> plan_up_to(std::int64_t most) {
    PlanOptions options;
    options.least_rows = std::min<std::int64_t>(2, most);
    options.most_rows = most;
    options.multiple = kMultiple;
    options.first_rows = kTracedFrom;
    const LedgerState state = governor_.state();
    options.limit_bytes = state.limit_bytes;
    options.available_bytes = left_for_tensors(state);
    options.room_for = [this](std::int64_t rows) { return room_for(rows); };
    options.block_bytes = &arena_block_bytes;
    options.leased_bytes = &admitted_bytes;
    if (device_ != nullptr) {
      options.device = memory_of_device();
    }
    CosirPlan plan;
    PLIMSOLL_TRY(plan.batch,
                 plan_batch([this](const StepSize& size) { return trace(size); }, options));
    return plan;
  }

  // Opens the answer once more, evaluates as a run does before its first step, and fills in.
  Result<bool> evaluation_fits(CosirPlan* plan) {
    if (opened_rows_ != plan->batch.batch_size) {
      PLIMSOLL_TRY_VOID(open(plan->batch.batch_size));
    }
    batch_.reset();
    const LedgerState state = governor_.state();
    const std::int64_t room = left_for_tensors(state);
    if (config_.eval_pairs > 0 && data_->split().held_out_rows() > 0) {
      auto peak = measure_peak([&]() -> Result<void> {
        PLIMSOLL_TRY(const Evaluation seen,
                     evaluate(state_->model, data_->held_out(config_.eval_pairs), data_->trained(),
                              eval_options(config_, 1)));
        static_cast<void>(seen);
        return {};
      });
      if (!peak && peak.error().code != ErrorCode::kOverBudget) {
        return tl::unexpected(std::move(peak).error());
      }
      if (!peak || with_margin(*peak) > room) {
        return false;
      }
      plan->eval_peak_bytes = *peak;
    }
    plan->limit_bytes = state.limit_bytes;
    plan->baseline_bytes = state.baseline_bytes;
    plan->store_bytes = data_->bytes().store;
    plan->cache_bytes = data_->bytes().cache;
    plan->queue_bytes = data_->bytes().queue;
    plan->foreign_bytes = config_.foreign_bytes;
    if (plan->batch.device) {
      plan->batch.device->pinned_bytes = pinned_.bytes();
    }
    return true;
  }

  CosirConfig config_;
  Governor governor_;
  std::filesystem::path folder_;
  const DeviceBackend* device_;
  Lease pinned_;
  std::optional<State> state_;
  std::unique_ptr<Data> data_;
  std::optional<Stepper> stepper_;
  std::shared_ptr<Batch> batch_;
  std::int64_t opened_rows_{0};
  std::map<std::int64_t, std::int64_t> room_;  // At most kOpenedMax.
};

// `plan` is of the options as they are; the other way of each choice is planned after it.
Result<std::vector<PlanChoice>> weigh(const CosirConfig& config, const Governor& governor,
                                      const std::filesystem::path& folder,
                                      const DeviceBackend* device, const CosirPlan& plan) {
  const auto choice = [](const CosirConfig& with, const BatchPlan& batch, bool configured) {
    return PlanChoice{.options = fmt::format("gradient_caching = {}", with.gradient_caching),
                      .batch = batch,
                      .rows_per_second = static_cast<double>(batch.batch_size) / batch.step_seconds,
                      .configured = configured};
  };
  std::vector<PlanChoice> choices{choice(config, plan.batch, true)};
  CosirConfig other = config;
  other.gradient_caching = !config.gradient_caching;
  const auto found = Planning{other, governor, folder, device}.plan();
  if (!found && found.error().code != ErrorCode::kOverBudget) {
    return tl::unexpected(found.error());
  }
  if (found) {
    choices.push_back(choice(other, found->batch, false));
  }
  fastest_first(choices);
  return choices;
}

}  // namespace

std::string CosirPlan::to_json() const {
  nlohmann::ordered_json j = batch_json(batch, "bytes_per_row");
  j["limit_bytes"] = limit_bytes;
  j["baseline_bytes"] = baseline_bytes;
  j["store_bytes"] = store_bytes;
  j["cache_bytes"] = cache_bytes;
  j["queue_bytes"] = queue_bytes;
  j["foreign_bytes"] = foreign_bytes;
  j["eval_peak_bytes"] = eval_peak_bytes;
  j["steps_per_epoch"] =
      batch.batch_size > 0 ? (train_rows + batch.batch_size - 1) / batch.batch_size : 0;
  j["step_seconds"] = batch.step_seconds;
  j["traced_rows"] = batch.traced_rows;
  j["advice"] = batch.advice;
  if (!choices.empty()) {
    j["choices"] = choices_json(choices, "row");
  }
  return j.dump();
}

std::string CosirPlan::to_text() const {
  const PeakParts& parts = batch.peak.parts;
  std::string text = fmt::format(
      "batch_size = {} ({}), {} steps an epoch, {:.0f} ms a step\nunder a limit of {}\n",
      batch.batch_size, label_name(batch.label),
      (train_rows + batch.batch_size - 1) / std::max<std::int64_t>(1, batch.batch_size),
      1e3 * batch.step_seconds, format_bytes(limit_bytes));
  const auto line = [&text](const char* name, std::int64_t bytes, const std::string& note) {
    text += fmt::format("  {:<14}{:>12}   {}\n", name, format_bytes(bytes), note);
  };
  line("step", batch.peak.bytes,
       batch.peak.op.empty() ? "tensors at the peak"
                             : fmt::format("tensors at the peak: {} in {}", batch.peak.op,
                                           phase_name(batch.peak.phase)));
  line("  activations", parts.activation_bytes, "");
  line("  gradients", parts.gradient_bytes, "");
  line("  temporaries", parts.temporary_bytes, "");
  line("  static", parts.static_bytes, "parameters, optimizer states");
  line("evaluation", eval_peak_bytes, "tensors at its peak");
  line("store", store_bytes, "rows in memory (store_bytes)");
  line("features", cache_bytes, "feature cache (cache_bytes)");
  line("ring", queue_bytes, "batches ahead (queue_bytes)");
  line("foreign", foreign_bytes, "code and kernels' scratch (foreign_bytes)");
  line("baseline", baseline_bytes, "the process before the run");
  text += device_text(batch);
  text += fmt::format("one pair more: {}\n{}", format_bytes(batch.bytes_per_row), batch.advice);
  return text + choices_text(choices, "a step", "row");
}

Result<CosirPlan> plan_cosir(const CosirSettings& settings, bool weigh_choices,
                             const DeviceChoice& choice) {
  const CosirConfig& config = settings.config();
  PLIMSOLL_TRY(const auto device, open_device(choice));  // Its libraries are in the baseline.
  const std::filesystem::path beside = config.out.empty()
                                           ? std::filesystem::current_path() / "plimsoll"
                                           : std::filesystem::path(config.out);
  PLIMSOLL_TRY(const ScratchFolder folder, ScratchFolder::make(beside));
  Result<CosirPlan> plan = fail(ErrorCode::kInternal, "planning did not end");
  std::int64_t baseline_bytes = 0;
  if (auto settled = settle(config, folder.path()); !settled) {
    baseline_bytes = settled.error().baseline_bytes;
    plan = tl::unexpected(std::move(settled).error());
  } else {
    const Governor governor = std::move(*settled);
    baseline_bytes = governor.state().baseline_bytes;
    const auto done = without_refusal([&]() -> Result<void> {
      plan = Planning{config, governor, folder.path(), device.get()}.plan();
      if (plan && weigh_choices) {
        PLIMSOLL_TRY(plan->choices, weigh(config, governor, folder.path(), device.get(), *plan));
      }
      return {};
    });
    if (!done) {
      plan = tl::unexpected(done.error());
    }
    if (!plan && !refused_by_device(plan.error())) {
      plan.error().limit_bytes = governor.state().limit_bytes;
    }
  }
  TensorArena::detach();
  if (!plan && plan.error().code == ErrorCode::kOverBudget && !refused_by_device(plan.error())) {
    CosirConfig automatic = config;
    automatic.batch_size = 0;
    if (const auto shares = shares_of(automatic); device != nullptr && shares) {
      automatic.foreign_bytes += shares->queue;  // Pinned are two batches: no more than the ring.
    }
    Error error = std::move(plan).error();
    error.smallest_limit_bytes = 0;  // It spoke of the tensors of two rows alone.
    plan =
        tl::unexpected(refused_before_start(automatic, baseline_bytes, nullptr, std::move(error)));
  }
  return plan;
}

}  // namespace plimsoll
