// SPDX-License-Identifier: Apache-2.0
//
// CanTraffic: random CAN frames as CSV, and a set made of them.
//
// Threads: values.   Memory: the text of one file.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "plimsoll/can_import.h"
#include "plimsoll/graph_set.h"
#include "tests/support/array_files.h"
#include "tests/support/feature_set.h"

namespace plimsoll::test {

/// CSV of `frames` frames over `ids` ids from `first_id` on, a few of them attacks.
inline std::string can_csv(std::int64_t frames, std::uint32_t ids, std::uint64_t seed,
                           std::uint32_t first_id = 0x100) {
  std::mt19937_64 random(seed);
  std::string text = "timestamp,arbitration_id,data_field,attack\n";
  std::array<char, 96> line{};
  std::uint32_t id = first_id;
  for (std::int64_t i = 0; i < frames; ++i) {
    // Runs over a few neighbours, as a bus has them, with a jump now and then.
    id = first_id +
         static_cast<std::uint32_t>(random() % 4 == 0 ? random() % ids : (id - first_id + 1) % ids);
    const auto length = static_cast<int>(random() % 9);
    const int size = std::snprintf(line.data(), line.size(), "%lld.%06lld,%03X,%.*s,%d\n",
                                   static_cast<long long>(1'600'000'000 + i / 2000),
                                   static_cast<long long>(i % 2000 * 500), id, 2 * length,
                                   &"00112233445566778899AABBCCDDEEFF"[2 * (random() % 8)],
                                   random() % 500 == 0 ? 1 : 0);
    text.append(line.data(), static_cast<std::size_t>(size));
  }
  return text;
}

/// Buffers for any batch of `batches`.
struct GraphMemory {
  explicit GraphMemory(const GraphCounts& most)
      : x(static_cast<std::size_t>(most.nodes * kGraphFeatures)),
        edge_index(static_cast<std::size_t>(most.edges * 2)),
        edge_attr(static_cast<std::size_t>(most.edges * kGraphFeatures)),
        graph_of_node(static_cast<std::size_t>(most.nodes)),
        labels(static_cast<std::size_t>(most.graphs)),
        graphs(static_cast<std::size_t>(most.graphs)) {}
  [[nodiscard]] GraphBuffers buffers() {
    return {.x = x,
            .edge_index = edge_index,
            .edge_attr = edge_attr,
            .graph_of_node = graph_of_node,
            .labels = labels,
            .graphs = graphs};
  }

  std::vector<float> x;
  std::vector<std::int64_t> edge_index;
  std::vector<float> edge_attr;
  std::vector<std::int64_t> graph_of_node;
  std::vector<std::int64_t> labels;
  std::vector<std::int64_t> graphs;
};

/// A folder of files and the set made of them.
class CanTraffic {
 public:
  explicit CanTraffic(const std::vector<std::pair<std::string, std::string>>& files,
                      CanImportOptions options = {})
      : options_(std::move(options)) {
    std::filesystem::create_directories(scratch_ / "bus");
    for (const auto& [name, text] : files) {
      spill(scratch_ / "bus" / name, text);
    }
    options_.inputs = {scratch_ / "bus"};
    options_.out = scratch_ / "set";
  }
  [[nodiscard]] CanImportOptions& options() { return options_; }
  CanImport import() { return import_can(governor, options_, nullptr).or_throw(); }
  [[nodiscard]] GraphSet open(std::int64_t cache_bytes = -1) const {
    return GraphSet::open(governor, {.directory = options_.out, .cache_bytes = cache_bytes})
        .or_throw();
  }
  [[nodiscard]] std::filesystem::path file(const std::string& name) const {
    return scratch_ / "bus" / name;
  }
  [[nodiscard]] std::string bytes() const { return slurp(options_.out / kGraphSetFile); }

  Governor governor{governor_of()};

 private:
  ScratchDirectory scratch_;
  CanImportOptions options_;
};

}  // namespace plimsoll::test
