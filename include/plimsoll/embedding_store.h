// SPDX-License-Identifier: Apache-2.0
//
// EmbeddingStore: one trainable row per id, with its optimizer state, inside a fixed slab.
//
// A table may be many times larger than its slab (plan(): floor_bytes). A row is one record
// (id | sequence | crc32c | weights | optimizer slots), so weights and moments never tear apart.
// Rows never written come from a seeded initialiser. commit(step) makes changes durable together.
//
// Reading order: this file, docs/formats/embedding_store.md, src/store/embedding_store.cpp.
//
// Threads: gather, apply, update, commit, scan are for one thread at a time (single-owner);
//          prefetch(), shrink(), grow_back(), plan() and stats() may come from any thread.
// Forks:   a child that was forked after a table was opened is refused every call (stats() are 0).
// Memory:  one slab of store_bytes, leased and touched at open: page frames, id index, page table,
//          read and write buffers, look-ahead queue. Nothing is allocated afterwards.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "plimsoll/governor.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// How apply() turns a gradient into a change of the row.
enum class RowOptimizer : std::uint8_t {
  kAdamW,        ///< Moments kept per row; bias correction by the row's own update count.
  kAdamWFresh,   ///< A new AdamW every apply: moments start at zero, one step (CoSiR's habit).
  kAdagrad,      ///< One accumulator per weight.
  kSgd,          ///< Keeps nothing.
  kSgdMomentum,  ///< One velocity per weight; it moves only when its row is in a request.
  kRowAdagrad,   ///< One accumulator per row, of the mean square of its gradient.
  kAdam,         ///< As AdamW, but weight decay is added to the gradient.
};

/// Hyperparameters. Same meaning and defaults as torch.optim's, momentum apart (there 0).
struct RowOptimizerOptions {
  RowOptimizer kind{RowOptimizer::kAdamW};
  float learning_rate{1e-3F};
  float beta1{0.9F};
  float beta2{0.999F};
  float epsilon{1e-8F};
  float weight_decay{0.0F};  ///< Decoupled for AdamW; added to the gradient for the others.
  float momentum{0.9F};      ///< Of kSgdMomentum.
};

/// Where rows lie on disk.
enum class RowLayout : std::uint8_t {
  kAnyOrder,     ///< Pages by id, a page table, a cache.
  kSampleOrder,  ///< Each row where SampleOrder(rows, order_seed, epoch) will want it next: one
                 ///< that is visited in that order streams, at the disk's bandwidth.
};

/// What a weight is stored as. Requests speak float32 in either case, and slots are float32.
enum class RowDType : std::uint8_t {
  kFloat32,
  kBFloat16,  ///< Half the bytes. A step is computed in float32 and rounded up or down by chance,
              ///< by (init.seed, id, sequence); all else is rounded to nearest.
};

enum class RowInitKind : std::uint8_t { kZeros, kNormal, kUniform };

/// Rows before their first update; depends on (seed, id) alone, never on order.
struct RowInit {
  RowInitKind kind{RowInitKind::kNormal};
  float scale{0.01F};  ///< Standard deviation (normal) or half-width (uniform).
  std::uint64_t seed{0};
};

struct EmbeddingStoreOptions {
  std::filesystem::path directory{};
  std::int64_t dim{0};              ///< Weights per row.
  RowDType dtype{};                 ///< Part of the table.
  RowOptimizerOptions optimizer{};  ///< The kind is part of the table; the numbers may change.
  RowInit init{};                   ///< Part of the table.
  RowLayout layout{RowLayout::kAnyOrder};  ///< Part of the table.
  std::uint64_t order_seed{0};  ///< Sample order: the seed of the epochs that begin from now on.
  std::int64_t store_bytes{0};  ///< The slab; 0: 64 MiB or the floor, whichever is larger.

  // Only when the table is created; an existing one is compared with them when given.
  std::int64_t rows{0};                 ///< Dense ids [0, rows), or the number of `ids`.
  std::span<const std::int64_t> ids{};  ///< Or: arbitrary distinct 64-bit ids.
  std::filesystem::path ids_file{};     ///< Or: a .npy of int64, streamed.
  /// Places for rows: ids may be inserted and, in any order, erased. All is planned for so many,
  /// and the rows to begin with may be none. They are then never compared. 0: fixed rows.
  std::int64_t rows_max{0};

