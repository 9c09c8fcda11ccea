// SPDX-License-Identifier: Apache-2.0
//
// GraphPart: the graphs of one input file, in side files; join_parts: all of them as one set.
//
// The arrays of a set follow one another in its file, and none's length is known before the last
// frame is read. So each array grows in a file of its own, and the set is copied together at the
// end, side files going as they are used up. Ids become indices of the vocabulary on the way.
// Reading order: graph_set_format.h, this file.
//
// Threads: single-owner.   Memory: the buffers lent.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <vector>

#include "memory/slab.h"
#include "os/file.h"
#include "plimsoll/graph_set.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// The key of every id that the vocabulary lacks: sorted last, as its index is.
inline constexpr std::uint32_t kUnknownId = UINT32_MAX;

/// One graph, in the side file "graphs".
struct GraphRecord {
  std::uint32_t nodes{0};
  std::uint32_t edges{0};
  std::uint32_t crc{0};  ///< Of its edge_attr, then of its edges.
  std::uint32_t attack{0};
};

/// One graph as it is stored, but for ids in place of their indices.
struct GraphRows {
  std::span<const float> x{};            ///< [nodes, 11], the first column an id's bits.
  std::span<const float> edge_attr{};    ///< [edges, 11]
  std::span<const std::int32_t> ends{};  ///< [edges, 2]: places among the nodes.
  bool attack{false};
};

class GraphPart {
 public:
  static constexpr int kStreams = 4;  // graphs, x, edge_attr, edges
  static constexpr std::int64_t kBufferBytes = 256 << 10;
  /// Bytes of a slab for the buffers of one part at a time.
  [[nodiscard]] static std::int64_t slab_bytes(std::int64_t window) noexcept;

  using Buffers = std::array<std::span<std::byte>, kStreams + 1>;
  [[nodiscard]] static Buffers take_buffers(Slab& slab, std::int64_t window);

  /// Begins the side files NUMBER.* in `folder`. Errors: kIo.
  static Result<GraphPart> create(const std::filesystem::path& folder, std::size_t number,
                                  const Buffers& buffers, std::int64_t window);

  /// Requires: at most window + 1 nodes and `window` edges. Errors: kIo.
  Result<void> append(const GraphRows& graph);
  /// Writes what is still in the buffers. Errors: kIo.
  Result<void> finish();

  [[nodiscard]] std::int64_t graphs() const noexcept { return graphs_; }
  [[nodiscard]] std::int64_t attack_graphs() const noexcept { return attack_graphs_; }
  [[nodiscard]] std::int64_t nodes() const noexcept { return nodes_; }
  [[nodiscard]] std::int64_t edges() const noexcept { return edges_; }

 private:
  struct Stream {
    File file;
    std::span<std::byte> buffer;
    std::size_t held{0};
    std::int64_t written{0};
    Result<void> put(std::span<const std::byte> bytes);
    Result<void> flush();
  };
  GraphPart() noexcept = default;

  std::array<Stream, kStreams> streams_;
  std::span<std::byte> ends_;  // Of one graph, as they are stored.
  bool narrow_{true};
  std::int64_t graphs_{0};
  std::int64_t attack_graphs_{0};
  std::int64_t nodes_{0};
  std::int64_t edges_{0};
};

struct JoinOptions {
  std::filesystem::path folder{};  ///< Where the side files 0.*, 1.*, … are, one of each a file.
  std::filesystem::path path{};    ///< The set's file.
  std::span<const std::uint32_t> vocabulary{};  ///< Sorted.
  std::span<std::byte> buffer{};                ///< At least join_buffer_bytes().
};
[[nodiscard]] std::int64_t join_buffer_bytes(std::int64_t window) noexcept;

/// Writes the set. `info` has everything but split_graphs, which is filled in.
/// `step()` is called now and then; false cancels. Errors: kIo, kInvalidArgument when cancelled.
Result<void> join_parts(const JoinOptions& options, GraphSetInfo& info,
                        const std::function<bool()>& step);

}  // namespace plimsoll
