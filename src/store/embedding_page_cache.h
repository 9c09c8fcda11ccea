// SPDX-License-Identifier: Apache-2.0
//
// PageCache: the pages of an embedding table that are in RAM, and how they come and go.
//
// A page lives in a frame of the slab or on disk. Several frames are freed at a time: of some that
// a hand passes, those that nobody has announced a use of, that the step at hand does not use and
// that were used least often (use counts age, outlive a page's stay, and count for less the longer
// the page was not used), clean before dirty, and among equals the ones unused for longest; only
// when there are none, those whose announced use is furthest away. Dirty victims are sealed into a
// buffer and written to free blocks in long runs, and stay readable until that is done. Three lanes
// work here, each with buffers of its own: the owner (gather, apply, commit), the look-ahead
// thread, and the write-back thread, which keeps dirty pages few, so that commits are short.
//
//   a frame is   empty → reading → ready → (written, if dirty) → empty
//   and, ready,  pinned by the owner, or hinted, or being written, or free to be evicted
//
// Reading order: embedding_format.h, embedding_block_map.h, this file, embedding_page_cache.cpp
//                (pins, loads), embedding_page_writes.cpp (eviction, writes), embedding_shrink.cpp.
//
// Threads: pin() … snapshot() for the owner; load_hinted() and wait_for_room() for the look-ahead
//          thread; write_back() for the write-back thread; shrink() and grow_back() for any. One
//          mutex, never held across the disk or the arithmetic on rows; one more, taken before it,
//          makes changes of the slab's size take turns.
// Memory:  memory_bytes(), from the slab.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/mutex.h"
#include "memory/slab.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/io_pool.h"
#include "plimsoll/embedding_store.h"
#include "store/embedding_block_map.h"
#include "store/embedding_format.h"
#include "store/embedding_next_use.h"
#include "store/id_index.h"
#include "store/stall.h"

namespace plimsoll {

class PageCache {
 public:
  struct Sizes {
    std::int64_t frames{0};
    std::int64_t write_batch{0};  ///< Pages per batch of writes; at least 2.
    std::int64_t read_batch{0};   ///< Pages per batch of reads; at least 1.
    /// Dirty pages beyond which the owner waits: 0: what the disk was seen to write in
    /// commit_seconds(), or no bound at all when every page has a frame.
    std::int64_t dirty_most{0};
    std::int64_t frames_least{32};  ///< That shrink() leaves.
  };
  /// A page that will be asked for. Ticks number the requests to come, from the oldest hint on.
  struct Hint {
    std::uint32_t page;
    std::uint32_t tick;
  };
  /// What never changes while the table is open. Pointers outlive the cache.
  struct Table {
    TableShape shape{};
    std::uint64_t fingerprint{0};
    RowInit init{};
    const IdIndex* ids{nullptr};
    File* file{nullptr};
    IoPool* pool{nullptr};
  };

  static std::int64_t frame_bytes(const TableShape& shape) noexcept;  ///< With its metadata.
  static std::int64_t buffer_bytes(const TableShape& shape, const Sizes& sizes) noexcept;
  static std::int64_t index_bytes(const TableShape& shape) noexcept;  ///< Page → frame, heat.

  PageCache(const Table& table, const Sizes& sizes, BlockMap& map, Slab& slab);

  /// The frames as plain memory, before anything is loaded into them.
  [[nodiscard]] std::span<std::byte> frame_memory() noexcept { return data_; }
  /// The file is so long: what blocks it holds have a place on disk. Before the first write.
  void found_file(std::int64_t bytes);

  // ---- The owner ----
  /// Pages that one pin() can hold.
  [[nodiscard]] std::int64_t pin_limit() const;
  /// The request announced with `tick` is about to be made: hints up to it have come too late.
  void reached(std::uint32_t tick) noexcept;

  /// Errors: what poisoned the cache.
  Result<void> begin_request();
  /// Brings rows into RAM and keeps them there until unpin(). A key is ordinal << 32 | anything.
  /// Returns how many of the keys, from the first, were pinned: at least one, fewer than all when
  /// their pages are more than half of the frames. With `to_write` their pages become dirty.
  /// Shape:  records has a place for each key; receives the address of its record.
  /// Errors: kCorrupt, kIo; nothing is pinned then.
  Result<std::int64_t> pin(std::span<const std::uint64_t> keys, bool to_write,
                           std::span<std::byte*> records);
  void unpin() noexcept;

  /// Writes every dirty page but a last batch, which is sealed and in the block map as if written.
  /// Returns the requests that write it, and behind them one for the caller; end_commit() follows.
  /// Errors: kIo; poisons.
  Result<std::span<IoRequest>> begin_commit();
  /// They were carried out, in `took_ns`. An error in `written` must poison.
  void end_commit(const Result<void>& written, std::int64_t took_ns);
  /// What was written has become the commit in superblock slot `slot`, with `syncs` syncs. `keep`:
  /// the one there is pinned; not `still_pinned`: none that was there before is any more.
  void committed(int slot, bool keep, bool still_pinned, std::int64_t syncs) noexcept;

