// SPDX-License-Identifier: Apache-2.0
//
// ColumnShards: see column_shards.h.
//
// Threads, Memory: as the header says.
#include "data/column_shards.h"

#include <algorithm>

#include <fmt/core.h>

#include "base/check.h"
#include "data/file_kind.h"
#include "data/npy.h"
#include "data/safetensors.h"
#include "os/directories.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kShardsMax = 1 << 20;

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

// The digits at the front of `text`, without leading zeros; removed from it.
std::string_view take_number(std::string_view& text) {
  const auto end = std::find_if_not(text.begin(), text.end(), is_digit);
  std::string_view digits = text.substr(0, static_cast<std::size_t>(end - text.begin()));
  text.remove_prefix(digits.size());
  digits.remove_prefix(std::min(digits.find_first_not_of('0'), digits.size()));
  return digits;
}

Result<std::vector<fs::path>> list_shards(const std::string& column,
                                          const std::vector<fs::path>& paths) {
  std::vector<fs::path> files;
  for (const fs::path& path : paths) {
    std::error_code error;
    if (!fs::exists(path, error)) {
      return fail(ErrorCode::kNotFound, fmt::format("{}: no such file or directory ({} features)",
                                                    path.string(), column));
    }
    if (!fs::is_directory(path, error)) {
      files.push_back(path);
      continue;
    }
    const std::size_t before = files.size();
    PLIMSOLL_TRY(const auto names, names_in(path));
    for (const std::string& name : names) {
      const std::string kind = fs::path(name).extension().string();
      if ((kind == ".npy" || kind == ".safetensors") && fs::is_regular_file(path / name, error)) {
        files.push_back(path / name);
      }
    }
    if (files.size() == before || files.size() > kShardsMax) {
      return fail(ErrorCode::kNotFound, fmt::format("{}: no .npy or .safetensors file in it ({})",
                                                    path.string(), column));
    }
  }
  std::sort(files.begin(), files.end(), [](const fs::path& a, const fs::path& b) {
    const std::string name_a = a.filename().string();
    const std::string name_b = b.filename().string();
    return name_a == name_b ? a < b : name_before(name_a, name_b);
  });
  if (files.empty()) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("no file is named for {}", column));
  }
  return files;
}

Result<TensorRows> open_shard(const std::string& column, const fs::path& path) {
  PLIMSOLL_TRY(const FileSort sort, file_sort_of(path));
  const bool unknown = sort.kind == FileKind::kText || sort.kind == FileKind::kEmpty;
  if (!unknown && sort.kind != FileKind::kNpy && sort.kind != FileKind::kSafetensors) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: {}, where an array is read", path.string(), sort.name),
                "write each column by numpy.save(), or as safetensors");
  }
  if (sort.kind == FileKind::kNpy || (unknown && path.extension() != ".safetensors")) {
    return open_npy(path);
  }
  PLIMSOLL_TRY(const SafetensorsReader reader, SafetensorsReader::open(path));
  const auto& entries = reader.entries();
  if (entries.size() == 1) {
    return reader.rows_of(entries.front());
  }
  for (const std::string& name : {column, column + "_features"}) {
    if (const auto found = reader.find(name)) {
      return reader.rows_of(**found);
    }
  }
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("{}: holds {} tensors, none of them named \"{}\" or \"{}_features\"",
                          path.string(), entries.size(), column, column));
}

}  // namespace

bool name_before(std::string_view a, std::string_view b) noexcept {
  while (!a.empty() && !b.empty()) {
    if (is_digit(a.front()) && is_digit(b.front())) {
      const std::string_view x = take_number(a);
      const std::string_view y = take_number(b);
      if (x != y) {
        return x.size() != y.size() ? x.size() < y.size() : x < y;
      }
      continue;
    }
    if (a.front() != b.front()) {
      return a.front() < b.front();
    }
    a.remove_prefix(1);
    b.remove_prefix(1);
  }
  return a.size() < b.size();
}

Result<ColumnShards> ColumnShards::open(const std::string& column,
                                        const std::vector<fs::path>& paths) {
  ColumnShards shards;
  shards.column_ = column;
  PLIMSOLL_TRY(const std::vector<fs::path> files, list_shards(column, paths));
  for (const fs::path& path : files) {
    PLIMSOLL_TRY(const TensorRows rows, open_shard(column, path));
    if (shards.shards_.empty()) {
      shards.dtype_ = rows.dtype();
      shards.row_shape_ = rows.row_shape();
      shards.row_bytes_ = rows.row_bytes();
    } else if (rows.dtype() != shards.dtype_ || rows.row_shape() != shards.row_shape_) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("{}: rows of {} {}, but {} has rows of {} {}", path.string(),
                              dtype_name(rows.dtype()), shape_text(rows.row_shape()),
                              shards.shards_.front().path.string(), dtype_name(shards.dtype_),
                              shape_text(shards.row_shape_)));
    }
    shards.shards_.push_back({path, rows.rows()});
    shards.rows_ += rows.rows();
  }
  return shards;
}

Result<void> ColumnShards::read(std::span<std::byte> out) {
  while (!out.empty()) {
    PLIMSOLL_CHECK(shard_ < shards_.size(), "read past the last shard");
    const Shard& shard = shards_[shard_];
    if (row_ == shard.rows) {
      current_.reset();
      ++shard_;
      row_ = 0;
      continue;
    }
    if (!current_) {
      PLIMSOLL_TRY(current_, open_shard(column_, shard.path));
      if (current_->rows() != shard.rows || current_->row_bytes() != row_bytes_) {
        return fail(ErrorCode::kCorrupt, shard.path.string() + ": changed while it was read");
      }
    }
    const std::int64_t wanted = static_cast<std::int64_t>(out.size()) / row_bytes_;
    const std::int64_t count = std::min(wanted, shard.rows - row_);
    const auto part = out.first(static_cast<std::size_t>(count * row_bytes_));
    PLIMSOLL_TRY_VOID(current_->read(row_, part));
    if (const std::int64_t bad = first_non_finite(part, dtype_); bad >= 0) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("{}: row {} holds a NaN or an infinity", shard.path.string(),
                              row_ + bad * dtype_bytes(dtype_) / row_bytes_));
    }
    row_ += count;
    out = out.subspan(part.size());
    current_->drop_cache();
  }
  return {};
}

std::string ColumnShards::described() const {
  const std::string first = shards_.front().path.string();
  return shards_.size() == 1 ? first : fmt::format("{} and {} more", first, shards_.size() - 1);
}

}  // namespace plimsoll
