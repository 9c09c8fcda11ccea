// SPDX-License-Identifier: Apache-2.0
//
// GraphSet: opening, checking and assembling.
//
// The index (offsets, labels, splits) is read and checked at open. The arrays come later: into a
// copy of our own, a block at a time, when it fits; else each graph straight into the caller's
// buffers. Either way a graph's checksum is compared before anyone sees it.
// Reading order: include/plimsoll/graph_set.h, graph_set_format.h, this file, graph_batches.cpp.
//
// Threads, Memory: as the header says.
#include "plimsoll/graph_set.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>

#include <fmt/core.h>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/round.h"
#include "data/graph_set_format.h"
#include "data/safetensors.h"
#include "memory/slab.h"
#include "os/file.h"
#include "os/fork.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
namespace gt = graph_tensors;

constexpr std::int64_t kBlockBytes = 1 << 20;
constexpr std::size_t kGraphsAhead = 3;
constexpr std::int64_t kPageBytes = 4096;
constexpr std::int64_t kHugePageBytes = 2 << 20;
constexpr std::int64_t kRowBytes = kGraphFeatures * static_cast<std::int64_t>(sizeof(float));
constexpr const char* kAgain = "import the files again";

enum BlockState : std::uint8_t { kEmpty, kLoading, kReady };

std::size_t at(std::int64_t i) noexcept {
  return static_cast<std::size_t>(i);
}

// The i-th place of a node among those stored.
template <class Place>
std::int64_t place_at(const std::byte* stored, std::size_t i) noexcept {
  Place place{};
  std::memcpy(&place, stored + i * sizeof(place), sizeof(place));
  return place;
}

// From the last to the first: what is stored may lie at the beginning of `targets`.
template <class Place>
void spread(const std::byte* stored, std::int64_t first_node, std::span<std::int64_t> sources,
            std::span<std::int64_t> targets) noexcept {
  for (std::size_t i = sources.size(); i-- > 0;) {
    const std::int64_t source = place_at<Place>(stored, 2 * i);
    const std::int64_t target = place_at<Place>(stored, 2 * i + 1);
    sources[i] = first_node + source;
    targets[i] = first_node + target;
  }
}

template <class Place>
bool all_below(std::span<const std::byte> stored, std::int64_t nodes) noexcept {
  bool below = true;
  for (std::size_t i = 0; i < stored.size() / sizeof(Place); ++i) {
    below = below && place_at<Place>(stored.data(), i) < nodes;
  }
  return below;
}

}  // namespace

class GraphSet::Impl {
 public:
  static Result<std::unique_ptr<Impl>> open(Governor governor, const GraphSetOptions& options);

  Result<GraphCounts> gather(std::span<const std::int64_t> graphs, const GraphBuffers& out);
  void prefetch(std::span<const std::int64_t> graphs) const noexcept;
  Result<void> verify(const std::function<bool(std::int64_t, std::int64_t)>& progress);

  [[nodiscard]] GraphCounts counts(std::int64_t graph) const noexcept {
    return {.graphs = 1,
            .nodes = node_ptr[at(graph + 1)] - node_ptr[at(graph)],
            .edges = edge_ptr[at(graph + 1)] - edge_ptr[at(graph)]};
  }

  [[nodiscard]] const fs::path& path() const noexcept { return path_; }

  const ForkMark mark;
  GraphSetInfo info;
  std::span<std::int64_t> node_ptr;
  std::span<std::int64_t> edge_ptr;
  std::span<std::int64_t> file_ptr;
  std::span<std::int64_t> split_ptr;
  std::span<std::int64_t> split_graphs;
  std::span<std::int64_t> vocabulary;
  std::span<std::int32_t> checksums;
  std::span<std::uint8_t> labels;
  std::unique_ptr<std::byte[]> cache;  // Bytes [base_, cache_end_) of the file; null: none.

 private:
  // Where one graph's arrays are, and how long.
  struct Place {
    std::int64_t x;
    std::int64_t edge_attr;
    std::int64_t edges;
    GraphCounts counts;
  };
  // The bytes of one graph, wherever they are.
  struct Bytes {
    std::span<const std::byte> x;
    std::span<const std::byte> edge_attr;
    std::span<const std::byte> edges;
  };

