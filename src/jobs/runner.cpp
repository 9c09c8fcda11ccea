// SPDX-License-Identifier: Apache-2.0
#include "jobs/runner.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include <unistd.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/check.h"
#include "os/process_tree.h"
#include "run/control.h"

namespace plimsoll {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr milliseconds kTick{250};
constexpr milliseconds kIdleTick{500};
constexpr seconds kLookEvery{1};  // Least time between two looks at the record of a running job.
constexpr milliseconds kLeftoverPause{50};
constexpr std::int64_t kPauseMost = 60;
constexpr const char* kTimeout = "timeout";

class Runner {
 public:
  Runner(Queue& queue, const RunnerOptions& options) : queue_(queue), options_(options) {}

  Result<RunnerReport> run() {
    PLIMSOLL_TRY(const FolderLock lock, queue_.lock_runner());
    PLIMSOLL_TRY_VOID(take_over());
    for (bool begun = false;;) {
      hear(running_ ? kTick : begun ? kIdleTick : milliseconds{1});
      begun = true;
      if (running_) {
        PLIMSOLL_TRY_VOID(endured(look()));
      }
      if (!running_ && report_.asked) {
        break;
      }
      if (!running_) {
        PLIMSOLL_TRY_VOID(start_next());
        if (!running_ && left_ == 0 && !options_.wait) {
          break;
        }
      }
    }
    report_.left = left_;
    return report_;
  }

 private:
  /// The job that runs, as it was when it started.
  struct Running {
    Job job{};
    std::unique_ptr<Attempt> attempt{};
    Clock::time_point began{};
    Clock::time_point told{};
    std::filesystem::path paused{};  // The run that was asked to pause.
    seconds paused_for{0};
    bool timeout{false};
    std::optional<AttemptEnd> end{};  // What is to be written down.
  };

  void tell(const std::string& text) const {
    if (options_.tell) {
      options_.tell(text);
    }
  }

  // A full disk costs no job: what could not be written down is tried again, until the runner is
  // asked to end.
  Result<void> endured(Result<void> written) {
    const bool full =
        !written && (written.error().os_errno == ENOSPC || written.error().os_errno == EDQUOT);
    if (!full || report_.asked) {
      return written;
    }
    if (std::string text = written.error().to_string(); text != problem_) {
      tell(text + "; it is tried again");
      problem_ = std::move(text);
    }
    return {};
  }

  // Waits for a signal. The second that asks to end kills what runs.
  void hear(milliseconds most) {
    const siginfo_t got = signals_.next(std::max(most, milliseconds{1}));
    if (got.si_signo == 0 || got.si_signo == SIGCHLD) {
      return;
    }
    const bool lives = running_ && !running_->end;
    if (report_.asked && lives) {
      tell("asked twice: the job is killed");
      running_->attempt.reset();
      return;
    }
    report_.asked = true;
    if (lives) {
      tell(fmt::format("asked to end: job {} is asked to, and queued again", running_->job.id));
      running_->attempt->ask(options_.grace);
    }
  }

  // Jobs of a runner that was killed.
  Result<void> take_over() {
    PLIMSOLL_TRY(const auto ids, queue_.ids());
    for (const std::int64_t id : ids) {
      const auto job = queue_.read(id);
      if (!job) {
        tell(fmt::format("job {} is passed over: {}", id, job.error().to_string()));
        passed_.insert(id);
        continue;
      }
      if (job->state == JobState::kWaiting) {
        ++left_;
      }
      if (job->state != JobState::kRunning) {
        continue;
      }
      const bool ended = end_leftover(job->guard, job->guard_began, options_.grace, [&] {
        hear(kLeftoverPause);
        return !report_.asked;
      });
      if (!ended) {
        return {};
      }
      PLIMSOLL_TRY(const Job now, queue_.change(id, [](Job& one) {
        one.guard = one.guard_began = 0;
        one.state = one.cancel ? JobState::kCancelled : JobState::kWaiting;
        one.why = one.cancel ? "cancelled" : "its runner ended: queued again";
      }));
      left_ += now.state == JobState::kWaiting ? 1 : 0;
      report_.cancelled += now.state == JobState::kCancelled ? 1 : 0;
      tell(fmt::format("job {}: {}", id, now.why));
    }
    return {};
  }

