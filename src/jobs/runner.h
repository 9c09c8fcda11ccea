// SPDX-License-Identifier: Apache-2.0
//
// run_queue: takes the jobs of a queue one after another, each in a child process.
//
// What was running when a runner was killed is ended, and queued again: a job may so be started
// more than once, and a `plimsoll.Run` in it goes on from its last commit. A job that was killed or
// failed is started again as decide_restart() has it (restarts.h), unless an incident rule has it
// otherwise; while it waits the next one runs.
//
// Reading order: job.h, queue.h, attempt.h, incident.h, this file.
//
// Threads: one call at a time, in a process with no other children; blocks the signals of
//          waited_signals.h meanwhile. SIGINT, SIGTERM and SIGHUP end it: the job is asked to end
//          and queued again; a second one kills it.
// Memory:  one record, the rules, and what attempt.h has.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "jobs/attempt.h"
#include "jobs/hours.h"
#include "jobs/incident.h"
#include "jobs/queue.h"
#include "plimsoll/result.h"

namespace plimsoll {

struct RunnerOptions {
  bool wait{false};            ///< Goes on when nothing is left, until it is asked to end.
  std::vector<Hours> pause{};  ///< No job starts in them, and a run of a running one is paused.
  IncidentRules rules{IncidentRules::usual()};
  std::chrono::milliseconds grace{30'000};  ///< From being asked to end to being killed.
  JobWork work{};
  std::function<void(const std::string&)> tell{};  ///< What happens, in lines.
  std::function<int()> minute{minute_of_day};      ///< For tests.
};

struct RunnerReport {
  std::int64_t done{0};  ///< Jobs that ended so while it ran, …
  std::int64_t failed{0};
  std::int64_t cancelled{0};
  std::int64_t left{0};  ///< … and those that still wait.
  bool asked{false};     ///< It was asked to end.
};

/// Errors: kInvalidArgument when another process runs the queue; kIo, naming the file. A job whose
/// record is damaged is told of and passed over. What a full disk does not take of a job that runs
/// is told of, and tried again.
Result<RunnerReport> run_queue(Queue& queue, const RunnerOptions& options);

}  // namespace plimsoll
