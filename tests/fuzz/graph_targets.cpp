// SPDX-License-Identifier: Apache-2.0
//
// Targets for CAN frames as CSV (plain and gzipped) and for the file of a graph set.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include <fmt/format.h>

#include "base/crc32c.h"
#include "data/can_csv.h"
#include "data/graph_set_format.h"
#include "data/safetensors.h"
#include "plimsoll/can_import.h"
#include "tests/fuzz/target.h"
#include "tests/support/array_files.h"
#include "tests/support/can_traffic.h"

namespace plimsoll::fuzz {
namespace {

namespace fs = std::filesystem;

// A small set of windows of five frames: training, held out and test graphs, unknown ids.
class Graphs {
 public:
  static Graphs& get() {
    static Graphs graphs;
    return graphs;
  }
  test::ScratchDirectory scratch{};
  Governor governor{process_governor()};
  fs::path csv{scratch / "train_1.csv"};
  fs::path set{scratch / "set"};
  std::string good{};

 private:
  Graphs() {
    test::spill(csv, test::can_csv(60, 8, 1));
    test::spill(scratch / "test_1.csv", test::can_csv(30, 12, 2));
    const CanImportOptions options{
        .inputs = {csv, scratch / "test_1.csv"}, .out = set, .window = 5, .stride = 4};
    import_can(governor, options, nullptr).or_throw();
    good = test::slurp(set / kGraphSetFile);
  }
};

// ---- CSV ----

struct Reading {
  std::vector<CanFrame> frames{};
  GraphFileInfo counts{};
  bool failed{false};
};

Reading read_csv(const fs::path& path, bool skip_bad, std::size_t chunk) {
  std::vector<std::byte> packed(97);
  std::vector<std::byte> text(chunk + static_cast<std::size_t>(kCanLineMax));
  Reading reading;
  auto bytes = CanBytes::open(path, packed);
  if (!bytes) {
    contradiction("can_csv", bytes.error().to_string());
  }
  CanCsv csv(std::move(*bytes), text,
             {.columns = CanImportOptions().columns, .name = "fuzz.csv", .skip_bad = skip_bad});
  std::vector<CanFrame> some(7);
  for (;;) {
    const auto count = csv.read(some);
    if (!count) {
      const std::string what = count.error().to_string();
      const bool refused = count.error().code == ErrorCode::kInvalidArgument ||
                           (count.error().code == ErrorCode::kCorrupt && !skip_bad);
      if (!refused || what.find("fuzz.csv:") == std::string::npos) {
        contradiction("can_csv", what);
      }
      reading.failed = true;
      break;
    }
    if (*count == 0) {
      break;
    }
    reading.frames.insert(reading.frames.end(), some.begin(), some.begin() + *count);
  }
  reading.counts = csv.counts();
  return reading;
}

bool same(const Reading& a, const Reading& b) {
  const auto equal = [](const CanFrame& x, const CanFrame& y) {
    return x.id == y.id && x.bytes == y.bytes && x.attack == y.attack;
  };
  return a.failed == b.failed && a.counts.skipped_rows() == b.counts.skipped_rows() &&
         a.counts.blank_lines == b.counts.blank_lines &&
         a.counts.damaged_ends == b.counts.damaged_ends &&
         std::equal(a.frames.begin(), a.frames.end(), b.frames.begin(), b.frames.end(), equal);
}

// Frames are frames, and the same for any chunk; what skipping leaves out, refusing refuses.
void can_csv(std::span<const std::byte> bytes) {
  Graphs& graphs = Graphs::get();
  const fs::path path = graphs.scratch / "fuzz.csv";
  test::spill(path, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  const Reading skipped = read_csv(path, true, 1 << 16);
  if (!same(skipped, read_csv(path, true, 5))) {
    contradiction("can_csv", "another chunk, other frames");
  }
  for (const CanFrame& frame : skipped.frames) {
    if (frame.id > 0x1FFFFFFF || frame.attack > 1) {
      contradiction("can_csv", "a frame that is none");
    }
  }
  const Reading strict = read_csv(path, false, 64);
  const bool flawless = skipped.counts.skipped_rows() == 0 && skipped.counts.damaged_ends == 0;
  if (!skipped.failed && strict.failed == flawless) {
    contradiction("can_csv", "refused what skipping finds flawless, or the reverse");
  }
}

std::vector<std::string> can_csv_seeds() {
  return {test::can_csv(20, 5, 3), "1,7,FF,0\r\n\r\n2,8,,1\r\n",
          "Label,DATA,id,note,Time\n0,FF 00,7,x,1e9\n",
          "1.5,0316,8,05,21,68,09,21,21,00,6f,R\n1.6,018f,2,00,5b,T\n1.7,02b0,0,R\n",
          "Timestamp,ID,DLC,DATA,DATA1,DATA2,Flag\n1478198376001,0316,3,20,82,3c,0\n",
          "Time Stamp,ID,Extended,Dir,Bus,LEN,D1,D2\n1,00000123,false,Rx,0,2,01,FF\n",
          // NOLINTNEXTLINE(bugprone-suspicious-missing-comma): two lines of one seed.
          "Timestamp: 1479121434.850202  ID: 0350  000  DLC: 2  05 28\n"
          "Timestamp: 1479121434.9  ID: 0164  100  DLC: 8\n",
          "(1436509052.249713) can0 044#2A366C2B0A\n(1436509052.25) can0 1F334455#R\n"
          "(1436509052.26) can0 12345678##1AABB 1\n",
          "  can0  044   [5]  2A 36 6C 2B 0A\n  can0  123   [0]\n",
          // gzip of the second seed, made by gzip 1.12.
          std::string("\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\x33\xd4\x31\xd7\x71\x73"
                      "\xd3\x31\xe0\xe5\xe2\xe5\x32\xd2\xb1\xd0\xd1\x31\xe4\xe5\x02\x00"
                      "\x21\xad\xb8\xaf\x14\x00\x00\x00",
                      40)};
}

// ---- The file of a set ----

// Makes the checksums of a file sound again, where its header can be read at all.
void repair(const fs::path& path, std::string& text) {
  const auto reader = SafetensorsReader::open(path);
  if (!reader) {
    return;
  }
  const auto info = parse_graph_header(*reader, "fuzz");
  if (!info) {
    return;
  }
  const std::int64_t data_at =
      static_cast<std::int64_t>(text.size()) - reader->entries().back().end;
  const auto tensor = [&](const char* name) {
    const SafetensorsEntry& entry = **reader->find(name);
    return std::as_writable_bytes(
        std::span(text).subspan(static_cast<std::size_t>(data_at + entry.begin),
                                static_cast<std::size_t>(entry.end - entry.begin)));
  };
  namespace gt = graph_tensors;
  std::uint32_t crc = metadata_crc(reader->metadata());
  for (const char* name : {gt::kNodePtr, gt::kEdgePtr, gt::kFilePtr, gt::kSplitPtr,
                           gt::kSplitGraphs, gt::kVocabulary, gt::kLabels}) {
    crc = crc32c(tensor(name), crc);
  }
  const std::string key = fmt::format("\"{}\":\"", kGraphIndexCrc);
  const std::size_t at = text.find(key);
  const std::string digits = fmt::format("{:010}", crc);
  if (at != std::string::npos && at + key.size() + digits.size() < text.size()) {
    text.replace(at + key.size(), digits.size(), digits);
  }
  const auto nodes = tensor(gt::kNodePtr);
  const auto edges = tensor(gt::kEdgePtr);
  const auto part = [](std::span<std::byte> rows, std::span<std::byte> ptr, std::int64_t graph,
                       std::int64_t row_bytes) -> std::span<std::byte> {
    std::array<std::int64_t, 2> ends{};
    std::memcpy(ends.data(), ptr.data() + graph * 8, sizeof(ends));
    const auto rows_there = static_cast<std::int64_t>(rows.size()) / row_bytes;
    if (ends[0] < 0 || ends[1] < ends[0] || ends[1] > rows_there) {
      return {};
    }
    return rows.subspan(static_cast<std::size_t>(ends[0] * row_bytes),
                        static_cast<std::size_t>((ends[1] - ends[0]) * row_bytes));
  };
  const std::int64_t place = place_bytes(info->window);
  for (std::int64_t graph = 0; graph < info->graphs; ++graph) {
    std::uint32_t sum = crc32c(part(tensor(gt::kEdgeAttr), edges, graph, 44));
    sum = crc32c(part(tensor(gt::kEdges), edges, graph, 2 * place), sum);
    sum = crc32c(part(tensor(gt::kX), nodes, graph, 44), sum);
    std::memcpy(tensor(gt::kChecksum).data() + graph * 4, &sum, sizeof(sum));
  }
}

// Whatever opens hands out graphs whose edges end at nodes and whose ids have a row in the table.
void read_set(Graphs& graphs) {
  const auto set =
      GraphSet::open(graphs.governor, {.directory = graphs.set, .cache_bytes = 1 << 20});
  if (!set) {
    if (set.error().code != ErrorCode::kCorrupt && set.error().code != ErrorCode::kOverBudget) {
      contradiction("graph_set", set.error().to_string());
    }
    return;
  }
  for (std::int64_t graph = 0; graph < set->graphs(); ++graph) {
    const GraphCounts counts = set->counts(graph);
    test::GraphMemory memory(counts);
    const auto read = set->gather(std::span(&graph, 1), memory.buffers());
    if (!read) {
      if (read.error().code != ErrorCode::kCorrupt) {
        contradiction("graph_set", read.error().to_string());
      }
      continue;
    }
    const bool ends = std::all_of(memory.edge_index.begin(), memory.edge_index.end(),
                                  [&](std::int64_t n) { return n >= 0 && n < counts.nodes; });
    bool known = true;
    for (std::int64_t node = 0; node < counts.nodes; ++node) {
      const float index = memory.x[static_cast<std::size_t>(node * kGraphFeatures)];
      known = known && index >= 0 && index < static_cast<float>(set->info().table_rows());
    }
    if (!ends || !known) {
      contradiction("graph_set", "an edge or an id beyond the graph");
    }
  }
}

void graph_set(std::span<const std::byte> bytes) {
  Graphs& graphs = Graphs::get();
  const fs::path path = graphs.set / kGraphSetFile;
  std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  test::spill(path, text);
  read_set(graphs);
  repair(path, text);
  test::spill(path, text);
  read_set(graphs);
}

std::vector<std::string> graph_set_seeds() {
  return {Graphs::get().good};
}

}  // namespace

std::vector<Target> graph_targets() {
  return {{"can_csv", can_csv_seeds, can_csv}, {"graph_set", graph_set_seeds, graph_set}};
}

}  // namespace plimsoll::fuzz
