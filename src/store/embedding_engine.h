// SPDX-License-Identifier: Apache-2.0
//
// EmbeddingStore::Engine: an open table, whatever its layout: its files, its slab, its commit, and
// what of a request does not depend on where rows are.
//
// Impl (embedding_store_impl.h) keeps rows in any order, Timeline (timeline.h) in sample order.
//
// A request is resolved to ordinals, batch_rows at a time. Of one that changes rows, equal ids are
// joined first; the layout then finds each row once, and has it changed in place.
//
// Reading order: include/plimsoll/embedding_store.h, this file, embedding_engine.cpp, a layout.
//
// Threads: see embedding_store.h.   Memory: the scratch below, in the slab of the layout.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "memory/admission.h"
#include "memory/slab.h"
#include "os/file.h"
#include "os/folder_lock.h"
#include "os/fork.h"
#include "os/io_pool.h"
#include "plimsoll/embedding_store.h"
#include "store/embedding_description.h"
#include "store/embedding_files.h"
#include "store/embedding_format.h"
#include "store/embedding_growing_ids.h"
#include "store/id_index.h"
#include "store/row_crew.h"
#include "store/row_record.h"

namespace plimsoll {

class EmbeddingStore::Engine {
 public:
  using Visit = RowVisit;

  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  virtual ~Engine() = default;

  // As EmbeddingStore has them.
  Result<void> gather(std::span<const std::int64_t> ids, std::span<float> out);
  Result<void> apply(std::span<const std::int64_t> ids, std::span<const float> grads,
                     float rate_scale);
  Result<void> update(std::span<const std::int64_t> ids, std::span<const float> rows);
  Result<void> restore(std::span<const std::int64_t> ids, std::span<const std::uint32_t> sequences,
                       std::span<const float> values);
  Result<std::int64_t> insert(std::span<const std::int64_t> ids);
  Result<void> commit(std::int64_t step);
  Result<void> set_optimizer(const RowOptimizerOptions& options);
  virtual void prefetch(std::span<const std::int64_t> ids) noexcept = 0;
  virtual Result<void> begin_epoch(std::int64_t epoch) = 0;
  virtual Result<void> erase(std::span<const std::int64_t> ids) = 0;
  virtual Result<void> scan(const Visit& visit) = 0;
  virtual Result<void> visit_rows(const Visit& visit) { return scan(visit); }
  /// Here: there is nothing to give.
  virtual std::int64_t shrink(std::int64_t /*wanted_bytes*/) noexcept { return 0; }
  virtual std::int64_t grow_back(std::int64_t /*wanted_bytes*/) noexcept { return 0; }
  [[nodiscard]] virtual std::int64_t given_bytes() const { return 0; }
  [[nodiscard]] virtual std::int64_t rows() const = 0;
  [[nodiscard]] virtual StoreStats stats() const = 0;
  [[nodiscard]] const TableShape& shape() const noexcept { return shape_; }
  [[nodiscard]] std::int64_t last_commit() const noexcept { return last_commit_; }
  [[nodiscard]] const SlabPlan& plan() const noexcept { return plan_; }

  /// Keeps the table's lock as long as this lives, files and threads being gone before it.
  void hold(FolderLock lock) noexcept { lock_ = std::move(lock); }
  /// Whether this process was forked after the table was opened. There only the above is to be
  /// asked; what this holds must not be destroyed either: its threads are not there to be joined.
  [[nodiscard]] bool forked() const noexcept { return mark_.forked(); }
  [[nodiscard]] const ForkMark& mark() const noexcept { return mark_; }
  /// Errors: kInvalidArgument in a forked child.
  [[nodiscard]] Result<void> check_process(const char* what) const;
  /// Errors: as check_process(); kInvalidArgument when the table was opened to be read.
  [[nodiscard]] Result<void> check_writable(const char* what) const;
  /// What an error of a read really means, when the table was opened to be read.
  [[nodiscard]] Error explained(Error error) const;

 protected:
  Engine(const EmbeddingStoreOptions& options, const TableDescription& table, const SlabPlan& plan,
         int io_threads);

  // What a request does to one of its rows, in place. May run on any member of the crew.
  class Change {
   public:
    virtual ~Change() = default;
    /// `key`: of keys_.
    virtual void row(std::uint64_t key, std::byte* record, int member) const noexcept = 0;
  };

  // Rows on their way to a visitor: collected in some memory, and shown when it is full.
  class Shown {
   public:
    Shown(std::span<std::byte> memory, const TableShape& shape, const Visit& visit);
    Result<void> add(std::int64_t id, const std::byte* record);
    Result<void> flush();

   private:
    const TableShape& shape_;
    const Visit& visit_;
    std::size_t most_;
    std::int64_t* ids_;
    std::uint32_t* sequences_;
    float* values_;
    std::size_t count_{0};
  };

  // ---- What a layout does ----

