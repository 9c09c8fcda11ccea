// SPDX-License-Identifier: Apache-2.0
#include "data/can_road.h"

#include <system_error>
#include <utility>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "os/file.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

tl::unexpected<Error> unreadable(const fs::path& path, const std::string& what) {
  return fail(
      ErrorCode::kCorrupt, fmt::format("{}: {}", path.string(), what),
      "get the file again, or pass --dialect candump (dialect) to take all frames as normal");
}

std::string text_at(const Json& of, const char* key) {
  const auto found = of.find(key);
  return found != of.end() && found->is_string() ? found->get<std::string>() : std::string();
}

}  // namespace

bool RoadLabels::injected(const CanFrame& frame, const CanTime& first,
                          const CanTime& now) const noexcept {
  constexpr double kBillionth = 1e-9;
  constexpr std::string_view kDigits = "0123456789abcdef";
  const double since = static_cast<double>(now.whole - first.whole) +
                       static_cast<double>(now.fraction - first.fraction) * kBillionth;
  if (!known || since < begin || since > end || (id && *id != frame.id)) {
    return false;
  }
  for (std::size_t i = 0; i < payload.size() && i < 2 * frame.bytes.size(); ++i) {
    const std::uint8_t byte = frame.bytes[i / 2];
    const char digit = kDigits[i % 2 == 0 ? byte >> 4 : byte & 15];
    if (payload[i] != 'x' && payload[i] != digit) {
      return false;
    }
  }
  return true;
}

Result<std::optional<RoadLabels>> road_labels(const fs::path& capture) {
  const fs::path path = capture.parent_path() / kRoadMetadata;
  std::error_code status;
  if (!fs::exists(path, status)) {
    return std::optional<RoadLabels>();
  }
  PLIMSOLL_TRY(const std::string text, read_small_file(path, kRoadMetadataMost));
  const Json all = Json::parse(text, nullptr, false);
  if (!all.is_object()) {
    return unreadable(path, "not a JSON object");
  }
  fs::path name = capture.filename();
  auto found = all.find(name.string());
  while (found == all.end() && name.has_extension()) {  // a.log.gz, a.log, a.
    name = name.stem();
    found = all.find(name.string());
  }
  if (found == all.end()) {
    return std::optional<RoadLabels>();
  }
  if (!found->is_object()) {
    return unreadable(path, fmt::format("\"{}\" is not an object", name.string()));
  }
  RoadLabels labels;
  const auto interval = found->find("injection_interval");
  if (interval == found->end() || interval->is_null()) {
    return std::optional(labels);
  }
  if (!interval->is_array() || interval->size() != 2 || !(*interval)[0].is_number() ||
      !(*interval)[1].is_number()) {
    return unreadable(
        path, fmt::format("the injection_interval of \"{}\" is no two numbers", name.string()));
  }
  labels.known = true;
  labels.begin = (*interval)[0].get<double>();
  labels.end = (*interval)[1].get<double>();
  const std::string id = can_lower(text_at(*found, "injection_id"));
  std::uint32_t number = 0;
  if (parse_can_id(id, false, number)) {
    labels.id = number;
  } else if (id.find_first_not_of('x') != std::string::npos) {
    return unreadable(path, fmt::format("the injection_id of \"{}\" is no id", name.string()));
  }
  labels.payload = can_lower(text_at(*found, "injection_data_str"));
  if (labels.payload.find_first_not_of("0123456789abcdefx") != std::string::npos) {
    return unreadable(path,
                      fmt::format("the injection_data_str of \"{}\" is no payload", name.string()));
  }
  return std::optional(std::move(labels));
}

}  // namespace plimsoll
