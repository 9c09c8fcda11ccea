// SPDX-License-Identifier: Apache-2.0
#include "run/run_folder.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <iterator>
#include <latch>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "os/directories.h"
#include "os/power_loss.h"
#include "run/recipe.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

class RunFolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    base_ = fs::temp_directory_path() /
            fmt::format("plimsoll-run-{}-{}", ::getpid(),
                        ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::create_directories(base_);
    root_ = base_ / "run";
  }
  void TearDown() override { fs::remove_all(base_); }

  RunFolder create() const {
    auto folder = RunFolder::create(root_, "[cosir]\n");
    EXPECT_TRUE(folder) << folder.error().to_string();
    return std::move(folder).or_throw();
  }

  static std::string read(const fs::path& path) {
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }

  static std::vector<std::string> lines(const fs::path& path) {
    std::vector<std::string> all;
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
      all.push_back(line);
    }
    return all;
  }

  fs::path base_;
  fs::path root_;
};

TEST_F(RunFolderTest, R05_APublishedRunOutlivesAPowerFailureWithTheDirectoriesAboveIt) {
  root_ = base_ / "above" / "below" / "run";
  record_unsynced({});
  {
    RunFolder folder = create();
    make_directories(folder.checkpoint_path(7)).or_throw();
    folder.publish(7, 1).or_throw();
  }
  strike(
      unsynced_changes(), [](std::size_t, std::int64_t) { return false; }, 512);
  stop_recording_unsynced();
  EXPECT_EQ(RunFolder::open(root_).or_throw().published_step().or_throw(), 7);
}

TEST_F(RunFolderTest, R67_NothingIsWrittenThroughALink) {
  static_cast<void>(create());
  const fs::path victim = base_ / "victim";
  const auto linked = [&](const char* name) {
    std::ofstream(victim) << "victim";
    fs::remove(root_ / name);
    fs::create_symlink(victim, root_ / name);
  };
  for (const char* name : {".lock", "events.jsonl"}) {
    linked(name);
    const auto refused = RunFolder::open(root_);
    ASSERT_FALSE(refused) << name;
    EXPECT_NE(refused.error().to_string().find("not written through a symbolic link"),
              std::string::npos);
    fs::remove(root_ / name);
  }
  for (const char* name : {".status.json.new", "status.json.new", "status.json", "run.toml.new",
                           "identity.json.new", "checkpoints/manifest.json.new"}) {
    linked(name);
    auto folder = RunFolder::open(root_).or_throw();
    folder.write_status({}, true).or_throw();
    folder.write_config("[cosir]\n").or_throw();
    folder.check_identity({}).or_throw();
    folder.publish(3, 1).or_throw();
    EXPECT_EQ(read(victim), "victim") << name;
    fs::remove(root_ / name);
    fs::remove(root_ / "identity.json");
    fs::remove(root_ / "run.toml");
    folder.write_config("[cosir]\n").or_throw();
  }
}

TEST_F(RunFolderTest, IsMadeOnceAndThenPointsToResume) {
  {
    const auto folder = create();
    EXPECT_TRUE(RunFolder::is_run(root_));
    EXPECT_TRUE(read(root_ / "run.toml").starts_with("[cosir]\n# crc32c "));
  }
  const auto again = RunFolder::create(root_, "other");
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(again.error().to_string().find("plimsoll resume"), std::string::npos);
  EXPECT_TRUE(read(root_ / "run.toml").starts_with("[cosir]\n# crc32c "));
}

TEST_F(RunFolderTest, LeavesForeignFoldersAndFilesAsTheyWere) {
  fs::create_directories(root_);
  std::ofstream(root_ / "thesis.txt") << "mine";
  const auto folder = RunFolder::create(root_, "x");
  ASSERT_FALSE(folder);
  EXPECT_NE(folder.error().to_string().find("not empty"), std::string::npos);
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), fs::directory_iterator()), 1);
  EXPECT_EQ(read(root_ / "thesis.txt"), "mine");
  const auto file = RunFolder::create(root_ / "thesis.txt", "x");
  ASSERT_FALSE(file);
  EXPECT_EQ(read(root_ / "thesis.txt"), "mine");
}

