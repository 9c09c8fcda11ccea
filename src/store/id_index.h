// SPDX-License-Identifier: Apache-2.0
//
// IdIndex: which ordinal (position of creation) an id has, and which id an ordinal has.
//
// Ids are arbitrary distinct 64-bit integers. The writer sorts a stream of them in bounded memory;
// the reader keeps one fence key per page of the sorted file in the slab, and of its pages as many
// as there is room for. Ids that ascend in few spans of consecutive numbers, such as all but some
// held out, are kept as those spans, all in the slab. Ids that are exactly 0 … N−1, in order
// ("dense"), need nothing.
//
//   NAME.ids    pages of (id, ordinal) sorted by id
//   NAME.order  pages of ids, by ordinal
//   NAME.spans  in place of these two: pages of (first id, its ordinal)
//
// Reading order: this file, docs/formats/embedding_store.md (its section on ids), id_index.cpp,
//                id_sorted.h, id_spans.h.
//
// Threads: IdIndexWriter single-owner; IdIndex thread-safe (a mutex around its cached pages).
// Memory:  the writer uses the buffer it is given; the reader what memory_bytes() says, from a
// slab.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "memory/slab.h"
#include "os/file.h"
#include "os/io_pool.h"
#include "plimsoll/result.h"
#include "store/id_sorted.h"
#include "store/id_spans.h"

namespace plimsoll {

inline constexpr std::int64_t kIdPageBytes = 4096;
inline constexpr std::int64_t kIdsPerSortedPage = 340;  // 16 + 340 × (8 + 4) = 4096.
inline constexpr std::int64_t kIdsPerOrderPage = 510;   // 16 + 510 × 8 = 4096.
inline constexpr std::int64_t kIdSpansPerPage = 255;    // 16 + 255 × (8 + 8) = 4096.
inline constexpr std::int64_t kIdRowsMax = 0xFFFFFFFELL;

/// What a set of ids is, in four numbers; kept by the owner (table.json, the feature store's
/// header), never in the index files.
struct IdIndexInfo {
  std::int64_t rows{0};
  bool dense{true};              ///< Ids are 0 … rows−1 in order: there are no files.
  std::uint64_t fingerprint{0};  ///< Over all ids in order; equal sets in equal order agree.
  std::int64_t spans{0};         ///< Of consecutive ids, when they are kept so; else 0.
  /// The same ids. How they are kept (a table of an older version has no spans) does not matter.
  friend bool operator==(const IdIndexInfo& a, const IdIndexInfo& b) {
    return a.rows == b.rows && a.dense == b.dense && a.fingerprint == b.fingerprint;
  }
};

/// Of what a file says.
[[nodiscard]] bool spans_in_range(const IdIndexInfo& info) noexcept;

/// Computes an IdIndexInfo from a stream of ids without writing anything (no duplicate check).
class IdFingerprint {
 public:
  /// Spans that are shorter than this on average are not worth their 16 bytes each.
  static constexpr std::int64_t kSpanRowsLeast = 8;

  void add(std::span<const std::int64_t> ids) noexcept;
  [[nodiscard]] IdIndexInfo info() const noexcept;
  /// The fingerprint of dense ids [0, rows).
  static IdIndexInfo dense(std::int64_t rows) noexcept;

 private:
  std::int64_t rows_{0};
  bool dense_{true};
  std::uint64_t chain_{0};
  bool ascending_{true};
  std::int64_t spans_{0};  // While ascending; counted from the first id that is not dense.
  std::int64_t last_{0};
};

/// Builds an index from a stream of ids: append() … append(), finish().
class IdIndexWriter {
 public:
  static constexpr std::int64_t kBufferBytesMin = 64 << 10;

  /// Files are directory/NAME.ids and .order, or .spans (and .runs.0, .runs.1 while sorting); old
  /// ones are replaced. `buffer` is the caller's leased memory, aligned to 64, >= kBufferBytesMin;
  /// it must stay until finish(). Larger buffers mean fewer merge passes, nothing else.
  static Result<IdIndexWriter> create(const std::filesystem::path& directory,
                                      const std::string& name, std::span<std::byte> buffer);

