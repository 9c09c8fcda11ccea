// SPDX-License-Identifier: Apache-2.0
//
// RankFile: memory of one process that others of its machine open by an address, and map.
//
// It has no name in a file system (memfd_create), so that nothing of it outlives those that have
// it. The address is the process, its descriptor, and a random name by which whoever opens it
// knows that it is the right one.
//
// Reading order: this file, rank_board.h, src/memory/rank_memory.h.
//
// Threads: single-owner; RankPages may be let go of in any.
// Forks:   a child has neither the descriptor nor the pages, and leaves its copies alone.
// Memory:  what is touched of the file, by whoever maps it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "os/fork.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// What the names of all such files begin with, in /proc as well.
inline constexpr std::string_view kRankFileName = "plimsoll-rank ";

/// A part of a file, mapped until it is destroyed.
class RankPages {
 public:
  RankPages() noexcept = default;
  RankPages(RankPages&& other) noexcept;
  RankPages& operator=(RankPages&& other) noexcept;
  RankPages(const RankPages&) = delete;
  RankPages& operator=(const RankPages&) = delete;
  ~RankPages();

  /// Null where nothing is mapped. A multiple of the page size.
  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::int64_t bytes() const noexcept { return bytes_; }

 private:
  friend class RankFile;
  ForkMark mark_;
  std::byte* data_{nullptr};
  std::int64_t bytes_{0};
};

class RankFile {
 public:
  /// Makes one of this process. Errors: kIo where the system has none.
  static Result<RankFile> create(std::int64_t bytes);

  /// Opens the one that `rank` has, this process's own as well. Errors: kIo where a file of another
  /// process may not be opened, or is another one; kInvalidArgument for what is no address.
  static Result<RankFile> open(const std::string& address, int rank);

  RankFile() noexcept = default;

  /// For open(), as long as it is open here. Requires: create() made it.
  [[nodiscard]] std::string address() const;
  /// The process whose it is.
  [[nodiscard]] int pid() const noexcept { return pid_; }

  /// Changes its size; what is mapped behind it must not be touched. Errors: kIo.
  Result<void> resize(std::int64_t bytes);
  /// As it is now. Errors: kIo.
  [[nodiscard]] Result<std::int64_t> bytes() const;

  /// Maps bytes [begin, begin + bytes). Requires: `begin` is a multiple of the page size.
  /// Errors: kIo.
  [[nodiscard]] Result<RankPages> map(std::int64_t begin, std::int64_t bytes) const;

 private:
  OwnDescriptor file_;
  int pid_{0};
  std::string name_;
};

}  // namespace plimsoll
