// SPDX-License-Identifier: Apache-2.0
#include "recipes/can_kd/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/check.h"

namespace plimsoll::can_kd {

Report::Report(RunFolder* folder, Metrics metrics, const ProgressOptions& progress,
               const CanKdConfig& config, Governor governor)
    : RunReport(folder, std::move(metrics), progress, std::move(governor)),
      log_every_(std::max<std::int64_t>(1, config.log_every_n_steps)) {}

Result<void> Report::begin_task(const Task& task, std::int64_t step, const Work& work,
                                bool resumed) {
  const std::string name = task.name();
  status_.epochs = work.epochs();
  status_.steps_total = step + work.steps() + 1;  // The end of a task is a step of its own.
  text(fmt::format("{}{}: {} parameters", name, resumed ? " goes on" : "",
                   format_count(work.parameters())));
  return event("task", {{"step", step},
                        {"task", std::string_view(name)},
                        {"resumed", resumed},
                        {"parameters", work.parameters()}});
}

Result<void> Report::end_task(const Task& task, std::int64_t step, const Work& work) {
  const std::string name = task.name();
  return event(
      "task_done",
      {{"step", step}, {"task", std::string_view(name)}, {"parameters", work.parameters()}});
}

Result<void> Report::step(const Task& task, std::int64_t step, const StepNews& news) {
  rows_done_ += news.graphs;
  status_.status = "running";
  status_.step = step;
  status_.epoch = news.epoch;
  status_.loss = news.loss;
  status_.rows_per_second = rows_per_second();
  status_.seconds = seconds();
  const auto left = static_cast<double>((status_.steps_total - step) * news.graphs);
  status_.seconds_left =
      status_.rows_per_second > 0 ? left / status_.rows_per_second : kUnknownNumber;
  epoch_fraction_ = news.epoch_fraction;
  read_memory(false);
  const std::string name = task.name();
  std::vector<EventField> fields{{"step", step},
                                 {"task", std::string_view(name)},
                                 {"epoch", news.epoch},
                                 {"loss", news.loss},
                                 {"graphs", news.graphs}};
  for (const auto& [term, value] : news.terms) {
    fields.push_back({term, value});
  }
  PLIMSOLL_TRY_VOID(folder_->event("step", fields));
  if (step % log_every_ == 0) {
    metrics_.scalar(name + "/loss", news.loss, step);
    for (const auto& [term, value] : news.terms) {
      metrics_.scalar(fmt::format("{}/loss/{}", name, term), value, step);
    }
    metrics_.scalar(name + "/rate_scale", news.rate_scale, step);
    metrics_.scalar("speed/graphs_per_second", status_.rows_per_second, step);
  }
  progress_.update(status_, epoch_fraction_);
  return folder_->write_status(status_);
}

Result<void> Report::epoch(const Task& task, std::int64_t step, const EpochNews& news) {
  memory_metrics(step);
  const std::string name = task.name();
  metrics_.scalar(name + "/epoch_loss", news.loss, step);
  metrics_.scalar(name + "/held_out_loss", news.held_out, step);
  std::string more;
  for (const auto& [figure, value] : news.figures) {
    metrics_.scalar(fmt::format("{}/{}", name, figure), value, step);
    more += fmt::format(", {} {:.6g}", figure, value);
  }
  if (news.scored > 0) {
    more += fmt::format(", {} scored in {:.2f} s", news.scored, news.scoring_seconds);
  }
  text(fmt::format("{} epoch {}/{}: loss {:.5f}, held out {:.5f}{}{}", name, news.epoch + 1,
                   news.epochs, news.loss, news.held_out, news.best ? " (best)" : "", more));
  std::vector<EventField> fields{{"step", step},
                                 {"task", std::string_view(name)},
                                 {"epoch", news.epoch},
                                 {"loss", news.loss},
                                 {"held_out_loss", news.held_out},
                                 {"best", news.best},
                                 {"graphs_per_second", rows_per_second()},
                                 {"resident_bytes", status_.resident_bytes},
                                 {"leased_bytes", governor_.state().leased_bytes}};
  for (const auto& [figure, value] : news.figures) {
    fields.push_back({figure.c_str(), value});
  }
  if (news.scored > 0) {
    fields.push_back({"scored", news.scored});
    fields.push_back({"scoring_seconds", news.scoring_seconds});
  }
  return folder_->event("epoch", fields);
}

}  // namespace plimsoll::can_kd
