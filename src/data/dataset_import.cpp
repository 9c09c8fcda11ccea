// SPDX-License-Identifier: Apache-2.0
//
// import_cosir: streams feature shards into a FeatureStore.
//
// Reading order: include/plimsoll/dataset_import.h, column_shards.h, this file.
//
// Threads, Memory: as the header says.
#include "plimsoll/dataset_import.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <utility>

#include <fmt/core.h>

#include "base/check.h"
#include "data/column_shards.h"
#include "data/disk_room.h"
#include "memory/slab.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kChunkBytes = 4 << 20;

Result<ColumnShards> open_features(const std::string& column,
                                   const std::vector<std::filesystem::path>& paths) {
  PLIMSOLL_TRY(ColumnShards shards, ColumnShards::open(column, paths));
  const bool number = shards.dtype() == DType::kFloat32 || shards.dtype() == DType::kFloat16;
  if (!number || shards.row_shape().size() != 1 || shards.row_bytes() == 0) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: {} features must be float32 or float16 of shape [rows, width], "
                            "not {} with rows of {}",
                            shards.described(), column, dtype_name(shards.dtype()),
                            shape_text(shards.row_shape())));
  }
  return shards;
}

Result<std::optional<ColumnShards>> open_integers(const std::string& column,
                                                  const std::filesystem::path& path) {
  if (path.empty()) {
    return std::optional<ColumnShards>{};
  }
  PLIMSOLL_TRY(ColumnShards shards, ColumnShards::open(column, {path}));
  if (shards.dtype() != DType::kInt64 || !shards.row_shape().empty()) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: {} must be int64 of shape [rows], not {} with rows of {}",
                            shards.described(), column, dtype_name(shards.dtype()),
                            shape_text(shards.row_shape())));
  }
  return std::optional<ColumnShards>(std::move(shards));
}

Result<void> same_rows(const ColumnShards& image, const ColumnShards& other, const char* what) {
  if (image.rows() == other.rows()) {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("{} rows of image features ({}), but {} of {} ({})", image.rows(),
                          image.described(), other.rows(), what, other.described()));
}

// A writer of a new store, or one that adds to the store that is there.
Result<FeatureWriter> open_writer(Governor& governor, const CosirImportOptions& options,
                                  std::vector<ColumnSpec> columns, bool grouped) {
  if (!options.append) {
    return FeatureWriter::create(governor, {.directory = options.out,
                                            .columns = std::move(columns),
                                            .grouped = grouped,
                                            .allow_non_finite = true,  // Checked by the shards.
                                            .compression = options.compression});
  }
  PLIMSOLL_TRY(FeatureWriter writer, FeatureWriter::extend(governor, {.directory = options.out,
                                                                      .allow_non_finite = true}));
  if (writer.options().columns != columns || writer.options().grouped != grouped) {
    return fail(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: its columns or groups are not those of the files", options.out.string()),
        "plimsoll store info shows what it has; give --groups exactly when it has groups");
  }
  return writer;
}

std::span<std::byte> bytes_of(std::span<std::int64_t> values) {
  return std::as_writable_bytes(values);
}

}  // namespace

Result<FeatureInfo> import_cosir(Governor governor, const CosirImportOptions& options,
                                 const std::function<bool(std::int64_t, std::int64_t)>& progress) {
  PLIMSOLL_TRY(ColumnShards image, open_features("image", options.image_features));
  PLIMSOLL_TRY(ColumnShards text, open_features("text", options.text_features));
  PLIMSOLL_TRY(auto ids, open_integers("ids", options.ids));
  PLIMSOLL_TRY(auto groups, open_integers("groups", options.groups));
  PLIMSOLL_TRY_VOID(same_rows(image, text, "text features"));
  if (ids) {
    PLIMSOLL_TRY_VOID(same_rows(image, *ids, "ids"));
  }
  if (groups) {
    PLIMSOLL_TRY_VOID(same_rows(image, *groups, "groups"));
  }
  const std::int64_t row_bytes = image.row_bytes() + text.row_bytes();
  PLIMSOLL_TRY_VOID(check_disk_room(governor, options.out, image.rows() * (row_bytes + 24)));
  PLIMSOLL_TRY(FeatureWriter writer, open_writer(governor, options,
                                                 {{"image", image.dtype(), image.row_shape()},
                                                  {"text", text.dtype(), text.row_shape()}},
                                                 groups.has_value()));
  std::int64_t first_id = 0;
  if (options.append) {
    PLIMSOLL_TRY(const FeatureInfo info, FeatureStore::inspect(options.out));
    first_id = info.rows;
  }
  const std::int64_t chunk = std::max<std::int64_t>(1, kChunkBytes / (row_bytes + 16));
  PLIMSOLL_TRY(Slab slab, Slab::create(governor, Tag::kOther, chunk * (row_bytes + 16) + 4 * 64));
  const auto image_buffer = slab.take<std::byte>(chunk * image.row_bytes());
  const auto text_buffer = slab.take<std::byte>(chunk * text.row_bytes());
  const auto id_buffer = slab.take<std::int64_t>(chunk);
  const auto group_buffer = slab.take<std::int64_t>(chunk);
  for (std::int64_t done = 0; done < image.rows();) {
    const std::int64_t count = std::min(chunk, image.rows() - done);
    const auto rows = static_cast<std::size_t>(count);
    const auto image_part = image_buffer.first(static_cast<std::size_t>(count * image.row_bytes()));
    const auto text_part = text_buffer.first(static_cast<std::size_t>(count * text.row_bytes()));
    PLIMSOLL_TRY_VOID(image.read(image_part));
    PLIMSOLL_TRY_VOID(text.read(text_part));
    if (ids) {
      PLIMSOLL_TRY_VOID(ids->read(bytes_of(id_buffer.first(rows))));
    } else {
      std::iota(id_buffer.begin(), id_buffer.end(), first_id + done);
    }
    if (groups) {
      PLIMSOLL_TRY_VOID(groups->read(bytes_of(group_buffer.first(rows))));
    }
    const std::array<std::span<const std::byte>, 2> columns{image_part, text_part};
    PLIMSOLL_TRY_VOID(
        writer.append(id_buffer.first(rows), columns, group_buffer.first(groups ? rows : 0)));
    done += count;
    if (progress && !progress(done, image.rows())) {
      return fail(ErrorCode::kInvalidArgument, options.out.string() + ": import cancelled");
    }
  }
  PLIMSOLL_TRY_VOID(writer.finish());
  return FeatureStore::inspect(options.out);
}

}  // namespace plimsoll
