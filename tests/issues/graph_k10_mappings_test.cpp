// SPDX-License-Identifier: Apache-2.0
//
// K10: one mapping a tensor passed vm.max_map_count at 60,000 graphs, so that worker processes had
// to be given up. Goal: 200,000 graphs read by 8 threads with as many mappings as ten graphs take,
// and the set opened in milliseconds. Method: lines of /proc/self/maps.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "tests/support/can_traffic.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kGraphs = 200'000;
constexpr int kThreads = 8;

std::int64_t mappings() {
  std::ifstream maps("/proc/self/maps");
  std::int64_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    ++count;
  }
  return count;
}

class GraphK10 : public testing::TestWithParam<std::int64_t> {};

TEST_P(GraphK10, ThreadsReadAnyNumberOfGraphsWithAFewMappings) {
  test::CanTraffic traffic({{"train_1.csv", test::can_csv(5 * kGraphs + 1, 20, 10)}},
                           {.window = 5, .stride = 5});
  ASSERT_EQ(traffic.import().info.graphs, kGraphs);
  [[maybe_unused]] const std::int64_t before = mappings();
  const auto began = std::chrono::steady_clock::now();
  const GraphSet set = traffic.open(GetParam());
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  EXPECT_LT(took.count(), 1.0) << "milliseconds, on a machine that is not as busy as it may be";
  EXPECT_EQ(set.cached(), GetParam() != 0);
  std::atomic<std::int64_t> read{0};
  {
    std::vector<std::jthread> threads;
    threads.reserve(kThreads);
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        std::vector<std::int64_t> graphs;  // Every graph by one thread, and some by all.
        for (std::int64_t graph = t; graph < kGraphs; graph += kThreads) {
          graphs.push_back(graph);
        }
        for (std::int64_t graph = 0; graph < kGraphs; graph += 97) {
          graphs.push_back(graph);
        }
        auto batches = GraphBatches::open(&set, {.graphs = graphs, .seed = 1}).or_throw();
        test::GraphMemory memory(batches.most());
        for (GraphBatch batch; !batch.ends_epoch;) {
          batch = batches.next(memory.buffers()).or_throw();
          read += batch.counts.graphs;
        }
      });
    }
  }
  EXPECT_GT(read.load(), kGraphs);
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // They map shadows.
  // The set's own two or three; the rest are heaps that the C library made for the threads.
  EXPECT_LE(mappings() - before, 4 + 3 * kThreads);
#endif
  test::GraphMemory one({.graphs = 1, .nodes = 6, .edges = 5});
  const std::array<std::int64_t, 1> last{kGraphs - 1};
  EXPECT_EQ(set.gather(last, one.buffers()).or_throw().graphs, 1);
}

INSTANTIATE_TEST_SUITE_P(CachedOrNot, GraphK10, testing::Values(0, -1));

}  // namespace
}  // namespace plimsoll
