// SPDX-License-Identifier: Apache-2.0
//
// A stored block: how one block of records stands in records.dat, as it is or compressed by LZ4.
//
//   plain   block_bytes, page-aligned
//   LZ4     u32 size | a raw LZ4 block of that size | zeros, as far as the next block
//
// An entry of blocks.dat says where a block begins and how it is coded; the next entry ends it. No
// size in a file is trusted: what an entry says is compared with the block and the file before a
// byte is read, and decoding fills exactly one block or fails.
//
// Reading order: docs/formats/feature_store.md, this file, feature_block_reader.h.
//
// Threads: pure functions.   Memory: encoding uses the state it is given, decoding none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

#include "plimsoll/result.h"

namespace plimsoll {

enum class BlockCoding : std::uint8_t { kPlain, kLz4 };

struct StoredBlock {
  std::int64_t offset{0};
  std::int64_t bytes{0};  // Up to where the next block begins.
  std::uint32_t crc{0};   // Of these bytes; not looked at for pages that check themselves.
  BlockCoding coding{BlockCoding::kPlain};
};

/// Whether this build can compress; without it stores with compression cannot be read either.
[[nodiscard]] bool lz4_available() noexcept;
/// Errors: kInvalidArgument telling how to get a build that can.
[[nodiscard]] Result<void> require_lz4(const std::filesystem::path& directory);

[[nodiscard]] std::uint64_t block_entry(std::int64_t offset, BlockCoding coding) noexcept;

/// Bytes of the pages that a stored block touches at most: it may begin anywhere in a page.
[[nodiscard]] constexpr std::int64_t stored_bytes_max(std::int64_t block_bytes) noexcept {
  return block_bytes + 4096;
}

/// What two neighbouring entries say of block `number`; the checksum is left out.
/// Errors: kCorrupt when no writer could have put a block there.
Result<StoredBlock> parse_block_entries(std::uint64_t entry, std::uint64_t next,
                                        std::int64_t block_bytes, std::int64_t file_bytes,
                                        std::int64_t number, const std::filesystem::path& path);

/// kCorrupt, saying what is wrong with block `number` of that file.
[[nodiscard]] tl::unexpected<Error> damaged_block(const std::filesystem::path& path,
                                                  std::int64_t number, const char* what);

/// Bytes of scratch that encode_block() needs.
[[nodiscard]] std::int64_t encoder_state_bytes() noexcept;

/// Writes `block`, compressed, to `out`; returns the bytes written, 0 when that would not save an
/// eighth. Requires: out.size() >= block.size(), `state` aligned to 8, lz4_available().
[[nodiscard]] std::int64_t encode_block(std::span<const std::byte> block, std::span<std::byte> out,
                                        std::span<std::byte> state) noexcept;

/// The inverse. False unless `stored` is a size, that many bytes that decode to exactly out.size(),
/// and zeros. Writes nothing outside `out`, whatever `stored` holds.
[[nodiscard]] bool decode_block(std::span<const std::byte> stored,
                                std::span<std::byte> out) noexcept;

}  // namespace plimsoll
