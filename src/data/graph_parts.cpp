// SPDX-License-Identifier: Apache-2.0
#include "data/graph_parts.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include <fmt/core.h>

#include "base/check.h"
#include "base/crc32c.h"
#include "data/graph_set_format.h"
#include "data/safetensors.h"
#include "plimsoll/sample_order.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

enum StreamKind : std::size_t { kGraphs, kX, kEdgeAttr, kEdges };
constexpr std::array<const char*, GraphPart::kStreams> kStreamNames{"graphs", "x", "edge_attr",
                                                                    "edges"};
constexpr const char* kChecksums = "checksums";
constexpr std::size_t kNodeBytes = kGraphFeatures * sizeof(float);

fs::path side_file(const fs::path& folder, std::size_t number, const char* name) {
  return folder / fmt::format("{}.{}", number, name);
}

}  // namespace

// ---- One input's side files ----

std::int64_t GraphPart::slab_bytes(std::int64_t window) noexcept {
  return kStreams * (kBufferBytes + 64) + window * 2 * 4 + 64;
}

GraphPart::Buffers GraphPart::take_buffers(Slab& slab, std::int64_t window) {
  Buffers buffers;
  for (std::size_t i = 0; i < kStreams; ++i) {
    buffers[i] = slab.take<std::byte>(kBufferBytes);
  }
  buffers[kStreams] = slab.take<std::byte>(window * 2 * 4);
  return buffers;
}

Result<GraphPart> GraphPart::create(const fs::path& folder, std::size_t number,
                                    const Buffers& buffers, std::int64_t window) {
  GraphPart part;
  part.narrow_ = place_bytes(window) == 1;
  part.ends_ = buffers[kStreams];
  for (std::size_t i = 0; i < kStreams; ++i) {
    PLIMSOLL_TRY(part.streams_[i].file,
                 File::open(side_file(folder, number, kStreamNames[i]), FileMode::kCreate));
    part.streams_[i].buffer = buffers[i];
  }
  return part;
}

Result<void> GraphPart::Stream::flush() {
  PLIMSOLL_TRY_VOID(file.write_at(written, buffer.first(held)));
  written += static_cast<std::int64_t>(held);
  held = 0;
  return {};
}

Result<void> GraphPart::Stream::put(std::span<const std::byte> bytes) {
  if (bytes.size() > buffer.size() - held) {
    PLIMSOLL_TRY_VOID(flush());
    if (bytes.size() > buffer.size()) {
      PLIMSOLL_TRY_VOID(file.write_at(written, bytes));
      written += static_cast<std::int64_t>(bytes.size());
      return {};
    }
  }
  std::copy(bytes.begin(), bytes.end(), buffer.begin() + static_cast<std::ptrdiff_t>(held));
  held += bytes.size();
  return {};
}

Result<void> GraphPart::append(const GraphRows& graph) {
  const auto nodes = static_cast<std::int64_t>(graph.x.size() / kGraphFeatures);
  const auto edges = static_cast<std::int64_t>(graph.ends.size() / 2);
  std::span<const std::byte> stored = std::as_bytes(graph.ends);
  if (narrow_) {
    std::transform(graph.ends.begin(), graph.ends.end(), ends_.begin(),
                   [](std::int32_t place) { return static_cast<std::byte>(place); });
    stored = ends_.first(graph.ends.size());
  }
  const auto attributes = std::as_bytes(graph.edge_attr);
  const GraphRecord record{.nodes = static_cast<std::uint32_t>(nodes),
                           .edges = static_cast<std::uint32_t>(edges),
                           .crc = crc32c(stored, crc32c(attributes)),
                           .attack = graph.attack ? 1U : 0U};
  PLIMSOLL_TRY_VOID(streams_[kGraphs].put(std::as_bytes(std::span(&record, 1))));
  PLIMSOLL_TRY_VOID(streams_[kX].put(std::as_bytes(graph.x)));
  PLIMSOLL_TRY_VOID(streams_[kEdgeAttr].put(attributes));
  PLIMSOLL_TRY_VOID(streams_[kEdges].put(stored));
  ++graphs_;
  attack_graphs_ += record.attack;
  nodes_ += nodes;
  edges_ += edges;
  return {};
}

Result<void> GraphPart::finish() {
  for (Stream& stream : streams_) {
    PLIMSOLL_TRY_VOID(stream.flush());
    stream.file = File();
  }
  return {};
}

// ---- All of them as one set ----

