// SPDX-License-Identifier: Apache-2.0
//
// RowWriter: makes a RowFile: rows are appended to PATH.partial/rows and their entries to
// PATH.partial/index.
//
// A commit syncs both and then replaces PATH.partial/journal, which says how long they were. Work
// that goes on cuts off what is beyond. At the end the index is copied behind the rows, the header
// is written, and the file takes PATH's name.
// Reading order: row_file.h, this file, row_writer.cpp.
//
// Threads: single-owner.   Memory: a slab of kRowWriterBytes (Tag::kOther).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "data/buffered_file.h"
#include "data/row_file.h"
#include "memory/slab.h"
#include "os/folder_lock.h"
#include "plimsoll/governor.h"

namespace plimsoll {

inline constexpr std::int64_t kRowWriterBytes = 2 << 20;

struct RowWriterOptions {
  const RowFileKind* kind{nullptr};  ///< Static.
  std::filesystem::path path{};      ///< Work under way is in the folder PATH.partial.
  std::string fingerprint{};         ///< Work of another one is begun anew. At most 64 bytes.
  bool rebuild{false};  ///< Begins anew even when a set or work of this fingerprint is there.
  std::uint32_t unit{0};
  std::array<std::int64_t, kRowCounts> counts{};  ///< Before the first row.
  /// Whether work may go on from these. More than that none is negative.
  std::function<bool(const std::array<std::int64_t, kRowCounts>&)> sensible{};
};

class RowWriter {
 public:
  /// Begins, goes on with work of the same fingerprint, or finds the set whole (whole()).
  /// Errors: kInvalidArgument (another process writes it, something else is there, options); kIo,
  ///         kOverBudget, kCorrupt.
  static Result<RowWriter> open(Governor governor, const RowWriterOptions& options);

  /// There is a set of this fingerprint: nothing is to be done, and no other call is allowed.
  [[nodiscard]] bool whole() const noexcept { return whole_; }
  /// What the last commit() said; "" when there was none.
  [[nodiscard]] const std::string& position() const noexcept { return position_; }
  /// Of the rows that are ended; the caller counts, but for rows.
  [[nodiscard]] std::array<std::int64_t, kRowCounts>& counts() noexcept { return counts_; }
  [[nodiscard]] const std::array<std::int64_t, kRowCounts>& counts() const noexcept {
    return counts_;
  }
  [[nodiscard]] std::int64_t rows() const noexcept { return counts_[1]; }
  /// Bytes of the row under way.
  [[nodiscard]] std::int64_t row_bytes() const noexcept { return rows_.bytes() - ended_bytes_; }

  /// Adds bytes to the row under way. Errors: kIo.
  Result<void> put(std::span<const std::byte> bytes);
  /// The same of bytes that have a checksum of their own: the row's is without them. Errors: kIo.
  Result<void> put_apart(std::span<const std::byte> bytes) { return rows_.put(bytes); }
  /// Ends the row. Errors: kIo.
  Result<void> end_row(std::uint32_t length);
  /// Forgets the row under way.
  void drop_row() noexcept;

  /// Makes all rows durable, and `position`, which says where to go on. No row may be under way.
  /// Errors: kIo (the writer is then of no use; the last commit stands), kInvalidArgument.
  Result<void> commit(const std::string& position);
  /// Makes the file: all rows, and `about`, which is JSON. Nothing stays beside it. `fingerprint`:
  /// the file's, where the options' is only that of the work; "": the same. Errors: kIo,
  /// kInvalidArgument (a row under way, texts that are too long).
  Result<void> finish(const std::string& about, const std::string& fingerprint);

 private:
  RowWriter() = default;
  Result<void> begin(Governor governor);
  Result<bool> go_on();
  Result<void> clear();
  Result<void> copy_index();

  RowWriterOptions options_{};
  std::filesystem::path folder_{};
  FolderLock lock_{};
  Slab slab_{};
  std::unique_ptr<std::array<File, 2>> files_{};  // Where they stay: rows and index.
  BufferedFile rows_{};
  BufferedFile index_{};
  bool whole_{false};
  std::string position_{};
  std::array<std::int64_t, kRowCounts> counts_{};
  std::int64_t ended_bytes_{
      kRowFileHeaderBytes};  // Of the file of rows, up to the last that is ended.
  std::uint32_t crc_{0};     // Of the row under way.
};

}  // namespace plimsoll