  std::int64_t at_step{-1};  ///< Open this commit, not the newest (a manifest's step).
  /// Open a commit of an existing table to read it, while another process may train in it. Nothing
  /// is written. Training waits for nothing, and keeps the commit's blocks while its bound on disk
  /// has room; when it has not, gather() and scan() say so (kNotFound). Sample order: only at rest.
  bool pinned{false};
  std::int64_t batch_rows{4096};  ///< Largest request expected; sizes the scratch in the slab.
  int io_threads{8};
  /// Changed bytes in RAM beyond which apply() and update() wait for the disk, so that a commit is
  /// short. 0: what the disk was seen to write in a hundredth of the time since the last commit,
  /// 50 ms to 1 s, at least 8 MiB, at most half of the frames; no bound when the whole table is in
  /// RAM. No effect in sample order, where a bucket's write buffer is all that can be unwritten.
  std::int64_t dirty_bytes{0};
  int compute_threads{1};  ///< For apply(); the result does not depend on it.
};

/// How the slab is divided, in bytes, and what the disk may come to hold.
struct SlabPlan {
  std::int64_t total_bytes{0};
  std::int64_t frame_bytes{0};     ///< Page frames.
  std::int64_t index_bytes{0};     ///< Index of ids, page table, block maps.
  std::int64_t buffer_bytes{0};    ///< I/O buffers and request scratch.
  std::int64_t queue_bytes{0};     ///< Look-ahead queue.
  std::int64_t floor_bytes{0};     ///< The smallest slab that works for this table.
  std::int64_t disk_cap_bytes{0};  ///< Most the directory can reach (live, two commits, index).
  std::int64_t rows_max{0};        ///< Rows all this is enough for; 0: the table cannot grow.
  std::string network{};           ///< "NFS", …: the directory is on a file system of a network.
  [[nodiscard]] std::string to_string() const;
};

/// Counters since open. A hit is a row that was in RAM when asked for.
struct StoreStats {
  std::int64_t requests{0};  ///< Rows asked for by gather, apply (once each), update and insert.
  std::int64_t hits{0};
  std::int64_t prefetch_hits{0};  ///< Hits that were in RAM because prefetch() brought them.
  std::int64_t pages_read{0};
  std::int64_t pages_written{0};
  std::int64_t bytes_read{0};
  std::int64_t bytes_written{0};
  std::int64_t evictions_clean{0};
  std::int64_t evictions_dirty{0};
  std::int64_t commits{0};
  std::int64_t syncs{0};     ///< fdatasync calls.
  std::int64_t stall_ns{0};  ///< Time callers waited for the disk.
  std::int64_t dirty_bytes{0};
  std::int64_t dirty_bytes_max{0};
  std::int64_t resident_pages{0};
  std::int64_t frames{0};
  std::int64_t shrinks{0};  ///< Times that pressure made the whole slab smaller.
  [[nodiscard]] double hit_rate() const noexcept {
    return requests == 0 ? 1.0 : static_cast<double>(hits) / static_cast<double>(requests);
  }
};

/// What a table's directory holds, read without opening it for training.
struct TableInfo {
  std::int64_t rows{0};      ///< As of the newest commit.
  std::int64_t rows_max{0};  ///< 0: the table cannot grow.
  std::int64_t dim{0};
  RowDType dtype{};
  RowOptimizer optimizer{};
  RowInit init{};
  bool dense_ids{false};  ///< Those it was made with.
  RowLayout layout{};
  std::uint64_t order_seed{0};  // Sample order: of the epoch being read, as of the newest commit,
  std::int64_t epoch{0};        // which epoch that is,
  std::int64_t cursor{0};       // and how many of its positions have been passed.
  std::int64_t record_bytes{0};
  std::int64_t page_bytes{0};
  std::int64_t rows_per_page{0};
  std::vector<std::int64_t> commit_steps{};  ///< Readable commits, newest first; at most two.
  std::int64_t disk_bytes{0};
};

