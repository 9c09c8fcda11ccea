// SPDX-License-Identifier: Apache-2.0
#include "store/embedding_description.h"

#include <algorithm>
#include <array>
#include <bit>
#include <new>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/philox.h"
#include "os/file.h"
#include "store/row_init.h"
#include "store/row_optimizer.h"
#include "store/shallow_json.h"

namespace plimsoll {
namespace {

using Json = nlohmann::json;  // Keys are sorted, so one content has one text.

constexpr int kVersion = 2;         // 1: the page table had one checksum over all of it.
constexpr int kGrowingVersion = 3;  // As 2, with rows_max.

// Empties a document before it is destroyed. The library's destructor allocates while there is
// anything inside, and ends the process where it cannot.
class EmptiedAtEnd {
 public:
  explicit EmptiedAtEnd(Json& json) noexcept : json_(json) {}
  ~EmptiedAtEnd() {
    if (json_.is_structured()) {
      for (Json& child : json_) {
        child.clear();
      }
    }
    json_.clear();
  }
  EmptiedAtEnd(const EmptiedAtEnd&) = delete;
  EmptiedAtEnd& operator=(const EmptiedAtEnd&) = delete;

 private:
  Json& json_;
};

std::uint32_t text_crc(const std::string& text) {
  return crc32c(std::as_bytes(std::span(text.data(), text.size())));
}

std::string hex(std::uint64_t value) {
  return fmt::format("{:016x}", value);
}

// Field by field, into what are objects already: an initialiser list leaks what it has built when
// memory runs out in it, and a null that cannot become an object is left broken.
void fill_json(Json& json, const TableDescription& table) {
  const TableShape shape = table.shape();
  json["format"] = "plimsoll embedding table";
  json["version"] = table.rows_max > 0 ? kGrowingVersion : kVersion;
  json["rows"] = table.ids.rows;
  json["dim"] = table.dim;
  json["dtype"] = row_dtype_name(table.dtype);
  json["optimizer"] = optimizer_name(table.optimizer);
  json["init"] = Json(Json::value_t::object);
  json["init"]["kind"] = init_name(table.init.kind);
  json["init"]["scale"] = table.init.scale;
  json["init"]["seed"] = hex(table.init.seed);
  json["ids"] = Json(Json::value_t::object);
  json["ids"]["dense"] = table.ids.dense;
  json["ids"]["fingerprint"] = hex(table.ids.fingerprint);
  if (table.ids.spans > 0) {
    json["ids"]["spans"] = table.ids.spans;
  }
  json["layout"] = layout_name(table.layout);
  json["record_bytes"] = shape.record_bytes;
  json["page_bytes"] = shape.page_bytes;
  json["rows_per_page"] = shape.rows_per_page;
  json["fingerprint"] = hex(table.fingerprint());
  if (table.rows_max > 0) {
    json["rows_max"] = table.rows_max;
  }
  if (table.layout == RowLayout::kSampleOrder) {
    json["order_seed"] = hex(table.order_seed);
    json["bucket_rows"] = table.bucket_rows;
    json["segment_bytes"] = table.segment_bytes;
  }
}

template <class Kinds, class Name>
auto parse_kind(const std::string& text, const Kinds& kinds, const Name& name) {
  for (const auto kind : kinds) {
    if (text == name(kind)) {
      return kind;
    }
  }
  throw std::runtime_error("unknown kind \"" + text + "\"");
}

// Throws what nlohmann/json throws, or runtime_error: read_description() turns it into kCorrupt.
TableDescription from_json(Json json) {
  const EmptiedAtEnd emptied(json);
  const int version = json.at("version").get<int>();
  if (json.at("format").get<std::string>() != "plimsoll embedding table" ||
      (version != kVersion && version != kGrowingVersion)) {
    throw std::runtime_error("not an embedding table of a version known here");
  }
  const auto crc = json.at("crc32c").get<std::uint32_t>();
  json.erase("crc32c");
  if (crc != text_crc(json.dump())) {
    throw std::runtime_error("fails its checksum");
  }
  TableDescription table;
  table.dim = json.at("dim").get<std::int64_t>();
  if (json.contains("dtype")) {
    table.dtype = parse_kind(json.at("dtype").get<std::string>(),
                             std::array{RowDType::kFloat32, RowDType::kBFloat16}, row_dtype_name);
  }
  table.optimizer =
      parse_kind(json.at("optimizer").get<std::string>(), kRowOptimizers, optimizer_name);
  const Json& init = json.at("init");
  table.init.kind = parse_kind(
      init.at("kind").get<std::string>(),
      std::array{RowInitKind::kZeros, RowInitKind::kNormal, RowInitKind::kUniform}, init_name);
  table.init.scale = init.at("scale").get<float>();
  table.init.seed = std::stoull(init.at("seed").get<std::string>(), nullptr, 16);
  table.ids.rows = json.at("rows").get<std::int64_t>();
  table.ids.dense = json.at("ids").at("dense").get<bool>();
  table.ids.fingerprint =
      std::stoull(json.at("ids").at("fingerprint").get<std::string>(), nullptr, 16);
  table.ids.spans = json.at("ids").value("spans", std::int64_t{0});
  const std::int64_t rows_least = version == kGrowingVersion ? 0 : 1;
  if (table.dim < 1 || table.dim > (1 << 24) || table.ids.rows < rows_least ||
      table.ids.rows > kIdRowsMax || !spans_in_range(table.ids)) {
    throw std::runtime_error("its rows, its spans of ids or its dim are out of range");
  }
  if (version == kGrowingVersion) {
    table.rows_max = json.at("rows_max").get<std::int64_t>();
    if (table.rows_max < std::max<std::int64_t>(table.ids.rows, 1) || table.rows_max > kIdRowsMax) {
      throw std::runtime_error("its rows_max is out of range");
    }
  }
  table.layout = parse_kind(json.at("layout").get<std::string>(),
                            std::array{RowLayout::kAnyOrder, RowLayout::kSampleOrder}, layout_name);
  if (table.layout == RowLayout::kSampleOrder) {
    table.order_seed = std::stoull(json.at("order_seed").get<std::string>(), nullptr, 16);
    table.bucket_rows = json.at("bucket_rows").get<std::int64_t>();
    table.segment_bytes = json.at("segment_bytes").get<std::int64_t>();
  }
  if (hex(table.fingerprint()) != json.at("fingerprint").get<std::string>()) {
    throw std::runtime_error("its fingerprint does not fit its fields");
  }
  return table;
}

}  // namespace

namespace table_files {
std::filesystem::path map_path(const std::filesystem::path& directory, int number) {
  return directory / fmt::format("map.{}", number);
}
}  // namespace table_files

const char* row_dtype_name(RowDType dtype) noexcept {
  return dtype == RowDType::kFloat32 ? "float32" : "bfloat16";
}

const char* layout_name(RowLayout layout) noexcept {
  return layout == RowLayout::kSampleOrder ? "sample_order" : "any_order";
}

TableShape TableDescription::shape() const noexcept {
  return table_shape(rows_max > 0 ? rows_max : ids.rows, dim, optimizer_slots(optimizer),
                     optimizer_row_slots(optimizer), dtype);
}

std::uint64_t TableDescription::fingerprint() const noexcept {
  const TableShape s = shape();
  std::uint64_t chain = 0x706C696D736F6C6CULL;
  for (const std::uint64_t field :
       {static_cast<std::uint64_t>(dim), static_cast<std::uint64_t>(optimizer),
        static_cast<std::uint64_t>(init.kind),
        static_cast<std::uint64_t>(std::bit_cast<std::uint32_t>(init.scale)), init.seed,
        static_cast<std::uint64_t>(ids.rows), static_cast<std::uint64_t>(ids.dense),
        ids.fingerprint, static_cast<std::uint64_t>(s.record_bytes),
        static_cast<std::uint64_t>(s.page_bytes), static_cast<std::uint64_t>(s.rows_per_page)}) {
    chain = mix64(chain ^ field);
  }
  if (layout == RowLayout::kSampleOrder) {
    for (const std::uint64_t field :
         {static_cast<std::uint64_t>(layout), order_seed, static_cast<std::uint64_t>(bucket_rows),
          static_cast<std::uint64_t>(segment_bytes)}) {
      chain = mix64(chain ^ field);
    }
  }
  if (ids.spans > 0) {
    chain = mix64(chain ^ static_cast<std::uint64_t>(ids.spans));
  }
  if (dtype != RowDType::kFloat32) {
    chain = mix64(chain ^ mix64(0x6474797065ULL + static_cast<std::uint64_t>(dtype)));  // "dtype"
  }
  if (rows_max > 0) {
    chain = mix64(chain ^ mix64(static_cast<std::uint64_t>(rows_max)));
  }
  return chain;
}

Result<TableDescription> read_description(const std::filesystem::path& directory) {
  const auto path = directory / table_files::kDescription;
  PLIMSOLL_TRY(const std::string text, read_small_file(path));
  try {
    return from_json(parse_shallow(text, true));
  } catch (const std::bad_alloc&) {
    throw;  // Says nothing about the file.
  } catch (const std::exception& problem) {
    return fail(ErrorCode::kCorrupt, fmt::format("{}: {}", path.string(), problem.what()));
  }
}

Result<void> write_description(const std::filesystem::path& directory,
                               const TableDescription& description) {
  Json json(Json::value_t::object);
  const EmptiedAtEnd emptied(json);
  fill_json(json, description);
  json["crc32c"] = text_crc(json.dump());
  return replace_file(directory / table_files::kDescription, json.dump(2) + "\n");
}

Result<void> compare_description(const std::filesystem::path& directory,
                                 const TableDescription& table,
                                 const EmbeddingStoreOptions& options, const IdIndexInfo* ids) {
  Result<void> same;
  const auto compare = [&](const char* option, const auto& has, const auto& asked) {
    if (same && has != asked) {
      same = fail(ErrorCode::kInvalidArgument,
                  fmt::format("{}: {} is {}, but {} was asked for",
                              (directory / table_files::kDescription).string(), option, has, asked),
                  "open the table as it was made, or name another directory");
    }
  };
  const auto name = [](const char* text) { return std::string_view(text); };
  compare("dim", table.dim, options.dim == 0 ? table.dim : options.dim);
  compare("dtype", name(row_dtype_name(table.dtype)), name(row_dtype_name(options.dtype)));
  compare("optimizer.kind", name(optimizer_name(table.optimizer)),
          name(optimizer_name(options.optimizer.kind)));
  compare("layout", name(layout_name(table.layout)), name(layout_name(options.layout)));
  compare("init.kind", name(init_name(table.init.kind)), name(init_name(options.init.kind)));
  compare("init.scale", table.init.scale, options.init.scale);
  compare("init.seed", table.init.seed, options.init.seed);
  compare("rows_max", table.rows_max, options.rows_max == 0 ? table.rows_max : options.rows_max);
  if (table.rows_max > 0) {
    return same;  // Its ids are no longer those it was made with.
  }
  compare("rows", table.ids.rows, options.rows == 0 ? table.ids.rows : options.rows);
  if (ids != nullptr) {
    compare("ids (their number)", table.ids.rows, ids->rows);
    compare("ids (their fingerprint)", hex(table.ids.fingerprint), hex(ids->fingerprint));
  }
  return same;
}

}  // namespace plimsoll
