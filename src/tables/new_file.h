// SPDX-License-Identifier: Apache-2.0
//
// NewFile: a file that is there whole or not at all; and the header of a .npy.
//
// Threads: single-owner.   Memory: a descriptor and two paths.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "data/safetensors.h"
#include "os/file.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// Written beside its name, renamed to it by finish(), and removed otherwise.
class NewFile {
 public:
  static Result<NewFile> create(const std::filesystem::path& path);
  NewFile(NewFile&& other) noexcept;
  NewFile& operator=(NewFile&&) = delete;
  ~NewFile();

  Result<void> write(std::span<const std::byte> bytes);
  Result<void> write(std::string_view text) { return write(std::as_bytes(std::span(text))); }
  /// Writes over the beginning again, once it is known what belongs there.
  Result<void> rewrite_head(std::string_view text);
  Result<void> finish();

 private:
  NewFile() = default;
  File file_;
  std::filesystem::path path_;
  std::filesystem::path partial_;
  std::int64_t at_{0};
};

/// NumPy's descriptor of an element type; "" where it has none.
[[nodiscard]] const char* npy_descriptor(DType dtype);

/// Of the same size for any number of rows; see base/npy_header.h.
[[nodiscard]] std::string npy_header(const TensorSpec& spec);

}  // namespace plimsoll
