// SPDX-License-Identifier: Apache-2.0
//
// EmbeddingStore::Timeline: a table whose rows lie where the order of samples will want them.
//
// The state is (epoch, cursor). Rows at positions >= cursor of the epoch being read are in the
// source buckets of that epoch; rows at positions < cursor have moved to the target buckets of the
// next one. The cursor follows the requests: a batch that continues the order moves its rows, and
// those it skips; any other change appends a newer version to the bucket where the row is.
// Nobody keeps an index: the order tells the bucket. Rows that were inserted stand behind the order
// of an epoch that has begun, and in that of one to which nothing was written yet (epoch_order.h).
//
// Reading order: docs/formats/embedding_timeline.md, embedding_engine.h, timeline_io.h, this file,
//                timeline.cpp (requests), timeline_move.cpp (cursor, epochs, folding),
//                timeline_lookup.cpp (rows anywhere, scan), timeline_grow.cpp, timeline_commit.cpp,
//                timeline_open.cpp.
//
// Threads: see embedding_store.h.   Memory: see timeline_layout.h.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "store/embedding_engine.h"
#include "store/epoch_order.h"
#include "store/timeline_io.h"
#include "store/timeline_layout.h"
#include "store/timeline_space.h"

namespace plimsoll {

class IdSource;

class EmbeddingStore::Timeline final : public EmbeddingStore::Engine {
 public:
  /// `source`: the ids, when the table is to be created; else nullptr.
  static Result<std::unique_ptr<Engine>> open(const Governor& governor,
                                              const EmbeddingStoreOptions& options,
                                              const TableDescription& table,
                                              const IdSource* source);
  Timeline(const EmbeddingStoreOptions& options, const TableDescription& table,
           const TimelineLayout& layout);

  void prefetch(std::span<const std::int64_t>) noexcept override {}
  Result<void> begin_epoch(std::int64_t epoch) override;
  Result<void> erase(std::span<const std::int64_t> ids) override;
  Result<void> scan(const Visit& visit) override;
  Result<void> visit_rows(const Visit& visit) override;
  [[nodiscard]] std::int64_t rows() const override { return count_; }
  [[nodiscard]] StoreStats stats() const override;

 private:
  using Frame = TimelineIo::Frame;
  using Stream = TimelineSpace::Stream;

  // A row looked for out of order.
  struct Wanted {
    std::int64_t position;  // In the source order.
    std::int64_t id;
    std::uint32_t ordinal;
    std::uint32_t tag;    // The caller's: a place in its request.
    std::uint32_t place;  // side × buckets + bucket.
    std::uint32_t slot;   // Of staging_.
    std::uint32_t found;
    std::uint32_t reserved;
  };
  static_assert(sizeof(Wanted) == 40);

  // The bucket under the cursor and the one after it: where they end, and frames that are read.
  struct Near {
    std::int64_t here;
    std::int64_t next;
    std::array<const Frame*, 2> frames{};
  };

  // Unique rows [first, first + count) stand at positions [begin, begin + count).
  struct Run {
    std::int64_t first{0};
    std::int64_t count{0};
    std::int64_t begin{0};
  };

  // Written by the owner only, and read by any thread that asks for stats().
  class Count {
   public:
    void operator+=(std::int64_t more) noexcept {
      value_.store(value_.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
    }
    [[nodiscard]] std::int64_t get() const noexcept {
      return value_.load(std::memory_order_relaxed);
    }

   private:
    std::atomic<std::int64_t> value_{0};
  };

  // Opening (timeline_open.cpp).
  Result<void> take_memory(const Governor& governor);
  Result<void> open_table(const EmbeddingStoreOptions& options);
  Result<void> open_commit(std::int64_t at_step);
  Result<void> keep_other_commit(int slot);
  Result<std::span<const std::byte>> read_map(int slot);

  // Requests (timeline.cpp).
  Result<void> begin_request(std::span<const std::int64_t> ids, bool reads) override;
  void poison(const Error& error) override;
  Result<void> sound() override;
  Result<void> gather_piece(std::span<const std::int64_t> ids, std::span<float> out) override;
  std::int64_t find_unique(std::int64_t count) override;
  Result<void> change(std::int64_t unique, const Change& how, bool& changed) override;
  void find_positions(std::int64_t count);
  Result<Near> load_near(std::int64_t count);
  [[nodiscard]] const Frame* frame_of(const Near& near, std::uint64_t key) const noexcept;
  Result<void> gather_far(std::span<const std::int64_t> ids, std::span<float> out,
                          const Near& near);
  [[nodiscard]] Run in_order(std::int64_t unique) const noexcept;
  Result<void> change_strays(std::int64_t begin, std::int64_t end, const Change& how,
                             bool& changed);
  void renew_frame(std::int64_t bucket, std::int64_t position, const std::byte* record);

