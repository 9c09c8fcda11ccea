// SPDX-License-Identifier: Apache-2.0
//
// See call_tensors.h.
#include "tests/device/call_tensors.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>

namespace sim {
namespace {

void keep(void* /*data*/) {}
void* data_of(const c10::Storage& storage) {
  return const_cast<void*>(storage.data());
}
bool same(const c10::Storage& a, const c10::Storage& b) {
  return a.unsafeGetStorageImpl() == b.unsafeGetStorageImpl();
}

}  // namespace

Access extent(const at::Tensor& tensor, bool writes) {
  const std::size_t begin = std::size_t(tensor.storage().data()) +
                            std::size_t(tensor.storage_offset()) * tensor.itemsize();
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    last += (tensor.size(i) - 1) * tensor.stride(i);
  }
  const std::size_t bytes = tensor.numel() == 0 ? 0 : std::size_t(last + 1) * tensor.itemsize();
  return {begin, begin + bytes, writes};
}

at::Tensor CallTensors::for_kernel(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  if (tensor.device().type() != kSim) {
    if (tensor.is_cpu()) {
      hosts_.push_back(tensor.unsafeGetTensorImpl());
    }
    return tensor;
  }
  for (const auto& [mine, kernels] : tensors_) {
    if (mine.is_same(tensor)) {
      return kernels;
    }
  }
  auto made = shaped(for_kernel(tensor.storage()), c10::DispatchKey::CPU, tensor);
  tensors_.emplace_back(tensor, made);
  return made;
}

c10::Storage CallTensors::for_kernel(const c10::Storage& storage) {
  for (const auto& [mine, kernels] : storages_) {
    if (same(mine, storage)) {
      return kernels;
    }
  }
  void* data = storage.data() == nullptr ? nullptr : host_address(storage.data());
  c10::Storage made(c10::Storage::use_byte_size_t(), storage.nbytes(),
                    c10::DataPtr(data, data, &keep, c10::Device(c10::kCPU)), c10::GetCPUAllocator(),
                    /*resizable=*/true);
  storages_.emplace_back(storage, made);
  return made;
}

at::Tensor CallTensors::for_program(const at::Tensor& tensor, std::vector<Access>* made) {
  if (!tensor.defined() || !tensor.is_cpu() ||
      std::count(hosts_.begin(), hosts_.end(), tensor.unsafeGetTensorImpl()) > 0) {
    return tensor;
  }
  for (const auto& [mine, kernels] : tensors_) {
    if (kernels.is_same(tensor)) {
      return mine;
    }
  }
  const std::size_t known = storages_.size();
  auto result = shaped(for_program(tensor.storage()), c10::DispatchKey::PrivateUse1, tensor);
  if (storages_.size() > known) {
    made->push_back(extent(result, true));
  }
  return result;
}

c10::Storage CallTensors::for_program(const c10::Storage& storage) {
  for (const auto& [mine, kernels] : storages_) {
    if (same(kernels, storage)) {
      return mine;
    }
  }
  const std::size_t bytes = storage.nbytes();
  c10::Storage result(c10::Storage::use_byte_size_t(), bytes, taken(storage, bytes),
                      c10::GetAllocator(kSim), /*resizable=*/true);
  storages_.emplace_back(result, storage);
  return result;
}

void CallTensors::follow() {
  for (const auto& [mine, kernels] : storages_) {
    if (mine.nbytes() != kernels.nbytes() && data_of(kernels) != nullptr) {
      const std::size_t bytes = kernels.nbytes();
      mine.unsafeGetStorageImpl()->set_data_ptr_noswap(taken(kernels, bytes));
      mine.set_nbytes(bytes);
    }
  }
  for (const auto& [mine, kernels] : tensors_) {
    auto* impl = mine.unsafeGetTensorImpl();
    if (const auto storage = for_program(kernels.storage()); !same(storage, mine.storage())) {
      impl->set_storage_keep_dtype(storage);
    }
    if (mine.sizes() != kernels.sizes() || mine.strides() != kernels.strides() ||
        mine.storage_offset() != kernels.storage_offset()) {
      impl->set_sizes_and_strides(kernels.sizes(), kernels.strides(), kernels.storage_offset());
    }
  }
}

bool CallTensors::has_host_tensor() const {
  return std::any_of(hosts_.begin(), hosts_.end(), [](auto* one) { return one->dim() > 0; });
}

bool CallTensors::has_only_wrapped_hosts() const {
  return std::all_of(hosts_.begin(), hosts_.end(),
                     [](auto* one) { return one->is_wrapped_number(); });
}

at::Tensor CallTensors::shaped(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key),
                                                       like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(),
                                                    like.storage_offset());
  if (like.is_conj()) {
    made._set_conj(true);
  }
  if (like.is_neg()) {
    made._set_neg(true);
  }
  return made;
}

c10::DataPtr CallTensors::taken(const c10::Storage& storage, std::size_t bytes) const {
  const c10::Device on(kSim, c10::DeviceIndex(device_));
  const auto deleter = c10::GetAllocator(kSim)->raw_deleter();
  void* data = data_of(storage);
  if (data == nullptr || bytes == 0) {
    return {nullptr, nullptr, deleter, on};
  }
  if (is_kernel_address(data)) {  // The device's already: the kernel's storage goes on seeing it.
    auto had = storage.unsafeGetStorageImpl()->set_data_ptr(
        c10::DataPtr(data, data, &keep, c10::Device(c10::kCPU)));
    had.release_context();
    return {device_address(data), device_address(data), deleter, on};
  }
  auto copy = c10::GetAllocator(kSim)->allocate(bytes);
  std::memcpy(host_address(copy.get()), data, bytes);
  return copy;
}

}  // namespace sim
