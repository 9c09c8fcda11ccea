// SPDX-License-Identifier: Apache-2.0
//
// EmbeddingStore::Impl: the parts of an open table and the scratch of one request.
//
// Reading order: include/plimsoll/embedding_store.h, this file, embedding_store.cpp (requests),
//                embedding_store_grow.cpp (ids that come and go), embedding_store_commit.cpp
//                (commit and scan), embedding_store_open.cpp, embedding_pinned.cpp.
//
// Threads: see embedding_store.h.   Memory: see embedding_layout.h.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "memory/admission.h"
#include "memory/slab.h"
#include "os/file.h"
#include "os/io_pool.h"
#include "plimsoll/embedding_store.h"
#include "store/commit_pins.h"
#include "store/embedding_block_map.h"
#include "store/embedding_description.h"
#include "store/embedding_engine.h"
#include "store/embedding_files.h"
#include "store/embedding_growing_ids.h"
#include "store/embedding_layout.h"
#include "store/embedding_look_ahead.h"
#include "store/embedding_page_cache.h"
#include "store/embedding_write_back.h"
#include "store/id_index.h"
#include "store/row_crew.h"
#include "store/row_record.h"

namespace plimsoll {

class IdSource;

class EmbeddingStore::Impl final : public EmbeddingStore::Engine, public Reclaimer {
 public:
  static Result<std::unique_ptr<Engine>> open(const Governor& governor,
                                              const EmbeddingStoreOptions& options);
  Impl(const Governor& governor, const EmbeddingStoreOptions& options,
       const TableDescription& table, const EmbeddingLayout& layout);

  /// The table that `options` speak of: one that is there, or would be.
  struct Described;
  static Result<Described> describe(const EmbeddingStoreOptions& options);

  Result<void> gather(std::span<const std::int64_t> ids, std::span<float> out) override;
  Result<void> apply(std::span<const std::int64_t> ids, std::span<const float> grads,
                     float rate_scale) override;
  Result<void> update(std::span<const std::int64_t> ids, std::span<const float> rows) override;
  Result<void> restore(std::span<const std::int64_t> ids, std::span<const std::uint32_t> sequences,
                       std::span<const float> values) override;
  void prefetch(std::span<const std::int64_t> ids) noexcept override { look_ahead_->hint(ids); }
  Result<void> begin_epoch(std::int64_t) override { return {}; }
  Result<std::int64_t> insert(std::span<const std::int64_t> ids) override;
  Result<void> erase(std::span<const std::int64_t> ids) override;
  Result<void> commit(std::int64_t step) override;
  Result<void> scan(const Visit& visit) override;
  Result<void> set_optimizer(const RowOptimizerOptions& options) override;
  [[nodiscard]] const std::filesystem::path& directory() const noexcept override {
    return directory_;
  }
  [[nodiscard]] bool pinned() const noexcept override { return pinned_; }
  [[nodiscard]] Error explained(Error error) const override;
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

  [[nodiscard]] const TableShape& shape() const noexcept override { return shape_; }
  [[nodiscard]] std::int64_t rows() const override {
    return growing_ ? growing_->rows() : shape_.rows;
  }
  [[nodiscard]] std::int64_t last_commit() const noexcept override { return last_commit_; }
  [[nodiscard]] const SlabPlan& plan() const noexcept override { return layout_.plan; }
  [[nodiscard]] StoreStats stats() const override { return cache_->stats(); }

 private:
  // Opening (embedding_store_open.cpp).
  static Result<bool> has_changed(const std::filesystem::path& directory,
                                  const Described& described);
  static Result<std::unique_ptr<Engine>> open_described(const Governor& governor,
                                                        const EmbeddingStoreOptions& options,
                                                        const Described& described);
  Result<void> take_memory(const Governor& governor);
  Result<void> create_files(const IdSource& source) {
    return create_table_files(directory_, table_, source, cache_->frame_memory());
  }
  Result<void> open_files(const EmbeddingStoreOptions& options);
  Result<void> open_commit(std::int64_t at_step);
  Result<void> read_map(int slot);
  Result<void> keep_other_commit(int slot);

