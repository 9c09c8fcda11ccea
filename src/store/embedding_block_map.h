// SPDX-License-Identifier: Apache-2.0
//
// BlockMap: where each page is on disk, and which blocks of rows.dat may be written.
//
// A block is in use by the working state, by the commit in superblock slot 0, by the one in slot 1,
// or by none of them; only the last kind is ever written. With at most one block per page in each,
// and two batches of writes under way, rows.dat never passes 3 × pages + spare blocks.
//
// Threads: single-owner; the page cache calls it under its mutex.
// Memory:  8 bytes per page and 3 bits per block, in the slab.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "memory/slab.h"
#include "store/embedding_format.h"

namespace plimsoll {

class BlockMap {
 public:
  /// `spare`: blocks that may be allocated and not yet set(), over all writers.
  static std::int64_t blocks(std::int64_t pages, std::int64_t spare) noexcept {
    return 3 * pages + spare;
  }
  static std::int64_t memory_bytes(std::int64_t pages, std::int64_t spare) noexcept;

  BlockMap() = default;
  BlockMap(std::int64_t pages, std::int64_t spare, Slab& slab);

  [[nodiscard]] BlockEntry entry(std::int64_t page) const noexcept {
    return entries_[static_cast<std::size_t>(page)];
  }
  /// The page table as it goes into map.N: map_bytes(pages), aligned to kBlockUnit.
  [[nodiscard]] std::span<std::byte> bytes() noexcept { return std::as_writable_bytes(entries_); }

  /// Up to `want` >= 1 free blocks in a row, now in use by the working state.
  struct Run {
    std::uint32_t first{0};
    std::int64_t count{0};
  };
  Run allocate(std::int64_t want);
  /// Gives back a block whose write failed.
  void release(std::uint32_t block) noexcept;
  /// Records that `page` was written to `block` and gives back the block it had before.
  void set(std::int64_t page, std::uint32_t block, std::uint32_t crc) noexcept;

  /// Takes the page table just read into bytes() as the working state and as that of `slot`.
  /// Errors: kCorrupt (no path in the text) when a block is out of range or used twice.
  Result<void> adopt(int slot);
  /// Marks the blocks of a part of the other commit's page table. Errors: as adopt().
  Result<void> keep(int slot, std::span<const BlockEntry> entries);
  /// The working state has become the commit of `slot`.
  void committed(int slot) noexcept;
  /// The commit of `slot` is gone.
  void forget(int slot) noexcept;

  [[nodiscard]] std::int64_t used_blocks() const noexcept { return used_; }
  [[nodiscard]] std::int64_t blocks() const noexcept { return blocks_; }

 private:
  [[nodiscard]] bool is_free(std::int64_t block) const noexcept;

  std::int64_t pages_{0};
  std::int64_t blocks_{0};
  std::int64_t cursor_{1};  // Where the next search begins: writes stay sequential.
  std::int64_t used_{0};    // Blocks of the working state.
  std::span<BlockEntry> entries_{};
  std::span<std::uint64_t> working_{};
  std::array<std::span<std::uint64_t>, 2> commits_{};
};

}  // namespace plimsoll
