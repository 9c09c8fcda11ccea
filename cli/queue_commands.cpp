// SPDX-License-Identifier: Apache-2.0
//
// queue: commands that run one after another, each under its memory limit.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "jobs/queue.h"
#include "jobs/runner.h"
#include "plimsoll/bytes.h"
#include "plimsoll/limits.h"
#include "run/json_values.h"
#include "run/path_text.h"
#include "run/progress.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kJobRestartsMost = 1'000'000;
constexpr std::size_t kCommandShown = 60;

struct QueueOptions {
  std::string folder{};
  std::vector<std::string> command{};
  std::string limit{};
  std::string timeout{};
  std::int64_t restarts{0};
  std::int64_t job{0};
  bool wait{false};
  std::vector<std::string> pause{};
  std::string rules{};
  std::string grace{"30s"};
  bool json{false};
};

void say_of_queue(const std::string& text) {
  std::fprintf(stderr, "plimsoll queue: %s\n", text.c_str());
}

// An option that cannot be read is wrong usage.
int report_queue(const Error& error) {
  return report(error, error.code == ErrorCode::kInvalidArgument ? kUsageStatus : kFailedStatus);
}

int add_job(const QueueOptions& chosen) {
  Job job{.command = chosen.command, .memory_limit = chosen.limit};
  job.restarts.most = chosen.restarts;
  if (const auto limit = find_limit({.user_limit = chosen.limit}); !limit) {
    return report_queue(limit.error());
  }
  if (!chosen.timeout.empty()) {
    const auto seconds = parse_duration(chosen.timeout, "--timeout");
    if (!seconds) {
      return report_queue(seconds.error());
    }
    job.timeout_seconds = *seconds;
  }
  std::error_code failed;
  job.directory = std::filesystem::current_path(failed).string();
  if (!is_path_text(job.directory)) {
    return report(make_error(ErrorCode::kInvalidArgument,
                             fmt::format("the present folder, '{}', is not UTF-8", job.directory),
                             "rename the folder: a job is kept in UTF-8"),
                  kUsageStatus);
  }
  auto queue = Queue::make(chosen.folder);
  if (!queue) {
    return report(queue.error());
  }
  const auto id = queue->add(job);
  if (!id) {
    return report(id.error());
  }
  print(chosen.json ? fmt::format("{{\"id\": {}}}", *id) : fmt::format("job {}", *id));
  return 0;
}

nlohmann::ordered_json json_of(const Queue& queue, const Job& job) {
  auto json = json_object(to_json(job));
  const Health health = health_of(job);
  json["log"] = queue.log_of(job.id).string();
  json["health"] = health.score;
  json["health_reasons"] = health.reasons;
  return json;
}

/// "killed at its memory limit (event killed_for_limit)", and how often: equal ones are told once.
std::vector<std::pair<std::string, int>> incidents_of(const Job& job) {
  std::vector<std::pair<std::string, int>> found;
  for (const Incident& one : job.incidents) {
    std::string told = fmt::format("{} ({})", one.rule, one.evidence);
    const auto before = std::ranges::find(found, told, &std::pair<std::string, int>::first);
    if (before != found.end()) {
      ++before->second;
    } else {
      found.emplace_back(std::move(told), 1);
    }
  }
  return found;
}

std::string line_of(const Job& job) {
  std::string command = fmt::format("{}", fmt::join(job.command, " "));
  if (command.size() > kCommandShown) {
    command.resize(cut_text(command, kCommandShown).size());
    command += " ...";
  }
  const Health health = health_of(job);
  std::string text = fmt::format("{:>5}  {:<9}  health {:>3}  {}\n", job.id,
                                 job_state_name(job.state), health.score, command);
  const auto add = [&](const std::string& line) { text += fmt::format("       {}\n", line); };
  if (job.state == JobState::kRunning) {
    add(fmt::format("for {}{}", format_duration(static_cast<double>(unix_now() - job.started)),
                    job.progress.empty() ? "" : ", " + job.progress));
  } else if (!job.why.empty()) {
    add(job.why);
  }
  std::vector<std::string> reasons = health.reasons;
  std::erase_if(reasons, [](const std::string& one) { return one.starts_with("incident: "); });
  if (!job.incidents.empty()) {
    reasons.emplace_back(job.incidents.size() == 1 ? "an incident" : "incidents");
  }
  if (!reasons.empty()) {
    add(fmt::format("lost health: {}", fmt::join(reasons, "; ")));
  }
  for (const auto& [told, times] : incidents_of(job)) {
    add(fmt::format("incident: {}{}", told, times > 1 ? fmt::format(", {} times", times) : ""));
  }
  for (const std::string& advice : job.advice) {
    add("would help: " + advice);
  }
  return text;
}

