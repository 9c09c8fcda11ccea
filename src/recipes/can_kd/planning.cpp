// SPDX-License-Identifier: Apache-2.0
//
// See planning.h; then `plimsoll plan can-kd`, and how its answer is told.
//
// Threads: the thread that trains.   Memory: see planning.h.
#include "recipes/can_kd/planning.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <utility>

#include "base/check.h"
#include "plimsoll/bytes.h"
#include "plimsoll/torch.h"
#include "recipes/can_kd/can_kd.h"
#include "recipes/can_kd/learner.h"
#include "recipes/can_kd/shapes.h"
#include "recipes/can_kd/step_estimate.h"
#include "recipes/can_kd/teacher_file.h"
#include "recipes/can_kd/training.h"
#include "run/plan_json.h"
#include "torch/admission.h"
#include "torch/device_plan.h"
#include "torch/settle.h"
#include "torch/step_tracer.h"

namespace plimsoll {
namespace can_kd {
namespace {

constexpr std::int64_t kMultiple = 16;
constexpr std::int64_t kFirstGraphs = 32;  // The first size traced.
constexpr std::int64_t kLargeGraph = 2;    // Times the mean, where only that is known.
constexpr std::int64_t kIndexBytes = 40;   // A graph's offsets, label, split and checksum.
constexpr std::int64_t kIndexLeast = 4 << 20;
constexpr std::int64_t kBaselineVaries = 8 << 20;  // From process to process.
constexpr int kProbes = 3;                         // Steps timed; the fastest counts.

// What is admitted later is the peak and a sixteenth.
std::int64_t for_tensors(const Governor& governor) {
  return left_for_tensors(governor.state()) / 17 * 16;
}

}  // namespace

Result<Governor> settle(const CanKdConfig& config, const std::filesystem::path& directory) {
  auto governor = plimsoll::settle({.memory_limit = config.memory_limit,
                                    .disk_limit = config.disk_limit,
                                    .foreign_bytes = config.foreign_bytes,
                                    .compute_threads = config.compute_threads,
                                    .directory = directory});
  if (!governor) {
    const std::int64_t baseline = governor.error().baseline_bytes;
    return tl::unexpected(refused_before_start(config, baseline, std::move(governor).error()));
  }
  return governor;
}

Result<std::unique_ptr<Data>> open_data(const Governor& governor, const CanKdConfig& config) {
  auto data = Data::open(governor, config);
  if (!data) {
    return tl::unexpected(
        refused_before_start(config, governor.state().baseline_bytes, std::move(data).error()));
  }
  return data;
}

bool has_rehearsal(const Task& task) noexcept {
  return task.stage != Stage::kFusion && task.stage != Stage::kEvaluation;
}

Result<Rehearsal> prepare_rehearsal(const Governor& governor, const CanKdConfig& config,
                                    const Data& data, const Task& task) {
  Rehearsal rehearsal;
  if (task.role == Role::kStudent && config.use_kd) {
    TeacherOptions options;
    options.released = config.offload_teacher_to_cpu;
    options.clear_cache_every_n = config.clear_cache_every_n;
    PLIMSOLL_TRY(options.shape,
                 teacher_shape(governor, config, task, data.set().info().table_rows()));
    PLIMSOLL_TRY(rehearsal.teacher, Teacher::open(governor, data.set(), options));
  }
  PLIMSOLL_TRY(
      rehearsal.work,
      Training::make(config, data,
                     {.task = task, .teacher = rehearsal.teacher.get(), .rehearsal = true}));
  return rehearsal;
}

namespace {

// The largest step of so many of these graphs.
StepSize largest_step(const Data& data, std::span<const std::int64_t> among, std::int64_t graphs) {
  StepSize size;
  for (const std::int64_t graph : data.largest(among, graphs)) {
    size.rows += 1;
    const GraphCounts counts = data.set().counts(graph);
    size.nodes += counts.nodes;
    size.edges += counts.edges;
  }
  return size;
}

// Steps of a task, each with its validation, whose models are made in the first of them: they
// themselves may not fit.
class TaskSteps {
 public:
  TaskSteps(const Governor& governor, const CanKdConfig& config, const Data& data, const Task& task,
            std::int64_t graphs)
      : governor_(governor), config_(config), data_(data), task_(task), graphs_(graphs) {}

  [[nodiscard]] StepHints hints() const {
    return {.least_rows = 1, .size_of = [this](std::int64_t rows) {
              return largest_step(data_, data_.train(), rows);
            }};
  }

