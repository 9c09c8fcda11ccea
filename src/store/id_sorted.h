// SPDX-License-Identifier: Apache-2.0
//
// SortedIds: the sorted file of an id index: which ordinal an id has.
//
// The first id of every page, its fence, is in the slab, and so are as many pages as it has room
// for, each as a small hash table (IdFrame): an id that is there takes a search of the fences and
// one line of a frame, seldom two, and those of many ids are fetched at once. Pages that are not
// there are read many in one call, each once for all ids of a request. With room for every page
// nothing is read after open().
//
// Reading order: id_index.h, id_page.h, this file, id_sorted.cpp.
//
// Threads: thread-safe; one mutex around the frames, never held across the disk, and one reader of
//          missing pages at a time.
// Memory:  memory_bytes(), from the slab; 15.1 bytes for each id whose page is there.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>

#include "base/mutex.h"
#include "base/philox.h"
#include "memory/slab.h"
#include "os/file.h"
#include "os/io_pool.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// A cache line of a frame. Places that are not used repeat an entry of the page: whatever id is
/// found has the ordinal beside it.
struct alignas(64) IdLine {
  static constexpr std::size_t kIds = 5;
  std::array<std::int64_t, kIds> ids;
  std::array<std::uint32_t, kIds> ordinals;
  std::uint32_t overflows;  // overflow_bit() of ids that belong here, or before, and stand behind.

  /// The ordinal of `id`, or −1. Without a branch: which place it has cannot be foreseen.
  [[nodiscard]] std::int64_t find(std::int64_t id) const noexcept {
    std::uint64_t above = 0;
    for (std::size_t i = 0; i < kIds; ++i) {
      above |= (0 - std::uint64_t{ids[i] == id}) & (std::uint64_t{ordinals[i]} + 1);
    }
    return static_cast<std::int64_t>(above) - 1;
  }
};
static_assert(sizeof(IdLine) == 64);

/// A page in RAM: 340 ids in 400 places.
struct IdFrame {
  static constexpr std::uint32_t kLines = 80;
  std::array<IdLine, kLines> lines;

  /// Takes over a sound page.
  void fill(std::span<const std::byte> page) noexcept;
  /// The line at which a search for `id` begins, and the one at which it goes on.
  [[nodiscard]] static std::uint32_t home(std::int64_t id) noexcept {
    return static_cast<std::uint32_t>((mix64(static_cast<std::uint64_t>(id)) >> 32) * kLines >> 32);
  }
  /// Of bits of the hash that have no part in the line: whether it is worth while to go on.
  [[nodiscard]] static std::uint32_t overflow_bit(std::int64_t id) noexcept {
    return std::uint32_t{1} << (mix64(static_cast<std::uint64_t>(id)) & 31);
  }
  [[nodiscard]] static std::uint32_t next(std::uint32_t line) noexcept {
    return line + 1 == kLines ? 0 : line + 1;
  }
};
static_assert(sizeof(IdFrame) == 5120);

class SortedIds {
 public:
  /// `cached_pages` is clamped to what the file has. Not monotone: with room for every page no
  /// buffers are needed to read others.
  static std::int64_t memory_bytes(std::int64_t rows, std::int64_t cached_pages) noexcept;

  /// Reads every page of the file once (fences, order, checksums).
  /// Requires: `slab` and `pool` outlive this. Errors: as IdIndex::open().
  static Result<std::unique_ptr<SortedIds>> open(const std::filesystem::path& path,
                                                 std::int64_t rows, Slab& slab,
                                                 std::int64_t cached_pages, IoPool& pool);

  /// As IdIndex::find_rest().
  Result<void> find_rest(std::span<const std::int64_t> ids, std::span<std::int64_t> ordinals);

 private:
  static constexpr std::uint32_t kNone = 0xFFFFFFFFU;
  static constexpr std::size_t kReadsMost = 128;
  static constexpr std::size_t kAtOnce = 256;  // Ids looked up without letting go of the lock.
  static constexpr std::size_t kStep = 16;     // Lines fetched while the last ones are looked at.

  struct Shape {
    std::int64_t pages;
    std::int64_t slots;
    std::int64_t reads;
    std::int64_t starts;
  };
  static Shape shape_of(std::int64_t rows, std::int64_t cached_pages) noexcept;

  SortedIds(const Shape& shape, Slab& slab, IoPool& pool);
  void find_starts() noexcept;
  [[nodiscard]] std::size_t start_of(std::int64_t id) const noexcept {
    const auto above = static_cast<std::uint64_t>(id) - static_cast<std::uint64_t>(fences_[0]);
    return id <= fences_[0] ? 0 : std::min(std::size_t{above >> shift_}, starts_.size() - 1);
  }
  [[nodiscard]] std::uint32_t slot_of(std::uint32_t page) const noexcept {
    return page < slots_ ? page : page % slots_;
  }
  void find_pages(std::span<const std::int64_t> ids, std::span<std::uint32_t> pages) const noexcept;
  bool look(std::span<const std::int64_t> ids, std::span<std::int64_t> ordinals);
  bool look_piece(std::span<const std::int64_t> ids, std::span<std::int64_t> ordinals);
  Result<void> read_missed(std::span<const std::int64_t> ids, std::span<std::int64_t> ordinals);
  Result<void> read_pages(std::span<const std::uint32_t> pages);
  [[nodiscard]] std::span<std::byte> buffer(std::size_t i) const noexcept;
  void put(std::uint32_t number, std::span<const std::byte> page);

  IoPool& pool_;
  const std::uint32_t slots_;
  File file_;                        // Direct where it can be; not open with room for every page.
  std::span<std::int64_t> fences_;   // First id of each page.
  std::span<std::uint32_t> starts_;  // By the uppermost bits of an id: a page not behind its own,
  std::uint32_t span_{0};            // which is one of so many from there on,
  int shift_{0};                     // the bits being those above so many of id − first fence.
  std::span<std::byte> buffers_;     // Pages being read, of the one who has the turn.
  Mutex mutex_;
  CondVar turn_ended_;
  bool reading_ PLIMSOLL_GUARDED_BY(mutex_){false};            // Somebody has the turn.
  std::span<IdFrame> frames_ PLIMSOLL_GUARDED_BY(mutex_);      // Page p can only be in slot_of(p).
  std::span<std::uint32_t> tags_ PLIMSOLL_GUARDED_BY(mutex_);  // The page in each, or kNone.
};

/// Reads a sorted file from end to end; `page_seen(number, page)` is told of each sound page.
/// Errors: kCorrupt (checksums, order, counts), kIo.
Result<void> check_sorted(
    const File& file, std::int64_t rows,
    const std::function<void(std::int64_t, std::span<const std::byte>)>& page_seen);

}  // namespace plimsoll
