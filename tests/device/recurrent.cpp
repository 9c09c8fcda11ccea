// SPDX-License-Identifier: Apache-2.0
//
// LSTM, GRU and RNN. Torch takes fused cells on such a device, which have no kernel of the CPU, and
// multiplies in another order than there. Here the whole operator is what the CPU makes of it, its
// graph included: the device's graph has one node, whose backward runs the CPU's.
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

#include "tests/device/kernels.h"

namespace sim {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const char* const kBackward = "backward of a recurrent module";

// The CPU's graph of one call, over memory of the device.
struct Graph : torch::CustomClassHolder {
  variable_list leaves;   // As the kernel sees the inputs; none where one comes a second time.
  variable_list results;  // As it made them.
  int device{0};
};

// Runs the operator as a program that has these tensors on the CPU would. graded: with a graph.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack, bool graded,
                CallTensors& tensors, variable_list* leaves) {
  for (auto& value : *stack) {
    each_tensor(value, [&](const at::Tensor& one) {
      at::Tensor kernels = tensors.for_kernel(one);
      if (one.defined() && one.device().type() == kSim) {
        kernels.requires_grad_(graded && one.requires_grad());
        const bool known = std::any_of(leaves->begin(), leaves->end(),
                                       [&](const auto& other) { return other.is_same(kernels); });
        leaves->push_back(known ? at::Tensor() : kernels);
      }
      return kernels;
    });
  }
  const Inside inside(tensors.device());
  const DeviceRandom random(tensors.device());
  const at::AutoGradMode grad(graded);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  op.callBoxed(stack);
}

struct Recurrent : torch::autograd::Function<Recurrent> {
  static variable_list forward(AutogradContext* context, const c10::OperatorHandle& op,
                               const torch::jit::Stack* arguments, bool graded,
                               at::TensorList inputs) {
    torch::jit::Stack stack = *arguments;
    auto graph = c10::make_intrusive<Graph>();
    graph->device = device_of_call(stack, stack.size());
    CallTensors tensors(graph->device);
    const int stream = current_stream(graph->device);
    std::vector<Access> accesses;
    for (const auto& one : inputs) {
      accesses.push_back(extent(one, false));
    }
    drain(graph->device, stream);
    accessed(graph->device, stream, op.schema().name(), accesses);
    run_on_cpu(op, &stack, graded, tensors, &graph->leaves);
    variable_list results;
    for (auto& value : stack) {
      graph->results.push_back(value.toTensor());
      accesses.clear();
      results.push_back(tensors.for_program(value.toTensor().detach(), &accesses));
      accessed(graph->device, stream, op.schema().name(), accesses);
    }
    // They keep the memory that the CPU's graph looks at, and are checked for writes.
    variable_list kept = inputs.vec();
    kept.insert(kept.end(), results.begin(), results.end());
    context->save_for_backward(kept);
    context->saved_data["graph"] = c10::IValue::make_capsule(graph);
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list kept = context->get_saved_variables();
    const auto capsule = context->saved_data["graph"].toCapsule();
    const auto* graph = static_cast<const Graph*>(capsule.get());
    CallTensors tensors(graph->device);
    variable_list roots, of_roots, wanted, made;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i].defined() && graph->results[i].requires_grad()) {
        roots.push_back(graph->results[i]);
        of_roots.push_back(tensors.for_kernel(gradients[i]));
      }
    }
    std::copy_if(graph->leaves.begin(), graph->leaves.end(), std::back_inserter(wanted),
                 [](const at::Tensor& one) { return one.defined() && one.requires_grad(); });
    const int stream = current_stream(graph->device);
    std::vector<Access> accesses;
    for (const auto* list : {&kept, &gradients}) {
      for (const auto& one : *list) {
        if (one.defined()) {
          accesses.push_back(extent(one, false));
        }
      }
    }
    drain(graph->device, stream);
    accessed(graph->device, stream, kBackward, accesses);
    accesses.clear();
    if (!roots.empty()) {
      const Inside inside(graph->device);
      made = torch::autograd::grad(roots, wanted, of_roots, /*retain_graph=*/true,
                                   /*create_graph=*/false, /*allow_unused=*/true);
    }
    variable_list results(3);  // Of `op`, `arguments` and `graded`.
    auto next = made.begin();
    for (const auto& leaf : graph->leaves) {
      const bool has = next != made.end() && leaf.defined() && leaf.requires_grad();
      const at::Tensor one = has ? *next++ : at::Tensor();
      results.push_back(one.defined() ? tensors.for_program(one, &accesses) : one);
    }
    accessed(graph->device, stream, kBackward, accesses);
    return results;
  }
};

void recurrent(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto count = std::ptrdiff_t(op.schema().arguments().size());
  const torch::jit::Stack arguments(stack->end() - count, stack->end());
  variable_list inputs;
  for (auto value : arguments) {
    each_tensor(value, [&](const at::Tensor& one) {
      if (one.defined() && one.device().type() == kSim) {
        inputs.push_back(one);
      }
      return one;
    });
  }
  const bool graded = at::GradMode::is_enabled();
  const auto results = Recurrent::apply(op, &arguments, graded, at::TensorList(inputs));
  torch::jit::drop(*stack, std::size_t(count));
  stack->insert(stack->end(), results.begin(), results.end());
}

void add_recurrent(torch::Library& m) {
  for (const char* one :
       {"lstm.input", "lstm.data", "gru.input", "gru.data", "rnn_tanh.input", "rnn_tanh.data",
        "rnn_relu.input", "rnn_relu.data", "lstm_cell", "gru_cell"}) {
    m.impl(one, torch::CppFunction::makeFromBoxedFunction<&recurrent>());
  }
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  add_recurrent(m);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  add_recurrent(m);
}

}  // namespace
}  // namespace sim
