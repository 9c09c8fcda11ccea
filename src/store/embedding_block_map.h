// SPDX-License-Identifier: Apache-2.0
//
// BlockMap: where each page is on disk, and which blocks of rows.dat may be written.
//
// A block is in use by the working state, by the commit in superblock slot 0, by the one in slot 1,
// or by none of them; only the last kind is ever written. With at most one block per page in each,
// and the batches of writes under way, rows.dat never passes 3 × pages + spare blocks. What is left
// of these may keep commits for those who read them (commit_pins.h), until it is needed.
//
// A commit costs what has changed, not what there is: of the page table it writes the units of
// 4 KiB that differ from what its map file holds, and of the bitmaps it copies the chunks that
// differ. The root checksum is over the checksums of all units, 1/1024 of the page table.
//
// A table that may grow keeps its changed ids in the same file, behind the page table (see
// embedding_growing_ids.h): they are units of bytes() like any other.
//
// Threads: single-owner; the page cache calls it under its mutex.
// Memory:  8 bytes per page and 4 bits per block, what is behind the page table, and 1/1000 of all
//          that, in the slab.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "memory/slab.h"
#include "store/embedding_format.h"

namespace plimsoll {

/// A set of small numbers, as bits in memory it is given.
class BitSet {
 public:
  static std::int64_t words(std::int64_t size) noexcept { return (size + 63) / 64; }

  BitSet() = default;
  explicit BitSet(std::span<std::uint64_t> words) : words_(words) {}
  void add(std::int64_t at) noexcept {
    words_[static_cast<std::size_t>(at / 64)] |= std::uint64_t{1} << (at % 64);
  }
  void remove_all() noexcept;
  void add_below(std::int64_t size) noexcept;
  void remove(std::int64_t at) noexcept {
    words_[static_cast<std::size_t>(at / 64)] &= ~(std::uint64_t{1} << (at % 64));
  }
  /// The first member >= `from`, or −1.
  [[nodiscard]] std::int64_t next(std::int64_t from) const noexcept;

 private:
  std::span<std::uint64_t> words_{};
};

class BlockMap {
 public:
  /// `spare`: blocks that may be allocated and not yet set(), over all writers.
  static std::int64_t blocks(std::int64_t pages, std::int64_t spare) noexcept {
    return 3 * pages + spare;
  }
  static std::int64_t memory_bytes(std::int64_t pages, std::int64_t spare,
                                   std::int64_t behind_bytes = 0) noexcept;

  BlockMap() = default;
  /// `behind_bytes`: of whole units in map.N behind the page table.
  BlockMap(std::int64_t pages, std::int64_t spare, Slab& slab, std::int64_t behind_bytes = 0);

  [[nodiscard]] BlockEntry entry(std::int64_t page) const noexcept {
    return entries_[static_cast<std::size_t>(page)];
  }
  /// All that goes into map.N, aligned to kBlockUnit: map_bytes(pages), and what is behind it.
  [[nodiscard]] std::span<std::byte> bytes() noexcept { return std::as_writable_bytes(entries_); }
  /// Of bytes(): what is behind the page table. Whoever changes it says so with touch().
  [[nodiscard]] std::span<std::byte> behind() noexcept {
    return bytes().subspan(static_cast<std::size_t>(map_bytes(pages_)));
  }
  /// One unit of behind() has changed, the first being 0.
  void touch(std::int64_t unit) noexcept;

  /// The next part of bytes(), from unit `from` on, that map.`map` may hold otherwise; count 0:
  /// there is none. Units between two that differ are in it when they are few.
  struct Units {
    std::int64_t first{0};
    std::int64_t count{0};
  };
  [[nodiscard]] Units stale_units(int map, std::int64_t from) const noexcept;
  /// Says that map.`map` holds all of bytes(), one unit of it otherwise, or nobody knows what.
  void mark_same(int map) noexcept { at(stale_, map).remove_all(); }
  void mark_stale(int map, std::int64_t unit) noexcept { at(stale_, map).add(unit); }
  void mark_unknown(int map) noexcept { at(stale_, map).add_below(units_); }
  /// Says that all files were just made as long as bytes(), and hold zeros, as bytes() does.
  void files_are_zeros() noexcept;
  /// The root checksum of bytes(): brings those of the units that are stale for map.`map` up to
  /// date.
  [[nodiscard]] std::uint32_t root(int map) noexcept;

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

  /// Takes the page table just read into bytes() as the working state and as that of `slot`; what
  /// the files hold is unknown then.
  /// Errors: kCorrupt (no path in the text) when a block is out of range or used twice.
  Result<void> adopt(int slot);
  /// Marks the blocks of a part of the other commit's page table. Errors: as adopt().
  Result<void> keep(int slot, std::span<const BlockEntry> entries);
  /// The working state has become the commit of `slot`.
  void committed(int slot) noexcept;
  /// The commit of `slot` is gone.
  void forget(int slot) noexcept;

  /// The commit of `slot`, which is being replaced, is read by somebody: its blocks stay until
  /// release_pinned(), or until there is no other free block.
  void keep_pinned(int slot) noexcept;
  void release_pinned() noexcept;
  [[nodiscard]] bool any_pinned() const noexcept { return any_pinned_; }

  [[nodiscard]] std::int64_t used_blocks() const noexcept { return used_; }
  [[nodiscard]] std::int64_t blocks() const noexcept { return blocks_; }

 private:
  [[nodiscard]] bool is_free(std::int64_t block) const noexcept;
  [[nodiscard]] std::uint64_t taken(std::size_t place) const noexcept;
  void set_working(std::int64_t block, bool used) noexcept;
  template <class T, std::size_t N>
  static T& at(std::array<T, N>& of, int number) noexcept {
    return of[static_cast<std::size_t>(number)];
  }
  template <class T, std::size_t N>
  static const T& at(const std::array<T, N>& of, int number) noexcept {
    return of[static_cast<std::size_t>(number)];
  }

  std::int64_t pages_{0};
  std::int64_t units_{0};  // Of bytes().
  std::int64_t blocks_{0};
  std::int64_t cursor_{1};  // Where the next search begins: writes stay sequential.
  std::int64_t used_{0};    // Blocks of the working state.
  std::span<BlockEntry> entries_{};
  std::span<std::uint64_t> working_{};
  std::array<std::span<std::uint64_t>, 2> commits_{};
  std::span<std::uint64_t> pinned_{};  // Blocks of commits that were replaced, and are read.
  bool any_pinned_{false};
  std::array<BitSet, 2> apart_{};         // Chunks in which working_ and commits_[i] may differ.
  std::span<std::uint32_t> unit_crcs_{};  // Of each unit of entries_, as of the last root().
  std::array<BitSet, kMaps> stale_{};     // Units that map.i may hold otherwise.
};

/// The root checksum of a page table that is read in pieces: chain over the units in order.
[[nodiscard]] std::uint32_t chain_root(std::uint32_t root, std::span<const std::byte> units);

}  // namespace plimsoll
