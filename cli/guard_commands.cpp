// SPDX-License-Identifier: Apache-2.0
//
// run: any command under a memory limit.
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "jobs/job.h"
#include "plimsoll/bytes.h"
#include "plimsoll/limits.h"
#include "watch/guard.h"
#include "watch/progress.h"
#include "watch/restarts.h"
#include "watch/verdict.h"

namespace plimsoll {
namespace {

struct RunOptions {
  std::vector<std::string> command{};
  std::string limit{};
  std::string alert{};
  bool no_cgroup{false};
  std::int64_t restarts{0};
  bool json{false};
};

constexpr std::int64_t kRestartsMost = 1'000'000;

void say(const std::string& text) {
  std::fprintf(stderr, "plimsoll run: %s\n", text.c_str());
}

std::string to_json(const GuardReport& report, const Verdict& verdict, const GuardOptions& options,
                    std::int64_t restarts) {
  return nlohmann::json{{"ending", ending_name(verdict.ending)},
                        {"summary", verdict.summary},
                        {"status", report.status},
                        {"seconds", report.seconds},
                        {"limit_bytes", options.limit_bytes},
                        {"peak_bytes", report.peak_bytes()},
                        {"process_peak_bytes", report.process_peak_bytes},
                        {"charged_peak_bytes", report.charged_peak_bytes},
                        {"seen_peak_bytes", report.peak.bytes},
                        {"grown_bytes", report.growth.bytes},
                        {"grown_seconds", report.growth.seconds},
                        {"stalled_seconds", report.stalled_seconds},
                        {"major_faults", report.major_faults},
                        {"in_cgroup", report.in_cgroup},
                        {"oom_kills", report.oom_kills},
                        {"left_behind", report.left_behind},
                        {"restarts", restarts},
                        {"advice", verdict.advice}}
      .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// What the user wrote, in bytes; a share is one of the machine. The rest of the report: what there
// is.
Result<LimitReport> parse_size(const std::string& text, const char* option) {
  return find_limit({.user_limit = text, .user_source = option});
}

void tell(const GuardReport& done, const Verdict& verdict) {
  say(verdict.summary);
  for (const std::string& line : verdict.advice) {
    std::fprintf(stderr, "  would help: %s\n", line.c_str());
  }
  if (done.left_behind > 0) {
    say(fmt::format("{} processes it left behind were ended", done.left_behind));
  }
}

// `told`: takes the JSON of what came of it.
int run_command(const RunOptions& chosen, const std::function<void(const std::string&)>& told) {
  if (chosen.limit.empty() && chosen.alert.empty() && chosen.restarts == 0) {
    return report(make_error(ErrorCode::kInvalidArgument, "neither a limit nor an alert",
                             "give --memory-limit, --alert or --restarts"),
                  kUsageStatus);
  }
  GuardOptions options{.command = chosen.command, .cgroup = !chosen.no_cgroup, .tell = say};
  auto limit = parse_size(chosen.limit, "--memory-limit");
  if (!limit) {
    return report(limit.error(), kUsageStatus);
  }
  const std::int64_t machine = limit->candidates.back().bytes;  // What is available.
  if (!chosen.limit.empty()) {
    options.limit_bytes = limit->candidates.front().bytes;
  }
  if (!chosen.alert.empty()) {
    const auto alert = parse_size(chosen.alert, "--alert");
    if (!alert) {
      return report(alert.error(), kUsageStatus);
    }
    options.alert_bytes = alert->candidates.front().bytes;
  }
  if (options.limit_bytes > machine) {
    say(fmt::format("the limit is {}, but only {} are available now",
                    format_bytes(options.limit_bytes), format_bytes(machine)));
  }
  std::optional<ProgressNote> note;  // Else the command tells a guard around this one.
  if (chosen.restarts > 0) {
    auto made = ProgressNote::create();
    if (!made) {
      return report(made.error());
    }
    note.emplace(std::move(*made));
  }
  Restarts restarts{.most = chosen.restarts};
  auto done = run_guarded(options);
  Verdict verdict;
  for (;; done = run_guarded(options)) {
    if (!done) {
      return report(done.error());
    }
    verdict = verdict_of(*done, options.limit_bytes, machine);
    tell(*done, verdict);
    const auto next = decide_restart({.status = done->status,
                                      .stopped = done->stopped,
                                      .asked = done->asked,
                                      .progress = note ? note->read() : ""},
                                     restarts);
    if (!next.why.empty()) {
      say(next.why);
    }
    if (!next.again) {
      break;
    }
    std::this_thread::sleep_for(next.pause);
  }
  if (told) {
    told(to_json(*done, verdict, options, restarts.done));
  }
  return done->stopped && done->status == 0 ? kFailedStatus : done->status;
}

}  // namespace

void add_guard_commands(CLI::App& app, int& status) {
  auto* command = app.add_subcommand("run", "Run any command under a memory limit");
  auto options = std::make_shared<RunOptions>();
  command->add_option("--memory-limit", options->limit,
                      "Memory limit of the command and its processes: 24GiB, 6GB, 25%");
  command->add_option("--alert", options->alert,
                      "Size above which a line says how much the command holds");
  command->add_flag(
      "--no-cgroup", options->no_cgroup,
      "No memory cgroup is made: the command is measured, and stopped over the limit");
  command
      ->add_option("--restarts", options->restarts,
                   "How often the command is started again when it was killed or failed")
      ->check(CLI::Range(std::int64_t{0}, kRestartsMost));
  command->add_flag("--json", options->json,
                    "Last line of standard output: what came of it, as JSON");
  command->add_option("COMMAND", options->command, "Command and its arguments, written after --")
      ->required();
  command->footer(R"(
The command and all its processes together hold at most the limit: in a memory cgroup of their own
where one can be made, else they are measured up to four times a second, at 1 % of a core. When
their memory, without mapped files, passes the limit, the command is asked to end (SIGTERM), then
killed. At the end: the peak, how it ended, and what would have helped. The exit status is the
command's, or 128 and its signal.

With --restarts, a command that was killed, or ended with a status other than 0, is started again
after 1, 2, 4, ... at most 60 seconds; a run in it goes on from its last commit (of a recipe, by
`plimsoll resume`). Not when it was asked to end (Ctrl-C), was used wrongly (status 2, 126, 127), or
ended twice with no commit in between.

Examples:
  plimsoll run --memory-limit 24GiB -- python train.py
  plimsoll run --memory-limit 24GiB --restarts 10 -- python train.py
  plimsoll run --alert 40GiB -- python train.py --epochs 3)");
  command->callback([options, &status] {
    status =
        run_command(*options, options->json ? print : std::function<void(const std::string&)>{});
  });
}

int run_job(const Job& job, const std::function<void(const std::string&)>& told) {
  return run_command({.command = job.command, .limit = job.memory_limit}, told);
}

}  // namespace plimsoll
