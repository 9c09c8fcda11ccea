// SPDX-License-Identifier: Apache-2.0
//
// See kernels.h. Order here: random numbers, a call, registration.
#include "tests/device/kernels.h"

#include <torch/library.h>

#include <string>
#include <unordered_set>

namespace sim {

DeviceRandom::DeviceRandom(int device)
    : device_(device), cpu_(at::detail::getDefaultCPUGenerator()) {
  const Inside host(-1);
  before_ = cpu_.get_state();
  cpu_.set_state(default_generator(device).get_state());
}
DeviceRandom::~DeviceRandom() {
  const Inside host(-1);
  at::Generator(default_generator(device_)).set_state(cpu_.get_state());
  cpu_.set_state(before_);
}

void run_kernel(const c10::OperatorHandle& op, c10::DispatchKey key, torch::jit::Stack* stack) {
  const at::AutoDispatchBelowAutograd below;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  op.redispatchBoxed(c10::DispatchKeySet(key), stack);
}

int device_of_call(const torch::jit::Stack& stack, std::size_t arguments) {
  int device = -1;
  for (std::size_t i = stack.size() - arguments; i < stack.size(); ++i) {
    auto value = stack[i];
    each_tensor(value, [&](const at::Tensor& one) {
      if (one.defined() && one.device().type() == kSim && device < 0) {
        device = one.device().index();
      }
      return one;
    });
    if (value.isDevice() && value.toDevice().type() == kSim && value.toDevice().has_index()) {
      device = value.toDevice().index();
    }
  }
  return device < 0 ? current_device() : device;
}

namespace {

// Operators that take tensors of the CPU beside the device's, on CUDA too.
const std::unordered_set<std::string> kMixed{"aten::index",
                                             "aten::_unsafe_index",
                                             "aten::index_put",
                                             "aten::index_put_",
                                             "aten::_index_put_impl_",
                                             "aten::_pack_padded_sequence",
                                             "aten::_pad_packed_sequence",
                                             "aten::set_"};

// What a call is, besides its tensors.
struct Traits {
  explicit Traits(const c10::OperatorHandle& op)
      : schema(op.schema()),
        name(schema.name()),
        seeded(op.hasTag(at::Tag::nondeterministic_seeded)) {
    bool views = !schema.returns().empty();
    host_reads_it = views;
    for (const auto& result : schema.returns()) {
      const auto kind = result.type()->kind();
      views = views && result.alias_info() != nullptr && !result.alias_info()->isWrite();
      host_reads_it =
          host_reads_it && kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType;
    }
    only_shapes = views || name == "aten::set_" || name == "aten::_fused_sdp_choice";
    may_be_late = !only_shapes && !seeded && !host_reads_it && !op.hasTag(at::Tag::inplace_view) &&
                  name != "aten::resize_";
  }
  const c10::FunctionSchema& schema;
  const std::string& name;
  const bool seeded;
  bool host_reads_it;  // Numbers are returned.
  bool only_shapes;    // No memory is touched.
  bool may_be_late;
};

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op),
        stack_(stack),
        is_(op),
        tensors_(device_of_call(*stack, is_.schema.arguments().size())),
        stream_(current_stream(tensors_.device())) {}

  void run() {
    const Inside inside(tensors_.device());
    give_kernel_its_arguments();
    TORCH_CHECK(!tensors_.has_host_tensor() || kMixed.count(is_.name) > 0,
                "Expected all tensors to be on the same device, but found at least two devices, "
                "sim:",
                tensors_.device(), " and cpu (", is_.name, ")");
    if (runs_ahead() && is_.may_be_late && !generator_ && tensors_.has_only_wrapped_hosts() &&
        call_later(op_, stack_, tensors_, writes_, stream_, accesses_)) {
      return;
    }
    if (!is_.only_shapes) {
      drain(tensors_.device(), stream_);
      accessed(tensors_.device(), stream_, is_.name, accesses_);
    }
    {
      std::optional<DeviceRandom> random;
      if (is_.seeded && !generator_ && !is_.only_shapes) {
        random.emplace(tensors_.device());
      }
      run_kernel(op_, c10::DispatchKey::CPU, stack_);
    }
    give_program_its_results();
  }

 private:
  void give_kernel_its_arguments() {
    const std::size_t count = is_.schema.arguments().size();
    for (std::size_t i = 0; i < count; ++i) {
      auto& value = (*stack_)[stack_->size() - count + i];
      const auto& argument = is_.schema.arguments()[i];
      const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
      writes_ = writes_ || written;
      each_tensor(value, [&](const at::Tensor& one) {
        if (one.defined() && one.device().type() == kSim) {
          accesses_.push_back(extent(one, written));
        }
        return tensors_.for_kernel(one);
      });
      if (value.isDevice() && value.toDevice().type() == kSim) {
        value = c10::Device(c10::kCPU);
      } else if (value.isStorage() && value.toStorage().device_type() == kSim) {
        value = tensors_.for_kernel(value.toStorage());
      }
      if (argument.name() == "generator") {
        generator_ = true;
        if (value.isNone()) {
          value = kernel_generator(default_generator(tensors_.device()));
        } else if (value.toGenerator().device().type() == kSim) {
          value = kernel_generator(value.toGenerator());
        }
      }
    }
  }

  void give_program_its_results() {
    if (writes_) {
      tensors_.follow();
    }
    std::vector<Access> made;
    const std::size_t count = is_.schema.returns().size();
    for (std::size_t i = 0; i < count; ++i) {
      if (i == 1 && is_.name == "aten::_pack_padded_sequence") {
        continue;  // Batch sizes are the CPU's, on CUDA too.
      }
      each_tensor((*stack_)[stack_->size() - count + i],
                  [&](const at::Tensor& one) { return tensors_.for_program(one, &made); });
    }
    if (!made.empty()) {
      accessed(tensors_.device(), stream_, is_.name, made);
    }
    if (is_.host_reads_it && !is_.only_shapes) {
      host_waited(tensors_.device(), stream_);
    }
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  const Traits is_;
  CallTensors tensors_;
  const int stream_;
  std::vector<Access> accesses_;
  bool writes_{false}, generator_{false};
};

}  // namespace

void call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run();
}

namespace {

auto boxed_call() {
  return torch::CppFunction::makeFromBoxedFunction<&call>();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(boxed_call());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* one : {"convolution", "convolution_backward"}) {
    m.impl(one, boxed_call());  // Torch knows no other way to them here.
  }
  // A fallback comes after what torch composes of other operators: where the CPU has a kernel, so
  // has the device.
  using Key = c10::DispatchKey;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (op && name.name.starts_with("aten::") && op->hasKernelForDispatchKey(Key::CPU) &&
        !op->hasKernelForDispatchKey(Key::PrivateUse1) &&
        (op->hasKernelForDispatchKey(Key::CompositeExplicitAutograd) ||
         op->hasKernelForDispatchKey(Key::CompositeExplicitAutogradNonFunctional))) {
      m.impl(c10::toString(name).c_str(), boxed_call());
    }
  }
}

}  // namespace
}  // namespace sim
