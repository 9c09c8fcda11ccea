// SPDX-License-Identifier: Apache-2.0
//
// The bytes of an embedding table: rows, pages, page table entries and superblocks.
//
// Every byte that is read back is covered: a row by its own checksum, the rows of a page by the
// page's, the page by the page table's entry (so an old block cannot pass for a new one), the page
// table by the superblock. Little-endian. docs/formats/embedding_store.md is the specification.
//
// Reading order: docs/formats/embedding_store.md, this file, embedding_description.h.
//
// Threads: pure functions.   Memory: none.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

#include "base/round.h"
#include "os/file.h"
#include "plimsoll/embedding_store.h"
#include "plimsoll/result.h"

namespace plimsoll {

inline constexpr std::int64_t kBlockUnit = 4096;  // Alignment of direct I/O.

[[nodiscard]] constexpr std::int64_t round_to_block(std::int64_t bytes) noexcept {
  return round_up(bytes, kBlockUnit);
}
inline constexpr std::int64_t kPageHeaderBytes = 32;
inline constexpr std::int64_t kRowHeaderBytes = 16;

/// What follows from rows, dim and slots.
struct TableShape {
  std::int64_t rows{0};
  std::int64_t dim{0};
  std::int64_t slots{0};         // Optimizer floats per weight,
  std::int64_t row_slots{0};     // and per row.
  RowDType dtype{};              // Of the weights.
  std::int64_t record_bytes{0};  // A multiple of 8.
  std::int64_t page_bytes{0};    // A multiple of kBlockUnit.
  std::int64_t rows_per_page{0};
  std::int64_t pages{0};

  [[nodiscard]] std::int64_t state_floats() const noexcept { return dim * slots + row_slots; }
  [[nodiscard]] std::int64_t floats() const noexcept { return dim + state_floats(); }
  /// Bytes of a record before its slots, which begin at a multiple of 4.
  [[nodiscard]] std::int64_t weight_bytes() const noexcept {
    return dtype == RowDType::kFloat32 ? 4 * dim : round_up(2 * dim, std::int64_t{4});
  }
  /// Floats that one step of a row needs beside the record.
  [[nodiscard]] std::int64_t scratch_floats() const noexcept {
    return dtype == RowDType::kFloat32 ? 0 : dim;
  }
  [[nodiscard]] std::int64_t rows_in_page(std::int64_t page) const noexcept {
    const std::int64_t left = rows - page * rows_per_page;
    return left < rows_per_page ? left : rows_per_page;
  }
};
[[nodiscard]] TableShape table_shape(std::int64_t rows, std::int64_t dim, std::int64_t slots,
                                     std::int64_t row_slots = 0, RowDType dtype = {}) noexcept;

/// The places of a table that may grow, and what is known of them: a bit per place, set when it is
/// not as it was at creation, and the ids of those behind the first. In any order, map.N holds just
/// that behind the page table.
struct GrowthShape {
  std::int64_t made{0};    // Rows at creation, in the first places; their ids are in rows.ids.
  std::int64_t places{0};  // rows_max. 0: the table cannot grow, and its map.N ends with the pages.

