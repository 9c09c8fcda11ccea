// SPDX-License-Identifier: Apache-2.0
//
// CanWindow: the graph of one window of frames, by small sorted arrays in memory taken once.
//
// Rows 0 … W−1 of a window are frames; the target of a row is the id of the frame after it, so a
// window of W rows needs W + 1 frames. Sums are of integers until the last division: nothing
// depends on the order of anything.
// Reading order: docs/formats/graph_set.md, this file, can_import.cpp.
//
// Threads: single-owner.   Memory: about 300 bytes a row of the window, from the caller's slab.
#pragma once

#include <cstdint>
#include <span>

#include "data/can_csv.h"
#include "memory/slab.h"

namespace plimsoll {

inline constexpr std::int64_t kWindowMost = 65'535;

class CanWindow {
 public:
  /// Bytes of a slab that a window of so many rows takes.
  [[nodiscard]] static std::int64_t slab_bytes(std::int64_t window) noexcept;
  CanWindow(Slab& slab, std::int64_t window);

  /// Builds the graph of frames.size() − 1 rows. `keys[i]` identifies and orders the node of frame
  /// i; node features have the key's bits in their first column.
  /// Requires: 2 <= frames.size() <= window + 1, keys as many.
  void build(std::span<const CanFrame> frames, std::span<const std::uint32_t> keys) noexcept;

  [[nodiscard]] std::span<const float> x() const noexcept { return x_.first(nodes_ * 11); }
  [[nodiscard]] std::span<const float> edge_attr() const noexcept {
    return edge_attr_.first(edges_ * 11);
  }
  /// Source and target of each edge: places among the nodes.
  [[nodiscard]] std::span<const std::int32_t> ends() const noexcept {
    return ends_.first(edges_ * 2);
  }
  [[nodiscard]] std::int64_t nodes() const noexcept { return static_cast<std::int64_t>(nodes_); }
  [[nodiscard]] std::int64_t edges() const noexcept { return static_cast<std::int64_t>(edges_); }
  [[nodiscard]] bool attack() const noexcept { return attack_; }

 private:
  struct Place {  // Of an open-addressing table over the keys of one window.
    std::uint32_t key;
    std::uint32_t round;  // Filled when it equals round_.
    std::uint32_t node;
  };
  struct Node {
    std::uint32_t key;
    std::uint32_t sources;  // Rows it begins.
    std::uint32_t degree;   // Ends of rows at it.
    std::uint32_t last;     // Row it began last.
    std::uint64_t bytes[8];
  };

  void find_nodes(std::span<const std::uint32_t> keys) noexcept;
  void fill_nodes(std::span<const CanFrame> frames) noexcept;
  void write_nodes(std::size_t rows) noexcept;
  void write_edges(std::size_t rows) noexcept;
  void write_edge(std::size_t edge, std::span<const std::uint64_t> rows,
                  std::size_t window) noexcept;
  [[nodiscard]] bool has_edge(std::uint64_t source, std::uint64_t target) const noexcept;

  std::span<Place> places_;           // A power of two of them.
  std::span<Node> nodes_of_;          // In order of first appearance.
  std::span<std::uint32_t> node_at_;  // By frame.
  std::span<std::uint32_t> order_;    // Nodes by key.
  std::span<std::uint32_t> rank_;     // The inverse of order_.
  std::span<std::uint64_t> rows_;     // source rank << 40 | target rank << 20 | row, sorted.
  std::span<std::uint64_t> pairs_;    // source rank << 20 | target rank, one an edge.
  std::span<std::int32_t> ends_;
  std::span<float> x_;
  std::span<float> edge_attr_;
  std::size_t nodes_{0};
  std::size_t edges_{0};
  std::uint32_t round_{0};
  bool attack_{false};
};

}  // namespace plimsoll
