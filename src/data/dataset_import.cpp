// SPDX-License-Identifier: Apache-2.0
#include "plimsoll/dataset_import.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include <fmt/core.h>

#include "base/check.h"
#include "data/npy.h"
#include "data/safetensors.h"
#include "data/tensor_rows.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kBlockBytes = 4LL << 20;  // Of all columns together; at least one row.

bool is_shard(const std::filesystem::path& path) {
  return path.extension() == ".npy" || path.extension() == ".safetensors";
}

// The files that a list of files and folders names, folders in name order.
Result<ShardPaths> expand(const ShardPaths& paths, const char* option) {
  ShardPaths files;
  for (const auto& path : paths) {
    std::error_code problem;
    if (!std::filesystem::is_directory(path, problem)) {
      files.push_back(path);
      continue;
    }
    ShardPaths found;
    for (const auto& entry : std::filesystem::directory_iterator(path, problem)) {
      if (is_shard(entry.path())) {
        found.push_back(entry.path());
      }
    }
    if (problem) {
      return fail_io(problem.value(), fmt::format("{}: listing it", path.string()));
    }
    if (found.empty()) {
      return fail(ErrorCode::kNotFound, fmt::format("{}: no .npy or .safetensors file in it ({})",
                                                    path.string(), option));
    }
    std::sort(found.begin(), found.end());
    files.insert(files.end(), found.begin(), found.end());
  }
  return files;
}

Result<TensorRows> open_shard(const std::filesystem::path& path, const std::string& column) {
  if (path.extension() == ".npy") {
    return open_npy(path);
  }
  if (path.extension() != ".safetensors") {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: neither .npy nor .safetensors", path.string()));
  }
  PLIMSOLL_TRY(const auto reader, SafetensorsReader::open(path));
  if (reader.entries().size() == 1) {
    return reader.rows_of(reader.entries().front());
  }
  PLIMSOLL_TRY(const auto* entry, reader.find(column));
  return reader.rows_of(*entry);
}

// One column over all its shards. One shard is open at a time.
class Column {
 public:
  // Opens every shard once: all must agree, and their rows are added up.
  static Result<Column> open(std::string name, const ShardPaths& paths, const char* option,
                             std::size_t row_dimensions) {
    Column column;
    column.name_ = std::move(name);
    PLIMSOLL_TRY(column.files_, expand(paths, option));
    for (const auto& file : column.files_) {
      PLIMSOLL_TRY(const auto rows, open_shard(file, column.name_));
      if (rows.row_shape().size() != row_dimensions) {
        return fail(ErrorCode::kInvalidArgument,
                    fmt::format("{}: {} dimensions, expected {} ({})", file.string(),
                                rows.row_shape().size() + 1, row_dimensions + 1, option));
      }
      if (&file == &column.files_.front()) {
        column.spec_ = {column.name_, rows.dtype(), rows.row_shape()};
      } else if (rows.dtype() != column.spec_.dtype || rows.row_shape() != column.spec_.shape) {
        return fail(ErrorCode::kInvalidArgument,
                    fmt::format("{}: {} {} a row, but {} has {} {}", file.string(),
                                dtype_name(rows.dtype()), shape_text(rows.row_shape()),
                                column.files_.front().string(), dtype_name(column.spec_.dtype),
                                shape_text(column.spec_.shape)));
      }
      column.rows_ += rows.rows();
    }
    return column;
  }

  // The next out.size() bytes, over shard boundaries.
  Result<void> read(std::span<std::byte> out) {
    while (!out.empty()) {
      while (!shard_ || at_ == shard_->rows()) {
        if (shard_) {
          shard_->drop_cache();
        }
        PLIMSOLL_TRY(shard_, open_shard(files_.at(next_file_++), name_));
        at_ = 0;
      }
      const std::int64_t wanted = static_cast<std::int64_t>(out.size()) / shard_->row_bytes();
      const std::int64_t rows = std::min(wanted, shard_->rows() - at_);
      const auto bytes = static_cast<std::size_t>(rows * shard_->row_bytes());
      PLIMSOLL_TRY_VOID(shard_->read(at_, out.first(bytes)));
      at_ += rows;
      out = out.subspan(bytes);
    }
    return {};
  }

  [[nodiscard]] const ColumnSpec& spec() const noexcept { return spec_; }
  [[nodiscard]] std::int64_t rows() const noexcept { return rows_; }
  [[nodiscard]] std::string where() const {
    return files_.size() == 1
               ? files_.front().string()
               : fmt::format("{} and {} more", files_.front().string(), files_.size() - 1);
  }

 private:
  std::string name_;
  ShardPaths files_;
  ColumnSpec spec_;
  std::int64_t rows_{0};
  std::optional<TensorRows> shard_;
  std::size_t next_file_{0};
  std::int64_t at_{0};
};

// The columns of an import, "image" and "text" first.
struct Source {
  std::vector<Column> features;
  std::optional<Column> ids;
  std::optional<Column> groups;
  std::int64_t rows{0};
};

