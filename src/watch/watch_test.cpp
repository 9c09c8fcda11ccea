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
    return Inside{.tensors = 50_MiB + step * 100'000, .python = 20_MiB + step * 20'000};
  });
  EXPECT_EQ(finding.course, Course::kLeak);
  EXPECT_EQ(finding.owner, Owner::kTensors);
  EXPECT_NEAR(finding.bytes_per_unit, 100'000, 1);
  EXPECT_NE(finding.advice().front().find(".detach()"), std::string::npos);
}

TEST(Watch, WhatMallocRetainsIsNoLeak) {
  const Finding finding = after_saying([](std::int64_t step) {
    return Inside{.native = 50_MiB, .retained = 10_MiB + step * 100'000};
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
  EXPECT_TRUE(Watch(child.pid(), 5).verdict().text("step").ends_with("8 windows of 5 steps"));
}

}  // namespace
}  // namespace plimsoll
