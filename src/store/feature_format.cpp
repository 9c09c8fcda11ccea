// SPDX-License-Identifier: Apache-2.0
//
// Layout of records and features.json: see feature_format.h.
//
// Threads: pure functions.   Memory: one parsed header, at most 1 MiB of text.
#include "store/feature_format.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <utility>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/philox.h"
#include "base/round.h"
#include "os/file.h"
#include "store/feature_table.h"
#include "store/shallow_json.h"

namespace plimsoll {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr std::int64_t kPlainVersion = 1;
constexpr std::int64_t kCompressedVersion = 2;  // The same, and a table of blocks.
constexpr std::int64_t kNewestVersion = 3;      // Either, behind other parts, or ragged.
constexpr std::int64_t kBlockPagesMax = 16;

std::uint32_t crc_of(const std::string& text) {
  return crc32c(std::as_bytes(std::span(text.data(), text.size())));
}

bool valid_name(const std::string& name) {
  if (name.empty() || name.size() > 63 || name[0] < 'a' || name[0] > 'z') {
    return false;
  }
  return std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
  });
}

Result<void> check_columns(const std::vector<ColumnSpec>& columns) {
  if (columns.empty() || columns.size() > kFeatureColumnsMax) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("a feature store needs 1 to {} columns, not {}", kFeatureColumnsMax,
                            columns.size()));
  }
  std::int64_t total = 0;
  for (std::size_t k = 0; k < columns.size(); ++k) {
    const ColumnSpec& column = columns[k];
    if (!valid_name(column.name)) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("column name \"{}\" is not of the form [a-z][a-z0-9_]* with at most "
                              "63 characters",
                              column.name.substr(0, 80)));
    }
    for (std::size_t other = 0; other < k; ++other) {
      if (columns[other].name == column.name) {
        return fail(ErrorCode::kInvalidArgument,
                    fmt::format("column \"{}\" is named twice", column.name));
      }
    }
    const bool positive = column.length_max >= 0 && column.length_max <= INT32_MAX &&
                          std::all_of(column.shape.begin(), column.shape.end(),
                                      [](std::int64_t extent) { return extent > 0; });
    const std::int64_t bytes = positive && column.shape.size() <= 8 ? column.bytes_max() : -1;
    if (bytes <= 0 || bytes > kFeatureRecordBytesMax) {
      return fail(
          ErrorCode::kInvalidArgument,
          fmt::format("column \"{}\" has a shape of no or too many elements (at most 16 MiB "
                      "and 8 dimensions a record)",
                      column.name));
    }
    total += bytes;
  }
  if (total > kFeatureRecordBytesMax) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("a record of {} bytes is larger than 16 MiB", total));
  }
  return {};
}

void choose_block(FeatureLayout& layout) {
  if (layout.is_ragged()) {
    layout.block_bytes = kFeaturePage;
    return;
  }
  std::int64_t best_pages = 0;
  double best_waste = 1.0;
  for (std::int64_t pages = 1; pages <= kBlockPagesMax; ++pages) {
    const std::int64_t bytes = pages * kFeaturePage;
    const std::int64_t used = bytes / layout.stride * layout.stride;
    const double waste = static_cast<double>(bytes - used) / static_cast<double>(bytes);
    if (used > 0 && (best_pages == 0 || waste < best_waste)) {
      best_pages = pages;
      best_waste = waste;
    }
    if (used > 0 && waste <= 0.125) {
      break;
    }
  }
  if (best_pages == 0) {
    best_pages = divide_up(layout.stride, kFeaturePage);
  }
  layout.block_bytes = best_pages * kFeaturePage;
  layout.records_per_block = layout.block_bytes / layout.stride;
}

// ---- features.json ----

json columns_json(const std::vector<ColumnSpec>& columns) {
  json list = json::array();
  for (const ColumnSpec& column : columns) {
    list.push_back(
        {{"name", column.name}, {"dtype", dtype_name(column.dtype)}, {"shape", column.shape}});
    if (column.ragged()) {
      list.back()["length_max"] = column.length_max;
    }
  }
  return list;
}

json side_json(const SideFile& side) {
  return {{"bytes", side.bytes}, {"crc32c", side.crc}};
}

// What is parsed below throws what nlohmann/json throws, or runtime_error.

