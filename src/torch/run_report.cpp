// SPDX-License-Identifier: Apache-2.0
//
// Events, metrics and words that every run has.
//
// Threads: single-owner.   Memory: fixed.
#include "torch/run_report.h"

#include <fmt/format.h>

#include <string_view>
#include <utility>

#include "base/check.h"
#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr double kMemorySeconds = 0.25;  // Between two readings of /proc for the bar.

}  // namespace

RunReport::RunReport(RunFolder* folder, Metrics metrics, const ProgressOptions& progress,
                     Governor governor)
    : folder_(folder),
      metrics_(std::move(metrics)),
      progress_(progress),
      governor_(std::move(governor)) {}

void RunReport::begin(const Extent& extent) {
  status_.status = "running";
  status_.step = extent.step;
  status_.checkpoint_step = extent.step;
  status_.steps_total = extent.steps_total;
  status_.epoch = extent.epoch;
  status_.epochs = extent.epochs;
  status_.loss = extent.loss;
  train_begin_ = std::chrono::steady_clock::now();
  aside_ = {};
}

void RunReport::read_memory(bool force) {
  const auto now = std::chrono::steady_clock::now();
  if (force || Seconds(now - memory_read_).count() >= kMemorySeconds) {
    status_.read_memory(governor_);
    memory_read_ = now;
  }
}

double RunReport::seconds() const {
  return Seconds(std::chrono::steady_clock::now() - begin_).count();
}

double RunReport::rows_per_second() const {
  const double spent = Seconds(std::chrono::steady_clock::now() - train_begin_ - aside_).count();
  return spent <= 0.0 ? 0.0 : static_cast<double>(rows_done_) / spent;
}

Result<void> RunReport::evictions(std::int64_t step, const EvictionLog& log) {
  for (const Eviction& one : log.entries()) {
    progress_.text(fmt::format("step {}: memory: {} {} {}: resident {} before, {} after", step,
                               one.owner, one.move == PressureMove::kPurge ? "purged" : "shrank by",
                               format_bytes(one.given_bytes), format_bytes(one.before_bytes),
                               format_bytes(one.after_bytes)));
    PLIMSOLL_TRY_VOID(folder_->event("evict", {{"step", step},
                                               {"owner", std::string_view(one.owner)},
                                               {"move", std::string_view(move_name(one.move))},
                                               {"wanted_bytes", one.wanted_bytes},
                                               {"given_bytes", one.given_bytes},
                                               {"before_bytes", one.before_bytes},
                                               {"after_bytes", one.after_bytes},
                                               {"freed_bytes", one.freed_bytes()}}));
  }
  return {};
}

Result<void> RunReport::pressure(std::int64_t step, const PressureReport& seen) {
  PLIMSOLL_TRY_VOID(evictions(step, seen.evictions));
  if (!seen.pressure && !seen.stop && seen.evictions.entries().empty()) {
    return {};
  }
  return folder_->event("reclaim", {{"step", step},
                                    {"resident_bytes", seen.resident.total()},
                                    {"unexplained_bytes", seen.unexplained_bytes},
                                    {"kernel", seen.kernel != KernelPressure::kNone},
                                    {"purged_bytes", seen.purged_bytes},
                                    {"shrunk_bytes", seen.shrunk_bytes},
                                    {"stop", seen.stop},
                                    {"needed_bytes", seen.needed_bytes}});
}