  /// Copies whole pages `first`, `first` + 1, … as they are now, without loading them into frames.
  /// Requires: out is of scratch(), its size a multiple of page_bytes; that many pages exist.
  Result<void> snapshot(std::int64_t first, std::span<std::byte> out);

  /// Memory of the owner's lane, for use between two calls of the above.
  [[nodiscard]] std::span<std::byte> scratch() noexcept { return owner_.buffer; }

  void poison(const Error& error);
  [[nodiscard]] Result<void> poisoned() const;
  [[nodiscard]] StoreStats stats() const;

  // ---- Any thread ----
  /// Gives back regions of kRegionBytes at the end until `wanted_bytes` are on their way, or
  /// frames_least frames are left; returns what went at once. The rest follows. No I/O, no waiting.
  std::int64_t shrink(std::int64_t wanted_bytes) noexcept;
  /// Waits, two seconds at most, until some of that has followed; returns how many bytes.
  std::int64_t flush() noexcept;
  /// Takes back up to `wanted_bytes` of that, in whole regions; returns how many.
  std::int64_t grow_back(std::int64_t wanted_bytes) noexcept;
  [[nodiscard]] std::int64_t given_bytes() const;  ///< Of the slab, not leased now.

  // ---- The look-ahead thread ----
  /// Loads pages that will be asked for soon. Returns how many of them were dealt with; fewer than
  /// all when half of the frames are hinted already.
  std::size_t load_hinted(std::span<const Hint> hints);
  /// Waits until there is room for more hints; hints nobody used for long are given up.
  void wait_for_room();
  /// Makes wait_for_room() and write_back() return at once, from now on.
  void stop();

  // ---- The write-back thread ----
  /// Waits until more than half of the dirty pages allowed are dirty; of those dirty for longest it
  /// writes the least used. False: stopped, or a write failed (the cache is poisoned).
  bool write_back();

 private:
  static constexpr std::uint32_t kNone = 0xFFFFFFFFU;
  static constexpr std::uint32_t kStaleRequests = 64;
  static constexpr double kWriteRateFirst = 1e9;
  static constexpr int kRoundsMost = 128;                // Told apart in a frame's disuse.
  static constexpr std::int64_t kRegionBytes = 2 << 20;  // A huge page.

  enum class State : std::uint8_t { kEmpty, kReading, kReady };
  enum Flag : std::uint8_t {
    kDirty = 1,        // Changed since it was last copied for writing.
    kHinted = 4,       // Protected until used.
    kFetched = 8,      // Brought by the look-ahead.
    kWriting = 16,     // Chosen for writing; stays until that is done.
    kCopying = 32,     // Being copied for writing: may not be changed just now.
    kListed = 64,      // In dirty_list_.
    kBackground = 128  // Being read by the look-ahead thread.
  };
  struct Frame {
    std::uint32_t page{kNone};
    std::uint32_t pin{0};        // Equal to pin_: pinned.
    std::uint32_t hinted_at{0};  // Request number.
    std::uint32_t used_at{0};    // Request number.
    NextUse coming{};            // Meant only with kHinted.
    State state{State::kEmpty};
    std::uint8_t flags{0};
    std::uint8_t heat{0};   // How often used, ageing.
    std::uint8_t round{0};  // When last used, in rounds_.
  };
  static_assert(sizeof(Frame) == 28);

  // What one thread needs to move pages.
  struct Lane {
    std::span<std::byte> buffer{};  // write_batch pages.
    std::span<IoRequest> requests{};
    std::span<std::uint32_t> cleaning{};     // Frames being written.
    std::span<std::uint32_t> write_pages{};  // The page of each of them.
    std::span<BlockEntry> written{};         // Where each of them goes.
    std::span<std::uint32_t> reading{};      // Frames being read; read_count of them.
    std::span<std::uint32_t> pages{};        // The page of each of them.
    std::span<BlockEntry> sources{};         // Where each of them comes from.
    std::int64_t read_count{0};
    std::int64_t reserve_from{0};  // Blocks to be given a place on disk before the writes.
    std::int64_t reserve_to{0};
    std::int64_t sealed{0};  // Frames of a commit's last batch, until end_commit().
    bool background{false};
  };
  Lane make_lane(const Sizes& sizes, Slab& slab, bool background) const;
  [[nodiscard]] std::span<std::byte> frame_data(std::uint32_t frame) const noexcept;

