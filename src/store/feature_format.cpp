// SPDX-License-Identifier: Apache-2.0
//
// Layout of records and features.json: see feature_format.h.
//
// Threads: pure functions.   Memory: one parsed header, at most 1 MiB of text.
#include "store/feature_format.h"

#include <algorithm>
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

// Reads typed fields; remembers whether any was missing or of another type.
class Fields {
 public:
  explicit Fields(const json& object) : object_(object) { ok_ = object.is_object(); }

  std::int64_t integer(const char* key) {
    const json* value = find(key);
    if (value == nullptr || !value->is_number_integer() ||
        (value->is_number_unsigned() && value->get<std::uint64_t>() > INT64_MAX)) {
      ok_ = false;
      return 0;
    }
    return value->get<std::int64_t>();
  }
  std::string text(const char* key) {
    const json* value = find(key);
    if (value == nullptr || !value->is_string()) {
      ok_ = false;
      return {};
    }
    return value->get<std::string>();
  }
  bool boolean(const char* key) {
    const json* value = find(key);
    if (value == nullptr || !value->is_boolean()) {
      ok_ = false;
      return false;
    }
    return value->get<bool>();
  }
  const json* find(const char* key) {
    if (!object_.is_object()) {
      return nullptr;
    }
    const auto found = object_.find(key);
    return found == object_.end() ? nullptr : &*found;
  }
  SideFile side(const char* key) {
    const json* value = find(key);
    if (value == nullptr) {
      ok_ = false;
      return {};
    }
    Fields inner(*value);
    SideFile side;
    side.bytes = inner.integer("bytes");
    side.crc = static_cast<std::uint32_t>(inner.integer("crc32c"));
    ok_ = ok_ && inner.ok() && side.bytes >= 0;
    return side;
  }
  void refuse() { ok_ = false; }
  [[nodiscard]] bool ok() const { return ok_; }

 private:
  const json& object_;
  bool ok_{true};
};

std::vector<ColumnSpec> parse_columns(Fields& fields) {
  std::vector<ColumnSpec> columns;
  const json* list = fields.find("columns");
  if (list == nullptr || !list->is_array() || list->size() > kFeatureColumnsMax) {
    fields.refuse();
    return columns;
  }
  for (const json& entry : *list) {
    Fields inner(entry);
    ColumnSpec column;
    column.name = inner.text("name");
    const auto dtype = parse_dtype(inner.text("dtype"));
    const json* shape = inner.find("shape");
    if (!inner.ok() || !dtype || shape == nullptr || !shape->is_array() || shape->size() > 8) {
      fields.refuse();
      return columns;
    }
    column.dtype = *dtype;
    column.length_max = entry.contains("length_max") ? inner.integer("length_max") : 0;
    for (const json& extent : *shape) {
      if (!extent.is_number_unsigned() || extent.get<std::uint64_t>() > (1ULL << 40)) {
        fields.refuse();
        return columns;
      }
      column.shape.push_back(extent.get<std::int64_t>());
    }
    columns.push_back(std::move(column));
  }
  return columns;
}

// The fields that only a store with compression has.
StoredForm parse_stored(Fields& fields, Fields& files) {
  StoredForm stored;
  const json* compression = fields.find("compression");
  if (compression == nullptr) {
    fields.refuse();
    return stored;
  }
  Fields inner(*compression);
  const auto coding = parse_compression(inner.text("coding"));
  stored.compression = coding ? *coding : BlockCompression::kNone;
  stored.records_bytes = inner.integer("records_bytes");
  stored.plain_blocks = inner.integer("plain_blocks");
  stored.content_crc = static_cast<std::uint32_t>(inner.integer("content_crc32c"));
  stored.blocks = files.side(kFeatureBlocksFile);
  if (!inner.ok() || stored.compression == BlockCompression::kNone) {
    fields.refuse();
  }
  return stored;
}