TEST_F(RunFolderTest, TakesAnEmptyFolderAndOneThatHoldsOnlyALock) {
  fs::create_directories(root_);
  std::ofstream(root_ / ".lock") << "123\n";
  EXPECT_TRUE(RunFolder::create(root_, "x"));
}

TEST_F(RunFolderTest, TakesAFolderWhoseMakerWasKilledBeforeItWroteTheConfiguration) {
  fs::create_directories(root_ / "checkpoints");
  fs::create_directories(root_ / "metrics");
  std::ofstream(root_ / ".lock") << "123\n";
  std::ofstream(root_ / "run.toml.new") << "[co";
  EXPECT_TRUE(RunFolder::create(root_, "x"));
  EXPECT_TRUE(read(root_ / "run.toml").starts_with("x"));
}

TEST_F(RunFolderTest, LeavesAFolderOfCheckpointsAsItWas) {
  fs::create_directories(root_ / "checkpoints" / "mine");
  EXPECT_FALSE(RunFolder::create(root_, "x"));
  EXPECT_TRUE(fs::exists(root_ / "checkpoints" / "mine"));
}

TEST_F(RunFolderTest, AbandoningLeavesNothingBehind) {
  create().abandon();
  EXPECT_FALSE(fs::exists(root_));
  fs::create_directories(root_);
  create().abandon();
  EXPECT_TRUE(fs::is_empty(root_));
}

TEST_F(RunFolderTest, AnOpenedRunIsNeverAbandoned) {
  { const auto folder = create(); }
  auto folder = RunFolder::open(root_).or_throw();
  folder.abandon();
  EXPECT_TRUE(RunFolder::is_run(root_));
}

TEST_F(RunFolderTest, LetsOneProcessTrainAtATime) {
  auto folder = create();
  EXPECT_TRUE(RunFolder::is_locked(root_));
  const auto second = RunFolder::open(root_);
  ASSERT_FALSE(second);
  EXPECT_NE(second.error().to_string().find("another process trains"), std::string::npos);
  const pid_t child = ::fork();
  if (child == 0) {
    ::_exit(RunFolder::open(root_) ? 1 : 0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  auto moved = std::move(folder);
  EXPECT_TRUE(RunFolder::is_locked(root_));
  { const auto ended = std::move(moved); }
  EXPECT_FALSE(RunFolder::is_locked(root_));
  EXPECT_TRUE(RunFolder::open(root_));
}

// The descriptor by which this process has a file open.
int descriptor_of(const fs::path& path) {
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (fs::read_symlink(entry, gone) == path) {
      return std::stoi(entry.path().filename());
    }
  }
  return -1;
}

TEST_F(RunFolderTest, AForkedChildHasNoPartInTheLock) {
  std::optional<RunFolder> folder(create());
  int pipe[2] = {-1, -1};
  ASSERT_EQ(::pipe(pipe), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    folder.reset();  // Ends nothing of the parent's.
    std::ignore = ::write(pipe[1], "x", 1);
    ::pause();
    ::_exit(0);
  }
  char ready = 0;
  ASSERT_EQ(::read(pipe[0], &ready, 1), 1);
  EXPECT_TRUE(RunFolder::is_locked(root_));
  folder->event("still", {}).or_throw();
  const int copy = ::dup(descriptor_of(root_ / ".lock"));  // As of a child that has not run yet.
  ASSERT_GE(copy, 0);
  folder.reset();
  EXPECT_FALSE(RunFolder::is_locked(root_));
  ::close(copy);
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  for (const int end : pipe) {
    ::close(end);
  }
}

TEST_F(RunFolderTest, OpeningNeedsARunAndClearsOldRequests) {
  const auto missing = RunFolder::open(root_);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ErrorCode::kNotFound);
  EXPECT_NE(missing.error().to_string().find("`plimsoll train` or a plimsoll.Run makes one"),
            std::string::npos);
  { const auto folder = create(); }
  const auto again = RunFolder::create(root_, "seed = 1\n");
  ASSERT_FALSE(again);
  EXPECT_NE(again.error().to_string().find("by `plimsoll resume RUN` (plimsoll.resume), or by its "
                                           "own program; or name another folder with --out (out)"),
            std::string::npos)
      << again.error().to_string();
  std::ofstream(root_ / ".stop");
  std::ofstream(root_ / ".pause");
  ASSERT_TRUE(RunFolder::open(root_));
  EXPECT_FALSE(fs::exists(root_ / ".stop"));
  EXPECT_FALSE(fs::exists(root_ / ".pause"));
}