  // Buckets, the cursor and epochs (timeline_move.cpp).
  void follow(EpochKey source, EpochKey parent, EpochKey target) noexcept;
  void aim(EpochKey target) noexcept;
  [[nodiscard]] const EpochKey& key_of(int side) const noexcept;
  Stream& stream(std::uint32_t place) noexcept;
  [[nodiscard]] std::uint32_t stream_place(int side, std::int64_t bucket) const noexcept;
  Frame* find_frame(std::int64_t bucket) noexcept;
  Result<Frame*> ensure(std::int64_t bucket);
  Result<void> begin_load(Frame& frame, int side, std::int64_t bucket);
  Result<void> load_next();
  Result<void> flush(std::uint32_t& open);
  void drop_open(std::uint32_t place);
  Result<void> drop_newer_commit();
  std::byte* reserve(std::uint32_t place);
  Result<void> submit_full();
  Result<void> make_room();
  Result<void> append(std::uint32_t place, const std::byte* record);
  Result<void> advance(std::int64_t end, const Run& run, const Change* how, bool& changed);
  Result<std::int64_t> move_block(Frame& frame, std::int64_t count, const Run& run,
                                  const Change* how);
  void fill_block(const Frame& frame, std::int64_t begin, std::int64_t end, const Run& run,
                  const Change* how, int member) noexcept;
  Result<void> keep_room();
  Result<void> fold(std::uint32_t place);
  Result<void> end_epoch();
  [[nodiscard]] bool target_is_empty() noexcept;
  void drop_frames();

  // Ids that come (timeline_commit.cpp).
  Result<void> write_new_rows(std::int64_t added, bool& changed) override;
  Result<void> read_new_ids(const TimelineState& state);
  Result<void> save_new_ids();
  Result<std::int64_t> id_of(std::int64_t ordinal) const;

  // Rows anywhere (timeline_lookup.cpp).
  Result<void> lookup(std::span<Wanted> wanted);
  bool copy_from_frame(const Wanted& wanted);
  template <class Rows>
  Result<void> each_extent(std::uint32_t place, Rows&& rows);
  Result<void> look_through(std::span<Wanted> group);
  Result<void> probe(std::span<Wanted> group);
  Result<void> probe_one(Wanted& wanted, const EpochOrder& order);
  void look_in_rows(std::span<Wanted> group, const std::byte* rows, std::uint32_t count) noexcept;
  [[nodiscard]] std::pair<TimelineSpace::Walk, std::int64_t> find_row(
      const Stream& s, std::int64_t row) const noexcept;
  void look_in_chunk(std::span<Wanted> group) noexcept;
  std::byte* staged(const Wanted& wanted) noexcept;
  Result<void> scan_pass(std::int64_t first, std::int64_t count);
  Result<void> scan_stream(std::uint32_t place, std::int64_t first, std::int64_t count);
  void scan_rows(int side, const std::byte* rows, std::uint32_t count, std::int64_t first,
                 std::int64_t wanted) noexcept;
  Result<void> show_rows(std::int64_t first, std::int64_t count, const Visit& visit);
  Result<void> show_bucket(const Frame& frame, const Visit& visit);

  // Commit (timeline_commit.cpp).
  Result<void> make_durable(std::int64_t step) override;

  const TimelineLayout layout_;
  const TimelineShape& grid_;
  const std::int64_t rows_per_chunk_;
  std::int64_t count_;             // Rows that there are.
  std::int64_t new_ids_saved_{0};  // Of the inserted ids, those in rows.new,
  std::uint32_t new_ids_crc_{0};   // and their checksum.
  File new_ids_file_;
  TimelineSpace space_;
  std::int64_t reserved_{0};  // Segments at the front of rows_file_ that have a place on disk.
  std::optional<Error> poison_;

  std::uint64_t order_seed_;  // Of epochs that begin from now on.
  EpochKey source_key_{};
  EpochKey parent_key_{};
  EpochKey target_key_{};
  EpochOrder source_{{}};
  EpochOrder parent_{{}};
  EpochOrder target_{{}};
  int source_side_{0};
  std::int64_t cursor_{0};

  std::span<std::uint32_t> open_;  // By place: the chunk being filled, or kNone.
  // Scratch of one request, in the slab.
  std::span<std::byte> staging_;
  std::span<Wanted> wanted_;
  std::span<std::byte> scratch_;  // One extent.
  std::span<std::byte> map_;
  // Of one block of rows.
  std::array<std::int64_t, kTimelineBlockRows> block_target_{};
  std::array<std::byte*, kTimelineBlockRows> block_to_{};
  std::array<std::uint32_t, kTimelineBlockRows> full_{};
  std::int64_t fulls_{0};

  Count requests_;
  Count hits_;
  Count commits_;
  Count syncs_;
  Count map_bytes_written_;
  Count open_rows_;  // In chunks that the disk was not given.

  std::unique_ptr<TimelineIo> io_;  // Last: its threads use all of the above.
};

}  // namespace plimsoll
