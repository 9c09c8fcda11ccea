// SPDX-License-Identifier: Apache-2.0
//
// See kernels.h: call_later(). Torch's meta kernels say what a call will return; the results are
// made now, and what the kernel returns later is copied to them.
#include <ATen/EmptyTensor.h>

#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>

#include "tests/device/kernels.h"

namespace sim {
namespace {

// Operators of which no meta kernel can say it.
std::mutex unknown_mutex;
std::unordered_set<std::string> unknown;

bool is_known(const std::string& name) {
  const std::lock_guard lock(unknown_mutex);
  return unknown.count(name) == 0;
}

// Of a call that writes to its arguments: those that it returns; of others the shapes of results.
using Results = std::optional<torch::jit::Stack>;

Results written_arguments(const c10::FunctionSchema& schema, const torch::jit::Stack& arguments,
                          CallTensors& tensors, std::vector<Access>* accesses) {
  if (schema.overload_name().find("out") != std::string::npos) {
    return std::nullopt;  // It may get another shape.
  }
  torch::jit::Stack results;
  for (const auto& result : schema.returns()) {
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const auto* mine = schema.arguments()[i].alias_info();
      const auto* its = result.alias_info();
      if (mine != nullptr && its != nullptr && mine->beforeSets() == its->beforeSets()) {
        results.push_back(tensors.for_program(arguments[i].toTensor(), accesses));
      }
    }
  }
  return results.size() == schema.returns().size() ? Results(results) : std::nullopt;
}

Results shapes_of_results(const c10::OperatorHandle& op, torch::jit::Stack arguments) {
  for (auto& value : arguments) {
    if (value.isDevice()) {
      value = c10::Device(c10::kMeta);
    }
    each_tensor(value, [](const at::Tensor& one) {
      return one.defined()
                 ? at::empty_strided(one.sizes(), one.strides(), one.options().device(c10::kMeta))
                 : one;
    });
  }
  try {
    const Inside host(-1);  // What it makes on the way is the host's.
    run_kernel(op, c10::DispatchKey::Meta, &arguments);
  } catch (const std::exception&) {
    const std::lock_guard lock(unknown_mutex);
    unknown.insert(c10::toString(op.schema().operator_name()));
    return std::nullopt;
  }
  for (const auto& value : arguments) {
    if (!value.isTensor() || (value.toTensor().defined() && !value.toTensor().is_meta())) {
      return std::nullopt;
    }
  }
  return arguments;
}

at::Tensor empty_like_shape(const at::Tensor& shape) {
  return at::detail::empty_strided_generic(shape.sizes(), shape.strides(), c10::GetAllocator(kSim),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           shape.scalar_type());
}

}  // namespace

bool call_later(const c10::OperatorHandle& op, torch::jit::Stack* stack, CallTensors& tensors,
                bool writes, int stream, std::vector<Access> accesses) {
  const auto& schema = op.schema();
  if (!is_known(c10::toString(schema.operator_name()))) {
    return false;
  }
  const auto count = std::ptrdiff_t(schema.arguments().size());
  torch::jit::Stack arguments(stack->end() - count, stack->end());
  auto results = writes ? written_arguments(schema, arguments, tensors, &accesses)
                        : shapes_of_results(op, arguments);
  if (!results) {
    return false;
  }
  std::vector<at::Tensor> made;  // What the kernel's results are copied to.
  if (!writes) {
    const c10::DeviceGuard guard(c10::Device(kSim, c10::DeviceIndex(tensors.device())));
    for (auto& value : *results) {
      if (value.toTensor().defined()) {
        value = empty_like_shape(value.toTensor());
        accesses.push_back(extent(value.toTensor(), true));
      }
      made.push_back(tensors.for_kernel(value.toTensor()));
    }
  }
  accessed(tensors.device(), stream, schema.name(), accesses);
  enqueue(tensors.device(), stream, [op, arguments, made]() mutable {
    run_kernel(op, c10::DispatchKey::CPU, &arguments);
    const at::AutoDispatchBelowAutograd below;
    for (std::size_t i = 0; i < made.size(); ++i) {
      if (made[i].defined()) {
        made[i].copy_(arguments[i].toTensor());
      }
    }
  });
  torch::jit::drop(*stack, std::size_t(count));
  stack->insert(stack->end(), results->begin(), results->end());
  return true;
}

}  // namespace sim
