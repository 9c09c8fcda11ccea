// SPDX-License-Identifier: Apache-2.0
#include "store/embedding_layout.h"

#include <algorithm>
#include <bit>
#include <filesystem>

#include <fmt/format.h>

#include "base/check.h"
#include "base/round.h"
#include "memory/admission.h"
#include "os/file_system.h"
#include "plimsoll/bytes.h"
#include "store/embedding_block_map.h"
#include "store/embedding_files.h"
#include "store/embedding_growing_ids.h"
#include "store/embedding_look_ahead.h"
#include "store/id_page.h"
#include "store/row_optimizer.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kDefaultBytes = 64LL << 20;
constexpr std::int64_t kFramesLeast = 32;
constexpr std::int64_t kWriteBytes = 1LL << 20;  // Per batch, where the slab allows it.
constexpr std::int64_t kReadBatchMost = 256;
constexpr std::int64_t kWriteBatchMost = 256;
constexpr std::int64_t kBlocksMost = 0xFFFFFFFELL;  // A block's number has 32 bits.
constexpr std::int64_t kSlack = 80 * 64;            // Alignment of some sixty parts.

// Scratch of one request; see the members of these names of EmbeddingStore::Engine and its Impl.
std::int64_t scratch_bytes(const TableDescription& table, const EmbeddingLayout& layout,
                           std::int64_t threads) {
  const TableShape shape = table.shape();
  const std::int64_t per_row =
      8 /* keys */ + 8 /* records */ + 4 /* next */ + 4 /* last */ + 4 /* ordinals */;
  return layout.batch_rows * per_row + FoundRows::ids_of(table, layout.batch_rows) * 8 +
         layout.hash_places * 4 + threads * (shape.dim + shape.scratch_floats()) * 4 +
         RowOptimizerStep::kCorrections * static_cast<std::int64_t>(sizeof(AdamCorrection));
}

// Two pages; a third where what a page holds takes two when it is shown as float32: see scan().
std::int64_t write_batch_least(const TableShape& shape) {
  return shape.dtype == RowDType::kFloat32 ? 2 : 3;
}

std::int64_t write_batch(const TableShape& shape, std::int64_t bytes) {
  return std::clamp(bytes / shape.page_bytes, write_batch_least(shape), kWriteBatchMost);
}

// Everything but the frames, for a slab of `bytes`.
EmbeddingLayout divide(const TableDescription& table, const EmbeddingStoreOptions& options,
                       std::int64_t bytes) {
  const TableShape shape = table.shape();
  EmbeddingLayout layout;
  layout.batch_rows = std::max<std::int64_t>(options.batch_rows, 1);
  layout.hash_places =
      static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(layout.batch_rows) * 2));
  layout.queue_ids = 4 * layout.batch_rows;
  const std::int64_t share = bytes / 32;
  layout.id_pages = id_pages_least(table);
  layout.sizes.read_batch =
      std::clamp<std::int64_t>(bytes / 8 / shape.page_bytes, 2, kReadBatchMost);
  layout.sizes.write_batch = write_batch(shape, std::min(share, kWriteBytes));

  SlabPlan& plan = layout.plan;
  plan.index_bytes =
      IdIndex::memory_bytes(table.ids, layout.id_pages) + PageCache::index_bytes(shape) +
      BlockMap::memory_bytes(shape.pages, spare_blocks(shape), table.growth().bytes()) +
      GrowingIds::memory_bytes(table.growth());
  plan.buffer_bytes = PageCache::buffer_bytes(shape, layout.sizes) +
                      scratch_bytes(table, layout, std::max(options.compute_threads, 1)) + kSlack;
  plan.queue_bytes = LookAhead::memory_bytes(layout.queue_ids);
  return layout;
}

// Frames without which the table cannot work: for its pages, or for reads, writes and pins.
std::int64_t frames_least(const TableShape& shape) {
  const std::int64_t sorting = divide_up(IdIndexWriter::kBufferBytesMin, shape.page_bytes);
  return std::max(sorting, std::min(shape.pages, kFramesLeast));
}

std::int64_t total(const EmbeddingLayout& layout, std::int64_t frame_bytes, std::int64_t frames) {
  const SlabPlan& plan = layout.plan;
  return round_up(plan.index_bytes + plan.buffer_bytes + plan.queue_bytes + frame_bytes * frames,
                  4096);
}

}  // namespace

std::int64_t id_pages_least(const TableDescription& table) noexcept {
  return IdIndex::pages_within(table.ids, IdIndex::memory_bytes(table.ids, 2), 2);
}

void give_index_its_share(const TableDescription& table, std::int64_t room, std::int64_t& id_pages,
                          SlabPlan& plan) noexcept {
  const std::int64_t before = IdIndex::memory_bytes(table.ids, id_pages);
  id_pages = IdIndex::pages_within(table.ids, before + room, id_pages);
  plan.index_bytes += IdIndex::memory_bytes(table.ids, id_pages) - before;
}

