// SPDX-License-Identifier: Apache-2.0
//
// run: any command under a memory limit.
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include "cli/alert_options.h"
#include "cli/commands.h"
#include "plimsoll/bytes.h"
#include "plimsoll/limits.h"
#include "run/ended_command.h"
#include "run/page.h"
#include "run/run_folder.h"
#include "watch/device_limit.h"
#include "watch/guard.h"
#include "watch/keeper.h"
#include "watch/progress.h"
#include "watch/restarts.h"
#include "watch/verdict.h"

namespace plimsoll {
namespace {

struct RunOptions {
  std::vector<std::string> command{};
  std::string limit{};
  std::string device_limit{};
  bool no_cgroup{false};
  std::int64_t restarts{0};
  std::string record{};
  AlertTexts alerts{};
  bool json{false};
  std::string json_file{};
};

constexpr std::int64_t kRestartsMost = 1'000'000;

void say(const std::string& text) {
  std::fprintf(stderr, "plimsoll run: %s\n", text.c_str());
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

// Leaves how it ended in the folder of the run that the command had, if it told of one, and in that
// of --record.
void leave_ending(const std::string& progress, const std::string& record, const std::string& json) {
  const std::string run = progress.substr(0, progress.rfind(": "));  // "FOLDER: step 120"
  for (const std::string& folder : {run, record}) {
    if (folder.empty() || (folder != record && !RunFolder::is_run(folder))) {
      continue;
    }
    const auto left = write_ended(folder, json);
    const auto drawn = left ? write_report(folder) : Result<std::filesystem::path>{};
    if (!left || !drawn) {
      say((left ? drawn.error() : left.error()).to_string());
    }
  }
}

// Where a command tells how far it has come; else it tells a guard around this one, too.
Result<std::optional<ProgressNote>> make_note(const RunOptions& chosen) {
  std::optional<ProgressNote> note;
  if (chosen.restarts > 0 || !is_progress_asked()) {
    auto made = ProgressNote::create();
    if (!made) {
      return tl::unexpected(std::move(made).error());
    }
    note.emplace(std::move(*made));
  }
  return note;
}

using Told = std::function<void(const std::string&)>;  // Takes the JSON of what came of it.

Told told_by(const RunOptions& chosen) {
  return [json = chosen.json, file = chosen.json_file](const std::string& text) {
    if (json) {
      print(text);
    }
    if (!file.empty() && !(std::ofstream(file) << text << std::endl)) {
      say(file + ": what came of the command could not be written");
    }
  };
}

// `keeper`: as GuardOptions has it.
int run_command(const RunOptions& chosen, const std::optional<ProgressNote>& note, const Told& told,
                pid_t keeper) {
  if (chosen.limit.empty() && chosen.device_limit.empty() && chosen.alerts.size.empty() &&
      chosen.restarts == 0 && chosen.record.empty() && chosen.alerts.file.empty() &&
      chosen.alerts.command.empty() && chosen.alerts.signals.empty()) {
    return report(make_error(ErrorCode::kInvalidArgument, "neither a limit nor an alert",
                             "give --memory-limit, --device-memory-limit, --alert, --restarts, "
                             "--record or --signal"),
                  kUsageStatus);
  }
  GuardOptions options{
      .command = chosen.command, .cgroup = !chosen.no_cgroup, .keeper = keeper, .tell = say};
  auto limit = parse_size(chosen.limit, "--memory-limit");
  if (!limit) {
    return report(limit.error(), kUsageStatus);
  }
  const std::int64_t machine = limit->candidates.back().bytes;  // What is available.
  if (!chosen.limit.empty()) {
    options.limit_bytes = limit->candidates.front().bytes;
  }
  options.record = chosen.record;
  auto alerts = parse_alerts(chosen.alerts);
  if (!alerts) {
    return report(alerts.error(), kUsageStatus);
  }
  options.alerts = std::move(*alerts);
  options.alerts.tell = say;
  const auto alert = parse_alert_size(chosen.alerts);
  if (!alert) {
    return report(alert.error(), kUsageStatus);
  }
  options.alert_bytes = *alert;
  if (options.limit_bytes > machine) {
    say(fmt::format("the limit is {}, but only {} are available now",
                    format_bytes(options.limit_bytes), format_bytes(machine)));
  }
  if (!chosen.device_limit.empty()) {
    const auto told_first = limit_devices(chosen.device_limit);
    if (!told_first) {
      return report(told_first.error(), kUsageStatus);
    }
    if (!told_first->empty()) {
      say(*told_first);
    }
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
    const std::string progress = note ? note->read() : told_progress();
    leave_ending(progress, chosen.record, ended_json(*done, verdict, options, restarts.done));
    const auto next = decide_restart({.status = done->status,
                                      .stopped = done->stopped,
                                      .asked = done->asked,
                                      .progress = progress},
                                     restarts);
    if (!next.why.empty()) {
      say(next.why);
    }
    if (!next.again) {
      break;
    }
    std::this_thread::sleep_for(next.pause);
  }
  told(ended_json(*done, verdict, options, restarts.done));
  return done->stopped && done->status == 0 ? kFailedStatus : done->status;
}

// In a guard of its own process, whose end is told here where it was killed.
int run_kept(const RunOptions& chosen, const Told& told) {
  const auto note = make_note(chosen);
  if (!note) {
    return report(note.error());
  }
  const auto kept =
      keep_guard([&](pid_t keeper) { return run_command(chosen, *note, told, keeper); });
  if (!kept) {
    return report(kept.error());
  }
  if (kept->killed) {
    const Verdict verdict = verdict_of(kept->report, 0, 0);
    tell(kept->report, verdict);
    const std::string json = ended_json(kept->report, verdict, {.command = chosen.command}, 0);
    leave_ending(*note ? (*note)->read() : told_progress(), chosen.record, json);
    told(json);
  }
  return kept->status;
}

}  // namespace

void add_guard_commands(CLI::App& app, int& status) {
  auto* command = app.add_subcommand("run", "Run any command under a memory limit");
  auto options = std::make_shared<RunOptions>();
  command->add_option("--memory-limit", options->limit,
                      "Memory limit of the command and its processes: 24GiB, 6GB, 25%");
  command->add_option("--device-memory-limit", options->device_limit,
                      "Memory limit of a GPU, for each process of the command: 20GiB, 80%");
  command->add_flag(
      "--no-cgroup", options->no_cgroup,
      "No memory cgroup is made: the command is measured, and stopped over the limit");
  command
      ->add_option("--restarts", options->restarts,
                   "How often the command is started again when it was killed or failed")
      ->check(CLI::Range(std::int64_t{0}, kRestartsMost));
  command->add_option("--record", options->record,
                      "Folder in which looks at the command are kept, for `plimsoll why`");
  add_alert_options(*command, options->alerts, "the command");
  command->add_flag("--json", options->json,
                    "Last line of standard output: what came of it, as JSON");
  command->add_option("--json-file", options->json_file,
                      "File for the same line, apart from what the command prints");
  command->add_option("COMMAND", options->command, "Command and its arguments, written after --")
      ->required();
  command->footer(std::string(R"(
The command and all its processes together hold at most the limit: in a memory cgroup of their own
where one can be made, else they are measured up to four times a second, at 1 % of a core. When
their memory, without mapped files, passes the limit, the command is asked to end (SIGTERM), then
killed. At the end: the peak, how it ended, and what would have helped. The exit status is the
command's, or 128 and its signal.

Where the kernel chooses whom to kill for memory, it chooses the command before its guard. A guard
that is killed all the same ends the command with all its processes: they are asked, and killed 10
seconds later. A memory cgroup that was left behind is removed by the next start.

With --restarts, a command that was killed, or ended with a status other than 0, is started again
after 1, 2, 4, ... at most 60 seconds; a run in it goes on from its last commit (of a recipe, by
`plimsoll resume`). Not when it was asked to end (Ctrl-C), was used wrongly (status 2, 126, 127), or
ended twice with no commit in between.

)") + kAlertsHelp +
                  R"(
In a cgroup the kernel would kill at the limit; with --signal the command hears of it before, so
that it may save its work.

With --device-memory-limit, a run of plimsoll in the command keeps the limit as its own. Any other
program of torch 2.11 or later gets it as a share of the GPU (PYTORCH_CUDA_ALLOC_CONF): torch then
gives its cache back at the limit, and raises OutOfMemoryError; the context is not part of it.

With --record FOLDER, looks at the command (256 KiB, however long it runs) and how it ended stay in
the folder: `plimsoll why FOLDER` tells the end, `plimsoll report FOLDER` draws it. A run keeps its
own looks in its own folder, where its end is left as well.

Examples:
  plimsoll run --memory-limit 24GiB -- python train.py
  plimsoll run --memory-limit 24GiB --restarts 10 -- python train.py
  plimsoll run --memory-limit 24GiB --device-memory-limit 20GiB -- python train.py
  plimsoll run --memory-limit 24GiB --signal TERM,KILL -- python train.py
  plimsoll run --alert 40GiB --alert-command 'curl -d @- localhost:8080' -- python train.py)");
  command->callback([options, &status] { status = run_kept(*options, told_by(*options)); });
}

void add_queue_command(CLI::App& app) {
  auto* command = app.add_subcommand(
      "queue", "Run commands one after another, each in its limit (needs Python)");
  command->prefix_command();
  command->footer("\nExample:\n  plimsoll queue run queue/");
}

}  // namespace plimsoll
