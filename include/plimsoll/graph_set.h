// SPDX-License-Identifier: Apache-2.0
//
// GraphSet: many small graphs as flat arrays in one safetensors file, and batches of them.
//
// Graph g owns rows node_ptr[g] … node_ptr[g+1] of the nodes and edge_ptr[g] … of the edges, so
// that any number of graphs is one file and one mapping. docs/formats/graph_set.md has the tensors.
// Reading order: sample_order.h, this file, src/data/graph_set.cpp, src/data/graph_batches.cpp.
//
// Threads: a GraphSet is thread-safe once open; a GraphBatches is single-owner.
// Memory:  leased (Tag::kLoader): 29 bytes a graph, and the arrays themselves when they fit
//          cache_bytes; otherwise they are read from disk, straight into the caller's buffers.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "plimsoll/governor.h"
#include "plimsoll/result.h"
#include "plimsoll/sample_order.h"

namespace plimsoll {

inline constexpr const char* kGraphSetFile = "graphs.safetensors";
inline constexpr int kGraphFeatures = 11;  ///< Columns of x, and of edge_attr.

enum class GraphSplit : std::uint8_t { kTrain, kValidation, kTest };
inline constexpr int kGraphSplits = 3;
/// "train", "validation", "test".
[[nodiscard]] const char* graph_split_name(GraphSplit split) noexcept;

/// What became of one input file.
struct GraphFileInfo {
  std::string name{};  ///< Its folder and name.
  bool test{false};    ///< A test_* file: its graphs are all GraphSplit::kTest.
  std::int64_t bytes{0};
  std::uint32_t crc32c{0};  ///< Of the bytes as they lie on disk.
  std::int64_t graphs{0};
  std::int64_t attack_graphs{0};
  std::int64_t frames{0};  ///< Rows read and used.
  std::int64_t attack_frames{0};
  std::int64_t left_over_frames{0};  ///< In no window, at the end or between windows.
  std::int64_t unknown_id_frames{0};
  std::int64_t unlabelled_frames{0};  ///< Taken as normal: the file says nothing about them.
  std::int64_t empty_payloads{0};
  std::int64_t back_steps{0};  ///< Timestamps below the one before.
  std::int64_t blank_lines{0};
  std::int64_t ignored_columns{0};
  /// Skipped, because skip_bad was given: rows by what was wrong, and damaged ends of files.
  std::int64_t bad_fields{0};
  std::int64_t bad_timestamps{0};
  std::int64_t bad_ids{0};
  std::int64_t bad_payloads{0};
  std::int64_t bad_labels{0};
  std::int64_t bad_lines{0};     ///< Longer than a line may be.
  std::int64_t damaged_ends{0};  ///< Truncated or broken gzip: what followed is lost.
  std::string first_skipped{};  ///< Of an import: "FILE:LINE: what was wrong", not kept in the set.

  [[nodiscard]] std::int64_t skipped_rows() const noexcept {
    return bad_fields + bad_timestamps + bad_ids + bad_payloads + bad_labels + bad_lines;
  }
};

/// Why frames were left out, as it is told.
struct GraphSkipped {
  const char* key;
  const char* text;
  std::int64_t GraphFileInfo::*count;
};
inline constexpr std::array<GraphSkipped, 7> kGraphSkipped{
    {{"bad_fields", "skipped for their number of fields", &GraphFileInfo::bad_fields},
     {"bad_timestamps", "skipped for their timestamp", &GraphFileInfo::bad_timestamps},
     {"bad_ids", "skipped for their id", &GraphFileInfo::bad_ids},
     {"bad_payloads", "skipped for their payload", &GraphFileInfo::bad_payloads},
     {"bad_labels", "skipped for their label", &GraphFileInfo::bad_labels},
     {"bad_lines", "skipped for their length", &GraphFileInfo::bad_lines},
     {"damaged_ends", "damaged, its end lost", &GraphFileInfo::damaged_ends}}};

/// What a set holds, read from its header.
struct GraphSetInfo {
  std::int64_t graphs{0};
  std::int64_t nodes{0};
  std::int64_t edges{0};
  std::int64_t ids{0};  ///< In the vocabulary; the index of any other id is `ids`.
  std::int64_t window{0};
  std::int64_t stride{0};
  std::uint64_t seed{0};
  double validation{0};
  std::array<std::int64_t, kGraphSplits> split_graphs{};
  std::vector<GraphFileInfo> files{};
  std::vector<std::string> excluded_files{};
  std::string options{};      ///< Everything that decided the graphs beside the files.
  std::string fingerprint{};  ///< Of options and files' contents.
  std::int64_t disk_bytes{0};

