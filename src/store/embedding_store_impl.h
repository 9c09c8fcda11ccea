// SPDX-License-Identifier: Apache-2.0
//
// EmbeddingStore::Impl: a table whose rows lie in any order, in pages.
//
// Reading order: embedding_engine.h, this file, embedding_store.cpp (requests; ids that come and
//                go), embedding_store_commit.cpp (commit and scan), embedding_store_open.cpp.
//
// Threads: see embedding_store.h.   Memory: see embedding_layout.h.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <thread>

#include "plimsoll/embedding_store.h"
#include "store/commit_pins.h"
#include "store/embedding_block_map.h"
#include "store/embedding_engine.h"
#include "store/embedding_layout.h"
#include "store/embedding_look_ahead.h"
#include "store/embedding_page_cache.h"

namespace plimsoll {

class IdSource;

class EmbeddingStore::Impl final : public EmbeddingStore::Engine, public Reclaimer {
 public:
  static Result<std::unique_ptr<Engine>> open(const Governor& governor,
                                              const EmbeddingStoreOptions& options);
  Impl(const EmbeddingStoreOptions& options, const TableDescription& table,
       const EmbeddingLayout& layout);

  /// The table that `options` speak of: one that is there, or would be.
  struct Described;
  static Result<Described> describe(const EmbeddingStoreOptions& options);

  void prefetch(std::span<const std::int64_t> ids) noexcept override { look_ahead_->hint(ids); }
  Result<void> begin_epoch(std::int64_t) override { return {}; }
  Result<void> erase(std::span<const std::int64_t> ids) override;
  Result<void> scan(const Visit& visit) override;
  std::int64_t shrink(std::int64_t wanted_bytes) noexcept override {
    return cache_->shrink(wanted_bytes);
  }
  // Of the Engine and of the Reclaimer.
  std::int64_t grow_back(std::int64_t room_bytes) noexcept override {
    return cache_->grow_back(room_bytes);
  }
  [[nodiscard]] std::int64_t given_bytes() const override { return cache_->given_bytes(); }

  // Before a stop: what an earlier shrink left to be written first.
  std::int64_t reclaim(PressureMove move, std::int64_t wanted_bytes) noexcept override {
    return move == PressureMove::kShrink ? shrink(wanted_bytes)
           : move == PressureMove::kStop ? cache_->flush()
                                         : 0;
  }
  [[nodiscard]] const char* name() const noexcept override { return "rows"; }

  [[nodiscard]] std::int64_t rows() const override {
    return growing_ ? growing_->rows() : shape_.rows;
  }
  [[nodiscard]] StoreStats stats() const override { return cache_->stats(); }

 private:
  // Opening (embedding_store_open.cpp).
  static Result<bool> has_changed(const std::filesystem::path& directory,
                                  const Described& described);
  static Result<std::unique_ptr<Engine>> open_described(const Governor& governor,
                                                        const EmbeddingStoreOptions& options,
                                                        const Described& described);
  Result<void> take_memory(const Governor& governor);
  Result<void> open_table(const EmbeddingStoreOptions& options);
  void write_back() noexcept;
  Result<void> open_commit(std::int64_t at_step);
  Result<void> read_map(int slot);
  Result<void> keep_other_commit(int slot);
  Result<void> open_pinned(std::int64_t at_step);
  Result<bool> pin_commit(std::int64_t at_step);

  // Requests (embedding_store.cpp).
  Result<void> begin_request(std::span<const std::int64_t> ids, bool reads) override;
  void poison(const Error& error) override { cache_->poison(error); }
  Result<void> sound() override { return cache_->poisoned(); }
  Result<void> gather_piece(std::span<const std::int64_t> ids, std::span<float> out) override;
  std::int64_t find_unique(std::int64_t count) override;
  Result<void> change(std::int64_t unique, const Change& how, bool& changed) override;
  void order_by_page(std::span<std::uint64_t> keys) const;
  class NewRow;
  Result<void> write_new_rows(std::int64_t added, bool& changed) override;
  Result<void> erase_piece(std::span<const std::int64_t> ids, bool again);

  // Commit (embedding_store_commit.cpp).
  Result<void> make_durable(std::int64_t step) override;
  Result<void> write_pages_and_map(int map, std::span<IoRequest> last);
  Result<void> write_map(int map);
  IoRequest map_request(int map, std::int64_t first, std::int64_t count);
  Result<void> show_pages(std::int64_t first, std::span<const std::byte> pages, Shown& rows) const;

  const EmbeddingLayout layout_;
  CommitPins pins_;
  std::optional<BlockMap> map_;
  std::unique_ptr<PageCache> cache_;

  // Scratch of one request, in the slab.
  std::span<std::byte*> records_;  // Where pin() found each key's record.
  std::span<std::uint32_t> last_;  // By unique row: the last place of its id.
  std::span<std::uint32_t> hash_;  // Unique row by hash of its ordinal, or kNone.

  std::jthread write_back_;                // Keeps dirty pages few; ends when look_ahead_ is gone.
  std::unique_ptr<LookAhead> look_ahead_;  // Its thread uses all of the above.
  ReclaimerHandle reclaimer_;              // Last: the governor may call until it is gone.
};

}  // namespace plimsoll
