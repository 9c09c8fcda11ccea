// SPDX-License-Identifier: Apache-2.0
//
// Goal: memory that nobody leased is told to a loop that never calls step_boundary(), and a loop
// that does is left alone. Method: real mappings under a governor, waited for with no clock in an
// assert.
#include "memory/watcher.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "plimsoll/bytes.h"
#include "tests/support/unleased.h"

namespace plimsoll {
namespace {

using namespace literals;
using namespace std::chrono_literals;
using test::Unleased;

constexpr bool kShared = true;

std::atomic<int> notified{0};

void count_news(bool /*stop*/) {
  notified.fetch_add(1);
}

class WatcherTest : public testing::Test {
 protected:
  WatcherTest() {
    notified = 0;
    start_ = read_resident().or_throw().total();
    governor_ =
        Governor::create({.memory_limit = std::to_string(start_ + kRoom), .foreign_bytes = 8_MiB})
            .or_throw();
  }
  ~WatcherTest() override { governor_.close(); }
  WatcherTest(const WatcherTest&) = delete;
  WatcherTest& operator=(const WatcherTest&) = delete;

  static std::optional<Watcher::News> wait_for_news(
      Watcher& watcher, bool stop, const std::function<void()>& meanwhile = [] {}) {
    const auto deadline = std::chrono::steady_clock::now() + 60s;
    while (std::chrono::steady_clock::now() < deadline) {
      if (auto news = watcher.take(); news && news->stop == stop) {
        return news;
      }
      meanwhile();
      std::this_thread::sleep_for(1ms);
    }
    return std::nullopt;
  }

  static constexpr std::int64_t kRoom = 400_MiB;
  std::int64_t start_{0};
  Governor governor_;
};

TEST_F(WatcherTest, R12WarnsALoopOfItsOwnAndThenAsksItToStop) {
  Watcher watcher(&count_news);
  const std::int64_t limit = start_ + kRoom;
  const Unleased much(limit / 100 * 90 - start_, kShared);
  const auto warning = wait_for_news(watcher, false);
  ASSERT_TRUE(warning);
  EXPECT_TRUE(warning->report.pressure);
  const Unleased more(limit / 100 * 9, kShared);
  const auto stop = wait_for_news(watcher, true);
  ASSERT_TRUE(stop);
  EXPECT_GE(notified.load(), 2);
  EXPECT_GT(stop->report.needed_bytes, limit);
  const std::string text = explain_held(governor_.state(), stop->seen);
  for (const char* part :
       {"of the", "limit are held", "without a lease", "(foreign_bytes)", "in shared memory"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
  EXPECT_FALSE(watcher.take());  // Said once.
}

TEST_F(WatcherTest, LeavesALoopThatComesByItselfAlone) {
  const Unleased much((start_ + kRoom) / 100 * 96 - start_, kShared);  // And grows no more.
  static_cast<void>(governor_.step_boundary());
  Watcher watcher(&count_news);
  while (last_look().unexplained_bytes < 300_MiB) {
    std::this_thread::sleep_for(1ms);  // Until it has looked.
  }
  std::this_thread::sleep_for(50ms);
  EXPECT_FALSE(watcher.take());
  EXPECT_TRUE(governor_.step_boundary().pressure);
}

TEST_F(WatcherTest, StopsALoopThatWaitsForWhatGrows) {
  const std::int64_t limit = start_ + kRoom;
  const Unleased much(limit / 100 * 92 - start_, kShared);
  EXPECT_FALSE(governor_.step_boundary().stop);
  Watcher watcher(&count_news);
  std::this_thread::sleep_for(50ms);  // It looks, and knows what came afterwards.
  const Unleased more(limit / 100 * 6, kShared);
  const auto stop =
      wait_for_news(watcher, true, [&] { static_cast<void>(governor_.step_boundary()); });
  ASSERT_TRUE(stop);
  EXPECT_GT(stop->report.needed_bytes, limit);
  EXPECT_LT(stop->seen.held_bytes(), limit);
}

TEST_F(WatcherTest, S02SaysWhetherTheNextBoundaryComesTooLateAndSaysADeferredStopAgain) {
  static_cast<void>(governor_.step_boundary());
  static_cast<void>(governor_.step_boundary());  // They come often.
  Watcher watcher(&count_news);
  const std::int64_t limit = start_ + kRoom;
  const Unleased much(limit / 1000 * 985 - start_, kShared);
  const auto come_by = [&] { static_cast<void>(governor_.step_boundary()); };
  const auto first = wait_for_news(watcher, true, come_by);
  ASSERT_TRUE(first);
  std::optional<Watcher::News> last;
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  do {  // Until what came at once is no growth any more.
    watcher.defer();
    last = wait_for_news(watcher, true, come_by);
  } while (last && last->late && std::chrono::steady_clock::now() < deadline);
  if (last) {  // It may be content with what is held by then.
    EXPECT_FALSE(last->late);
  }
  const Unleased more(limit / 50, kShared);  // Above the limit.
  watcher.defer();
  std::optional<Watcher::News> over;
  do {
    over = wait_for_news(watcher, true, come_by);
    watcher.defer();
  } while (over && !over->late && std::chrono::steady_clock::now() < deadline);
  ASSERT_TRUE(over);
  EXPECT_TRUE(over->late);
}

TEST_F(WatcherTest, IsNotWaitedForInAForkedChild) {
  auto watcher = std::make_unique<Watcher>(&count_news);
  const pid_t child = ::fork();
  if (child == 0) {
    const bool silent = !watcher->take();
    watcher.reset();
    ::_exit(silent ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace plimsoll
