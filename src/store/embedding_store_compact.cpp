// SPDX-License-Identifier: Apache-2.0
//
// compact: a table copied to where nothing but it is.
//
// Compaction writes a new table beside the old one and exchanges the two names in one step of the
// file system. The old one is removed once that is durable; what a crash leaves under the other
// name is thrown away by the next compaction.
//
// Threads: see embedding_store.h.   Memory: the slabs of two tables.
#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include <fmt/format.h>

#include "base/check.h"
#include "base/npy_header.h"
#include "os/directories.h"
#include "store/embedding_store_impl.h"

namespace plimsoll {

namespace {

namespace fs = std::filesystem;

// The ids of `table` in the order of their places, in a .npy beside it: what a table is made from.
Result<void> write_ids(EmbeddingStore& table, const fs::path& path) {
  PLIMSOLL_TRY(auto file, File::open(path, FileMode::kCreate));
  const std::string header = npy_header("<i8", std::array{table.rows()});
  PLIMSOLL_TRY_VOID(file.write_at(0, std::as_bytes(std::span(header))));
  auto at = static_cast<std::int64_t>(header.size());
  return table.scan([&](std::span<const std::int64_t> ids, auto, auto) -> Result<void> {
    PLIMSOLL_TRY_VOID(file.write_at(at, std::as_bytes(ids)));
    at += static_cast<std::int64_t>(ids.size_bytes());
    return {};
  });
}

// Copies the rows that differ from what a new table begins with; the others need no place on disk.
Result<void> copy_rows(EmbeddingStore& from, EmbeddingStore& to, const ProgressFn& progress) {
  const auto dim = static_cast<std::size_t>(from.dim());
  const auto width = dim + static_cast<std::size_t>(from.state_floats());
  std::vector<float> fresh;
  std::vector<std::int64_t> ids;
  std::vector<std::uint32_t> sequences;
  std::vector<float> values;
  std::int64_t done = 0;
  const auto record = static_cast<std::int64_t>(width * sizeof(float));
  return from.scan([&](std::span<const std::int64_t> some, std::span<const std::uint32_t> steps,
                       std::span<const float> rows) -> Result<void> {
    fresh.resize(some.size() * dim);
    PLIMSOLL_TRY_VOID(to.gather(some, fresh));
    ids.clear();
    sequences.clear();
    values.clear();
    for (std::size_t i = 0; i < some.size(); ++i) {
      const auto row = rows.subspan(i * width, width);
      const auto slots = row.subspan(dim);
      const bool as_new = steps[i] == 0 &&
                          std::memcmp(row.data(), &fresh[i * dim], dim * sizeof(float)) == 0 &&
                          std::all_of(slots.begin(), slots.end(), [](float v) { return v == 0; });
      if (!as_new) {
        ids.push_back(some[i]);
        sequences.push_back(steps[i]);
        values.insert(values.end(), row.begin(), row.end());
      }
    }
    PLIMSOLL_TRY_VOID(to.restore(ids, sequences, values));
    done += static_cast<std::int64_t>(some.size()) * record;
    if (progress && !progress(done, from.rows() * record)) {
      return fail(ErrorCode::kInvalidArgument, "cancelled");
    }
    return {};
  });
}

// What is no part of a table would be gone with what it was.
Result<void> expect_only_a_table(const fs::path& directory) {
  PLIMSOLL_TRY(const auto names, names_in(directory));
  for (const std::string& name : names) {
    if (std::count(table_files::kMade.begin(), table_files::kMade.end(), name) == 0) {
      return fail(
          ErrorCode::kInvalidArgument,
          fmt::format("{}: holds \"{}\", which is no part of a table", directory.string(), name),
          "move it elsewhere first");
    }
  }
  return {};
}

// Makes the copy, whole and durable, in `beside`.
Result<void> copy_table(const Governor& governor, const fs::path& directory, const fs::path& beside,
                        std::int64_t at_step, const ProgressFn& progress, std::int64_t rows_max) {
  PLIMSOLL_TRY(const TableInfo info, EmbeddingStore::inspect(directory));
  EmbeddingStoreOptions how{.directory = directory,
                            .dim = info.dim,
                            .dtype = info.dtype,
                            .optimizer = {.kind = info.optimizer},
                            .init = info.init,
                            .at_step = at_step,
                            .pinned = true};
  PLIMSOLL_TRY(auto from, EmbeddingStore::open(governor, how));
  how.directory = beside;
  how.pinned = false;
  how.at_step = -1;
  how.rows_max = rows_max > 0 ? rows_max : info.rows_max;
  if (info.dense_ids && info.rows_max == 0) {
    how.rows = info.rows;
  } else {
    how.ids_file = beside / table_files::kGivenIds;
    PLIMSOLL_TRY_VOID(write_ids(from, how.ids_file));
  }
  PLIMSOLL_TRY(auto to, EmbeddingStore::open(governor, how));
  PLIMSOLL_TRY_VOID(remove_file(beside / table_files::kGivenIds));
  PLIMSOLL_TRY_VOID(copy_rows(from, to, progress));
  return from.last_commit() < 0 ? Result<void>{} : to.commit(from.last_commit());
}

}  // namespace

Result<void> EmbeddingStore::compact(Governor governor, const fs::path& directory,
                                     std::int64_t at_step, const ProgressFn& progress,
                                     std::int64_t rows_max) {
  PLIMSOLL_TRY(const TableDescription table, read_description(directory));  // A lock makes folders.
  PLIMSOLL_TRY(const FolderLock lock, lock_table(directory));  // Of the old one, until it is gone.
  if (table.layout == RowLayout::kSampleOrder) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: a table in sample order", directory.string()),
                "nothing to do: its epochs reuse the space of the last one");
  }
  PLIMSOLL_TRY_VOID(expect_only_a_table(directory));
  PLIMSOLL_TRY(auto beside, PartialDirectory::create(directory, PartialDirectory::Target::kReplaced,
                                                     ".compacting", table_files::kMade));
  PLIMSOLL_TRY_VOID(
      copy_table(governor, beside.target(), beside.path(), at_step, progress, rows_max));
  return beside.exchange();
}

}  // namespace plimsoll