  // Opening to read (embedding_pinned.cpp).
  Result<void> open_pinned(std::int64_t at_step);
  Result<bool> pin_commit(std::int64_t at_step);

  // Requests (embedding_store.cpp).
  Result<void> resolve(std::span<const std::int64_t> ids) {
    return growing_ ? find_rows(*growing_, directory_, ids, found_)
                    : find_rows(ids_, shape_.rows, directory_, ids, found_);
  }
  Result<void> set_rows(std::span<const std::int64_t> ids, std::span<const std::uint32_t> sequences,
                        std::span<const float> values, std::int64_t width);
  Result<void> set_piece(std::int64_t count, std::span<const std::uint32_t> sequences,
                         std::span<const float> values, std::int64_t width, bool& changed);
  void order_by_page(std::span<std::uint64_t> keys) const;
  std::int64_t find_duplicates(std::int64_t count);
  Result<void> check_gradients(std::span<const std::int64_t> ids, std::span<const float> grads,
                               std::int64_t unique);
  const float* gradient_of(std::uint32_t unique, std::span<const float> grads,
                           std::span<float> sum) const noexcept;
  void step_rows(std::int64_t begin, std::int64_t end, std::span<const std::uint64_t> keys,
                 std::span<const float> grads, int member, double rate_scale) noexcept;

  // Growing (embedding_store_grow.cpp).
  [[nodiscard]] Result<void> check_growing(const char* what) const;
  Result<void> write_new_rows(bool& changed);
  Result<void> erase_piece(std::span<const std::int64_t> ids, bool again);

  // Commit (embedding_store_commit.cpp).
  Result<void> make_durable(std::int64_t step);
  Result<void> write_pages_and_map(int map, std::span<IoRequest> last);
  Result<void> write_map(int map);
  IoRequest map_request(int map, std::int64_t first, std::int64_t count);
  Result<std::int64_t> take_rows(std::int64_t first, std::span<const std::byte> pages,
                                 std::span<std::byte> out) const;

  const std::filesystem::path directory_;
  const TableDescription table_;
  const TableShape shape_;
  const EmbeddingLayout layout_;
  Admission admission_;
  Slab slab_;

  IdIndex ids_;
  File rows_file_;
  std::array<File, kMaps> map_files_;
  SuperFile super_;
  CommitPins pins_;
  const bool pinned_;  // Opened to be read, while somebody else may train.
  std::unique_ptr<IoPool> pool_;
  std::optional<BlockMap> map_;
  std::optional<GrowingIds> growing_;  // Of a table with rows_max.
  std::unique_ptr<PageCache> cache_;
  std::unique_ptr<RowCrew> crew_;
  RecordStep optimizer_;
  int slot_{-1};  // Superblock slot of the commit this state grew from; −1: none.
  std::int64_t last_commit_{-1};

  // Scratch of one request, in the slab; batch_rows of each, but for the last four.
  FoundRows found_;                 // Of the last request.
  std::span<std::uint64_t> keys_;   // ordinal << 32 | position in the request or unique row.
  std::span<std::byte*> records_;   // Where pin() found each key's record.
  std::span<std::uint32_t> first_;  // Of each unique row: its first and last position,
  std::span<std::uint32_t> last_;   //   joined by next_, which is indexed by position.
  std::span<std::uint32_t> next_;
  std::span<std::uint32_t> hash_;  // Unique row by hash of its ordinal, or kEmptyPlace.
  std::span<float> sums_;          // dim per member of the crew: summed gradients,
  std::span<float> wide_;          // and a row as float32 where it is not stored so.
  std::span<AdamCorrection> corrections_;

  std::unique_ptr<WriteBack> write_back_;  // Its thread uses the cache.
  std::unique_ptr<LookAhead> look_ahead_;  // Its thread uses all of the above.
  ReclaimerHandle reclaimer_;              // Last: the governor may call until it is gone.
};

}  // namespace plimsoll
