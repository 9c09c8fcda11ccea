// SPDX-License-Identifier: Apache-2.0
//
// Goal: what a job comes to follows from how its start ended, and the queue outlives its runner.
// The jobs are shells under a guard without a limit; tests/python/test_queue.py has the program.
#include "jobs/runner.h"

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "os/file_faults.h"
#include "run/run_folder.h"
#include "tests/support/array_files.h"
#include "watch/guard.h"
#include "watch/verdict.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

// As `plimsoll run` does it, without a limit.
int guarded(const Job& job, const std::function<void(const std::string&)>& told) {
  const auto done = run_guarded({.command = job.command});
  if (!done) {
    return 1;
  }
  told(fmt::format(R"({{"ending": "{}", "status": {}, "seconds": {}, "summary": "s"}})",
                   ending_name(verdict_of(*done, 0, 1).ending), done->status, done->seconds));
  return done->status;
}

class RunnerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / fmt::format("plimsoll-runner-{}", ::getpid());
    fs::remove_all(folder_);
    queue_.emplace(Queue::make(folder_ / "queue").or_throw());
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::int64_t add(const std::string& script, std::int64_t restarts = 0, std::int64_t timeout = 0) {
    Job job{.command = {"sh", "-c", script},
            .directory = folder_.string(),
            .memory_limit = "1GiB",
            .timeout_seconds = timeout};
    job.restarts.most = restarts;
    return queue_->add(job).or_throw();
  }
  RunnerReport run(RunnerOptions options = {}) {
    options.work = options.work ? options.work : guarded;
    options.tell = [this](const std::string& line) { told_.push_back(line); };
    return run_queue(*queue_, options).or_throw();
  }
  Job job(std::int64_t id) { return queue_->read(id).or_throw(); }
  [[nodiscard]] std::string file(const char* name) const { return test::slurp(folder_ / name); }

  fs::path folder_;
  std::optional<Queue> queue_;
  std::vector<std::string> told_;
};

TEST_F(RunnerTest, JobsRunInOrderInTheirFolderAndAreLogged) {
  add("echo a >> order; echo words; echo more >&2");
  add("echo b >> order; exit 3");
  const RunnerReport report = run();
  EXPECT_EQ(report.done, 1);
  EXPECT_EQ(report.failed, 1);
  EXPECT_EQ(report.left, 0);
  EXPECT_EQ(file("order"), "a\nb\n");
  EXPECT_EQ(test::slurp(queue_->log_of(1)), "words\nmore\n");
  EXPECT_EQ(job(1).state, JobState::kDone);
  EXPECT_EQ(job(2).state, JobState::kFailed);
  EXPECT_EQ(job(2).status, 3);
  EXPECT_EQ(job(2).deaths, 1);
}

TEST_F(RunnerTest, WhileAJobWaitsToStartAgainTheNextOneRuns) {
  add("echo a >> order; test $(grep -c a order) = 3", 5);
  add("echo b >> order");
  EXPECT_EQ(run().done, 2);
  EXPECT_EQ(file("order"), "a\nb\na\na\n");
  EXPECT_EQ(job(1).restarts.done, 2);
  EXPECT_EQ(job(1).starts, 3);
}

TEST_F(RunnerTest, TwoDeathsAtOneStepAreTheLast) {
  add("echo a >> order; echo run: step 4 > $PLIMSOLL_PROGRESS; kill -KILL $$", 9);
  EXPECT_EQ(run().failed, 1);
  EXPECT_EQ(file("order"), "a\na\n");
  EXPECT_EQ(job(1).progress, "run: step 4\n");
  EXPECT_NE(job(1).why.find("ended twice without getting further"), std::string::npos);
}

TEST_F(RunnerTest, AStartThatTakesTooLongIsEndedAndKilledIfItMust) {
  add("trap '' TERM; sleep 60", 3, 1);
  EXPECT_EQ(run({.grace = milliseconds{300}}).failed, 1);
  const Job late = job(1);
  EXPECT_EQ(late.ending, "timeout");
  EXPECT_EQ(late.starts, 1);
  ASSERT_EQ(late.incidents.size(), 1U);
  EXPECT_EQ(late.incidents[0].evidence, "event timeout");
  EXPECT_TRUE(descendants(::getpid()).or_throw().empty());
}

TEST_F(RunnerTest, RulesDecideByEvidence) {
  const IncidentRules rules = IncidentRules::parse("rules", R"(
[[rule]]
name = "card"
pattern = "out of memory"
then = "fail"
[[rule]]
name = "licence"
status = 2
then = "retry"
)")
                                  .or_throw();
  add("echo CUDA out of memory; exit 1", 9);
  add("echo x >> tries; test $(wc -l < tries) = 2 || exit 2", 9);  // 2 is a wrong use otherwise.
  add("echo in the classroom; exit 1");
  const RunnerReport report = run({.rules = rules});
  EXPECT_EQ(report.done, 1);
  EXPECT_EQ(report.failed, 2);
  EXPECT_EQ(job(1).starts, 1);
  EXPECT_EQ(job(1).incidents.at(0).evidence, "line 1: CUDA out of memory");
  EXPECT_EQ(job(2).state, JobState::kDone);
  EXPECT_EQ(job(2).incidents.at(0).evidence, "status 2");
  EXPECT_TRUE(job(3).incidents.empty());
}

