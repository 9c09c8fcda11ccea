// SPDX-License-Identifier: Apache-2.0
//
// watch: whose memory a process or a run holds, whether it is a leak, and how long it lasts.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <thread>

#include <unistd.h>

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "plimsoll/bytes.h"
#include "run/progress.h"
#include "run/run_folder.h"
#include "watch/room.h"
#include "watch/watch.h"

namespace plimsoll {
namespace {

constexpr double kWindowLooks = 25;  // Of a trend, in looks; or in steps of a run.
constexpr double kEveryLeast = 0.05;
constexpr double kEveryMost = 3600;
constexpr std::size_t kProcessesShown = 16;

struct WatchOptions {
  std::string target{};
  double every{1};
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
  [[nodiscard]] const char* unit() const { return run.empty() ? "second" : "step"; }
};

void read_run(const RunView& view, Target& target) {
  target.run_limit_bytes = view.status.limit_bytes;
  target.step = std::max(target.step, static_cast<double>(view.status.step));
  const auto& leased = view.status.leased_by_tag;
  target.inside.tensors = leased[static_cast<std::size_t>(Tag::kTensor)];
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
          fmt::format("  {:<12}{:>12}{}\n", owner_name(owner), format_bytes(bytes),
                      owner == Owner::kShared && seen.in_flight_bytes > 0
                          ? fmt::format(", {} of it in flight", format_bytes(seen.in_flight_bytes))
                          : "");
    }
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
  text += fmt::format("  verdict     {}\n", finding.text(target.unit()));
  for (const std::string& line : finding.advice()) {
    text += fmt::format("  would help  {}\n", line);
  }
  return text + fmt::format("  left        {}\n", lasting(room, finding));
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
                     {"text", finding.text(target.unit())},
                     {"advice", finding.advice()}};
  json["room"] = {{"source", room.source},
                  {"limit_bytes", room.limit_bytes},
                  {"left_bytes", room.left_bytes},
                  {"seconds_left", number_or_null(room.seconds_left(finding.bytes_per_second))}};
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

// Where standard output is a terminal, each text takes the place of the one before.
void show(const std::string& text, std::size_t& lines_before) {
  const bool live = ::isatty(STDOUT_FILENO) == 1;
  const std::string back =
      live && lines_before > 0 ? fmt::format("\x1b[{}F\x1b[J", lines_before) : "";
  lines_before = static_cast<std::size_t>(std::ranges::count(text, '\n'));
  print(back + text);
}

int watch_target(const WatchOptions& options) {
  using Clock = std::chrono::steady_clock;
  auto target = find_target(options.target);
  if (!target) {
    return report(target.error());
  }
  if (target->pid == 0) {
    return report(make_error(ErrorCode::kNotFound, options.target + ": no process trains there",
                             "`plimsoll status RUN` says how it ended"),
                  kNobodyStatus);
  }
  const bool steps = !target->run.empty();
  Watch watch(target->pid, steps ? kWindowLooks : kWindowLooks * options.every);
  const auto every =
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options.every));
  const auto began = Clock::now();
  for (std::size_t lines = 0;;) {
    const double seconds = std::chrono::duration<double>(Clock::now() - began).count();
    const std::int64_t limit = target->run_limit_bytes > 0 ? target->run_limit_bytes : INT64_MAX;
    if (auto looked = watch.look(steps ? target->step : seconds, target->inside, "", limit);
        !looked) {
      if (watch.looks() == 0) {
        return report(looked.error());
      }
      if (!options.json) {
        print(fmt::format("process {} has ended", target->pid));
      }
      return 0;
    }
    const auto room =
        least_room(target->pid, watch.seen().tree.unbacked(), target->run_limit_bytes);
    if (!room) {
      return report(room.error());
    }
    if (options.json) {
      print(to_json(*target, watch, *room));
    } else {
      show(to_text(*target, watch, *room), lines);
    }
    if (options.once) {
      return 0;
    }
    const Clock::time_point paced{std::chrono::nanoseconds(watch.next_ns())};
    std::this_thread::sleep_until(std::max(Clock::now() + every, paced));
    if (const auto view = steps ? RunFolder::view(target->run) : Result<RunView>(RunView{});
        steps && view) {
      read_run(*view, *target);
    }
  }
}

}  // namespace

void add_watch_commands(CLI::App& app, int& status) {
  auto* command =
      app.add_subcommand("watch", "Say whose memory a process holds, and whether it leaks");
  auto options = std::make_shared<WatchOptions>();
  command->add_option("TARGET", options->target, "Folder of a run, or the pid of any process")
      ->required();
  command->add_flag("--once", options->once, "One look and no more, without a verdict on growth");
  command->add_flag("--json", options->json, "Each look as one line of JSON instead of text");
  command
      ->add_option("--every", options->every,
                   "Seconds from one look to the next; more where looking takes long")
      ->check(CLI::Range(kEveryLeast, kEveryMost));
  command->footer(R"(
The process and all its descendants, from outside: what they hold by owner, pages that they share
counted once, and what that comes to. After eight windows of 25 looks (25 steps of a run) there is a
verdict: a plateau, a warm-up, or a leak with its bytes a second or a step. The time that is left is
to the least of the run's limit, the cgroups' and the machine's. Looking costs 1 % of one core at
most, however much is held. Ends with the process.

Examples:
  plimsoll watch run/
  plimsoll watch 4711 --every 5
  plimsoll watch 4711 --once --json)");
  command->callback([options, &status] { status = watch_target(*options); });
}

}  // namespace plimsoll