  [[nodiscard]] Place place(std::int64_t graph) const noexcept;
  [[nodiscard]] std::int64_t offset_of(const char* tensor) const;
  [[nodiscard]] tl::unexpected<Error> corrupt(const std::string& what) const;
  Result<void> read_index();
  Result<void> check_index() const;
  Result<void> take_cache(Governor governor, std::int64_t cache_bytes);
  Result<void> load(std::int64_t begin, std::int64_t end);
  Result<void> load_block(std::size_t block);
  Result<void> check_graph(std::int64_t graph, const Bytes& bytes) const;
  Result<Bytes> cached_graph(std::int64_t graph);
  Result<Bytes> read_graph(std::int64_t graph, std::span<std::byte> x,
                           std::span<std::byte> edge_attr, std::span<std::byte> edges) const;
  Result<GraphCounts> check_room(std::span<const std::int64_t> graphs,
                                 const GraphBuffers& out) const;
  void fetch_ahead(std::int64_t graph) const noexcept;

  fs::path path_;
  File file_;
  std::int64_t data_at_{0};  // Of the first tensor, in the file.
  std::vector<SafetensorsEntry> entries_;
  std::uint32_t stored_crc_{0};
  std::uint32_t metadata_crc_{0};
  std::int64_t place_bytes_{1};
  std::int64_t x_at_{0};
  std::int64_t edge_attr_at_{0};
  std::int64_t edges_at_{0};
  std::int64_t base_{0};
  std::int64_t cache_end_{0};
  Lease cache_lease_;
  std::vector<std::atomic<std::uint8_t>> blocks_;    // BlockState; kLoading belongs to one thread.
  std::vector<std::atomic<std::uint64_t>> checked_;  // A bit a graph; set by any thread.
  Slab slab_;
};

// ---- Opening ----

tl::unexpected<Error> GraphSet::Impl::corrupt(const std::string& what) const {
  return fail(ErrorCode::kCorrupt, path_.string() + ": " + what, kAgain);
}

std::int64_t GraphSet::Impl::offset_of(const char* tensor) const {
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const auto& entry) { return entry.name == tensor; });
  PLIMSOLL_CHECK(found != entries_.end(), "a tensor that the header has");
  return data_at_ + found->begin;
}

Result<std::unique_ptr<GraphSet::Impl>> GraphSet::Impl::open(Governor governor,
                                                             const GraphSetOptions& options) {
  auto set = std::make_unique<Impl>();
  set->path_ = options.directory / kGraphSetFile;
  PLIMSOLL_TRY(const SafetensorsReader reader, SafetensorsReader::open(set->path_));
  PLIMSOLL_TRY(set->info, parse_graph_header(reader, set->path_.string()));
  PLIMSOLL_TRY(set->file_, File::open(set->path_, FileMode::kRead));
  PLIMSOLL_TRY(set->info.disk_bytes, set->file_.size());
  set->entries_ = reader.entries();
  set->data_at_ = set->info.disk_bytes - set->entries_.back().end;
  set->metadata_crc_ = metadata_crc(reader.metadata());
  const auto stored = reader.metadata().find(kGraphIndexCrc);
  set->stored_crc_ =
      stored == reader.metadata().end()
          ? 0
          : static_cast<std::uint32_t>(std::strtoul(stored->second.c_str(), nullptr, 10));
  const GraphSetInfo& info = set->info;
  const auto files = static_cast<std::int64_t>(info.files.size());
  const std::int64_t words =
      2 * (info.graphs + 1) + files + 1 + kGraphSplits + 1 + info.graphs + info.ids;
  PLIMSOLL_TRY(set->slab_,
               Slab::create(governor, Tag::kLoader, words * 8 + info.graphs * 5 + 8 * 64));
  Slab& slab = set->slab_;
  set->node_ptr = slab.take<std::int64_t>(info.graphs + 1);
  set->edge_ptr = slab.take<std::int64_t>(info.graphs + 1);
  set->file_ptr = slab.take<std::int64_t>(files + 1);
  set->split_ptr = slab.take<std::int64_t>(kGraphSplits + 1);
  set->split_graphs = slab.take<std::int64_t>(info.graphs);
  set->vocabulary = slab.take<std::int64_t>(info.ids);
  set->checksums = slab.take<std::int32_t>(info.graphs);
  set->labels = slab.take<std::uint8_t>(info.graphs);
  set->place_bytes_ = place_bytes(info.window);
  set->x_at_ = set->offset_of(gt::kX);
  set->edge_attr_at_ = set->offset_of(gt::kEdgeAttr);
  set->edges_at_ = set->offset_of(gt::kEdges);
  PLIMSOLL_TRY_VOID(set->read_index());
  PLIMSOLL_TRY_VOID(set->check_index());
  for (std::size_t i = 0; i < kGraphSplits; ++i) {
    set->info.split_graphs[i] = set->split_ptr[i + 1] - set->split_ptr[i];
  }
  PLIMSOLL_TRY_VOID(set->take_cache(governor, options.cache_bytes));
  return set;
}

