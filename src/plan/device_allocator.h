// SPDX-License-Identifier: Apache-2.0
//
// DeviceAllocator: where a CUDA device's caching allocator would put blocks, without a device.
//
// It keeps segments, bought from the device and kept until empty_cache(), and cuts blocks from
// them. The rules, in our words, of the native backend with its default settings (no expandable
// segments, no bound on splitting, one stream):
//
//   size       rounded up to 512 bytes
//   segment    a block up to 1 MiB is cut from one of 2 MiB (the small pool); one below 10 MiB from
//              one of 20 MiB; a larger one gets a segment of its own, rounded up to 2 MiB
//   fit        the smallest free piece of the pool that is large enough; of equals the lowest
//   split      the block takes the front; what remains is a free piece of its own when it is at
//              least 512 bytes (small pool) or more than 1 MiB; otherwise the block has it too
//   free       joins the free pieces before and behind it in its segment
//   limit      a segment that would pass it: every segment that is wholly free is given back, and
//              if it still would, the request is refused
//
// Source: PyTorch's "CUDA semantics: memory management" and c10/cuda/CUDACachingAllocator.cpp.
// Segments get ascending addresses that are never used again; a driver may choose otherwise, which
// matters only between free pieces of equal size.
// Reading order: this file, device_replay.h.
//
// Threads: single-owner.
// Memory:  40 bytes a piece in a vector that doubles, and a tree's node of 64 while it is free.
//          There is a piece for each block, at most one free piece more than blocks in a segment,
//          and a segment has at least 2 MiB: at most 240 bytes for a block, and as much for every
//          2 MiB reserved.
#pragma once

#include <array>
#include <cstdint>
#include <set>
#include <vector>

#include "plimsoll/result.h"

namespace plimsoll {

inline constexpr std::int64_t kSegmentUnit = 2LL << 20;  ///< Reserved bytes are multiples of this.

/// What a device's allocator holds, in bytes.
struct DeviceMemoryStats {
  std::int64_t allocated_bytes{0};       ///< In blocks, as rounded and cut.
  std::int64_t allocated_peak_bytes{0};  ///< Highest since reset_peak().
  std::int64_t reserved_bytes{0};        ///< In segments.
  std::int64_t reserved_peak_bytes{0};   ///< Highest since reset_peak().
  std::int64_t fragmentation_bytes{0};  ///< Reserved − allocated, when reserved reached its peak.
  std::int64_t segments{0};
  std::int64_t largest_free_bytes{0};  ///< The largest free piece of a segment.
};

/// A part of a segment, for those who look at the whole.
struct DevicePiece {
  std::int64_t segment{0};  ///< The segment's address.
  std::int64_t address{0};
  std::int64_t bytes{0};
  bool small{false};  ///< Of the small pool.
  bool allocated{false};
};

class DeviceAllocator {
 public:
  /// A block that was handed out.
  enum class Block : std::int32_t {};

  explicit DeviceAllocator(std::int64_t limit_bytes = INT64_MAX) noexcept : limit_(limit_bytes) {}

  /// Requires: bytes > 0. Errors: kOverBudget; then blocks are as before, and what was cached has
  /// been given back, as on a device.
  Result<Block> allocate(std::int64_t bytes);

  /// Requires: a block handed out and not yet taken back.
  void free(Block block);

  /// Gives back every segment without a block; returns their bytes.
  std::int64_t empty_cache();

  void reset_peak() noexcept;

  /// For the segments from now on; what is reserved already stays.
  void set_limit(std::int64_t limit_bytes) noexcept { limit_ = limit_bytes; }
  [[nodiscard]] std::int64_t limit_bytes() const noexcept { return limit_; }

  [[nodiscard]] DeviceMemoryStats stats() const noexcept;
  [[nodiscard]] DevicePiece piece_of(Block block) const;
  /// Every piece, by address.
  [[nodiscard]] std::vector<DevicePiece> pieces() const;

 private:
  static constexpr std::int32_t kNone = -1;

  struct Piece {
    std::int64_t segment{0};
    std::int64_t address{0};
    std::int64_t bytes{0};       // 0: not in use, an entry of spare_.
    std::int32_t before{kNone};  // Its neighbours in the segment.
    std::int32_t behind{kNone};
    bool small{false};
    bool allocated{false};
  };
  static_assert(sizeof(Piece) == 40);
  struct Free {
    std::int64_t bytes;
    std::int64_t address;
    std::int32_t piece;
    friend bool operator<(const Free& x, const Free& y) noexcept {
      return x.bytes != y.bytes ? x.bytes < y.bytes : x.address < y.address;
    }
  };

  Piece& at(std::int32_t piece) { return pieces_[static_cast<std::size_t>(piece)]; }
  std::set<Free>& pool(bool small) { return free_[small ? 1 : 0]; }
  std::int32_t add_piece(const Piece& piece);
  void drop_piece(std::int32_t piece);
  void show(std::int32_t piece);  // Among the free pieces of its pool.
  void hide(std::int32_t piece);
  Result<std::int32_t> find(std::int64_t bytes, bool small);
  Result<std::int32_t> buy_segment(std::int64_t bytes, bool small);
  void split(std::int32_t piece, std::int64_t bytes);
  void join(std::int32_t front, std::int32_t back);

  std::vector<Piece> pieces_;
  std::vector<std::int32_t> spare_;
  std::array<std::set<Free>, 2> free_;  // Large, small.
  DeviceMemoryStats stats_;
  std::int64_t limit_;
  std::int64_t next_address_{kSegmentUnit};
};

/// What a block of so many bytes takes when it fits exactly: a multiple of 512.
[[nodiscard]] std::int64_t device_block_bytes(std::int64_t bytes) noexcept;

/// The segment that is bought for a block of so many bytes, where no free piece holds it.
[[nodiscard]] std::int64_t device_segment_bytes(std::int64_t bytes) noexcept;

}  // namespace plimsoll
