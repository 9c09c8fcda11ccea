// SPDX-License-Identifier: Apache-2.0
//
// Goal: every feature of every graph is what plain loops over the frames give. The loops know no
// slots, ranks or runs: each feature is looked up afresh among the rows of its window.
#include "plimsoll/can_import.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "data/can_csv.h"
#include "data/can_files.h"
#include "tests/support/can_traffic.h"

namespace plimsoll {
namespace {

using Features = std::vector<std::array<double, kGraphFeatures>>;

struct PlainGraph {
  Features x;
  Features edge_attr;
  std::vector<std::pair<std::int64_t, std::int64_t>> edges;  // Indices of the vocabulary.
  std::int64_t label{0};
};

// frames[0 … rows] of a window, ids already as indices.
PlainGraph plain_graph(std::span<const CanFrame> frames) {
  const std::size_t rows = frames.size() - 1;
  const auto whole = static_cast<double>(rows);
  std::set<std::uint32_t> nodes;
  std::map<std::uint32_t, double> begins;
  std::map<std::uint32_t, double> degree;
  std::set<std::pair<std::uint32_t, std::uint32_t>> edges;
  PlainGraph graph;
  for (std::size_t i = 0; i < rows; ++i) {
    nodes.insert({frames[i].id, frames[i + 1].id});
    begins[frames[i].id] += 1;
    degree[frames[i].id] += 1;
    degree[frames[i + 1].id] += 1;
    edges.insert({frames[i].id, frames[i + 1].id});
    graph.label |= frames[i].attack;
  }
  double least = whole;
  double most = 0;
  for (const std::uint32_t id : nodes) {
    least = std::min(least, begins[id]);
    most = std::max(most, begins[id]);
  }
  for (const std::uint32_t id : nodes) {
    auto& x = graph.x.emplace_back();
    x[0] = id;
    for (std::size_t i = 0; i < rows; ++i) {
      for (std::size_t b = 0; frames[i].id == id && b < 8; ++b) {
        x[1 + b] += frames[i].bytes[b] / 255.0 / begins[id];
        x[10] = rows > 1 ? static_cast<double>(i) / (whole - 1) : 0.0;
      }
    }
    x[9] = most > least ? (begins[id] - least) / (most - least) : begins[id];
  }
  for (const auto& [source, target] : edges) {
    std::vector<double> at;
    for (std::size_t i = 0; i < rows; ++i) {
      if (frames[i].id == source && frames[i + 1].id == target) {
        at.push_back(static_cast<double>(i));
      }
    }
    double mean = 0;
    double variance = 0;
    const auto gaps = static_cast<double>(at.size() - 1);
    for (std::size_t i = 1; i < at.size(); ++i) {
      mean += (at[i] - at[i - 1]) / gaps;
    }
    for (std::size_t i = 1; i < at.size(); ++i) {
      variance += std::pow(at[i] - at[i - 1] - mean, 2) / gaps;
    }
    graph.edges.emplace_back(source, target);
    graph.edge_attr.push_back({gaps + 1, (gaps + 1) / whole, mean, std::sqrt(variance),
                               gaps > 0 ? 1 / (1 + std::sqrt(variance)) : 0.0, at.front() / whole,
                               at.back() / whole, (at.back() - at.front()) / whole,
                               edges.contains({target, source}) ? 1.0 : 0.0,
                               degree[source] * degree[target], degree[source] / degree[target]});
  }
  return graph;
}

// Frames of a clean file, ids as indices of `vocabulary`.
std::vector<CanFrame> plain_frames(const std::filesystem::path& path,
                                   std::span<const std::int64_t> vocabulary) {
  std::vector<std::byte> packed(4096);
  std::vector<std::byte> text(1 << 20);
  CanCsv csv(CanBytes::open(path, packed).or_throw(), text,
             {.columns = CanImportOptions().columns, .name = "plain"});
  std::vector<CanFrame> frames(1 << 16);
  frames.resize(static_cast<std::size_t>(csv.read(frames).or_throw()));
  for (CanFrame& frame : frames) {
    const auto found = std::find(vocabulary.begin(), vocabulary.end(), frame.id);
    frame.id = static_cast<std::uint32_t>(found - vocabulary.begin());
  }
  return frames;
}

void expect_near(std::span<const float> got, const Features& wanted, std::int64_t graph) {
  ASSERT_EQ(got.size(), wanted.size() * kGraphFeatures);
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double value = wanted[i / kGraphFeatures][i % kGraphFeatures];
    ASSERT_NEAR(got[i], value, 1e-6 * std::max(1.0, std::abs(value)))
        << "graph " << graph << ", row " << i / kGraphFeatures << ", column " << i % kGraphFeatures;
  }
}

struct Shape {
  std::int64_t window;
  std::int64_t stride;
  std::int64_t ids;
};

class CanImportTest : public testing::TestWithParam<Shape> {};

TEST_P(CanImportTest, EveryFeatureIsWhatPlainLoopsGive) {
  const auto [window, stride, ids_of_bus] = GetParam();
  const auto ids = static_cast<std::uint32_t>(ids_of_bus);
  const std::uint64_t seed = static_cast<std::uint64_t>(window * 1000 + stride);
  test::CanTraffic traffic({{"train_1.csv", test::can_csv(2'001, ids, seed)},
                            {"train_2.csv", test::can_csv(window / 2 + 2, ids, seed + 1)},
                            {"test_1.csv", test::can_csv(1'000, ids + 3, seed + 2)}},
                           {.window = window, .stride = stride});
  traffic.import();
  const GraphSet set = traffic.open();
  std::int64_t graph = 0;
  for (const char* name : {"test_1.csv", "train_1.csv", "train_2.csv"}) {
    const auto frames = plain_frames(traffic.file(name), set.vocabulary());
    const auto rows = static_cast<std::int64_t>(frames.size()) - 1;
    const std::int64_t windows = rows < window ? 1 : (rows - window) / stride + 1;
    for (std::int64_t w = 0; w < windows; ++w, ++graph) {
      const auto wanted = plain_graph(
          std::span(frames).subspan(static_cast<std::size_t>(w * stride),
                                    static_cast<std::size_t>(std::min(window, rows) + 1)));
      test::GraphMemory memory(set.counts(graph));
      static_cast<void>(set.gather(std::span(&graph, 1), memory.buffers()).or_throw());
      ASSERT_EQ(memory.labels[0], wanted.label) << "seed " << seed;
      ASSERT_EQ(set.info().files[static_cast<std::size_t>(set.file(graph))].name,
                std::string("bus/") + name);
      ASSERT_NO_FATAL_FAILURE(expect_near(memory.x, wanted.x, graph)) << "seed " << seed;
      ASSERT_NO_FATAL_FAILURE(expect_near(memory.edge_attr, wanted.edge_attr, graph));
      for (std::size_t e = 0; e < wanted.edges.size(); ++e) {
        const auto id_of = [&](std::size_t i) {
          return static_cast<std::int64_t>(
              wanted.x[static_cast<std::size_t>(memory.edge_index[i])][0]);
        };
        ASSERT_EQ(id_of(e), wanted.edges[e].first);
        ASSERT_EQ(id_of(wanted.edges.size() + e), wanted.edges[e].second);
      }
    }
  }
  EXPECT_EQ(graph, set.graphs());
}

INSTANTIATE_TEST_SUITE_P(Windows, CanImportTest,
                         testing::Values(Shape{100, 100, 25}, Shape{100, 37, 60}, Shape{1, 1, 4},
                                         Shape{2, 5, 3}, Shape{255, 100, 300}, Shape{256, 100, 300},
                                         Shape{1900, 7000, 900}));

TEST(CanImportTest, OptionsThatCannotBeAreRefusedByName) {
  test::CanTraffic traffic({{"train_1.csv", test::can_csv(300, 9, 1)}});
  const auto refused = [&](const auto& change, const char* part) {
    CanImportOptions options = traffic.options();
    change(options);
    const auto made = import_can(traffic.governor, options, nullptr);
    ASSERT_FALSE(made) << part;
    const std::string text = made.error().to_string();
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  refused([](CanImportOptions& o) { o.window = 0; }, "--window");
  refused([](CanImportOptions& o) { o.window = 70'000; }, "--window");
  refused([](CanImportOptions& o) { o.stride = 0; }, "--stride");
  refused([](CanImportOptions& o) { o.validation = 1.0; }, "--validation");
  refused([](CanImportOptions& o) { o.validation = std::nan(""); }, "--validation");
  refused([](CanImportOptions& o) { o.ids_max = 0; }, "--ids-max");
  refused([](CanImportOptions& o) { o.columns.pop_back(); }, "--columns");
  refused([](CanImportOptions& o) { o.inputs.clear(); }, "--out");
  refused([](CanImportOptions& o) { o.inputs = {"/nowhere/x.csv"}; }, "/nowhere/x.csv");
  refused([](CanImportOptions& o) { o.threads = 0; }, "threads");
}

TEST(CanImportTest, WithoutAReaderSavedGraphsAreRefusedAndNothingIsLeft) {
  test::CanTraffic traffic({{"processed_graphs.pt", ""}, {"id_mapping.pkl", ""}});
  CanImportOptions options = traffic.options();
  options.inputs = {options.inputs[0] / "processed_graphs.pt"};
  const auto made = import_can(traffic.governor, options, nullptr);
  ASSERT_FALSE(made);
  EXPECT_NE(made.error().to_string().find("plimsoll.import_graphs()"), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(options.out));
}

TEST(CanImportTest, ALimitBelowItsSlabIsRefusedAndNothingIsLeft) {
  test::CanTraffic traffic({{"train_1.csv", test::can_csv(300, 9, 1)}});
  const Lease rest =
      traffic.governor.reserve(Tag::kOther, traffic.governor.state().free_bytes() - (1 << 20))
          .or_throw();
  const auto made = import_can(traffic.governor, traffic.options(), nullptr);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code, ErrorCode::kOverBudget);
  EXPECT_FALSE(std::filesystem::exists(traffic.options().out));
}

TEST(CanImportTest, LeasesTheSameHoweverLongTheInput) {
  std::vector<std::int64_t> peaks;
  for (const std::int64_t frames : {1'000, 100'000}) {
    test::CanTraffic traffic({{"train_1.csv", test::can_csv(frames, 30, 1)}});
    const std::int64_t before = traffic.governor.state().leased_bytes;
    traffic.import();
    peaks.push_back(traffic.governor.state().leased_peak_bytes - before);
  }
  EXPECT_EQ(peaks[0], peaks[1]);
  EXPECT_LT(peaks[0], 8 << 20);
}

TEST(CanImportTest, R44_ASecondImportIntoTheFolderIsRefusedAndRemovesNothing) {
  test::CanTraffic traffic({{"train_1.csv", test::can_csv(30'000, 9, 1)}});
  std::atomic<int> asked{0};
  const auto meanwhile = [&](auto&&...) {
    if (asked++ == 0) {
      const auto second = import_can(traffic.governor, traffic.options(), nullptr);
      EXPECT_FALSE(second);
      EXPECT_NE(second.error().to_string().find("another import is writing to it"),
                std::string::npos);
    }
    return true;
  };
  const auto first = import_can(traffic.governor, traffic.options(), meanwhile);
  ASSERT_TRUE(first) << first.error().to_string();
  EXPECT_GT(asked, 0);
  EXPECT_EQ(GraphSet::inspect(traffic.options().out).or_throw().fingerprint,
            first->info.fingerprint);
}

TEST(CanImportTest, NamesSayWhatIsForTesting) {
  EXPECT_TRUE(is_test_name("set_01/test_01_DoS.csv"));
  EXPECT_TRUE(is_test_name("set_01/test_01/a.csv"));
  EXPECT_FALSE(is_test_name("test_01/train_02/a.csv"));
  EXPECT_TRUE(is_test_name("train_01/TEST_02.csv.gz"));
  EXPECT_FALSE(is_test_name("set_01/latest_test.csv"));
}

}  // namespace
}  // namespace plimsoll
