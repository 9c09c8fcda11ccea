// SPDX-License-Identifier: Apache-2.0
//
// What torch and the heap are told once, at the start of a run, so that neither its results nor
// its memory depend on chance; and giving back what neither uses.
#include <malloc.h>
#include <omp.h>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
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

// Sums are split among the threads that there are: fewer than asked for make other bits.
Result<void> check_team(int compute_threads) {
  int team = 0;
#pragma omp parallel
  {
#pragma omp single
    team = omp_get_num_threads();
  }
  if (team == compute_threads) {
    return {};
  }
  const char* limit = std::getenv("OMP_THREAD_LIMIT");
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("compute_threads is {}, but OpenMP makes a team of {} (OMP_THREAD_LIMIT "
                          "is {})",
                          compute_threads, team, limit == nullptr ? "unset" : limit),
              "unset OMP_THREAD_LIMIT, or set compute_threads to the size of that team");
}

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
  omp_set_dynamic(0);  // OMP_DYNAMIC: as many threads as asked, however busy the machine is.
  omp_set_max_active_levels(std::max(1, omp_get_max_active_levels()));
  at::set_num_threads(compute_threads);
  return check_team(compute_threads);
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
