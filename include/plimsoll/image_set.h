// SPDX-License-Identifier: Apache-2.0
//
// ImageSet: rows of messages and encoded images in one file; ImageWriter makes one.
//
// An image stays as it came (JPEG, PNG, WebP), was decoded once when the set was made, and is
// decoded again whenever it is wanted. A writer that is killed goes on from its last commit, to the
// same bytes. docs/formats/image_set.md has the file.
// Reading order: image.h, this file, src/data/image_set_format.h, image_writer.cpp, image_set.cpp.
//
// Threads: an ImageSet is thread-safe once open; an ImageWriter is single-owner.
// Memory:  an ImageSet holds a descriptor, and what it reads for a caller; an ImageWriter 2 MiB and
//          what decoding the largest image takes (Tag::kOther), for any number of rows.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "plimsoll/governor.h"
#include "plimsoll/image.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// What a set holds, read from its header.
struct ImageSetInfo {
  std::int64_t rows{0};
  std::int64_t images{0};
  std::int64_t encoded_bytes{0};   ///< Of all images.
  std::int64_t decoded_bytes{0};   ///< What their pixels would take at once.
  std::int64_t work_bytes_max{0};  ///< Beside its pixels, while an image is decoded.
  std::string fingerprint{};       ///< Of whatever decided the rows, by who wrote them.
  std::string about{};             ///< What the writer said of it: JSON.
  std::int64_t disk_bytes{0};
};

/// Where an image is, and what it is.
struct ImagePlace {
  std::int64_t offset{0};  ///< In the file.
  std::int64_t bytes{0};   ///< Encoded.
  std::uint32_t crc{0};    ///< Their CRC-32C.
  std::int64_t width{0};   ///< Upright, as decode_image() gives it.
  std::int64_t height{0};
};

struct ImageRow {
  std::string messages{};  ///< JSON: [{"role", "content": [{"type": "image"} or "text", …]}, …].
  std::vector<ImagePlace> images{};  ///< In the order in which the messages have them.
};

class ImageSet {
 public:
  /// Reads the header and `about` alone. Errors: kNotFound, kCorrupt, kIo.
  static Result<ImageSetInfo> inspect(const std::filesystem::path& path);
  /// Errors: those of inspect().
  static Result<ImageSet> open(const std::filesystem::path& path);
  ImageSet(ImageSet&&) noexcept;
  ImageSet& operator=(ImageSet&&) noexcept;
  ~ImageSet();

  [[nodiscard]] const ImageSetInfo& info() const noexcept;
  [[nodiscard]] std::int64_t rows() const noexcept { return info().rows; }

  /// A row without its images' bytes.
  /// Errors: kInvalidArgument (no such row), kCorrupt naming the row, kIo.
  [[nodiscard]] Result<ImageRow> row(std::int64_t row) const;
  /// An image's encoded bytes. Shape: out [place.bytes].
  /// Errors: kInvalidArgument (out of another size), kCorrupt, kIo.
  Result<void> read(const ImagePlace& place, std::span<std::byte> out) const;

  /// Reads everything and compares every checksum and count. `progress(done, total)` in rows;
  /// returning false cancels. Errors: kCorrupt, kIo, kInvalidArgument when cancelled.
  Result<void> verify(const std::function<bool(std::int64_t, std::int64_t)>& progress) const;

 private:
  class Impl;
  explicit ImageSet(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

struct ImageWriterOptions {
  std::filesystem::path path{};  ///< The set's file. Work under way is in the folder PATH.partial.
  std::string fingerprint{};     ///< Work of another one is begun anew. At most 64 bytes.
  std::int64_t pixels_max{kImagePixelsMost};  ///< Of an image; one with more is refused.
  bool rebuild{false};  ///< Begins anew even when a set or work of this fingerprint is there.
};

class ImageWriter {
 public:
  /// Begins, goes on with work of the same fingerprint, or finds the set whole (whole()).
  /// Errors: kInvalidArgument (another process writes it, the path is a folder, options); kIo,
  ///         kOverBudget, kCorrupt.
  static Result<ImageWriter> open(Governor governor, const ImageWriterOptions& options);
  ImageWriter(ImageWriter&&) noexcept;
  ImageWriter& operator=(ImageWriter&&) noexcept;
  ~ImageWriter();  ///< Work under way stays, to go on with.

  /// There is a set of this fingerprint: nothing is to be done, and no other call is allowed.
  [[nodiscard]] bool whole() const noexcept;
  /// What the last commit() said; "" when there was none.
  [[nodiscard]] const std::string& position() const noexcept;
  [[nodiscard]] const ImageSetInfo& info() const noexcept;

  /// Decodes the images of a row, and adds it: the set's next. Nothing is added when it fails.
  /// Errors: those of read_image_info() and decode_image(), kOverBudget; kIo.
  Result<void> append(const std::string& messages,
                      std::span<const std::span<const std::byte>> images);
  /// Adds the rows [begin, end) of another set, in bounded memory: the bytes of their images, which
  /// were decoded when that was made. Errors: those of ImageSet::row() and read(); kOverBudget.
  Result<std::int64_t> append_rows(const ImageSet& from, std::int64_t begin, std::int64_t end);

  /// Makes all rows durable, and `position`, which says where to go on.
  /// Errors: kIo (the writer is then of no use; the last commit stands), kInvalidArgument.
  Result<void> commit(const std::string& position);
  /// Makes the set: all rows, and `about`, which is JSON. Nothing stays beside it. `fingerprint`:
  /// the set's, where the options' is only that of the work; "": the same. Errors: kIo,
  /// kInvalidArgument (texts that are too long).
  Result<void> finish(const std::string& about, const std::string& fingerprint = {});

 private:
  class Impl;
  explicit ImageWriter(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

}  // namespace plimsoll
