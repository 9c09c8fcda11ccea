// SPDX-License-Identifier: Apache-2.0
#include "store/timeline_space.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/round.h"

namespace plimsoll {
namespace {

Result<void> corrupt(const char* why) {
  return fail(ErrorCode::kCorrupt, why);
}

Result<TimelineState> state_of(const TimelineShape& shape, const MapHeader& header,
                               std::span<const std::byte> map) {
  MapGrowth growth{.rows = shape.rows,
                   .source_rows = shape.rows,
                   .parent_rows = shape.rows,
                   .target_rows = shape.rows,
                   .new_ids = 0,
                   .reserved = 0};
  if (shape.grows) {
    std::memcpy(&growth, map.data() + sizeof header, sizeof growth);
    for (const std::int64_t rows : {growth.source_rows, growth.parent_rows, growth.target_rows}) {
      if (rows < 0 || rows > growth.rows) {
        PLIMSOLL_TRY_VOID(corrupt("has an epoch of more rows than there are"));
      }
    }
  }
  if (growth.rows < 0 || growth.rows > shape.rows || header.cursor < 0 ||
      header.cursor > growth.rows) {
    PLIMSOLL_TRY_VOID(corrupt("does not fit its rows"));
  }
  return TimelineState{.source = {header.source.seed, header.source.epoch, growth.source_rows},
                       .parent = {header.parent.seed, header.parent.epoch, growth.parent_rows},
                       .target = {header.target.seed, header.target.epoch, growth.target_rows},
                       .cursor = header.cursor,
                       .rows = growth.rows,
                       .new_ids = growth.new_ids};
}

}  // namespace

// Full extents of all rows, doubled for short ones; and 64 short ones (one per commit of an epoch,
// say) of each bucket, until folding has to make room.
TimelineSpace::Sizes TimelineSpace::sizes(const TimelineShape& shape) noexcept {
  const std::int64_t chunk_bytes = chunk_bytes_least(shape.record_bytes);
  const auto per_node = static_cast<std::int64_t>(kNodeExtents);
  const std::int64_t full =
      divide_up(shape.rows, extent_rows(shape.record_bytes, chunk_bytes)) + 2 * shape.buckets;
  const std::int64_t extents = 2 * full + 64 * shape.buckets;
  Sizes sizes;
  sizes.nodes_reserve = 2 * shape.buckets + 32;
  sizes.nodes = divide_up(extents, per_node) + 2 * shape.buckets + 2 * sizes.nodes_reserve;
  // A quarter more than the rows alone, and a segment half used at the end of every stream.
  const std::int64_t bucket = divide_up(shape.bucket_rows * shape.record_bytes * 5 / 4 +
                                            2 * extent_bytes_most(shape.record_bytes),
                                        shape.segment_bytes) +
                              2;
  const std::int64_t data =
      divide_up(shape.rows * shape.record_bytes / 4 * 5 + full * kBlockUnit, shape.segment_bytes);
  const std::int64_t tails =
      2 * shape.buckets *
      std::max<std::int64_t>(1, extent_bytes_most(shape.record_bytes) / shape.segment_bytes / 4);
  sizes.segments_soft = data + tails + bucket;
  const std::int64_t commit =
      2 * shape.buckets *
          (1 + divide_up(extent_bytes_most(shape.record_bytes), shape.segment_bytes)) +
      8;
  sizes.segments = 3 * (sizes.segments_soft + 2 * bucket + commit);
  return sizes;
}

std::int64_t TimelineSpace::memory_bytes(const TimelineShape& shape, const Sizes& sizes) noexcept {
  return 2 * shape.buckets * static_cast<std::int64_t>(sizeof(Stream)) +
         sizes.nodes * static_cast<std::int64_t>(sizeof(Node)) + sizes.segments * 5 + 4 * 64;
}

std::int64_t TimelineSpace::map_bytes_most(const TimelineShape& shape,
                                           const Sizes& sizes) noexcept {
  return round_to_block(static_cast<std::int64_t>(map_head_bytes(shape)) +
                        2 * shape.buckets * static_cast<std::int64_t>(sizeof(StreamRecord)) +
                        4 * static_cast<std::int64_t>(kNodeExtents) * sizes.nodes +
                        4 * (sizes.segments / 3));
}

TimelineSpace::TimelineSpace(const TimelineShape& shape, const Sizes& sizes, Slab& slab)
    : shape_(shape), sizes_(sizes) {
  streams_ = slab.take<Stream>(2 * shape.buckets);
  nodes_ = slab.take<Node>(sizes.nodes);
  next_ = slab.take<std::uint32_t>(sizes.segments);
  refs_ = slab.take<std::uint8_t>(sizes.segments);
  std::fill(streams_.begin(), streams_.end(), Stream{});
  for (std::size_t i = nodes_.size(); i-- > 0;) {
    nodes_[i].next = free_node_;
    free_node_ = static_cast<std::uint32_t>(i);
  }
  nodes_free_ = sizes.nodes;
}

// The next free segment after the last one taken, so that writes stay near each other.
std::uint32_t TimelineSpace::take_segment() noexcept {
  while (lowest_ < refs_.size() && refs_[lowest_] != 0) {
    ++lowest_;
  }
  if (lowest_ == refs_.size()) {
    return kNone;
  }
  const auto segment = static_cast<std::uint32_t>(lowest_++);
  refs_[segment] = kWorking;
  next_[segment] = kNone;
  ++used_;
  return segment;
}

// Requires: a free node, if the stream's last one is full.
void TimelineSpace::add_extent(Stream& stream, std::uint32_t rows) noexcept {
  const std::size_t in_node = stream.extents % kNodeExtents;
  if (in_node == 0) {
    const std::uint32_t node = free_node_;
    free_node_ = nodes_[node].next;
    --nodes_free_;
    nodes_[node].next = kNone;
    (stream.extents == 0 ? stream.first_node : nodes_[stream.last_node].next) = node;
    stream.last_node = node;
  }
  nodes_[stream.last_node].rows[in_node] = rows;
  ++stream.extents;
  stream.rows += rows;
  stream.bytes += extent_bytes(shape_.record_bytes, rows);
}

Result<TimelineSpace::Extent> TimelineSpace::append(Stream& stream, std::uint32_t rows) {
  PLIMSOLL_CHECK(nodes_free_ > 0, "no room for the list of extents");
  const std::int64_t end = stream.bytes + extent_bytes(shape_.record_bytes, rows);
  const std::int64_t at = stream.bytes % shape_.segment_bytes;
  const bool in_last = stream.bytes < stream.segments * shape_.segment_bytes;
  Extent extent{.index = stream.extents, .segment = stream.last_segment, .at = in_last ? at : 0};
  for (bool first = !in_last; stream.segments * shape_.segment_bytes < end; first = false) {
    const std::uint32_t segment = take_segment();
    if (segment == kNone) {
      return fail(ErrorCode::kInternal, "the bound of rows.dat was reached");
    }
    (stream.segments == 0 ? stream.first_segment : next_[stream.last_segment]) = segment;
    stream.last_segment = segment;
    ++stream.segments;
    extent.segment = first ? segment : extent.segment;
  }
  add_extent(stream, rows);
  return extent;
}

void TimelineSpace::clear(Stream& stream) noexcept {
  for (std::uint32_t segment = stream.first_segment; segment != kNone; segment = next_[segment]) {
    refs_[segment] = static_cast<std::uint8_t>(refs_[segment] & ~kWorking);
    lowest_ = std::min<std::size_t>(lowest_, segment);
    --used_;
  }
  for (std::uint32_t node = stream.first_node; node != kNone;) {
    const std::uint32_t after = nodes_[node].next;
    nodes_[node].next = free_node_;
    free_node_ = node;
    ++nodes_free_;
    node = after;
  }
  stream = Stream{};
}

TimelineSpace::Walk TimelineSpace::begin(const Stream& stream) const noexcept {
  return {.extent = {.index = 0, .segment = stream.first_segment, .at = 0},
          .offset = 0,
          .rows_seen = 0,
          .node = stream.first_node,
          .in_node = 0};
}

std::uint32_t TimelineSpace::rows(const Walk& walk) const noexcept {
  return nodes_[walk.node].rows[walk.in_node];
}

void TimelineSpace::skip(Extent& extent, std::int64_t bytes) const noexcept {
  extent.at += bytes;
  while (extent.at >= shape_.segment_bytes && extent.segment != kNone) {
    extent.segment = next_[extent.segment];
    extent.at -= shape_.segment_bytes;
  }
}

void TimelineSpace::next(Walk& walk) const noexcept {
  const std::uint32_t passed = rows(walk);
  const std::int64_t bytes = extent_bytes(shape_.record_bytes, passed);
  walk.rows_seen += passed;
  walk.offset += bytes;
  skip(walk.extent, bytes);
  ++walk.extent.index;
  if (++walk.in_node == kNodeExtents) {
    walk.node = nodes_[walk.node].next;
    walk.in_node = 0;
  }
}

// ---- Maps -------------------------------------------------------------------------------------

std::span<std::byte> TimelineSpace::save(const TimelineState& state, int source_side,
                                         std::span<std::byte> out) noexcept {
  const auto record = [](const EpochKey& key) { return EpochRecord{key.seed, key.epoch}; };
  MapHeader header{.magic = kTimelineMapMagic,
                   .source = record(state.source),
                   .parent = record(state.parent),
                   .target = record(state.target),
                   .cursor = state.cursor,
                   .bytes = 0,
                   .extents = 0,
                   .segments = 0};
  if (shape_.grows) {
    const MapGrowth growth{.rows = state.rows,
                           .source_rows = state.source.rows,
                           .parent_rows = state.parent.rows,
                           .target_rows = state.target.rows,
                           .new_ids = state.new_ids,
                           .reserved = 0};
    std::memcpy(out.data() + sizeof header, &growth, sizeof growth);
  }
  std::byte* at = out.data() + map_head_bytes(shape_);
  const auto each = [&](const auto& visit) {
    for (const int side : {source_side, 1 - source_side}) {
      for (std::int64_t bucket = 0; bucket < shape_.buckets; ++bucket) {
        visit(stream(side, bucket));
      }
    }
  };
  const auto put = [&at](const auto& value) {
    std::memcpy(at, &value, sizeof value);
    at += sizeof value;
  };
  each([&](const Stream& s) {
    header.extents += s.extents;
    header.segments += s.segments;
    put(StreamRecord{.extents = s.extents,
                     .segments = s.segments,
                     .rows = s.rows,
                     .live = s.live,
                     .sorted = s.sorted ? 1U : 0U,
                     .reserved = 0,
                     .marks = s.marks});
  });
  each([&](const Stream& s) {
    std::uint32_t node = s.first_node;
    for (std::uint32_t done = 0; done < s.extents; node = nodes_[node].next) {
      for (std::size_t i = 0; i < kNodeExtents && done < s.extents; ++i, ++done) {
        put(nodes_[node].rows[i]);
      }
    }
  });
  each([&](const Stream& s) {
    for (std::uint32_t segment = s.first_segment; segment != kNone; segment = next_[segment]) {
      put(segment);
    }
  });
  header.bytes = round_to_block(at - out.data());
  std::memset(at, 0, static_cast<std::size_t>(header.bytes - (at - out.data())));
  std::memcpy(out.data(), &header, sizeof header);
  return out.first(static_cast<std::size_t>(header.bytes));
}

Result<MapView> view_map(const TimelineShape& shape, std::span<const std::byte> map) {
  MapView view;
  const auto streams = static_cast<std::size_t>(2 * shape.buckets);
  const std::size_t fixed = map_head_bytes(shape) + streams * sizeof(StreamRecord);
  if (map.size() < fixed) {
    PLIMSOLL_TRY_VOID(corrupt("is too short"));
  }
  MapHeader header;
  std::memcpy(&header, map.data(), sizeof header);
  const std::size_t room = (map.size() - fixed) / 4;
  if (header.magic != kTimelineMapMagic || header.extents > room || header.segments > room ||
      header.extents + header.segments > room) {
    PLIMSOLL_TRY_VOID(corrupt("does not fit its header"));
  }
  PLIMSOLL_TRY(view.state, state_of(shape, header, map));
  const std::byte* at = map.data() + map_head_bytes(shape);
  view.streams = {reinterpret_cast<const StreamRecord*>(at), streams};
  at += view.streams.size_bytes();
  view.extents = {reinterpret_cast<const std::uint32_t*>(at),
                  static_cast<std::size_t>(header.extents)};
  at += view.extents.size_bytes();
  view.segments = {reinterpret_cast<const std::uint32_t*>(at),
                   static_cast<std::size_t>(header.segments)};
  std::size_t extents = 0;
  std::size_t segments = 0;
  for (const StreamRecord& record : view.streams) {
    if (record.extents > header.extents - extents || record.segments > header.segments - segments) {
      PLIMSOLL_TRY_VOID(corrupt("has streams beyond its end"));
    }
    std::int64_t bytes = 0;
    std::uint64_t rows = 0;
    for (const std::uint32_t n : view.extents.subspan(extents, record.extents)) {
      if (n == 0 || extent_bytes(shape.record_bytes, n) > extent_bytes_most(shape.record_bytes)) {
        PLIMSOLL_TRY_VOID(corrupt("has an extent of an impossible size"));
      }
      bytes += extent_bytes(shape.record_bytes, n);
      rows += n;
    }
    if (rows != record.rows || record.live > record.rows ||
        (bytes + shape.segment_bytes - 1) / shape.segment_bytes != record.segments) {
      PLIMSOLL_TRY_VOID(corrupt("has a stream that does not fit its segments"));
    }
    extents += record.extents;
    segments += record.segments;
  }
  if (extents != header.extents || segments != header.segments) {
    PLIMSOLL_TRY_VOID(corrupt("does not fit its streams"));
  }
  return view;
}

Result<TimelineState> TimelineSpace::adopt(int slot, std::span<const std::byte> map) {
  PLIMSOLL_TRY(const MapView view, view_map(shape_, map));
  const std::uint32_t* extent = view.extents.data();
  const std::uint32_t* segment = view.segments.data();
  std::size_t at = 0;
  for (const StreamRecord& record : view.streams) {
    Stream& s = streams_[at++];
    s = Stream{};
    const auto nodes =
        static_cast<std::int64_t>((record.extents + kNodeExtents - 1) / kNodeExtents);
    if (nodes > nodes_free_) {
      return fail(ErrorCode::kOverBudget, "has more extents than this slab can list",
                  "raise store_bytes");
    }
    for (std::uint32_t i = 0; i < record.extents; ++i) {
      add_extent(s, *extent++);
    }
    for (std::uint32_t i = 0; i < record.segments; ++i, ++segment) {
      if (*segment >= refs_.size() || (refs_[*segment] & kWorking) != 0) {
        PLIMSOLL_TRY_VOID(corrupt("names a segment that is out of range, or twice"));
      }
      refs_[*segment] = static_cast<std::uint8_t>(refs_[*segment] | kWorking | bit(slot));
      next_[*segment] = kNone;
      (i == 0 ? s.first_segment : next_[s.last_segment]) = *segment;
      s.last_segment = *segment;
      ++used_;
    }
    s.segments = record.segments;
    s.live = record.live;
    s.marks = record.marks;
    s.sorted = record.sorted == 1;
  }
  return view.state;
}

Result<void> TimelineSpace::keep(int slot, std::span<const std::byte> map) {
  PLIMSOLL_TRY(const MapView view, view_map(shape_, map));
  for (const std::uint32_t segment : view.segments) {
    if (segment >= refs_.size() || (refs_[segment] & bit(slot)) != 0) {
      return corrupt("names a segment that is out of range, or twice");
    }
    refs_[segment] = static_cast<std::uint8_t>(refs_[segment] | bit(slot));
  }
  return {};
}

void TimelineSpace::committed(int slot) noexcept {
  for (std::uint8_t& ref : refs_) {
    ref = static_cast<std::uint8_t>((ref & ~bit(slot)) | ((ref & kWorking) != 0 ? bit(slot) : 0));
  }
  lowest_ = 0;
}

void TimelineSpace::forget(int slot) noexcept {
  for (std::uint8_t& ref : refs_) {
    ref = static_cast<std::uint8_t>(ref & ~bit(slot));
  }
  lowest_ = 0;
}

}  // namespace plimsoll
