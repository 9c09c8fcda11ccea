// SPDX-License-Identifier: Apache-2.0
#include "store/timeline_inspect.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/check.h"
#include "base/crc32c.h"
#include "os/file.h"
#include "store/timeline_layout.h"
#include "store/timeline_space.h"

namespace plimsoll {
namespace {

Result<std::vector<std::byte>> read_map(const std::filesystem::path& directory,
                                        const TimelineShape& shape, const Superblock& superblock) {
  const auto path = table_files::map_path(directory, superblock.map);
  PLIMSOLL_TRY(const File file, File::open(path, FileMode::kRead));
  const std::int64_t most = TimelineSpace::map_bytes_most(shape, TimelineSpace::sizes(shape));
  std::vector<std::byte> map(
      static_cast<std::size_t>(std::clamp<std::int64_t>(superblock.pages, 0, most)));
  PLIMSOLL_TRY_VOID(file.read_at(0, map));
  if (crc32c(map) != superblock.map_crc) {
    return fail(ErrorCode::kCorrupt, fmt::format("{}: the map of commit {} fails its checksum",
                                                 path.string(), superblock.step));
  }
  return map;
}

// The inserted ids of a commit, a piece at a time.
Result<void> check_new_ids(const std::filesystem::path& directory, const TableDescription& table,
                           const TimelineState& state) {
  if (table.rows_max == 0) {
    return {};
  }
  const auto path = directory / table_files::kNewIds;
  PLIMSOLL_TRY(const File file, File::open(path, FileMode::kRead));
  const std::int64_t total = 8 * std::max<std::int64_t>(state.rows - table.ids.rows, 0);
  std::array<std::byte, 4096> some;
  std::uint32_t crc = 0;
  for (std::int64_t done = 0; done < total; done += static_cast<std::int64_t>(some.size())) {
    const auto piece = std::span(some).first(
        static_cast<std::size_t>(std::min(total - done, static_cast<std::int64_t>(some.size()))));
    PLIMSOLL_TRY_VOID(file.read_at(done, piece));
    crc = crc32c(piece, crc);
  }
  return crc == state.new_ids
             ? Result<void>{}
             : fail(ErrorCode::kCorrupt, path.string() + ": the inserted ids fail their checksum");
}

}  // namespace

Result<void> inspect_timeline(const std::filesystem::path& directory, const TableDescription& table,
                              const Superblock& superblock, TableInfo& info) {
  const TimelineShape shape = timeline_shape(table);
  PLIMSOLL_TRY(const auto map, read_map(directory, shape, superblock));
  PLIMSOLL_TRY(const MapView view, view_map(shape, map));
  if (info.commit_steps.empty()) {
    info.order_seed = view.state.source.seed;
    info.epoch = view.state.source.epoch;
    info.cursor = view.state.cursor;
    info.rows = view.state.rows;
  }
  return {};
}

Result<void> verify_timeline(const std::filesystem::path& directory, const TableDescription& table,
                             const Superblock& superblock, const ProgressFn& progress) {
  const TimelineShape shape = timeline_shape(table);
  PLIMSOLL_TRY(const auto map, read_map(directory, shape, superblock));
  PLIMSOLL_TRY(const MapView view, view_map(shape, map));
  PLIMSOLL_TRY_VOID(check_new_ids(directory, table, view.state));
  PLIMSOLL_TRY(const File rows, File::open(directory / table_files::kRows, FileMode::kRead));
  std::vector<std::byte> bytes(static_cast<std::size_t>(extent_bytes_most(shape.record_bytes)));
  const std::int64_t total = static_cast<std::int64_t>(view.segments.size()) * shape.segment_bytes;
  std::int64_t done = 0;
  const std::uint32_t* extent = view.extents.data();
  const std::uint32_t* segment = view.segments.data();
  for (std::size_t at = 0; at < view.streams.size(); ++at) {
    const bool source = static_cast<std::int64_t>(at) < shape.buckets;
    const auto bucket = static_cast<std::int64_t>(at) - (source ? 0 : shape.buckets);
    const std::uint64_t owner = extent_owner(
        shape, table.fingerprint(), source ? view.state.source : view.state.target, bucket);
    std::int64_t offset = 0;
    std::uint64_t marks = 0;
    for (std::uint32_t index = 0; index < view.streams[at].extents; ++index, ++extent) {
      auto part = std::span(bytes).first(
          static_cast<std::size_t>(extent_bytes(shape.record_bytes, *extent)));
      const auto whole = part;
      while (!part.empty()) {
        const std::int64_t in = offset % shape.segment_bytes;
        const auto piece =
            part.first(std::min(part.size(), static_cast<std::size_t>(shape.segment_bytes - in)));
        PLIMSOLL_TRY_VOID(
            rows.read_at(segment[offset / shape.segment_bytes] * shape.segment_bytes + in, piece));
        offset += static_cast<std::int64_t>(piece.size());
        part = part.subspan(piece.size());
      }
      std::uint64_t mark = 0;
      if (!extent_is_sound(shape.record_bytes, owner, index, *extent, whole, mark)) {
        return fail(ErrorCode::kCorrupt,
                    fmt::format("{}: extent {} of bucket {} of commit {} fails its checksum",
                                rows.path().string(), index, bucket, superblock.step));
      }
      marks += mark;
      done += static_cast<std::int64_t>(whole.size());
      if (progress && !progress(done, std::max(total, done))) {
        return {};
      }
    }
    if (marks != view.streams[at].marks) {
      return fail(ErrorCode::kCorrupt,
                  fmt::format("{}: bucket {} of commit {} holds an extent of an earlier time",
                              rows.path().string(), bucket, superblock.step));
    }
    segment += view.streams[at].segments;
  }
  return {};
}

}  // namespace plimsoll
