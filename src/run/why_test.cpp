// SPDX-License-Identifier: Apache-2.0
//
// Each ending is laid out in a folder, as a run, a guard and a kernel would have left it.
#include "run/why.h"

#include <filesystem>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include "tests/support/array_files.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kGiB = 1LL << 30;
constexpr std::int64_t kBooted = 1'000'000;
constexpr int kPid = 4000;
constexpr int kWorker = 4711;

class WhyTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() /
            fmt::format("plimsoll-why-{}-{}", ::getpid(),
                        ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  // A run that made 100 steps, whose worker grew by 11 GiB in its third epoch while it decoded, and
  // whose process has ended; its last word is `status`, or none.
  void leave_run(const RunStatus& status) {
    RunFolder folder = RunFolder::create(root_, "[cosir]\n").or_throw();
    fs::create_directories(folder.checkpoint_path(90));
    folder.publish(90, 2).or_throw();
    folder.write_status(status, /*force=*/true).or_throw();
    leave_looks();
  }

  void leave_looks(Course course = Course::kPlateau, const char* last_phase = "decode") {
    LookHistory looks = LookHistory::open(root_ / LookHistory::kFile,
                                          {.pid = kPid, .began = kBooted + 50, .cgroup = "/none"})
                            .or_throw();
    for (std::int64_t at = 0; at < 60; ++at) {
      const bool third = at >= 40;
      const std::int64_t worker = kGiB + (third ? (at - 39) * 11 * kGiB / 20 : 0);
      KeptLook look{.time = kBooted + 100 + static_cast<double>(at),
                    .step = at,
                    .epoch = static_cast<std::int32_t>(third ? 2 : at / 20),
                    .limit_bytes = 64 * kGiB,
                    .held_bytes = 2 * kGiB + worker,
                    .phase = at == 59 ? last_phase
                             : third  ? "decode"
                                      : "train",
                    .course = course,
                    .owner = Owner::kChildren,
                    .bytes_per_unit = 590e6,
                    .cgroup_oom_kills = 3,
                    .machine_oom_kills = 5,
                    .booted = kBooted,
                    .largest = {{.pid = kWorker, .name = "pt_data_worker", .bytes = worker},
                                {.pid = kPid, .name = "python", .bytes = 2 * kGiB}}};
      look.owners.fill(-1);
      look.owners[static_cast<std::size_t>(Owner::kChildren)] = worker;
      look.owners[static_cast<std::size_t>(Owner::kTensors)] = 2 * kGiB;
      ASSERT_TRUE(looks.add(look));
    }
  }

  void leave_guard(const char* ending, int status, std::int64_t oom_kills) {
    fs::create_directories(root_);
    write_ended(root_, nlohmann::json{{"ending", ending},
                                      {"status", status},
                                      {"limit_bytes", 16 * kGiB},
                                      {"oom_kills", oom_kills},
                                      {"killer_limit_bytes", 8 * kGiB},
                                      {"summary", "as the guard saw it"},
                                      {"advice", {"fewer workers"}}}
                           .dump())
        .or_throw();
  }

  Why why(const KernelNow& kernel = quiet()) const { return explain_end(root_, kernel).or_throw(); }
  static KernelNow quiet() {
    return {.booted = kBooted,
            .machine_oom_kills = 5,
            .cgroup_oom_kills = 3,
            .log = std::vector<KernelKill>{},
            .cgroup_limit_bytes = 16 * kGiB};
  }
  static bool says(const std::vector<std::string>& lines, const std::string& words) {
    return std::ranges::any_of(
        lines, [&](const std::string& line) { return line.find(words) != std::string::npos; });
  }
  fs::path root_;
};

TEST_F(WhyTest, M8T10AKillInTheCgroupNamesTheCgroupAndTheWorkerThatGrew) {
  leave_run({.status = "running", .step = 59});
  KernelNow kernel = quiet();
  kernel.cgroup_oom_kills = 4;
  const Why found = why(kernel);
  EXPECT_EQ(found.cause, EndCause::kKilledCgroup);
  EXPECT_TRUE(found.memory());
  EXPECT_TRUE(found.incident());
  EXPECT_EQ(found.summary,
            "killed by the kernel: the cgroup of the job (limit 16.0 GiB), not this run's limit of "
            "64.0 GiB; a worker, PID 4711 (pt_data_worker), grew 11.0 GiB in epoch 3 in phase "
            "decode");
  EXPECT_TRUE(says(found.evidence, "oom_kill of its cgroup rose by 1"));
  EXPECT_TRUE(says(found.evidence, "committed: step 90"));
  EXPECT_TRUE(says(found.evidence, "children 12.0 GiB, tensors 2.0 GiB"));
  const auto told = nlohmann::json::parse(found.to_json());
  EXPECT_EQ(told["cause"], "killed_in_cgroup");
  EXPECT_EQ(told["grower"]["pid"], kWorker);
  EXPECT_EQ(told["grower"]["epoch"], 2);
  EXPECT_EQ(told["checkpoint_step"], 90);
}

