// SPDX-License-Identifier: Apache-2.0
//
// ImageBatches: rows of an ImageSet in a seeded order, their images decoded ahead of use.
//
// Threads decode the next batches while one is in use, as many as fit queue_bytes. A batch's pixels
// are one slab, leased before it is touched, and given back with the batch: what is held does not
// depend on how many images there are, or how many were seen. Which row comes when depends on the
// seed and the options alone, never on threads, queue or limit.
// Reading order: image_set.h, sample_order.h, this file, src/data/image_batches.cpp.
//
// Threads: next() and seek() single-owner; a batch may be dropped on any thread, later than this.
// Memory:  of each thread ImageSetInfo::work_bytes_max; of batches ahead queue_bytes of pixels, or
//          one batch where it is larger (Tag::kLoader).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "plimsoll/governor.h"
#include "plimsoll/image.h"
#include "plimsoll/image_set.h"

namespace plimsoll {

/// Where the next batch begins.
struct ImagesPlace {
  std::int64_t epoch{0};
  std::int64_t position{0};  ///< Rows of the epoch's order before it.
};

struct ImageBatchesOptions {
  std::int64_t batch_size{1};  ///< Rows.
  bool shuffle{true};
  std::uint64_t seed{0};
  /// Rows, chosen by chance and the same ones for any seed, that are left out.
  std::int64_t held_out{0};
  bool only_held_out{false};  ///< These rows, and no others.
  int threads{1};             ///< That decode.
  std::int64_t queue_bytes{std::int64_t{256} << 20};
  ImagesPlace place{};
};

/// A row of a batch. Shape: each of the pixels [height, width, 3].
struct ImageBatchRow {
  std::int64_t row{0};  ///< Of the set.
  std::string messages{};
  std::vector<ImageSize> sizes{};
  std::vector<std::span<const std::uint8_t>> pixels{};
};

struct ImageBatch {
  ImagesPlace place{};                ///< Of this batch.
  std::vector<ImageBatchRow> rows{};  ///< Fewer than batch_size only at an epoch's end.
  bool ends_epoch{false};
  std::shared_ptr<const void> pixels{};  ///< Holds what the spans point to, and its lease.
};

class ImageBatches {
 public:
  /// Requires: the set outlives it, and stays where it is.
  /// Errors: kInvalidArgument naming the option; kOverBudget (what the threads work in).
  static Result<ImageBatches> open(Governor governor, const ImageSet* set,
                                   const ImageBatchesOptions& options);
  ImageBatches(ImageBatches&&) noexcept;
  ImageBatches& operator=(ImageBatches&&) noexcept;
  ~ImageBatches();  ///< Ends the threads; batches that are held stay.

  /// The next batch; epochs follow one another without end.
  /// Errors: kCorrupt naming the row, kIo; kOverBudget where nothing is ahead that would be given
  ///         back. The place is then unchanged.
  Result<ImageBatch> next();

  [[nodiscard]] ImagesPlace place() const noexcept;
  /// Goes to a place that place() gave. Errors: kInvalidArgument.
  Result<void> seek(const ImagesPlace& place);

 private:
  class Impl;
  explicit ImageBatches(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

}  // namespace plimsoll