  IdIndexWriter(IdIndexWriter&&) noexcept;
  IdIndexWriter& operator=(IdIndexWriter&&) noexcept;
  ~IdIndexWriter();  ///< Removes its files when finish() did not succeed.

  /// The next ids; the first has ordinal 0. Errors: kIo; kInvalidArgument beyond kIdRowsMax.
  Result<void> append(std::span<const std::int64_t> ids);

  /// Sorts, writes and fsyncs the files (none when dense; sync the directory yourself).
  /// Errors: kInvalidArgument naming a duplicate id and its two positions; kIo.
  Result<IdIndexInfo> finish();

  [[nodiscard]] std::int64_t rows() const noexcept;  ///< Appended so far.

 private:
  class Impl;
  explicit IdIndexWriter(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

/// Reads an index.
class IdIndex {
 public:
  /// Bytes of its files.
  static std::int64_t disk_bytes(const IdIndexInfo& info) noexcept;

  /// Bytes open() takes from the slab (0 when dense). `cached_pages` of the sorted file, clamped to
  /// what it has, and a sixteenth as many of the other. Alignment slack included.
  static std::int64_t memory_bytes(const IdIndexInfo& info, std::int64_t cached_pages) noexcept;
  /// The most cached pages, at least `least`, with which memory_bytes() is not above `bytes`.
  static std::int64_t pages_within(const IdIndexInfo& info, std::int64_t bytes,
                                   std::int64_t least) noexcept;

  /// Opens directory/NAME.*, reads every page of the sorted file, or of the spans, once (fences,
  /// order, checksums).
  /// Requires: `slab` outlives the index, and `pool` its calls.
  /// Errors: kNotFound, kIo, kCorrupt (sizes or checksums do not fit `info`), naming the file.
  static Result<IdIndex> open(const std::filesystem::path& directory, const std::string& name,
                              const IdIndexInfo& info, Slab& slab, std::int64_t cached_pages,
                              IoPool& pool);

  IdIndex() noexcept;  ///< Empty; rows() is 0.
  IdIndex(IdIndex&&) noexcept;
  IdIndex& operator=(IdIndex&&) noexcept;
  ~IdIndex();

  /// Writes the ordinal of each id, −1 for an id there is none of. Pages of the sorted file that
  /// are not in RAM are read many at a time, each once.
  /// Shape:  as many ordinals as ids. Errors: kCorrupt, kIo; what was written means nothing then.
  Result<void> find(std::span<const std::int64_t> ids, std::span<std::int64_t> ordinals) const;
  /// The same for those whose ordinal is −1; the others, which are not negative, are left alone.
  Result<void> find_rest(std::span<const std::int64_t> ids, std::span<std::int64_t> ordinals) const;

  /// Writes the ids of ordinals first, first + 1, …
  /// Requires: first + ids.size() <= rows(). Errors: kCorrupt, kIo.
  Result<void> ids_at(std::int64_t first, std::span<std::int64_t> ids) const;

  /// For who reads many pages of rows at once: the read into `page` that spares ids_at(`first`, …)
  /// its own, where it would make one.
  /// Requires: page is of kIdPageBytes, aligned to as many.
  [[nodiscard]] std::optional<IoRequest> order_read(std::int64_t first,
                                                    std::span<std::byte> page) const;
  /// It has been carried out. Errors: kCorrupt.
  Result<void> order_was_read(std::int64_t first, std::span<const std::byte> page) const;

  [[nodiscard]] std::int64_t rows() const noexcept { return info_.rows; }
  [[nodiscard]] bool dense() const noexcept { return info_.dense; }
  [[nodiscard]] const IdIndexInfo& info() const noexcept { return info_; }

  /// Reads every page of both files and compares checksums. Errors: kCorrupt, kIo, kNotFound.
  static Result<void> verify(const std::filesystem::path& directory, const std::string& name,
                             const IdIndexInfo& info);

 private:
  class OrderPages;
  IdIndexInfo info_{};
  std::span<IdSpan> spans_{};  // All of them, when ids are kept so. Else:
  std::unique_ptr<SortedIds> sorted_;
  std::unique_ptr<OrderPages> order_;
};

}  // namespace plimsoll