  [[nodiscard]] DoStep step() {
    return [this](std::int64_t rows) -> Result<void> {
      if (!made_) {
        PLIMSOLL_TRY(made_, prepare_rehearsal(governor_, config_, data_, task_));
      }
      // Smaller ones answer fewer graphs too, so that a line goes through them.
      return made_->work->rehearse(
          rows, std::max<std::int64_t>(1, config_.scoring_chunk * rows / graphs_));
    };
  }

  void forget() { made_.reset(); }

 private:
  const Governor& governor_;
  const CanKdConfig& config_;
  const Data& data_;
  Task task_;
  std::int64_t graphs_;
  std::optional<Rehearsal> made_;
};

// The models of a task; `teacher`: whom it asks, if anybody.
TaskExtent extent_of(const CanKdConfig& config, const Task& task, std::int64_t ids,
                     const TeacherShape& teacher) {
  TaskExtent extent;
  extent.model = task.stage == Stage::kAutoencoder ? extent_of(vgae_shape(config, task.role, ids))
                                                   : extent_of(gat_shape(config, task.role, ids));
  if (task.role == Role::kStudent && config.use_kd) {
    extent.teacher = extent_of(teacher);
  }
  if (task.stage == Stage::kCurriculum && config.use_vgae_mining) {
    extent.scorer = extent_of(vgae_shape(config, task.role, ids));
  }
  return extent;
}

// What a step of so many graphs needs at most. Errors: those of teacher_shape().
Result<std::int64_t> estimate_step(const Governor& governor, const CanKdConfig& config,
                                   const Data& data, const Task& task, std::int64_t graphs) {
  const std::int64_t ids = data.set().info().table_rows();
  TeacherShape teacher = own_teacher_shape(config, task, ids);
  if (task.role == Role::kStudent && config.use_kd) {
    PLIMSOLL_TRY(teacher, teacher_shape(governor, config, task, ids));
  }
  TaskExtent extent = extent_of(config, task, ids, teacher);
  extent.step = largest_step(data, data.train(), graphs);
  for (const auto asked : {data.held_out(), data.set().split(GraphSplit::kTest)}) {
    const StepSize chunk = largest_step(data, asked, config.scoring_chunk);
    extent.answered = chunk.nodes > extent.answered.nodes ? chunk : extent.answered;
  }
  return tensors_at_most(extent, config);
}

// Graphs of a set that is not open, taken to be large ones.
StepSize step_of(const GraphSetInfo& info, std::int64_t graphs) {
  const std::int64_t rows = std::min(graphs, info.graphs);
  const auto large = [&](std::int64_t all) {
    return std::min(all, kLargeGraph * all / std::max<std::int64_t>(1, info.graphs) * rows);
  };
  return {.rows = rows, .nodes = large(info.nodes), .edges = large(info.edges)};
}

// What of a limit the set takes beside its offsets when `free_bytes` are free as it is opened.
std::int64_t cached_bytes(const GraphSetInfo& info, const CanKdConfig& config,
                          std::int64_t free_bytes) {
  const std::int64_t most = config.cache_bytes < 0 ? free_bytes / 2 : config.cache_bytes;
  return info.disk_bytes <= most ? info.disk_bytes : 0;
}

}  // namespace

Error refused_before_start(const CanKdConfig& config, std::int64_t baseline_bytes, Error error) {
  const auto info = GraphSet::inspect(config.data);
  if (!info || error.code != ErrorCode::kOverBudget) {
    return error;
  }
  std::int64_t tensors = 0;
  for (const Task& task : wanted_tasks(config)) {
    if (!has_rehearsal(task)) {
      continue;
    }
    const std::int64_t ids = info->table_rows();
    TaskExtent extent = extent_of(config, task, ids, own_teacher_shape(config, task, ids));
    extent.step = step_of(*info, std::max<std::int64_t>(1, config.batch_size));
    extent.answered = step_of(*info, config.scoring_chunk);
    tensors = std::max(tensors, with_margin(tensors_at_most(extent, config)));
  }
  std::int64_t free = tensors + kIndexBytes * info->graphs + kIndexLeast;
  free += cached_bytes(*info, config, 2 * free);
  const std::int64_t limit = baseline_bytes + config.foreign_bytes + free + kBaselineVaries;
  return with_limit(std::move(error), std::max(limit, error.smallest_limit_bytes));
}

Error beside_the_set(const Governor& governor, const CanKdConfig& config, const Data& data,
                     Error error) {
  if (data.set().cached() || config.cache_bytes >= 0 || error.smallest_limit_bytes == 0) {
    return error;
  }
  const LedgerState state = governor.state();
  const std::int64_t limit = error.smallest_limit_bytes;
  const std::int64_t set =
      cached_bytes(data.set().info(), config, limit - state.limit_bytes + left_for_tensors(state));
  return set == 0 ? error : with_limit(std::move(error), limit + set);
}

Result<std::int64_t> rehearse_task(const Governor& governor, const CanKdConfig& config,
                                   const Data& data, const Task& task, std::int64_t graphs) {
  TaskSteps steps(governor, config, data, task, graphs);
  StepHints hints = steps.hints();
  hints.estimate = [&](std::int64_t rows) {
    steps.forget();
    return estimate_step(governor, config, data, task, rows);
  };
  return rehearse_step(governor, graphs, hints, steps.step());
}

Result<TaskPlan> plan_task(const Governor& governor, const CanKdConfig& config, const Data& data,
                           const Task& task, bool timed, const DeviceBackend* device,
                           std::int64_t most_graphs) {
  const auto graphs = static_cast<std::int64_t>(data.train().size());
  PlanOptions options;
  options.most_rows = std::max<std::int64_t>(
      1, most_graphs > 0 ? std::min(most_graphs, graphs)
                         : std::min(config.batch_size_max, graphs / kAutoStepsMin));
  options.first_rows = std::min<std::int64_t>(kFirstGraphs, options.most_rows);
  options.multiple = most_graphs > 0 ? 1 : std::min(kMultiple, options.most_rows);
  options.size_of = [&](std::int64_t rows) { return largest_step(data, data.train(), rows); };
  options.available_bytes = for_tensors(governor);
  Rehearsal rehearsal;
  options.estimate_least = [&] {
    rehearsal = {};
    return estimate_step(governor, config, data, task, options.least_rows);
  };
  const auto made = without_refusal([&]() -> Result<void> {
    PLIMSOLL_TRY(rehearsal, prepare_rehearsal(governor, config, data, task));
    return {};
  });
  if (!made && made.error().code == ErrorCode::kOverBudget) {
    PLIMSOLL_TRY(const std::int64_t bytes, options.estimate_least());
    return tl::unexpected(
        refused_bytes(governor, "the model of " + task.name(), with_margin(bytes)));
  }
  PLIMSOLL_TRY_VOID(made);
  const auto pin = [&](std::int64_t rows) -> Result<Lease> {
    const StepSize size = options.size_of(rows);
    const GraphCounts counts{.graphs = size.rows, .nodes = size.nodes, .edges = size.edges};
    return lease_pinned(governor, counts.bytes());
  };
  if (device != nullptr) {
    options.device = device_memory(*device, rehearsal.work->tensors());
    options.room_for = [&](std::int64_t rows) -> Result<std::int64_t> {
      const auto pinned = pin(rows);
      return pinned ? for_tensors(governor) : 0;
    };
  }
  auto plan = plan_batch(governor, options, [&](const StepSize& size) {
    return rehearsal.work->rehearse(size.rows, config.scoring_chunk);
  });
  if (!plan && refused_by_device(plan.error())) {
    Error error = std::move(plan).error();
    error.detail = std::make_shared<const std::string>(task.name() + ": " + *error.detail);
    return tl::unexpected(std::move(error));
  }
  if (!plan && plan.error().code == ErrorCode::kOverBudget) {
    return tl::unexpected(refused_bytes(
        governor, fmt::format("{}: a step of {} graphs", task.name(), options.least_rows),
        with_margin(plan.error().requested_bytes)));
  }
  PLIMSOLL_TRY_VOID(plan);
  TaskPlan found{task, std::move(*plan)};
  if (found.batch.device) {
    PLIMSOLL_TRY(const Lease pinned, pin(found.batch.batch_size));
    found.batch.device->pinned_bytes = pinned.bytes();
  }
  if (!timed) {
    return found;
  }
  found.batch.step_seconds = std::numeric_limits<double>::infinity();
  for (int probe = 0; probe < kProbes; ++probe) {
    const auto begin = std::chrono::steady_clock::now();
    PLIMSOLL_TRY_VOID(rehearsal.work->rehearse(found.batch.batch_size, 0));
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    found.batch.step_seconds = std::min(found.batch.step_seconds, took.count());
  }
  return found;
}

Result<std::vector<TaskPlan>> plan_tasks(const Governor& governor, const CanKdConfig& config,
                                         const Data& data, bool timed,
                                         const DeviceBackend* device) {
  std::vector<TaskPlan> plans;
  Refusals refusals;
  for (const Task& task : wanted_tasks(config)) {
    if (has_rehearsal(task)) {
      auto plan = plan_task(governor, config, data, task, timed, device);
      if (plan) {
        plans.push_back(std::move(*plan));
      } else if (refused_by_device(plan.error())) {
        return tl::unexpected(std::move(plan).error());  // It names a limit of the device.
      } else {
        PLIMSOLL_TRY_VOID(refusals.note(Result<void>(tl::unexpected(std::move(plan).error()))));
      }
    }
  }
  if (const auto outcome = refusals.outcome(); !outcome) {
    return tl::unexpected(beside_the_set(governor, config, data, outcome.error()));
  }
  return plans;
}

const TaskPlan& tightest(const std::vector<TaskPlan>& plans) {
  PLIMSOLL_CHECK(!plans.empty(), "a task that was planned");
  return *std::min_element(plans.begin(), plans.end(), [](const auto& one, const auto& other) {
    return one.batch.batch_size < other.batch.batch_size;
  });
}

}  // namespace can_kd

using namespace can_kd;

// ---- plimsoll plan can-kd ----

namespace {

// A choice planned and timed; with `effective_graphs`, for so many graphs an optimizer step.
Result<PlanChoice> weigh_one(const Governor& governor, CanKdConfig chosen, const Data& data,
                             const Task& task, const DeviceBackend* device,
                             std::int64_t effective_graphs, std::string options) {
  const auto planned = [&]() -> Result<PlanChoice> {
    PLIMSOLL_TRY(TaskPlan plan,
                 plan_task(governor, chosen, data, task, /*timed=*/true, device, effective_graphs));
    const auto graphs = static_cast<double>(plan.batch.batch_size);
    return PlanChoice{.options = options,
                      .batch = plan.batch,
                      .rows_per_second = graphs / plan.batch.step_seconds};
  };
  if (effective_graphs == 0) {
    return planned();
  }
  chosen.accumulate_grad_batches = 1;
  auto choice = planned();
  const bool refused = !choice && choice.error().code == ErrorCode::kOverBudget;
  if (refused || (choice && choice->batch.batch_size < effective_graphs)) {
    chosen.accumulate_grad_batches = 2;  // As much memory as any larger number.
    choice = planned();
  }
  PLIMSOLL_TRY_VOID(choice);
  // The fewest micro-batches, and those as even as can be: their peak is at most the planned one.
  const std::int64_t parts =
      (effective_graphs + choice->batch.batch_size - 1) / choice->batch.batch_size;
  choice->batch.batch_size = (effective_graphs + parts - 1) / parts;
  choice->options += fmt::format(", batch_size = {}, accumulate_grad_batches = {}",
                                 choice->batch.batch_size, parts);
  return choice;
}

// The task planned with every choice that moves memory; those that fit, the fastest first.
Result<std::vector<PlanChoice>> weigh(const Governor& governor, const CanKdConfig& config,
                                      const Data& data, const Task& task,
                                      const DeviceBackend* device, std::int64_t effective_graphs) {
  std::vector<PlanChoice> choices;
  const bool taught = task.role == Role::kStudent && config.use_kd;
  for (const bool checkpointing : {true, false}) {
    for (const char* precision : {"32", "bf16-mixed"}) {
      for (const bool offloaded : {false, true}) {
        if (offloaded && !taught) {
          continue;
        }
        CanKdConfig chosen = config;
        chosen.gradient_checkpointing = checkpointing;
        chosen.precision = precision;
        chosen.offload_teacher_to_cpu = offloaded;
        auto choice = weigh_one(
            governor, chosen, data, task, device, effective_graphs,
            fmt::format("gradient_checkpointing = {}, precision = {}{}", checkpointing, precision,
                        !taught     ? ""
                        : offloaded ? ", offload_teacher_to_cpu = true"
                                    : ", offload_teacher_to_cpu = false"));
        if (!choice && choice.error().code != ErrorCode::kOverBudget) {
          return tl::unexpected(std::move(choice).error());
        }
        if (!choice) {
          continue;
        }
        const bool same_precision = (config.precision == "32") == (chosen.precision == "32");
        choice->configured = checkpointing == config.gradient_checkpointing && same_precision &&
                             (!taught || offloaded == config.offload_teacher_to_cpu);
        choices.push_back(std::move(*choice));
      }
    }
  }
  fastest_first(choices);
  return choices;
}

}  // namespace

Result<CanKdPlan> plan_can_kd(const CanKdSettings& settings, bool weigh_choices,
                              const DeviceChoice& choice, std::int64_t effective_graphs) {
  const CanKdConfig& config = settings.config();
  PLIMSOLL_TRY(const auto device, open_device(choice));  // Its libraries are in the baseline.
  PLIMSOLL_TRY(Governor governor, settle(config, config.data));
  CanKdPlan plan;
  const auto done = without_refusal([&]() -> Result<void> {
    PLIMSOLL_TRY(const auto data, open_data(governor, config));
    PLIMSOLL_TRY(const auto plans,
                 plan_tasks(governor, config, *data, /*timed=*/true, device.get()));
    const LedgerState state = governor.state();
    plan.batch_size_max = config.batch_size_max;
    plan.limit_bytes = state.limit_bytes;
    plan.baseline_bytes = state.baseline_bytes;
    plan.foreign_bytes = config.foreign_bytes;
    plan.set_bytes = state.pools[static_cast<std::size_t>(Tag::kLoader)].leased_bytes;
    plan.set_cached = data->set().cached();
    plan.train_graphs = static_cast<std::int64_t>(data->train().size());
    if (!plans.empty()) {
      plan.task = tightest(plans).task.name();
      plan.batch_size = tightest(plans).batch.batch_size;
    }
    if (weigh_choices && !plans.empty()) {
      PLIMSOLL_TRY(plan.choices, weigh(governor, config, *data, tightest(plans).task, device.get(),
                                       effective_graphs));
    }
    for (const TaskPlan& one : plans) {
      plan.tasks.emplace_back(one.task.name(), one.batch);
    }
    return {};
  });
  TensorArena::detach();
  PLIMSOLL_TRY_VOID(done);
  if (plan.tasks.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "stage = " + config.stage + " takes no steps: nothing to plan",
                "name another --stage");
  }
  return plan;
}

