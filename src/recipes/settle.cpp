// SPDX-License-Identifier: Apache-2.0
//
// Settling torch and the limit.
//
// Threads: see settle.h.   Memory: see settle.h.
#include "recipes/settle.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include <algorithm>

#include "base/check.h"
#include "plimsoll/limits.h"
#include "plimsoll/torch.h"

namespace plimsoll {

Result<Governor> settle(const SettleOptions& options) {
  fix_heap();
  PLIMSOLL_TRY_VOID(make_deterministic(static_cast<int>(options.compute_threads)));
  PLIMSOLL_TRY_VOID(TensorArena::install());
  {
    const auto warm = at::ones({64, 64});
    static_cast<void>(at::mm(warm, warm).sum().item<float>());
  }
  std::int64_t foreign_bytes = options.foreign_bytes;
  if (options.baseline_bytes) {
    PLIMSOLL_TRY(const Resident now, read_resident());
    foreign_bytes -=
        std::clamp<std::int64_t>(now.total() - *options.baseline_bytes, 0, foreign_bytes);
  }
  PLIMSOLL_TRY(Governor governor, Governor::create({.memory_limit = options.memory_limit,
                                                    .disk_limit = options.disk_limit,
                                                    .directory = options.directory,
                                                    .foreign_bytes = foreign_bytes}));
  PLIMSOLL_TRY_VOID(TensorArena::attach(governor));
  return governor;
}

}  // namespace plimsoll