Result<void> RunReport::limit(std::int64_t step, const LimitOutcome& outcome) {
  const std::string_view asked(outcome.asked);
  if (!outcome.change || outcome.of_devices) {
    const std::string why = outcome.of_devices ? "this recipe trains on the processor"
                                               : outcome.change.error().to_string();
    progress_.text(fmt::format("step {}: the limit stays: {}", step, why));
    return folder_->event("limit",
                          {{"step", step}, {"asked", asked}, {"message", std::string_view(why)}});
  }
  const LimitChange& change = *outcome.change;
  PLIMSOLL_TRY_VOID(evictions(step, change.evictions));
  progress_.text(fmt::format("step {}: memory limit {}, was {}; resident {}", step,
                             format_bytes(change.limit_bytes), format_bytes(change.before_bytes),
                             format_bytes(change.resident.total())));
  status_.read_memory(governor_);
  PLIMSOLL_TRY_VOID(folder_->event("limit", {{"step", step},
                                             {"asked", asked},
                                             {"before_bytes", change.before_bytes},
                                             {"asked_bytes", change.asked_bytes},
                                             {"limit_bytes", change.limit_bytes},
                                             {"settled", change.settled()},
                                             {"purged_bytes", change.purged_bytes},
                                             {"shrunk_bytes", change.shrunk_bytes},
                                             {"grown_bytes", change.grown_bytes},
                                             {"resident_bytes", change.resident.total()}}));
  return folder_->write_status(status_, /*force=*/true);
}

Result<void> RunReport::on_network(std::string_view name) {
  if (name.empty()) {
    return {};
  }
  const std::string words = fmt::format(
      "warning: {} is on {}: a commit is as durable as its server, and slower; name a folder on a "
      "local disk with --out",
      folder_->root().string(), name);
  progress_.text(words);
  return folder_->event("warning", {{"message", std::string_view(words)}});
}

Result<void> RunReport::clean_up(std::int64_t step, const char* when, const CleanUp& done) {
  return folder_->event("cleanup", {{"step", step},
                                    {"when", std::string_view(when)},
                                    {"arena_bytes", done.arena_bytes},
                                    {"resident_before_bytes", done.resident_before_bytes},
                                    {"resident_after_bytes", done.resident_after_bytes},
                                    {"freed_bytes", done.freed_bytes()},
                                    {"seconds", done.seconds}});
}

Result<void> RunReport::refusal(std::int64_t step, const Error& error, bool again) {
  const std::string message = error.to_string();
  progress_.text(
      fmt::format("step {}: refused memory{}: {}", step, again ? " again" : "", message));
  return folder_->event("refusal",
                        {{"step", step}, {"again", again}, {"message", std::string_view(message)}});
}

Result<void> RunReport::commit(std::int64_t step, double seconds) {
  status_.step = status_.checkpoint_step = step;
  PLIMSOLL_TRY_VOID(metrics_.flush());
  return folder_->event("commit", {{"step", step}, {"seconds", seconds}});
}

void RunReport::memory_metrics(std::int64_t step) {
  read_memory(true);
  const auto memory = [&](const char* name, std::int64_t bytes) {
    metrics_.scalar(std::string("memory/") + name, static_cast<double>(bytes), step);
  };
  const LedgerState ledger = governor_.state();
  memory("limit_bytes", ledger.limit_bytes);
  memory("leased_bytes", ledger.leased_bytes);
  memory("leased_peak_bytes", ledger.leased_peak_bytes);
  memory("resident_bytes", status_.resident_bytes);
  memory("peak_resident_bytes", status_.peak_resident_bytes);
  for (std::size_t k = 0; k < kTagCount; ++k) {
    metrics_.scalar(fmt::format("memory/leased/{}", tag_name(static_cast<Tag>(k))),
                    static_cast<double>(ledger.pools[k].leased_bytes), step);
  }
}

Result<void> RunReport::phase(const char* name) {
  status_.status = name;
  status_.seconds = seconds();
  read_memory(false);
  progress_.update(status_, epoch_fraction_);
  return folder_->write_status(status_, /*force=*/true);
}

Result<void> RunReport::end(const std::string& status, const std::string& message,
                            const char* cause) {
  status_.status = status;
  status_.cause = cause;
  status_.message = message;
  status_.seconds = seconds();
  status_.seconds_left = 0.0;
  read_memory(true);
  progress_.clear();
  PLIMSOLL_TRY_VOID(metrics_.flush());
  PLIMSOLL_TRY_VOID(folder_->event("end", {{"status", std::string_view(status)},
                                           {"step", status_.step},
                                           {"cause", std::string_view(cause)},
                                           {"message", std::string_view(message)}}));
  return folder_->write_status(status_, /*force=*/true);
}

}  // namespace plimsoll