  /// Rows of an embedding table over the first column of x: every id, and one for the unknown.
  [[nodiscard]] std::int64_t table_rows() const noexcept { return ids + 1; }
  [[nodiscard]] std::int64_t attack_graphs() const noexcept;
};

struct GraphSetOptions {
  std::filesystem::path directory{};
  /// The arrays stay in memory when they take no more than this; −1: when half of what the governor
  /// has free is enough.
  std::int64_t cache_bytes{-1};
};

/// Where a batch is assembled: memory of the caller's, at least as large as the batch.
struct GraphBuffers {
  std::span<float> x{};                     ///< [nodes, 11]
  std::span<std::int64_t> edge_index{};     ///< [2, edges], node offsets added
  std::span<float> edge_attr{};             ///< [edges, 11]
  std::span<std::int64_t> graph_of_node{};  ///< [nodes]: place of the node's graph in the batch
  std::span<std::int64_t> labels{};         ///< [graphs]: 1 with any attack frame, else 0
  std::span<std::int64_t> graphs{};         ///< [graphs]: which they are; for GraphBatches
};

struct GraphCounts {
  std::int64_t graphs{0};
  std::int64_t nodes{0};
  std::int64_t edges{0};
  /// Of a batch's arrays, in the types above.
  [[nodiscard]] std::int64_t bytes() const noexcept {
    return nodes * (kGraphFeatures * 4 + 8) + edges * (kGraphFeatures * 4 + 16) + graphs * 16;
  }
};

class GraphSet {
 public:
  /// Reads the header alone. Errors: kNotFound, kCorrupt, kIo.
  static Result<GraphSetInfo> inspect(const std::filesystem::path& directory);

  /// Reads the header and the offsets, and checks them; the graphs follow as they are asked for.
  /// Errors: kNotFound, kCorrupt, kIo, kOverBudget.
  static Result<GraphSet> open(Governor governor, const GraphSetOptions& options);
  GraphSet(GraphSet&&) noexcept;
  GraphSet& operator=(GraphSet&&) noexcept;
  ~GraphSet();

  [[nodiscard]] const GraphSetInfo& info() const noexcept;
  [[nodiscard]] std::int64_t graphs() const noexcept { return info().graphs; }
  /// Sorted arbitration ids; an id's place here is its index in the first column of x.
  [[nodiscard]] std::span<const std::int64_t> vocabulary() const noexcept;
  /// The graphs of a split, ascending.
  [[nodiscard]] std::span<const std::int64_t> split(GraphSplit split) const noexcept;
  /// Of one graph. Requires: 0 <= graph < graphs().
  [[nodiscard]] GraphCounts counts(std::int64_t graph) const noexcept;
  [[nodiscard]] std::int64_t label(std::int64_t graph) const noexcept;
  [[nodiscard]] std::int64_t file(std::int64_t graph) const noexcept;  ///< Index into info().files.
  /// True when the arrays stay in memory.
  [[nodiscard]] bool cached() const noexcept;

  /// Assembles graphs, in this order, into `out` (its `graphs` is left alone).
  /// Errors: kInvalidArgument (a graph out of range, a buffer too small: names it and the size),
  ///         kCorrupt naming the graph, kIo.
  Result<GraphCounts> gather(std::span<const std::int64_t> graphs, const GraphBuffers& out) const;

