// SPDX-License-Identifier: Apache-2.0
//
// Tensors over bytes that something else leased: a slot of the loader, a block of rows.
#include <ATen/ops/from_blob.h>

#include <utility>

#include "base/check.h"
#include "plimsoll/torch.h"

namespace plimsoll {

at::Tensor tensor_over(std::span<std::byte> bytes, at::IntArrayRef shape, at::ScalarType dtype,
                       std::shared_ptr<void> owner) {
  std::int64_t elements = 1;
  for (const std::int64_t size : shape) {
    elements *= size;
  }
  PLIMSOLL_CHECK(static_cast<std::int64_t>(bytes.size()) ==
                     elements * static_cast<std::int64_t>(c10::elementSize(dtype)),
                 "tensor_over: the bytes are not the product of shape times the dtype's size");
  return at::from_blob(
      bytes.data(), shape, [kept = std::move(owner)](void*) mutable { kept.reset(); },
      at::TensorOptions(dtype));
}

}  // namespace plimsoll
