// SPDX-License-Identifier: Apache-2.0
//
// compact: a table copied to where nothing but it is.
//
// Compaction writes a new table beside the old one and exchanges the two names in one step of the
// file system; what a crash leaves under the other name is thrown away by the next compaction.
//
// Threads: see embedding_store.h.   Memory: the slabs of two tables.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <vector>

#include <fcntl.h>

#include <fmt/format.h>

#include "base/check.h"
#include "base/npy_header.h"
#include "os/crash_point.h"
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

// Makes the copy, whole and durable, in `beside`.
Result<void> copy_table(const Governor& governor, const fs::path& directory, const fs::path& beside,
                        std::int64_t at_step, const ProgressFn& progress, std::int64_t rows_max) {
  PLIMSOLL_TRY(const TableInfo info, EmbeddingStore::inspect(directory));
  if (info.layout == RowLayout::kSampleOrder) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: a table in sample order", directory.string()),
                "nothing to do: its epochs reuse the space of the last one");
  }
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
  const fs::path ids_file = beside.string() + ".ids.npy";
  if (info.dense_ids && info.rows_max == 0) {
    how.rows = info.rows;
  } else {
    PLIMSOLL_TRY_VOID(write_ids(from, ids_file));
    how.ids_file = ids_file;
  }
  auto to = EmbeddingStore::open(governor, how);
  std::error_code ignored;
  fs::remove(ids_file, ignored);
  if (!to) {
    return tl::unexpected(std::move(to).error());
  }
  PLIMSOLL_TRY_VOID(copy_rows(from, *to, progress));
  return from.last_commit() < 0 ? Result<void>{} : to->commit(from.last_commit());
}

Result<void> exchange(const fs::path& directory, const fs::path& beside) {
  crash_point("store.compact.exchange.before");
  if (::renameat2(AT_FDCWD, beside.c_str(), AT_FDCWD, directory.c_str(), RENAME_EXCHANGE) != 0) {
    return fail_io(errno,
                   fmt::format("{}: exchanging it for {}", directory.string(), beside.string()),
                   "this file system cannot exchange two folders at once; export and import");
  }
  crash_point("store.compact.exchange.after");
  return sync_directory(directory.parent_path());
}

}  // namespace

Result<void> EmbeddingStore::compact(Governor governor, const fs::path& directory,
                                     std::int64_t at_step, const ProgressFn& progress,
                                     std::int64_t rows_max) {
  const fs::path place = fs::absolute(directory).lexically_normal();
  const fs::path named = place.has_filename() ? place : place.parent_path();
  const fs::path beside = named.string() + ".compacting";
  PLIMSOLL_TRY_VOID(read_description(named));              // Else the lock would make a folder.
  PLIMSOLL_TRY(const FolderLock lock, lock_table(named));  // Of the old table, until it is gone.
  std::error_code status;
  fs::remove_all(beside, status);  // Of a compaction that did not end.
  if (status) {
    return fail_io(status.value(), beside.string());
  }
  auto done = copy_table(governor, named, beside, at_step, progress, rows_max);
  if (done) {
    done = exchange(named, beside);
  }
  fs::remove_all(beside, status);
  return done;
}

}  // namespace plimsoll
