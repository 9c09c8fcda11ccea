// SPDX-License-Identifier: Apache-2.0
//
// PackedBlockWriter: writes records.dat and blocks.dat of a store with compression.
//
// Blocks are compressed one by one and packed behind one another, across pages. A block begins a
// new page when that saves reading a page and costs at most an eighth of its size, and always when
// it is plain. So the file is never larger than without compression, and a block touches at most
// one page more than it would plain (none more when it is plain).
//
// Reading order: feature_block.h, feature_table.h, this file, feature_writer.cpp.
//
// Threads: single-owner.
// Memory:  memory_bytes(), taken from the writer's slab at create().
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>

#include "memory/slab.h"
#include "os/file.h"
#include "plimsoll/result.h"
#include "store/feature_block.h"
#include "store/feature_format.h"
#include "store/feature_table.h"

namespace plimsoll {

class PackedBlockWriter {
 public:
  /// Taken from the slab, alignment included; `buffer_bytes` of it wait for the disk (a few blocks
  /// at least).
  static std::int64_t memory_bytes(std::int64_t block_bytes, std::int64_t buffer_bytes) noexcept;

  /// Creates both files. `checksums` gets one entry a block; it must stay until finish().
  static Result<PackedBlockWriter> create(const std::filesystem::path& directory,
                                          std::int64_t block_bytes, std::int64_t buffer_bytes,
                                          Slab& slab, FeatureTableWriter& checksums);

  /// The next block. Errors: kIo.
  Result<void> append(std::span<const std::byte> block);

  /// Writes what is left, syncs, and tells what features.json says of it.
  Result<StoredForm> finish();

 private:
  Result<void> end_block(std::int64_t padding);
  Result<void> write_whole_pages();

  File records_;
  std::optional<FeatureTableWriter> blocks_;
  std::optional<FeatureTableWriter> content_;  // The checksums of a plain store; in no file.
  FeatureTableWriter* checksums_{nullptr};
  std::int64_t block_bytes_{0};
  std::span<std::byte> buffer_{};  // From a page boundary of the file on; beyond end_ it is zero.
  std::span<std::byte> packed_{};  // One block, compressed.
  std::span<std::byte> state_{};   // LZ4's.
  std::int64_t begin_{0};          // Offset in the file of buffer_.
  std::int64_t end_{0};            // Where the last block's bytes end.
  std::uint32_t crc_{0};           // Of the last block, without the zeros up to the next.
  bool any_{false};                // A block has been appended: its checksum is due.
  StoredForm form_{};
};

}  // namespace plimsoll
