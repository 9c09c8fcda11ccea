// SPDX-License-Identifier: Apache-2.0
//
// Reads and writes .safetensors files, streaming: u64 header length | JSON header | tensor bytes.
// Source: github.com/huggingface/safetensors, README, "Format".
//
// Reading order: tensor_rows.h, this file.
//
// Threads: the reader is thread-compatible; the writer single-owner.
// Memory:  the header (at most 100 MB, and never more than the file); no tensor is held.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "data/tensor_rows.h"
#include "os/file.h"
#include "plimsoll/feature_store.h"
#include "plimsoll/result.h"

namespace plimsoll {

inline constexpr std::int64_t kSafetensorsHeaderMax = 100'000'000;

/// Key of the metadata that holds a file's checksum: CRC-32C of all its bytes, header included, in
/// eight hexadecimal digits, which count as eight zeros.
inline constexpr const char* kSafetensorsSum = "crc32c";

/// One tensor of a file.
struct SafetensorsEntry {
  std::string name{};
  std::string dtype_text{};      ///< "F32"; also of element types we do not read.
  std::optional<DType> dtype{};  ///< Empty for those.
  std::vector<std::int64_t> shape{};
  std::int64_t begin{0};  ///< In the data section.
  std::int64_t end{0};
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries{};  ///< In the order of their bytes.
  std::map<std::string, std::string> metadata{};
};

/// Parses a JSON header for a data section of `data_bytes`; `name` is what errors call the file.
/// Tensors must fill the section without gap or overlap, each as large as its shape says.
/// Errors: kCorrupt.
Result<SafetensorsHeader> parse_safetensors_header(const std::string& json, std::int64_t data_bytes,
                                                   const std::string& name);

class SafetensorsReader {
 public:
  /// Errors: kNotFound, kIo, kCorrupt (naming what is wrong with the header or the size).
  static Result<SafetensorsReader> open(const std::filesystem::path& path);

  [[nodiscard]] const std::vector<SafetensorsEntry>& entries() const { return header_.entries; }
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const {
    return header_.metadata;
  }
  /// Errors: kNotFound naming the file and the tensor.
  [[nodiscard]] Result<const SafetensorsEntry*> find(const std::string& name) const;

  /// Reads the whole file once and compares it with its checksum.
  /// Errors: kCorrupt when there is none, or another; kIo.
  [[nodiscard]] Result<void> check() const;

  /// Reads out.size() bytes of a tensor from byte `offset` of it on.
  /// Errors: kInvalidArgument past its end; kIo, kCorrupt.
  Result<void> read(const SafetensorsEntry& entry, std::int64_t offset,
                    std::span<std::byte> out) const;

  /// One tensor by rows, with a descriptor of its own.
  /// Errors: kInvalidArgument for an element type we do not read or a scalar.
  [[nodiscard]] Result<TensorRows> rows_of(const SafetensorsEntry& entry) const;

 private:
  File file_;
  SafetensorsHeader header_;
  std::int64_t data_offset_{0};
  std::int64_t sum_at_{-1};  // Where the checksum's digits are; −1: it has none.
};

struct TensorSpec {
  std::string name{};  ///< Printable ASCII, not "__metadata__".
  DType dtype{DType::kFloat32};
  std::vector<std::int64_t> shape{};
};

/// Writes a file beside its final name and renames it at finish(), synced.
class SafetensorsWriter {
 public:
  /// With kSafetensorsSum among the keys of `metadata` (any value), finish() writes the checksum
  /// there. Errors: kInvalidArgument (a name twice, or not printable; a shape too large), kIo.
  static Result<SafetensorsWriter> create(const std::filesystem::path& path,
                                          const std::vector<TensorSpec>& tensors,
                                          std::map<std::string, std::string> metadata = {});
  SafetensorsWriter(SafetensorsWriter&&) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) = delete;
  ~SafetensorsWriter();  ///< Without finish(): removes what it wrote.

  /// The next bytes: all of the first tensor, then all of the second, … in pieces of any size.
  /// Errors: kInvalidArgument when more come than were declared; kIo.
  Result<void> write(std::span<const std::byte> bytes);

  /// Errors: kInvalidArgument when bytes are missing; kIo.
  Result<void> finish();

 private:
  SafetensorsWriter() noexcept = default;
  File file_;
  std::filesystem::path path_;
  std::filesystem::path partial_;  // Empty once renamed or moved from.
  std::int64_t at_{0};
  std::int64_t end_{0};
  std::int64_t sum_at_{-1};  // Where the checksum goes; −1: it has none.
  std::uint32_t sum_{0};     // Of what is written so far.
};

}  // namespace plimsoll