namespace {

using Sink = std::function<Result<void>(std::span<const std::byte>)>;

constexpr std::int64_t kRecordsAtOnce = 4096;
constexpr std::int64_t kCopyBytes = 1 << 20;

// Numbers on their way to a sink, some thousands at a time.
template <class T>
class Numbers {
 public:
  Numbers(std::span<std::byte> memory, const Sink& sink)
      : memory_(reinterpret_cast<T*>(memory.data()), memory.size() / sizeof(T)), sink_(sink) {}
  Result<void> put(T value) {
    memory_[held_++] = value;
    return held_ == memory_.size() ? flush() : Result<void>{};
  }
  Result<void> flush() {
    const std::size_t count = std::exchange(held_, 0);
    return sink_(std::as_bytes(memory_.first(count)));
  }

 private:
  std::span<T> memory_;
  const Sink& sink_;
  std::size_t held_{0};
};

class Join {
 public:
  Join(const JoinOptions& options, GraphSetInfo& info, const std::function<bool()>& step)
      : options_(options), info_(info), step_(step) {
    auto take = [rest = options.buffer](std::int64_t bytes) mutable {
      const auto part = rest.first(static_cast<std::size_t>(bytes));
      rest = rest.subspan(static_cast<std::size_t>(bytes));
      return part;
    };
    const auto records = take(kRecordsAtOnce * static_cast<std::int64_t>(sizeof(GraphRecord)));
    records_ = {reinterpret_cast<GraphRecord*>(records.data()), kRecordsAtOnce};
    numbers_ = take(kRecordsAtOnce * 8);
    copy_ = take(static_cast<std::int64_t>(options.buffer.size()) -
                 kRecordsAtOnce * static_cast<std::int64_t>(sizeof(GraphRecord) + 8));
  }

  Result<void> run();

 private:
  template <class Visit>
  Result<void> each_graph(Visit visit);
  template <class Visit>
  Result<void> records_of(std::size_t file, Visit visit);
  Result<void> write_offsets(std::uint32_t GraphRecord::*count, const Sink& sink);
  Result<void> write_file_offsets(const Sink& sink);
  Result<void> write_splits(const Sink& sink);
  Result<void> write_vocabulary(const Sink& sink);
  Result<void> write_labels(const Sink& sink);
  Result<void> write_nodes(SafetensorsWriter& writer);
  Result<void> write_some_nodes(const File& from, std::int64_t at, std::span<GraphRecord> graphs,
                                std::int64_t bytes, Numbers<std::uint32_t>& sums, const Sink& sink);
  Result<void> copy_parts(const char* name, SafetensorsWriter& writer);
  Result<void> copy_file(const fs::path& path, SafetensorsWriter& writer);
  Result<void> may_go_on();
  [[nodiscard]] float index_of(std::uint32_t key) const noexcept;
  void count_splits();