  /// Tells the kernel what will be read. A hint; nothing to do for cached sets.
  void prefetch(std::span<const std::int64_t> graphs) const noexcept;

  /// Reads everything and compares every checksum. `progress(done, total)` in graphs; returning
  /// false cancels. Errors: kCorrupt naming the graph; kIo; kInvalidArgument when cancelled.
  Result<void> verify(const std::function<bool(std::int64_t, std::int64_t)>& progress) const;

  /// Errors: kInvalidArgument in a child that was forked after the set was opened: there nothing
  /// else may be asked of it.
  [[nodiscard]] Result<void> check_process(const char* call) const;

 private:
  void close() noexcept;
  class Impl;
  explicit GraphSet(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

struct GraphBatchesOptions {
  GraphSplit split{GraphSplit::kTrain};
  std::vector<std::int64_t> graphs{};  ///< Not empty: these, instead of a split's.
  std::int64_t batch_graphs{256};      ///< At most so many graphs a batch, …
  std::int64_t nodes_max{0};           ///< … so many nodes (0: no bound), …
  std::int64_t edges_max{0};           ///< … so many edges, …
  std::int64_t bytes_max{0};           ///< … and so many bytes of GraphCounts::bytes().
  std::int64_t min_steps{0};           ///< At least so many batches an epoch.
  bool shuffle{true};
  std::uint64_t seed{0};
  std::int64_t epoch{0};
  std::int64_t position{0};  ///< Graphs of this epoch already handed out.
};

/// One batch: what it holds, and where a resume would go on.
struct GraphBatch {
  GraphCounts counts{};
  std::int64_t epoch{0};
  std::int64_t position{0};  ///< Of its first graph in the epoch.
  bool ends_epoch{false};
};

/// Batches of a set in a seeded order: every graph exactly once an epoch, none left out at its end.
class GraphBatches {
 public:
  /// Requires: the set outlives it, and stays where it is.
  /// Errors: kInvalidArgument (no graphs; one graph alone above a bound, named with the option;
  ///         fewer graphs than min_steps).
  static Result<GraphBatches> open(const GraphSet* set, GraphBatchesOptions options);

  /// What buffers must hold for any batch to fit.
  [[nodiscard]] GraphCounts most() const noexcept { return most_; }
  [[nodiscard]] std::int64_t graphs() const noexcept;
  /// Batches of an epoch: counts them, in O(graphs).
  [[nodiscard]] std::int64_t steps(std::int64_t epoch);

  /// What the next batch will hold.
  [[nodiscard]] GraphCounts peek();

  /// Assembles the next batch into `out`; epochs follow one another without end. Allocates nothing.
  /// Errors: those of GraphSet::gather(); the position is then unchanged.
  Result<GraphBatch> next(const GraphBuffers& out);

  /// Goes to a position of an epoch. Errors: kInvalidArgument outside it.
  Result<void> seek(std::int64_t epoch, std::int64_t position);
  [[nodiscard]] std::int64_t epoch() const noexcept { return options_.epoch; }
  [[nodiscard]] std::int64_t position() const noexcept { return options_.position; }

 private:
  GraphBatches(const GraphSet* set, GraphBatchesOptions options);
  [[nodiscard]] std::span<const std::int64_t> members() const noexcept;
  /// Puts the graphs of the batch that begins at `position` into planned_; returns how many.
  std::int64_t plan(const SampleOrder& order, std::int64_t position);
  std::span<const std::int64_t> planned();

  const GraphSet* set_;
  GraphBatchesOptions options_;
  GraphCounts most_{};
  std::vector<std::int64_t> planned_;  // batch_graphs of them.
  std::int64_t planned_count_{0};      // 0: the next batch is not planned yet.
};

}  // namespace plimsoll