Result<void> GraphSet::Impl::read_index() {
  std::uint32_t crc = metadata_crc_;
  const auto read = [&](const char* tensor, std::span<std::byte> out) -> Result<void> {
    PLIMSOLL_TRY_VOID(file_.read_at(offset_of(tensor), out));
    crc = crc32c(out, crc);
    return {};
  };
  PLIMSOLL_TRY_VOID(read(gt::kNodePtr, std::as_writable_bytes(node_ptr)));
  PLIMSOLL_TRY_VOID(read(gt::kEdgePtr, std::as_writable_bytes(edge_ptr)));
  PLIMSOLL_TRY_VOID(read(gt::kFilePtr, std::as_writable_bytes(file_ptr)));
  PLIMSOLL_TRY_VOID(read(gt::kSplitPtr, std::as_writable_bytes(split_ptr)));
  PLIMSOLL_TRY_VOID(read(gt::kSplitGraphs, std::as_writable_bytes(split_graphs)));
  PLIMSOLL_TRY_VOID(read(gt::kVocabulary, std::as_writable_bytes(vocabulary)));
  PLIMSOLL_TRY_VOID(read(gt::kLabels, std::as_writable_bytes(labels)));
  if (crc != stored_crc_) {
    return corrupt("the checksum of its index does not match");
  }
  // Each graph is compared with its own checksum when it is read.
  return file_.read_at(offset_of(gt::kChecksum), std::as_writable_bytes(checksums));
}

// A right checksum only says that these are the bytes once written, not who wrote them.
Result<void> GraphSet::Impl::check_index() const {
  const auto rises = [](std::span<const std::int64_t> ptr, std::int64_t end, std::int64_t least) {
    for (std::size_t i = 1; i < ptr.size(); ++i) {
      if (ptr[i] < ptr[i - 1] + least || ptr[i] > end) {
        return false;
      }
    }
    return ptr.front() == 0 && ptr.back() == end;
  };
  if (!rises(node_ptr, info.nodes, 1) || !rises(edge_ptr, info.edges, 0) ||
      !rises(file_ptr, info.graphs, 0) || !rises(split_ptr, info.graphs, 0)) {
    return corrupt("its offsets do not rise from the first row to the last");
  }
  std::vector<bool> seen(at(info.graphs));
  for (const std::int64_t graph : split_graphs) {
    if (graph < 0 || graph >= info.graphs || seen[at(graph)]) {
      return corrupt(fmt::format("graph {} is in two splits, or in none", graph));
    }
    seen[at(graph)] = true;
  }
  for (std::size_t i = 0; i < vocabulary.size(); ++i) {
    if (vocabulary[i] < 0 || vocabulary[i] >= UINT32_MAX ||
        (i > 0 && vocabulary[i] <= vocabulary[i - 1])) {
      return corrupt("its vocabulary does not rise");
    }
  }
  if (std::any_of(labels.begin(), labels.end(), [](std::uint8_t label) { return label > 1; })) {
    return corrupt("a label is neither 0 nor 1");
  }
  return {};
}

