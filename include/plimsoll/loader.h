// SPDX-License-Identifier: Apache-2.0
//
// Loader: batches of features in a seeded shuffled order, from a ring bounded in bytes.
//
// The state is O(1): {seed, epoch, position}. Batches do not depend on the number of threads.
// Reading order: sample_order.h, feature_store.h, this file, src/data/loader.cpp.
//
// Threads: next() and seek() are for one thread; the loader's own threads fill the ring.
// Memory:  a ring of slots, leased (Tag::kLoader) and touched at open, queue_bytes at most; with
//          sweep_batches above 1 also 8 bytes a row of these.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "plimsoll/feature_store.h"
#include "plimsoll/governor.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// Which records train and which are held out: whole groups, chosen by `seed`. 8 bytes a held-out
/// group; when groups differ in size 16, and 8 a group (leased).
struct SplitOptions {
  std::int64_t held_out_groups{0};  ///< A record is its own group when the store has none.
  std::uint64_t seed{0};
};

/// The records of one side of a split, addressed by rank.
class Split {
 public:
  /// Errors: kInvalidArgument (more groups held out than there are), kOverBudget, kCorrupt, kIo.
  static Result<Split> create(Governor governor, FeatureStore* store, const SplitOptions& options);
  Split(Split&&) noexcept;
  Split& operator=(Split&&) noexcept;
  ~Split();

  [[nodiscard]] std::int64_t train_rows() const noexcept;
  [[nodiscard]] std::int64_t held_out_rows() const noexcept;
  [[nodiscard]] std::int64_t held_out_groups() const noexcept;
  /// Ordinal of the r-th training record; it grows with r. Requires: 0 <= r < train_rows().
  [[nodiscard]] std::int64_t train_ordinal(std::int64_t rank) const noexcept;
  /// Ordinal of the r-th held-out record. Requires: 0 <= r < held_out_rows().
  [[nodiscard]] std::int64_t held_out_ordinal(std::int64_t rank) const noexcept;
  /// Group (an index) of an ordinal.
  [[nodiscard]] std::int64_t group_of(std::int64_t ordinal) const noexcept;

 private:
  class Impl;
  explicit Split(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

struct LoaderState {
  std::uint64_t seed{0};
  std::int64_t epoch{0};
  std::int64_t position{0};  ///< Samples of this epoch already handed out.
  bool operator==(const LoaderState&) const = default;
};

struct LoaderOptions {
  std::vector<std::string> columns{};  ///< Which, in this order; empty: all.
  std::int64_t batch_rows{0};
  std::int64_t queue_bytes{0};  ///< The ring; 0: four batches. At least two must fit.
  int threads{2};
  bool drop_last{false};  ///< Skip an epoch's last, partial batch.
  /// The features of so many coming batches are read in one pass over the store's file, into its
  /// slab, which must hold two such windows. More of them means fewer reads; batches stay the same.
  std::int64_t sweep_batches{1};
  LoaderState start{};
};

struct BatchSlot;  // src/data/loader_ring.h

/// One batch, in a slot of the ring. Destroying it (or the next assignment) returns the slot.
class Batch {
 public:
  Batch() noexcept;
  Batch(Batch&&) noexcept;
  Batch& operator=(Batch&&) noexcept;
  ~Batch();

  [[nodiscard]] bool valid() const noexcept;
  [[nodiscard]] std::int64_t rows() const noexcept;
  [[nodiscard]] std::int64_t epoch() const noexcept;
  [[nodiscard]] std::int64_t position() const noexcept;  ///< Of its first sample in the epoch.
  [[nodiscard]] bool ends_epoch() const noexcept;
  [[nodiscard]] std::span<const std::int64_t> ids() const noexcept;
  [[nodiscard]] std::span<const std::int64_t> groups() const noexcept;  ///< Group index per row.
  /// Bytes of the k-th chosen column: [rows, shape…], 64-byte aligned.
  [[nodiscard]] std::span<std::byte> column(int k) const noexcept;
  [[nodiscard]] LoaderState state_after() const noexcept;  ///< Where a resume would go on.

 private:
  friend class Loader;
  std::shared_ptr<BatchSlot> slot_;  // Shared: a tensor made from the batch may outlive it.
};

/// A loader is its process's own: in a child that was forked after it was opened next(),
/// upcoming_ids() and seek() are refused (kInvalidArgument).
class Loader {
 public:
  /// Requires: store and split outlive the loader.
  /// Errors: kInvalidArgument, kNotFound (column), kOverBudget (names the bytes two slots need).
  static Result<Loader> open(Governor governor, FeatureStore* store, const Split* split,
                             const LoaderOptions& options);
  Loader(Loader&&) noexcept;
  Loader& operator=(Loader&&) noexcept;
  ~Loader();

  /// The next batch. Epochs follow one another without end; ends_epoch() marks the last of each.
  /// What `batch` held is returned first.
  /// Errors: those of FeatureStore::read, again at every call until seek(); kInvalidArgument when
  ///         the caller holds every slot ("4 of 4 batches are still held …"): it never waits for
  ///         the caller.
  Result<void> next(Batch& batch);

  /// Ids of the batch after the one handed out last, for EmbeddingStore::prefetch().
  /// Errors: those of FeatureStore::ids_of().
  [[nodiscard]] Result<void> upcoming_ids(std::vector<std::int64_t>& ids);

  /// Goes to a state; batches in flight are dropped. Errors: kInvalidArgument (no such position).
  Result<void> seek(const LoaderState& state);

  [[nodiscard]] std::int64_t batches_per_epoch() const noexcept;
  [[nodiscard]] std::int64_t slot_bytes() const noexcept;
  [[nodiscard]] std::int64_t slots() const noexcept;     ///< In use or ready to be.
  [[nodiscard]] std::int64_t stall_ns() const noexcept;  ///< Time next() waited.

  /// Gives slots back to the system (pressure), down to two; returns the bytes given back at once.
  /// Slots in use follow when they are returned. One comes back when the caller holds all others;
  /// one more than were ever held at once is kept.
  std::int64_t shrink(std::int64_t wanted_bytes) noexcept;
  /// Takes again up to `wanted_bytes` of what shrink() gave back; returns how many, 0 where memory
  /// is refused.
  std::int64_t grow_back(std::int64_t wanted_bytes) noexcept;

 private:
  void close() noexcept;
  class Impl;
  explicit Loader(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

}  // namespace plimsoll
