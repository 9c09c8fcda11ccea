// SPDX-License-Identifier: Apache-2.0
#include "store/timeline_layout.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/check.h"
#include "base/round.h"
#include "memory/admission.h"
#include "os/file_system.h"
#include "store/embedding_files.h"
#include "store/embedding_growing_ids.h"
#include "store/embedding_layout.h"
#include "store/id_page.h"
#include "store/row_optimizer.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kTimelineBytes = 64LL << 20;
constexpr std::int64_t kStagingBytes = 1LL << 20;
constexpr std::int64_t kSegmentBytesLeast = 16 << 10;
constexpr std::int64_t kSegmentBytesMost = 1 << 20;
constexpr std::int64_t kTimelineSlack = 64 * 64 + 6 * 4096;  // Alignment of every part.

// Buckets for write buffers of `chunk` bytes: the least memory, but two requests in one bucket.
void set_buckets(TableDescription& table, std::int64_t batch_rows, std::int64_t chunk) {
  const TableShape rows = table.shape();
  const double best =
      std::sqrt(static_cast<double>(rows.rows) * static_cast<double>(rows.record_bytes) *
                static_cast<double>(chunk) * 0.6);
  table.bucket_rows =
      std::clamp<std::int64_t>(std::llround(best / static_cast<double>(rows.record_bytes)),
                               std::min(2 * batch_rows, rows.rows), rows.rows);
  table.segment_bytes = std::clamp(round_to_block(table.bucket_rows * rows.record_bytes / 16),
                                   kSegmentBytesLeast, kSegmentBytesMost);
}

TimelineLayout divide_timeline(const TableDescription& table, const EmbeddingStoreOptions& options,
                               std::int64_t chunk) {
  TimelineLayout layout;
  layout.shape = timeline_shape(table);
  const TimelineShape& shape = layout.shape;
  layout.sizes = TimelineSpace::sizes(shape);
  layout.chunk_bytes = chunk;
  layout.chunks = shape.buckets + std::max<std::int64_t>(8, shape.buckets / 4);
  const std::int64_t most = extent_bytes_most(shape.record_bytes);
  const std::int64_t bucket = shape.bucket_rows * shape.record_bytes;
  layout.frame_bytes = round_to_block(bucket + bucket / 16 + most + kBlockUnit);
  layout.batch_rows = std::max<std::int64_t>(options.batch_rows, 1);
  layout.staging_rows =
      std::clamp<std::int64_t>(kStagingBytes / shape.record_bytes, 1, layout.batch_rows);
  layout.map_bytes = TimelineSpace::map_bytes_most(shape, layout.sizes);
  // A row is shown with all of its values as float32, which may be more than its extent.
  const TableShape rows = table.shape();
  layout.scratch_bytes = std::max(most, round_to_block(12 + 4 * rows.floats()));
  layout.id_pages = id_pages_least(table);

  SlabPlan& plan = layout.plan;
  plan.frame_bytes = 2 * (layout.frame_bytes + shape.bucket_rows * 4);
  plan.index_bytes = IdIndex::memory_bytes(table.ids, layout.id_pages) +
                     TimelineSpace::memory_bytes(shape, layout.sizes) + table.growth().bytes() +
                     GrowingIds::memory_bytes(table.growth());
  const std::int64_t threads = std::max(options.compute_threads, 1);
  plan.buffer_bytes =
      layout.chunks * (chunk + 128) + 2 * shape.buckets * 4 + layout.batch_rows * (4 + 8 + 4) +
      FoundRows::ids_of(table, layout.batch_rows) * 8 +
      threads * (rows.dim + rows.scratch_floats()) * 4 +
      layout.staging_rows * (shape.record_bytes + 40) + layout.scratch_bytes + layout.map_bytes +
      RowOptimizerStep::kCorrections * static_cast<std::int64_t>(sizeof(AdamCorrection)) +
      kTimelineSlack;
  plan.total_bytes = round_to_block(plan.frame_bytes + plan.index_bytes + plan.buffer_bytes);
  return layout;
}

}  // namespace

TimelineShape timeline_shape(const TableDescription& table) noexcept {
  const TableShape rows = table.shape();
  return {.rows = rows.rows,
          .dim = rows.dim,
          .record_bytes = rows.record_bytes,
          .bucket_rows = table.bucket_rows,
          .buckets = divide_up(rows.rows, table.bucket_rows),
          .segment_bytes = table.segment_bytes,
          .grows = table.rows_max > 0};
}

void choose_buckets(TableDescription& table, const EmbeddingStoreOptions& options) noexcept {
  const std::int64_t record = table.shape().record_bytes;
  const std::int64_t least = chunk_bytes_least(record);
  std::int64_t bytes = options.store_bytes == 0 ? kTimelineBytes : options.store_bytes;
  for (std::int64_t chunk = extent_bytes_most(record);; chunk = std::max(chunk / 2, least)) {
    set_buckets(table, options.batch_rows, chunk);
    if (chunk == least || divide_timeline(table, options, chunk).plan.total_bytes <= bytes) {
      return;
    }
  }
}

Result<TimelineLayout> plan_timeline(const TableDescription& table, bool exists,
                                     const EmbeddingStoreOptions& options) {
  PLIMSOLL_TRY_VOID(check_blocks(table, options, [&](TableDescription some) {
    if (!exists) {
      choose_buckets(some, options);
    }
    return TimelineSpace::sizes(timeline_shape(some)).segments;
  }));
  const std::int64_t record = table.shape().record_bytes;
  const std::int64_t least = chunk_bytes_least(record);
  TableDescription smallest = table;
  if (!exists) {
    set_buckets(smallest, options.batch_rows, least);
  }
  const std::int64_t floor = divide_timeline(smallest, options, least).plan.total_bytes;
  const std::int64_t bytes =
      options.store_bytes == 0 ? std::max(kTimelineBytes, floor) : options.store_bytes;
  if (bytes < floor) {
    return tl::unexpected(below_floor(Tag::kEmbedding, options.directory, "store_bytes",
                                      "raise store_bytes", bytes, floor));
  }
  TimelineLayout layout;
  for (std::int64_t chunk = extent_bytes_most(record);; chunk = std::max(chunk / 2, least)) {
    layout = divide_timeline(table, options, round_to_block(chunk));
    if (chunk == least || layout.plan.total_bytes <= bytes) {
      break;
    }
  }
  SlabPlan& plan = layout.plan;
  const std::int64_t room = std::min(bytes - plan.total_bytes, bytes / 8);
  give_index_its_share(table, room - room % kBlockUnit, layout.id_pages, plan);
  plan.total_bytes = round_to_block(plan.frame_bytes + plan.index_bytes + plan.buffer_bytes);
  plan.floor_bytes = floor;
  plan.rows_max = table.rows_max;
  plan.network = network_file_system(options.directory);
  plan.disk_cap_bytes = layout.sizes.segments * layout.shape.segment_bytes +
                        kMaps * layout.map_bytes + 2 * SuperFile::kSlotBytes +
                        IdIndex::disk_bytes(table.ids) +
                        round_to_block(8 * table.growth().inserted()) + 4096;
  return layout;
}

}  // namespace plimsoll