Result<void> GraphSet::Impl::take_cache(Governor governor, std::int64_t cache_bytes) {
  base_ = x_at_;
  cache_end_ = edges_at_ + info.edges * 2 * place_bytes_;
  const std::int64_t bytes = cache_end_ - base_;
  const std::int64_t marks = bytes / kBlockBytes + 1 + info.graphs / 8 + 8;
  const std::int64_t most = cache_bytes < 0 ? governor.state().free_bytes() / 2 : cache_bytes;
  if (bytes + marks > most) {
    return {};
  }
  PLIMSOLL_TRY(cache_lease_, governor.reserve(Tag::kLoader, bytes + marks));
  cache = std::make_unique_for_overwrite<std::byte[]>(at(bytes));  // Untouched until it is filled.
  // Whole pages of it as huge ones, where there are any: graphs are read at random. All is leased.
  const auto address = reinterpret_cast<std::uintptr_t>(cache.get());
  const auto skipped = static_cast<std::int64_t>(round_up(address, kPageBytes) - address);
  if (bytes - skipped >= kHugePageBytes) {
    const std::int64_t inner = (bytes - skipped) / kPageBytes * kPageBytes;
    ::madvise(cache.get() + skipped, at(inner), MADV_HUGEPAGE);  // Advice: may fail.
  }
  blocks_ = std::vector<std::atomic<std::uint8_t>>(at(bytes / kBlockBytes + 1));
  checked_ = std::vector<std::atomic<std::uint64_t>>(at(info.graphs / 64 + 1));
  return {};
}

// ---- One graph ----

GraphSet::Impl::Place GraphSet::Impl::place(std::int64_t graph) const noexcept {
  const std::int64_t node = node_ptr[at(graph)];
  const std::int64_t edge = edge_ptr[at(graph)];
  return {.x = x_at_ + node * kRowBytes,
          .edge_attr = edge_attr_at_ + edge * kRowBytes,
          .edges = edges_at_ + edge * 2 * place_bytes_,
          .counts = counts(graph)};
}

Result<void> GraphSet::Impl::check_graph(std::int64_t graph, const Bytes& bytes) const {
  const std::uint32_t crc = crc32c(bytes.x, crc32c(bytes.edges, crc32c(bytes.edge_attr)));
  if (crc != static_cast<std::uint32_t>(checksums[at(graph)])) {
    return corrupt(fmt::format("graph {}: its checksum does not match", graph));
  }
  const std::int64_t nodes = counts(graph).nodes;
  if (place_bytes_ == 1 ? !all_below<std::uint8_t>(bytes.edges, nodes)
                        : !all_below<std::uint32_t>(bytes.edges, nodes)) {
    return corrupt(fmt::format("graph {}: an edge ends at no node of it", graph));
  }
  for (std::size_t row = 0; row < bytes.x.size(); row += at(kRowBytes)) {
    float index = 0;
    std::memcpy(&index, bytes.x.data() + row, sizeof(index));
    if (!(index >= 0.0F && index <= static_cast<float>(info.ids))) {
      return corrupt(fmt::format("graph {}: an id beyond the vocabulary", graph));
    }
  }
  return {};
}

Result<void> GraphSet::Impl::load_block(std::size_t block) {
  std::atomic<std::uint8_t>& state = blocks_[block];
  for (std::uint8_t seen = state.load(std::memory_order_acquire); seen != kReady;
       seen = state.load(std::memory_order_acquire)) {
    if (seen == kLoading) {
      state.wait(kLoading, std::memory_order_acquire);
      continue;
    }
    if (!state.compare_exchange_strong(seen, kLoading, std::memory_order_acq_rel)) {
      continue;
    }
    const std::int64_t begin = static_cast<std::int64_t>(block) * kBlockBytes;
    const std::int64_t size = std::min(kBlockBytes, cache_end_ - base_ - begin);
    const auto read = file_.read_at(base_ + begin, {cache.get() + begin, at(size)});
    state.store(read ? kReady : kEmpty, std::memory_order_release);
    state.notify_all();
    PLIMSOLL_TRY_VOID(read);
  }
  return {};
}

