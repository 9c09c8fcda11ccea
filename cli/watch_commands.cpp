// SPDX-License-Identifier: Apache-2.0
//
// watch: whose memory a process or a run holds, whether it is a leak, and how long it lasts.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include <sys/ioctl.h>
#include <unistd.h>

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "cli/alert_options.h"
#include "cli/commands.h"
#include "cli/watch_metrics.h"
#include "plimsoll/bytes.h"
#include "run/device_document.h"
#include "run/progress.h"
#include "run/run_folder.h"
#include "watch/alerts.h"
#include "watch/find.h"
#include "watch/loopback.h"
#include "watch/room.h"
#include "watch/watch.h"

namespace plimsoll {
namespace {

constexpr double kWindowLooks = 25;  // Of a trend, in looks; or in steps of a run.
constexpr double kEveryLeast = 0.05;
constexpr double kEveryMost = 3600;
constexpr std::chrono::milliseconds kAlertStep{50};
constexpr std::size_t kProcessesShown = 16;

struct WatchOptions {
  std::string target{};
  double every{1};
  int port{-1};  // −1: nobody is answered.
  bool find{false};
  AlertTexts alerts{};
  bool once{false};
  bool json{false};
};

// What is watched: a process, or the one that trains in a run.
struct Target {
  int pid{0};
  std::filesystem::path run{};      // Empty: a process of any program.
  std::int64_t run_limit_bytes{0};  // 0: none is known.
  double step{0};
  Inside inside{};
  std::vector<DeviceStatus> devices{};
  [[nodiscard]] const char* unit() const { return run.empty() ? "second" : "step"; }
};

void read_run(const RunView& view, Target& target) {
  target.run_limit_bytes = view.status.limit_bytes;
  target.step = std::max(target.step, static_cast<double>(view.status.step));
  target.devices = view.status.devices;
  const auto& leased = view.status.leased_by_tag;
  target.inside.tensors = leased[static_cast<std::size_t>(Tag::kTensor)];
  target.inside.before = view.status.before_anonymous_bytes;
  target.inside.leased = 0;
  for (std::size_t tag = 0; tag < leased.size(); ++tag) {
    if (tag != static_cast<std::size_t>(Tag::kTensor)) {
      target.inside.leased += leased[tag];
    }
  }
}

// Errors: kNotFound where there is no such run. A run in which nobody trains has pid 0.
Result<Target> find_target(const std::string& text) {
  Target target;
  const char* const end = text.data() + text.size();
  const auto [stop, status] = std::from_chars(text.data(), end, target.pid);
  std::error_code none;
  if (status == std::errc() && stop == end && !std::filesystem::exists(text, none)) {
    return target;
  }
  auto view = RunFolder::view(text);
  if (!view) {
    return tl::unexpected(std::move(view).error());
  }
  target.run = text;
  target.pid = view->alive ? view->pid : 0;
  read_run(*view, target);
  return target;
}

// Processes below each other, the largest of each level first.
void add_tree(const std::vector<ProcessUse>& all, int parent, int depth,
              std::vector<std::string>& lines) {
  for (const ProcessUse& use : all) {
    const bool top =
        depth == 0 && std::ranges::find(all, use.parent, &ProcessUse::pid) == all.end();
    if ((top || (depth > 0 && use.parent == parent)) && lines.size() < kProcessesShown) {
      lines.push_back(fmt::format("  {:<36}{:>12}",
                                  std::string(2 * static_cast<std::size_t>(depth), ' ') +
                                      fmt::format("{} {}", use.pid, use.name),
                                  format_bytes(use.unbacked())));
      add_tree(all, use.pid, depth + 1, lines);
    }
  }
}

std::string lasting(const Room& room, const Finding& finding) {
  const double seconds = room.seconds_left(finding.bytes_per_second);
  const std::string left =
      room.source == "available"
          ? fmt::format("{} that the machine has", format_bytes(room.left_bytes))
          : fmt::format("{} to the {} of {}", format_bytes(room.left_bytes), room.source,
                        format_bytes(room.limit_bytes));
  return std::isfinite(seconds) ? fmt::format("{}: {}", left, format_duration(seconds)) : left;
}

std::string to_text(const Target& target, Watch& watch, const Room& room) {
  const TreeLook& seen = watch.seen();
  const Finding finding = watch.verdict();
  std::string text = fmt::format("process {}{}: {} in {} {}\n", target.pid,
                                 target.run.empty() ? "" : " of " + target.run.string(),
                                 format_bytes(seen.tree.unbacked()), seen.tree.processes,
                                 seen.tree.processes == 1 ? "process" : "processes");
  for (std::size_t at = 0; at < kOwnerCount; ++at) {
    const auto owner = static_cast<Owner>(at);
    if (const std::int64_t bytes = watch.holdings().of(owner); bytes > 0) {
      text +=
          fmt::format("  {:<14}{:>12}{}\n", owner_name(owner), format_bytes(bytes),
                      owner == Owner::kShared && seen.in_flight_bytes > 0
                          ? fmt::format(", {} of it in flight", format_bytes(seen.in_flight_bytes))
                          : "");
    }
  }
  for (const DeviceStatus& device : target.devices) {
    text += fmt::format("  {:<14}{}\n", device.name, device_words(device));
  }
  std::vector<std::string> processes;
  if (seen.tree.processes > 1) {
    add_tree(seen.tree.largest, 0, 0, processes);
    if (std::ssize(processes) < seen.tree.processes) {
      processes.push_back(
          fmt::format("  and {} more", seen.tree.processes - std::ssize(processes)));
    }
  }
  for (const std::string& line : processes) {
    text += line + "\n";
  }
  text += fmt::format("  verdict       {}\n", finding.text(target.unit()));
  for (const std::string& line : finding.advice()) {
    text += fmt::format("  would help    {}\n", line);
  }
  return text + fmt::format("  left          {}\n", lasting(room, finding));
}

nlohmann::ordered_json number_or_null(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json();
}

std::string to_json(const Target& target, Watch& watch, const Room& room) {
  const TreeLook& seen = watch.seen();
  const Finding finding = watch.verdict();
  nlohmann::ordered_json json{{"pid", target.pid},
                              {"held_bytes", seen.tree.unbacked()},
                              {"bound_bytes", seen.bound_bytes},
                              {"in_flight_bytes", seen.in_flight_bytes},
                              {"close", seen.close},
                              {"looks", watch.looks()}};
  auto& owners = json["owners"] = nlohmann::ordered_json::object();
  for (std::size_t at = 0; at < kOwnerCount; ++at) {
    const auto owner = static_cast<Owner>(at);
    if (const std::int64_t bytes = watch.holdings().of(owner); bytes >= 0) {
      owners[owner_name(owner)] = bytes;
    }
  }
  auto& devices = json["devices"] = nlohmann::ordered_json::array();
  for (const DeviceStatus& device : target.devices) {
    devices.push_back(device_document(device));
  }
  auto& processes = json["processes"] = nlohmann::ordered_json::array();
  for (const ProcessUse& use : seen.tree.largest) {
    processes.push_back({{"pid", use.pid},
                         {"parent", use.parent},
                         {"name", use.name},
                         {"anonymous_bytes", use.anonymous},
                         {"shared_bytes", use.shared},
                         {"file_bytes", use.file}});
  }
  json["verdict"] = {{"kind", course_name(finding.course)},
                     {"owner", owner_name(finding.owner)},
                     {"unit", target.unit()},
                     {"bytes_per_unit", finding.bytes_per_unit},
                     {"bytes_per_second", finding.bytes_per_second},
                     {"process", finding.process},
                     {"windows_seen", finding.windows_seen},
                     {"windows_wanted", finding.windows_wanted},
                     {"seconds_wanted", number_or_null(finding.seconds_wanted)},
                     {"text", finding.text(target.unit())},
                     {"advice", finding.advice()}};
  json["room"] = {{"source", room.source},
                  {"limit_bytes", room.limit_bytes},
                  {"left_bytes", room.left_bytes},
                  {"seconds_left", number_or_null(room.seconds_left(finding.bytes_per_second))}};
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

// Rows that a text takes on the terminal, which wraps what is longer than its columns.
std::size_t rows_of(const std::string& text) {
  struct winsize size {};
  const bool known = ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  const std::size_t columns = known ? size.ws_col : SIZE_MAX;
  std::size_t rows = 0;
  std::size_t length = 0;  // In characters.
  for (const char one : text) {
    if (one == '\n') {
      rows += 1 + (length > 0 ? (length - 1) / columns : 0);
      length = 0;
    } else if ((static_cast<unsigned char>(one) & 0xC0U) != 0x80U) {
      ++length;
    }
  }
  return rows;
}

// Where standard output is a terminal, each text takes the place of the one before.
void show(const std::string& text, std::size_t& lines_before) {
  const bool live = ::isatty(STDOUT_FILENO) == 1;
  const std::string back =
      live && lines_before > 0 ? fmt::format("\x1b[{}F\x1b[J", lines_before) : "";
  lines_before = rows_of(text);
  print(back + text);
}

// "python 4711, 5.3 GiB, run runs/a: python train.py"
std::string trainer_line(const Trainer& one) {
  return fmt::format("{:>9}  {:>10}  {}{}", one.pid, format_bytes(one.resident_bytes), one.command,
                     one.run.empty() ? "" : "  (run " + one.run.string() + ")");
}

// Fills in the target where one process trains. Where none or several do, says so; the exit status.
std::optional<int> choose_trainer(WatchOptions& options) {
  const auto found = find_trainers();
  if (!found) {
    return report(found.error());
  }
  if (found->size() == 1 && !options.json) {
    const Trainer& only = found->front();
    options.target = only.run.empty() ? std::to_string(only.pid) : only.run.string();
    return std::nullopt;
  }
  auto all = nlohmann::ordered_json::array();
  for (const Trainer& one : *found) {
    if (options.json) {
      all.push_back({{"pid", one.pid},
                     {"resident_bytes", one.resident_bytes},
                     {"command", one.command},
                     {"run", one.run.string()},
                     {"torch", one.torch}});
    } else {
      print(trainer_line(one));
    }
  }
  if (options.json) {
    print(all.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  }
  if (found->empty()) {
    return report(make_error(ErrorCode::kNotFound, "no process trains that may be looked at",
                             "one has torch mapped, or holds a run's folder"),
                  kNobodyStatus);
  }
  return 0;
}

// Looks at a target again and again: shows, tells, answers, acts.
class Watching {
 public:
  using Clock = std::chrono::steady_clock;

  Watching(const WatchOptions& options, Target target, AlertOptions alerts,
           std::int64_t alert_bytes, std::optional<Loopback> loopback)
      : options_(options),
        target_(std::move(target)),
        alert_bytes_(alert_bytes),
        loopback_(std::move(loopback)),
        watch_(target_.pid, steps() ? kWindowLooks : kWindowLooks * options.every) {
    if (alerts.any() || alert_bytes > 0) {
      alerts_.emplace(std::move(alerts));
    }
  }

  int run() {
    for (;;) {
      const double seconds = std::chrono::duration<double>(Clock::now() - began_).count();
      const std::int64_t limit =
          std::min(target_.run_limit_bytes > 0 ? target_.run_limit_bytes : INT64_MAX, alert_at());
      if (auto looked = watch_.look(steps() ? target_.step : seconds, target_.inside, "", limit);
          !looked) {
        return ended(looked.error());
      }
      const auto room =
          least_room(target_.pid, watch_.seen().tree.unbacked(), target_.run_limit_bytes);
      if (!room) {
        return report(room.error());
      }
      if (alerts_) {
        alert(*room);
      }
      const bool shown = Clock::now() >= next_shown_;
      if (shown) {
        next_shown_ = Clock::now() + every();
        options_.json ? print(to_json(target_, watch_, *room))
                      : show(to_text(target_, watch_, *room), lines_);
      }
      if (options_.once) {
        return 0;
      }
      wait(*room);
      if (const auto view = steps() ? RunFolder::view(target_.run) : Result<RunView>(RunView{});
          steps() && view) {
        read_run(*view, target_);
      }
    }
  }

 private:
  [[nodiscard]] bool steps() const { return !target_.run.empty(); }
  [[nodiscard]] Clock::duration every() const {
    return std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(options_.every));
  }
  [[nodiscard]] std::string who() const {
    return steps() ? target_.run.string() : fmt::format("process {}", target_.pid);
  }

  int ended(const Error& error) {
    if (watch_.looks() == 0) {
      return report(error);
    }
    if (!options_.json) {
      print(fmt::format("process {} has ended", target_.pid));
    }
    while (alerts_ && alerts_->busy()) {
      alerts_->poll(Clock::now());
      std::this_thread::sleep_for(kAlertStep);
    }
    return 0;
  }

  void alert(const Room& room) {
    const auto now = Clock::now();
    const std::int64_t held = watch_.seen().tree.unbacked();
    alerts_->look(now, held, room, who(), watch_.verdict());
    if (watch_.seen().close) {  // Else what processes share may count several times.
      if (held > alert_at()) {
        tell(now, "size", who() + " " + size_text(held, alert_bytes_));
      }
      alerted_ = alert_bytes_ > 0 && held > alert_bytes_;
    }
    alerts_->poll(now);
    if (const int signal = alerts_->act_signal(now); signal != 0) {
      ::kill(target_.pid, signal);
      tell(now, "signal",
           fmt::format("{} holds {}, with {} left: {} is sent", who(), format_bytes(held),
                       format_bytes(room.left_bytes), signal_text(signal)));
    }
  }

  void tell(Clock::time_point now, const char* level, const std::string& text) {
    std::fprintf(stderr, "plimsoll watch: %s\n", text.c_str());
    alerts_->say(now, level, text);
  }

  // What is told of once, and again after less was held.
  [[nodiscard]] std::int64_t alert_at() const {
    return alert_bytes_ == 0 || alerted_ ? INT64_MAX : alert_bytes_;
  }

  // Till the next look, which alerts want sooner the less is left.
  void wait(const Room& room) {
    const Clock::time_point paced{std::chrono::nanoseconds(watch_.next_ns())};
    const Clock::duration pause =
        alerts_ ? std::min<Clock::duration>(every(), alerts_->pause()) : every();
    const auto until = std::max(Clock::now() + pause, paced);
    if (loopback_) {
      loopback_->serve(
          metrics_text(who(), steps() ? target_.step : -1, watch_, room, target_.devices), until);
    } else {
      std::this_thread::sleep_until(until);
    }
  }

  const WatchOptions& options_;
  Target target_;
  std::int64_t alert_bytes_;  // 0: none.
  bool alerted_{false};
  std::optional<Loopback> loopback_;
  std::optional<Alerts> alerts_{};
  Watch watch_;
  Clock::time_point began_{Clock::now()};
  Clock::time_point next_shown_{};
  std::size_t lines_{0};
};

int watch_target(WatchOptions options) {
  auto alerts = parse_alerts(options.alerts);
  if (!alerts) {
    return report(alerts.error(), kUsageStatus);
  }
  const auto alert_bytes = parse_alert_size(options.alerts);
  if (!alert_bytes) {
    return report(alert_bytes.error(), kUsageStatus);
  }
  alerts->tell = [](const std::string& text) {
    std::fprintf(stderr, "plimsoll watch: %s\n", text.c_str());
  };
  if (options.find == !options.target.empty()) {
    return report(make_error(ErrorCode::kInvalidArgument, "TARGET or --find, one of them",
                             "name a run's folder or a pid, or let it be found by --find"),
                  kUsageStatus);
  }
  if (options.find) {
    if (const auto status = choose_trainer(options)) {
      return *status;
    }
  }
  auto target = find_target(options.target);
  if (!target) {
    return report(target.error());
  }
  if (target->pid == 0) {
    return report(make_error(ErrorCode::kNotFound, options.target + ": no process trains there",
                             "`plimsoll why RUN` says how it ended"),
                  kNobodyStatus);
  }
  std::optional<Loopback> loopback;
  if (options.port >= 0) {
    auto made = Loopback::listen(options.port);
    if (!made) {
      return report(made.error());
    }
    loopback.emplace(std::move(*made));
    std::fprintf(stderr, "plimsoll watch: http://127.0.0.1:%d/metrics\n", loopback->port());
  }
  return Watching(options, std::move(*target), std::move(*alerts), *alert_bytes,
                  std::move(loopback))
      .run();
}

}  // namespace

void add_watch_commands(CLI::App& app, int& status) {
  auto* command =
      app.add_subcommand("watch", "Say whose memory a process holds, and whether it leaks");
  auto options = std::make_shared<WatchOptions>();
  command->add_option("TARGET", options->target, "Folder of a run, or the pid of any process");
  command->add_flag("--find", options->find,
                    "Processes that train are found: watched where it is one, else listed");
  command->add_flag("--once", options->once, "One look and no more, without a verdict on growth");
  command->add_flag("--json", options->json, "Each look as one line of JSON instead of text");
  command
      ->add_option("--every", options->every,
                   "Seconds from one look to the next; more where looking takes long")
      ->check(CLI::Range(kEveryLeast, kEveryMost));
  command
      ->add_option("--listen", options->port,
                   "Port of 127.0.0.1 on which Prometheus is answered; 0: one that is free")
      ->check(CLI::Range(0, 65'535));
  add_alert_options(*command, options->alerts, "the process");
  command->footer(std::string(R"(
The process and all its descendants, from outside: what they hold by owner, pages that they share
counted once, and what that comes to. After seven windows of 25 looks (25 steps of a run) there is a
verdict: a plateau, a warm-up, or a leak with its bytes a second or a step; later where growth is
slow. The time that is left is to the least of the run's limit, the cgroups' and the machine's.
Looking costs 1 % of one core at most, however much is held. Ends with the process.

--find goes by what processes are, not by their names: torch is mapped, or the lock of a run held.

)") + kAlertsHelp +
                  R"(
No signal is sent unless --signal says so; a run answers TERM with a commit, and ends.

Examples:
  plimsoll watch run/
  plimsoll watch --find
  plimsoll watch 4711 --alert 40GiB --alert-command 'mail -s memory me'
  plimsoll watch 4711 --alert-file alerts.jsonl --signal TERM,KILL
  plimsoll watch 4711 --listen 9101
  plimsoll watch 4711 --every 5
  plimsoll watch 4711 --once --json)");
  command->callback([options, &status] { status = watch_target(*options); });
}

}  // namespace plimsoll
