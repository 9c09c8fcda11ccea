// SPDX-License-Identifier: Apache-2.0
#include "cli/watch_metrics.h"

#include <cmath>

#include <fmt/format.h>

namespace plimsoll {
namespace {

std::string label(const std::string& text) {
  std::string out;
  for (const char c : text) {
    out += c == '\\' ? "\\\\" : c == '"' ? "\\\"" : c == '\n' ? "\\n" : std::string(1, c);
  }
  return out;
}

class MetricsText {
 public:
  explicit MetricsText(const std::string& target)
      : target_(fmt::format("target=\"{}\"", label(target))) {}
  void gauge(const char* name, const char* help) {
    text_ += fmt::format("# HELP {0} {1}\n# TYPE {0} gauge\n", name, help);
  }
  void value(const char* name, double value, const std::string& more = "") {
    const std::string number = std::isinf(value) ? "+Inf" : fmt::format("{}", value);
    text_ += fmt::format("{}{{{}{}}} {}\n", name, target_, more.empty() ? "" : "," + more, number);
  }
  void one(const char* name, const char* help, double of) {
    gauge(name, help);
    value(name, of);
  }
  [[nodiscard]] std::string take() { return std::move(text_); }

 private:
  std::string target_;
  std::string text_{};
};

}  // namespace

std::string metrics_text(const std::string& target, double step, Watch& watch, const Room& room,
                         const std::vector<DeviceStatus>& devices) {
  MetricsText text(target);
  const Finding finding = watch.verdict();
  const auto real = [](std::int64_t bytes) { return static_cast<double>(bytes); };
  text.one("plimsoll_held_bytes", "Anonymous and shared memory of the process tree.",
           real(watch.seen().tree.unbacked()));
  text.gauge("plimsoll_owner_bytes", "What each owner holds.");
  for (std::size_t at = 0; at < kOwnerCount; ++at) {
    const auto owner = static_cast<Owner>(at);
    if (const std::int64_t bytes = watch.holdings().of(owner); bytes >= 0) {
      text.value("plimsoll_owner_bytes", real(bytes),
                 fmt::format("owner=\"{}\"", owner_name(owner)));
    }
  }
  text.one("plimsoll_processes", "Processes of the tree.", watch.seen().tree.processes);
  text.gauge("plimsoll_limit_bytes", "The bound that is met first.");
  text.value("plimsoll_limit_bytes", real(room.limit_bytes),
             fmt::format("source=\"{}\"", label(room.source)));
  text.one("plimsoll_left_bytes", "What is left of that bound.", real(room.left_bytes));
  text.one("plimsoll_seconds_left", "Until it is passed at the leak's rate; +Inf without a leak.",
           room.seconds_left(finding.bytes_per_second));
  text.gauge("plimsoll_leak_bytes_per_second",
             "How fast the owner that leaks grows; 0: none does.");
  const bool leaks = finding.course == Course::kLeak;
  text.value("plimsoll_leak_bytes_per_second", leaks ? finding.bytes_per_second : 0,
             leaks ? fmt::format("owner=\"{}\"", owner_name(finding.owner)) : "");
  text.one("plimsoll_looks", "Looks so far.", real(watch.looks()));
  if (step >= 0) {
    text.one("plimsoll_step", "The step that the run is at.", step);
  }
  if (!devices.empty()) {
    text.gauge("plimsoll_device_bytes", "What is held of a device's memory, by whom.");
    for (const DeviceStatus& one : devices) {
      const auto held = [&](const char* owner, std::int64_t bytes) {
        text.value("plimsoll_device_bytes", real(bytes),
                   fmt::format("device=\"{}\",owner=\"{}\"", label(one.name), owner));
      };
      held("tensors", one.allocated_bytes);
      held("cache", one.reserved_bytes - one.allocated_bytes);
      held("context", one.context_bytes);
    }
    text.gauge("plimsoll_device_limit_bytes", "The limit of a device's memory.");
    for (const DeviceStatus& one : devices) {
      text.value("plimsoll_device_limit_bytes", real(one.limit_bytes),
                 fmt::format("device=\"{}\"", label(one.name)));
    }
  }
  return text.take();
}

}  // namespace plimsoll
