// SPDX-License-Identifier: Apache-2.0
//
// CanBytes: the bytes of a file in order, unpacked where it is gzipped.
//
// A gzip is told by its first two bytes, never by the name. Several members follow one another as
// gzip's own tools allow; zeros after the last are padding.
// Reading order: this file, can_csv.h.
//
// Threads: single-owner.   Memory: zlib's window, and the buffer lent at open.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "os/file.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// What a CanBytes needs of zlib beside the buffer, in bytes; measured generously.
inline constexpr std::int64_t kUnpackBytes = 64 << 10;

class CanBytes {
 public:
  /// `packed` is what the file is read into when it is gzipped. Requires: it outlives the stream.
  /// Errors: kNotFound, kIo; kInvalidArgument for a gzip where there is no zlib.
  static Result<CanBytes> open(const std::filesystem::path& path, std::span<std::byte> packed);
  CanBytes(CanBytes&&) noexcept;
  CanBytes& operator=(CanBytes&&) noexcept;
  ~CanBytes();

  /// Fills as much of `out` as there is; fewer bytes only at the end, where 0 are left.
  /// Errors: kCorrupt (a damaged or truncated gzip: what was unpacked before it has been handed
  ///         out), kIo.
  Result<std::int64_t> read(std::span<std::byte> out);

  [[nodiscard]] std::int64_t file_bytes() const noexcept { return file_bytes_; }
  /// Bytes of the file read so far.
  [[nodiscard]] std::int64_t position() const noexcept { return at_; }
  /// Of the file's bytes read so far.
  [[nodiscard]] std::uint32_t crc32c() const noexcept { return crc_; }
  /// Leaves out the next bytes of a plain file, which crc32c() then lacks: how many. Of a packed
  /// one none: it must be unpacked.
  std::int64_t skip(std::int64_t bytes) noexcept;
  /// Reads the rest without unpacking it, so that crc32c() is that of the whole file. `between` is
  /// called before each read, and may throw. Errors: kIo.
  Result<void> skip_rest(const std::function<void()>& between = {});

 private:
  struct Unpacker;
  CanBytes() noexcept;
  Result<std::int64_t> read_file(std::span<std::byte> out);
  Result<std::int64_t> unpack(std::span<std::byte> out);
  Result<void> refill();
  Result<void> next_member();

  File file_;
  std::int64_t file_bytes_{0};
  std::int64_t at_{0};
  std::uint32_t crc_{0};
  std::span<std::byte> packed_;
  std::string damage_;                  // Not empty: what the next read() says is wrong.
  std::unique_ptr<Unpacker> unpacker_;  // Null for a plain file.
};

}  // namespace plimsoll