  [[nodiscard]] std::int64_t inserted() const noexcept { return places == 0 ? 0 : places - made; }
  [[nodiscard]] std::int64_t bit_bytes() const noexcept { return round_to_block((places + 7) / 8); }
  [[nodiscard]] std::int64_t bytes() const noexcept {
    return places == 0 ? 0 : bit_bytes() + round_to_block(inserted() * 8);
  }
  /// Of 64 bits, from place `first` on: those of places that rows had at creation.
  [[nodiscard]] std::uint64_t made_mask(std::int64_t first) const noexcept {
    return first + 64 <= made ? ~std::uint64_t{0}
           : first >= made    ? 0
                              : (std::uint64_t{1} << (made - first)) - 1;
  }
};

struct RowHeader {
  std::int64_t id;
  std::uint32_t sequence;  // Optimizer steps since the weights were last set.
  std::uint32_t crc;       // Of the record without this field; filled in when a page is written.
};
static_assert(sizeof(RowHeader) == kRowHeaderBytes);

struct PageHeader {
  std::uint32_t magic;
  std::uint32_t crc;  // Of the rest of this header and of every row's crc.
  std::uint64_t page;
  std::uint64_t fingerprint;
  std::uint32_t rows;
  std::uint32_t reserved;
};
static_assert(sizeof(PageHeader) == kPageHeaderBytes);

/// Where a page is and what its header's crc must be. block 0: never written.
struct BlockEntry {
  std::uint32_t block{0};  // Blocks are numbered from 1; block b is at (b − 1) × page_bytes.
  std::uint32_t crc{0};
};

/// Fills in the checksums and the header of a page; returns the header's crc.
std::uint32_t seal_page(const TableShape& shape, std::uint64_t fingerprint, std::int64_t page,
                        std::span<std::byte> bytes) noexcept;

/// Whether a page read from disk is page `page` of this table, as `crc` remembers it.
[[nodiscard]] bool page_is_sound(const TableShape& shape, std::uint64_t fingerprint,
                                 std::int64_t page, std::uint32_t crc,
                                 std::span<const std::byte> bytes) noexcept;

/// The root of one commit.
struct Superblock {
  std::int64_t step{-1};
  std::uint64_t fingerprint{0};
  std::int64_t pages{0};
  std::int64_t blocks_used{0};
  std::uint32_t map_crc{0};  // Of the checksums of each kBlockUnit bytes of its map.N.
  int map{0};                // That N.
  bool operator==(const Superblock&) const = default;
};

/// Of files map.N: one for each superblock, and one that the next commit is written to.
inline constexpr int kMaps = 3;

/// File `super`: two slots of 4 KiB, each holding its superblock twice (sectors 0 and 7), so that
/// a torn write leaves one of them and damage is told apart from a crash.
class SuperFile {
 public:
  enum class SlotState : std::uint8_t { kEmpty, kValid, kDamaged };
  struct Slot {
    SlotState state{SlotState::kEmpty};
    Superblock superblock{};
    bool operator==(const Slot&) const = default;
  };

  static constexpr std::int64_t kSlotBytes = 4096;

  /// Creates the file with both slots empty, synced. Errors: kIo.
  static Result<void> create(const std::filesystem::path& path);
  /// Opens it and reads both slots. Errors: kNotFound, kIo, kCorrupt (size).
  static Result<SuperFile> open(const std::filesystem::path& path, bool writable);

  SuperFile() = default;
  [[nodiscard]] const std::array<Slot, 2>& slots() const noexcept { return slots_; }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return file_.path(); }
  /// Whether slot `slot` holds, or may have held, a commit after `step`.
  [[nodiscard]] bool may_be_after(int slot, std::int64_t step) const noexcept {
    const Slot& held = slots_[static_cast<std::size_t>(slot)];
    return held.state == SlotState::kDamaged ||
           (held.state == SlotState::kValid && held.superblock.step > step);
  }

  /// Whether the file still holds in `slot` what it did when it was opened. Errors: kIo.
  [[nodiscard]] Result<bool> still_holds(int slot) const;
  /// The N of a map.N that no commit is in.
  [[nodiscard]] int free_map() const noexcept;

  /// Writes one slot and syncs. Errors: kIo.
  Result<void> write(int slot, const Superblock& superblock);
  /// Writes one slot as it was read and syncs: a process that was killed in a commit may have left
  /// it to the kernel, and from here on the commit is built upon. Errors: kIo.
  Result<void> settle(int slot) {
    return write(slot, slots_[static_cast<std::size_t>(slot)].superblock);
  }
  /// Makes one slot empty and syncs. Errors: kIo.
  Result<void> clear(int slot);

 private:
  File file_;
  std::array<Slot, 2> slots_{};
};

/// Bytes of the page table in a file map.N: one BlockEntry per page, padded with zeros to
/// kBlockUnit.
[[nodiscard]] inline std::int64_t map_bytes(std::int64_t pages) noexcept {
  return round_to_block(pages * static_cast<std::int64_t>(sizeof(BlockEntry)));
}

}  // namespace plimsoll
