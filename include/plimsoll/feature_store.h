// SPDX-License-Identifier: Apache-2.0
//
// FeatureStore: read-only named columns per id, interleaved into one record, read by batch.
//
// FeatureWriter builds one streaming, or adds records to one that is there as a further part;
// FeatureStore reads it within a fixed slab. Parts never change once they are there, so a reader
// keeps the records that it was opened with while a writer adds others. Records keep the
// order in which they were appended (their ordinal); ids are arbitrary distinct 64-bit integers.
// Records may come in groups (the captions of one image): consecutive records with one group id.
//
// Reading order: this file, docs/formats/feature_store.md, src/store/feature_store.cpp.
//
// Threads: FeatureStore::read* are thread-safe (the loader's threads share one); concurrent loads
//          of one block are joined. FeatureWriter: single-owner.
// Memory:  the store: one slab of cache_bytes, leased and touched at open. The writer: a fixed
//          buffer, leased. Neither allocates afterwards.
#pragma once

#include <cstddef>
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

enum class DType : std::uint8_t { kFloat32, kFloat16, kBFloat16, kFloat64, kInt64, kInt32, kUint8 };

[[nodiscard]] std::int64_t dtype_bytes(DType dtype) noexcept;
/// "float32", … as NumPy spells them ("bfloat16" as torch does).
[[nodiscard]] const char* dtype_name(DType dtype) noexcept;
/// Accepts NumPy's names ("float32") and descriptors ("<f4"). Errors: kInvalidArgument.
[[nodiscard]] Result<DType> parse_dtype(const std::string& text);

/// Index of the first NaN or infinity among the values in `bytes`, −1 when there is none.
/// Requires: bytes.size() is a multiple of dtype_bytes(dtype).
[[nodiscard]] std::int64_t first_non_finite(std::span<const std::byte> bytes, DType dtype) noexcept;

struct ColumnSpec {
  std::string name{};  ///< [a-z][a-z0-9_]*, at most 63 characters.
  DType dtype{DType::kFloat32};
  std::vector<std::int64_t> shape{};  ///< Of one record, or element; {} is a scalar.
  /// Above 0 the column is ragged: a record has 0 to so many elements, each of `shape`.
  std::int64_t length_max{0};
  [[nodiscard]] bool ragged() const noexcept { return length_max > 0; }
  [[nodiscard]] std::int64_t bytes() const noexcept;      ///< Of one record, or element.
  [[nodiscard]] std::int64_t bytes_max() const noexcept;  ///< Of the largest record.
  bool operator==(const ColumnSpec&) const = default;
};

/// How the blocks of records stand on disk. kLz4 compresses each block for itself; a block that
/// does not shrink by an eighth is stored plain. What reads return is the same, and so is the
/// fingerprint.
enum class BlockCompression : std::uint8_t { kNone, kLz4 };

/// "none", "lz4".
[[nodiscard]] const char* compression_name(BlockCompression compression) noexcept;
/// Errors: kInvalidArgument.
[[nodiscard]] Result<BlockCompression> parse_compression(const std::string& text);

struct FeatureWriterOptions {
  std::filesystem::path directory{};  ///< Must not exist, or be empty.
  std::vector<ColumnSpec> columns{};  ///< At least one, at most 64.
  bool grouped{false};                ///< append() is given group ids.
  bool allow_non_finite{false};       ///< Otherwise NaN and infinity are refused.
  BlockCompression compression{BlockCompression::kNone};  ///< kLz4 needs a build with LZ4.
  std::int64_t buffer_bytes{8LL << 20};
};

struct FeatureExtendOptions {
  std::filesystem::path directory{};  ///< Of the store.
  bool allow_non_finite{false};       ///< As above.
  std::int64_t buffer_bytes{8LL << 20};
};

/// Appends records; the store, or its new part, appears, complete and synced, at finish(), or not
/// at all.
class FeatureWriter {
 public:
  /// Errors: kInvalidArgument (the options; a directory that is not empty, or that another process
  ///         builds), kOverBudget, kIo.
  static Result<FeatureWriter> create(Governor governor, const FeatureWriterOptions& options);
  /// Adds a part to a store, of which nothing is rewritten. Columns and compression are the
  /// store's; it takes group ids if the store has groups, and begins with a new group. Stores
  /// opened before finish() go on without its records. Without any record no part is added.
  /// Memory: also a store opened with the least slab and 1 MiB, which looks ids up.
  /// Errors: as FeatureStore::open(); kInvalidArgument: another process adds to it, or it has as
  ///         many parts as a store can.
  static Result<FeatureWriter> extend(Governor governor, const FeatureExtendOptions& options);
  FeatureWriter(FeatureWriter&&) noexcept;
  FeatureWriter& operator=(FeatureWriter&&) noexcept;
  ~FeatureWriter();  ///< Without finish(): removes what it wrote.