Result<void> GraphSet::Impl::load(std::int64_t begin, std::int64_t end) {
  for (std::int64_t block = (begin - base_) / kBlockBytes; block * kBlockBytes < end - base_;
       ++block) {
    if (blocks_[at(block)].load(std::memory_order_acquire) != kReady) {
      PLIMSOLL_TRY_VOID(load_block(at(block)));
    }
  }
  return {};
}

Result<GraphSet::Impl::Bytes> GraphSet::Impl::cached_graph(std::int64_t graph) {
  const Place where = place(graph);
  const std::int64_t x_bytes = where.counts.nodes * kRowBytes;
  const std::int64_t attr_bytes = where.counts.edges * kRowBytes;
  const std::int64_t edge_bytes = where.counts.edges * 2 * place_bytes_;
  const auto from = [&](std::int64_t offset, std::int64_t bytes) {
    return std::span<const std::byte>(cache.get() + (offset - base_), at(bytes));
  };
  const Bytes bytes{.x = from(where.x, x_bytes),
                    .edge_attr = from(where.edge_attr, attr_bytes),
                    .edges = from(where.edges, edge_bytes)};
  std::atomic<std::uint64_t>& word = checked_[at(graph / 64)];
  const std::uint64_t bit = 1ULL << static_cast<unsigned>(graph % 64);
  if ((word.load(std::memory_order_acquire) & bit) == 0) {
    PLIMSOLL_TRY_VOID(load(where.x, where.x + x_bytes));
    PLIMSOLL_TRY_VOID(load(where.edge_attr, where.edge_attr + attr_bytes));
    PLIMSOLL_TRY_VOID(load(where.edges, where.edges + edge_bytes));
    PLIMSOLL_TRY_VOID(check_graph(graph, bytes));
    word.fetch_or(bit, std::memory_order_acq_rel);
  }
  return bytes;
}

Result<GraphSet::Impl::Bytes> GraphSet::Impl::read_graph(std::int64_t graph, std::span<std::byte> x,
                                                         std::span<std::byte> edge_attr,
                                                         std::span<std::byte> edges) const {
  const Place where = place(graph);
  PLIMSOLL_TRY_VOID(file_.read_at(where.x, x));
  PLIMSOLL_TRY_VOID(file_.read_at(where.edge_attr, edge_attr));
  PLIMSOLL_TRY_VOID(file_.read_at(where.edges, edges));
  const Bytes bytes{.x = x, .edge_attr = edge_attr, .edges = edges};
  PLIMSOLL_TRY_VOID(check_graph(graph, bytes));
  return bytes;
}

// ---- Batches ----

Result<GraphCounts> GraphSet::Impl::check_room(std::span<const std::int64_t> graphs,
                                               const GraphBuffers& out) const {
  GraphCounts total{.graphs = static_cast<std::int64_t>(graphs.size())};
  for (const std::int64_t graph : graphs) {
    if (graph < 0 || graph >= info.graphs) {
      return fail(ErrorCode::kInvalidArgument, fmt::format("{}: there is no graph {} of {}",
                                                           path_.string(), graph, info.graphs));
    }
    total.nodes += counts(graph).nodes;
    total.edges += counts(graph).edges;
  }
  struct Buffer {
    const char* name;
    std::size_t has;
    std::int64_t needs;
  };
  for (const Buffer& buffer :
       {Buffer{"x", out.x.size(), total.nodes * kGraphFeatures},
        Buffer{"edge_index", out.edge_index.size(), total.edges * 2},
        Buffer{"edge_attr", out.edge_attr.size(), total.edges * kGraphFeatures},
        Buffer{"graph_of_node", out.graph_of_node.size(), total.nodes},
        Buffer{"labels", out.labels.size(), total.graphs}}) {
    if (buffer.has < at(buffer.needs)) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("a batch of {} graphs needs {} elements of \"{}\"; the buffer has {}",
                              total.graphs, buffer.needs, buffer.name, buffer.has),
                  "make the buffers as large as GraphBatches::most() says");
    }
  }
  return total;
}

