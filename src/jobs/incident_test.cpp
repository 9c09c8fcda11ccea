// SPDX-License-Identifier: Apache-2.0
//
// Goal: an incident is told by evidence, never by a word that happens to contain another.
#include "jobs/incident.h"

#include <filesystem>
#include <fstream>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "jobs/job_log.h"
#include "tests/support/array_files.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

IncidentRules rules_of(const std::string& text) {
  return IncidentRules::parse("rules.toml", text).or_throw();
}

constexpr const char* kThree = R"(
[[rule]]
name = "oom"
pattern = "OOM|out of memory"
then = "fail"
[[rule]]
name = "away"
status = [75, 69]
then = "retry"
[[rule]]
name = "limit"
event = "killed_for_limit"
)";

TEST(T10Incident, PatternsAreOfWholeWordsAndCaseCounts) {
  const IncidentRules rules = rules_of(kThree);
  const IncidentRule& rule = rules.all()[0];
  for (const char* line : {"OOM", "torch: OOM!", "CUDA out of memory.", "(OOM)", "an OOM\tkill"}) {
    EXPECT_TRUE(rule.matches_line(line)) << line;
  }
  for (const char* line : {"classroom", "see the CLASSROOM", "ROOM", "oom", "OOMs", "OOM_score",
                           "without of memory", "Out of memory", ""}) {
    EXPECT_FALSE(rule.matches_line(line)) << line;
  }
}

TEST(T10Incident, AKillForMemoryIsToldByTheKernelAndNotByWords) {
  const IncidentRules rules = IncidentRules::usual();
  const auto killed = rules.find(137, "killed_for_limit", {});
  ASSERT_TRUE(killed);
  EXPECT_EQ(killed->rule, "killed at its memory limit");
  EXPECT_EQ(killed->evidence, "event killed_for_limit");
  EXPECT_EQ(killed->then, "note");
  EXPECT_FALSE(rules.find(137, "killed", {}));  // By somebody's SIGKILL.
  EXPECT_FALSE(rules.find(1, "done", {}));
  EXPECT_EQ(rules.find(143, "timeout", {})->then, "fail");
}

TEST(Incident, TheFirstRuleThatMatchesIsToldWithItsEvidence) {
  const IncidentRules rules = rules_of(kThree);
  EXPECT_EQ(rules.find(75, "done", {"line 3: OOM", "", ""})->evidence, "line 3: OOM");
  EXPECT_EQ(rules.find(75, "done", {"", "", ""})->evidence, "status 75");
  EXPECT_EQ(rules.find(75, "done", {})->then, "retry");
  EXPECT_EQ(rules.find(137, "killed_for_limit", {})->rule, "limit");
  EXPECT_FALSE(rules.find(1, "done", {"", "", ""}));
}

TEST(Incident, AFileThatIsWrongIsNamedWithItsLine) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"[[rule]\n", "rules.toml:1"},
      {"\n[[rule]]\nname = \"a\"\n", "one of pattern, status and event"},
      {"[[rule]]\nname = \"a\"\nstatus = 1\nevent = \"killed\"\n", "one of pattern"},
      {"[[rule]]\nstatus = 1\n", "needs a name"},
      {"[[rule]]\nname = \"a\"\npattern = \"(\"\n", "pattern \"(\""},
      {"[[rule]]\nname = \"a\"\nstatus = 300\n", "from 0 to 255"},
      {"[[rule]]\nname = \"a\"\nstatus = \"1\"\n", "from 0 to 255"},
      {"[[rule]]\nname = \"a\"\nevent = \"oom\"\n", "killed_for_limit"},
      {"[[rule]]\nname = \"a\"\nstatus = 1\nthen = \"stop\"\n", "note, retry, fail"},
      {"[[rule]]\nname = \"a\"\nstatus = 1\nwhen = 2\n", "no key of a rule: when"},
      {"rule = 3\n", "tables [[rule]]"},
      {"[other]\n", "tables [[rule]]"},
      {"[[rule]]\nname = 3\nstatus = 1\n", "name is a text"},
  };
  for (const auto& [text, said] : cases) {
    const auto rules = IncidentRules::parse("rules.toml", text);
    ASSERT_FALSE(rules) << text;
    const std::string error = rules.error().to_string();
    EXPECT_EQ(rules.error().code, ErrorCode::kInvalidArgument);
    EXPECT_TRUE(error.starts_with("rules.toml:")) << error;
    EXPECT_NE(error.find(said), std::string::npos) << error;
  }
  std::string many;
  for (std::size_t at = 0; at <= IncidentRules::kRulesMost; ++at) {
    many += "[[rule]]\nname = \"a\"\nstatus = 1\n";
  }
  EXPECT_FALSE(IncidentRules::parse("rules.toml", many));
}

class JobLogTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / fmt::format("plimsoll-log-{}", ::getpid());
    fs::create_directories(folder_);
    path_ = folder_ / "1.log";
  }
  void TearDown() override { fs::remove_all(folder_); }

  // What the rules find in `text`.
  std::vector<std::string> taken(const std::string& text, const IncidentRules& rules) {
    JobLog log = JobLog::start(path_, rules).or_throw();
    for (std::size_t at = 0; at < text.size();) {
      const ssize_t put = ::write(log.input(), text.data() + at, text.size() - at);
      EXPECT_GT(put, 0);
      at += static_cast<std::size_t>(std::max<ssize_t>(put, 1));
    }
    return log.finish();
  }

  fs::path folder_;
  fs::path path_;
};

TEST_F(JobLogTest, KeepsWhatIsPrintedAndFindsLines) {
  const auto lines =
      taken("a classroom\nbar 1 %\rbar 2 %\nfailed: OOM here\nOOM again", rules_of(kThree));
  EXPECT_EQ(lines, (std::vector<std::string>{"line 3: failed: OOM here", "", ""}));
  EXPECT_EQ(test::slurp(path_), "a classroom\nbar 1 %\rbar 2 %\nfailed: OOM here\nOOM again");
  EXPECT_EQ(taken("one OOM", rules_of(kThree))[0], "line 1: one OOM");  // Without an end of line.
  EXPECT_EQ(test::slurp(path_), "one OOM");
  EXPECT_EQ(test::slurp(path_.string() + ".old").substr(0, 11), "a classroom");
}

TEST_F(JobLogTest, HasABoundAndFindsWhatItDropped) {
  std::string text = "OOM first\n";
  while (std::ssize(text) < 5 * JobLog::kBytesMost) {
    text += std::string(1000, 'x') + "\n";
  }
  text += std::string(2'000'000, 'y') + " OOM\nlast\n";  // Of a long line the beginning counts.
  const auto lines = taken(text, rules_of(kThree));
  EXPECT_EQ(lines[0], "line 1: OOM first");
  EXPECT_LE(static_cast<std::int64_t>(fs::file_size(path_)), JobLog::kBytesMost);
  EXPECT_LE(static_cast<std::int64_t>(fs::file_size(path_.string() + ".old")), JobLog::kBytesMost);
  EXPECT_TRUE(test::slurp(path_).ends_with(" OOM\nlast\n"));
}

TEST_F(JobLogTest, AFullDiskHoldsNobodyUp) {
  fs::remove(path_);
  fs::create_symlink("/dev/full", path_);  // Renamed away at the start; the log is a file.
  EXPECT_EQ(taken("OOM\n", rules_of(kThree))[0], "line 1: OOM");
  EXPECT_TRUE(fs::is_symlink(path_.string() + ".old"));
  fs::remove_all(folder_);  // No file can be made: all is read, and found, all the same.
  EXPECT_EQ(taken(std::string(1 << 20, 'x') + "\nOOM\n", rules_of(kThree))[0], "line 2: OOM");
}

}  // namespace
}  // namespace plimsoll
