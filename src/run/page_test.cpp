// SPDX-License-Identifier: Apache-2.0
#include "run/page.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include "run/counter_track.h"
#include "run/page_events.h"
#include "run/run_folder.h"
#include "tests/support/array_files.h"
#include "watch/look_history.h"
#include "watch/picture.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

class PageTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() /
            fmt::format("plimsoll-page-{}-{}", ::getpid(),
                        ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(root_);
  }
  void TearDown() override { fs::remove_all(root_); }
  fs::path root_;
};

std::size_t times(const std::string& text, std::string_view words) {
  std::size_t found = 0;
  for (std::size_t at = text.find(words); at != std::string::npos; at = text.find(words, at + 1)) {
    ++found;
  }
  return found;
}

// Whatever a run says of itself, its page has no tag of its making and keeps its bound.
TEST_F(PageTest, WhatComesFromTheRunIsEscapedAndBounded) {
  const std::string evil = "<script src=http://x/a.js></script>'\"&\x01\xE9";
  const std::string long_evil = [] {
    std::string text;
    while (text.size() < 4000) {
      text += "<img src='//x'>&\"";
    }
    return text;
  }();
  {
    std::string toml = "[cosir]\n";
    for (int at = 0; at < 3000; ++at) {
      toml += fmt::format("key_{} = '{}'\n", at, long_evil.substr(0, 200));
    }
    RunFolder folder = RunFolder::create(root_, toml).or_throw();
    auto looks = LookHistory::open(root_ / LookHistory::kFile,
                                   {.pid = 7, .began = 1e9, .cgroup = evil, .command = evil})
                     .or_throw();
    for (std::int64_t at = 0; at < 3000; ++at) {
      KeptLook look{.time = 1e9 + static_cast<double>(at),
                    .step = at,
                    .loss = 1.0 / static_cast<double>(at + 1),
                    .rows_per_second = 5,
                    .limit_bytes = (1LL << 30) + (at % 7 << 20),
                    .held_bytes = at << 18,
                    .phase = at % 2 == 0 ? evil.substr(0, 9) : "b",
                    .largest = {{.pid = 7, .name = "<b>", .bytes = at << 18}}};
      look.owners.fill(at << 16);
      looks.add(look).or_throw();
      folder.event("commit", {{"step", at}, {"seconds", 0.5}}).or_throw();
      folder.event("refusal", {{"step", at}, {"message", std::string_view(long_evil)}}).or_throw();
      folder
          .event("evict", {{"owner", std::string_view(evil)},
                           {"move", std::string_view("shrank")},
                           {"given_bytes", at}})
          .or_throw();
      folder
          .event("verdict", {{"text", std::string_view("leak")},
                             {"site", std::string_view("data.py:<12>")},
                             {"holder", std::string_view("a list")}})
          .or_throw();
    }
    folder.write_status({.status = "failed", .message = long_evil, .cause = "error"}, true)
        .or_throw();
  }
  const std::string page = report_page(root_).or_throw();
  EXPECT_LT(page.size(), kPageBytesMost);
  for (const char* tag : {"<script", "<img", "<b>&", "url("}) {
    EXPECT_EQ(times(page, tag), 0U) << tag;
  }
  EXPECT_EQ(times(page, "href="), 0U);
  EXPECT_EQ(times(page, "\x01"), 0U);
  EXPECT_GE(times(page, "&lt;script"), 2U);
  EXPECT_GE(times(page, "leak; site data.py:&lt;12&gt;; holder a list"), 1U);
  EXPECT_NE(page.find("3,000 commits"), std::string::npos);
  EXPECT_NE(page.find("(3000 in all, the newest 20)"), std::string::npos);
  EXPECT_EQ(write_report(root_).or_throw(), root_ / "report.html");
  EXPECT_EQ(test::slurp(root_ / "report.html").size(), page.size());
}