TEST_F(WhyTest, S19WhatRunsOutBesideMemoryHasAdviceOfItsOwn) {
  const std::vector<std::pair<const char*, const char*>> kTexts{
      {"RuntimeError: unable to allocate shared memory(shm) for file </torch_22534_1968840629_0>: "
       "No "
       "space left on device (28)",
       "--shm-size"},
      {"RuntimeError: DataLoader worker (pid 5) is killed by signal: Bus error. It is possible "
       "that "
       "dataloader's workers are out of shared memory.",
       "--shm-size"},
      {"RuntimeError: unable to write to file </torch_1_2_3>: No space left on device (28)",
       "/dev/shm"},
      {"RuntimeError: Too many open files. Communication with the workers is no longer possible.",
       "ulimit -n"},
      {"RuntimeError: received 0 items of ancdata", "set_sharing_strategy"},
      {"MemoryPressure: memory is short …; datasets.map keeps writer_batch_size rows (1,000) in "
       "memory",
       "writer_batch_size=50"}};
  for (const auto& [text, advice] : kTexts) {
    fs::remove_all(root_);
    leave_run({.status = "failed", .step = 59, .message = text, .cause = "error"});
    const Why found = why();
    ASSERT_FALSE(found.advice.empty()) << text;
    EXPECT_TRUE(says(found.advice, advice)) << text << ": " << found.advice.front();
  }
  fs::remove_all(root_);
  leave_run({.status = "finished", .step = 59, .message = "Bus error", .cause = "finished"});
  EXPECT_FALSE(says(why().advice, "--shm-size"));
}

TEST_F(WhyTest, S17AnEvaluationThatIsRefusedIsTheEvaluations) {
  leave_run({.status = "failed", .step = 59, .message = "BudgetExceeded", .cause = "refused"});
  leave_looks(Course::kPlateau, "evaluation");
  EXPECT_TRUE(says(why().advice, "preprocess_logits_for_metrics"));
  leave_looks(Course::kPlateau, "train");
  EXPECT_FALSE(says(why().advice, "preprocess_logits_for_metrics"));
}

TEST_F(WhyTest, TheKernelsLogDecidesWhichLimitItWas) {
  leave_run({.status = "running", .step = 59});
  KernelNow kernel = quiet();
  kernel.cgroup_oom_kills = 4;
  kernel.log = {{.pid = kWorker, .name = "pt_data_worker", .of_cgroup = false, .seconds = 160}};
  EXPECT_EQ(why(kernel).cause, EndCause::kKilledMachine);
  (*kernel.log)[0].of_cgroup = true;
  kernel.cgroup_oom_kills.reset();  // The cgroup is gone.
  EXPECT_EQ(why(kernel).cause, EndCause::kKilledCgroup);
  (*kernel.log)[0].seconds = 20;  // A process of that number before the run began.
  EXPECT_EQ(why(kernel).cause, EndCause::kKilled);
}

TEST_F(WhyTest, WithoutAWordTheCountersSayWhatIsKnown) {
  leave_run({.status = "running", .step = 59});
  EXPECT_EQ(why().cause, EndCause::kKilled);
  EXPECT_FALSE(why().memory());
  EXPECT_NE(why().summary.find("not for memory"), std::string::npos);
  KernelNow kernel = quiet();
  kernel.machine_oom_kills = 6;
  EXPECT_EQ(why(kernel).cause, EndCause::kKilledMachine);
  EXPECT_NE(why(kernel).summary.find("probably"), std::string::npos);
  kernel = quiet();
  kernel.booted = kBooted + 500;
  EXPECT_EQ(why(kernel).cause, EndCause::kRestarted);
  for (const std::int64_t step : {-7, 7}) {  // Of the clock, with which that time moves.
    kernel = quiet();
    kernel.booted += step;
    kernel.cgroup_oom_kills = 4;
    EXPECT_EQ(why(kernel).cause, EndCause::kKilledCgroup) << step;
  }
}

TEST_F(WhyTest, TheGuardKnowsTheExitStatus) {
  leave_run({.status = "running", .step = 59});
  leave_guard("killed_for_limit", 137, 1);
  EXPECT_EQ(why().cause, EndCause::kKilledAtLimit);
  EXPECT_NE(why().summary.find("the limit of 16.0 GiB that `plimsoll run` set; a worker, PID 4711"),
            std::string::npos);
  EXPECT_TRUE(says(why().evidence, "as the guard saw it"));
  EXPECT_TRUE(says(why().advice, "fewer workers"));
  leave_guard("killed", 137, 0);
  EXPECT_EQ(why().cause, EndCause::kKilled);
  leave_guard("done", 139, 0);
  EXPECT_EQ(why().cause, EndCause::kFailed);
  EXPECT_NE(why().summary.find("SIGSEGV (11)"), std::string::npos);
  leave_guard("machine_full", 137, 0);
  EXPECT_EQ(why().cause, EndCause::kKilledMachine);
}

