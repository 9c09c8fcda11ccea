// SPDX-License-Identifier: Apache-2.0
//
// RankMemory: memory of each rank that all ranks of a machine have before them, for what they
// exchange.
//
//   a rank's file    [board (of rank 0's) | room for gradients | rows]
//   rows             of lookups, where owners write them and a step reads them; of their gradients
//
// Who writes where is agreed before, by words that meet at the board, and so is that nobody reads
// any more. Sockets would copy every byte four times. Both Python's ranks and programs in C++
// exchange through it.
//
// Reading order: os/rank_file.h, os/rank_board.h, this file, python/plimsoll/ranks/_ranks.py.
//
// Threads: single-owner; rows and rooms may be let go of in any.
// Forks:   a child has none of it mapped; there close() does nothing.
// Memory:  the board, two words a rank; the room, kRankRoomBytes at most; the most rows that
//          lookups of a step have had at once, until a lookup needs less than a quarter of that;
//          the latter two leased, and kept. Pages of others' files that this rank touches are
//          resident in it, too, and count in its share once more.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "os/fork.h"
#include "os/rank_board.h"
#include "os/rank_file.h"
#include "plimsoll/governor.h"
#include "plimsoll/result.h"

namespace plimsoll {

inline constexpr std::int64_t kRankRoomBytes = 4 << 20;

/// How many rows, of how many float32 each.
struct RankRowsShape {
  std::int64_t count{0};
  std::int64_t dim{0};
};

/// Ids and rows behind them, in a rank's file. As long as there is a copy of it nobody else gets
/// the place, where it is this rank's, and the memory stays mapped.
class RankRows {
 public:
  /// Shape: int64 [count].
  [[nodiscard]] std::span<std::int64_t> ids() const noexcept;
  /// Shape: float32 [count, dim], row after row.
  [[nodiscard]] std::span<float> rows() const noexcept;
  [[nodiscard]] const RankRowsShape& shape() const noexcept { return shape_; }
  /// Where it is, for others' rows().
  [[nodiscard]] std::int64_t begin() const noexcept { return begin_; }

 private:
  friend class RankMemory;
  std::shared_ptr<const RankPages> pages_;  // Shared: all rows of a rank lie in one mapping.
  std::shared_ptr<const void> place_;       // Shared by copies: the last one frees it.
  std::int64_t begin_{0};
  RankRowsShape shape_;
};

/// What one rank sees of all of them, from open() to close().
class RankMemory {
 public:
  /// Makes this rank's. Errors: kIo where the system has no memory files; kInvalidArgument for
  /// a rank that is none of so many.
  static Result<RankMemory> create(const RankWords& words);

  RankMemory(RankMemory&& other) noexcept = default;
  RankMemory& operator=(RankMemory&& other) = delete;
  ~RankMemory();  ///< As close().

  [[nodiscard]] int rank() const noexcept { return words_.rank; }
  [[nodiscard]] int count() const noexcept { return words_.count; }

  /// For the others' open(). Requires: not closed.
  [[nodiscard]] std::string address() const;

  /// Opens what all ranks have, in their order, this one's too. Errors: as RankFile::open().
  Result<void> open(std::span<const std::string> addresses);

  /// RankBoard::meet(), for what is in rooms. Errors: as that; kInvalidArgument before open(),
  /// after close(), or in a forked child.
  Result<void> meet(const WaitOn& wait_on = {});
  /// RankBoard::word(). Errors: as meet().
  Result<std::span<const std::byte>> word(std::span<const std::byte> own,
                                          const WaitOn& wait_on = {});

  /// Leases `bytes` of the own room, where they are more than before; its file has it already. An
  /// empty `governor` leases nothing. Requires: kRankRoomBytes at most.
  /// Errors: kOverBudget; then unchanged.
  Result<void> grow_room(std::int64_t bytes, Governor governor);

  /// A rank's room, which that has grown. Shape: bytes [kRankRoomBytes].
  /// Errors: kIo; kInvalidArgument as meet().
  Result<std::shared_ptr<const RankPages>> room(int rank);

  /// Room for so many of this rank's, until no copy of what it returns is left. What is in it is
  /// not defined. An empty `governor` leases nothing.
  ///
  /// Requires: no other rank is at this one's rows.   Errors: kOverBudget; kIo; then unchanged.
  Result<RankRows> take(const RankRowsShape& shape, Governor governor);

  /// What `rank` has taken, of `shape`, at RankRows::begin(). Errors: kIo; kInvalidArgument where
  /// its file has no such place.
  Result<RankRows> rows(int rank, std::int64_t begin, const RankRowsShape& shape);

  /// Of this rank's file, for rows: in use or not.
  [[nodiscard]] std::int64_t rows_bytes() const noexcept { return rows_bytes_; }

  /// Leaves the others, closes all files and returns the leases. A second close does nothing.
  void close() noexcept;

 private:
  class Places;
  class Place;

  RankMemory(const RankWords& words, RankFile own);
  Result<void> check() const;
  Result<std::shared_ptr<const RankPages>> rows_of(int rank, std::int64_t needed);
  Result<void> resize(std::int64_t bytes, Governor governor);
  static Result<void> lease(Lease& held, std::int64_t bytes, Governor governor);

  RankWords words_;
  std::int64_t room_begin_;
  std::int64_t rows_begin_;
  std::vector<RankFile> files_;  // By rank, once they are open; before, this one's alone.
  std::unique_ptr<RankBoard> board_;
  std::vector<std::shared_ptr<const RankPages>> rooms_;  // By rank; shared with tensors over them.
  std::vector<std::shared_ptr<const RankPages>> rows_;   // By rank; shared with RankRows.
  std::shared_ptr<Places> places_;                       // Shared with the rows that were taken.
  Lease room_lease_;
  Lease rows_lease_;
  std::int64_t room_bytes_{0};  // Of this rank's, grown.
  std::int64_t rows_bytes_{0};
  ForkMark mark_;
};

}  // namespace plimsoll