TEST_F(RunFolderTest, EventsAreWholeLinesOfJson) {
  auto folder = create();
  ASSERT_TRUE(folder.event("note", {{"text", std::string_view("a \"b\"\n\\ \x01 é")},
                                    {"n", std::int64_t{-5}},
                                    {"x", 0.1},
                                    {"bad", std::numeric_limits<double>::quiet_NaN()},
                                    {"yes", true}}));
  const auto all = lines(root_ / "events.jsonl");
  ASSERT_EQ(all.size(), 1U);
  const auto json = nlohmann::json::parse(all[0]);
  EXPECT_EQ(json["event"], "note");
  EXPECT_EQ(json["text"], "a \"b\"\n\\ \x01 é");
  EXPECT_EQ(json["n"], -5);
  EXPECT_EQ(json["x"], 0.1);
  EXPECT_TRUE(json["bad"].is_null());
  EXPECT_EQ(json["yes"], true);
  EXPECT_GT(json["time"].get<double>(), 1.6e9);
}

TEST_F(RunFolderTest, EventLinesStayWithinTheirBoundAndStayJson) {
  auto folder = create();
  for (std::size_t length = 0; length < 5000; length += 7) {
    std::string text;
    while (text.size() < length) {
      text += length % 2 == 0 ? "é" : "\n";
    }
    ASSERT_TRUE(folder.event(length % 3 == 0 ? "step" : "note",
                             {{"text", std::string_view(text)}, {"loss", 1.25}}));
  }
  for (const auto& line : lines(root_ / "events.jsonl")) {
    const auto json = nlohmann::json::parse(line, nullptr, false);
    ASSERT_TRUE(json.is_object()) << line;
    EXPECT_LE(line.size() + 1, json["event"] == "step" ? kStepEventBytesMax : kEventBytesMax);
  }
}

TEST_F(RunFolderTest, AResumedRunDoesNotContinueALineThatAKillCutShort) {
  { ASSERT_TRUE(create().event("one", {})); }
  std::ofstream(root_ / "events.jsonl", std::ios::app) << "{\"event\":\"st";
  { ASSERT_TRUE(RunFolder::open(root_).or_throw().event("two", {})); }
  const auto all = lines(root_ / "events.jsonl");
  ASSERT_EQ(all.size(), 3U);
  EXPECT_EQ(nlohmann::json::parse(all[2])["event"], "two");
}

