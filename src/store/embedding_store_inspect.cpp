// SPDX-License-Identifier: Apache-2.0
//
// inspect and verify: what a table's directory holds, without opening it for training.
//
// Threads: pure functions of the directory.   Memory: kPieceBytes; in sample order one map and
// one extent, too.
#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstring>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/check.h"
#include "base/crc32c.h"
#include "os/file.h"
#include "plimsoll/embedding_store.h"
#include "store/embedding_block_map.h"
#include "store/embedding_description.h"
#include "store/embedding_format.h"
#include "store/timeline_layout.h"
#include "store/timeline_space.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kPieceBytes = 256 << 10;

// A commit, whether what it refers to can be read or not.
struct Commit {
  std::filesystem::path directory;
  TableDescription table;
  Superblock root;

  [[nodiscard]] Result<File> map() const {
    return File::open(table_files::map_path(directory, root.map), FileMode::kRead);
  }
  [[nodiscard]] Result<File> rows() const {
    return File::open(directory / table_files::kRows, FileMode::kRead);
  }
  [[nodiscard]] tl::unexpected<Error> bad_map(const File& map) const {
    return fail(ErrorCode::kCorrupt, fmt::format("{}: the map of commit {} fails its checksum",
                                                 map.path().string(), root.step));
  }
};

// Newest first.
std::vector<Commit> commits_of(const SuperFile& super, const std::filesystem::path& directory,
                               const TableDescription& table) {
  std::vector<Commit> commits;
  for (const auto& [state, root] : super.slots()) {
    if (state == SuperFile::SlotState::kValid && root.fingerprint == table.fingerprint()) {
      const bool newer = !commits.empty() && root.step > commits.front().root.step;
      commits.insert(newer ? commits.begin() : commits.end(), {directory, table, root});
    }
  }
  return commits;
}

// Calls see(piece) for the first `total` bytes of a file.
template <class See>
Result<void> read_through(const File& file, std::int64_t total, const See& see) {
  std::vector<std::byte> buffer(static_cast<std::size_t>(std::min(kPieceBytes, total)));
  for (std::int64_t done = 0; done < total; done += std::ssize(buffer)) {
    const auto piece = std::span(buffer).first(
        static_cast<std::size_t>(std::min(total - done, std::int64_t{std::ssize(buffer)})));
    PLIMSOLL_TRY_VOID(file.read_at(done, piece));
    see(piece);
  }
  return {};
}

Result<void> check_map(const Commit& commit) {
  PLIMSOLL_TRY(const File map, commit.map());
  std::uint32_t crc = 0;
  PLIMSOLL_TRY_VOID(
      read_through(map, map_bytes(commit.root.pages) + commit.table.growth().bytes(),
                   [&crc](std::span<const std::byte> piece) { crc = chain_root(crc, piece); }));
  return crc == commit.root.map_crc ? Result<void>{} : commit.bad_map(map);
}

// The rows of one commit of a table whose ids come and go.
Result<std::int64_t> count_rows(const Commit& commit) {
  const GrowthShape growth = commit.table.growth();
  PLIMSOLL_TRY(const File map, commit.map());
  std::array<std::uint64_t, 512> bits;
  std::int64_t rows = 0;
  for (std::int64_t at = 0; at < growth.bit_bytes(); at += kBlockUnit) {
    PLIMSOLL_TRY_VOID(map.read_at(map_bytes(commit.table.shape().pages) + at,
                                  std::as_writable_bytes(std::span(bits))));
    for (std::size_t word = 0; word < bits.size(); ++word) {
      const std::int64_t first = at * 8 + static_cast<std::int64_t>(word) * 64;
      rows += std::popcount(bits[word] ^ growth.made_mask(first));
    }
  }
  return rows;
}

