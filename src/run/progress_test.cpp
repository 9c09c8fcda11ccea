// SPDX-License-Identifier: Apache-2.0
#include "run/progress.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>

namespace plimsoll {
namespace {

/// A stream that keeps what is written to it.
class Capture {
 public:
  Capture() : stream_(::open_memstream(&text_, &size_)) {}
  ~Capture() {
    std::fclose(stream_);
    std::free(text_);  // open_memstream's own buffer.
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  std::FILE* stream() { return stream_; }
  std::string text() {
    std::fflush(stream_);
    return {text_, size_};
  }

 private:
  char* text_{nullptr};
  std::size_t size_{0};
  std::FILE* stream_;
};

RunStatus example() {
  RunStatus status;
  status.status = "running";
  status.step = 1410;
  status.steps_total = 12000;
  status.epoch = 2;
  status.epochs = 30;
  status.loss = 4.8127;
  status.rows_per_second = 31204;
  status.seconds_left = 130;
  status.limit_bytes = 768LL << 20;
  status.resident_bytes = 384LL << 20;
  status.leased_bytes = 192LL << 20;
  status.leased_by_tag[0] = 115LL << 20;  // Tensors: three cells of twenty.
  status.leased_by_tag[1] = 77LL << 20;   // Rows: two.
  return status;
}

TEST(ProgressTest, PlainLinesComeAtABoundedRate) {
  Capture capture;
  {
    Progress progress({.stream = capture.stream(), .terminal = 0, .plain_seconds = 3600});
    EXPECT_FALSE(progress.live());
    for (int i = 0; i < 1000; ++i) {
      progress.update(example(), 0.5);
    }
    progress.update(example(), 0.5, true);
  }
  const std::string text = capture.text();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2) << text;
  EXPECT_EQ(text.find('\033'), std::string::npos);
  EXPECT_NE(text.find("running epoch 3/30 step 1410/12000 loss 4.8127 31204 rows/s 02:10 left, "
                      "192.0 MiB leased, 384.0 MiB resident of 768.0 MiB"),
            std::string::npos)
      << text;
}

TEST(ProgressTest, EveryOwnerHasALetterInTheBar) {
  RunStatus status = example();
  status.leased_by_tag.fill(status.limit_bytes / 10);  // Two cells of twenty for each.
  const std::string drawn = draw_progress(status, 0.5, 200);
  EXPECT_NE(drawn.find("[ttrrffllppwwxxoo....]"), std::string::npos) << drawn;
  EXPECT_NE(drawn.find("loader 76.8 MiB, pinned 76.8 MiB, weights 76.8 MiB, foreign 76.8 MiB"),
            std::string::npos)
      << drawn;
}

TEST(ProgressTest, TheBarShowsEpochStepAndWhoHoldsTheLimit) {
  const std::string drawn = draw_progress(example(), 0.5, 200);
  EXPECT_NE(drawn.find("epoch 3/30 [==========>         ] step 1,410/12,000  loss 4.8127  31,204 "
                       "rows/s  02:10 left"),
            std::string::npos)
      << drawn;
  EXPECT_NE(drawn.find("[tttrr#####..........] resident 384.0 MiB of 768.0 MiB"), std::string::npos)
      << drawn;
  EXPECT_NE(drawn.find("tensors 115.0 MiB, rows 77.0 MiB"), std::string::npos) << drawn;
}

TEST(ProgressTest, BeforeTheFirstStepNoStepsAreShown) {
  RunStatus early = example();
  early.status = "evaluating";
  early.steps_total = 0;
  EXPECT_EQ(plain_progress(early), "evaluating, 192.0 MiB leased, 384.0 MiB resident of 768.0 MiB");
  EXPECT_EQ(draw_progress(early, 0.0, 100).find("before the first step  (evaluating)"), 0U);
}

// Data without a length: what is known is shown, and no total is made up.
TEST(S35Progress, WithoutATotalStepLossAndSpeedAreShown) {
  RunStatus status = example();
  status.steps_total = kUnknownSteps;
  status.seconds_left = kUnknownNumber;
  status.epochs = 3;
  EXPECT_EQ(plain_progress(status),
            "running epoch 3/3 step 1410 loss 4.8127 31204 rows/s, 192.0 MiB leased, 384.0 MiB "
            "resident of 768.0 MiB");
  EXPECT_EQ(
      draw_progress(status, 0.0, 100).find("epoch 3/3 step 1,410  loss 4.8127  31,204 rows/s\n"),
      0U);
  EXPECT_EQ(status.place(), "1,410, epoch 3 of 3");
  status.loss = kUnknownNumber;
  EXPECT_NE(plain_progress(status).find("loss - "), std::string::npos);
  status.steps_total = 12000;
  EXPECT_EQ(status.place(), "1,410 of 12,000, epoch 3 of 3");
  EXPECT_EQ(RunStatus{}.place(), "0");
}

TEST(ProgressTest, TheBarFitsAnyWidthAndSurvivesOddNumbers) {
  RunStatus odd = example();
  odd.loss = std::nan("");
  odd.seconds_left = -1;
  odd.limit_bytes = 0;
  odd.rows_per_second = 0;
  for (int columns = 20; columns < 200; ++columns) {
    for (const RunStatus& status : {example(), odd}) {
      const std::string drawn = draw_progress(status, columns / 100.0, columns);
      const auto end = drawn.find('\n');
      ASSERT_NE(end, std::string::npos);
      EXPECT_LE(end, static_cast<std::size_t>(columns));
      EXPECT_LE(drawn.size() - end - 1, static_cast<std::size_t>(columns));
    }
  }
}

TEST(ProgressTest, TextGoesAboveTheLiveBar) {
  Capture capture;
  {
    Progress progress(
        {.stream = capture.stream(), .terminal = 1, .columns = 100, .live_seconds = 0});
    progress.update(example(), 0.1);
    progress.text("epoch 1 done");
    progress.update(example(), 0.2);
  }
  const std::string text = capture.text();
  const auto cleared = text.find("\033[1A");
  const auto said = text.find("epoch 1 done\n");
  ASSERT_NE(said, std::string::npos);
  EXPECT_LT(cleared, said);
  EXPECT_GT(text.rfind("memory"), said);
  EXPECT_EQ(text.back(), '\n');
}

TEST(ProgressTest, QuietPrintsTextOnly) {
  Capture capture;
  Progress progress({.stream = capture.stream(), .terminal = 1, .quiet = true});
  progress.update(example(), 0.1, true);
  EXPECT_EQ(capture.text(), "");
  progress.text("said");
  EXPECT_EQ(capture.text(), "said\n");
}

TEST(ProgressTest, WorkWithoutStepsIsMeteredAtABoundedRate) {
  Capture capture;
  {
    WorkMeter meter("synth", {.stream = capture.stream(), .terminal = 0, .plain_seconds = 3600});
    for (int i = 0; i < 1000; ++i) {
      meter.update(i, 1000);
    }
  }
  EXPECT_EQ(capture.text(), "");
  {
    WorkMeter meter("synth", {.stream = capture.stream(), .terminal = 1, .live_seconds = 0});
    meter.update(250, 1000);
    meter.update(1000, 1000);
  }
  const std::string text = capture.text();
  EXPECT_NE(text.find("synth [=====>              ]  25 %"), std::string::npos) << text;
  EXPECT_NE(text.find("100 %"), std::string::npos) << text;
  EXPECT_EQ(text.back(), '\n');
}

TEST(ProgressTest, DurationsAndCountsReadWell) {
  EXPECT_EQ(format_duration(0), "00:00");
  EXPECT_EQ(format_duration(130), "02:10");
  EXPECT_EQ(format_duration(3730), "1:02:10");
  EXPECT_EQ(format_duration(3 * 86400 + 4 * 3600), "3 d 04 h");
  EXPECT_EQ(format_duration(std::nan("")), "--:--");
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(1000), "1,000");
  EXPECT_EQ(format_count(-1234567), "-1,234,567");
}

}  // namespace
}  // namespace plimsoll