TEST_F(RunFolderTest, T13CheckpointsAreKeptInNumericOrder) {
  auto folder = create();
  EXPECT_FALSE(folder.published_step().or_throw().has_value());
  // 999999999 and 1000000000 sort the other way round as text.
  for (const std::int64_t step : {9, 10, 999'999'999, 1'000'000'000}) {
    fs::create_directories(folder.checkpoint_path(step));
    ASSERT_TRUE(folder.publish(step, 2));
    EXPECT_EQ(folder.published_step().or_throw(), step);
  }
  EXPECT_EQ(folder.checkpoint_steps().or_throw(),
            (std::vector<std::int64_t>{999'999'999, 1'000'000'000}));
  EXPECT_EQ(checkpoint_name(9), "step-000000009");
}

TEST_F(RunFolderTest, T13BackupsBesideCheckpointsAreNeitherTheNewestNorDeleted) {
  auto folder = create();
  const fs::path checkpoints = root_ / "checkpoints";
  const std::vector<std::string> backups{"step-9000", "step-000000900-mine", "step-000001000.old",
                                         "step-.new", "best"};
  for (const std::string& name : backups) {
    fs::create_directories(checkpoints / name);
  }
  for (const std::int64_t step : {900, 1000, 1100}) {
    fs::create_directories(folder.checkpoint_path(step));
    ASSERT_TRUE(folder.publish(step, 2));
    ASSERT_TRUE(folder.discard_unpublished());
  }
  EXPECT_EQ(folder.published_step().or_throw(), 1100);
  EXPECT_EQ(folder.checkpoint_steps().or_throw(), (std::vector<std::int64_t>{1000, 1100}));
  for (const std::string& name : backups) {
    EXPECT_TRUE(fs::exists(checkpoints / name)) << name;
  }
}

TEST_F(RunFolderTest, KeepingOneCheckpointNeverDeletesThePublishedOne) {
  auto folder = create();
  fs::create_directories(folder.checkpoint_path(5));
  fs::create_directories(folder.checkpoint_path(8));
  ASSERT_TRUE(folder.publish(5, 1));
  EXPECT_TRUE(fs::exists(folder.checkpoint_path(5)));
}

TEST_F(RunFolderTest, WhatWasNeverPublishedIsDiscarded) {
  auto folder = create();
  for (const std::int64_t step : {4, 8, 12}) {
    fs::create_directories(folder.checkpoint_path(step));
  }
  fs::create_directories(root_ / "checkpoints" / "step-000000012.new");
  fs::create_directories(root_ / "checkpoints" / "step-000000012.partial");
  ASSERT_TRUE(folder.publish(8, 9));
  ASSERT_TRUE(folder.discard_unpublished());
  EXPECT_EQ(folder.checkpoint_steps().or_throw(), (std::vector<std::int64_t>{4, 8}));
  EXPECT_FALSE(fs::exists(root_ / "checkpoints" / "step-000000012.new"));
  EXPECT_FALSE(fs::exists(root_ / "checkpoints" / "step-000000012.partial"));
  std::ofstream(root_ / "checkpoints" / "manifest.json") << "{\"step\": ";
  const auto broken = folder.published_step();
  ASSERT_FALSE(broken);
  EXPECT_EQ(broken.error().code, ErrorCode::kCorrupt);
}

TEST_F(RunFolderTest, NoBitOfTheManifestMakesAnotherStepOfIt) {
  auto folder = create();
  fs::create_directories(folder.checkpoint_path(5));
  ASSERT_TRUE(folder.publish(5, 1));
  const fs::path path = root_ / "checkpoints" / "manifest.json";
  std::ifstream file(path, std::ios::binary);
  const std::string sound{std::istreambuf_iterator<char>(file), {}};
  ASSERT_EQ(folder.published_step().or_throw(), 5);
  for (std::size_t bit = 0; bit < 8 * sound.size(); ++bit) {
    std::string damaged = sound;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    std::ofstream(path, std::ios::binary) << damaged;
    const auto step = folder.published_step();
    ASSERT_FALSE(step) << "bit " << bit << ": " << damaged;
    ASSERT_EQ(step.error().code, ErrorCode::kCorrupt) << "bit " << bit;
  }
}

TEST_F(RunFolderTest, IdentityRefusesADifferentMachineByName) {
  auto folder = create();
  const RunIdentity first{{"torch", "2.13.0"}, {"compute_threads", "2"}, {"mkl", "COMPATIBLE"}};
  ASSERT_TRUE(folder.check_identity(first));
  ASSERT_TRUE(folder.check_identity(first));
  RunIdentity other = first;
  other["compute_threads"] = "4";
  other.erase("mkl");
  other["isa"] = "avx2";
  const auto refused = folder.check_identity(other);
  ASSERT_FALSE(refused);
  const std::string text = refused.error().to_string();
  for (const char* part : {"compute_threads was 2 and is 4", "mkl was COMPATIBLE and is unset",
                           "isa was unset and is avx2"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
  EXPECT_TRUE(folder.check_identity(first));
}

TEST_F(RunFolderTest, StatusIsReadBackByAnotherProcess) {
  RunStatus status;
  status.status = "running";
  status.step = 41;
  status.loss = 1.5;
  status.leased_by_tag[1] = 77;
  {
    auto folder = create();
    ASSERT_TRUE(folder.write_status(status));
    status.step = 42;
    ASSERT_TRUE(folder.write_status(status));  // Too soon: dropped.
    EXPECT_EQ(RunFolder::view(root_).or_throw().status.step, 41);
    ASSERT_TRUE(folder.write_status(status, true));
    const auto view = RunFolder::view(root_).or_throw();
    EXPECT_TRUE(view.alive);
    EXPECT_EQ(view.pid, ::getpid());
    EXPECT_EQ(view.status.status, "running");
    EXPECT_EQ(view.status.step, 42);
    EXPECT_EQ(view.status.loss, 1.5);
    EXPECT_EQ(view.status.leased_by_tag[1], 77);
    EXPECT_GE(view.age_seconds, 0.0);
    EXPECT_TRUE(nlohmann::json::parse(view.to_json())["alive"].get<bool>());
    EXPECT_NE(view.to_text().find("step      42"), std::string::npos) << view.to_text();
  }
  const auto after = RunFolder::view(root_).or_throw();
  EXPECT_FALSE(after.alive);
  EXPECT_EQ(after.status.status, "interrupted");
  EXPECT_EQ(after.recipe, "cosir");
  EXPECT_NE(after.to_text().find("rows/s"), std::string::npos) << after.to_text();
  EXPECT_NE(after.to_text().find("  store "), std::string::npos) << after.to_text();
}

TEST_F(RunFolderTest, AResumptionThatIsKilledAtOnceIsNotTakenForTheRunBeforeIt) {
  {
    auto folder = create();
    RunStatus status;
    status.status = "finished";
    status.message = "all done";
    status.step = 42;
    status.resident_bytes = 77;
    ASSERT_TRUE(folder.write_status(status, true));
  }
  EXPECT_EQ(RunFolder::view(root_).or_throw().status.status, "finished");
  {
    const auto resumed = RunFolder::open(root_).or_throw();
    EXPECT_EQ(RunFolder::view(root_).or_throw().status.status, "starting");
  }
  const auto killed = RunFolder::view(root_).or_throw().status;
  EXPECT_EQ(killed.status, "interrupted");
  EXPECT_EQ(killed.step, 42);
  EXPECT_EQ(killed.message, "");
  EXPECT_EQ(killed.resident_bytes, 0);
  std::ofstream(root_ / "status.json") << "cut sho";  // By a power failure: it is not synced.
  ASSERT_FALSE(RunFolder::view(root_));
  EXPECT_TRUE(RunFolder::open(root_));
  EXPECT_EQ(RunFolder::view(root_).or_throw().status.status, "interrupted");
}

TEST_F(RunFolderTest, R42_WhatMayChangeByWishIsWrittenDown) {
  auto folder = create();
  ASSERT_TRUE(folder.check_identity({{"kernels", "AVX512"}, {"seed", "1"}}));
  const RunIdentity other{{"kernels", "AVX2"}, {"seed", "1"}};
  IdentityChanges allowed{.wishes = {"kernels"}, .advice = "wish for it"};
  const auto refused = folder.check_identity(other, allowed);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().to_string().find("kernels was AVX512 and is AVX2"), std::string::npos);
  EXPECT_NE(refused.error().to_string().find("wish for it"), std::string::npos);
  const auto more = folder.check_identity({{"kernels", "AVX2"}, {"seed", "2"}}, allowed);
  ASSERT_FALSE(more);
  EXPECT_EQ(more.error().to_string().find("wish for it"), std::string::npos) << "it would not do";
  allowed.any = {"kernels"};
  EXPECT_FALSE(folder.check_identity({{"kernels", "AVX2"}, {"seed", "2"}}, allowed));
  ASSERT_TRUE(folder.check_identity(other, allowed));
  EXPECT_TRUE(folder.check_identity(other)) << "it belongs there now";
  const auto told = lines(root_ / "events.jsonl");
  ASSERT_EQ(told.size(), 1U);
  const auto event = nlohmann::json::parse(told[0]);
  EXPECT_EQ(event["event"], "identity");
  EXPECT_EQ(event["was"], "AVX512");
  EXPECT_EQ(event["is"], "AVX2");
}

TEST_F(RunFolderTest, R47_DataIsComparedByItsFingerprint) {
  auto folder = create();
  ASSERT_TRUE(folder.check_identity({{kDataKey, "abc"}}));
  EXPECT_TRUE(folder.check_data("d", "abc"));
  const auto other = folder.check_data("d2", "abd");
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(other.error().to_string().find("trained on data of fingerprint abc, but d2 has abd"),
            std::string::npos)
      << other.error().to_string();
}

TEST_F(RunFolderTest, R45_OfSeveralThatMakeItOneDoesAndLosersRemoveNothing) {
  for (int round = 0; round < 60; ++round) {
    std::array<std::optional<Result<RunFolder>>, 3> made;
    {
      std::latch begin(made.size());
      std::vector<std::jthread> makers;
      for (auto& mine : made) {
        makers.emplace_back([&] {
          begin.arrive_and_wait();
          mine.emplace(RunFolder::create(root_, "[cosir]\n"));
          if (!*mine) {
            return;
          }
          (*mine)->write_status({}, true).or_throw();
        });
      }
    }
    int winners = 0;
    for (const auto& mine : made) {
      winners += mine->has_value() ? 1 : 0;
      EXPECT_TRUE(mine->has_value() || mine->error().code == ErrorCode::kInvalidArgument)
          << mine->error().to_string();
    }
    ASSERT_EQ(winners, 1) << "round " << round;
    ASSERT_TRUE(RunFolder::is_run(root_)) << "round " << round;
    ASSERT_TRUE(fs::is_directory(root_ / "checkpoints")) << "round " << round;
    made = {};
    fs::remove_all(root_);
  }
}

TEST_F(RunFolderTest, R54_StatusNamesTheCheckpointThatTheManifestNames) {
  {
    auto folder = create();
    fs::create_directories(folder.checkpoint_path(24));
    ASSERT_TRUE(folder.publish(24, 1));
    RunStatus status;  // Of a resumed process that has saved nothing itself.
    status.status = "running";
    ASSERT_TRUE(folder.write_status(status, true));
  }
  const auto view = RunFolder::view(root_).or_throw();
  EXPECT_EQ(view.status.checkpoint_step, 24);
  EXPECT_NE(view.to_text().find("resumable from step 24"), std::string::npos) << view.to_text();
}

TEST_F(RunFolderTest, ItsStatusSpeaksOfWhatItsRecipeTrainsOn) {
  ASSERT_TRUE(add_recipe({.name = "of-graphs", .unit = "graphs", .settings = [] {
                            return std::unique_ptr<AnySettings>();
                          }}));
  { ASSERT_TRUE(create().write_config("recipe = \"of-graphs\"\n")); }
  const auto view = RunFolder::view(root_).or_throw();
  EXPECT_EQ(nlohmann::json::parse(view.to_json())["recipe"], "of-graphs");
  EXPECT_NE(view.to_text().find("graphs/s"), std::string::npos) << view.to_text();
  EXPECT_EQ(view.to_text().find("  store "), std::string::npos) << view.to_text();
}

}  // namespace
}  // namespace plimsoll
