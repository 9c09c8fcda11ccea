// SPDX-License-Identifier: Apache-2.0
#include "recipes/metrics.h"

#include <chrono>
#include <optional>

#include "base/check.h"
#include "recipes/metrics_mlflow.h"
#include "recipes/metrics_tensorboard.h"

namespace plimsoll {

class Metrics::Impl {
 public:
  Result<void> open(const MetricsOptions& options) {
    if (!options.tensorboard.empty()) {
      PLIMSOLL_TRY(auto file, EventFile::create(options.tensorboard, options.resumed_step));
      events_.emplace(std::move(file));
    }
    if (!options.mlflow.empty()) {
      PLIMSOLL_TRY(auto run,
                   MlflowRun::open(options.mlflow, options.experiment, options.run_name,
                                   options.run / "metrics" / "mlflow_run_id", options.params));
      mlflow_.emplace(std::move(run));
    }
    return {};
  }

  void scalar(std::string_view tag, double value, std::int64_t step) {
    const double now = wall_seconds();
    if (events_) {
      keep(events_->scalar(tag, value, step, now));
    }
    if (mlflow_) {
      keep(mlflow_->metric(tag, value, step, static_cast<std::int64_t>(now * 1000)));
    }
  }

  Result<void> flush() {
    if (events_) {
      keep(events_->flush());
    }
    Result<void> first = std::move(first_);
    first_ = Result<void>{};
    return first;
  }

  Result<void> finish(std::string_view status) {
    if (mlflow_) {
      keep(mlflow_->finish(status, static_cast<std::int64_t>(wall_seconds() * 1000)));
    }
    return flush();
  }

 private:
  static double wall_seconds() {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch())
        .count();
  }

  void keep(Result<void> done) {
    if (!done && first_) {
      first_ = std::move(done);
    }
  }

  std::optional<EventFile> events_{};
  std::optional<MlflowRun> mlflow_{};
  Result<void> first_{};
};

Metrics::Metrics(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
Metrics::Metrics(Metrics&&) noexcept = default;
Metrics& Metrics::operator=(Metrics&&) noexcept = default;
Metrics::~Metrics() = default;

Result<Metrics> Metrics::open(const MetricsOptions& options) {
  auto impl = std::make_unique<Impl>();
  PLIMSOLL_TRY_VOID(impl->open(options));
  return Metrics(std::move(impl));
}

void Metrics::scalar(std::string_view tag, double value, std::int64_t step) {
  impl_->scalar(tag, value, step);
}

Result<void> Metrics::flush() {
  return impl_->flush();
}

Result<void> Metrics::finish(std::string_view status) {
  return impl_->finish(status);
}

}  // namespace plimsoll