  const JoinOptions& options_;
  GraphSetInfo& info_;
  const std::function<bool()>& step_;
  std::span<GraphRecord> records_;
  std::span<std::byte> numbers_;
  std::span<std::byte> copy_;
};

Result<void> Join::may_go_on() {
  if (!step_()) {
    return fail(ErrorCode::kInvalidArgument, options_.path.string() + ": import cancelled");
  }
  return {};
}

// visit(records) for the graphs of one file, in order, some thousands at a time.
template <class Visit>
Result<void> Join::records_of(std::size_t file, Visit visit) {
  PLIMSOLL_TRY(const File from, File::open(side_file(options_.folder, file, kStreamNames[kGraphs]),
                                           FileMode::kRead));
  for (std::int64_t at = 0; at < info_.files[file].graphs;) {
    const std::int64_t count = std::min(kRecordsAtOnce, info_.files[file].graphs - at);
    const auto records = records_.first(static_cast<std::size_t>(count));
    PLIMSOLL_TRY_VOID(from.read_at(at * static_cast<std::int64_t>(sizeof(GraphRecord)),
                                   std::as_writable_bytes(records)));
    PLIMSOLL_TRY_VOID(visit(records));
    at += count;
  }
  return {};
}

template <class Visit>
Result<void> Join::each_graph(Visit visit) {
  for (std::size_t file = 0; file < info_.files.size(); ++file) {
    PLIMSOLL_TRY_VOID(may_go_on());
    const auto visit_all = [&](std::span<GraphRecord> records) -> Result<void> {
      for (const GraphRecord& record : records) {
        PLIMSOLL_TRY_VOID(visit(file, record));
      }
      return {};
    };
    PLIMSOLL_TRY_VOID(records_of(file, visit_all));
  }
  return {};
}

Result<void> Join::write_offsets(std::uint32_t GraphRecord::*count, const Sink& sink) {
  Numbers<std::int64_t> out(numbers_, sink);
  std::int64_t at = 0;
  PLIMSOLL_TRY_VOID(out.put(0));
  PLIMSOLL_TRY_VOID(each_graph([&](std::size_t, const GraphRecord& record) {
    at += record.*count;
    return out.put(at);
  }));
  return out.flush();
}

Result<void> Join::write_file_offsets(const Sink& sink) {
  Numbers<std::int64_t> out(numbers_, sink);
  std::int64_t at = 0;
  PLIMSOLL_TRY_VOID(out.put(0));
  for (const GraphFileInfo& file : info_.files) {
    at += file.graphs;
    PLIMSOLL_TRY_VOID(out.put(at));
  }
  return out.flush();
}

void Join::count_splits() {
  std::int64_t training = 0;
  info_.split_graphs = {};
  for (const GraphFileInfo& file : info_.files) {
    (file.test ? info_.split_graphs[static_cast<std::size_t>(GraphSplit::kTest)] : training) +=
        file.graphs;
  }
  constexpr double kRounding = 1e-9;  // 0.8 × 10 is 8, whatever the last bit says.
  const double kept =
      std::floor((1.0 - info_.validation) * static_cast<double>(training) + kRounding);
  info_.split_graphs[0] = std::clamp(static_cast<std::int64_t>(kept), std::int64_t{0}, training);
  info_.split_graphs[1] = training - info_.split_graphs[0];
}

// The graphs that train, ascending, then those held out of them, then those of test files.
Result<void> Join::write_splits(const Sink& sink) {
  const std::int64_t training = info_.split_graphs[0] + info_.split_graphs[1];
  const SampleOrder order(training, info_.seed, 0);
  Numbers<std::int64_t> out(numbers_, sink);
  for (std::size_t split = 0; split < kGraphSplits; ++split) {
    std::int64_t graph = 0;
    std::int64_t rank = 0;  // Among the graphs of training files.
    for (const GraphFileInfo& file : info_.files) {
      for (std::int64_t i = 0; i < file.graphs; ++i, ++graph) {
        const bool held_out = !file.test && order.position_of(rank++) >= info_.split_graphs[0];
        const std::size_t its = file.test ? 2 : held_out ? 1 : 0;
        if (its == split) {
          PLIMSOLL_TRY_VOID(out.put(graph));
        }
      }
    }
  }
  return out.flush();
}

Result<void> Join::write_vocabulary(const Sink& sink) {
  Numbers<std::int64_t> out(numbers_, sink);
  for (const std::uint32_t id : options_.vocabulary) {
    PLIMSOLL_TRY_VOID(out.put(id));
  }
  return out.flush();
}

Result<void> Join::write_labels(const Sink& sink) {
  Numbers<std::uint8_t> out(numbers_, sink);
  PLIMSOLL_TRY_VOID(each_graph([&](std::size_t, const GraphRecord& record) {
    return out.put(static_cast<std::uint8_t>(record.attack));
  }));
  return out.flush();
}

float Join::index_of(std::uint32_t key) const noexcept {
  const auto& ids = options_.vocabulary;
  const auto found = std::lower_bound(ids.begin(), ids.end(), key);
  const bool known = found != ids.end() && *found == key;
  return static_cast<float>(known ? found - ids.begin() : static_cast<std::ptrdiff_t>(ids.size()));
}

// Ids become indices; each graph's checksum then takes in its nodes.
Result<void> Join::write_some_nodes(const File& from, std::int64_t at,
                                    std::span<GraphRecord> graphs, std::int64_t bytes,
                                    Numbers<std::uint32_t>& sums, const Sink& sink) {
  const auto rows = copy_.first(static_cast<std::size_t>(bytes));
  PLIMSOLL_TRY_VOID(from.read_at(at, rows));
  std::size_t begin = 0;
  for (const GraphRecord& graph : graphs) {
    const auto own = rows.subspan(begin, graph.nodes * kNodeBytes);
    for (std::size_t row = 0; row < own.size(); row += kNodeBytes) {
      std::uint32_t key = 0;
      std::memcpy(&key, own.data() + row, sizeof(key));
      const float index = index_of(key);
      std::memcpy(own.data() + row, &index, sizeof(index));
    }
    PLIMSOLL_TRY_VOID(sums.put(crc32c(own, graph.crc)));
    begin += own.size();
  }
  return sink(rows);
}

Result<void> Join::write_nodes(SafetensorsWriter& writer) {
  PLIMSOLL_TRY(File sums_file, File::open(options_.folder / kChecksums, FileMode::kCreate));
  std::int64_t sums_at = 0;
  const Sink to_sums = [&](std::span<const std::byte> bytes) -> Result<void> {
    PLIMSOLL_TRY_VOID(sums_file.write_at(sums_at, bytes));
    sums_at += static_cast<std::int64_t>(bytes.size());
    return {};
  };
  const Sink to_set = [&](std::span<const std::byte> bytes) { return writer.write(bytes); };
  Numbers<std::uint32_t> sums(numbers_, to_sums);
  for (std::size_t file = 0; file < info_.files.size(); ++file) {
    const fs::path path = side_file(options_.folder, file, kStreamNames[kX]);
    PLIMSOLL_TRY(const File from, File::open(path, FileMode::kRead));
    std::int64_t at = 0;
    const auto write_all = [&](std::span<GraphRecord> records) -> Result<void> {
      PLIMSOLL_TRY_VOID(may_go_on());
      for (std::size_t begin = 0; begin < records.size();) {
        std::size_t end = begin;
        std::int64_t bytes = 0;
        const auto size = [&](std::size_t i) {
          return static_cast<std::int64_t>(records[i].nodes * kNodeBytes);
        };
        while (end < records.size() &&
               bytes + size(end) <= static_cast<std::int64_t>(copy_.size())) {
          bytes += size(end++);
        }
        PLIMSOLL_TRY_VOID(
            write_some_nodes(from, at, records.subspan(begin, end - begin), bytes, sums, to_set));
        at += bytes;
        begin = end;
      }
      return {};
    };
    PLIMSOLL_TRY_VOID(records_of(file, write_all));
    std::error_code ignored;
    fs::remove(path, ignored);
  }
  return sums.flush();
}

Result<void> Join::copy_file(const fs::path& path, SafetensorsWriter& writer) {
  {
    PLIMSOLL_TRY(const File from, File::open(path, FileMode::kRead));
    PLIMSOLL_TRY(const std::int64_t size, from.size());
    for (std::int64_t at = 0; at < size;) {
      PLIMSOLL_TRY_VOID(may_go_on());
      const auto part = copy_.first(
          static_cast<std::size_t>(std::min(size - at, static_cast<std::int64_t>(copy_.size()))));
      PLIMSOLL_TRY_VOID(from.read_at(at, part));
      PLIMSOLL_TRY_VOID(writer.write(part));
      at += static_cast<std::int64_t>(part.size());
    }
  }
  std::error_code ignored;
  fs::remove(path, ignored);
  return {};
}

Result<void> Join::copy_parts(const char* name, SafetensorsWriter& writer) {
  for (std::size_t file = 0; file < info_.files.size(); ++file) {
    PLIMSOLL_TRY_VOID(copy_file(side_file(options_.folder, file, name), writer));
  }
  return {};
}

// The index goes by twice: first for its checksum, which stands in the header before it.
Result<void> Join::run() {
  count_splits();
  const auto index = [&](const Sink& sink) -> Result<void> {
    PLIMSOLL_TRY_VOID(write_offsets(&GraphRecord::nodes, sink));
    PLIMSOLL_TRY_VOID(write_offsets(&GraphRecord::edges, sink));
    PLIMSOLL_TRY_VOID(write_file_offsets(sink));
    const auto& sizes = info_.split_graphs;
    const std::array<std::int64_t, kGraphSplits + 1> split_ptr{0, sizes[0], sizes[0] + sizes[1],
                                                               sizes[0] + sizes[1] + sizes[2]};
    PLIMSOLL_TRY_VOID(sink(std::as_bytes(std::span(split_ptr))));
    PLIMSOLL_TRY_VOID(write_splits(sink));
    return write_vocabulary(sink);
  };
  auto metadata = graph_metadata(info_);
  std::uint32_t crc = metadata_crc(metadata);
  const Sink to_crc = [&](std::span<const std::byte> bytes) -> Result<void> {
    crc = crc32c(bytes, crc);
    return {};
  };
  PLIMSOLL_TRY_VOID(index(to_crc));
  PLIMSOLL_TRY_VOID(write_labels(to_crc));
  metadata[kGraphIndexCrc] = fmt::format("{:010}", crc);  // Of one length, whatever it is.
  PLIMSOLL_TRY(SafetensorsWriter writer,
               SafetensorsWriter::create(options_.path, graph_tensor_specs(info_), metadata));
  const Sink to_set = [&](std::span<const std::byte> bytes) { return writer.write(bytes); };
  PLIMSOLL_TRY_VOID(index(to_set));
  PLIMSOLL_TRY_VOID(write_nodes(writer));
  PLIMSOLL_TRY_VOID(copy_parts(kStreamNames[kEdgeAttr], writer));
  PLIMSOLL_TRY_VOID(copy_file(options_.folder / kChecksums, writer));
  PLIMSOLL_TRY_VOID(copy_parts(kStreamNames[kEdges], writer));
  PLIMSOLL_TRY_VOID(write_labels(to_set));
  return writer.finish();
}

}  // namespace

std::int64_t join_buffer_bytes(std::int64_t window) noexcept {
  return kRecordsAtOnce * static_cast<std::int64_t>(sizeof(GraphRecord) + 8) +
         std::max(kCopyBytes, (window + 1) * static_cast<std::int64_t>(kNodeBytes));
}

Result<void> join_parts(const JoinOptions& options, GraphSetInfo& info,
                        const std::function<bool()>& step) {
  return Join(options, info, step).run();
}

}  // namespace plimsoll
