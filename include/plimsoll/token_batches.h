// SPDX-License-Identifier: Apache-2.0
//
// TokenBatches: sequences of fixed length for training, from the rows of a TokenSet.
//
// An epoch's order is cut into windows of so many rows. Packed, a window's rows are put together by
// best fit decreasing; else each is a sequence. Which sequence comes when depends on the seed and
// the options alone, and a resumption plans one window again.
// Reading order: token_set.h, sample_order.h, this file, src/data/token_batches.cpp.
// Source: D. S. Johnson, "Near-optimal bin packing algorithms" (MIT, 1973): best fit decreasing.
//
// Threads: single-owner.   Memory: 64 bytes a row of a window, and a row.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plimsoll/result.h"
#include "plimsoll/token_set.h"

namespace plimsoll {

/// Where the next batch begins.
struct TokenPlace {
  std::int64_t epoch{0};
  std::int64_t position{0};  ///< Rows of the epoch's order before the window.
  std::int64_t sequence{0};  ///< Sequences of the window already handed out.
};

struct TokenBatchesOptions {
  std::int64_t batch_size{1};          ///< Sequences.
  std::int64_t sequence_length{2048};  ///< Tokens; what a longer row has beyond is left out.
  bool packing{true};
  std::int64_t window{1024};  ///< Rows that are packed together.
  bool shuffle{true};
  std::uint64_t seed{0};
  std::int64_t pad_id{0};  ///< Id where there is no token.
  /// Rows, chosen by chance and the same ones for any seed, that are left out.
  std::int64_t held_out{0};
  bool only_held_out{false};  ///< These rows, and no others.
  TokenPlace place{};
};

/// Where a batch is assembled. Shape: each [batch_size, sequence_length].
struct TokenBuffers {
  std::span<std::int64_t> input_ids{};
  std::span<std::int64_t> labels{};        ///< The id, or −100: not trained on, or none.
  std::span<std::int64_t> position_ids{};  ///< From 0 in every document; 0 where there is none.
  std::span<std::int64_t> documents{};     ///< Which of the sequence, from 0; −1: none.
};

struct TokenBatch {
  TokenPlace place{};         ///< Of this batch.
  std::int64_t sequences{0};  ///< Fewer than batch_size only at an epoch's end.
  std::int64_t tokens{0};     ///< Not counting padding.
  std::int64_t trained{0};    ///< Labels that are none of −100: never 0 in a sequence.
  std::int64_t rows{0};
  /// Sequences left out, cut before their first trained token.
  std::int64_t left_out{0};
  bool ends_epoch{false};
};

class TokenBatches {
 public:
  /// Requires: the set outlives it, and stays where it is.
  /// Errors: kInvalidArgument naming the option; those of TokenSet::length().
  static Result<TokenBatches> open(const TokenSet* set, const TokenBatchesOptions& options);

  /// Assembles the next batch; epochs follow one another without end. The first token of a document
  /// is no label, so that none is predicted from the document before it.
  /// Errors: kInvalidArgument (buffers of another size), those of TokenSet::read(); the place is
  ///         then unchanged.
  Result<TokenBatch> next(const TokenBuffers& out);

  [[nodiscard]] const TokenPlace& place() const noexcept { return options_.place; }
  /// Goes to a place that place() gave. Errors: kInvalidArgument; those of TokenSet::length().
  Result<void> seek(const TokenPlace& place);

 private:
  TokenBatches(const TokenSet* set, const TokenBatchesOptions& options);
  Result<void> plan(const TokenPlace& place);
  [[nodiscard]] std::int64_t rows() const noexcept {
    return options_.only_held_out ? options_.held_out : set_->rows() - options_.held_out;
  }
  /// The set's row for the i-th of rows().
  [[nodiscard]] std::int64_t row(std::int64_t i) const;
  [[nodiscard]] std::int64_t sequences() const noexcept {
    return static_cast<std::int64_t>(ends_.size());
  }
  Result<void> put(std::int64_t sequence, std::int64_t slot, const TokenBuffers& out,
                   TokenBatch& batch);

  const TokenSet* set_;
  TokenBatchesOptions options_;
  // The window that place is in: rows by sequence, and where each sequence's end.
  std::int64_t planned_epoch_{-1};
  std::int64_t planned_position_{-1};
  std::vector<std::int64_t> rows_;
  std::vector<std::size_t> ends_;
  // A row as it is read.
  std::vector<std::int32_t> ids_;
  std::vector<std::uint8_t> trained_;
};

}  // namespace plimsoll