int list_jobs(const QueueOptions& chosen) {
  const auto queue = Queue::open(chosen.folder);
  if (!queue) {
    return report(queue.error());
  }
  const auto ids = queue->ids();
  if (!ids) {
    return report(ids.error());
  }
  nlohmann::ordered_json jobs = nlohmann::ordered_json::array();
  std::string text;
  std::int64_t health = 0;
  std::int64_t sound = 0;
  int status = 0;
  for (const std::int64_t id : *ids) {
    const auto job = queue->read(id);
    if (!job && job.error().code == ErrorCode::kNotFound) {
      continue;  // Removed meanwhile, as others came.
    }
    if (!job) {
      status = report(job.error());
      continue;
    }
    health += health_of(*job).score;
    ++sound;
    if (chosen.json) {
      jobs.push_back(json_of(*queue, *job));
    } else {
      text += line_of(*job);
    }
  }
  const std::int64_t mean = sound > 0 ? health / sound : 100;
  if (chosen.json) {
    const nlohmann::ordered_json all{
        {"runs", queue->runs()}, {"health", mean}, {"jobs", std::move(jobs)}};
    print(all.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  } else {
    print(fmt::format(
        "{}: {} {}, health {}{}\n{}", chosen.folder, sound, sound == 1 ? "job" : "jobs", mean,
        queue->runs() ? "" : "; nobody runs it: plimsoll queue run " + chosen.folder, text));
  }
  return status;
}

int cancel_job(const QueueOptions& chosen) {
  auto queue = Queue::open(chosen.folder);
  if (!queue) {
    return report(queue.error());
  }
  const auto cancelled = queue->cancel(chosen.job);
  if (!cancelled) {
    return report(cancelled.error());
  }
  if (chosen.json) {
    print(fmt::format("{{\"id\": {}, \"cancelled\": {}}}", chosen.job, *cancelled));
  } else {
    print(fmt::format("job {}: {}", chosen.job, *cancelled ? "cancelled" : "it was over already"));
  }
  return *cancelled ? 0 : kNobodyStatus;
}

int run_jobs(const QueueOptions& chosen) {
  RunnerOptions options{.wait = chosen.wait, .work = run_job, .tell = say_of_queue};
  const auto grace = parse_duration(chosen.grace, "--grace");
  if (!grace) {
    return report_queue(grace.error());
  }
  options.grace = std::chrono::seconds(*grace);
  for (const std::string& text : chosen.pause) {
    const auto hours = parse_hours(text);
    if (!hours) {
      return report_queue(hours.error());
    }
    options.pause.push_back(*hours);
  }
  if (!chosen.rules.empty()) {
    auto rules = IncidentRules::read(chosen.rules);
    if (!rules) {
      return report_queue(rules.error());
    }
    options.rules = std::move(*rules);
  }
  auto queue = Queue::open(chosen.folder);
  if (!queue) {
    return report(queue.error());
  }
  const auto done = run_queue(*queue, options);
  if (!done) {
    return report(done.error());
  }
  if (chosen.json) {
    print(fmt::format(R"({{"done": {}, "failed": {}, "cancelled": {}, "left": {}, "asked": {}}})",
                      done->done, done->failed, done->cancelled, done->left, done->asked));
  } else {
    print(fmt::format("{} done, {} failed, {} cancelled, {} left", done->done, done->failed,
                      done->cancelled, done->left));
  }
  return done->failed > 0 ? kFailedStatus : 0;
}

// A command of `queue`, with the options that all have.
CLI::App* add_queue_command(CLI::App& app, int& status, const std::shared_ptr<QueueOptions>& chosen,
                            const char* name, const char* help, int (*work)(const QueueOptions&)) {
  auto* command = app.add_subcommand(name, help);
  command->add_option("DIR", chosen->folder, "Folder of the queue")->required();
  command->add_flag("--json", chosen->json, "Result as one line of JSON instead of text");
  command->callback([chosen, work, &status] { status = work(*chosen); });
  return command;
}

void add_queue_add(CLI::App& app, int& status) {
  auto chosen = std::make_shared<QueueOptions>();
  auto* add = add_queue_command(app, status, chosen, "add", "Add a command to a queue", add_job);
  add->add_option("--memory-limit", chosen->limit,
                  "Memory limit of the command and its processes: 24GiB, 6GB, 25%")
      ->required();
  add->add_option("--timeout", chosen->timeout,
                  "Time after which a start of the command is ended: 90s, 15m, 2h, 1d");
  add->add_option("--restarts", chosen->restarts,
                  "How often the command is started again when it was killed or failed [0]")
      ->check(CLI::Range(std::int64_t{0}, kJobRestartsMost));
  add->add_option("COMMAND", chosen->command, "Command and its arguments, written after --")
      ->required();
  add->footer(R"(
The queue is made where there is none. The command runs in the present folder, with the environment
of `plimsoll queue run`, and reads nothing from standard input. At most 1,000 jobs wait.

Examples:
  plimsoll queue add queue/ --memory-limit 24GiB -- python train.py
  plimsoll queue add queue/ --memory-limit 24GiB --timeout 12h --restarts 5 -- python train.py)");
}

void add_queue_run(CLI::App& app, int& status) {
  auto chosen = std::make_shared<QueueOptions>();
  auto* run = add_queue_command(app, status, chosen, "run", "Run the jobs of a queue", run_jobs);
  run->add_flag("--wait", chosen->wait, "Wait for more jobs when all are done");
  run->add_option("--pause-hours", chosen->pause,
                  "Hours of the day in which no job starts: 09:00-17:30; may be repeated")
      ->expected(1)
      ->take_all();
  run->add_option("--rules", chosen->rules, "File of incident rules, .toml")->type_name("FILE");
  run->add_option("--grace", chosen->grace,
                  "Time from being asked to end to being killed: 90s, 15m")
      ->capture_default_str();
  run->footer(R"(
One job after another, each as by `plimsoll run`, in a process that ends with it. Ctrl-C asks the
job to end and queues it again; a second one kills it. What was running when a runner was killed is
started again by the next one; a run in it goes on from its last commit. With --restarts a job that
died is started again after 1, 2, 4, ... at most 60 seconds, the next one running meanwhile; not
when it died twice with no commit in between. In the hours of --pause-hours the run of a running job
is paused as by `plimsoll pause`. Incident rules: docs/guide/jobs.md.
Exit status 1: a job failed.

Examples:
  plimsoll queue run queue/
  plimsoll queue run queue/ --wait --pause-hours 09:00-17:30 --rules incidents.toml)");
}

}  // namespace

void add_queue_commands(CLI::App& app, int& status) {
  auto* queue = app.add_subcommand("queue", "Run commands one after another, each in its limit");
  queue->require_subcommand(1);
  add_queue_add(*queue, status);
  auto listed = std::make_shared<QueueOptions>();
  add_queue_command(*queue, status, listed, "list", "Show the jobs of a queue, and how they fare",
                    list_jobs)
      ->footer("\nExample:\n  plimsoll queue list queue/ --json");
  auto cancelled = std::make_shared<QueueOptions>();
  auto* cancel = add_queue_command(*queue, status, cancelled, "cancel",
                                   "Cancel a job; one that runs is asked to end", cancel_job);
  cancel->add_option("JOB", cancelled->job, "Number of the job")
      ->required()
      ->check(CLI::Range(std::int64_t{1}, kNumberMost));
  cancel->footer(
      "\nExit status 4: it was over already.\nExample:\n  plimsoll queue cancel queue/ 7");
  add_queue_run(*queue, status);
  queue->footer(R"(
Examples:
  plimsoll queue add queue/ --memory-limit 24GiB -- python train.py
  plimsoll queue run queue/
  plimsoll queue list queue/             from another shell)");
}

}  // namespace plimsoll