std::int64_t spare_blocks(const TableShape& shape) noexcept {
  return 3 * write_batch(shape, kWriteBytes);
}

Result<void> check_blocks(const TableDescription& table, const EmbeddingStoreOptions& options,
                          const std::function<std::int64_t(const TableDescription&)>& blocks_of) {
  if (blocks_of(table) <= kBlocksMost) {
    return {};
  }
  const auto fits = [&](std::int64_t rows) {
    TableDescription smaller = table;
    smaller.ids.rows = table.rows_max > 0 ? 0 : rows;
    smaller.rows_max = table.rows_max > 0 ? rows : 0;
    return blocks_of(smaller) <= kBlocksMost;
  };
  std::int64_t most = 1;
  for (std::int64_t over = table.shape().rows; most + 1 < over;) {
    const std::int64_t middle = most + (over - most) / 2;
    (fits(middle) ? most : over) = middle;
  }
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("{}: {} is {}, but a table numbers its blocks with 32 bits: with rows of "
                          "{} bytes it can be {} at most",
                          options.directory.string(), table.rows_max > 0 ? "rows_max" : "rows",
                          table.shape().rows, table.shape().record_bytes, most),
              "lower it, or dim, or divide the rows among several tables");
}

Result<EmbeddingLayout> plan_layout(const TableDescription& table,
                                    const EmbeddingStoreOptions& options) {
  PLIMSOLL_TRY_VOID(check_blocks(table, options, [](const TableDescription& some) {
    return BlockMap::blocks(some.shape().pages, spare_blocks(some.shape()));
  }));
  const TableShape shape = table.shape();
  const std::int64_t frame = PageCache::frame_bytes(shape);
  const std::int64_t least = frames_least(shape);
  const std::int64_t floor = total(divide(table, options, 0), frame, least);
  const std::int64_t asked =
      options.store_bytes == 0 ? std::max(kDefaultBytes, floor) : options.store_bytes;
  if (asked < floor) {
    return tl::unexpected(below_floor(Tag::kEmbedding, options.directory, "store_bytes",
                                      "raise store_bytes", asked, floor));
  }
  const std::int64_t bytes = asked - asked % 4096;  // As total() rounds, and the floor is rounded.
  EmbeddingLayout layout = divide(table, options, bytes);
  if (total(layout, frame, least) > bytes) {
    layout = divide(table, options, 0);  // Near the floor: the smallest buffers.
  }
  // Half of what is left: a page of ids spares the reads of 340 rows, one of rows those of its own.
  give_index_its_share(table, (bytes - total(layout, frame, least)) / 2, layout.id_pages,
                       layout.plan);
  const std::int64_t rest = bytes - total(layout, frame, 0);
  const std::int64_t most = std::max(shape.pages, least);
  layout.sizes.frames = std::min(std::max(rest / frame, least), most);
  layout.sizes.frames_least = least;
  if (layout.sizes.frames < shape.pages) {
    // An eighth of the frames may be on its way in one batch, so that pins never want for a frame.
    // (With a frame for every page nobody waits for one, and a commit is a few long writes.)
    const std::int64_t eighth = std::max<std::int64_t>(layout.sizes.frames / 8, 2);
    layout.sizes.read_batch = std::min(layout.sizes.read_batch, eighth);
    layout.sizes.write_batch =
        std::min(layout.sizes.write_batch, std::max(eighth, write_batch_least(shape)));
  }
  if (options.dirty_bytes > 0) {
    layout.sizes.dirty_most = std::max<std::int64_t>(options.dirty_bytes / shape.page_bytes, 2);
  }
  SlabPlan& plan = layout.plan;
  plan.frame_bytes = frame * layout.sizes.frames;
  plan.total_bytes = total(layout, frame, layout.sizes.frames);
  plan.floor_bytes = floor;
  plan.network = network_file_system(options.directory);
  const std::int64_t blocks = BlockMap::blocks(shape.pages, spare_blocks(shape));
  plan.disk_cap_bytes = blocks * shape.page_bytes +
                        kMaps * (map_bytes(shape.pages) + table.growth().bytes()) +
                        2 * SuperFile::kSlotBytes + IdIndex::disk_bytes(table.ids) + 4096;
  plan.rows_max = table.rows_max;
  return layout;
}

std::string SlabPlan::to_string() const {
  return fmt::format(
      "{} of memory: {} pages of rows, {} index, {} buffers, {} look-ahead (the least that works: "
      "{}); at most {} on disk{}{}",
      format_bytes(total_bytes), format_bytes(frame_bytes), format_bytes(index_bytes),
      format_bytes(buffer_bytes), format_bytes(queue_bytes), format_bytes(floor_bytes),
      format_bytes(disk_cap_bytes),
      rows_max > 0 ? fmt::format(", {} rows at most", rows_max) : std::string(),
      network.empty()
          ? std::string()
          : fmt::format("; on {}: a commit is as durable as its server, and slower", network));
}

}  // namespace plimsoll
