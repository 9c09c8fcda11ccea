// SPDX-License-Identifier: Apache-2.0
//
// See device_allocator.h. Order here: sizes, handing out, taking back, looking.
#include "plan/device_allocator.h"

#include <algorithm>

#include "base/check.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kUnit = 512;
constexpr std::int64_t kSmallMax = 1LL << 20;        // The largest block of the small pool.
constexpr std::int64_t kOwnSegment = 10LL << 20;     // From here a block has a segment of its own.
constexpr std::int64_t kSharedSegment = 20LL << 20;  // What blocks between the two are cut from.
constexpr std::int64_t kBlockMax = INT64_MAX / 4;    // So that no sum passes 64 bits.

std::int64_t rounded_up(std::int64_t bytes, std::int64_t unit) noexcept {
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

std::int64_t device_block_bytes(std::int64_t bytes) noexcept {
  return std::max(kUnit, rounded_up(bytes, kUnit));
}

std::int64_t device_segment_bytes(std::int64_t bytes) noexcept {
  const std::int64_t block = device_block_bytes(bytes);
  if (block <= kSmallMax) {
    return kSegmentUnit;
  }
  return block < kOwnSegment ? kSharedSegment : rounded_up(block, kSegmentUnit);
}

// ---- Handing out ----

Result<DeviceAllocator::Block> DeviceAllocator::allocate(std::int64_t bytes) {
  PLIMSOLL_CHECK(bytes > 0 && bytes < kBlockMax, "a device's block has between 1 and 2^61 bytes");
  const std::int64_t block = device_block_bytes(bytes);
  const bool small = block <= kSmallMax;
  PLIMSOLL_TRY(const std::int32_t piece, find(block, small));
  const std::int64_t remains = at(piece).bytes - block;
  if (small ? remains >= kUnit : remains > kSmallMax) {
    split(piece, block);
  }
  at(piece).allocated = true;
  stats_.allocated_bytes += at(piece).bytes;
  stats_.allocated_peak_bytes = std::max(stats_.allocated_peak_bytes, stats_.allocated_bytes);
  if (stats_.reserved_bytes > stats_.reserved_peak_bytes) {
    stats_.reserved_peak_bytes = stats_.reserved_bytes;
    stats_.fragmentation_bytes = stats_.reserved_bytes - stats_.allocated_bytes;
  }
  return Block{piece};
}

// A free piece for a block, taken from its pool.
Result<std::int32_t> DeviceAllocator::find(std::int64_t bytes, bool small) {
  const auto found = pool(small).lower_bound(Free{bytes, 0, kNone});
  if (found != pool(small).end()) {
    const std::int32_t piece = found->piece;
    pool(small).erase(found);
    return piece;
  }
  const std::int64_t segment = device_segment_bytes(bytes);
  if (stats_.reserved_bytes > limit_ - segment) {
    empty_cache();
  }
  return buy_segment(bytes, small);
}

Result<std::int32_t> DeviceAllocator::buy_segment(std::int64_t bytes, bool small) {
  const std::int64_t segment = device_segment_bytes(bytes);
  if (stats_.reserved_bytes > limit_ - segment) {
    Error error;
    error.code = ErrorCode::kOverBudget;
    error.tag = Tag::kTensor;
    error.requested_bytes = segment;
    error.available_bytes = std::max<std::int64_t>(0, limit_ - stats_.reserved_bytes);
    error.limit_bytes = limit_;
    error.smallest_limit_bytes = stats_.reserved_bytes + segment;
    error.advice = "raise --device-memory-limit, or lower the batch size";
    return tl::unexpected(std::move(error));
  }
  const std::int32_t piece = add_piece(
      {.segment = next_address_, .address = next_address_, .bytes = segment, .small = small});
  next_address_ += segment;
  stats_.reserved_bytes += segment;
  ++stats_.segments;
  return piece;
}

// The front stays `piece`; the back becomes a free piece.
void DeviceAllocator::split(std::int32_t piece, std::int64_t bytes) {
  Piece rest = at(piece);
  rest.address += bytes;
  rest.bytes -= bytes;
  rest.before = piece;
  const std::int32_t back = add_piece(rest);
  if (rest.behind != kNone) {
    at(rest.behind).before = back;
  }
  at(piece).bytes = bytes;
  at(piece).behind = back;
  show(back);
}

// ---- Taking back ----

void DeviceAllocator::free(Block block) {
  const auto piece = static_cast<std::int32_t>(block);
  PLIMSOLL_CHECK(
      piece >= 0 && static_cast<std::size_t>(piece) < pieces_.size() && at(piece).allocated,
      "a device's block is taken back once");
  at(piece).allocated = false;
  stats_.allocated_bytes -= at(piece).bytes;
  if (const std::int32_t behind = at(piece).behind; behind != kNone && !at(behind).allocated) {
    hide(behind);
    join(piece, behind);
  }
  std::int32_t front = piece;
  if (const std::int32_t before = at(piece).before; before != kNone && !at(before).allocated) {
    hide(before);
    join(before, piece);
    front = before;
  }
  show(front);
}

void DeviceAllocator::join(std::int32_t front, std::int32_t back) {
  at(front).bytes += at(back).bytes;
  at(front).behind = at(back).behind;
  if (at(front).behind != kNone) {
    at(at(front).behind).before = front;
  }
  drop_piece(back);
}

std::int64_t DeviceAllocator::empty_cache() {
  std::int64_t given_back = 0;
  for (auto& pool : free_) {
    for (auto free = pool.begin(); free != pool.end();) {
      const Piece& piece = at(free->piece);
      if (piece.before != kNone || piece.behind != kNone) {
        ++free;
        continue;
      }
      given_back += piece.bytes;
      --stats_.segments;
      drop_piece(free->piece);
      free = pool.erase(free);
    }
  }
  stats_.reserved_bytes -= given_back;
  return given_back;
}

void DeviceAllocator::reset_peak() noexcept {
  stats_.allocated_peak_bytes = stats_.allocated_bytes;
  stats_.reserved_peak_bytes = stats_.reserved_bytes;
  stats_.fragmentation_bytes = stats_.reserved_bytes - stats_.allocated_bytes;
}

// ---- The table of pieces ----

std::int32_t DeviceAllocator::add_piece(const Piece& piece) {
  if (spare_.empty()) {
    pieces_.push_back(piece);
    return static_cast<std::int32_t>(pieces_.size() - 1);
  }
  const std::int32_t index = spare_.back();
  spare_.pop_back();
  at(index) = piece;
  return index;
}

void DeviceAllocator::drop_piece(std::int32_t piece) {
  at(piece) = Piece{};
  spare_.push_back(piece);
}

void DeviceAllocator::show(std::int32_t piece) {
  pool(at(piece).small).insert({at(piece).bytes, at(piece).address, piece});
}

void DeviceAllocator::hide(std::int32_t piece) {
  pool(at(piece).small).erase({at(piece).bytes, at(piece).address, piece});
}

// ---- Looking ----

DeviceMemoryStats DeviceAllocator::stats() const noexcept {
  DeviceMemoryStats now = stats_;
  for (const auto& pool : free_) {
    if (!pool.empty()) {
      now.largest_free_bytes = std::max(now.largest_free_bytes, pool.rbegin()->bytes);
    }
  }
  return now;
}

DevicePiece DeviceAllocator::piece_of(Block block) const {
  const Piece& piece = pieces_.at(static_cast<std::size_t>(block));
  return {piece.segment, piece.address, piece.bytes, piece.small, piece.allocated};
}

std::vector<DevicePiece> DeviceAllocator::pieces() const {
  std::vector<DevicePiece> all;
  for (const Piece& piece : pieces_) {
    if (piece.bytes > 0) {
      all.push_back({piece.segment, piece.address, piece.bytes, piece.small, piece.allocated});
    }
  }
  std::sort(all.begin(), all.end(),
            [](const auto& x, const auto& y) { return x.address < y.address; });
  return all;
}

}  // namespace plimsoll
