// SPDX-License-Identifier: Apache-2.0
#include "store/embedding_block_map.h"

#include <algorithm>
#include <bit>

#include <fmt/format.h>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/round.h"

namespace plimsoll {
namespace {

std::int64_t words_for(std::int64_t blocks) {
  return (blocks + 1 + 63) / 64;
}  // Block 0 unused.

constexpr std::int64_t kChunkWords = 64;  // Of the bitmaps: what a commit copies at once.
constexpr std::int64_t kGapMost = 15;     // Units written although they have not changed.

std::int64_t chunks_for(std::int64_t blocks) {
  return divide_up(words_for(blocks), kChunkWords);
}

std::uint64_t bit(std::int64_t block) {
  return std::uint64_t{1} << (block % 64);
}

std::size_t word(std::int64_t block) {
  return static_cast<std::size_t>(block / 64);
}

}  // namespace

void BitSet::remove_all() noexcept {
  std::fill(words_.begin(), words_.end(), 0);
}

void BitSet::add_below(std::int64_t size) noexcept {
  remove_all();
  for (std::int64_t at = 0; at < size; ++at) {
    add(at);
  }
}

std::int64_t BitSet::next(std::int64_t from) const noexcept {
  auto at = static_cast<std::size_t>(from / 64);
  if (at >= words_.size()) {
    return -1;
  }
  std::uint64_t rest = words_[at] & (~std::uint64_t{0} << (from % 64));
  while (rest == 0) {
    if (++at == words_.size()) {
      return -1;
    }
    rest = words_[at];
  }
  return static_cast<std::int64_t>(at) * 64 + std::countr_zero(rest);
}

std::uint32_t chain_root(std::uint32_t root, std::span<const std::byte> units) {
  for (; !units.empty(); units = units.subspan(static_cast<std::size_t>(kBlockUnit))) {
    const std::uint32_t crc = crc32c(units.first(static_cast<std::size_t>(kBlockUnit)));
    root = crc32c(std::as_bytes(std::span(&crc, 1)), root);
  }
  return root;
}

std::int64_t BlockMap::memory_bytes(std::int64_t pages, std::int64_t spare,
                                    std::int64_t behind_bytes) noexcept {
  const std::int64_t all = blocks(pages, spare);
  const std::int64_t bytes = map_bytes(pages) + behind_bytes;
  const std::int64_t units = bytes / kBlockUnit;
  return bytes + kBlockUnit + 4 * round_up(words_for(all) * 8, 64) +
         2 * round_up(BitSet::words(chunks_for(all)) * 8, 64) + round_up(units * 4, 64) +
         kMaps * round_up(BitSet::words(units) * 8, 64);
}

BlockMap::BlockMap(std::int64_t pages, std::int64_t spare, Slab& slab, std::int64_t behind_bytes)
    : pages_(pages),
      units_((map_bytes(pages) + behind_bytes) / kBlockUnit),
      blocks_(blocks(pages, spare)) {
  entries_ = slab.take<BlockEntry>(
      units_ * kBlockUnit / static_cast<std::int64_t>(sizeof(BlockEntry)), kBlockUnit);
  working_ = slab.take<std::uint64_t>(words_for(blocks_));
  for (auto& commit : commits_) {
    commit = slab.take<std::uint64_t>(words_for(blocks_));
  }
  pinned_ = slab.take<std::uint64_t>(words_for(blocks_));
  for (auto& apart : apart_) {  // All of them are empty: none differs from another.
    apart = BitSet(slab.take<std::uint64_t>(BitSet::words(chunks_for(blocks_))));
  }
  unit_crcs_ = slab.take<std::uint32_t>(units_);
  for (auto& stale : stale_) {  // Nobody knows what the files hold.
    stale = BitSet(slab.take<std::uint64_t>(BitSet::words(units_)));
    stale.add_below(units_);
  }
}

void BlockMap::files_are_zeros() noexcept {
  const std::array<std::byte, kBlockUnit> zeros{};
  std::fill(unit_crcs_.begin(), unit_crcs_.end(), crc32c(zeros));
  for (auto& stale : stale_) {
    stale.remove_all();
  }
}

void BlockMap::touch(std::int64_t unit) noexcept {
  for (auto& stale : stale_) {
    stale.add(map_bytes(pages_) / kBlockUnit + unit);
  }
}

std::uint64_t BlockMap::taken(std::size_t place) const noexcept {
  return working_[place] | commits_[0][place] | commits_[1][place] | pinned_[place];
}

bool BlockMap::is_free(std::int64_t block) const noexcept {
  return (taken(word(block)) & bit(block)) == 0;
}

void BlockMap::set_working(std::int64_t block, bool used) noexcept {
  const std::size_t place = word(block);
  working_[place] = used ? working_[place] | bit(block) : working_[place] & ~bit(block);
  for (auto& apart : apart_) {
    apart.add(static_cast<std::int64_t>(place) / kChunkWords);
  }
}

BlockMap::Units BlockMap::stale_units(int map, std::int64_t from) const noexcept {
  const BitSet& stale = at(stale_, map);
  Units units{.first = stale.next(from), .count = 0};
  if (units.first < 0) {
    return {};
  }
  std::int64_t last = units.first;
  for (std::int64_t next = last; next >= 0 && next - last <= kGapMost + 1;
       next = stale.next(last + 1)) {
    last = next;
  }
  units.count = last + 1 - units.first;
  return units;
}

std::uint32_t BlockMap::root(int map) noexcept {
  const auto all = std::as_bytes(entries_);
  for (std::int64_t unit = at(stale_, map).next(0); unit >= 0;
       unit = at(stale_, map).next(unit + 1)) {
    unit_crcs_[static_cast<std::size_t>(unit)] = crc32c(all.subspan(
        static_cast<std::size_t>(unit * kBlockUnit), static_cast<std::size_t>(kBlockUnit)));
  }
  return crc32c(std::as_bytes(unit_crcs_));
}

BlockMap::Run BlockMap::allocate(std::int64_t want) {
  std::int64_t block = cursor_ > blocks_ ? 1 : cursor_;
  for (std::int64_t seen = 0; !is_free(block); ++seen) {
    PLIMSOLL_CHECK(seen <= 2 * blocks_ + 2, "three blocks per page are enough");
    if (any_pinned_ && seen > words_for(blocks_)) {  // Every word was looked at: training goes on.
      release_pinned();
      continue;
    }
    const std::size_t place = word(block);
    const std::uint64_t free = ~taken(place);
    const std::uint64_t ahead = free & (~std::uint64_t{0} << (block % 64));
    const auto base = static_cast<std::int64_t>(place) * 64;
    block = ahead != 0 ? base + std::countr_zero(ahead) : base + 64;
    block = block > blocks_ ? 1 : block;
  }
  Run run{.first = static_cast<std::uint32_t>(block), .count = 0};
  while (run.count < want && block <= blocks_ && is_free(block)) {
    set_working(block, true);
    ++block;
    ++run.count;
  }
  used_ += run.count;
  cursor_ = block;
  return run;
}

void BlockMap::release(std::uint32_t block) noexcept {
  set_working(block, false);
  --used_;
}

void BlockMap::set(std::int64_t page, std::uint32_t block, std::uint32_t crc) noexcept {
  BlockEntry& entry = entries_[static_cast<std::size_t>(page)];
  if (entry.block != 0) {
    release(entry.block);
  }
  entry = {block, crc};
  const std::int64_t unit = page * static_cast<std::int64_t>(sizeof(BlockEntry)) / kBlockUnit;
  for (auto& stale : stale_) {
    stale.add(unit);
  }
}

Result<void> BlockMap::keep(int slot, std::span<const BlockEntry> entries) {
  auto bitmap = at(commits_, slot);
  at(apart_, slot).add_below(chunks_for(blocks_));
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
  const auto& commit = at(commits_, slot);
  std::copy(commit.begin(), commit.end(), working_.begin());
  for (auto& apart : apart_) {
    apart.add_below(chunks_for(blocks_));
  }
  for (std::size_t unit = 0; unit < unit_crcs_.size(); ++unit) {
    const auto size = static_cast<std::size_t>(kBlockUnit);
    unit_crcs_[unit] = crc32c(std::as_bytes(entries_).subspan(unit * size, size));
  }
  for (auto& stale : stale_) {
    stale.add_below(units_);
  }
  used_ = 0;
  for (const std::uint64_t bits : working_) {
    used_ += std::popcount(bits);
  }
  // New blocks go behind the old ones while there is room there: reads of old pages stay in order.
  cursor_ = 1;
  for (std::int64_t last = words_for(blocks_) - 1; last >= 0; --last) {
    const std::uint64_t bits = working_[static_cast<std::size_t>(last)];
    if (bits != 0) {
      cursor_ = last * 64 + 64 - std::countl_zero(bits);
      break;
    }
  }
  cursor_ = std::max<std::int64_t>(cursor_, 1);
  return {};
}

void BlockMap::committed(int slot) noexcept {
  auto commit = at(commits_, slot);
  auto& apart = at(apart_, slot);
  for (std::int64_t chunk = apart.next(0); chunk >= 0; chunk = apart.next(chunk + 1)) {
    const auto begin = static_cast<std::size_t>(chunk * kChunkWords);
    const auto count = std::min(static_cast<std::size_t>(kChunkWords), working_.size() - begin);
    std::copy_n(working_.begin() + static_cast<std::ptrdiff_t>(begin), count,
                commit.begin() + static_cast<std::ptrdiff_t>(begin));
  }
  apart.remove_all();
}

void BlockMap::keep_pinned(int slot) noexcept {
  const auto& commit = at(commits_, slot);
  for (std::size_t place = 0; place < pinned_.size(); ++place) {
    pinned_[place] |= commit[place];
  }
  any_pinned_ = true;
}

void BlockMap::release_pinned() noexcept {
  std::fill(pinned_.begin(), pinned_.end(), 0);
  any_pinned_ = false;
}

void BlockMap::forget(int slot) noexcept {
  auto bitmap = at(commits_, slot);
  std::fill(bitmap.begin(), bitmap.end(), 0);
  at(apart_, slot).add_below(chunks_for(blocks_));
}

}  // namespace plimsoll
