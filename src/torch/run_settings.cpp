// SPDX-License-Identifier: Apache-2.0
//
// What torch and the heap are told once, at the start of a run, so that neither its results nor
// its memory depend on chance; and giving back what neither uses.
#include <malloc.h>

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include <chrono>
#include <cstdlib>
#include <string>

#include "base/check.h"
#include "plimsoll/limits.h"
#include "plimsoll/torch.h"

namespace plimsoll {
namespace {

// At this size a block of glibc's heap becomes a mapping of its own, gone when freed. By default
// the threshold grows with what was freed, up to 32 MiB, and large holes stay in the heap.
constexpr int kMapThresholdBytes = 1 << 20;
constexpr int kTrimThresholdBytes = 4 << 20;
constexpr int kHeapArenas = 2;  // Else eight a core, each with holes of its own.

}  // namespace

Result<void> make_deterministic(int compute_threads) {
  if (compute_threads < 1) {
    return fail(ErrorCode::kInvalidArgument,
                "compute_threads is " + std::to_string(compute_threads),
                "set compute_threads to at least 1");
  }
  const char* cbwr = std::getenv("MKL_CBWR");
  if (cbwr == nullptr || *cbwr == '\0') {
    return fail(ErrorCode::kInvalidArgument,
                "MKL_CBWR is not set: MKL would pick its kernels by the address of the data",
                "export MKL_CBWR=COMPATIBLE before the process starts");
  }
  at::globalContext().setDeterministicAlgorithms(true, false);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
  at::globalContext().setDeterministicMkldnn(true);
  at::set_num_threads(compute_threads);
  return {};
}

Result<CleanUp> clean_up() {
  const auto begin = std::chrono::steady_clock::now();
  CleanUp done;
  PLIMSOLL_TRY(const Resident before, read_resident());
  done.arena_bytes = TensorArena::purge();
  ::malloc_trim(0);
  PLIMSOLL_TRY(const Resident after, read_resident());
  done.resident_before_bytes = before.total();
  done.resident_after_bytes = after.total();
  done.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return done;
}

void fix_heap() noexcept {
  ::mallopt(M_MMAP_THRESHOLD, kMapThresholdBytes);
  ::mallopt(M_TRIM_THRESHOLD, kTrimThresholdBytes);
  ::mallopt(M_ARENA_MAX, kHeapArenas);
  ::setenv("DNNL_PRIMITIVE_CACHE_CAPACITY", "256", 0);
}

}  // namespace plimsoll
