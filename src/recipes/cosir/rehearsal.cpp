// SPDX-License-Identifier: Apache-2.0
//
// Limits that would do, and the table of what was admitted.
//
// Threads: the thread that trains.   Memory: see cosir_rehearsal.h.
#include "recipes/cosir/rehearsal.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "plan/step_peak.h"
#include "plimsoll/bytes.h"
#include "torch/admission.h"

namespace plimsoll::cosir {
namespace {

constexpr std::int64_t kLeastStep = 1 << 20;       // Limits are named in whole MiB.
constexpr std::int64_t kBaselineVaries = 8 << 20;  // From process to process.

}  // namespace

std::int64_t limit_to_resume(const Governor& governor, const DataShares& shares) {
  const LedgerState state = governor.state();
  const auto floor = [&](Tag tag) {
    return state.pools[static_cast<std::size_t>(tag)].floor_bytes;
  };
  const std::int64_t limit = state.baseline_bytes + floor(Tag::kForeign) +
                             shares.free_for(floor(Tag::kTensor)) + kBaselineVaries;
  return (limit + kLeastStep - 1) / kLeastStep * kLeastStep;
}

Error refused_before_start(const CosirConfig& config, std::int64_t baseline_bytes,
                           const DataShares* shares, Error error) {
  // An option's own number of bytes is less than its part can do with: no limit mends that.
  const auto too_few = [&error](Tag tag, std::int64_t given) {
    return given > 0 && error.tag == tag && error.available_bytes == given &&
           error.smallest_limit_bytes == 0;
  };
  if (too_few(Tag::kEmbedding, config.store_bytes) || too_few(Tag::kFeature, config.cache_bytes) ||
      too_few(Tag::kLoader, config.queue_bytes)) {
    return error;
  }
  auto guessed = shares_of(config);
  if (!guessed && guessed.error().code == ErrorCode::kOverBudget) {
    return std::move(guessed).error();
  }
  const auto needs = tensors_at_most(config);
  if (!guessed || !needs) {
    return error;
  }
  const bool measured = error.tag == Tag::kTensor && error.smallest_limit_bytes > 0;
  const std::int64_t tensors =
      std::max(measured ? error.requested_bytes : needs->step, needs->evaluation);
  const std::int64_t free = (shares != nullptr ? *shares : *guessed).free_for(tensors);
  const std::int64_t limit = std::max(
      smallest_limit(error.limit_bytes, 0, kLeastStep),
      smallest_limit(baseline_bytes + config.foreign_bytes + free + kBaselineVaries, 0, 0));
  return with_limit(std::move(error), limit);
}

std::string admitted_table(const Governor& governor, std::int64_t step_peak,
                           std::int64_t batch_rows) {
  const LedgerState state = governor.state();
  std::string text = fmt::format("admitted under a limit of {}\n", governor.limit().explain());
  const auto line = [&text](const char* name, std::int64_t bytes, const std::string& note) {
    text += fmt::format("  {:<10}{:>12}   {}\n", name, format_bytes(bytes), note);
  };
  const auto promised = [&](Tag tag) {
    const PoolState& pool = state.pools[static_cast<std::size_t>(tag)];
    return std::max(pool.floor_bytes, pool.leased_bytes);
  };
  line("step", promised(Tag::kTensor),
       fmt::format("model, optimizer and a step of {} rows, rehearsed at {}", batch_rows,
                   format_bytes(step_peak)));
  line("store", promised(Tag::kEmbedding), "rows in memory (store_bytes)");
  line("features", promised(Tag::kFeature), "feature cache (cache_bytes)");
  line("ring", promised(Tag::kLoader), "batches ahead (queue_bytes)");
  line("foreign", promised(Tag::kForeign), "code and kernels' scratch (foreign_bytes)");
  if (promised(Tag::kOther) > 0) {
    line("other", promised(Tag::kOther), "split and buffers");
  }
  line("baseline", state.baseline_bytes, "the process before the run");
  line("headroom", state.free_bytes(), "free");
  text.pop_back();
  return text;
}

}  // namespace plimsoll::cosir
