// SPDX-License-Identifier: Apache-2.0
//
// The tensors of one call: the device's, and over the same memory those that the CPU's kernel sees.
//
// Nothing is copied. What a kernel makes is memory of the device already (Inside, memory.h), and is
// taken over; where it gives a tensor another shape or storage, follow() gives it to the device's.
//
// Threads: single-owner.   Memory: 200 bytes for each tensor.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <utility>
#include <vector>

#include "tests/device/memory.h"
#include "tests/device/streams.h"

namespace sim {

class CallTensors {
 public:
  explicit CallTensors(int device) : device_(device) {}

  /// The kernel's. Others than the device's are returned as they are.
  at::Tensor for_kernel(const at::Tensor& tensor);
  c10::Storage for_kernel(const c10::Storage& storage);
  /// The device's: of a result, or of what a kernel has put in place of a storage. made: new
  /// memory.
  at::Tensor for_program(const at::Tensor& tensor, std::vector<Access>* made);
  c10::Storage for_program(const c10::Storage& storage);
  /// After a kernel that writes: shapes, strides and memory as the kernel has left them.
  void follow();

  [[nodiscard]] int device() const { return device_; }
  [[nodiscard]] bool has_host_tensor() const;         ///< One that is no number.
  [[nodiscard]] bool has_only_wrapped_hosts() const;  ///< Hosts' are what nobody can write to.

 private:
  static at::Tensor shaped(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like);
  c10::DataPtr taken(const c10::Storage& storage, std::size_t bytes) const;

  const int device_;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;  // The device's, the kernel's.
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;
  std::vector<c10::TensorImpl*> hosts_;
};

/// The bytes that a tensor of the device may reach.
Access extent(const at::Tensor& tensor, bool writes);

/// Replaces each tensor of an argument or result by each(tensor).
template <class Each>
void each_tensor(c10::IValue& value, Each&& each) {
  if (value.isTensor()) {
    value = each(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& one : value.toTensorVector()) {
      list.push_back(each(one));
    }
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& one : value.toOptionalTensorVector()) {
      list.push_back(one ? std::optional<at::Tensor>(each(*one)) : std::nullopt);
    }
    value = list;
  }
}

}  // namespace sim