  // Pins and loads.
  Result<void> settle(std::span<const std::uint64_t> keys, bool to_write,
                      std::span<std::byte*> records) PLIMSOLL_REQUIRES(mutex_);
  Result<std::uint32_t> start_load(Lane& lane, std::uint32_t page) PLIMSOLL_REQUIRES(mutex_);
  Result<void> finish_loads(Lane& lane) PLIMSOLL_REQUIRES(mutex_);
  Result<void> read_pages(Lane& lane, std::int64_t count);
  Result<void> read_written(const Lane& lane, std::size_t count) const;
  Result<void> check_page(std::uint32_t page, BlockEntry entry,
                          std::span<const std::byte> bytes) const;
  Result<void> init_page(std::uint32_t page, std::span<std::byte> bytes) const;
  void use(Frame& frame, bool to_write) PLIMSOLL_REQUIRES(mutex_);
  void age() PLIMSOLL_REQUIRES(mutex_);
  [[nodiscard]] bool is_late(std::uint32_t tick) const PLIMSOLL_REQUIRES(mutex_);
  void add_hint(Frame& frame, std::uint32_t tick) PLIMSOLL_REQUIRES(mutex_);
  void unhint(Frame& frame) PLIMSOLL_REQUIRES(mutex_);
  void mark_dirty(std::uint32_t frame) PLIMSOLL_REQUIRES(mutex_);
  void await_copy(std::uint32_t frame) PLIMSOLL_REQUIRES(mutex_);

  // Shrinking.
  [[nodiscard]] std::int64_t frames_in(std::int64_t regions) const noexcept;
  [[nodiscard]] std::int64_t regions_least() const PLIMSOLL_REQUIRES(mutex_);
  [[nodiscard]] std::int64_t region_offset(std::int64_t region) const noexcept;
  void set_present(std::int64_t frames) PLIMSOLL_REQUIRES(mutex_);
  std::int64_t give_regions() PLIMSOLL_REQUIRES(resize_mutex_);
  bool vacate(std::uint32_t frame, std::uint32_t& spare) PLIMSOLL_REQUIRES(mutex_);
  bool move_page(std::uint32_t from, std::uint32_t& spare) PLIMSOLL_REQUIRES(mutex_);

  // Eviction and writes.
  Result<void> refill(Lane& lane) PLIMSOLL_REQUIRES(mutex_);
  std::int64_t sweep(Lane& lane) PLIMSOLL_REQUIRES(mutex_);
  std::size_t find_candidates(bool hinted) PLIMSOLL_REQUIRES(mutex_);
  [[nodiscard]] std::uint32_t often_used(const Frame& frame) const PLIMSOLL_REQUIRES(mutex_);
  [[nodiscard]] std::uint64_t worth(const Frame& frame) const PLIMSOLL_REQUIRES(mutex_);
  Result<std::span<IoRequest>> write_listed() PLIMSOLL_REQUIRES(mutex_);
  std::size_t seal_last(std::int64_t count) PLIMSOLL_REQUIRES(mutex_);
  std::int64_t choose_dirty(Lane& lane) PLIMSOLL_REQUIRES(mutex_);
  std::int64_t choose_among(Lane& lane, std::int64_t count) PLIMSOLL_REQUIRES(mutex_);
  void list_dirty(std::uint32_t frame) PLIMSOLL_REQUIRES(mutex_);
  [[nodiscard]] std::int64_t dirty_most() const PLIMSOLL_REQUIRES(mutex_);
  [[nodiscard]] bool wants_write_back() const PLIMSOLL_REQUIRES(mutex_);
  std::int64_t choose_leaving(Lane& lane) PLIMSOLL_REQUIRES(mutex_);
  void await_dirty_room(std::int64_t rows) PLIMSOLL_REQUIRES(mutex_);
  [[nodiscard]] bool pinned(const Frame& frame) const PLIMSOLL_REQUIRES(mutex_);
  [[nodiscard]] bool resident() const PLIMSOLL_REQUIRES(mutex_);  // All pages; none is evicted.
  [[nodiscard]] std::int64_t pin_most() const PLIMSOLL_REQUIRES(mutex_);
  [[nodiscard]] std::int64_t hint_most() const PLIMSOLL_REQUIRES(mutex_);  // Protected at once.
  void drop(std::uint32_t frame) PLIMSOLL_REQUIRES(mutex_);
  Result<void> write_frames(Lane& lane, std::int64_t count) PLIMSOLL_REQUIRES(mutex_);
  void sort_by_page(std::span<std::uint32_t> indexes) const PLIMSOLL_REQUIRES(mutex_);
  void begin_write(Lane& lane, std::int64_t count) PLIMSOLL_REQUIRES(mutex_);
  void reserve(Lane& lane, const BlockMap::Run& run) PLIMSOLL_REQUIRES(mutex_);
  void set_blocks(const Lane& lane, std::int64_t count, bool ok) PLIMSOLL_REQUIRES(mutex_);
  void let_go(Lane& lane, std::int64_t count, const Result<void>& result) PLIMSOLL_REQUIRES(mutex_);
  std::span<IoRequest> copy_and_seal(Lane& lane, std::int64_t count);

