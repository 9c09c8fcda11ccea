// SPDX-License-Identifier: Apache-2.0
//
// IdSource: the ids a table is made of, as a stream that can be read more than once.
//
// Threads: single-owner.   Memory: 4 KiB of stack while a .npy is read.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>

#include "plimsoll/result.h"
#include "store/id_index.h"

namespace plimsoll {

class IdSource {
 public:
  using Visit = std::function<Result<void>(std::span<const std::int64_t>)>;

  /// Dense ids [0, rows).
  static IdSource range(std::int64_t rows);
  /// Borrowed: `ids` must stay.
  static IdSource borrowed(std::span<const std::int64_t> ids);
  /// A .npy holding a vector of little-endian int64. Errors: kNotFound, kIo, kCorrupt,
  /// kInvalidArgument (another type or shape), naming the file.
  static Result<IdSource> npy(const std::filesystem::path& path);

  /// Calls `visit` with all ids, in order, a piece at a time.
  [[nodiscard]] Result<void> read(const Visit& visit) const;
  /// What these ids are. Reads them, unless they are dense by construction.
  [[nodiscard]] Result<IdIndexInfo> info() const;

 private:
  std::int64_t rows_{0};
  bool dense_{false};
  std::span<const std::int64_t> ids_{};
  std::filesystem::path path_{};
  std::int64_t data_at_{0};  // Where the numbers begin in the .npy.
};

}  // namespace plimsoll