std::int64_t integer(const json& object, const char* key) {
  const json& value = object.at(key);
  if (!value.is_number_integer() ||
      (value.is_number_unsigned() && value.get<std::uint64_t>() > INT64_MAX)) {
    throw std::runtime_error(key);
  }
  return value.get<std::int64_t>();
}

SideFile parse_side(const json& files, const char* name) {
  const json& side = files.at(name);
  const SideFile file{integer(side, "bytes"), static_cast<std::uint32_t>(integer(side, "crc32c"))};
  return file.bytes >= 0 ? file : throw std::runtime_error(name);
}

std::vector<ColumnSpec> parse_columns(const json& list) {
  std::vector<ColumnSpec> columns;
  if (!list.is_array() || list.size() > kFeatureColumnsMax) {
    throw std::runtime_error("columns");
  }
  for (const json& entry : list) {
    ColumnSpec column;
    column.name = entry.at("name").get<std::string>();
    column.dtype = parse_dtype(entry.at("dtype").get<std::string>()).or_throw();
    column.length_max = entry.contains("length_max") ? integer(entry, "length_max") : 0;
    const json& shape = entry.at("shape");
    if (!shape.is_array() || shape.size() > 8) {
      throw std::runtime_error("shape");
    }
    for (const json& extent : shape) {
      if (!extent.is_number_unsigned() || extent.get<std::uint64_t>() > (1ULL << 40)) {
        throw std::runtime_error("shape");
      }
      column.shape.push_back(extent.get<std::int64_t>());
    }
    columns.push_back(std::move(column));
  }
  return columns;
}

// The fields that only a store with compression has.
StoredForm parse_stored(const json& form, const json& files) {
  return {.compression = parse_compression(form.at("coding").get<std::string>()).or_throw(),
          .records_bytes = integer(form, "records_bytes"),
          .plain_blocks = integer(form, "plain_blocks"),
          .content_crc = static_cast<std::uint32_t>(integer(form, "content_crc32c")),
          .blocks = parse_side(files, kFeatureBlocksFile)};
}

bool stored_consistent(const FeatureHeader& header) {
  const StoredForm& stored = header.stored;
  return !header.compressed() ||
         (stored.records_bytes >= 0 && stored.records_bytes % kFeaturePage == 0 &&
          stored.records_bytes <= header.blocks() * header.layout.block_bytes &&
          stored.plain_blocks >= 0 && stored.plain_blocks <= header.blocks() &&
          stored.blocks.bytes == feature_table_bytes(header.blocks() + 1, 8));
}

bool ragged_consistent(const FeatureHeader& header) {
  const RaggedForm& ragged = header.ragged;
  const auto columns = static_cast<std::int64_t>(header.layout.ragged.size());
  return columns == 0 ||
         (ragged.stream_bytes >= 0 &&
          ragged.stream_bytes / (header.layout.record_bytes_max() + kFeaturePage) <= header.rows &&
          ragged.places.bytes == feature_table_bytes(header.rows, 8) &&
          ragged.lengths.bytes == feature_table_bytes(header.rows * columns, 4));
}

bool consistent(const FeatureHeader& header, const json& fields) {
  const bool geometry = integer(fields, "stride") == header.layout.stride &&
                        integer(fields, "block_bytes") == header.layout.block_bytes &&
                        integer(fields, "records_per_block") == header.layout.records_per_block;
  const bool ids =
      header.ids.rows == header.rows && (header.rows > 0 || header.ids.dense) &&
      spans_in_range(header.ids) &&
      header.id_table.bytes == (header.ids.dense ? 0 : feature_table_bytes(header.rows, 8));
  const bool uniform = header.uniform_group > 0;
  const bool groups =
      header.groups >= 0 && header.groups <= header.rows && header.uniform_group >= 0 &&
      (!uniform || (header.rows % header.uniform_group == 0 &&
                    header.rows / header.uniform_group == header.groups)) &&
      header.group_table.bytes ==
          (header.groups == 0 || uniform ? 0 : feature_table_bytes(header.groups + 1, 8));
  return geometry && ids && groups && ragged_consistent(header) && stored_consistent(header) &&
         header.checksums.bytes == feature_table_bytes(header.blocks(), 4);
}

}  // namespace

