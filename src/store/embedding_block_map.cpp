// SPDX-License-Identifier: Apache-2.0
#include "store/embedding_block_map.h"

#include <algorithm>
#include <bit>

#include <fmt/format.h>

#include "base/check.h"

namespace plimsoll {
namespace {

std::int64_t words_for(std::int64_t blocks) {
  return (blocks + 1 + 63) / 64;
}  // Block 0 unused.

std::uint64_t bit(std::int64_t block) {
  return std::uint64_t{1} << (block % 64);
}

std::size_t word(std::int64_t block) {
  return static_cast<std::size_t>(block / 64);
}

}  // namespace

std::int64_t BlockMap::memory_bytes(std::int64_t pages, std::int64_t spare) noexcept {
  const std::int64_t bitmap = (words_for(blocks(pages, spare)) * 8 + 63) / 64 * 64;
  return map_bytes(pages) + kBlockUnit + 3 * bitmap;
}

BlockMap::BlockMap(std::int64_t pages, std::int64_t spare, Slab& slab)
    : pages_(pages), blocks_(blocks(pages, spare)) {
  entries_ = slab.take<BlockEntry>(map_bytes(pages) / static_cast<std::int64_t>(sizeof(BlockEntry)),
                                   kBlockUnit);
  working_ = slab.take<std::uint64_t>(words_for(blocks_));
  for (auto& commit : commits_) {
    commit = slab.take<std::uint64_t>(words_for(blocks_));
  }
}

bool BlockMap::is_free(std::int64_t block) const noexcept {
  const std::size_t at = word(block);
  return ((working_[at] | commits_[0][at] | commits_[1][at]) & bit(block)) == 0;
}

BlockMap::Run BlockMap::allocate(std::int64_t want) {
  std::int64_t block = cursor_ > blocks_ ? 1 : cursor_;
  for (std::int64_t seen = 0; !is_free(block); ++seen) {
    PLIMSOLL_CHECK(seen <= 2 * blocks_, "three blocks per page are enough");
    const std::size_t at = word(block);
    const std::uint64_t free = ~(working_[at] | commits_[0][at] | commits_[1][at]);
    const std::uint64_t ahead = free & (~std::uint64_t{0} << (block % 64));
    const auto base = static_cast<std::int64_t>(at) * 64;
    block = ahead != 0 ? base + std::countr_zero(ahead) : base + 64;
    block = block > blocks_ ? 1 : block;
  }
  Run run{.first = static_cast<std::uint32_t>(block), .count = 0};
  while (run.count < want && block <= blocks_ && is_free(block)) {
    working_[word(block)] |= bit(block);
    ++block;
    ++run.count;
  }
  used_ += run.count;
  cursor_ = block;
  return run;
}

void BlockMap::release(std::uint32_t block) noexcept {
  working_[word(block)] &= ~bit(block);
  --used_;
}

void BlockMap::set(std::int64_t page, std::uint32_t block, std::uint32_t crc) noexcept {
  BlockEntry& entry = entries_[static_cast<std::size_t>(page)];
  if (entry.block != 0) {
    release(entry.block);
  }
  entry = {block, crc};
}

Result<void> BlockMap::keep(int slot, std::span<const BlockEntry> entries) {
  auto bitmap = commits_[static_cast<std::size_t>(slot)];
  for (const BlockEntry& entry : entries) {
    if (entry.block == 0) {
      continue;
    }
    if (entry.block > blocks_ || (bitmap[word(entry.block)] & bit(entry.block)) != 0) {
      return fail(ErrorCode::kCorrupt,
                  fmt::format("block {} is out of range or used twice", entry.block));
    }
    bitmap[word(entry.block)] |= bit(entry.block);
  }
  return {};
}

Result<void> BlockMap::adopt(int slot) {
  PLIMSOLL_TRY_VOID(keep(slot, entries_.first(static_cast<std::size_t>(pages_))));
  const auto& commit = commits_[static_cast<std::size_t>(slot)];
  std::copy(commit.begin(), commit.end(), working_.begin());
  used_ = 0;
  for (const std::uint64_t bits : working_) {
    used_ += std::popcount(bits);
  }
  // New blocks go behind the old ones while there is room there: reads of old pages stay in order.
  cursor_ = 1;
  for (std::int64_t at = words_for(blocks_) - 1; at >= 0; --at) {
    const std::uint64_t bits = working_[static_cast<std::size_t>(at)];
    if (bits != 0) {
      cursor_ = at * 64 + 64 - std::countl_zero(bits);
      break;
    }
  }
  cursor_ = std::max<std::int64_t>(cursor_, 1);
  return {};
}

void BlockMap::committed(int slot) noexcept {
  std::copy(working_.begin(), working_.end(), commits_[static_cast<std::size_t>(slot)].begin());
}

void BlockMap::forget(int slot) noexcept {
  auto bitmap = commits_[static_cast<std::size_t>(slot)];
  std::fill(bitmap.begin(), bitmap.end(), 0);
}

}  // namespace plimsoll
