// SPDX-License-Identifier: Apache-2.0
//
// A folder, a name in a list: all that a new recipe needs. The program of this test knows `toy`
// alone, so nothing of it can know the others by name.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "cli/program.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

struct Said {
  int status{0};
  std::string out{};
  std::string error{};
};

class ToyRecipeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() /
              fmt::format("plimsoll-toy-{}-{}", ::getpid(),
                          ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::create_directories(folder_);
    write_points(10);
  }
  void TearDown() override { fs::remove_all(folder_); }

  void write_points(int lines) const {
    std::ofstream file(folder_ / "points.txt");
    for (int i = 0; i < lines; ++i) {
      file << fmt::format("{} {}\n", 0.1 * (i + 1), 0.2 * (i + 1));
    }
  }
  [[nodiscard]] std::string at(const char* name) const { return (folder_ / name).string(); }

  /// Runs `plimsoll` with the words of `line`.
  static Said say(const std::string& line) {
    std::vector<std::string> words{"plimsoll"};
    std::istringstream read(line);
    for (std::string word; read >> word;) {
      words.push_back(word);
    }
    std::vector<char*> pointers;
    for (auto& word : words) {
      pointers.push_back(word.data());
    }
    pointers.push_back(nullptr);
    ::testing::internal::CaptureStdout();
    ::testing::internal::CaptureStderr();
    Said said;
    said.status = run_program(static_cast<int>(words.size()), pointers.data());
    said.out = ::testing::internal::GetCapturedStdout();
    said.error = ::testing::internal::GetCapturedStderr();
    return said;
  }

  fs::path folder_;
};

TEST_F(ToyRecipeTest, IsListedExplainedAndWrittenOut) {
  EXPECT_EQ(say("recipes").out, "toy\tA line through points\n");
  const Said help = say("train toy --help");
  EXPECT_EQ(help.status, 0);
  EXPECT_NE(help.out.find("--steps"), std::string::npos) << help.out;
  EXPECT_NE(help.out.find("--memory-limit"), std::string::npos) << help.out;
  const Said file = say("config toy");
  EXPECT_NE(file.out.find("\n# Learning rate; decides the bits.\n# Accepts a number from 0 to 1000."
                          "\nlr = 0.5\n"),
            std::string::npos)
      << file.out;
  const Said wrong = say("train toy --data points.txt --out run --step 3");
  EXPECT_EQ(wrong.status, 2);
  EXPECT_NE(wrong.error.find("unknown option '--step'; did you mean --steps?"), std::string::npos)
      << wrong.error;
  const Said other = say("train cosir --data d --out o");
  EXPECT_EQ(other.status, 2);
  EXPECT_NE(other.error.find("unknown command 'cosir'"), std::string::npos) << other.error;
}

TEST_F(ToyRecipeTest, TrainsGoesOnToTheSameBitsAndIsEvaluated) {
  const std::string train = fmt::format("train toy --data {} --lr 0.3", at("points.txt"));
  const Said whole = say(fmt::format("{} --out {} --json", train, at("whole")));
  ASSERT_EQ(whole.status, 0) << whole.error;
  write_points(6);  // The seventh step fails, behind the commit of step 4.
  const Said half =
      say(fmt::format("{} --out {} --checkpoint-every-n-steps 4 --quiet", train, at("half")));
  EXPECT_EQ(half.status, 1);
  EXPECT_NE(half.error.find("points.txt:7: not a line"), std::string::npos) << half.error;
  EXPECT_NE(say("eval " + at("half")).out.find("after 4 steps"), std::string::npos);
  write_points(10);
  const Said again = say(fmt::format("train toy --data {} --out {}", at("points.txt"), at("half")));
  EXPECT_NE(again.error.find("plimsoll resume"), std::string::npos) << again.error;
  const Said longer = say(fmt::format("resume {} --set lr=0.4", at("half")));
  EXPECT_EQ(longer.status, 2);
  EXPECT_NE(longer.error.find("lr is part of this run's identity (0.3)"), std::string::npos)
      << longer.error;
  const Said resumed = say(fmt::format("resume {} --memory-limit 1GiB --json", at("half")));
  ASSERT_EQ(resumed.status, 0) << resumed.error;
  EXPECT_EQ(resumed.out, whole.out);
  EXPECT_EQ(say(fmt::format("eval {} --json", at("half"))).out, whole.out);
}

TEST_F(ToyRecipeTest, IsPlannedAndSaysWhatItDoesNotWeigh) {
  const std::string plan = fmt::format("plan toy --data {}", at("points.txt"));
  EXPECT_EQ(say(plan).out, "one line a step, on cpu\n");
  EXPECT_EQ(say(plan + " --json").out, "{\"batch_size\": 1}\n");
  const Said device = say(plan + " --device tpu");
  EXPECT_EQ(device.status, 2);
  EXPECT_NE(device.error.find("--device tpu: no such device"), std::string::npos) << device.error;
  EXPECT_EQ(say(plan + " --choices").status, 2);
}

TEST_F(ToyRecipeTest, ItsStatusCountsItsUnit) {
  ASSERT_EQ(say(fmt::format("train toy --data {} --out {}", at("points.txt"), at("run"))).status,
            0);
  const Said status = say("status " + at("run"));
  EXPECT_NE(status.out.find("lines/s"), std::string::npos) << status.out << status.error;
  EXPECT_NE(say("status --json " + at("run")).out.find("\"recipe\":\"toy\""), std::string::npos);
}

}  // namespace
}  // namespace plimsoll