TEST_F(WhyTest, ARunsOwnWordComesFirst) {
  const auto of = [&](RunStatus status) {
    fs::remove_all(root_);
    status.step = 95;
    leave_run(status);
    return why();
  };
  EXPECT_EQ(of({.status = "finished", .cause = "finished"}).cause, EndCause::kFinished);
  EXPECT_FALSE(why().incident());
  EXPECT_EQ(of({.status = "stopped", .message = "SIGINT", .cause = "asked"}).summary,
            "stopped by hand at step 95 (committed: step 90): SIGINT");
  EXPECT_FALSE(why().incident());
  EXPECT_EQ(of({.status = "stopped", .message = "m", .cause = "memory"}).cause,
            EndCause::kPressure);
  EXPECT_TRUE(why().memory());
  EXPECT_EQ(of({.status = "stopped", .message = "m", .cause = "refused"}).cause,
            EndCause::kRefused);
  EXPECT_EQ(of({.status = "failed", .message = "m", .cause = "disk"}).cause, EndCause::kDisk);
  EXPECT_FALSE(why().memory());
  EXPECT_TRUE(why().incident());
  EXPECT_EQ(
      of({.status = "failed", .message = "ValueError: classroom OOM", .cause = "error"}).cause,
      EndCause::kFailed);
  EXPECT_FALSE(why().memory());
}

TEST_F(WhyTest, AWorkerThatTheKernelKilledIsNoPlainFailure) {
  leave_run({.status = "failed", .message = "RuntimeError: DataLoader worker", .cause = "error"});
  KernelNow kernel = quiet();
  kernel.cgroup_oom_kills = 4;
  const Why found = why(kernel);
  EXPECT_EQ(found.cause, EndCause::kKilledCgroup);
  EXPECT_NE(found.summary.find("a process of it was killed by the kernel"), std::string::npos);
  leave_guard("killed_for_limit", 1, 1);
  EXPECT_EQ(why().cause, EndCause::kKilledAtLimit);
  EXPECT_TRUE(says(why().evidence, "DataLoader worker"));
}

TEST_F(WhyTest, ALeakIsNamedWithItsAdvice) {
  fs::create_directories(root_);
  leave_looks(Course::kLeak, "evaluating");  // Killed then; it grew before.
  leave_guard("killed_for_limit", 137, 1);
  const Why found = why();
  EXPECT_FALSE(found.run);
  EXPECT_TRUE(says(found.evidence, "leak: children grows by 562.7 MiB a step, in phase decode"));
  EXPECT_TRUE(says(found.advice, "what each worker keeps from item to item"));
}

// Epochs, phases and training are a run's.
TEST_F(WhyTest, ACommandThatIsNoRunDoesNotTrain) {
  fs::create_directories(root_);
  leave_looks();
  leave_guard("killed_for_limit", 137, 1);
  EXPECT_EQ(why().summary,
            "killed by the kernel at the limit of 16.0 GiB that `plimsoll run` set; a worker, PID "
            "4711 (pt_data_worker), grew 11.0 GiB");
}

TEST_F(WhyTest, T10TheCgroupAroundACommandIsToldFromItsOwnLimit) {
  leave_guard("killed_in_cgroup", 137, 1);
  EXPECT_EQ(why().cause, EndCause::kKilledCgroup);
  EXPECT_TRUE(why().memory());
  EXPECT_EQ(why().summary,
            "killed by the kernel: the cgroup around it (limit 8.0 GiB), not at the limit of 16.0 "
            "GiB that `plimsoll run` set");
  leave_guard("stopped", 143, 1);
  EXPECT_TRUE(says(why().evidence, "the kernel killed 1 of its processes for memory"));
}

TEST_F(WhyTest, ACommandWithARecordHasItsExitStatusAlone) {
  fs::create_directories(root_);
  leave_guard("done", 0, 0);
  EXPECT_EQ(why().cause, EndCause::kFinished);
  EXPECT_FALSE(why().incident());
  leave_guard("done", 3, 0);
  EXPECT_EQ(why().cause, EndCause::kFailed);
  EXPECT_FALSE(why().memory());
  test::spill(root_ / EndedCommand::kFile, "{\"ending\": [1], \"status\": \"x\", \"advice\": 7}");
  EXPECT_EQ(why().cause, EndCause::kFinished);  // What is mistyped counts as not there.
}

TEST_F(WhyTest, WhatIsNoRunIsRefused) {
  fs::create_directories(root_);
  const auto none = explain_end(root_, quiet());
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, ErrorCode::kNotFound);
}

}  // namespace
}  // namespace plimsoll
