// SPDX-License-Identifier: Apache-2.0
#include "data/can_window.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "base/check.h"

namespace plimsoll {
namespace {

constexpr std::size_t kFeatures = kGraphFeatures;
constexpr int kTargetShift = 20;
constexpr int kSourceShift = 40;
constexpr std::uint64_t kPart = (1U << kTargetShift) - 1;
static_assert(kWindowMost + 1 <= static_cast<std::int64_t>(kPart));

std::int64_t places_for(std::int64_t window) noexcept {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(2 * (window + 1))));
}

std::size_t hash(std::uint32_t key) noexcept {
  constexpr std::uint32_t kFibonacci = 0x9E3779B1U;  // 2^32 / golden ratio, odd.
  return key * kFibonacci >> 7U;
}

}  // namespace

std::int64_t CanWindow::slab_bytes(std::int64_t window) noexcept {
  constexpr std::int64_t kPadding = 64 * 10;  // Of ten arrays.
  const std::int64_t nodes = window + 1;
  return places_for(window) * static_cast<std::int64_t>(sizeof(Place)) +
         nodes * static_cast<std::int64_t>(sizeof(Node) + 3 * sizeof(std::uint32_t)) +
         window * static_cast<std::int64_t>(2 * sizeof(std::uint64_t) + 2 * sizeof(std::int32_t)) +
         (nodes + window) * kGraphFeatures * static_cast<std::int64_t>(sizeof(float)) + kPadding;
}

CanWindow::CanWindow(Slab& slab, std::int64_t window) {
  const std::int64_t nodes = window + 1;
  places_ = slab.take<Place>(places_for(window));
  nodes_of_ = slab.take<Node>(nodes);
  node_at_ = slab.take<std::uint32_t>(nodes);
  order_ = slab.take<std::uint32_t>(nodes);
  rank_ = slab.take<std::uint32_t>(nodes);
  rows_ = slab.take<std::uint64_t>(window);
  pairs_ = slab.take<std::uint64_t>(window);
  ends_ = slab.take<std::int32_t>(2 * window);
  x_ = slab.take<float>(nodes * kGraphFeatures);
  edge_attr_ = slab.take<float>(window * kGraphFeatures);
}

void CanWindow::build(std::span<const CanFrame> frames,
                      std::span<const std::uint32_t> keys) noexcept {
  find_nodes(keys);
  fill_nodes(frames);
  const std::size_t rows = frames.size() - 1;
  write_nodes(rows);
  for (std::size_t row = 0; row < rows; ++row) {
    rows_[row] = std::uint64_t{rank_[node_at_[row]]} << kSourceShift |
                 std::uint64_t{rank_[node_at_[row + 1]]} << kTargetShift | row;
  }
  std::sort(rows_.begin(), rows_.begin() + static_cast<std::ptrdiff_t>(rows));
  write_edges(rows);
}

// Which node each frame is, in order of first appearance; then the order of the keys.
void CanWindow::find_nodes(std::span<const std::uint32_t> keys) noexcept {
  if (++round_ == 0) {  // Once in four billion windows: forget the rounds of before.
    std::fill(places_.begin(), places_.end(), Place{});
    round_ = 1;
  }
  const std::size_t mask = places_.size() - 1;
  nodes_ = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    std::size_t at = hash(keys[i]) & mask;
    while (places_[at].round == round_ && places_[at].key != keys[i]) {
      at = (at + 1) & mask;
    }
    Place& place = places_[at];
    if (place.round != round_) {
      place = {keys[i], round_, static_cast<std::uint32_t>(nodes_)};
      nodes_of_[nodes_++] = Node{keys[i], 0, 0, 0, {}};
    }
    node_at_[i] = place.node;
  }
  const auto order = order_.first(nodes_);
  std::iota(order.begin(), order.end(), 0U);
  std::sort(order.begin(), order.end(), [this](std::uint32_t a, std::uint32_t b) {
    return nodes_of_[a].key < nodes_of_[b].key;
  });
  for (std::uint32_t r = 0; r < nodes_; ++r) {
    rank_[order[r]] = r;
  }
}

void CanWindow::fill_nodes(std::span<const CanFrame> frames) noexcept {
  const std::size_t rows = frames.size() - 1;
  unsigned attack = 0;
  for (std::size_t row = 0; row < rows; ++row) {
    Node& node = nodes_of_[node_at_[row]];
    ++node.sources;
    ++node.degree;
    node.last = static_cast<std::uint32_t>(row);
    for (std::size_t b = 0; b < 8; ++b) {
      node.bytes[b] += frames[row].bytes[b];
    }
    attack |= frames[row].attack;
    ++nodes_of_[node_at_[row + 1]].degree;
  }
  attack_ = attack != 0;
}

