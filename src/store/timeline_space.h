// SPDX-License-Identifier: Apache-2.0
//
// TimelineSpace: which segments of rows.dat each bucket's stream is made of, and what is in them.
//
// A stream is a chain of segments, filled from the front with extents, never rewritten. A segment
// belongs to one stream. It is in use by the working state, by the commit in superblock slot 0, by
// the one in slot 1, or by none: only the last kind is taken, so a commit's streams stay whole
// until two newer commits exist.
//
//   streams: 2 sides × buckets; side() tells which of the two is being read
//
// Reading order: timeline_format.h, this file, timeline_io.h.
//
// Threads: single-owner, but for Stream's marks and writing, which TimelineIo guards, and for
//          readers of a stream to which nobody appends.
// Memory:  memory_bytes(), from the slab.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "memory/slab.h"
#include "store/timeline_format.h"

namespace plimsoll {

class TimelineSpace {
 public:
  static constexpr std::uint32_t kNone = 0xFFFFFFFFU;

  struct Sizes {
    std::int64_t nodes{0};          // Of kNodeExtents extents each.
    std::int64_t nodes_reserve{0};  // Below so many free ones a stream must be folded.
    std::int64_t segments{0};       // The file's most.
    std::int64_t segments_soft{0};  // Above so many in use a stream must be folded.
    friend bool operator==(const Sizes&, const Sizes&) = default;
  };
  struct Stream {
    std::uint32_t extents{0};
    std::uint32_t segments{0};
    std::uint32_t first_node{kNone};
    std::uint32_t last_node{kNone};
    std::uint32_t first_segment{kNone};
    std::uint32_t last_segment{kNone};
    std::uint32_t rows{0};
    std::uint32_t live{0};  // Different rows, those in an open chunk included.
    std::int64_t bytes{0};
    std::uint64_t marks{0};    // Guarded by TimelineIo.
    std::uint32_t writing{0};  // Extents on their way to the disk; guarded by TimelineIo.
    bool sorted{true};
  };
  /// Where an extent begins.
  struct Extent {
    std::uint32_t index{0};
    std::uint32_t segment{kNone};
    std::int64_t at{0};  // In that segment.
  };
  /// Walks the extents of a stream.
  struct Walk {
    Extent extent{};
    std::int64_t offset{0};     // In the stream.
    std::int64_t rows_seen{0};  // Before this extent.
    std::uint32_t node{kNone};
    std::uint32_t in_node{0};
  };

  /// The same for every slab, so that any slab can open what another has written.
  static Sizes sizes(const TimelineShape& shape) noexcept;
  static std::int64_t memory_bytes(const TimelineShape& shape, const Sizes& sizes) noexcept;
  /// The largest map.
  static std::int64_t map_bytes_most(const TimelineShape& shape, const Sizes& sizes) noexcept;

  TimelineSpace() = default;
  TimelineSpace(const TimelineShape& shape, const Sizes& sizes, Slab& slab);

  [[nodiscard]] Stream& stream(int side, std::int64_t bucket) noexcept {
    return streams_[static_cast<std::size_t>(side * shape_.buckets + bucket)];
  }

  /// Room for one more extent. Errors: kInternal never; kIo when the file's bound is reached.
  Result<Extent> append(Stream& stream, std::uint32_t rows);
  /// Gives up all that the working state has of a stream.
  void clear(Stream& stream) noexcept;

  [[nodiscard]] Walk begin(const Stream& stream) const noexcept;
  [[nodiscard]] std::uint32_t rows(const Walk& walk) const noexcept;
  void next(Walk& walk) const noexcept;
  /// Moves a place within a stream on by `bytes`.
  void skip(Extent& extent, std::int64_t bytes) const noexcept;

  /// Calls visit(file offset, bytes) for the parts of `bytes`, which begin at `extent`.
  template <class Bytes, class Visit>
  Result<void> pieces(Extent extent, Bytes bytes, Visit&& visit) const {
    while (!bytes.empty()) {
      const auto left = static_cast<std::size_t>(shape_.segment_bytes - extent.at);
      const auto part = bytes.first(bytes.size() < left ? bytes.size() : left);
      if (auto done = visit(extent.segment * shape_.segment_bytes + extent.at, part); !done) {
        return done;
      }
      bytes = bytes.subspan(part.size());
      extent.segment = bytes.empty() ? kNone : next_[extent.segment];
      extent.at = 0;
    }
    return {};
  }

  [[nodiscard]] bool wants_nodes() const noexcept { return nodes_free_ < sizes_.nodes_reserve; }
  [[nodiscard]] bool wants_segments() const noexcept { return used_ > sizes_.segments_soft; }
  [[nodiscard]] std::int64_t used_segments() const noexcept { return used_; }

  /// Writes the map of the working state to `out`; returns its part, padded to kBlockUnit.
  std::span<std::byte> save(const TimelineState& state, int source_side,
                            std::span<std::byte> out) noexcept;
  /// Takes a map as the working state and as that of `slot`; the source gets side 0.
  /// Errors: kCorrupt (no path in the text).
  Result<TimelineState> adopt(int slot, std::span<const std::byte> map);
  /// Marks the segments of the other commit. Errors: as adopt().
  Result<void> keep(int slot, std::span<const std::byte> map);
  void committed(int slot) noexcept;
  void forget(int slot) noexcept;

 private:
  static constexpr std::size_t kNodeExtents = 15;
  struct Node {
    std::uint32_t next;
    std::array<std::uint32_t, kNodeExtents> rows;
  };
  static constexpr std::uint8_t kWorking = 1;
  [[nodiscard]] static std::uint8_t bit(int slot) noexcept {
    return static_cast<std::uint8_t>(slot == 0 ? 2 : 4);
  }
  std::uint32_t take_segment() noexcept;
  void add_extent(Stream& stream, std::uint32_t rows) noexcept;

  TimelineShape shape_{};
  Sizes sizes_{};
  std::span<Stream> streams_{};
  std::span<Node> nodes_{};
  std::span<std::uint32_t> next_{};  // By segment: the next of its stream.
  std::span<std::uint8_t> refs_{};   // By segment: who uses it.
  std::uint32_t free_node_{kNone};
  std::int64_t nodes_free_{0};
  std::size_t lowest_{0};  // No segment below is free: the file stays as short as it can.
  std::int64_t used_{0};   // Segments of the working state.
};

/// The parts of a map, checked against its size. Errors: kCorrupt (no path in the text).
struct MapView {
  TimelineState state{};
  std::span<const StreamRecord> streams{};
  std::span<const std::uint32_t> extents{};
  std::span<const std::uint32_t> segments{};
};
Result<MapView> view_map(const TimelineShape& shape, std::span<const std::byte> map);

}  // namespace plimsoll
