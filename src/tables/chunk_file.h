// SPDX-License-Identifier: Apache-2.0
//
// ChunkFile: the original's `embeddings_chunk_<k>.pt`, a torch.save of {id: float32 [dim]}.
//
// It is read as plain values: nothing is imported and nothing is called (data/pickle_reader.h).
//
// Threads: single-owner.
// Memory:  while open() or visit() runs what TorchArchive takes and a value for each row, leased,
//          and one block of rows. Else nothing that grows with the file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>

#include "plimsoll/governor.h"
#include "plimsoll/result.h"

namespace plimsoll {

class ChunkFile {
 public:
  /// Shape: as many ids as rows; float32 [n, dim], or no floats where only ids are wanted.
  using Visit = std::function<Result<void>(std::span<const std::int64_t>, std::span<const float>)>;

  /// Reads what there is. Errors: kCorrupt naming the file (not of torch.save, a class in it, not a
  /// dict of whole numbers to float32 [dim]); kNotFound; kIo; kOverBudget.
  static Result<ChunkFile> open(Governor governor, const std::filesystem::path& path);

  [[nodiscard]] std::int64_t dim() const noexcept { return dim_; }
  /// Visits every row, in the order of the dict.
  /// Errors: those of open(); kCorrupt when it holds rows of another width by now.
  Result<void> visit(bool with_rows, const Visit& visit) const;

 private:
  ChunkFile(Governor governor, std::filesystem::path path) noexcept;

  Governor governor_;
  std::filesystem::path path_;
  std::int64_t dim_{0};
};

}  // namespace plimsoll