// The ids of one commit of such a table, read a page's at a time.
class InsertedIds {
 public:
  InsertedIds(const TableDescription& table, const File& map)
      : growth_(table.growth()),
        shape_(table.shape()),
        map_(map),
        bits_(static_cast<std::size_t>(shape_.rows_per_page / 8 + 2)),
        ids_(static_cast<std::size_t>(shape_.rows_per_page)) {}

  // Compares with what the records of page `page` say; `bytes` is empty where there are none.
  // Returns the place of a row that is of another id, or −1.
  Result<std::int64_t> compare(std::int64_t page, std::span<const std::byte> bytes) {
    const std::int64_t first = std::max(page * shape_.rows_per_page, growth_.made);
    const std::int64_t end = page * shape_.rows_per_page + shape_.rows_in_page(page);
    if (first >= end) {
      return -1;
    }
    const std::int64_t bits_at = map_bytes(shape_.pages);
    const auto bit_bytes = static_cast<std::size_t>((end - 1) / 8 - first / 8 + 1);
    PLIMSOLL_TRY_VOID(map_.read_at(bits_at + first / 8, std::span(bits_).first(bit_bytes)));
    const auto ids = std::span(ids_).first(static_cast<std::size_t>(end - first));
    PLIMSOLL_TRY_VOID(map_.read_at(bits_at + growth_.bit_bytes() + (first - growth_.made) * 8,
                                   std::as_writable_bytes(ids)));
    for (std::int64_t place = first; place < end; ++place) {
      const auto bits = bits_[static_cast<std::size_t>(place / 8 - first / 8)];
      if ((std::to_integer<int>(bits) >> (place % 8) & 1) == 0) {
        continue;
      }
      RowHeader header;
      const std::int64_t row = place - page * shape_.rows_per_page;
      const auto at = static_cast<std::size_t>(kPageHeaderBytes + row * shape_.record_bytes);
      if (bytes.empty()) {
        return place;
      }
      std::memcpy(&header, bytes.data() + at, sizeof header);
      if (header.id != ids_[static_cast<std::size_t>(place - first)]) {
        return place;
      }
    }
    return -1;
  }

 private:
  GrowthShape growth_;
  TableShape shape_;
  const File& map_;
  std::vector<std::byte> bits_;
  std::vector<std::int64_t> ids_;
};

tl::unexpected<Error> cancelled(const Commit& commit) {
  return fail(ErrorCode::kInvalidArgument, commit.directory.string() + ": cancelled");
}

// Reads every written page of one commit.
Result<void> check_pages(const Commit& commit, const ProgressFn& progress) {
  const TableDescription& table = commit.table;
  const TableShape shape = table.shape();
  PLIMSOLL_TRY(const File map, commit.map());
  PLIMSOLL_TRY(const File rows, commit.rows());
  std::vector<BlockEntry> entries(512);
  std::vector<std::byte> page(static_cast<std::size_t>(shape.page_bytes));
  InsertedIds inserted(table, map);
  const auto check_ids = [&](std::int64_t number,
                             std::span<const std::byte> bytes) -> Result<void> {
    if (table.rows_max == 0) {
      return {};
    }
    PLIMSOLL_TRY(const std::int64_t place, inserted.compare(number, bytes));
    return place < 0 ? Result<void>{}
                     : fail(ErrorCode::kCorrupt,
                            fmt::format("{}: commit {} holds another row at place {} than {} says",
                                        rows.path().string(), commit.root.step, place,
                                        map.path().string()));
  };
  const std::int64_t total = commit.root.blocks_used * shape.page_bytes;
  std::int64_t done = 0;
  for (std::int64_t first = 0; first < shape.pages; first += 512) {
    const auto count = std::min<std::int64_t>(512, shape.pages - first);
    const auto some = std::span(entries).first(static_cast<std::size_t>(count));
    PLIMSOLL_TRY_VOID(map.read_at(first * static_cast<std::int64_t>(sizeof(BlockEntry)),
                                  std::as_writable_bytes(some)));
    for (std::int64_t i = 0; i < count; ++i) {
      const BlockEntry entry = some[static_cast<std::size_t>(i)];
      if (entry.block == 0) {
        PLIMSOLL_TRY_VOID(check_ids(first + i, {}));
        continue;
      }
      PLIMSOLL_TRY_VOID(rows.read_at((entry.block - 1) * shape.page_bytes, page));
      if (!page_is_sound(shape, table.fingerprint(), first + i, entry.crc, page)) {
        return fail(ErrorCode::kCorrupt,
                    fmt::format("{}: page {} (block {}) of commit {} fails its checksum",
                                rows.path().string(), first + i, entry.block, commit.root.step));
      }
      PLIMSOLL_TRY_VOID(check_ids(first + i, page));
      done += shape.page_bytes;
      if (progress && !progress(done, total)) {
        return cancelled(commit);
      }
    }
  }
  return {};
}

