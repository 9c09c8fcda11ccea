// SPDX-License-Identifier: Apache-2.0
//
// Goal: a job that add() returned is there whatever happens to its writer, and everything is
// bounded.
#include "jobs/queue.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <thread>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "os/file_faults.h"
#include "run/sealed_file.h"
#include "tests/support/array_files.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

class QueueTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / fmt::format("plimsoll-queue-{}", ::getpid());
    fs::remove_all(folder_);
    queue_.emplace(Queue::make(folder_).or_throw());
  }
  void TearDown() override { fs::remove_all(folder_); }

  Queue& queue() { return *queue_; }
  std::int64_t add(const std::string& word = "true") {
    return queue().add({.command = {word}, .directory = "/", .memory_limit = "1GiB"}).or_throw();
  }

  fs::path folder_;
  std::optional<Queue> queue_;
};

Job full_job() {
  Job job;
  job.id = 7;
  job.command = {"python", "train.py", "ü \"quoted\""};
  job.directory = "/work";
  job.memory_limit = "24GiB";
  job.timeout_seconds = 60;
  job.restarts = {.most = 5, .done = 2, .progress = "run: step 4"};
  job.state = JobState::kFailed;
  job.cancel = true;
  job.starts = 3;
  job.deaths = 2;
  job.progress = "run: step 8";
  job.ending = "killed_for_limit";
  job.status = 137;
  job.seconds = 1.5;
  job.limit_bytes = 1000;
  job.peak_bytes = 990;
  job.stalled_seconds = 1;
  job.advice = {"a higher limit"};
  job.incidents = {{"limit", "event killed_for_limit", "note"}};
  return job;
}

TEST_F(QueueTest, AJobComesBackAsItWas) {
  const Job job = full_job();
  const Job back = job_from_json(to_json(job), "7.json").or_throw();
  EXPECT_EQ(to_json(back), to_json(job));
  EXPECT_EQ(back.command, job.command);
  EXPECT_EQ(back.restarts.progress, "run: step 4");
  EXPECT_EQ(back.incidents.at(0).evidence, "event killed_for_limit");
}

TEST_F(QueueTest, S37_APeakAboveItsLimitIsSaidInBytes) {
  Job job{.state = JobState::kDone, .limit_bytes = 100 << 20, .peak_bytes = 118 << 20};
  EXPECT_EQ(health_of(job).reasons,
            std::vector<std::string>{"passed its limit: 118.0 MiB at its peak, of 100.0 MiB"});
  job.peak_bytes = 98 << 20;
  EXPECT_EQ(health_of(job).reasons,
            std::vector<std::string>{"came near its limit: 98.0 MiB at its peak, of 100.0 MiB"});
}

