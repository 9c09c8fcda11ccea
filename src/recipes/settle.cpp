// SPDX-License-Identifier: Apache-2.0
//
// Settling torch and the limit.
//
// Threads: see settle.h.   Memory: see settle.h.
#include "recipes/settle.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdlib>

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

RunIdentity make_identity(std::span<const std::pair<std::string, std::string>> options,
                          const std::string& data_fingerprint) {
  RunIdentity identity(options.begin(), options.end());
  const char* cbwr = std::getenv("MKL_CBWR");
  identity["torch"] = TORCH_VERSION;
  identity["instruction_set"] = instruction_set();
  identity["mkl_cbwr"] = cbwr == nullptr ? "" : cbwr;
  identity["data_fingerprint"] = data_fingerprint;
  return identity;
}

}  // namespace plimsoll