std::string CanKdPlan::to_json() const {
  nlohmann::ordered_json j{{"batch_size", batch_size},
                           {"task", task},
                           {"limit_bytes", limit_bytes},
                           {"baseline_bytes", baseline_bytes},
                           {"foreign_bytes", foreign_bytes},
                           {"set_bytes", set_bytes},
                           {"set_cached", set_cached},
                           {"steps_per_epoch", (train_graphs + batch_size - 1) / batch_size}};
  for (const auto& [name, batch] : tasks) {
    auto& task_json = j["tasks"][name];
    task_json = batch_json(batch, "bytes_per_graph");
    task_json["at_most_rows"] = batch.at_most_rows;
    task_json["larger_graphs"] = batch.larger_rows;
    task_json["larger_leased_bytes"] = batch.larger_leased_bytes;
    task_json["step_seconds"] = batch.step_seconds;
    task_json["advice"] = batch.advice;
  }
  if (!choices.empty()) {
    j["choices"] = choices_json(choices, "graph");
  }
  return j.dump();
}

std::string CanKdPlan::to_text() const {
  std::string text = fmt::format(
      "batch_size = {}, held there by {}; {} steps an epoch\nunder a limit of {}\n", batch_size,
      task, (train_graphs + batch_size - 1) / batch_size, format_bytes(limit_bytes));
  text += fmt::format("  {:<22}{:>6}  {:<8}{:>11}{:>11}{:>11}{:>11}{:>8}   {}\n", "task", "graphs",
                      "label", "peak", "static", "per graph", "may have", "ms", "at the peak");
  for (const auto& [name, batch] : tasks) {
    text += fmt::format("  {:<22}{:>6}  {:<8}{:>11}{:>11}{:>11}{:>11}{:>8.0f}   {} in {}\n", name,
                        batch.batch_size, label_name(batch.label), format_bytes(batch.peak.bytes),
                        format_bytes(batch.peak.parts.static_bytes),
                        format_bytes(batch.bytes_per_row), format_bytes(batch.available_bytes),
                        1e3 * batch.step_seconds, batch.peak.op, phase_name(batch.peak.phase));
  }
  const auto line = [&text](const char* name, std::int64_t bytes, const char* note) {
    text += fmt::format("  {:<14}{:>12}   {}\n", name, format_bytes(bytes), note);
  };
  line("graphs", set_bytes, set_cached ? "the whole set (cache_bytes)" : "offsets (cache_bytes)");
  line("foreign", foreign_bytes, "code and kernels' scratch (foreign_bytes)");
  line("baseline", baseline_bytes, "the process before the run");
  for (const auto& [name, batch] : tasks) {
    if (name != task) {
      continue;
    }
    text += device_text(batch);
    if (batch.at_most_rows) {
      text +=
          fmt::format("memory would take more: auto keeps to {} graphs, and to {} steps an epoch",
                      batch_size_max, kAutoStepsMin);
    } else {
      text += fmt::format("a fifth more, {} graphs, would lease {}\n{}", batch.larger_rows,
                          format_bytes(batch.larger_leased_bytes), batch.advice);
    }
  }
  text += choices_text(choices, task, "graph");
  return text;
}

}  // namespace plimsoll
