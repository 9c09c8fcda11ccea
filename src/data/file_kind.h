// SPDX-License-Identifier: Apache-2.0
//
// file_kind: what a file is, by its first bytes. All imports ask here, none asks the name.
//
// Reading order: this file, can_bytes.h.
//
// Threads: pure functions, of the file system at most.   Memory: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "plimsoll/result.h"

namespace plimsoll {

/// kOther: one that no import of rows reads; its name says which.
enum class FileKind : std::uint8_t {
  kText,  ///< Or something unknown.
  kEmpty,
  kUtf16,
  kUtf32,
  kGzip,
  kZstd,
  kBzip2,
  kXz,
  kTar,
  kParquet,
  kArrowFile,
  kArrowStream,
  kNpy,
  kSafetensors,
  kOther
};

struct FileSort {
  FileKind kind{FileKind::kText};
  const char* name{"text"};  ///< "a Parquet file".
  const char* advice{""};    ///< What to do where it is not read.
};

/// How many first bytes tell. Fewer where the file has fewer.
inline constexpr std::size_t kFileHead = 600;

[[nodiscard]] FileSort file_sort(std::span<const std::byte> head);
/// Of a file. Errors: kNotFound, kIo.
[[nodiscard]] Result<FileSort> file_sort_of(const std::filesystem::path& path);

/// "FILE: a Parquet file, where text is read", with its advice.
[[nodiscard]] tl::unexpected<Error> not_text(const std::string& file, const FileSort& sort);

}  // namespace plimsoll
