// SPDX-License-Identifier: Apache-2.0
//
// CanBytes: the bytes of a file in order, unpacked where it is packed by gzip or zstd.
//
// Which it is, its first bytes say (file_kind.h), never the name. Several members (frames) follow
// one another as gzip's and zstd's own tools allow; zeros after the last member of a gzip are
// padding. Reading order: file_kind.h, this file, can_csv.h.
//
// Threads: single-owner.   Memory: the window of zlib or zstd, and the buffer lent at open.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

#include "data/file_kind.h"
#include "os/file.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// What a CanBytes needs of zlib beside the buffer, in bytes; measured generously.
inline constexpr std::int64_t kUnpackBytes = 64 << 10;
/// Largest window of a zstd that is unpacked: that of `zstd -19`; `--ultra` and `--long` have more.
inline constexpr int kZstdWindowLog = 23;
/// What a CanBytes needs of zstd then: the window, two blocks, and tables.
inline constexpr std::int64_t kZstdBytes = (std::int64_t{1} << kZstdWindowLog) + (640 << 10);

class CanBytes {
 public:
  /// `packed` is what the file is read into when it is packed. Requires: it outlives the stream.
  /// `zstd`: unpack_bytes() may be kZstdBytes; else a zstd is refused.
  /// Errors: kNotFound, kIo; kInvalidArgument for a gzip or a zstd that this build cannot unpack.
  static Result<CanBytes> open(const std::filesystem::path& path, std::span<std::byte> packed,
                               bool zstd = false);
  CanBytes(CanBytes&&) noexcept;
  CanBytes& operator=(CanBytes&&) noexcept;
  ~CanBytes();

  /// What the unpacked bytes are, by the first of them, which read() gives nevertheless. Where they
  /// are damaged, read() says so. Requires: nothing was read. Errors: kIo.
  Result<FileSort> sort();

  /// Fills `out`, or less of it: how many bytes; 0 at the end alone.
  /// Errors: kCorrupt (a damaged or truncated gzip or zstd: what was unpacked before it has been
  ///         handed out), kInvalidArgument (a zstd with a larger window), kIo.
  Result<std::int64_t> read(std::span<std::byte> out);

  [[nodiscard]] std::int64_t file_bytes() const noexcept { return file_bytes_; }
  /// What it may take beside the buffer from the first read() on.
  [[nodiscard]] std::int64_t unpack_bytes() const noexcept {
    return zstd_ ? kZstdBytes : kUnpackBytes;
  }
  /// Bytes of the file read so far.
  [[nodiscard]] std::int64_t position() const noexcept { return at_; }
  /// Of the file's bytes read so far.
  [[nodiscard]] std::uint32_t crc32c() const noexcept { return crc_; }
  /// Leaves out the next bytes of a plain file, which crc32c() then lacks: how many. Of a packed
  /// one none: it must be unpacked.
  std::int64_t skip(std::int64_t bytes) noexcept;
  /// Reads the rest without unpacking it, so that crc32c() is that of the whole file. Errors: kIo.
  Result<void> skip_rest();

 private:
  struct Unpacker;
  struct ZstdUnpacker;
  CanBytes() noexcept;
  Result<std::int64_t> read_file(std::span<std::byte> out);
  Result<std::int64_t> read_on(std::span<std::byte> out);
  Result<std::int64_t> unpack(std::span<std::byte> out);
  Result<std::int64_t> unpack_zstd(std::span<std::byte> out);
  Result<void> refill();
  Result<void> next_member();

  File file_;
  std::int64_t file_bytes_{0};
  std::int64_t at_{0};
  std::uint32_t crc_{0};
  std::span<std::byte> packed_;
  std::array<std::byte, kFileHead> head_{};  // Bytes [head_at_, head_size_) are for read().
  std::size_t head_at_{0};
  std::size_t head_size_{0};
  std::string damage_;                  // Not empty: what the next read() says is wrong.
  bool too_wide_{false};                // The damage is a zstd's window.
  std::unique_ptr<Unpacker> unpacker_;  // Of a gzip.
  std::unique_ptr<ZstdUnpacker> zstd_;  // Both null for a plain file.
};

}  // namespace plimsoll