bool stored_consistent(const FeatureHeader& header) {
  const StoredForm& stored = header.stored;
  return !header.compressed() ||
         (stored.records_bytes >= 0 && stored.records_bytes % kFeaturePage == 0 &&
          stored.records_bytes <= header.blocks() * header.layout.block_bytes &&
          stored.plain_blocks >= 0 && stored.plain_blocks <= header.blocks() &&
          stored.blocks.bytes == feature_table_bytes(header.blocks() + 1, 8));
}

RaggedForm parse_ragged(Fields& fields, Fields& files) {
  RaggedForm ragged;
  const json* form = fields.find("ragged");
  if (form == nullptr) {
    fields.refuse();
    return ragged;
  }
  Fields inner(*form);
  ragged.stream_bytes = inner.integer("stream_bytes");
  ragged.places = files.side(kFeaturePlacesFile);
  ragged.lengths = files.side(kFeatureLengthsFile);
  if (!inner.ok()) {
    fields.refuse();
  }
  return ragged;
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

bool consistent(const FeatureHeader& header, Fields& fields) {
  const bool geometry = fields.integer("stride") == header.layout.stride &&
                        fields.integer("block_bytes") == header.layout.block_bytes &&
                        fields.integer("records_per_block") == header.layout.records_per_block;
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

Result<FeatureHeader> parse_feature_header(const std::string& text, const std::string& name) {
  json parsed = parse_shallow(text);
  Fields fields(parsed);
  if (!fields.ok() || fields.text("format") != "plimsoll-features") {
    return fail(ErrorCode::kCorrupt, name + ": not the header of a feature store");
  }
  const std::int64_t version = fields.integer("version");
  if (version < kPlainVersion || version > kNewestVersion) {
    return fail(ErrorCode::kCorrupt,
                fmt::format("{}: format version {}; this program reads {} to {}", name, version,
                            kPlainVersion, kNewestVersion));
  }
  const std::int64_t crc = fields.integer("crc32c");
  parsed.erase("crc32c");
  if (!fields.ok() || crc_of(parsed.dump(-1, ' ', false, json::error_handler_t::replace)) != crc) {
    return fail(ErrorCode::kCorrupt, name + ": its checksum does not match its content");
  }
  FeatureHeader header;
  header.rows = fields.integer("rows");
  header.groups = fields.integer("groups");
  header.uniform_group = fields.integer("uniform_group");
  const json* ids = fields.find("ids");
  const json* files = fields.find("files");
  auto layout = plan_feature_layout(parse_columns(fields));
  if (!fields.ok() || !layout || ids == nullptr || files == nullptr || header.rows < 0 ||
      header.rows > kIdRowsMax) {
    return fail(ErrorCode::kCorrupt, name + ": a field is missing or out of range");
  }
  header.layout = *std::move(layout);
  Fields id_fields(*ids);
  header.ids.rows = header.rows;
  header.ids.dense = id_fields.boolean("dense");
  header.ids.fingerprint = std::strtoull(id_fields.text("fingerprint").c_str(), nullptr, 16);
  header.ids.spans = ids->contains("spans") ? id_fields.integer("spans") : 0;
  Fields file_fields(*files);
  header.checksums = file_fields.side(kFeatureChecksumsFile);
  header.id_table = file_fields.side(kFeatureIdsFile);
  header.group_table = file_fields.side(kFeatureGroupsFile);
  if (version == kCompressedVersion ||
      (version == kNewestVersion && fields.find("compression") != nullptr)) {
    header.stored = parse_stored(fields, file_fields);
  }
  if (version == kNewestVersion && fields.find("after") != nullptr) {
    header.after = fields.text("after");
  }
  if (header.layout.is_ragged()) {
    header.ragged = parse_ragged(fields, file_fields);
  }
  if (!consistent(header, fields) || !id_fields.ok() || !file_fields.ok() || !fields.ok() ||
      fields.text("fingerprint") != header.fingerprint()) {
    return fail(ErrorCode::kCorrupt, name + ": its fields contradict each other");
  }
  return header;
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
  if (header.compressed()) {
    PLIMSOLL_TRY_VOID(check(kFeatureBlocksFile, header.stored.blocks.bytes));
  }
  for (const auto& [name, bytes] : {std::pair{kFeatureIdsFile, header.id_table.bytes},
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
