// SPDX-License-Identifier: Apache-2.0
//
// Goal: what malloc() has is asked for as long as it answers soon.
// Method: a child whose heap is in many free pieces, or in few.
#include "watch/inside.h"

#include <cstdint>
#include <cstdlib>
#include <vector>

#include <gtest/gtest.h>

#include "plimsoll/bytes.h"
#include "tests/support/child.h"

namespace plimsoll {
namespace {

using namespace literals;

// Every second of them freed: too large for malloc()'s own lists of small ones, too far apart to
// become one.
// NOLINTBEGIN(cppcoreguidelines-no-malloc,cppcoreguidelines-owning-memory): malloc() is tested.
std::vector<void*> pieces(std::size_t count) {
  std::vector<void*> kept;
  kept.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    kept.push_back(std::malloc(200));
  }
  for (std::size_t i = 0; i < count; i += 2) {
    std::free(kept[i]);
  }
  return kept;
}
// NOLINTEND(cppcoreguidelines-no-malloc,cppcoreguidelines-owning-memory)

TEST(T11Inside, MallocIsAskedWhileItAnswersSoon) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer's malloc() says nothing of itself";
#endif
  constexpr std::size_t kCount = 1'000'000;  // Half a million free pieces: 10 ms and more.
  bool* const right = static_cast<bool*>(map_touched(4096, MAP_SHARED));
  std::int64_t before = 0;
  std::vector<void*> kept;
  Child child([&](int order) {
    const Inside now = inside_now();
    if (order == 0) {
      before = now.native;
      right[order] = now.native > 0 && now.retained >= 0;
      kept = pieces(kCount);
    } else if (order < 3) {  // Late answers, and the last that are waited for.
      right[order] = now.native > before + 50_MiB && now.retained > 50_MiB;
    } else {
      right[order] = now.native == -1 && now.retained == -1;
    }
  });
  for (int order = 1; order <= 3; ++order) {
    child.tell();
  }
  for (int order = 0; order <= 3; ++order) {
    EXPECT_TRUE(right[order]) << order;
  }
  ::munmap(right, 4096);
}

TEST(T11Inside, WhoPausesOverFewPiecesIsAskedAgain) {
  MallocPatience patience;
  for (std::int64_t now = 0; now < 100; ++now) {
    patience.answered(now, 100 * MallocPatience::kTookMostNs, 474);
    ASSERT_TRUE(patience.asks(now));
  }
}

TEST(T11Inside, ManyPiecesHaveEverLongerRests) {
  constexpr std::int64_t kTook = 2 * MallocPatience::kTookMostNs;
  constexpr std::int64_t kPieces = 2 * MallocPatience::kPiecesMost;
  MallocPatience patience;
  patience.answered(0, kTook, kPieces);
  EXPECT_TRUE(patience.asks(0));  // Once may have been the machine.
  std::int64_t now = 0;
  std::int64_t rest = MallocPatience::kRest * kTook;
  for (int times = 0; times < 10; ++times, rest *= 2) {
    patience.answered(now, kTook, kPieces);
    EXPECT_FALSE(patience.asks(now + rest - 1)) << times;
    EXPECT_TRUE(patience.asks(now + rest)) << times;
    now += rest;
  }
  patience.answered(now, 1000, 10);  // They have become few.
  EXPECT_TRUE(patience.asks(now));
  patience.answered(now, kTook, kPieces);
  EXPECT_TRUE(patience.asks(now));
  patience.answered(now, kTook, kPieces);
  EXPECT_FALSE(patience.asks(now + rest - 1));
}

}  // namespace
}  // namespace plimsoll