  [[nodiscard]] bool paused() const {
    const int minute = options_.minute();
    return std::ranges::any_of(options_.pause, [&](const Hours& one) { return one.hold(minute); });
  }

  // The first job that may start now; counts those that wait.
  Result<void> start_next() {
    if (const bool now = paused(); now != in_pause_) {
      in_pause_ = now;
      tell(now ? "hours of pause: no job starts" : "the hours of pause are over");
    } else if (now && left_ > 0) {
      return {};
    }
    PLIMSOLL_TRY(const auto ids, queue_.ids());
    left_ = 0;
    std::optional<Job> next;
    for (const std::int64_t id : ids) {
      if (passed_.contains(id)) {
        continue;
      }
      auto job = queue_.read(id);
      if (!job && job.error().code == ErrorCode::kNotFound) {
        continue;
      }
      if (!job || job->state != JobState::kWaiting) {
        passed_.insert(id);  // It is over: no need to read it again.
        continue;
      }
      ++left_;
      const std::int64_t wait = job->not_before - unix_now();
      if (!next && (wait <= 0 || wait > kPauseMost)) {  // More: the clock was set back.
        next = std::move(*job);
      }
    }
    std::erase_if(passed_, [&](std::int64_t id) { return !std::ranges::binary_search(ids, id); });
    return next && !in_pause_ ? start(next->id) : Result<void>{};
  }

  Result<void> start(std::int64_t id) {
    PLIMSOLL_TRY(const Job waiting, queue_.read(id));
    PLIMSOLL_TRY(auto attempt, Attempt::start(waiting, options_.work, queue_.log_of(id),
                                              options_.rules, signals_));
    bool mine = false;
    PLIMSOLL_TRY(const Job job, queue_.change(id, [&](Job& one) {
      mine = one.state == JobState::kWaiting;  // Or it was cancelled just now.
      if (mine) {
        one.state = JobState::kRunning;
        one.started = unix_now();
        ++one.starts;
        one.why = "runs";
        one.guard = attempt->guard();
        one.guard_began = process_began(attempt->guard()).value_or(0);
      }
    }));
    if (!mine) {
      return {};
    }
    --left_;
    attempt->go();
    running_.emplace(Running{.job = job, .attempt = std::move(attempt), .began = Clock::now()});
    tell(fmt::format("job {} runs: {}", id, fmt::join(job.command, " ")));
    return {};
  }

  Result<void> look() {
    if (!running_->attempt) {  // Killed by a second signal.
      running_->end = AttemptEnd{.status = 128 + SIGKILL};
    } else if (!running_->end) {
      running_->end = running_->attempt->look();
    }
    if (running_->end) {
      return over(*running_, *running_->end);
    }
    const auto now = Clock::now();
    if (now < running_->told + kLookEvery) {
      return {};
    }
    running_->told = now;
    PLIMSOLL_TRY_VOID(pause_run());
    const std::string progress = running_->attempt->progress();
    PLIMSOLL_TRY(const Job job, queue_.read(running_->job.id));
    if (job.progress != progress) {
      const auto changed = queue_.change(job.id, [&](Job& one) { one.progress = progress; });
      PLIMSOLL_TRY_VOID(endured(changed ? Result<void>{} : tl::unexpected(changed.error())));
    }
    if (job.cancel && !running_->attempt->asked()) {
      tell(fmt::format("job {} is cancelled: asked to end", job.id));
      running_->attempt->ask(options_.grace);
    }
    const auto spent = std::chrono::duration_cast<seconds>(now - running_->began);
    const std::int64_t most = running_->job.timeout_seconds;
    if (most > 0 && (spent - running_->paused_for).count() >= most && !running_->attempt->asked()) {
      tell(fmt::format("job {} has run for {} s, its time: asked to end", job.id, most));
      running_->timeout = true;
      running_->attempt->ask(options_.grace);
    }
    return {};
  }

