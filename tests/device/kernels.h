// SPDX-License-Identifier: Apache-2.0
//
// Operators of a simulated device: the CPU's kernels over the same memory, with the same bits.
//
// One boxed function, call(), is the fallback, and is registered for each operator with a kernel of
// the CPU that torch would else compose of others: that is what makes the bits the CPU's.
//
// Threads: any.   Memory: that of the tensors.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

#include "tests/device/call_tensors.h"

namespace sim {

/// The CPU's generator that is the engine of a device's.
at::Generator kernel_generator(const at::Generator& device_generator);
const at::Generator& default_generator(int device);

/// While it lives, the CPU's default generator has the state of the device's, and moves it on.
class DeviceRandom {
 public:
  explicit DeviceRandom(int device);
  ~DeviceRandom();
  DeviceRandom(const DeviceRandom&) = delete;
  DeviceRandom& operator=(const DeviceRandom&) = delete;

 private:
  const int device_;
  at::Generator cpu_;
  at::Tensor before_;
};

/// Runs the kernel of `key`, below autograd and autocast.
void run_kernel(const c10::OperatorHandle& op, c10::DispatchKey key, torch::jit::Stack* stack);

/// Any operator.
void call(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// The operator in its stream's thread, where it is known now what it will return; else false.
/// stack: has what the kernel sees; then what the program gets.
bool call_later(const c10::OperatorHandle& op, torch::jit::Stack* stack, CallTensors& tensors,
                bool writes, int stream, std::vector<Access> accesses);

/// The device of a call's tensors, or of its argument `device`; the current one where it has none.
int device_of_call(const torch::jit::Stack& stack, std::size_t arguments);

}  // namespace sim
