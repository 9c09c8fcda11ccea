// SPDX-License-Identifier: Apache-2.0
//
// Events, metrics and words of a run.
//
// Threads: single-owner.   Memory: fixed.
#include "recipes/cosir/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "base/check.h"
#include "plimsoll/bytes.h"

namespace plimsoll::cosir {
namespace {

constexpr double kGoodHitRate = 0.95;
constexpr double kBytesPerMiB = 1 << 20;

double share(std::int64_t part, std::int64_t whole) {
  return whole <= 0 ? 0.0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole);
}

}  // namespace

Report::Report(RunFolder* folder, Metrics metrics, const ProgressOptions& progress,
               const CosirConfig& config, Governor governor)
    : RunReport(folder, std::move(metrics), progress, std::move(governor)),
      metrics_every_(std::max<std::int64_t>(1, config.metrics_every_n_steps)) {}

Result<void> Report::step(const Position& at, const Batch& batch, std::int64_t train_rows,
                          double loss, const std::array<double, kTerms>* terms, double rate_scale) {
  rows_done_ += batch.rows();
  status_.status = "running";
  status_.step = at.step;
  status_.epoch = batch.epoch();
  status_.loss = loss;
  status_.rows_per_second = rows_per_second();
  status_.seconds = seconds();
  const auto left = static_cast<double>((status_.steps_total - at.step) * batch.rows());
  status_.seconds_left =
      status_.rows_per_second > 0 ? left / status_.rows_per_second : kUnknownNumber;
  epoch_fraction_ = static_cast<double>(batch.position() + batch.rows()) /
                    static_cast<double>(std::max<std::int64_t>(1, train_rows));
  read_memory(false);

  std::vector<EventField> fields{
      {"step", at.step}, {"epoch", batch.epoch()}, {"loss", loss}, {"rows", batch.rows()}};
  for (std::size_t k = 0; terms != nullptr && k < kTerms; ++k) {
    fields.push_back({kTermNames[k], (*terms)[k]});
  }
  PLIMSOLL_TRY_VOID(folder_->event("step", fields));
  if (at.step % metrics_every_ == 0) {
    metrics_.scalar("loss/total", loss, at.step);
    for (std::size_t k = 0; terms != nullptr && k < kTerms; ++k) {
      metrics_.scalar(std::string("loss/") + kTermNames[k], (*terms)[k], at.step);
    }
    metrics_.scalar("rate/scale", rate_scale, at.step);
    metrics_.scalar("speed/rows_per_second", status_.rows_per_second, at.step);
  }
  progress_.update(status_, epoch_fraction_);
  return folder_->write_status(status_);
}

Result<void> Report::evaluation(const char* when, const Position& at, const Evaluation& result) {
  progress_.text(fmt::format("{} (step {})\n{}", when, at.step, result.to_text()));
  const std::array<std::pair<const char*, const Retrieval*>, 4> all{
      {{"raw_t2i", &result.raw_t2i},
       {"raw_i2t", &result.raw_i2t},
       {"oracle_t2i", &result.oracle_t2i},
       {"oracle_i2t", &result.oracle_i2t}}};
  for (const auto& [name, r] : all) {
    metrics_.scalar(fmt::format("eval/{}_r1", name), r->r1, at.step);
    metrics_.scalar(fmt::format("eval/{}_r5", name), r->r5, at.step);
    metrics_.scalar(fmt::format("eval/{}_r10", name), r->r10, at.step);
    metrics_.scalar(fmt::format("eval/{}_mean_rank", name), r->mean_rank, at.step);
    metrics_.scalar(fmt::format("eval/{}_map", name), r->map, at.step);
  }
  metrics_.scalar("eval/train_mean_rank", result.train_mean_rank, at.step);
  const std::string json = result.to_json();
  return folder_->event(
      "eval",
      {{"step", at.step}, {"when", std::string_view(when)}, {"recall", std::string_view(json)}});
}

void Report::leave_out(const StoreStats& before, const StoreStats& after) {
  left_out_.requests += after.requests - before.requests;
  left_out_.hits += after.hits - before.hits;
}