  // In hours of pause a run of the job is paused, as by `plimsoll pause`; its time stands still.
  Result<void> pause_run() {
    const std::string told = running_->attempt->progress();
    const auto run =
        running_->job.directory / std::filesystem::path(told.substr(0, told.rfind(": ")));
    if (!running_->paused.empty()) {
      running_->paused_for += kLookEvery;
    }
    if (paused() && running_->paused.empty() && !told.empty()) {
      if (const auto asked = ask_to_pause(run); asked && *asked) {
        running_->paused = run;
        tell(fmt::format("hours of pause: job {} pauses its run {}", running_->job.id,
                         run.string()));
      }
    } else if (!paused() && !running_->paused.empty()) {
      const auto asked = ask_to_continue(running_->paused);
      tell(fmt::format("job {} goes on", running_->job.id));
      running_->paused.clear();
      PLIMSOLL_TRY_VOID(asked);
    }
    return {};
  }

  // Writes down what came of a start, and what follows from it.
  Result<void> over(const Running& was, const AttemptEnd& end) {
    const bool asked = !was.attempt || was.attempt->asked();
    const std::string progress = was.attempt ? was.attempt->progress() : was.job.progress;
    PLIMSOLL_TRY(const Job job, queue_.change(was.job.id, [&](Job& one) {
      one.guard = one.guard_began = 0;
      one.ended = unix_now();
      one.progress = progress;
      one.ending = was.timeout ? kTimeout : end.ending;
      one.status = end.status;
      one.seconds = end.seconds;
      one.limit_bytes = end.limit_bytes;
      one.peak_bytes = std::max(one.peak_bytes, end.peak_bytes);
      one.stalled_seconds = end.stalled_seconds;
      one.advice = end.advice;
      one.why = end.summary.empty() ? fmt::format("ended with status {}", end.status) : end.summary;
      decide(one, end, was.timeout, asked);
    }));
    running_.reset();
    left_ += job.state == JobState::kWaiting ? 1 : 0;
    report_.done += job.state == JobState::kDone ? 1 : 0;
    report_.failed += job.state == JobState::kFailed ? 1 : 0;
    report_.cancelled += job.state == JobState::kCancelled ? 1 : 0;
    tell(fmt::format("job {} {}: {}", job.id, job_state_name(job.state), job.why));
    return {};
  }

  // A run that is asked to end commits, and ends with status 0: that is no end of the job.
  void decide(Job& job, const AttemptEnd& end, bool timeout, bool asked) const {
    const bool failed = timeout || end.stopped || end.status != 0;
    if (job.cancel && (asked || failed)) {
      job.state = JobState::kCancelled;
      job.why = "cancelled; " + job.why;
      return;
    }
    if (asked && !timeout) {
      job.state = JobState::kWaiting;
      job.why = "asked to end with its runner: queued again";
      return;
    }
    if (!failed) {
      job.state = JobState::kDone;
      return;
    }
    ++job.deaths;
    std::string then;
    if (auto found = options_.rules.find(end.status, job.ending, end.lines)) {
      then = found->then;
      job.incidents.push_back(std::move(*found));
      if (job.incidents.size() > Job::kIncidentsMost) {
        job.incidents.erase(job.incidents.begin());
      }
    }
    job.state = JobState::kFailed;
    // Nothing told: it could not be started, and another time it could not either.
    if (then == "fail" || (!end.told && end.status < 128 && !timeout)) {
      return;
    }
    const CommandEnd command{.status = then == "retry" ? 1 : end.status,
                             .stopped = end.stopped || timeout,
                             .progress = job.progress};
    const RestartDecision next = decide_restart(command, job.restarts);
    if (!next.why.empty()) {
      job.why += "; " + next.why;
    }
    if (next.again) {
      job.state = JobState::kWaiting;
      job.not_before = unix_now() + next.pause.count();
    }
  }

  Queue& queue_;
  const RunnerOptions& options_;
  const WaitedSignals signals_;
  RunnerReport report_;
  std::optional<Running> running_;
  std::int64_t left_{0};  // Jobs that wait.
  std::set<std::int64_t>
      passed_;  // Jobs that need not be read again: at most as many as there are.
  bool in_pause_{false};
  std::string problem_{};  // What could not be written down, as it was told.
};

}  // namespace

Result<RunnerReport> run_queue(Queue& queue, const RunnerOptions& options) {
  return Runner(queue, options).run();
}

}  // namespace plimsoll