  /// Errors: those of an earlier request that was left half done, or of a write. `reads`: it is a
  /// gather().
  virtual Result<void> begin_request(std::span<const std::int64_t> ids, bool reads) = 0;
  /// Nothing may be read, changed or kept from here on.
  virtual void poison(const Error& error) = 0;
  virtual Result<void> sound() = 0;
  /// Copies the weights of the ids resolved last.
  virtual Result<void> gather_piece(std::span<const std::int64_t> ids, std::span<float> out) = 0;
  /// Fills keys_ and next_ with the different ids among those resolved last; returns their number.
  virtual std::int64_t find_unique(std::int64_t count) = 0;
  /// Changes the rows of the first `unique` keys. `changed`: some were, be it before an error.
  virtual Result<void> change(std::int64_t unique, const Change& how, bool& changed) = 0;
  /// Gives the `added` new places their rows. `changed`: as change().
  virtual Result<void> write_new_rows(std::int64_t added, bool& changed) = 0;
  virtual Result<void> make_durable(std::int64_t step) = 0;

  // ---- Opening ----

  /// Takes the slab, once the plan was found to be within the governor's disk limit.
  /// Errors: kInvalidArgument (the disk limit), kOverBudget.
  Result<void> take_slab(const Governor& governor);
  /// Takes the scratch below from it.
  void take_scratch();
  Result<void> open_files(const EmbeddingStoreOptions& options, std::int64_t id_pages);
  /// The slot of the commit to open, or −1 when there is none and none was asked for (at_step < 0).
  /// `pages`: what the superblock's field of that name must say, or kAnyPages.
  /// Errors: kNotFound naming the steps that are there; kCorrupt.
  [[nodiscard]] Result<int> choose_commit(std::int64_t pages, std::int64_t at_step) const;
  static constexpr std::int64_t kAnyPages = -1;
  /// The commit in `slot` is what this state grows from.
  void opened(int slot) noexcept;
  /// Where the next commit goes.
  [[nodiscard]] int other_slot() const noexcept { return slot_ == 0 ? 1 : 0; }
  [[nodiscard]] bool holds_commit(int slot) const noexcept;
  [[nodiscard]] const Superblock& superblock(int slot) const noexcept {
    return super_.slots()[static_cast<std::size_t>(slot)].superblock;
  }
  File& map_file(int number) noexcept { return map_files_[static_cast<std::size_t>(number)]; }
  /// kCorrupt, of the map of the commit in `slot`.
  [[nodiscard]] tl::unexpected<Error> bad_map(int slot, const std::string& why) const;

  // ---- Requests and commits ----

  /// Errors: kNotFound naming the first id that is not there; kCorrupt, kIo.
  Result<void> resolve(std::span<const std::int64_t> ids);
  /// Resolves a request of more than batch_rows ids piece by piece, so that every id is known to be
  /// there before any row changes; a shorter one is resolved when it is carried out.
  Result<void> resolve_ahead(std::span<const std::int64_t> ids);
  [[nodiscard]] std::size_t batch_rows() const noexcept { return found_.ordinals.size(); }
  [[nodiscard]] static std::uint32_t place_of(std::uint64_t key) noexcept {
    return static_cast<std::uint32_t>(key);
  }
  /// Writes the superblock of the next commit, all that it refers to being durable.
  Result<void> write_superblock(Superblock root);
  /// For a reader: what has been read until now is of its commit, if that is still in its slot.
  [[nodiscard]] Result<void> check_still_there() const;
  /// Errors: those of sound(); kInvalidArgument for a table without rows_max.
  [[nodiscard]] Result<void> check_growing(const char* what);

  static constexpr std::uint32_t kNone = 0xFFFFFFFFU;

 private:
  class SetRows;
  class OptimizerStep;
  Result<void> set_rows(std::span<const std::int64_t> ids, std::span<const std::uint32_t> sequences,
                        std::span<const float> values, std::int64_t width);
  Result<void> check_rows(const char* what, std::size_t ids, std::size_t floats) const;
  Result<void> check_gradients(std::span<const float> grads, std::int64_t unique);
  const float* gradient_of(std::uint32_t place, std::span<const float> grads,
                           int member) const noexcept;

  const ForkMark mark_;
  FolderLock lock_;  // Of a table that may be changed.

 protected:
  const std::filesystem::path directory_;
  const TableDescription table_;
  const TableShape shape_;
  const SlabPlan plan_;
  const bool pinned_;  // Opened to be read, while somebody else may train.
  Admission admission_;
  Slab slab_;
  IoPool pool_;
  IdIndex ids_;
  std::optional<GrowingIds> growing_;  // Of a table with rows_max.
  File rows_file_;
  std::array<File, kMaps> map_files_;
  SuperFile super_;
  RowCrew crew_;
  RecordStep optimizer_;
  int slot_{-1};  // Superblock slot of the commit this state grew from; −1: none.
  std::int64_t last_commit_{-1};

  // Scratch of one request, in the slab: batch_rows of each, but for the last three.
  FoundRows found_;                              // Of the last request.
  std::span<const std::int64_t> request_ids_{};  // Borrowed from the caller for one request.
  std::span<std::uint64_t> keys_;  // Where a row is, the layout's << 32 | a place in the request.
  std::span<std::uint32_t> next_;  // By place: the next one of the same id, or kNone.
  std::span<float> sums_;          // dim per member of the crew: summed gradients,
  std::span<float> wide_;          // and a row as float32 where it is not stored so.
  std::span<AdamCorrection> corrections_;

 private:
  const std::int64_t batch_rows_;
};

}  // namespace plimsoll