  /// Appends ids.size() records. `columns[k]` holds the bytes of column k for all of them, in the
  /// order of the spec. `groups` is empty unless grouped; records of a group must be consecutive.
  /// `lengths` has, for each ragged column in their order, the number of elements of each record,
  /// which stand in the column's bytes one record after another.
  /// Errors: kInvalidArgument naming the record, id and column (wrong size, NaN or infinity), or
  ///         an id that the parts before have; kIo (disk full). After an error every later call
  ///         returns it again.
  Result<void> append(std::span<const std::int64_t> ids,
                      std::span<const std::span<const std::byte>> columns,
                      std::span<const std::int64_t> groups = {},
                      std::span<const std::span<const std::int64_t>> lengths = {});

  /// Sorts the id index (in bounded memory), syncs and renames into place.
  /// Errors: kInvalidArgument for a duplicate id, naming it, or a group that returns after another
  ///         began; kIo.
  Result<void> finish();

  [[nodiscard]] std::int64_t rows() const noexcept;  ///< Appended here.
  /// What it writes: of extend(), as the store has it.
  [[nodiscard]] const FeatureWriterOptions& options() const noexcept;

 private:
  class Impl;
  explicit FeatureWriter(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

struct FeatureStoreOptions {
  std::filesystem::path directory{};
  std::int64_t cache_bytes{0};  ///< The slab; 0: 32 MiB or the floor, whichever is larger.
  int io_threads{4};
  /// Blocks wanted at once are read in the order of the file, neighbours in one read of up to 64
  /// KiB. Blocks that stand at most so many bytes apart count as neighbours; what is between is
  /// read too.
  std::int64_t join_gap_bytes{0};
  std::int64_t parts{0};  ///< Reads the first so many parts; 0: all that are there.
};

/// How a store's slab is divided; the parts add up to total_bytes.
struct FeaturePlan {
  std::int64_t total_bytes{0};
  std::int64_t frame_bytes{0};   ///< Frames of blocks, and the map that finds them.
  std::int64_t buffer_bytes{0};  ///< Where neighbours, and compressed blocks, are read to.
  std::int64_t table_bytes{0};   ///< Tables kept whole: checksums, places, lengths, ids, groups.
  std::int64_t index_bytes{0};   ///< Pages and fences of the id index.
  std::int64_t slack_bytes{0};   ///< Alignment.
};

/// What a store's directory holds.
struct FeatureInfo {
  std::int64_t rows{0};
  std::vector<ColumnSpec> columns{};
  std::int64_t record_bytes{0};  ///< Sum of the columns' bytes, of ragged ones at their longest.
  std::int64_t disk_bytes{0};
  std::int64_t floor_bytes{0};  ///< The smallest cache_bytes it opens with.
  BlockCompression compression{BlockCompression::kNone};
  std::int64_t block_bytes{0};   ///< Of a block in memory.
  std::int64_t blocks{0};        ///< Blocks of records.
  std::int64_t plain_blocks{0};  ///< Of these, stored as they are: all of them without compression.
  std::int64_t stored_bytes{
      0};                  ///< What the blocks take on disk; uncompressed blocks × block_bytes.
  bool dense_ids{false};   ///< Ids are 0 … rows−1 in order.
  std::int64_t groups{0};  ///< 0 when not grouped.
  std::int64_t uniform_group{0};  ///< Records per group when all are equal, else 0.
  std::int64_t parts{1};          ///< One more with each FeatureWriter::extend().
  std::string fingerprint{};      ///< Of columns, rows and ids; for a run's identity.
};

struct FeatureStats {
  std::int64_t requests{0};  ///< Records asked for.
  std::int64_t hits{0};      ///< Records whose block was in the slab when asked for.
  std::int64_t blocks_read{0};
  std::int64_t reads{0};       ///< Read requests made of the disk.
  std::int64_t bytes_read{0};  ///< What they asked for: whole pages of stored blocks, and gaps.
  std::int64_t bytes_delivered{0};  ///< Columns' bytes copied out to callers.
  std::int64_t joined{0};  ///< Loads saved because another thread was loading the same block.
  std::int64_t stall_ns{0};
  std::int64_t frames{0};
  std::int64_t resident_frames{0};
};

/// A store is its process's own: in a child that was forked after it was opened every call is
/// refused (kInvalidArgument), and stats() are 0.
class FeatureStore {
 public:
  /// Parts that are added later are not seen by this one.
  /// Errors: kNotFound, kCorrupt (truncated or altered files, naming them), kOverBudget.
  static Result<FeatureStore> open(Governor governor, const FeatureStoreOptions& options);
  FeatureStore(FeatureStore&&) noexcept;
  FeatureStore& operator=(FeatureStore&&) noexcept;
  ~FeatureStore();

  /// Copies records out by ordinal, in request order; duplicates allowed.
  /// `out[k]` receives column `columns[k]` (an index into info().columns): its bytes() per record,
  /// of a ragged one bytes() × lengths(), one record after another.
  /// Errors: kInvalidArgument (ordinal out of range, wrong size), kCorrupt, kIo.
  Result<void> read_ordinals(std::span<const std::int64_t> ordinals, std::span<const int> columns,
                             std::span<const std::span<std::byte>> out);

  /// How many elements of a ragged column the records have, in request order.
  /// Errors: kInvalidArgument (ordinal out of range, a column that is not ragged); kCorrupt, kIo.
  Result<void> lengths(std::span<const std::int64_t> ordinals, int column,
                       std::span<std::int64_t> out);

  /// As read_ordinals(), by id. Errors: kNotFound naming the first unknown id.
  Result<void> read(std::span<const std::int64_t> ids, std::span<const int> columns,
                    std::span<const std::span<std::byte>> out);

  /// Brings the blocks of these records into the slab in one sweep over the file, copying nothing:
  /// a hint, which changes no answer. It counts neither as a request nor as a hit. Errors: as
  /// above.
  Result<void> prefetch_ordinals(std::span<const std::int64_t> ordinals);

  /// Translations between ids and ordinals, in request order. find() gives −1 for an id that the
  /// store has not, ordinals_of() kNotFound. Errors: also kInvalidArgument (ordinals out of range,
  /// spans of other sizes), kCorrupt, kIo.
  Result<void> find(std::span<const std::int64_t> ids, std::span<std::int64_t> ordinals);
  Result<void> ordinals_of(std::span<const std::int64_t> ids, std::span<std::int64_t> out);
  Result<void> ids_of(std::span<const std::int64_t> ordinals, std::span<std::int64_t> out);

  /// First ordinal and number of records of a group. Requires: 0 <= group < info().groups.
  /// Errors: kCorrupt, kIo.
  Result<std::pair<std::int64_t, std::int64_t>> group(std::int64_t group);

  /// Index of a column by name. Errors: kNotFound naming the columns there are.
  [[nodiscard]] Result<int> column(const std::string& name) const;

  [[nodiscard]] const FeatureInfo& info() const noexcept;
  [[nodiscard]] FeatureStats stats() const;
  [[nodiscard]] FeaturePlan plan() const noexcept;

  /// Gives cached frames back to the system (pressure); returns the bytes. What is left works as a
  /// smaller cache: slower, and the same rows.
  std::int64_t shrink(std::int64_t wanted_bytes) noexcept;
  /// Takes again up to `wanted_bytes` of what shrink() gave back; returns how many, 0 where memory
  /// is refused.
  std::int64_t grow_back(std::int64_t wanted_bytes) noexcept;

  /// Reads the header alone. Errors: kNotFound, kCorrupt, kIo.
  static Result<FeatureInfo> inspect(const std::filesystem::path& directory);
  /// Reads everything and compares every checksum. `progress(done, total)` in bytes; returning
  /// false cancels. Errors: kNotFound, kCorrupt naming the file, kIo, kInvalidArgument when
  /// cancelled.
  static Result<void> verify(const std::filesystem::path& directory,
                             const std::function<bool(std::int64_t, std::int64_t)>& progress);
  /// Makes one part of all, with the same records in the same order; killed, it leaves either.
  /// The fingerprint is then another: blocks end elsewhere. Stores that are open go on.
  /// Memory: a store opened with the least slab, a writer's buffer and a chunk of records.
  /// Errors: kInvalidArgument (another process adds to it; a killed one's copy is in the way;
  ///         cancelled), kCorrupt, kIo.
  static Result<void> join(Governor governor, const std::filesystem::path& directory,
                           const std::function<bool(std::int64_t, std::int64_t)>& progress);

 private:
  class Impl;
  explicit FeatureStore(std::unique_ptr<Impl> impl) noexcept;
  void close() noexcept;
  std::unique_ptr<Impl> impl_;
};

}  // namespace plimsoll
