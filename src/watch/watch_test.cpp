// SPDX-License-Identifier: Apache-2.0
//
// Goal: the owner, the slope and the phase of a leak are those of a child whose growth is known.
// Method: children that grow by a given amount at each step they are told to make.
#include "watch/watch.h"

#include <cstring>
#include <functional>
#include <optional>
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "plimsoll/bytes.h"
#include "tests/support/child.h"

namespace plimsoll {
namespace {

using namespace literals;

constexpr int kSteps = 200;  // Eight windows of 25.
constexpr std::int64_t kStepBytes = 256_KiB;

Finding after_steps(const Child& child, const std::function<std::string(int)>& phase_of = {}) {
  Watch watch(child.pid(), 25);
  for (int step = 0; step < kSteps; ++step) {
    child.tell();
    EXPECT_TRUE(watch.look(step, {}, phase_of ? phase_of(step) : ""));
  }
  return watch.verdict();
}

// What a process says of itself is made up, as is how much it grows a step.
Finding after_saying(const std::function<Inside(std::int64_t)>& inside_at) {
  const Child child([](int) {});
  Watch watch(child.pid(), 25);
  for (int step = 0; step < kSteps; ++step) {
    EXPECT_TRUE(watch.look(step, inside_at(step)));
  }
  return watch.verdict();
}

TEST(M3Watch, AChildOfKnownSlopeIsALeakOfThatSlope) {
  const Child child([](int) { map_touched(kStepBytes); });
  const Finding finding = after_steps(child);
  EXPECT_EQ(finding.course, Course::kLeak);
  EXPECT_EQ(finding.owner, Owner::kHeap);
  EXPECT_NEAR(finding.bytes_per_unit, static_cast<double>(kStepBytes), 4096);
  EXPECT_GT(finding.bytes_per_second, 0);
  EXPECT_EQ(finding.text("step"), "leak: heap grows by 256.0 KiB a step");
  ASSERT_EQ(finding.advice().size(), 1U);
}

TEST(M4Watch, TheGrandchildThatLeaksIsNamed) {
  std::optional<Child> worker;
  const Child wrapper([&](int order) {
    if (order == 0) {
      worker.emplace([](int) { map_touched(kStepBytes); });
    } else {
      worker->tell();
    }
  });
  const auto below = descendants(wrapper.pid()).or_throw();
  ASSERT_EQ(below.size(), 1U);
  const Finding finding = after_steps(wrapper);
  EXPECT_EQ(finding.course, Course::kLeak);
  EXPECT_EQ(finding.owner, Owner::kChildren);
  EXPECT_NEAR(finding.bytes_per_unit, static_cast<double>(kStepBytes), 16384);
  EXPECT_TRUE(finding.process.ends_with(fmt::format(" {}", below.front()))) << finding.process;
  EXPECT_NE(finding.text("step").find("children (" + finding.process + ") grows by"),
            std::string::npos)
      << finding.text("step");
  EXPECT_NE(finding.advice().front().find("worker"), std::string::npos);
}

TEST(Watch, SharedMemoryThatIsKeptIsALeakOfIts) {
  const Child child([](int) { map_touched(kStepBytes, MAP_SHARED); });
  const Finding finding = after_steps(child);
  EXPECT_EQ(finding.course, Course::kLeak);
  EXPECT_EQ(finding.owner, Owner::kShared);
  EXPECT_NEAR(finding.bytes_per_unit, static_cast<double>(kStepBytes), 16384);
}

TEST(Watch, WhatComesAndGoesIsNone) {
  const Child child([](int) { ::munmap(map_touched(16_MiB), 16_MiB); });
  EXPECT_NE(after_steps(child).course, Course::kLeak);
  EXPECT_TRUE(after_steps(child).advice().empty());
}

TEST(Watch, ThePhaseInWhichItGrowsIsNamed) {
  const auto phase = [](int step) { return step % 10 < 3 ? "eval" : "train"; };
  const Child child([&](int order) {
    if (order > 0 && std::string(phase(order - 1)) == "eval") {
      map_touched(4 * kStepBytes);
    }
  });
  const Finding finding = after_steps(child, phase);
  EXPECT_EQ(finding.course, Course::kLeak);
  EXPECT_EQ(finding.phase, "eval");
  EXPECT_TRUE(finding.text("step").ends_with(" a step, in phase eval")) << finding.text("step");
}

TEST(Watch, APhaseThatGrewOnceAndEarlyIsNotNamed) {
  constexpr int kFilledAt = 60;
  const Child child([](int order) {
    map_touched(order == kFilledAt + 1 ? 100_MiB : kStepBytes / 2);  // From the order 1 on: steps.
  });
  Watch watch(child.pid(), 25);
  for (int step = 0; step < 2 * kSteps + 1; ++step) {
    child.tell();
    ASSERT_TRUE(watch.look(step, {}, step == kFilledAt ? "eval" : "train"));
  }
  EXPECT_EQ(watch.verdict().course, Course::kLeak);
  EXPECT_EQ(watch.verdict().phase, "train");
}

TEST(Watch, PhasesAreBounded) {
  const Child child([](int) { map_touched(kStepBytes); });
  const Finding finding =
      after_steps(child, [](int step) { return fmt::format("phase {}", step); });
  EXPECT_EQ(finding.course, Course::kLeak);  // And the last of the names has the rest.
}

TEST(Watch, TheOwnerThatLeaksFastestIsTheFinding) {
  const Finding finding = after_saying([](std::int64_t step) {
    return Inside{.tensors = 50_MiB + step * 200'000, .python = 20_MiB + step * 20'000};
  });
  EXPECT_EQ(finding.course, Course::kLeak);
  EXPECT_EQ(finding.owner, Owner::kTensors);
  EXPECT_NEAR(finding.bytes_per_unit, 200'000, 1);
  EXPECT_NE(finding.advice().front().find(".detach()"), std::string::npos);
}

TEST(Watch, WhatMallocRetainsIsNoLeak) {
  const Finding finding = after_saying([](std::int64_t step) {
    return Inside{.native = 50_MiB, .retained = 10_MiB + step * 200'000};
  });
  EXPECT_EQ(finding.course, Course::kRetention);
  EXPECT_EQ(finding.owner, Owner::kRetained);
  EXPECT_NE(finding.advice().front().find("MALLOC_ARENA_MAX"), std::string::npos);
}

// From the hundredth step on nobody asks malloc(): neither what was seen of it until then is a
// leak, nor that all of it is unexplained now.
TEST(Watch, WhatIsNotKnownAnyMoreIsJudgedNoMore) {
  map_touched(60_MiB);  // Of this process, and of the child.
  const Finding finding = after_saying([](std::int64_t step) {
    return step < kSteps / 2 ? Inside{.python = 0, .native = 50_MiB + step * 100'000, .retained = 0}
                             : Inside{.python = 0};
  });
  EXPECT_EQ(finding.course, Course::kPlateau) << finding.text("step");
}

// What grows is native, which one look in ten asks for: the others do not show it as unexplained.
TEST(Watch, WhatIsAskedForRarelyIsJudgedByThoseLooks) {
  constexpr int kAskedEvery = 10;
  const Child child([](int) { map_touched(kStepBytes); });
  Watch watch(child.pid(), 25);
  const auto look = [&](int step, std::string_view phase) {
    child.tell();
    const bool asked = step % kAskedEvery == 0;
    ASSERT_TRUE(watch.look(
        step,
        asked ? Inside{.native = step * kStepBytes, .retained = 0} : Inside{.malloc_later = true},
        phase));
  };
  for (int step = 0; step < kSteps; ++step) {
    look(step, step % kAskedEvery == 0 ? "asked" : "train");
    EXPECT_NE(watch.verdict().course, Course::kPlateau);
  }
  EXPECT_EQ(watch.holdings().of(Owner::kNative), (kSteps - kAskedEvery) * kStepBytes);
  for (int step = kSteps; step < 2 * kSteps; ++step) {
    look(step, step % kAskedEvery == 0 ? "asked" : "train");
  }
  const Finding finding = watch.verdict();
  EXPECT_EQ(finding.course, Course::kLeak) << finding.text("step");
  EXPECT_EQ(finding.owner, Owner::kNative);
  EXPECT_EQ(finding.phase, "");  // It grew between two looks that asked.
  EXPECT_NEAR(finding.bytes_per_unit, static_cast<double>(kStepBytes), 16384);
}

// A governor that was opened in step 60: its tensors' windows lie across the others'.
TEST(Watch, APictureHasOnePointForEachWindow) {
  const Child child([](int) {});
  Watch watch(child.pid(), 25);
  for (int step = 0; step < kSteps; ++step) {
    ASSERT_TRUE(watch.look(step, step < 60 ? Inside{} : Inside{.tensors = 1_MiB}));
  }
  const auto points = watch.points();
  ASSERT_EQ(points.size(), 8U);
  for (const PicturePoint& point : points) {
    EXPECT_GT(point.owners[static_cast<std::size_t>(Owner::kFiles)], 0) << point.x;
    EXPECT_EQ(point.owners[static_cast<std::size_t>(Owner::kTensors)] == 1_MiB, point.x >= 50)
        << point.x;
  }
}

// Its pieces have become few: what was unexplained until then did not vanish.
TEST(Watch, WhatIsKnownAgainIsJudgedAnew) {
  const Child child([](int) { map_touched(kStepBytes); });
  Watch watch(child.pid(), 25);
  for (int step = 0; step < 2 * kSteps; ++step) {
    child.tell();
    ASSERT_TRUE(watch.look(
        step, step < kSteps ? Inside{.python = 0}
                            : Inside{.python = 0, .native = step * kStepBytes, .retained = 0}));
    EXPECT_NE(watch.verdict().course, Course::kSawtooth);
  }
  EXPECT_EQ(watch.verdict().course, Course::kLeak) << watch.verdict().text("step");
  EXPECT_EQ(watch.verdict().owner, Owner::kNative);
}

TEST(Watch, AFewLooksSayNothing) {
  const Child child([](int) {});
  Watch watch(child.pid(), 25);
  EXPECT_EQ(watch.verdict().course, Course::kTooShort);
  ASSERT_TRUE(watch.look(0, {}));
  EXPECT_EQ(watch.verdict().course, Course::kTooShort);
  EXPECT_EQ(watch.looks(), 1);
  EXPECT_NE(watch.verdict().text("second").find("25 seconds"), std::string::npos);
  EXPECT_TRUE(
      Watch(child.pid(), 5)
          .verdict()
          .text("step")
          .starts_with(
              "too early: 0 of 7 windows of 5 steps were seen, the others take 35 steps more"));
}

TEST(S20Watch, TooEarlySaysHowManyWindowsHowLongAndTheRateSoFar) {
  const Child child([](int) { map_touched(kStepBytes); });
  Watch watch(child.pid(), 25);
  for (int step = 0; step < 90; ++step) {
    child.tell();
    ASSERT_TRUE(watch.look(step, {}));
  }
  const Finding finding = watch.verdict();
  EXPECT_EQ(finding.course, Course::kTooShort);
  EXPECT_EQ(finding.windows_seen, 3U);
  EXPECT_EQ(finding.windows_wanted, Trend::kWindowsLeast);
  EXPECT_NEAR(finding.units_wanted, 4 * 89 / 3.0, 1);
  EXPECT_GT(finding.seconds_wanted, 0);
  EXPECT_NEAR(finding.bytes_per_unit, static_cast<double>(kStepBytes), 4096);
  EXPECT_TRUE(finding.text("step").starts_with(
      "too early: 3 of 7 windows of 25 steps were seen, the others take 119 steps more ("))
      << finding.text("step");
  EXPECT_TRUE(finding.text("step").ends_with("; so far heap rises by 256.0 KiB a step"))
      << finding.text("step");
}

// Looks that come rarely leave windows out: those that are left take longer.
TEST(S20Watch, WindowsThatNobodyLookedInAreNotSeen) {
  const Child child([](int) {});
  Watch watch(child.pid(), 25);
  for (int step = 0; step <= 400; step += 100) {
    ASSERT_TRUE(watch.look(step, {}));
  }
  const Finding finding = watch.verdict();
  EXPECT_EQ(finding.windows_seen, 4U);
  EXPECT_NEAR(finding.units_wanted, 300, 1);
  EXPECT_TRUE(finding.text("step").ends_with("; so far nothing rises")) << finding.text("step");
}

TEST(S50Watch, SlowGrowthIsTooEarlyForLongerAndSaysSo) {
  const auto slow = [](std::int64_t step) { return Inside{.tensors = 50_MiB + step * 46'000}; };
  const Finding early = after_saying(slow);
  EXPECT_EQ(early.course, Course::kTooShort);
  EXPECT_EQ(early.owner, Owner::kTensors);
  EXPECT_GT(early.windows_wanted, early.windows_seen);
  EXPECT_NE(early.text("step").find("so far tensors rises by 44.9 KiB a step"), std::string::npos)
      << early.text("step");
  EXPECT_TRUE(early.advice().empty());
  const Child child([](int) {});
  Watch watch(child.pid(), 25);
  for (int step = 0; step < 3 * kSteps; ++step) {
    ASSERT_TRUE(watch.look(step, slow(step)));
  }
  EXPECT_EQ(watch.verdict().course, Course::kLeak) << watch.verdict().text("step");
}

// What was there before the run is an owner; unexplained is what came since.
TEST(S52Watch, WhatWasThereBeforeTheRunIsAnOwner) {
  const Child child([](int) { map_touched(kStepBytes); });
  Watch watch(child.pid(), 25);
  std::int64_t before = 0;
  for (int step = 0; step <= 40; ++step) {
    child.tell();
    ASSERT_TRUE(watch.look(step, {.python = 0}));
    before = step == 0 ? watch.holdings().of(Owner::kBefore) : before;
    EXPECT_EQ(watch.holdings().of(Owner::kBefore), before) << step;
    EXPECT_NEAR(static_cast<double>(watch.holdings().of(Owner::kUnexplained)),
                static_cast<double>(step * kStepBytes), 64_KiB)
        << step;
  }
  EXPECT_GT(before, 0);
  Watch told(child.pid(), 25);  // From outside, a run's status says it.
  ASSERT_TRUE(told.look(0, {.tensors = 0, .before = before}));
  EXPECT_EQ(told.holdings().of(Owner::kBefore), before);
  EXPECT_GE(told.holdings().of(Owner::kUnexplained), 40 * kStepBytes);
  Watch any(child.pid(), 25);  // Of another program, nobody says what was before.
  ASSERT_TRUE(any.look(0, {.tensors = 0}));
  EXPECT_EQ(any.holdings().of(Owner::kBefore), -1);
}

TEST(S17Watch, AnEvaluationThatGrowsHasAdviceOfItsOwn) {
  const Child child([](int) { map_touched(kStepBytes); });
  const Finding finding = after_steps(child, [](int) { return "evaluation"; });
  ASSERT_GE(finding.advice().size(), 1U);
  for (const char* word : {"preprocess_logits_for_metrics", "prediction_loss_only",
                           "batch_eval_metrics", "eval_accumulation_steps"}) {
    EXPECT_NE(finding.advice().front().find(word), std::string::npos) << word;
  }
}

// The proportional shares of workers grow, what is resident in them does not.
TEST(S19Watch, CopiesOnWriteHaveAdviceOfTheirOwn) {
  const Child child([](int) {});
  Watch watch(child.pid(), 25);
  for (std::int64_t step = 0; step < kSteps; ++step) {
    TreeLook look{.bound_bytes = 900_MiB};
    look.root.anonymous = 300_MiB;
    look.tree.anonymous = 300_MiB + step * 400'000;
    look.tree.processes = 3;
    watch.take(look, static_cast<double>(step), {});
  }
  const Finding finding = watch.verdict();
  EXPECT_EQ(finding.course, Course::kLeak);
  EXPECT_EQ(finding.owner, Owner::kChildren);
  EXPECT_TRUE(finding.copies);
  ASSERT_EQ(finding.advice().size(), 1U);
  EXPECT_NE(finding.advice().front().find("NumPy array"), std::string::npos);
}

}  // namespace
}  // namespace plimsoll