// The beginnings of a graph's arrays on their way from memory; the hardware goes on by itself.
void GraphSet::Impl::fetch_ahead(std::int64_t graph) const noexcept {
  constexpr std::int64_t kLine = 64;
  const Place next = place(graph);
  for (std::int64_t line = 0; line < 4; ++line) {
    __builtin_prefetch(cache.get() + (next.x - base_) + line * kLine);
    __builtin_prefetch(cache.get() + (next.edge_attr - base_) + line * kLine);
  }
  __builtin_prefetch(cache.get() + (next.edges - base_));
  __builtin_prefetch(cache.get() + (next.edges - base_) + kLine);
  __builtin_prefetch(&checked_[at(graph / 64)]);
  __builtin_prefetch(&labels[at(graph)]);
}

Result<GraphCounts> GraphSet::Impl::gather(std::span<const std::int64_t> graphs,
                                           const GraphBuffers& out) {
  PLIMSOLL_TRY(const GraphCounts total, check_room(graphs, out));
  const auto sources = out.edge_index.first(at(total.edges));
  const auto targets = out.edge_index.subspan(at(total.edges), at(total.edges));
  std::size_t node = 0;
  std::size_t edge = 0;
  for (std::size_t i = 0; i < graphs.size(); ++i) {
    const GraphCounts size = counts(graphs[i]);
    const std::size_t nodes = at(size.nodes);
    const std::size_t edges = at(size.edges);
    const auto x =
        std::as_writable_bytes(out.x.subspan(node * kGraphFeatures, nodes * kGraphFeatures));
    const auto edge_attr = std::as_writable_bytes(
        out.edge_attr.subspan(edge * kGraphFeatures, edges * kGraphFeatures));
    const auto own_targets = targets.subspan(edge, edges);
    Bytes bytes;
    if (cache != nullptr) {
      if (i + kGraphsAhead < graphs.size()) {
        fetch_ahead(graphs[i + kGraphsAhead]);
      }
      PLIMSOLL_TRY(bytes, cached_graph(graphs[i]));
      std::memcpy(x.data(), bytes.x.data(), x.size());
      std::memcpy(edge_attr.data(), bytes.edge_attr.data(), edge_attr.size());
    } else {
      const auto stored = std::as_writable_bytes(own_targets).first(edges * 2 * at(place_bytes_));
      PLIMSOLL_TRY(bytes, read_graph(graphs[i], x, edge_attr, stored));
    }
    const auto spread_places = place_bytes_ == 1 ? spread<std::uint8_t> : spread<std::uint32_t>;
    spread_places(bytes.edges.data(), static_cast<std::int64_t>(node), sources.subspan(edge, edges),
                  own_targets);
    std::fill_n(out.graph_of_node.begin() + static_cast<std::ptrdiff_t>(node), nodes,
                static_cast<std::int64_t>(i));
    out.labels[i] = labels[at(graphs[i])];
    node += nodes;
    edge += edges;
  }
  return total;
}

void GraphSet::Impl::prefetch(std::span<const std::int64_t> graphs) const noexcept {
  if (cache != nullptr) {
    return;
  }
  for (const std::int64_t graph : graphs) {
    if (graph < 0 || graph >= info.graphs) {
      continue;
    }
    const Place where = place(graph);
    const auto will_need = [&](std::int64_t offset, std::int64_t bytes) {
      ::posix_fadvise(file_.descriptor(), offset, bytes, POSIX_FADV_WILLNEED);
    };
    will_need(where.x, where.counts.nodes * kRowBytes);
    will_need(where.edge_attr, where.counts.edges * kRowBytes);
    will_need(where.edges, where.counts.edges * 2 * place_bytes_);
  }
}

