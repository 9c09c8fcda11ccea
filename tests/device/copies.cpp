// SPDX-License-Identifier: Apache-2.0
//
// Copies to, from and on the device, and memory that is made by hand. See kernels.h.
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include "tests/device/kernels.h"

namespace sim {
namespace {

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const bool from_device = from.device().type() == kSim, to_device = to.device().type() == kSim;
  const int device = to_device ? to.device().index() : from.device().index();
  const int stream = current_stream(device);
  CallTensors tensors(device);
  const at::Tensor kernel_from = tensors.for_kernel(from), kernel_to = tensors.for_kernel(to);
  std::vector<Access> accesses;
  if (from_device) {
    accesses.push_back(extent(from, false));
  }
  if (to_device) {
    accesses.push_back(extent(to, true));
  }
  const auto copy = [kernel_from, kernel_to] {
    const at::AutoDispatchBelowAutograd below;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    kernel_to.copy_(kernel_from);
  };
  const auto pinned = [](const at::Tensor& one) { return is_pinned(one.storage().data()); };
  accessed(device, stream,
           !from_device ? "a copy from the host"
           : to_device  ? "a copy"
                        : "a copy to the host",
           accesses);
  if (non_blocking && (from_device || pinned(from)) && (to_device || pinned(to))) {
    // The host's memory is kept until then, as CUDA's pinned allocator does; the device's is not.
    std::shared_ptr<void> kept;
    if (!(from_device && to_device)) {
      kept = std::make_shared<c10::Storage>(from_device ? to.storage() : from.storage());
    }
    const auto late = [copy, gate = gate_of_copies()] {
      gate();
      copy();
    };
    enqueue(device, stream, late, std::move(kept));
    return to;
  }
  drain(device, stream);
  copy();
  if (!(from_device && to_device)) {
    host_waited(device, stream);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

using Layout = std::optional<c10::Layout>;
using Type = std::optional<c10::ScalarType>;
using Where = std::optional<c10::Device>;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(c10::IntArrayRef size, Type dtype, Layout layout, Where device,
                 std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(
      c10::layout_or_default(layout) == c10::kStrided && !c10::pinned_memory_or_default(pin),
      "sim: strided tensors that are not pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, c10::GetAllocator(kSim), kKeys,
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, Type dtype,
                         Layout /*layout*/, Where device, std::optional<bool> /*pin*/) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(kSim), kKeys,
                                           c10::dtype_or_default(dtype));
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  if (const void* data = tensor.storage().data(); data != nullptr) {
    memory(device_of(data)).record(const_cast<void*>(data), int(stream.id()));
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("record_stream", &record_stream);
  // Module.to() then keeps its parameters, those that modules share too, as it does on CUDA.
  m.impl("_has_compatible_shallow_copy_type", [](const at::Tensor& a, const at::Tensor& b) {
    return a.layout() == b.layout() && a.layout() == c10::kStrided;
  });
}

// Copies know of both themselves; else each would be resolved by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace
}  // namespace sim