// ---- In sample order --------------------------------------------------------------------------

Result<std::vector<std::byte>> read_map(const Commit& commit, const TimelineShape& shape) {
  PLIMSOLL_TRY(const File file, commit.map());
  const std::int64_t most = TimelineSpace::map_bytes_most(shape, TimelineSpace::sizes(shape));
  std::vector<std::byte> map(
      static_cast<std::size_t>(std::clamp<std::int64_t>(commit.root.pages, 0, most)));
  PLIMSOLL_TRY_VOID(file.read_at(0, map));
  if (crc32c(map) != commit.root.map_crc) {
    return commit.bad_map(file);
  }
  return map;
}

// The inserted ids of a commit.
Result<void> check_new_ids(const Commit& commit, const TimelineState& state) {
  if (commit.table.rows_max == 0) {
    return {};
  }
  PLIMSOLL_TRY(const File file,
               File::open(commit.directory / table_files::kNewIds, FileMode::kRead));
  std::uint32_t crc = 0;
  PLIMSOLL_TRY_VOID(
      read_through(file, 8 * std::max<std::int64_t>(state.rows - commit.table.ids.rows, 0),
                   [&crc](std::span<const std::byte> piece) { crc = crc32c(piece, crc); }));
  return crc == state.new_ids ? Result<void>{}
                              : fail(ErrorCode::kCorrupt, file.path().string() +
                                                              ": the inserted ids fail their "
                                                              "checksum");
}

// Adds rows, epoch and cursor of the newest commit to `info`.
Result<void> inspect_timeline(const Commit& commit, TableInfo& info) {
  const TimelineShape shape = timeline_shape(commit.table);
  PLIMSOLL_TRY(const auto map, read_map(commit, shape));
  PLIMSOLL_TRY(const MapView view, view_map(shape, map));
  if (info.commit_steps.empty()) {
    info.order_seed = view.state.source.seed;
    info.epoch = view.state.source.epoch;
    info.cursor = view.state.cursor;
    info.rows = view.state.rows;
  }
  return {};
}

// Reads every extent and every inserted id of a commit and compares checksums.
Result<void> check_extents(const Commit& commit, const ProgressFn& progress) {
  const TimelineShape shape = timeline_shape(commit.table);
  PLIMSOLL_TRY(const auto map, read_map(commit, shape));
  PLIMSOLL_TRY(const MapView view, view_map(shape, map));
  PLIMSOLL_TRY_VOID(check_new_ids(commit, view.state));
  PLIMSOLL_TRY(const File rows, commit.rows());
  std::vector<std::byte> bytes(static_cast<std::size_t>(extent_bytes_most(shape.record_bytes)));
  const std::int64_t total = static_cast<std::int64_t>(view.segments.size()) * shape.segment_bytes;
  std::int64_t done = 0;
  const std::uint32_t* extent = view.extents.data();
  const std::uint32_t* segment = view.segments.data();
  for (std::size_t at = 0; at < view.streams.size(); ++at) {
    const bool source = static_cast<std::int64_t>(at) < shape.buckets;
    const auto bucket = static_cast<std::int64_t>(at) - (source ? 0 : shape.buckets);
    const std::uint64_t owner = extent_owner(
        shape, commit.table.fingerprint(), source ? view.state.source : view.state.target, bucket);
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
                                rows.path().string(), index, bucket, commit.root.step));
      }
      marks += mark;
      done += static_cast<std::int64_t>(whole.size());
      if (progress && !progress(done, std::max(total, done))) {
        return cancelled(commit);
      }
    }
    if (marks != view.streams[at].marks) {
      return fail(ErrorCode::kCorrupt,
                  fmt::format("{}: bucket {} of commit {} holds an extent of an earlier time",
                              rows.path().string(), bucket, commit.root.step));
    }
    segment += view.streams[at].segments;
  }
  return {};
}