Result<void> GraphSet::Impl::verify(
    const std::function<bool(std::int64_t, std::int64_t)>& progress) {
  constexpr std::int64_t kBetweenReports = 4096;
  std::vector<std::byte> memory;  // Of the largest graph so far.
  for (std::int64_t graph = 0; graph < info.graphs; ++graph) {
    const GraphCounts size = counts(graph);
    const std::size_t x = at(size.nodes * kRowBytes);
    const std::size_t edge_attr = at(size.edges * kRowBytes);
    const std::size_t edges = at(size.edges * 2 * place_bytes_);
    memory.resize(std::max(memory.size(), x + edge_attr + edges));
    const std::span all(memory);
    PLIMSOLL_TRY_VOID(read_graph(graph, all.first(x), all.subspan(x, edge_attr),
                                 all.subspan(x + edge_attr, edges)));
    if (graph % kBetweenReports == 0 && progress && !progress(graph, info.graphs)) {
      return fail(ErrorCode::kInvalidArgument, path_.string() + ": verify cancelled");
    }
  }
  return {};
}

// ---- The public class ----

GraphSet::GraphSet(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
GraphSet::GraphSet(GraphSet&&) noexcept = default;
GraphSet& GraphSet::operator=(GraphSet&& other) noexcept {
  std::swap(impl_, other.impl_);
  other.close();
  return *this;
}
GraphSet::~GraphSet() {
  close();
}
void GraphSet::close() noexcept {
  if (impl_ != nullptr) {
    destroy_if_own(impl_, impl_->mark);
  }
}

Result<void> GraphSet::check_process(const char* call) const {
  return impl_->mark.check(impl_->path(), call);
}

Result<GraphSetInfo> GraphSet::inspect(const fs::path& directory) {
  const fs::path path = directory / kGraphSetFile;
  PLIMSOLL_TRY(const SafetensorsReader reader, SafetensorsReader::open(path));
  PLIMSOLL_TRY(GraphSetInfo info, parse_graph_header(reader, path.string()));
  PLIMSOLL_TRY(const auto* entry, reader.find(gt::kSplitPtr));
  std::array<std::int64_t, kGraphSplits + 1> split_ptr{};
  PLIMSOLL_TRY_VOID(reader.read(*entry, 0, std::as_writable_bytes(std::span(split_ptr))));
  for (std::size_t i = 0; i < kGraphSplits; ++i) {
    info.split_graphs[i] = split_ptr[i + 1] - split_ptr[i];
  }
  std::error_code status;
  info.disk_bytes = static_cast<std::int64_t>(fs::file_size(path, status));
  return info;
}

Result<GraphSet> GraphSet::open(Governor governor, const GraphSetOptions& options) {
  PLIMSOLL_TRY(auto impl, Impl::open(governor, options));
  return GraphSet(std::move(impl));
}

const GraphSetInfo& GraphSet::info() const noexcept {
  return impl_->info;
}

std::span<const std::int64_t> GraphSet::vocabulary() const noexcept {
  return impl_->vocabulary;
}

std::span<const std::int64_t> GraphSet::split(GraphSplit split) const noexcept {
  const auto which = static_cast<std::size_t>(split);
  const std::int64_t begin = impl_->split_ptr[which];
  return impl_->split_graphs.subspan(at(begin), at(impl_->split_ptr[which + 1] - begin));
}

GraphCounts GraphSet::counts(std::int64_t graph) const noexcept {
  return impl_->counts(graph);
}

std::int64_t GraphSet::label(std::int64_t graph) const noexcept {
  return impl_->labels[at(graph)];
}

std::int64_t GraphSet::file(std::int64_t graph) const noexcept {
  const auto& ptr = impl_->file_ptr;
  return std::upper_bound(ptr.begin(), ptr.end(), graph) - ptr.begin() - 1;
}

bool GraphSet::cached() const noexcept {
  return impl_->cache != nullptr;
}

Result<GraphCounts> GraphSet::gather(std::span<const std::int64_t> graphs,
                                     const GraphBuffers& out) const {
  PLIMSOLL_TRY_VOID(check_process("gather"));
  return impl_->gather(graphs, out);
}

void GraphSet::prefetch(std::span<const std::int64_t> graphs) const noexcept {
  if (!impl_->mark.forked()) {
    impl_->prefetch(graphs);
  }
}

Result<void> GraphSet::verify(
    const std::function<bool(std::int64_t, std::int64_t)>& progress) const {
  PLIMSOLL_TRY_VOID(check_process("verify"));
  return impl_->verify(progress);
}

}  // namespace plimsoll
