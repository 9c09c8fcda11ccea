// SPDX-License-Identifier: Apache-2.0
#include "run/metrics.h"

#include <chrono>
#include <utility>

#include "base/check.h"

namespace plimsoll {

Result<Metrics> Metrics::open(const std::filesystem::path& folder, std::int64_t resumed_step) {
  Metrics metrics;
  if (!folder.empty()) {
    PLIMSOLL_TRY(auto file, EventFile::create(folder, resumed_step));
    metrics.events_.emplace(std::move(file));
  }
  return metrics;
}

void Metrics::scalar(std::string_view tag, double value, std::int64_t step) {
  if (events_) {
    const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
    keep(events_->scalar(tag, value, step, now.count()));
  }
}

Result<void> Metrics::flush() {
  if (events_) {
    keep(events_->flush());
  }
  return std::exchange(first_, Result<void>{});
}

void Metrics::keep(Result<void> done) {
  if (!done && first_) {
    first_ = std::move(done);
  }
}

}  // namespace plimsoll
