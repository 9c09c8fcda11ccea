// SPDX-License-Identifier: Apache-2.0
//
// TokenSet: rows of token ids in one file, each token trained on or not; TokenWriter makes one.
//
// A row is the tokens of one document, a chat for example. A writer that is killed goes on from its
// last commit, to the same bytes. docs/formats/token_set.md has the file.
// Reading order: this file, src/data/token_set_format.h, token_writer.cpp, token_set.cpp.
//
// Threads: a TokenSet is thread-safe once open; a TokenWriter is single-owner.
// Memory:  a TokenSet holds a descriptor and a row's bytes while it is read; a TokenWriter a slab
//          of kTokenWriterBytes and the mask of the row under way (Tag::kOther), for any number of
//          rows.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "plimsoll/governor.h"
#include "plimsoll/result.h"

namespace plimsoll {

inline constexpr std::int64_t kTokenWriterBytes = 2 << 20;
inline constexpr std::int64_t kRowTokensMost = std::int64_t{1} << 27;

/// What a set holds, read from its header.
struct TokenSetInfo {
  std::int64_t rows{0};
  std::int64_t tokens{0};
  std::int64_t trained_tokens{0};
  std::int64_t longest_row{0};  ///< Tokens of the longest row.
  std::int64_t vocabulary{0};   ///< Every id is below it.
  int id_bytes{2};              ///< 2 or 4.
  std::string fingerprint{};    ///< Of whatever decided the rows, by who wrote them.
  std::string about{};          ///< What the writer said of it: JSON.
  std::int64_t disk_bytes{0};
};

/// Tokens [begin, end) of a row.
struct TokenSpan {
  std::int64_t begin{0};
  std::int64_t end{0};
};

class TokenSet {
 public:
  /// Reads the header and `about` alone. Errors: kNotFound, kCorrupt, kIo.
  static Result<TokenSetInfo> inspect(const std::filesystem::path& path);
  /// Errors: those of inspect().
  static Result<TokenSet> open(const std::filesystem::path& path);
  TokenSet(TokenSet&&) noexcept;
  TokenSet& operator=(TokenSet&&) noexcept;
  ~TokenSet();

  [[nodiscard]] const TokenSetInfo& info() const noexcept;
  [[nodiscard]] std::int64_t rows() const noexcept { return info().rows; }
  /// Tokens of a row, as the index says; its checksum is compared by read().
  /// Errors: kInvalidArgument (no such row), kCorrupt, kIo.
  [[nodiscard]] Result<std::int64_t> length(std::int64_t row) const;

  /// Reads a row. Shape: ids [length], each below vocabulary; trained [length], 1 or 0.
  /// Errors: kInvalidArgument (no such row, spans of another length), kCorrupt naming the row, kIo.
  Result<void> read(std::int64_t row, std::span<std::int32_t> ids,
                    std::span<std::uint8_t> trained) const;

  /// Reads everything and compares every checksum and count. `progress(done, total)` in rows;
  /// returning false cancels. Errors: kCorrupt, kIo, kInvalidArgument when cancelled.
  Result<void> verify(const std::function<bool(std::int64_t, std::int64_t)>& progress) const;

 private:
  class Impl;
  explicit TokenSet(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

struct TokenWriterOptions {
  std::filesystem::path path{};  ///< The set's file. Work under way is in the folder PATH.partial.
  std::int64_t vocabulary{0};    ///< Every id is below it; above 65536, ids take 4 bytes.
  std::string fingerprint{};     ///< Work of another one is begun anew. At most 64 bytes.
  std::int64_t row_tokens_max{kRowTokensMost};  ///< What is beyond in a row is cut off.
  bool rebuild{false};  ///< Begins anew even when a set or work of this fingerprint is there.
};

/// What became of a row.
struct RowEnd {
  std::int64_t tokens{0};   ///< Written.
  std::int64_t trained{0};  ///< 0: the row was left out.
  bool cut{false};          ///< It had more tokens than row_tokens_max.
};

class TokenWriter {
 public:
  /// Begins, goes on with work of the same fingerprint, or finds the set whole (whole()).
  /// Errors: kInvalidArgument (another process writes it, the path is a folder, options); kIo,
  ///         kOverBudget, kCorrupt.
  static Result<TokenWriter> open(Governor governor, const TokenWriterOptions& options);
  TokenWriter(TokenWriter&&) noexcept;
  TokenWriter& operator=(TokenWriter&&) noexcept;
  ~TokenWriter();  ///< Work under way stays, to go on with.

  /// There is a set of this fingerprint: nothing is to be done, and no other call is allowed.
  [[nodiscard]] bool whole() const noexcept;
  /// What the last commit() said; "" when there was none.
  [[nodiscard]] const std::string& position() const noexcept;
  /// Of what is written, rows under way not counted.
  [[nodiscard]] const TokenSetInfo& info() const noexcept;

  /// Adds tokens to the row under way, of which those in `trained` (among these) are trained on.
  /// Errors: kInvalidArgument (an id beyond the vocabulary, a span beyond the ids), kIo,
  ///         kOverBudget.
  Result<void> append(std::span<const std::uint32_t> ids, std::span<const TokenSpan> trained);
  /// Ends the row: it is the set's next, unless no token of it is trained on.
  /// Errors: as append().
  Result<RowEnd> end_row();
  /// Forgets the row under way.
  void drop_row() noexcept;
  /// Adds the rows [begin, end) of another set, in bounded memory: the bytes of their tokens.
  /// No row may be under way. Errors: those of TokenSet::read() and append().
  Result<std::int64_t> append_rows(const TokenSet& from, std::int64_t begin, std::int64_t end);

  /// Makes all rows durable, and `position`, which says where to go on. No row may be under way.
  /// Errors: kIo (the writer is then of no use; the last commit stands), kInvalidArgument.
  Result<void> commit(const std::string& position);
  /// Makes the set: all rows, and `about`, which is JSON. Nothing stays beside it. `fingerprint`:
  /// the set's, where the options' is only that of the work; "": the same. Errors: kIo,
  /// kInvalidArgument (a row under way, texts that are too long).
  Result<void> finish(const std::string& about, const std::string& fingerprint = {});

 private:
  class Impl;
  explicit TokenWriter(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

}  // namespace plimsoll
