// SPDX-License-Identifier: Apache-2.0
//
// The planner for plimsoll/training/_plan.py: real steps are Python callables.
//
// A callable returns None when its step ran, and the refusal when it did not fit; any other
// exception of the step goes through unchanged.
// Reading order: plan/batch_plan.h, torch/step_tracer.h, this file.
//
// Threads: the thread that trains, with Python's lock.   Memory: the traces.
#include <string>
#include <utility>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "plan/batch_plan.h"
#include "torch/admission.h"
#include "torch/arena_pages.h"
#include "torch/device_backend.h"
#include "torch/step_tracer.h"
#include "torch_plan.h"

namespace plimsoll::python {
namespace {

using Extent = std::tuple<std::int64_t, std::int64_t, std::int64_t>;  // Rows, nodes, edges.

StepSize size_from(const Extent& extent) {
  return {std::get<0>(extent), std::get<1>(extent), std::get<2>(extent)};
}

nb::dict dict_of(const PeakParts& parts) {
  nb::dict out;
  out["static"] = parts.static_bytes;
  out["gradients"] = parts.gradient_bytes;
  out["activations"] = parts.activation_bytes;
  out["optimizer"] = parts.optimizer_bytes;
  out["temporaries"] = parts.temporary_bytes;
  out["other threads"] = parts.other_threads_bytes;
  return out;
}

nb::dict dict_of(const DevicePeak& device) {
  nb::dict out;
  out["name"] = device.name;
  out["limit_bytes"] = device.limit_bytes;
  out["bound_bytes"] = device.bound_bytes;
  out["reserved_bytes"] = device.reserved_bytes;
  out["allocated_bytes"] = device.allocated_bytes;
  out["fragmentation_bytes"] = device.fragmentation_bytes;
  out["static_bytes"] = device.static_bytes;
  out["steady"] = device.steady;
  return out;
}

nb::dict dict_of(const BatchPlan& plan) {
  nb::dict out;
  out["batch_size"] = plan.batch_size;
  out["label"] = label_name(plan.label);
  out["peak_bytes"] = plan.peak.bytes;
  out["leased_bytes"] = plan.leased_bytes;
  out["available_bytes"] = plan.available_bytes;
  out["bytes_per_row"] = plan.bytes_per_row;
  out["operator"] = plan.peak.op;
  out["phase"] = phase_name(plan.peak.phase);
  out["parts"] = dict_of(plan.peak.parts);
  out["step_seconds"] = plan.step_seconds;
  out["at_most_rows"] = plan.at_most_rows;
  out["larger_rows"] = plan.larger_rows;
  out["larger_leased_bytes"] = plan.larger_leased_bytes;
  out["traced_rows"] = plan.traced_rows;
  nb::list verified;
  for (const VerifiedStep& step : plan.verified) {
    nb::dict one;
    one["rows"] = step.rows;
    one["predicted_bytes"] = step.predicted_bytes;
    one["measured_bytes"] = step.measured_bytes;
    one["as_predicted"] = step.as_predicted;
    verified.append(one);
  }
  out["verified"] = verified;
  out["advice"] = plan.advice;
  if (plan.device) {
    out["device"] = dict_of(*plan.device);
  }
  return out;
}

// None, or why it did not fit.
using Step = nb::typed<nb::callable, nb::object(std::int64_t)>;
// With nb::arg().none().
using SizeOf = nb::typed<nb::object, nb::typed<nb::callable, Extent(std::int64_t)>>;

Result<void> run_step(const Step& step, const StepSize& size) {
  const nb::object refusal = step(size.rows);
  if (!refusal.is_none()) {
    Error error = make_error(ErrorCode::kOverBudget, nb::cast<std::string>(nb::str(refusal)));
    error.tag = Tag::kTensor;
    return tl::unexpected(std::move(error));
  }
  return {};
}

using Staying = std::vector<std::pair<std::uintptr_t, std::int64_t>>;  // Addresses and bytes.

DictOf<nb::any> plan(const Governor& governor, const Step& step, const SizeOf& extent,
                     std::int64_t least_rows, std::int64_t most_rows, std::int64_t multiple,
                     std::int64_t available_bytes, const std::string& device,
                     const std::string& device_memory_limit, const Staying& staying) {
  const auto opened = open_device({device, device_memory_limit}).or_throw();
  PlanOptions options;
  options.least_rows = least_rows;
  options.most_rows = most_rows;
  options.multiple = multiple;
  options.available_bytes = available_bytes;
  if (opened != nullptr) {
    std::vector<StayingBlock> blocks;
    for (const auto& [address, bytes] : staying) {
      blocks.push_back({reinterpret_cast<const void*>(address), bytes});
    }
    options.device = device_memory(*opened, blocks);
  }
  if (!extent.is_none()) {
    options.size_of = [&extent](std::int64_t rows) {
      return size_from(nb::cast<Extent>(extent(rows)));
    };
  }
  return dict_of(plan_batch(governor, options, [&step](const StepSize& size) {
                   return run_step(step, size);
                 }).or_throw());
}

nb::dict dict_of(const StepTrace& trace) {
  nb::dict out;
  out["live_peak_bytes"] = trace.live_peak_bytes;
  out["leased_peak_bytes"] = trace.leased_peak_bytes;
  out["events"] = trace.events.size();
  out["seconds"] = trace.seconds;
  return out;
}

// Traces of one step, for who wants predictions of many sizes.
class StepTraces {
 public:
  DictOf<nb::any> add(const Extent& extent, const Step& step) {
    StepTrace trace = traced(extent, step);
    nb::dict out = dict_of(trace);
    regions_.add(std::move(trace)).or_throw();
    out["regions"] = regions_.regions();
    return out;
  }
  [[nodiscard]] DictOf<nb::any> predict(const Extent& extent) const {
    const StepPrediction said = regions_.predict(size_from(extent)).or_throw();
    nb::dict out;
    out["peak_bytes"] = said.peak.bytes;
    out["bound_bytes"] = said.bound_bytes;
    out["admit_bytes"] = to_admit(said);
    out["rows_most"] = said.rows_most;
    out["operator"] = said.peak.op;
    out["phase"] = phase_name(said.peak.phase);
    out["parts"] = dict_of(said.peak.parts);
    return out;
  }
  DictOf<nb::any> verify(const Extent& extent, const Step& step) const {
    const StepTrace trace = traced(extent, step);
    nb::dict out = dict_of(trace);
    out["exact"] = regions_.predicts(trace);
    return out;
  }