TEST_F(RunnerTest, ADamagedRecordIsPassedOver) {
  add("echo a >> order");
  add("echo b >> order");
  std::ofstream(folder_ / "queue" / "jobs" / "1.json") << "{}";
  EXPECT_EQ(run().done, 1);
  EXPECT_EQ(file("order"), "b\n");
  EXPECT_TRUE(told_.at(0).starts_with("job 1 is passed over")) << told_.at(0);
}

TEST_F(RunnerTest, OneAtATimeRunsAQueue) {
  const FolderLock other = queue_->lock_runner().or_throw();
  const auto second = run_queue(*queue_, {.work = guarded});
  ASSERT_FALSE(second);
  EXPECT_NE(second.error().to_string().find("runs this queue"), std::string::npos);
}

TEST_F(RunnerTest, WhatCannotStartIsNotTriedAgain) {
  Job absent{.command = {"plimsoll-no-such-program"}, .directory = "/", .memory_limit = "1GiB"};
  absent.restarts.most = 5;
  queue_->add(absent).or_throw();
  absent.directory = (folder_ / "gone").string();
  queue_->add(absent).or_throw();
  EXPECT_EQ(run().failed, 2);
  EXPECT_EQ(job(1).starts, 1);
  EXPECT_NE(test::slurp(queue_->log_of(2)).find("gone: cannot be entered"), std::string::npos);
}

// A run in the job: paused at the beginning of the hours, and going on behind them.
TEST_F(RunnerTest, InHoursOfPauseARunPausesAndNoJobStarts) {
  const fs::path minute = folder_ / "minute";
  const auto set = [&](int value) { std::ofstream(minute) << value << std::flush; };
  set(0);
  const fs::path run_folder = folder_ / "run";
  const JobWork work = [&](const Job& one, const std::function<void(const std::string&)>& told) {
    if (one.id == 1) {
      const RunFolder mine = RunFolder::create(run_folder, "seed = 1\n").or_throw();
      set(600);
      while (!fs::exists(run_folder / ".pause")) {
        ::usleep(10'000);
      }
      set(0);
      while (fs::exists(run_folder / ".pause")) {
        ::usleep(10'000);
      }
      set(600);  // The next job waits, …
      ::usleep(1'500'000);
    }
    std::ofstream(folder_ / "order", std::ios::app) << one.id << test::slurp(minute) << '\n';
    told(R"({"status": 0})");
    return 0;
  };
  add("");
  add("");
  RunnerOptions options{.pause = {parse_hours("10:00-11:00").or_throw()}, .work = work};
  int held = 0;
  options.minute = [&] {
    const int now = std::stoi("0" + test::slurp(minute));
    held += now == 600 && fs::exists(folder_ / "order") ? 1 : 0;
    if (held > 3) {
      set(0);  // … until the hours are over.
    }
    return now;
  };
  EXPECT_EQ(run(options).done, 2);
  EXPECT_EQ(file("order"), "1600\n20\n");
}

// Of job 1 the progress cannot be written down at first, of job 2 the end.
TEST_F(RunnerTest, AFullDiskCostsNoJob) {
  add("echo run: step 4 > $PLIMSOLL_PROGRESS; until test -e go; do sleep 0.05; done; echo a >> "
      "order");
  add("echo b >> order");
  RunnerOptions options{.work = guarded};
  int full = 0;
  options.tell = [&](const std::string& line) {
    if (line.find(" runs: ") != std::string::npos) {
      set_file_fault({.call = FileCall::kWrite, .os_errno = ENOSPC, .keeps_failing = true});
    } else if (line.find("No space left on device") != std::string::npos) {
      clear_file_fault();
      std::ofstream(folder_ / "go") << "";
      ++full;
    }
  };
  const RunnerReport report = run_queue(*queue_, options).or_throw();
  clear_file_fault();
  EXPECT_EQ(report.done, 2);
  EXPECT_EQ(full, 2);
  EXPECT_EQ(file("order"), "a\nb\n");
  EXPECT_EQ(job(1).starts, 1);
  EXPECT_EQ(job(1).progress, "run: step 4\n");
  EXPECT_EQ(job(2).state, JobState::kDone);
}

TEST_F(RunnerTest, AskedToEndItQueuesTheJobAgain) {
  add("trap 'echo saved >> order; exit 0' TERM; echo ready >> order; while :; do sleep 0.05; done");
  const pid_t runner = ::fork();
  if (runner == 0) {
    ::_exit(run().asked ? 0 : 1);
  }
  while (file("order").empty()) {
    ::usleep(10'000);
  }
  ::kill(runner, SIGTERM);
  int status = 0;
  ::waitpid(runner, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(file("order"), "ready\nsaved\n");
  EXPECT_EQ(job(1).state, JobState::kWaiting);
  EXPECT_EQ(job(1).deaths, 0);
}

}  // namespace
}  // namespace plimsoll