void CanWindow::write_nodes(std::size_t rows) noexcept {
  std::uint32_t least = UINT32_MAX;
  std::uint32_t most = 0;
  for (std::size_t n = 0; n < nodes_; ++n) {
    least = std::min(least, nodes_of_[n].sources);
    most = std::max(most, nodes_of_[n].sources);
  }
  const double spread = most - least;
  const double last_row = rows > 1 ? static_cast<double>(rows - 1) : 1.0;
  for (std::size_t r = 0; r < nodes_; ++r) {
    const Node& node = nodes_of_[order_[r]];
    float* const out = x_.data() + r * kFeatures;
    std::fill_n(out, kFeatures, 0.0F);
    out[0] = std::bit_cast<float>(node.key);
    if (node.sources > 0) {
      const double scale = 255.0 * node.sources;
      for (std::size_t b = 0; b < 8; ++b) {
        out[1 + b] = static_cast<float>(static_cast<double>(node.bytes[b]) / scale);
      }
      out[10] = static_cast<float>(node.last / last_row);
    }
    out[9] = most > least ? static_cast<float>((node.sources - least) / spread)
                          : static_cast<float>(node.sources);
  }
}

// rows_ is sorted: an edge is a run of equal ends, its rows ascending.
void CanWindow::write_edges(std::size_t rows) noexcept {
  edges_ = 0;
  for (std::size_t begin = 0; begin < rows; ++edges_) {
    const std::uint64_t pair = rows_[begin] >> kTargetShift;
    std::size_t end = begin + 1;
    while (end < rows && rows_[end] >> kTargetShift == pair) {
      ++end;
    }
    pairs_[edges_] = pair;
    ends_[2 * edges_] = static_cast<std::int32_t>(pair >> kTargetShift);
    ends_[2 * edges_ + 1] = static_cast<std::int32_t>(pair & kPart);
    write_edge(edges_, rows_.subspan(begin, end - begin), rows);
    begin = end;
  }
  for (std::size_t e = 0; e < edges_; ++e) {  // Once every edge is known.
    edge_attr_[e * kFeatures + 8] =
        has_edge(pairs_[e] & kPart, pairs_[e] >> kTargetShift) ? 1.0F : 0.0F;
  }
}

void CanWindow::write_edge(std::size_t edge, std::span<const std::uint64_t> rows,
                           std::size_t window) noexcept {
  const std::uint64_t first = rows.front() & kPart;
  const std::uint64_t last = rows.back() & kPart;
  const auto count = static_cast<double>(rows.size());
  const auto whole = static_cast<double>(window);
  float* const out = edge_attr_.data() + edge * kFeatures;
  out[0] = static_cast<float>(count);
  out[1] = static_cast<float>(count / whole);
  out[2] = out[3] = out[4] = 0.0F;
  if (rows.size() > 1) {
    std::uint64_t squares = 0;
    for (std::size_t i = 1; i < rows.size(); ++i) {
      const std::uint64_t gap = rows[i] - rows[i - 1];
      squares += gap * gap;
    }
    // n Σg² − (Σg)², exact: n < 2^16 and Σg² < 2^32.
    const std::uint64_t gaps = rows.size() - 1;
    const std::uint64_t span = last - first;
    const double spread = std::sqrt(static_cast<double>(gaps * squares - span * span));
    const double deviation = spread / static_cast<double>(gaps);
    out[2] = static_cast<float>(static_cast<double>(span) / static_cast<double>(gaps));
    out[3] = static_cast<float>(deviation);
    out[4] = static_cast<float>(1.0 / (1.0 + deviation));
  }
  out[5] = static_cast<float>(static_cast<double>(first) / whole);
  out[6] = static_cast<float>(static_cast<double>(last) / whole);
  out[7] = static_cast<float>(static_cast<double>(last - first) / whole);
  const Node& source = nodes_of_[order_[static_cast<std::size_t>(ends_[2 * edge])]];
  const Node& target = nodes_of_[order_[static_cast<std::size_t>(ends_[2 * edge + 1])]];
  out[9] = static_cast<float>(static_cast<double>(source.degree) * target.degree);
  out[10] = static_cast<float>(static_cast<double>(source.degree) / target.degree);
}

bool CanWindow::has_edge(std::uint64_t source, std::uint64_t target) const noexcept {
  const auto all = pairs_.first(edges_);
  return std::binary_search(all.begin(), all.end(), source << kTargetShift | target);
}

}  // namespace plimsoll
