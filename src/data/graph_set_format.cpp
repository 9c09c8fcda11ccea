// SPDX-License-Identifier: Apache-2.0
#include "data/graph_set_format.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <utility>

#include <openssl/evp.h>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/crc32c.h"

namespace plimsoll {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormatKey = "format";
constexpr const char* kFormat = "plimsoll.graph_set.1";
constexpr const char* kNodeFeatures =
    "id_index,byte0,byte1,byte2,byte3,byte4,byte5,byte6,byte7,count,last_position";
constexpr const char* kEdgeFeatures =
    "count,frequency,interval_mean,interval_std,regularity,first,last,span,has_reverse,"
    "degree_product,degree_ratio";

struct Count {
  const char* key;
  std::int64_t GraphFileInfo::*value;
};
constexpr std::array<Count, 19> kCounts{{{"bytes", &GraphFileInfo::bytes},
                                         {"graphs", &GraphFileInfo::graphs},
                                         {"attack_graphs", &GraphFileInfo::attack_graphs},
                                         {"frames", &GraphFileInfo::frames},
                                         {"attack_frames", &GraphFileInfo::attack_frames},
                                         {"left_over_frames", &GraphFileInfo::left_over_frames},
                                         {"unknown_id_frames", &GraphFileInfo::unknown_id_frames},
                                         {"empty_payloads", &GraphFileInfo::empty_payloads},
                                         {"back_steps", &GraphFileInfo::back_steps},
                                         {"blank_lines", &GraphFileInfo::blank_lines},
                                         {"ignored_columns", &GraphFileInfo::ignored_columns},
                                         {"bad_fields", &GraphFileInfo::bad_fields},
                                         {"bad_timestamps", &GraphFileInfo::bad_timestamps},
                                         {"bad_ids", &GraphFileInfo::bad_ids},
                                         {"bad_payloads", &GraphFileInfo::bad_payloads},
                                         {"bad_labels", &GraphFileInfo::bad_labels},
                                         {"bad_lines", &GraphFileInfo::bad_lines},
                                         {"damaged_ends", &GraphFileInfo::damaged_ends},
                                         {"unlabelled_frames", &GraphFileInfo::unlabelled_frames}}};

Json file_json(const GraphFileInfo& file) {
  Json out{{"name", file.name}, {"test", file.test}, {"crc32c", file.crc32c}};
  for (const Count& count : kCounts) {
    out[count.key] = file.*count.value;
  }
  return out;
}

// A whole number below 2^62 at `key`.
std::optional<std::int64_t> number_at(const Json& json, const char* key) {
  const auto found = json.find(key);
  if (found == json.end() || !found->is_number_unsigned() ||
      found->get<std::uint64_t>() >= 1ULL << 62) {
    return std::nullopt;
  }
  return found->get<std::int64_t>();
}

bool parse_file(const Json& json, GraphFileInfo& file) {
  if (!json.is_object()) {
    return false;
  }
  const auto name = json.find("name");
  const auto test = json.find("test");
  const auto crc = number_at(json, "crc32c");
  if (name == json.end() || !name->is_string() || test == json.end() || !test->is_boolean() ||
      !crc || *crc > UINT32_MAX) {
    return false;
  }
  file.name = name->get<std::string>();
  file.test = test->get<bool>();
  file.crc32c = static_cast<std::uint32_t>(*crc);
  return std::all_of(kCounts.begin(), kCounts.end(), [&](const Count& count) {
    const auto value = number_at(json, count.key);
    file.*count.value = value.value_or(0);
    const bool later = count.value == &GraphFileInfo::unlabelled_frames;  // Than earlier sets.
    return value.has_value() || (later && !json.contains(count.key));
  });
}

bool parse_metadata(const std::map<std::string, std::string>& metadata, GraphSetInfo& info) {
  const auto text = [&](const char* key) -> std::string {
    const auto found = metadata.find(key);
    return found == metadata.end() ? "" : found->second;
  };
  const Json numbers = Json::parse(text("numbers"), nullptr, false);
  const Json files = Json::parse(text("files"), nullptr, false);
  const Json excluded = Json::parse(text("excluded_files"), nullptr, false);
  if (text(kFormatKey) != kFormat || !numbers.is_object() || !files.is_array() ||
      !excluded.is_array()) {
    return false;
  }
  const auto window = number_at(numbers, "window");
  const auto stride = number_at(numbers, "stride");
  const auto share = numbers.find("validation");
  const auto seed = numbers.find("seed");
  if (!window || *window < 1 || !stride || *stride < 1 || share == numbers.end() ||
      !share->is_number() || seed == numbers.end() || !seed->is_number_unsigned()) {
    return false;
  }
  info.window = *window;
  info.stride = *stride;
  info.seed = seed->get<std::uint64_t>();
  info.validation = share->get<double>();
  info.options = text("options");
  info.fingerprint = text("fingerprint");
  for (const Json& name : excluded) {
    if (!name.is_string()) {
      return false;
    }
    info.excluded_files.push_back(name.get<std::string>());
  }
  return std::all_of(files.begin(), files.end(),
                     [&](const Json& file) { return parse_file(file, info.files.emplace_back()); });
}

}  // namespace

