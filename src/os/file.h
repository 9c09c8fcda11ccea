// SPDX-License-Identifier: Apache-2.0
//
// File: positioned reads and writes that complete or say why, and files replaced as a whole.
//
// Short transfers and EINTR are retried here and nowhere else. Every write, sync and rename passes
// a crash point (crash_point.h), so tests can kill the process between any two of them. Nothing is
// ever written through a symbolic link in a file's place. Directories: directories.h.
//
// Threads: pread/pwrite/sync are thread-safe on one File.   Memory: a descriptor and the path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "plimsoll/result.h"

namespace plimsoll {

enum class FileMode : std::uint8_t {
  kRead,
  kReadWrite,
  kCreate /* new, read-write; what had the name is removed first */
};

class File {
 public:
  /// Opens a file. `direct` asks for O_DIRECT and falls back to buffered I/O where the file system
  /// refuses it; direct() tells which. Direct transfers need 4096-aligned addresses, sizes,
  /// offsets. A symbolic link is followed for reading only. Errors: kNotFound, kIo; the text names
  /// the path.
  static Result<File> open(const std::filesystem::path& path, FileMode mode, bool direct = false);

  File() noexcept = default;
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  /// Reads exactly out.size() bytes at `offset`. Errors: kCorrupt at end of file, kIo.
  Result<void> read_at(std::int64_t offset, std::span<std::byte> out) const;
  /// Writes all of `bytes` at `offset`. Errors: kIo (ENOSPC named as such).
  Result<void> write_at(std::int64_t offset, std::span<const std::byte> bytes);
  /// fdatasync. An error must poison the caller: the pages are lost. Errors: kIo.
  Result<void> sync();
  Result<void> truncate(std::int64_t bytes);
  /// Gives bytes [from, to) a place on disk and makes the file that long, where the file system can
  /// and has room: writes within a file need not wait for each other, those that extend it do.
  void reserve(std::int64_t from, std::int64_t to);
  /// Drops this file's clean pages from the kernel's cache (buffered files; else nothing).
  void drop_cache() noexcept;

  [[nodiscard]] Result<std::int64_t> size() const;
  /// Whether this is what its path names: another process may have put its own file there.
  [[nodiscard]] bool still_named() const noexcept;
  [[nodiscard]] bool direct() const noexcept { return direct_; }
  [[nodiscard]] bool valid() const noexcept { return descriptor_ >= 0; }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  [[nodiscard]] int descriptor() const noexcept { return descriptor_; }  ///< For aio_transfers.cpp.

 private:
  int descriptor_{-1};
  bool direct_{false};
  std::filesystem::path path_;
};

/// Reads a whole small file. Errors: kNotFound, kIo, kCorrupt when larger than `bytes_max`.
Result<std::string> read_small_file(const std::filesystem::path& path,
                                    std::int64_t bytes_max = 1 << 20);

/// The error of an open(2) of these flags, by errno: kNotFound, kIo; the text names the path.
tl::unexpected<Error> open_failed(const std::filesystem::path& path, int flags);

/// A descriptor of a file that is written to, never through a symbolic link; `flags` as of open(2),
/// which closes it in children. Errors: kNotFound, kIo; the text names the path.
Result<int> open_descriptor(const std::filesystem::path& path, int flags);

/// kNo: a reader sees the old file or the new one, and a power failure may leave neither.
enum class Durable : bool { kNo, kYes };

/// Replaces a file so that a crash leaves the old or the new one: write beside it (PATH.new),
/// fsync, rename, fsync the directory.
Result<void> replace_file(const std::filesystem::path& path, std::string_view content,
                          Durable durable = Durable::kYes);

/// fsyncs a directory, making renames and creations in it durable.
Result<void> sync_directory(const std::filesystem::path& directory);

/// Renames; sync_directory() makes it durable. Errors: kIo.
Result<void> rename_file(const std::filesystem::path& from, const std::filesystem::path& to);

/// Renames durably (both directories are synced). Errors: kIo.
Result<void> rename_durable(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace plimsoll