TEST_F(PageTest, LooksBecomeCountersOfATrace) {
  fs::create_directories(root_);
  auto looks =
      LookHistory::open(root_ / LookHistory::kFile, {.pid = 7, .command = "train\xE9"}).or_throw();
  for (std::int64_t at = 0; at < 3; ++at) {
    KeptLook look{.time = 1e9 + 0.5 * static_cast<double>(at),
                  .step = at,
                  .loss = 2,
                  .limit_bytes = 1 << 30,
                  .held_bytes = (at + 1) << 20,
                  .phase = at == 1 ? "eval" : "train"};
    look.owners.fill(-1);
    look.owners[static_cast<std::size_t>(Owner::kShared)] = at << 20;
    looks.add(look).or_throw();
  }
  write_counter_tracks(root_, root_ / "trace.json").or_throw();
  const auto trace = nlohmann::json::parse(test::slurp(root_ / "trace.json"));
  std::vector<std::string> slices;
  std::vector<std::int64_t> shared;
  for (const auto& event : trace["traceEvents"]) {
    EXPECT_EQ(event["pid"], 7);
    if (event["ph"] == "X") {
      EXPECT_EQ(event["ts"], 1'000'000'000'000'000 + 500'000 * slices.size());
      EXPECT_EQ(event["dur"], 500'000);
      slices.push_back(event["name"]);
    } else if (event["name"] == "memory by owner") {
      EXPECT_EQ(event["args"].size(), 1U);  // What is not known is no counter.
      EXPECT_EQ(event["ts"], 1'000'000'000'000'000 + 500'000 * shared.size());
      shared.push_back(event["args"]["shared"]);
    }
  }
  EXPECT_EQ(slices, (std::vector<std::string>{"eval", "train"}));  // Up to each look.
  EXPECT_EQ(shared, (std::vector<std::int64_t>{0, 1 << 20, 2 << 20}));
  EXPECT_EQ(write_counter_tracks(root_ / "nowhere", root_ / "t.json").error().code,
            ErrorCode::kNotFound);
}

TEST_F(PageTest, ARunWithoutLooksHasAPageThatSaysSo) {
  { RunFolder folder = RunFolder::create(root_, "[cosir]\n").or_throw(); }
  const std::string page = report_page(root_).or_throw();
  EXPECT_NE(page.find("no looks were kept"), std::string::npos);
  EXPECT_EQ(report_page(root_ / "nowhere").error().code, ErrorCode::kNotFound);
}

TEST_F(PageTest, S37_TheLineBelowTheTitleBeginsWithWhatIsKnown) {
  {
    RunFolder folder = RunFolder::create(root_, "recipe = \"python\"\n").or_throw();
    RunStatus status;
    status.step = 40;
    status.steps_total = kUnknownSteps;
    ASSERT_TRUE(folder.write_status(status, true));
  }
  const std::string page = report_page(root_).or_throw();
  EXPECT_NE(page.find("<p class='sub'>step 40 · /"), std::string::npos) << page;
}

TEST_F(PageTest, EventsAreReadInBoundedMemory) {
  fs::create_directories(root_);
  {
    std::ofstream file(root_ / "events.jsonl");
    for (int at = 0; at < 50'000; ++at) {
      file << fmt::format(R"({{"time":{},"event":"step","step":{},"loss":{}}})", at, at,
                          50'000 - at)
           << '\n';
    }
    file << std::string(10'000, 'x') << '\n' << "{\"event\":\"warn";  // Too long; cut short.
  }
  const PageEvents events = read_page_events(root_).or_throw();
  const auto& points = events.loss.points();
  ASSERT_GT(points.size(), ThinnedSeries::kPointsMost / 2);
  ASSERT_LE(points.size(), ThinnedSeries::kPointsMost);
  EXPECT_EQ(points[0], std::pair(0.0, 50'000.0));
  const double every = points[1].first;
  for (std::size_t at = 0; at < points.size(); ++at) {
    EXPECT_EQ(points[at].first, every * static_cast<double>(at));
    EXPECT_EQ(points[at].second, 50'000 - points[at].first);
  }
  EXPECT_GE(points.back().first, 49'000);
  EXPECT_TRUE(events.warnings.empty());
}

TEST(Picture, OwnersAreStackedToWhatIsHeldAndTheLimitIsDrawn) {
  std::vector<PicturePoint> points(3);
  for (std::size_t at = 0; at < 3; ++at) {
    points[at].x = static_cast<double>(at);
    points[at].owners.fill(-1);
    points[at].owners[static_cast<std::size_t>(Owner::kTensors)] = 256 << 20;
    points[at].owners[static_cast<std::size_t>(Owner::kFiles)] = 512 << 20;
    points[at].limit_bytes = 512 << 20;
    points[at].phase = at == 2 ? "evaluating" : "train";
  }
  const std::string svg = memory_picture(points, {}, PictureUnit::kSeconds);
  EXPECT_NE(svg.find("limit 512.0 MiB"), std::string::npos);
  EXPECT_NE(svg.find("<title>tensors</title>"), std::string::npos);
  EXPECT_EQ(svg.find("<title>files</title>"), std::string::npos);
  EXPECT_NE(svg.find("evaluating"), std::string::npos);
  // Half of the limit, of which there is 1.08 in a height of 268 from 22 on: 22 + 268 × (1 − .5
  // / 1.08).
  EXPECT_NE(svg.find("M78.0 165.9"), std::string::npos) << svg;
  points[0].limit_bytes = points[1].limit_bytes = points[2].limit_bytes = 64LL << 30;
  const std::string far = memory_picture(points, {}, PictureUnit::kSeconds);
  EXPECT_NE(far.find("limit 64.0 GiB"), std::string::npos);
}

// The limit is in each picture: far above what is held, above a break of the axis.
TEST(S52Picture, ALimitFarAboveIsDrawnAboveABreak) {
  std::vector<PicturePoint> points(3);
  for (std::size_t at = 0; at < 3; ++at) {
    points[at].x = static_cast<double>(at);
    points[at].owners.fill(-1);
    points[at].owners[static_cast<std::size_t>(Owner::kTensors)] = 128 << 20;
    points[at].owners[static_cast<std::size_t>(Owner::kBefore)] = 128 << 20;
    points[at].limit_bytes = 64LL << 30;
  }
  const std::string svg = memory_picture(points, {}, PictureUnit::kSeconds);
  EXPECT_NE(svg.find("M78.0 22.0H"), std::string::npos) << svg;  // The limit, at the top.
  EXPECT_NE(svg.find("limit 64.0 GiB"), std::string::npos);
  EXPECT_NE(svg.find("l12 -5"), std::string::npos) << "no break of the axis";
  // What was there before lies below all else: from the bottom, 290, up.
  const auto before = svg.find("<title>before the run</title>");
  EXPECT_LT(before, svg.find("<title>tensors</title>"));
  // 22 + 34 + (268 - 34) × (1 − .5 / 1.08).
  EXPECT_NE(svg.find("M78.0 181.7"), std::string::npos) << svg;
  std::array<std::int64_t, kOwnerCount> owners{};
  owners[static_cast<std::size_t>(Owner::kTensors)] = 256 << 20;
  const std::string bar = bar_picture(owners, 64LL << 30);
  EXPECT_NE(bar.find("width='787.2'"), std::string::npos) << bar;  // 0.82 of 960.
  EXPECT_NE(bar.find("limit 64.0 GiB"), std::string::npos);
}

// Name, date and verdict are the title; the line below begins with a word.
TEST_F(PageTest, S52TheTitleIsNameDateAndVerdict) {
  {
    RunFolder folder = RunFolder::create(root_, "").or_throw();
    auto looks = LookHistory::open(root_ / LookHistory::kFile, {.pid = 7}).or_throw();
    KeptLook look{.time = 1e9, .limit_bytes = 1 << 30, .held_bytes = 300 << 20};
    look.owners.fill(-1);
    look.owners[static_cast<std::size_t>(Owner::kBefore)] = 200 << 20;
    look.owners[static_cast<std::size_t>(Owner::kTensors)] = 100 << 20;
    looks.add(look).or_throw();
    folder.write_status({.status = "finished", .step = 40, .cause = "finished"}, true).or_throw();
  }
  const std::string page = report_page(root_).or_throw();
  const std::string title = root_.filename().string() + " · 9 September 2001 · Finished";
  EXPECT_NE(page.find("<title>" + title + "</title>"), std::string::npos) << page.substr(0, 3000);
  EXPECT_NE(page.find("<h1>" + title + "</h1>"), std::string::npos);
  EXPECT_EQ(page.find("<p class='sub'> ·"), std::string::npos);
  EXPECT_NE(page.find("200.0 MiB of them by what was there before the run"), std::string::npos);
  EXPECT_NE(page.find("most of the rest, 100.0 MiB, by <b>tensors</b>"), std::string::npos);
}

TEST(Picture, ALineLeavesOutWhatIsNotFinite) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::string svg =
      line_picture("loss", {{0, 1}, {1, nan}, {2, 3}}, 0, 2, PictureUnit::kSteps);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(times(svg, "L"), 1U);
  EXPECT_NE(line_picture("loss", {{0, nan}}, 0, 2, PictureUnit::kSteps).find("no loss was told"),
            std::string::npos);
}

}  // namespace
}  // namespace plimsoll