 private:
  static StepTrace traced(const Extent& extent, const Step& step) {
    const StepSize size = size_from(extent);
    return trace_step(size, [&] { return run_step(step, size); }).or_throw();
  }

  StepRegions regions_{&arena_block_bytes};
};

}  // namespace

void bind_plan(nb::module_& m) {
  m.def("plan_batch", &plan, nb::arg("governor"), nb::arg("step"), nb::arg("extent").none(),
        nb::arg("least_rows"), nb::arg("most_rows"), nb::arg("multiple"),
        nb::arg("available_bytes"), nb::arg("device"), nb::arg("device_memory_limit"),
        nb::arg("staying"),
        "plimsoll.plan_batch() without its Python side. `step` returns \"\" or a refusal's "
        "text.\n\navailable_bytes: 0 for what the governor leaves; staying: address and bytes of "
        "the storages that stay from step to step. Errors: BudgetExceeded, ValueError.");
  m.def(
      "check_device",
      [](const std::string& device, const std::string& memory_limit) {
        static_cast<void>(open_device({device, memory_limit}).or_throw());
      },
      nb::arg("device"), nb::arg("device_memory_limit"),
      "Whether plans can be made for the device. Errors: ValueError naming the option.");
  m.def("block_bytes", &arena_block_bytes, nb::arg("bytes"),
        "Returns the bytes that the arena takes for a block of so many bytes: its class, or whole "
        "pages.");
  m.def("with_margin", &with_margin, nb::arg("peak_bytes"),
        "Returns the bytes to ask the governor for where a step took `peak_bytes`.");
  m.def("with_cache_and_margin", &with_cache_and_margin, nb::arg("peak_bytes"),
        "The same under another limit: where there is more room the arena caches more.");
  nb::class_<StepTraces>(m, "StepTraces",
                         "Real steps traced at several sizes, and what they say of others. Sizes "
                         "are (rows, nodes, edges).")
      .def(nb::init<>())
      .def("add", &StepTraces::add, nb::arg("extent"), nb::arg("step"),
           "Runs the step twice and keeps the trace: {\"live_peak_bytes\", \"events\", "
           "\"regions\", …}.")
      .def("predict", &StepTraces::predict, nb::arg("extent"),
           "{\"peak_bytes\", \"bound_bytes\", \"admit_bytes\", \"rows_most\", \"operator\", "
           "\"phase\", \"parts\"}; rows_most: the largest traced step that it was made from.")
      .def("verify", &StepTraces::verify, nb::arg("extent"), nb::arg("step"),
           "Runs the step twice; \"exact\": every block was as predicted. The trace is not kept.");
}

}  // namespace plimsoll::python