Result<void> check_features(const Column& column, const char* option) {
  const DType dtype = column.spec().dtype;
  if (dtype != DType::kFloat32 && dtype != DType::kFloat16) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: {}, expected float32 or float16 ({})", column.where(),
                            dtype_name(dtype), option));
  }
  return {};
}

Result<std::optional<Column>> open_whole_numbers(const char* name, const ShardPaths& paths,
                                                 const char* option, const Source& source) {
  if (paths.empty()) {
    return std::optional<Column>{};
  }
  PLIMSOLL_TRY(auto column, Column::open(name, paths, option, 0));
  if (column.spec().dtype != DType::kInt64) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: {}, expected int64 ({})", column.where(),
                            dtype_name(column.spec().dtype), option));
  }
  if (column.rows() != source.rows) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{} has {} rows, but {} has {}", column.where(), column.rows(),
                            source.features.front().where(), source.rows),
                "every column needs one entry per row");
  }
  return std::optional<Column>(std::move(column));
}

Result<Source> open_source(const ImportCosirOptions& options) {
  if (options.image_features.empty() || options.text_features.empty()) {
    return fail(ErrorCode::kInvalidArgument, "no features to import",
                "give --image-features and --text-features");
  }
  Source source;
  PLIMSOLL_TRY(auto image, Column::open("image", options.image_features, "--image-features", 1));
  PLIMSOLL_TRY(auto text, Column::open("text", options.text_features, "--text-features", 1));
  PLIMSOLL_TRY_VOID(check_features(image, "--image-features"));
  PLIMSOLL_TRY_VOID(check_features(text, "--text-features"));
  if (image.rows() != text.rows()) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{} has {} rows, but {} has {}", image.where(), image.rows(),
                            text.where(), text.rows()),
                "every column needs one entry per row");
  }
  source.rows = image.rows();
  if (source.rows == 0) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("{} has no rows", image.where()));
  }
  source.features.push_back(std::move(image));
  source.features.push_back(std::move(text));
  PLIMSOLL_TRY(source.ids, open_whole_numbers("ids", options.ids, "--ids", source));
  PLIMSOLL_TRY(source.groups, open_whole_numbers("groups", options.groups, "--groups", source));
  return source;
}

std::span<std::byte> bytes_of(std::vector<std::int64_t>& values) {
  return std::as_writable_bytes(std::span(values));
}

// Copies everything, block by block.
Result<void> copy_rows(Source& source, FeatureWriter& writer, std::int64_t block_rows,
                       const std::function<bool(std::int64_t, std::int64_t)>& progress) {
  std::array<std::vector<std::byte>, 2> values;
  std::vector<std::int64_t> ids;
  std::vector<std::int64_t> groups;
  for (std::int64_t first = 0; first < source.rows; first += block_rows) {
    const std::int64_t rows = std::min(block_rows, source.rows - first);
    std::array<std::span<const std::byte>, 2> columns;
    for (std::size_t k = 0; k < columns.size(); ++k) {
      values[k].resize(static_cast<std::size_t>(rows * source.features[k].spec().bytes()));
      PLIMSOLL_TRY_VOID(source.features[k].read(values[k]));
      columns[k] = values[k];
    }
    ids.resize(static_cast<std::size_t>(rows));
    if (source.ids) {
      PLIMSOLL_TRY_VOID(source.ids->read(bytes_of(ids)));
    } else {
      for (std::int64_t i = 0; i < rows; ++i) {
        ids[static_cast<std::size_t>(i)] = first + i;
      }
    }
    if (source.groups) {
      groups.resize(static_cast<std::size_t>(rows));
      PLIMSOLL_TRY_VOID(source.groups->read(bytes_of(groups)));
    }
    PLIMSOLL_TRY_VOID(writer.append(ids, columns, groups));
    if (progress && !progress(first + rows, source.rows)) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("cancelled after {} rows; nothing was kept", first + rows));
    }
  }
  return {};
}

}  // namespace

Result<FeatureInfo> import_cosir(Governor governor, const ImportCosirOptions& options,
                                 const std::function<bool(std::int64_t, std::int64_t)>& progress) {
  PLIMSOLL_TRY(auto source, open_source(options));
  const std::int64_t row_bytes =
      source.features[0].spec().bytes() + source.features[1].spec().bytes() + 16;
  const std::int64_t block_rows = std::max<std::int64_t>(1, kBlockBytes / row_bytes);
  PLIMSOLL_TRY(const Lease lease, governor.reserve(Tag::kOther, block_rows * row_bytes));
  PLIMSOLL_TRY(auto writer,
               FeatureWriter::create(
                   governor, {.directory = options.out,
                              .columns = {source.features[0].spec(), source.features[1].spec()},
                              .grouped = source.groups.has_value()}));
  PLIMSOLL_TRY_VOID(copy_rows(source, writer, block_rows, progress));
  PLIMSOLL_TRY_VOID(writer.finish());
  return FeatureStore::inspect(options.out);
}

}  // namespace plimsoll