/// Called with (done, total) in bytes now and then; return false to cancel.
using ProgressFn = std::function<bool(std::int64_t, std::int64_t)>;

/// Called with ids, counts of steps, and values: float32 [n, dim + state_floats()], weights first.
using RowVisit = std::function<Result<void>(
    std::span<const std::int64_t>, std::span<const std::uint32_t>, std::span<const float>)>;

class EmbeddingStore {
 public:
  /// Opens the table in options.directory, creating it when there is none; locks it, unless pinned.
  /// Errors: kOverBudget (slab refused, or below the floor: requested_bytes is it), kCorrupt, kIo,
  ///         kInvalidArgument (the table has another dim, dtype, optimizer, initialiser or ids;
  ///         duplicate ids; its disk_cap_bytes exceed the governor's disk limit; it is locked by
  ///         the process that is named), kNotFound (no commit at at_step; it names those there).
  static Result<EmbeddingStore> open(Governor governor, const EmbeddingStoreOptions& options);

  EmbeddingStore(EmbeddingStore&&) noexcept;
  EmbeddingStore& operator=(EmbeddingStore&&) noexcept;
  ~EmbeddingStore();  ///< Does not commit: what was not committed is gone, as after a crash.

  /// Copies rows out, in request order; duplicates allowed.
  /// Shape:  out is float32 [ids.size(), dim].
  /// Errors: kNotFound naming the first unknown id; kCorrupt; kIo.
  Result<void> gather(std::span<const std::int64_t> ids, std::span<float> out);

  /// One optimizer step for these rows. Gradients of a duplicate id are summed in request order.
  /// Shape:  grads is float32 [ids.size(), dim]. `rate_scale` multiplies the learning rate.
  /// Errors: as gather(); kInvalidArgument for a NaN or infinite gradient, naming its id. On an
  ///         error no row has changed; should the disk fail part way through a request whose pages
  ///         are more than half of the slab, the handle is poisoned, so that nobody sees the part.
  Result<void> apply(std::span<const std::int64_t> ids, std::span<const float> grads,
                     float rate_scale = 1.0F);

  /// Sets weights, bfloat16 ones rounded to nearest; clears the rows' optimizer slots and their
  /// count of steps. The last of a duplicate id wins. Errors: as gather().
  Result<void> update(std::span<const std::int64_t> ids, std::span<const float> rows);

  /// Sets whole records: count of steps, weights and optimizer slots, as scan() shows them.
  /// Shape:  values is float32 [ids.size(), dim × (1 + slots)]; the ids are distinct.
  /// Errors: as gather(). For copying a table; update() is for training.
  Result<void> restore(std::span<const std::int64_t> ids, std::span<const std::uint32_t> sequences,
                       std::span<const float> values);

  /// Makes sure that there are rows with these ids: those that are not there begin as the table's
  /// initialiser says, in the lowest free places; the others stay as they are. Returns how many
  /// are new. Durable with the next commit. In sample order they join the next epoch that begins.
  /// Errors: kInvalidArgument when there are not places for all (naming rows_max), or the table was
  ///         made without rows_max; kCorrupt; kIo. On an error nothing is inserted; should the disk
  ///         fail part way, the handle is poisoned.
  Result<std::int64_t> insert(std::span<const std::int64_t> ids);

  /// Removes rows: their ids are unknown from then on, until they are inserted anew. The place of
  /// an inserted row is free at once; that of a row that the table was made with when the table is
  /// compacted. What the row held leaves the disk when its place is written again, or compacted.
  /// Errors: as gather(); kInvalidArgument without rows_max, or in sample order; none is gone then.
  Result<void> erase(std::span<const std::int64_t> ids);

  /// Says which ids will be asked for soon. A hint: bounded, dropped when full, cannot fail.
  void prefetch(std::span<const std::int64_t> ids) noexcept;