  const Table table_;
  const Sizes sizes_;
  Slab& slab_;
  std::span<std::byte> data_{};  // The frames. Written by whoever holds the frame.
  std::int64_t head_bytes_{0};   // Of data_, before its first region.
  std::int64_t regions_{0};      // Of data_, all.

  mutable Mutex resize_mutex_;  // The slab's lease, and which of its pages are held.
  std::int64_t regions_held_ PLIMSOLL_GUARDED_BY(resize_mutex_){0};  // Those before present_.

  mutable Mutex mutex_;  // Guards everything below but the lanes' buffers.
  CondVar changed_;      // A load or write ended.
  CondVar room_;         // The look-ahead may go on.
  CondVar dirtied_;      // The write-back may have work.
  BlockMap& map_ PLIMSOLL_GUARDED_BY(mutex_);
  std::span<Frame> frames_ PLIMSOLL_GUARDED_BY(mutex_){};
  std::span<std::uint32_t> frame_of_ PLIMSOLL_GUARDED_BY(mutex_){};    // By page, or kNone.
  std::span<std::uint32_t> free_ PLIMSOLL_GUARDED_BY(mutex_){};        // A stack of empty frames.
  std::span<std::uint8_t> heat_ PLIMSOLL_GUARDED_BY(mutex_){};         // By page not in a frame.
  std::span<std::uint32_t> dirty_list_ PLIMSOLL_GUARDED_BY(mutex_){};  // Frames flagged kListed,
  std::int64_t list_head_ PLIMSOLL_GUARDED_BY(mutex_){0};              //   from here to listed_.
  std::span<std::uint64_t> candidates_ PLIMSOLL_GUARDED_BY(mutex_){};  // worth() << 32 | frame.
  std::int64_t present_ PLIMSOLL_GUARDED_BY(mutex_){0};     // Frames that take in pages: the first.
  std::int64_t free_count_ PLIMSOLL_GUARDED_BY(mutex_){0};  // Of those.
  std::int64_t listed_ PLIMSOLL_GUARDED_BY(mutex_){0};
  std::int64_t dirty_ PLIMSOLL_GUARDED_BY(mutex_){0};
  std::int64_t reserved_ PLIMSOLL_GUARDED_BY(mutex_){0};  // Blocks with a place on disk: the first.
  std::int64_t hinted_ PLIMSOLL_GUARDED_BY(mutex_){0};
  std::int64_t writers_ PLIMSOLL_GUARDED_BY(mutex_){0};  // Batches of writes under way.
  std::uint32_t hand_ PLIMSOLL_GUARDED_BY(mutex_){0};
  std::uint32_t pin_ PLIMSOLL_GUARDED_BY(mutex_){0};  // The pin in force, or 0.
  std::uint32_t pin_last_ PLIMSOLL_GUARDED_BY(mutex_){0};
  std::uint32_t request_ PLIMSOLL_GUARDED_BY(mutex_){0};
  std::uint32_t reached_ PLIMSOLL_GUARDED_BY(mutex_){kNone};         // Tick of the owner's request.
  std::int64_t uses_ PLIMSOLL_GUARDED_BY(mutex_){0};                 // Of this round.
  std::uint8_t rounds_ PLIMSOLL_GUARDED_BY(mutex_){0};               // Each a use per frame.
  double write_rate_ PLIMSOLL_GUARDED_BY(mutex_){kWriteRateFirst};   // Bytes a second.
  std::int64_t committed_ns_ PLIMSOLL_GUARDED_BY(mutex_){now_ns()};  // When; or when opened.
  bool committing_ PLIMSOLL_GUARDED_BY(mutex_){false};   // All that is dirty is to be written.
  bool owner_waits_ PLIMSOLL_GUARDED_BY(mutex_){false};  // For fewer dirty pages.
  bool look_ahead_busy_ PLIMSOLL_GUARDED_BY(mutex_){false};
  bool look_ahead_waits_ PLIMSOLL_GUARDED_BY(mutex_){false};
  bool leaving_ PLIMSOLL_GUARDED_BY(mutex_){false};  // Frames behind present_ still hold pages.
  bool stopping_ PLIMSOLL_GUARDED_BY(mutex_){false};
  std::optional<Error> poison_ PLIMSOLL_GUARDED_BY(mutex_);
  StoreStats stats_ PLIMSOLL_GUARDED_BY(mutex_){};
  Lane owner_;       // Used by the owner alone.
  Lane look_ahead_;  // Used by the look-ahead thread alone.
  Lane write_back_;  // Used by the write-back thread alone.
};

}  // namespace plimsoll