double Report::hit_rate(const StoreStats& stats) const {
  StoreStats mine = stats;
  mine.requests -= left_out_.requests;
  mine.hits -= left_out_.hits;
  return mine.hit_rate();
}

Result<void> Report::epoch(const Position& at, std::int64_t epoch, Data& data, bool words) {
  memory_metrics(at.step);
  const StoreStats stats = data.rows().stats();
  status_.hit_rate = hit_rate(stats);
  metrics_.scalar("rows/hit_rate", status_.hit_rate, at.step);
  metrics_.scalar("loss/epoch", at.mean_loss(), at.step);
  if (words) {
    progress_.text(
        fmt::format("epoch {}: mean loss {:.4f}, {:.0f} rows/s\n{}", epoch + 1, at.mean_loss(),
                    rows_per_second(),
                    store_words(stats, left_out_, data.rows().plan(), data.features().stats())));
  }
  return folder_->event("epoch", {{"step", at.step},
                                  {"epoch", epoch},
                                  {"loss", at.mean_loss()},
                                  {"rows_per_second", rows_per_second()},
                                  {"hit_rate", status_.hit_rate},
                                  {"resident_bytes", status_.resident_bytes},
                                  {"leased_bytes", governor_.state().leased_bytes}});
}

RunSummary Report::summary(const Position& at, Data& data) const {
  const StoreStats rows = data.rows().stats();
  const FeatureStats features = data.features().stats();
  RunSummary summary;
  summary.epoch = at.loader.epoch;
  summary.loss = at.mean_loss();
  summary.rows_per_second = rows_per_second();
  summary.hit_rate = hit_rate(rows);
  summary.feature_hit_rate = share(features.hits, features.requests) / 100.0;
  summary.commits = rows.commits;
  summary.stall_seconds = static_cast<double>(rows.stall_ns + data.loader().stall_ns()) * 1e-9;
  summary.rows_skipped = at.rows_skipped;
  return summary;
}

std::string store_words(const StoreStats& stats, const StoreStats& left_out, const SlabPlan& plan,
                        const FeatureStats& features) {
  const std::int64_t requests = stats.requests - left_out.requests;
  const std::int64_t hits = stats.hits - left_out.hits;
  const double rate = share(hits, requests);
  std::string text = fmt::format(
      "rows: {:.1f} % of {} requests were in memory when asked for ({:.1f} % thanks to "
      "look-ahead), {:.1f} % came from disk; {} syncs in {} commits\n"
      "      {:.1f} % of {} page frames in use, {:.1f} MiB of rows not yet written; {:.1f} MiB "
      "read, "
      "{:.1f} MiB written\n"
      "features: {:.1f} % of {} requests in memory, {:.1f} MiB read; {:.1f} % of {} frames in use",
      rate, requests, share(stats.prefetch_hits, stats.requests), 100.0 - rate, stats.syncs,
      stats.commits, share(stats.resident_pages, stats.frames), stats.frames,
      static_cast<double>(stats.dirty_bytes) / kBytesPerMiB,
      static_cast<double>(stats.bytes_read) / kBytesPerMiB,
      static_cast<double>(stats.bytes_written) / kBytesPerMiB,
      share(features.hits, features.requests), features.requests,
      static_cast<double>(features.bytes_read) / kBytesPerMiB,
      share(features.resident_frames, features.frames), features.frames);
  if (requests > 0 && rate < 100.0 * kGoodHitRate) {
    text += fmt::format(
        "\nadvice: fewer than {:.0f} % of the rows asked for are in memory; raise "
        "store_bytes (now {})",
        100.0 * kGoodHitRate, format_bytes(plan.total_bytes));
  } else if (stats.frames > 0 && stats.resident_pages * 2 < stats.frames) {
    text += fmt::format("\nadvice: less than half of store_bytes ({}) is in use; it could be lower",
                        format_bytes(plan.total_bytes));
  }
  return text;
}

}  // namespace plimsoll::cosir
