// SPDX-License-Identifier: Apache-2.0
//
// GrowingIds: which place each row has, in a table whose ids come and go.
//
// The first places are those of the rows that the table was made with: their ids are in the id
// index on disk, and one bit in the slab says whether a row is still there. The places behind them,
// up to rows_max, hold inserted ids: the ids themselves and a hash table over them are in the slab.
// A place that an inserted id gives up is used again, the lowest first; one of the first places is
// not, until the table is compacted. In any order, bits and ids are kept as they go into map.N
// behind the page table, so the set of ids is part of every commit; in sample order ids only come,
// and rows.new holds them.
//
//   a place is   free → new (no row written yet) → held → free
//
// Reading order: docs/formats/embedding_store.md, id_index.h, this file, embedding_store.cpp.
//
// Threads: find() from any thread; the rest for the table's owner. One mutex, never held across the
//          disk.
// Memory:  14.2 bytes for each place behind the first ones, 1/8 for each of those; in the slab.
#pragma once

#include <cstdint>
#include <span>

#include "base/mutex.h"
#include "memory/slab.h"
#include "store/embedding_block_map.h"
#include "store/embedding_format.h"
#include "store/id_index.h"

namespace plimsoll {

class GrowingIds {
 public:
  /// Beside GrowthShape::bytes(), which are the block map's.
  static std::int64_t memory_bytes(const GrowthShape& shape) noexcept;

  /// Requires: `file` are shape.bytes() zeros of the block map's; it and `made` outlive this.
  GrowingIds(const GrowthShape& shape, const IdIndex& made, std::span<std::byte> file, Slab& slab);

  /// Takes what was just read into `file`. Errors: kCorrupt (no path in the text) when it is none.
  Result<void> adopt();
  /// The ids of the places behind the first, in that order; those that hold no row are 0.
  /// Requires: nobody changes them meanwhile.
  [[nodiscard]] std::span<std::int64_t> inserted() noexcept;
  /// Takes the first `count` of inserted(), which were just read, as the ids that there are beside
  /// the first ones, none of which is gone. Errors: as adopt().
  Result<void> adopt_first(std::int64_t count);

  /// Writes the place of each id, −1 for an id that is not there.
  /// Shape:  as many places as ids. Errors: kCorrupt, kIo.
  Result<void> find(std::span<const std::int64_t> ids, std::span<std::int64_t> places) const;

  // ---- The owner ----

  /// Gives a new place to each id that is not there, the lowest free one. Returns how many those
  /// are; −1 when there are not enough places. Errors: kCorrupt, kIo. On an error and after −1
  /// nothing has changed.
  /// Requires: scratch is not empty; so many ids are looked up at a time.
  Result<std::int64_t> add(std::span<const std::int64_t> ids, std::span<std::int64_t> scratch);
  /// The first new place from `from` on, or −1.
  [[nodiscard]] std::int64_t next_new(std::int64_t from) const;
  /// All new places hold their rows.
  void settle();
  /// There were never any new places.
  void undo();

  /// Frees a place that holds a row; one that does not is left as it is.
  void remove(std::int64_t place);

  /// The first place from `from` on that holds a row, or −1.
  [[nodiscard]] std::int64_t next_held(std::int64_t from) const;
  /// Requires: an inserted id's place.
  [[nodiscard]] std::int64_t id_at(std::int64_t place) const;
  [[nodiscard]] std::int64_t rows() const;
  /// Of the first places, those whose rows are gone.
  [[nodiscard]] std::int64_t erased() const;

  /// Tells the block map what has changed since the last call. Requires: no write is under way.
  void touch(BlockMap& map);

 private:
  static constexpr std::uint32_t kEmpty = 0xFFFFFFFFU;

  [[nodiscard]] std::size_t home_of(std::int64_t id) const noexcept PLIMSOLL_REQUIRES(mutex_);
  [[nodiscard]] std::int64_t look_up(std::int64_t id) const PLIMSOLL_REQUIRES(mutex_);
  [[nodiscard]] bool bit(std::int64_t place) const PLIMSOLL_REQUIRES(mutex_);
  void flip(std::int64_t place) PLIMSOLL_REQUIRES(mutex_);
  [[nodiscard]] std::int64_t next_free() PLIMSOLL_REQUIRES(mutex_);
  bool hash(std::int64_t at) PLIMSOLL_REQUIRES(mutex_);
  void unhash(std::int64_t id) PLIMSOLL_REQUIRES(mutex_);
  void hold(std::int64_t place, std::int64_t id) PLIMSOLL_REQUIRES(mutex_);
  void give_up(std::int64_t place) PLIMSOLL_REQUIRES(mutex_);
  void set_id(std::int64_t place, std::int64_t id) PLIMSOLL_REQUIRES(mutex_);

  const GrowthShape shape_;
  const IdIndex& made_;
  mutable Mutex mutex_;  // The owner writes under it, and the look-ahead thread reads.
  std::span<std::uint64_t> bits_ PLIMSOLL_GUARDED_BY(mutex_);   // By place: not as at creation.
  std::span<std::int64_t> ids_ PLIMSOLL_GUARDED_BY(mutex_);     // Of the places behind the first.
  std::span<std::uint32_t> table_ PLIMSOLL_GUARDED_BY(mutex_);  // By hash: an index of ids_.
  BitSet new_ PLIMSOLL_GUARDED_BY(mutex_);                      // Indexes of ids_: new places.
  BitSet changed_ PLIMSOLL_GUARDED_BY(mutex_);                  // Units that touch() will name.
  std::int64_t rows_ PLIMSOLL_GUARDED_BY(mutex_){0};
  std::int64_t erased_ PLIMSOLL_GUARDED_BY(mutex_){0};
  std::int64_t free_from_ PLIMSOLL_GUARDED_BY(mutex_){0};  // No place below it is free.
};

}  // namespace plimsoll