Result<FeatureLayout> plan_feature_layout(const std::vector<ColumnSpec>& columns) {
  PLIMSOLL_TRY_VOID(check_columns(columns));
  FeatureLayout layout;
  layout.columns = columns;
  layout.offsets.resize(columns.size());
  // Wide elements first: every column is then aligned to its element, with no gap between them.
  for (std::size_t k = 0; k < columns.size(); ++k) {
    (columns[k].ragged() ? layout.ragged : layout.order).push_back(k);
  }
  std::stable_sort(layout.order.begin(), layout.order.end(), [&](std::size_t a, std::size_t b) {
    return dtype_bytes(columns[a].dtype) > dtype_bytes(columns[b].dtype);
  });
  for (const std::size_t k : layout.order) {
    layout.offsets[k] = layout.record_bytes;
    layout.record_bytes += columns[k].bytes();
  }
  if (!layout.is_ragged()) {
    layout.stride = round_up(layout.record_bytes, dtype_bytes(columns[layout.order.front()].dtype));
  }
  choose_block(layout);
  return layout;
}

std::int64_t FeatureLayout::record_bytes_max() const noexcept {
  std::int64_t bytes = record_bytes;
  for (const std::size_t k : ragged) {
    bytes += columns[k].bytes_max();
  }
  return bytes;
}

std::int64_t FeatureHeader::blocks() const noexcept {
  return layout.is_ragged() ? divide_up(ragged.stream_bytes, layout.block_bytes)
                            : divide_up(rows, layout.records_per_block);
}

std::string FeatureHeader::fingerprint() const {
  std::uint64_t chain = mix64(crc_of(columns_json(layout.columns).dump()));
  for (const std::uint64_t part :
       {static_cast<std::uint64_t>(rows), ids.fingerprint, static_cast<std::uint64_t>(groups),
        static_cast<std::uint64_t>(uniform_group), static_cast<std::uint64_t>(group_table.crc),
        static_cast<std::uint64_t>(compressed() ? stored.content_crc : checksums.crc)}) {
    chain = mix64(chain ^ part);
  }
  if (layout.is_ragged()) {
    chain = mix64(mix64(chain ^ ragged.lengths.crc) ^ ragged.places.crc);
  }
  return fmt::format("{:016x}", chain);
}

std::string FeatureHeader::to_json() const {
  json header = {
      {"format", "plimsoll-features"},
      {"version", !after.empty() || layout.is_ragged() ? kNewestVersion
                  : compressed()                       ? kCompressedVersion
                                                       : kPlainVersion},
      {"rows", rows},
      {"columns", columns_json(layout.columns)},
      {"stride", layout.stride},
      {"block_bytes", layout.block_bytes},
      {"records_per_block", layout.records_per_block},
      {"ids", {{"dense", ids.dense}, {"fingerprint", fmt::format("{:016x}", ids.fingerprint)}}},
      {"groups", groups},
      {"uniform_group", uniform_group},
      {"fingerprint", fingerprint()},
      {"files",
       {{kFeatureChecksumsFile, side_json(checksums)},
        {kFeatureIdsFile, side_json(id_table)},
        {kFeatureGroupsFile, side_json(group_table)}}},
  };
  if (ids.spans > 0) {
    header["ids"]["spans"] = ids.spans;
  }
  if (compressed()) {
    header["compression"] = {{"coding", compression_name(stored.compression)},
                             {"records_bytes", stored.records_bytes},
                             {"plain_blocks", stored.plain_blocks},
                             {"content_crc32c", stored.content_crc}};
    header["files"][kFeatureBlocksFile] = side_json(stored.blocks);
  }
  if (!after.empty()) {
    header["after"] = after;
  }
  if (layout.is_ragged()) {
    header["ragged"] = {{"stream_bytes", ragged.stream_bytes}};
    header["files"][kFeaturePlacesFile] = side_json(ragged.places);
    header["files"][kFeatureLengthsFile] = side_json(ragged.lengths);
  }
  header["crc32c"] = crc_of(header.dump());
  return header.dump(2) + "\n";
}

