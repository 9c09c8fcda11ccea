// SPDX-License-Identifier: Apache-2.0
#include "store/embedding_files.h"

#include <algorithm>
#include <array>
#include <string>

#include <fmt/format.h>

#include "base/check.h"
#include "os/directories.h"
#include "os/file.h"
#include "store/embedding_block_map.h"
#include "store/id_source.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kWrittenAhead = 2 << 20;

// A small table's rows in any order get all their blocks at once, written with zeros: to make a
// commit durable the file system then flushes the disk and need not commit to its journal too.
Result<void> write_ahead(File& rows, const TableDescription& table, std::span<std::byte> scratch) {
  const TableShape shape = table.shape();
  const std::int64_t bytes = BlockMap::blocks(shape.pages, 0) * shape.page_bytes;
  if (table.layout == RowLayout::kAnyOrder && bytes <= kWrittenAhead) {
    std::ranges::fill(scratch, std::byte{0});
    const auto most = static_cast<std::int64_t>(scratch.size() / kBlockUnit * kBlockUnit);
    for (std::int64_t at = 0; at < bytes; at += most) {
      const auto some = static_cast<std::size_t>(std::min(most, bytes - at));
      PLIMSOLL_TRY_VOID(rows.write_at(at, scratch.first(some)));
    }
  }
  return {};
}

// One block from the start: a small table's commits then change no metadata of this file.
Result<File> create_map(const std::filesystem::path& path) {
  PLIMSOLL_TRY(auto map, File::open(path, FileMode::kCreate));
  const std::array<std::byte, kBlockUnit> zeros{};
  PLIMSOLL_TRY_VOID(map.write_at(0, zeros));
  return map;
}

Result<void> create_and_describe(const std::filesystem::path& directory,
                                 const TableDescription& table, const IdSource& source,
                                 std::span<std::byte> scratch) {
  if (!table.ids.dense) {
    PLIMSOLL_TRY(auto writer, IdIndexWriter::create(directory, table_files::kIds, scratch));
    PLIMSOLL_TRY_VOID(
        source.read([&](std::span<const std::int64_t> ids) { return writer.append(ids); }));
    PLIMSOLL_TRY(const IdIndexInfo info, writer.finish());
    if (info != table.ids) {
      return fail(ErrorCode::kIo, directory.string() + ": the ids changed while they were read");
    }
  }
  PLIMSOLL_TRY(auto rows, File::open(directory / table_files::kRows, FileMode::kCreate));
  PLIMSOLL_TRY_VOID(write_ahead(rows, table, scratch));
  PLIMSOLL_TRY_VOID(rows.sync());
  for (int number = 0; number < kMaps; ++number) {
    PLIMSOLL_TRY(auto map, create_map(table_files::map_path(directory, number)));
    if (table.rows_max > 0 && table.layout == RowLayout::kAnyOrder) {
      PLIMSOLL_TRY_VOID(map.truncate(map_bytes(table.shape().pages) + table.growth().bytes()));
    }
    PLIMSOLL_TRY_VOID(map.sync());
  }
  if (table.rows_max > 0 && table.layout == RowLayout::kSampleOrder) {
    PLIMSOLL_TRY(auto ids, File::open(directory / table_files::kNewIds, FileMode::kCreate));
    PLIMSOLL_TRY_VOID(ids.sync());
  }
  PLIMSOLL_TRY_VOID(SuperFile::create(directory / table_files::kSuper));
  PLIMSOLL_TRY_VOID(sync_directory(directory));
  return write_description(directory, table);
}

}  // namespace

Result<void> create_table_files(const std::filesystem::path& directory,
                                const TableDescription& table, const IdSource& source,
                                std::span<std::byte> scratch) {
  if (auto super = SuperFile::open(directory / table_files::kSuper, false)) {
    for (const auto& slot : super->slots()) {
      if (slot.state != SuperFile::SlotState::kEmpty) {
        return fail(
            ErrorCode::kCorrupt,
            fmt::format("{}: missing, but {} holds a commit",
                        (directory / table_files::kDescription).string(), super->path().string()),
            "restore table.json, or name another directory");
      }
    }
  }
  auto done = create_and_describe(directory, table, source, scratch);
  if (!done) {  // Without table.json there is no table, whatever stays behind: it goes first.
    if (!remove_file(directory / table_files::kDescription) || !sync_directory(directory)) {
      return done;  // It may come back after a power failure, and then needs its files.
    }
    for (const char* name : table_files::kAll) {
      static_cast<void>(remove_file(directory / name));
    }
  }
  return done;
}

Result<FolderLock> lock_table(const std::filesystem::path& directory) {
  return FolderLock::take(directory, {.doing = "has this table open to change it",
                                      .advice = "close it there, or open it to be read (pinned)"});
}

Result<std::array<File, kMaps>> open_maps(const std::filesystem::path& directory, bool writable) {
  std::array<File, kMaps> maps;
  for (int number = 0; number < kMaps; ++number) {
    const auto path = table_files::map_path(directory, number);
    auto opened = File::open(path, writable ? FileMode::kReadWrite : FileMode::kRead, true);
    if (!opened && opened.error().code == ErrorCode::kNotFound) {
      if (!writable) {
        continue;
      }
      PLIMSOLL_TRY(File made, create_map(path));
      PLIMSOLL_TRY_VOID(made.sync());
      PLIMSOLL_TRY_VOID(sync_directory(directory));
      opened = File::open(path, FileMode::kReadWrite, true);
    }
    PLIMSOLL_TRY(maps[static_cast<std::size_t>(number)], std::move(opened));
  }
  return maps;
}

}  // namespace plimsoll
