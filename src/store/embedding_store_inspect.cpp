// SPDX-License-Identifier: Apache-2.0
//
// inspect and verify: what a table's directory holds, without opening it for training.
//
// Threads: pure functions of the directory.   Memory: kPieceBytes.
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
#include "os/file.h"
#include "plimsoll/embedding_store.h"
#include "store/embedding_block_map.h"
#include "store/embedding_description.h"
#include "store/embedding_format.h"
#include "store/timeline_inspect.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kPieceBytes = 256 << 10;

// One readable or unreadable commit, and its page table's file.
struct Commit {
  int slot;
  Superblock superblock;
};

std::vector<Commit> commits_of(const SuperFile& super, const TableDescription& table) {
  std::vector<Commit> commits;
  for (int slot = 0; slot < 2; ++slot) {
    const auto& [state, superblock] = super.slots()[static_cast<std::size_t>(slot)];
    if (state == SuperFile::SlotState::kValid && superblock.fingerprint == table.fingerprint()) {
      commits.push_back({slot, superblock});
    }
  }
  std::sort(commits.begin(), commits.end(),
            [](const Commit& a, const Commit& b) { return a.superblock.step > b.superblock.step; });
  return commits;
}

Result<void> check_map(const std::filesystem::path& directory, const TableDescription& table,
                       const Commit& commit, std::span<std::byte> buffer) {
  const auto path = table_files::map_path(directory, commit.superblock.map);
  PLIMSOLL_TRY(const File file, File::open(path, FileMode::kRead));
  const std::int64_t total = map_bytes(commit.superblock.pages) + table.growth().bytes();
  std::uint32_t crc = 0;
  for (std::int64_t done = 0; done < total;) {
    const auto piece = buffer.first(
        static_cast<std::size_t>(std::min(total - done, static_cast<std::int64_t>(buffer.size()))));
    PLIMSOLL_TRY_VOID(file.read_at(done, piece));
    crc = chain_root(crc, piece);
    done += static_cast<std::int64_t>(piece.size());
  }
  if (crc != commit.superblock.map_crc) {
    return fail(ErrorCode::kCorrupt,
                fmt::format("{}: the page table of commit {} fails its checksum", path.string(),
                            commit.superblock.step));
  }
  return {};
}

// The rows of one commit of a table whose ids come and go.
Result<std::int64_t> count_rows(const std::filesystem::path& directory,
                                const TableDescription& table, const Commit& commit) {
  const GrowthShape growth = table.growth();
  PLIMSOLL_TRY(const File map, File::open(table_files::map_path(directory, commit.superblock.map),
                                          FileMode::kRead));
  std::array<std::uint64_t, 512> bits;
  std::int64_t rows = 0;
  for (std::int64_t at = 0; at < growth.bit_bytes(); at += kBlockUnit) {
    PLIMSOLL_TRY_VOID(
        map.read_at(map_bytes(table.shape().pages) + at, std::as_writable_bytes(std::span(bits))));
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

// Reads every written page of one commit.
Result<void> check_pages(const std::filesystem::path& directory, const TableDescription& table,
                         const Commit& commit, const ProgressFn& progress) {
  const TableShape shape = table.shape();
  PLIMSOLL_TRY(const File map, File::open(table_files::map_path(directory, commit.superblock.map),
                                          FileMode::kRead));
  PLIMSOLL_TRY(const File rows, File::open(directory / table_files::kRows, FileMode::kRead));
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
                                        rows.path().string(), commit.superblock.step, place,
                                        map.path().string()));
  };
  const std::int64_t total = commit.superblock.blocks_used * shape.page_bytes;
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
        return fail(
            ErrorCode::kCorrupt,
            fmt::format("{}: page {} (block {}) of commit {} fails its checksum",
                        rows.path().string(), first + i, entry.block, commit.superblock.step));
      }
      PLIMSOLL_TRY_VOID(check_ids(first + i, page));
      done += shape.page_bytes;
      if (progress && !progress(done, total)) {
        return fail(ErrorCode::kInvalidArgument, directory.string() + ": cancelled");
      }
    }
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
  std::vector<std::byte> buffer(kPieceBytes);
  for (const Commit& commit : commits_of(super, table)) {
    const auto readable = table.layout == RowLayout::kSampleOrder
                              ? inspect_timeline(directory, table, commit.superblock, info)
                              : check_map(directory, table, commit, buffer);
    if (!readable && readable.error().code != ErrorCode::kCorrupt) {
      return tl::unexpected(readable.error());  // Not to be read just now, which is not gone.
    }
    if (readable) {
      if (info.commit_steps.empty() && table.rows_max > 0 && table.layout == RowLayout::kAnyOrder) {
        PLIMSOLL_TRY(info.rows, count_rows(directory, table, commit));
      }
      info.commit_steps.push_back(commit.superblock.step);
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
  const auto commits = commits_of(super, table);
  if (commits.empty()) {
    return {};
  }
  if (table.layout == RowLayout::kSampleOrder) {
    return verify_timeline(directory, table, commits.front().superblock, progress);
  }
  std::vector<std::byte> buffer(kPieceBytes);
  PLIMSOLL_TRY_VOID(check_map(directory, table, commits.front(), buffer));
  return check_pages(directory, table, commits.front(), progress);
}

}  // namespace plimsoll