namespace {

// Throws, as the above.
FeatureHeader header_of(const json& fields, std::int64_t version) {
  FeatureHeader header;
  header.rows = integer(fields, "rows");
  header.groups = integer(fields, "groups");
  header.uniform_group = integer(fields, "uniform_group");
  header.layout = plan_feature_layout(parse_columns(fields.at("columns"))).or_throw();
  if (header.rows < 0 || header.rows > kIdRowsMax) {
    throw std::runtime_error("rows");
  }
  const json& ids = fields.at("ids");
  header.ids = {.rows = header.rows,
                .dense = ids.at("dense").get<bool>(),
                .fingerprint = std::strtoull(
                    ids.at("fingerprint").get_ref<const std::string&>().c_str(), nullptr, 16),
                .spans = ids.contains("spans") ? integer(ids, "spans") : 0};
  const json& files = fields.at("files");
  header.checksums = parse_side(files, kFeatureChecksumsFile);
  header.id_table = parse_side(files, kFeatureIdsFile);
  header.group_table = parse_side(files, kFeatureGroupsFile);
  if (version == kCompressedVersion ||
      (version == kNewestVersion && fields.contains("compression"))) {
    header.stored = parse_stored(fields.at("compression"), files);
    if (!header.compressed()) {
      throw std::runtime_error("coding");
    }
  }
  if (version == kNewestVersion && fields.contains("after")) {
    header.after = fields.at("after").get<std::string>();
  }
  if (header.layout.is_ragged()) {
    header.ragged = {.stream_bytes = integer(fields.at("ragged"), "stream_bytes"),
                     .places = parse_side(files, kFeaturePlacesFile),
                     .lengths = parse_side(files, kFeatureLengthsFile)};
  }
  return header;
}

}  // namespace

Result<FeatureHeader> parse_feature_header(const std::string& text, const std::string& name) {
  const auto corrupt = [&name](const std::string& what) {
    return fail(ErrorCode::kCorrupt, name + ": " + what);
  };
  json parsed = parse_shallow(text);
  if (!parsed.is_object() || parsed.value("format", json()) != "plimsoll-features") {
    return corrupt("not the header of a feature store");
  }
  try {
    const std::int64_t version = integer(parsed, "version");
    if (version < kPlainVersion || version > kNewestVersion) {
      return corrupt(fmt::format("format version {}; this program reads {} to {}", version,
                                 kPlainVersion, kNewestVersion));
    }
    const std::int64_t crc = integer(parsed, "crc32c");
    parsed.erase("crc32c");
    if (crc_of(parsed.dump(-1, ' ', false, json::error_handler_t::replace)) != crc) {
      return corrupt("its checksum does not match its content");
    }
    FeatureHeader header = header_of(parsed, version);
    if (!consistent(header, parsed) ||
        parsed.at("fingerprint").get<std::string>() != header.fingerprint()) {
      return corrupt("its fields contradict each other");
    }
    return header;
  } catch (const std::bad_alloc&) {
    throw;  // Says nothing about the file.
  } catch (const std::exception&) {
    return corrupt("a field is missing or out of range");
  }
}

Result<FeatureHeader> read_feature_header(const fs::path& directory) {
  const fs::path path = directory / kFeatureHeaderFile;
  std::error_code ignored;
  if (!fs::exists(path, ignored)) {
    return fail(ErrorCode::kNotFound,
                fmt::format("{}: no feature store there ({} is missing)", directory.string(),
                            kFeatureHeaderFile),
                "name a directory written by plimsoll synth, import or FeatureWriter");
  }
  PLIMSOLL_TRY(const std::string text, read_small_file(path));
  PLIMSOLL_TRY(FeatureHeader header, parse_feature_header(text, path.string()));
  const auto check = [&](const char* name, std::int64_t expected) -> Result<void> {
    const fs::path file = directory / name;
    std::error_code error;
    const auto found = fs::file_size(file, error);
    if (error) {
      return fail(ErrorCode::kCorrupt, fmt::format("{}: missing", file.string()));
    }
    if (static_cast<std::int64_t>(found) != expected) {
      return fail(ErrorCode::kCorrupt,
                  fmt::format("{}: {} bytes, {} expected", file.string(), found, expected));
    }
    return {};
  };
  PLIMSOLL_TRY_VOID(check(kFeatureRecordsFile, header.records_file_bytes()));
  PLIMSOLL_TRY_VOID(check(kFeatureChecksumsFile, header.checksums.bytes));
  for (const auto& [name, bytes] :
       {std::pair{kFeatureBlocksFile, header.compressed() ? header.stored.blocks.bytes : 0},
        std::pair{kFeatureIdsFile, header.id_table.bytes},
        std::pair{kFeatureGroupsFile, header.group_table.bytes},
        std::pair{kFeaturePlacesFile, header.ragged.places.bytes},
        std::pair{kFeatureLengthsFile, header.ragged.lengths.bytes}}) {
    if (bytes > 0) {
      PLIMSOLL_TRY_VOID(check(name, bytes));
    }
  }
  return header;
}

}  // namespace plimsoll