  /// Says that the coming requests visit rows in the order SampleOrder(rows(), order_seed, epoch),
  /// by position of creation. Sample order only, else nothing happens. An epoch under way goes
  /// on with the rows it began with. Rows that the last one did not visit are carried over; another
  /// order than the next one costs a pass over the table, and so do rows inserted since the first
  /// batch of the last epoch. A new table is in epoch 0. Results never depend on it, only speed: a
  /// batch in order streams, others are looked up. Errors: kCorrupt, kIo: the handle is poisoned.
  Result<void> begin_epoch(std::int64_t epoch);

  /// Makes everything so far durable under the number `step`. Requires: step > the last one.
  /// Errors: kIo, and every later call returns it; the table on disk holds the commits it held, and
  /// only if the last sync failed may the new one be there, whole, in the place of the older.
  Result<void> commit(std::int64_t step);

  /// Visits every row by place (position in `ids`, then inserted). Errors: visit's; kCorrupt; kIo.
  Result<void> scan(const RowVisit& visit);

  /// As scan(), but in whatever order costs least: in sample order one pass over the file, where
  /// scan() takes one for every slab's worth of rows. The order depends on the table alone.
  Result<void> visit_rows(const RowVisit& visit);

  /// Changes learning rate and the other numbers; the kind must stay. Errors: kInvalidArgument.
  Result<void> set_optimizer(const RowOptimizerOptions& options);

  /// Gives back page frames, in whole regions of 2 MiB at the end of the slab, until `wanted_bytes`
  /// are given or the floor of plan() is reached. Reads and writes nothing and waits for nobody:
  /// what a transfer under way holds follows with one of the next requests. Returns the bytes given
  /// back at once; plan() and stats() tell what is held. Results never depend on it, only speed.
  /// The governor calls it under pressure; so may any thread. In sample order nothing is given.
  std::int64_t shrink(std::int64_t wanted_bytes) noexcept;

  /// Takes again up to `wanted_bytes` of what shrink() gave back, in whole regions; returns how
  /// many. The governor calls it when there is room again; so may any thread.
  std::int64_t grow_back(std::int64_t wanted_bytes) noexcept;

  [[nodiscard]] std::int64_t rows() const noexcept;
  [[nodiscard]] std::int64_t rows_max() const noexcept;  ///< 0: the table cannot grow.
  [[nodiscard]] std::int64_t dim() const noexcept;
  [[nodiscard]] std::int64_t slots() const noexcept;  ///< Optimizer floats per weight: 0, 1 or 2.
  /// Optimizer floats per row: dim() × slots(), and one for kRowAdagrad.
  [[nodiscard]] std::int64_t state_floats() const noexcept;
  [[nodiscard]] std::int64_t last_commit() const noexcept;  ///< −1 before the first.
  [[nodiscard]] SlabPlan plan() const;  ///< As it is now: less what shrink() gave back.
  [[nodiscard]] StoreStats stats() const;

  /// The slab that this table needs, and its parts. Creates nothing. Errors: as open().
  static Result<SlabPlan> plan(const EmbeddingStoreOptions& options);

  /// Reads the description of a table. Errors: kNotFound, kCorrupt.
  static Result<TableInfo> inspect(const std::filesystem::path& directory);

  /// Copies a commit's rows into a table of their own that holds nothing else, and puts it in the
  /// place of `directory`, at once: a crash leaves the one or the other. The file shrinks to what
  /// is live; other commits are gone. Needs room for the copy beside it, and the table's lock.
  /// Of a table with rows_max, the rows that are there become those it was made with.
  /// `at_step`: −1 for the newest.   `rows_max`: of the copy; 0: as it was.
  /// Errors: as open(); kIo.
  static Result<void> compact(Governor governor, const std::filesystem::path& directory,
                              std::int64_t at_step, const ProgressFn& progress,
                              std::int64_t rows_max = 0);

  /// Reads every page of the newest commit and compares checksums.
  /// Errors: kCorrupt naming the file and the page.
  static Result<void> verify(const std::filesystem::path& directory, const ProgressFn& progress);

 private:
  class Engine;
  class Impl;      // Rows in any order.
  class Timeline;  // Rows in sample order.
  explicit EmbeddingStore(std::unique_ptr<Engine> impl) noexcept;
  std::unique_ptr<Engine> impl_;
};

}  // namespace plimsoll