TEST_F(QueueTest, WhatIsNoJobIsRefusedByName) {
  const std::string good = to_json(full_job());
  std::string text_as_number = good;
  text_as_number.replace(text_as_number.find("\"status\":137"), 12, "\"status\":\"a\"");
  std::string huge = good;
  huge.replace(huge.find("\"starts\":3"), 10, "\"starts\":18446744073709551615");
  for (const std::string& text : {std::string("null"), std::string("{}"), std::string(50'000, '['),
                                  text_as_number, huge, good.substr(0, good.size() / 2)}) {
    const auto job = job_from_json(text, "7.json");
    ASSERT_FALSE(job) << text;
    EXPECT_EQ(job.error().code, ErrorCode::kCorrupt);
    EXPECT_TRUE(job.error().to_string().starts_with("7.json")) << job.error().to_string();
  }
}

TEST_F(QueueTest, HealthSaysWhatItLostPointsFor) {
  const Health health = health_of(full_job());
  EXPECT_EQ(health.score, 0);  // 50, 20, 20, 10 and 20.
  ASSERT_EQ(health.reasons.size(), 5U);
  EXPECT_EQ(health.reasons[1], "died 2 times");
  EXPECT_EQ(health_of({}).score, 100);
  EXPECT_EQ(health_of({.state = JobState::kDone, .deaths = 1}).score, 90);
  EXPECT_EQ(health_of({.state = JobState::kFailed, .deaths = 9}).score, 10);
}

TEST_F(QueueTest, JobsAreNumberedAndStay) {
  EXPECT_EQ(add("a"), 1);
  EXPECT_EQ(add("b"), 2);
  const Queue again = Queue::open(folder_).or_throw();
  EXPECT_EQ(again.ids().value(), (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(again.read(2).value().command, std::vector<std::string>{"b"});
  EXPECT_EQ(again.read(3).error().code, ErrorCode::kNotFound);
  EXPECT_EQ(Queue::open(folder_ / "none").error().code, ErrorCode::kNotFound);
}

TEST_F(QueueTest, ADamagedRecordIsNamed) {
  add();
  const fs::path file = folder_ / "jobs" / "1.json";
  std::string text = test::slurp(file);
  text[text.size() / 2] ^= 1;
  std::ofstream(file) << text;
  const auto job = queue().read(1);
  ASSERT_FALSE(job);
  EXPECT_EQ(job.error().code, ErrorCode::kCorrupt);
  EXPECT_NE(job.error().to_string().find(file.string()), std::string::npos);
}

TEST_F(QueueTest, SoManyMayWaitAndSoManyThatEndedAreKept) {
  for (std::int64_t k = 0; k < Queue::kEndedMost + 5; ++k) {
    const std::int64_t id = add();
    std::ofstream(queue().log_of(id)) << "words";
    EXPECT_TRUE(queue().cancel(id).value());
  }
  add();
  const auto ids = queue().ids().value();
  EXPECT_EQ(std::ssize(ids), Queue::kEndedMost + 1);
  EXPECT_EQ(ids.front(), 6);
  EXPECT_FALSE(fs::exists(queue().log_of(5)));
  EXPECT_TRUE(fs::exists(queue().log_of(6)));
  const Job large{.command = {std::string(Job::kCommandBytesMost + 1, 'x')}};
  EXPECT_EQ(queue().add(large).error().code, ErrorCode::kInvalidArgument);
}

TEST_F(QueueTest, OfOneThousandThatWaitNoneIsTakenInMore) {
  for (std::int64_t id = 1; id <= Queue::kWaitingMost; ++id) {
    const Job job{.id = id, .command = {"true"}};
    write_sealed(folder_ / "jobs" / fmt::format("{}.json", id), to_json(job) + "\n").or_throw();
  }
  const auto more = queue().add({.command = {"true"}});
  ASSERT_FALSE(more);
  EXPECT_NE(more.error().to_string().find("1000 jobs wait"), std::string::npos)
      << more.error().to_string();
  EXPECT_TRUE(queue().cancel(4).value());
  EXPECT_EQ(add(), Queue::kWaitingMost + 1);
}

// A full disk, a failed sync or rename: whichever call fails, what was there stays.
TEST_F(QueueTest, AFailedWriteLosesNothing) {
  add("first");
  bool added = false;
  for (int nth = 1; !added && nth < 40; ++nth) {
    set_file_fault({.call = FileCall::kAny, .nth = nth, .os_errno = ENOSPC});
    const auto id = queue().add({.command = {"second"}, .directory = "/"});
    const auto changed = queue().change(1, [](Job& job) { job.starts = 1; });
    clear_file_fault();
    EXPECT_EQ(queue().read(1).value().command, std::vector<std::string>{"first"});
    const auto ids = queue().ids().value();
    for (const std::int64_t one : ids) {
      EXPECT_TRUE(queue().read(one)) << "after call " << nth;
    }
    EXPECT_TRUE(!id || std::ranges::count(ids, *id) == 1);
    added = id && changed;
  }
  EXPECT_TRUE(added);
}

TEST_F(QueueTest, CancelledOnceAndNotAgain) {
  add();
  EXPECT_TRUE(queue().cancel(1).value());
  EXPECT_EQ(queue().read(1).value().state, JobState::kCancelled);
  EXPECT_FALSE(queue().cancel(1).value());
  add();
  queue().change(2, [](Job& job) { job.state = JobState::kRunning; }).or_throw();
  EXPECT_TRUE(queue().cancel(2).value());
  EXPECT_EQ(queue().read(2).value().state, JobState::kRunning);
  EXPECT_TRUE(queue().read(2).value().cancel);
}

// Who is refused at the moment in which the other has ended waits its turn all the same.
TEST_F(QueueTest, TwoThatChangeJobsAtOnceAreNeverRefused) {
  add();
  add();
  const auto work = [this](std::int64_t id) {
    for (int k = 0; k < 150; ++k) {
      const auto changed = queue().change(id, [](Job& job) { ++job.starts; });
      ASSERT_TRUE(changed) << changed.error().to_string();
    }
  };
  std::thread other(work, 1);
  work(2);
  other.join();
  EXPECT_EQ(queue().read(1).value().starts, 150);
  EXPECT_EQ(queue().read(2).value().starts, 150);
}

// Four processes add at once, and each is killed in the middle of it, at some moment.
TEST_F(QueueTest, WhatWasAddedOutlivesAKill) {
  std::set<std::int64_t> told;
  for (int round = 0; round < 8; ++round) {
    std::array<int, 2> pipe{};
    ASSERT_EQ(::pipe(pipe.data()), 0);
    std::vector<pid_t> writers;
    for (int k = 0; k < 4; ++k) {
      writers.push_back(::fork());
      if (writers.back() == 0) {
        for (;;) {
          const auto id = queue().add({.command = {"true"}, .directory = "/"});
          if (!id || ::write(pipe[1], &*id, sizeof *id) != sizeof *id) {
            ::_exit(1);
          }
        }
      }
    }
    ::usleep(20'000 + 5'000 * round);
    for (const pid_t writer : writers) {
      ::kill(writer, SIGKILL);
      ::waitpid(writer, nullptr, 0);
    }
    ::close(pipe[1]);
    for (std::int64_t id = 0; ::read(pipe[0], &id, sizeof id) == sizeof id;) {
      EXPECT_TRUE(told.insert(id).second) << id << " was given twice";
    }
    ::close(pipe[0]);
  }
  EXPECT_GT(told.size(), 8U);
  for (const std::int64_t id : told) {
    const auto job = queue().read(id);
    ASSERT_TRUE(job) << id << ": " << job.error().to_string();
    EXPECT_EQ(job->id, id);
  }
  add();  // Nobody holds a lock.
}

}  // namespace
}  // namespace plimsoll
