// SPDX-License-Identifier: Apache-2.0
//
// Settling torch and the limit.
//
// Threads: see settle.h.   Memory: see settle.h.
#include "torch/settle.h"

#include <ATen/Version.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "base/check.h"
#include "plimsoll/limits.h"
#include "plimsoll/torch.h"

namespace plimsoll {
namespace {

// Keys of an identity. Those of an environment variable have its name, so that a refusal says
// which one to look at.
constexpr const char* kInstructionSet = "instruction_set";
constexpr const char* kKernels = "ATEN_CPU_CAPABILITY";  // What torch took, asked for or not.
constexpr const char* kCbwr = "MKL_CBWR";
// These choose kernels, and the libraries do not say which they took.
constexpr std::array kAskedOfLibraries{kCbwr,
                                       "MKL_DEBUG_CPU_TYPE",
                                       "MKL_ENABLE_INSTRUCTIONS",
                                       "ONEDNN_MAX_CPU_ISA",
                                       "DNNL_MAX_CPU_ISA",
                                       "ONEDNN_DEFAULT_FPMATH_MODE",
                                       "DNNL_DEFAULT_FPMATH_MODE",
                                       "OPENBLAS_CORETYPE",
                                       "OPENBLAS_NUM_THREADS"};

}  // namespace

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
  identity["torch"] = TORCH_VERSION;
  identity[kInstructionSet] = instruction_set();
  identity[kKernels] = at::get_cpu_capability();
  for (const char* name : kAskedOfLibraries) {
    if (const char* value = std::getenv(name); value != nullptr && *value != '\0') {
      identity[name] = value;
    }
  }
  identity[kDataKey] = data_fingerprint;
  return identity;
}

IdentityChanges identity_changes(const TrainOptions& options) {
  return {.growing = {kGrowingKey},
          .any = {kInstructionSet, kKernels, kCbwr},
          .granted = options.accept_other_processor,
          .advice =
              "the same bits need the same kernels: resume where the run was started, or go "
              "on with other bits: --accept-other-processor"};
}

}  // namespace plimsoll