const char* graph_split_name(GraphSplit split) noexcept {
  constexpr std::array kNames{"train", "validation", "test"};
  return kNames[static_cast<std::size_t>(split)];
}

std::int64_t GraphSetInfo::attack_graphs() const noexcept {
  std::int64_t total = 0;
  for (const GraphFileInfo& file : files) {
    total += file.attack_graphs;
  }
  return total;
}

std::vector<TensorSpec> graph_tensor_specs(const GraphSetInfo& info) {
  namespace gt = graph_tensors;
  const auto files = static_cast<std::int64_t>(info.files.size());
  const bool narrow = place_bytes(info.window) == 1;
  return {{gt::kNodePtr, DType::kInt64, {info.graphs + 1}},
          {gt::kEdgePtr, DType::kInt64, {info.graphs + 1}},
          {gt::kFilePtr, DType::kInt64, {files + 1}},
          {gt::kSplitPtr, DType::kInt64, {kGraphSplits + 1}},
          {gt::kSplitGraphs, DType::kInt64, {info.graphs}},
          {gt::kVocabulary, DType::kInt64, {info.ids}},
          {gt::kX, DType::kFloat32, {info.nodes, kGraphFeatures}},
          {gt::kEdgeAttr, DType::kFloat32, {info.edges, kGraphFeatures}},
          {gt::kChecksum, DType::kInt32, {info.graphs}},
          {gt::kEdges, narrow ? DType::kUint8 : DType::kInt32, {info.edges, 2}},
          {gt::kLabels, DType::kUint8, {info.graphs}}};
}

std::map<std::string, std::string> graph_metadata(const GraphSetInfo& info) {
  const Json numbers{{"window", info.window},
                     {"stride", info.stride},
                     {"validation", info.validation},
                     {"seed", info.seed}};
  Json files = Json::array();
  for (const GraphFileInfo& file : info.files) {
    files.push_back(file_json(file));
  }
  const auto dump = [](const Json& json) {
    return json.dump(-1, ' ', false, Json::error_handler_t::replace);
  };
  return {{kFormatKey, kFormat},
          {"numbers", dump(numbers)},
          {"files", dump(files)},
          {"excluded_files", dump(Json(info.excluded_files))},
          {"options", info.options},
          {"fingerprint", info.fingerprint},
          {"node_features", kNodeFeatures},
          {"edge_features", kEdgeFeatures}};
}

std::uint32_t metadata_crc(const std::map<std::string, std::string>& metadata) {
  std::uint32_t crc = 0;
  for (const auto& [key, value] : metadata) {
    if (key != kGraphIndexCrc) {
      const std::string line = fmt::format("{}={}\n", key, value);
      crc = crc32c(std::as_bytes(std::span(line)), crc);
    }
  }
  return crc;
}

Result<GraphSetInfo> parse_graph_header(const SafetensorsReader& reader, const std::string& name) {
  namespace gt = graph_tensors;
  GraphSetInfo info;
  if (!parse_metadata(reader.metadata(), info)) {
    return fail(ErrorCode::kCorrupt, name + ": its metadata is not that of a graph set",
                "import the files again");
  }
  const auto rows = [&](const char* tensor) -> std::int64_t {
    const auto found = reader.find(tensor);
    return found && !(*found)->shape.empty() ? (*found)->shape.front() : -1;
  };
  info.graphs = rows(gt::kLabels);
  info.nodes = rows(gt::kX);
  info.edges = rows(gt::kEdgeAttr);
  info.ids = rows(gt::kVocabulary);
  for (const TensorSpec& spec : graph_tensor_specs(info)) {
    const auto found = reader.find(spec.name);
    if (!found || (*found)->dtype != spec.dtype || (*found)->shape != spec.shape) {
      return fail(ErrorCode::kCorrupt,
                  fmt::format("{}: tensor \"{}\" is missing, or of another type or shape than the "
                              "others say",
                              name, spec.name),
                  "import the files again");
    }
  }
  return info;
}

std::string graph_fingerprint(const std::string& options, const std::vector<GraphFileInfo>& files) {
  std::string text = options + "\n";
  for (const GraphFileInfo& file : files) {
    text += fmt::format("{}|{}|{}|{}\n", file.name, file.bytes, file.crc32c, file.test);
  }
  std::array<unsigned char, EVP_MAX_MD_SIZE> hash{};
  unsigned size = 0;
  PLIMSOLL_CHECK(
      EVP_Digest(text.data(), text.size(), hash.data(), &size, EVP_sha256(), nullptr) == 1,
      "SHA-256 refused bytes");
  std::string out;
  for (std::size_t i = 0; i < 16; ++i) {
    out += fmt::format("{:02x}", hash[i]);
  }
  return out;
}

}  // namespace plimsoll