// By name: the library's way through a directory ends the process where memory runs out.
std::int64_t bytes_in(const std::filesystem::path& directory) {
  std::int64_t bytes = 0;
  for (const char* name : table_files::kAll) {
    std::error_code missing;
    const auto size = std::filesystem::file_size(directory / name, missing);
    bytes += missing ? 0 : static_cast<std::int64_t>(size);
  }
  return bytes;
}

}  // namespace

Result<TableInfo> EmbeddingStore::inspect(const std::filesystem::path& directory) {
  PLIMSOLL_TRY(const TableDescription table, read_description(directory));
  PLIMSOLL_TRY(const SuperFile super, SuperFile::open(directory / table_files::kSuper, false));
  const TableShape shape = table.shape();
  TableInfo info{.rows = table.ids.rows,
                 .rows_max = table.rows_max,
                 .dim = table.dim,
                 .dtype = table.dtype,
                 .optimizer = table.optimizer,
                 .init = table.init,
                 .dense_ids = table.ids.dense,
                 .layout = table.layout,
                 .order_seed = table.order_seed,
                 .epoch = 0,
                 .cursor = 0,
                 .record_bytes = shape.record_bytes,
                 .page_bytes = shape.page_bytes,
                 .rows_per_page = shape.rows_per_page,
                 .commit_steps = {},
                 .disk_bytes = bytes_in(directory)};
  for (const Commit& commit : commits_of(super, directory, table)) {
    const auto readable = table.layout == RowLayout::kSampleOrder ? inspect_timeline(commit, info)
                                                                  : check_map(commit);
    if (!readable && readable.error().code != ErrorCode::kCorrupt) {
      return tl::unexpected(readable.error());  // Not to be read just now, which is not gone.
    }
    if (readable) {
      if (info.commit_steps.empty() && table.rows_max > 0 && table.layout == RowLayout::kAnyOrder) {
        PLIMSOLL_TRY(info.rows, count_rows(commit));
      }
      info.commit_steps.push_back(commit.root.step);
    }
  }
  return info;
}

Result<void> EmbeddingStore::verify(const std::filesystem::path& directory,
                                    const ProgressFn& progress) {
  PLIMSOLL_TRY(const TableDescription table, read_description(directory));
  PLIMSOLL_TRY(const SuperFile super, SuperFile::open(directory / table_files::kSuper, false));
  for (std::size_t slot = 0; slot < 2; ++slot) {
    if (super.slots()[slot].state == SuperFile::SlotState::kDamaged) {
      return fail(ErrorCode::kCorrupt,
                  fmt::format("{}: slot {} fails its checksum", super.path().string(), slot));
    }
  }
  PLIMSOLL_TRY_VOID(IdIndex::verify(directory, table_files::kIds, table.ids));
  const auto commits = commits_of(super, directory, table);
  if (commits.empty()) {
    return {};
  }
  if (table.layout == RowLayout::kSampleOrder) {
    return check_extents(commits.front(), progress);
  }
  PLIMSOLL_TRY_VOID(check_map(commits.front()));
  return check_pages(commits.front(), progress);
}

}  // namespace plimsoll
