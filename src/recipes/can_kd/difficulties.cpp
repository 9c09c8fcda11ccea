// SPDX-License-Identifier: Apache-2.0
//
// Threads: see difficulties.h.   Memory: see difficulties.h.
#include "recipes/can_kd/difficulties.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "base/check.h"
#include "base/crc32c.h"
#include "data/safetensors.h"
#include "recipes/can_kd/ordered_float.h"

namespace plimsoll::can_kd {
namespace {

constexpr const char* kFormat = "plimsoll.difficulties.1";
constexpr const char* kTensor = "difficulty";
constexpr std::uint32_t kNanIsHighest = 0xFFFFFFFFU;
constexpr int kDigitBits = 8;
constexpr std::size_t kDigits = std::size_t{1} << kDigitBits;

/// Of everything the file says, so that a changed epoch is noticed as a changed value is.
std::uint32_t checksum(std::span<const float> values, std::int64_t epoch, const std::string& of) {
  const std::string text = fmt::format("{}\n{}\n", epoch, of);
  return crc32c(std::as_bytes(values), crc32c(std::as_bytes(std::span(text))));
}

std::string metadata_at(const SafetensorsReader& reader, const char* key) {
  const auto found = reader.metadata().find(key);
  return found == reader.metadata().end() ? std::string{} : found->second;
}

}  // namespace

float quantile_of(std::span<const float> values, double share) {
  PLIMSOLL_CHECK(share >= 0.0 && share <= 1.0, "a share is in [0, 1]");
  if (values.empty()) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  // A millionth of a place: 0.95 × 20 is 19 although 0.95 is not exact.
  const double place = share * static_cast<double>(values.size() - 1);
  auto rank = static_cast<std::int64_t>(std::ceil(std::max(0.0, place - 1e-6)));
  // Digit by digit from the highest: the digits found so far narrow who is still counted.
  std::uint32_t found = 0;
  std::uint32_t mask = 0;
  for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
    std::array<std::int64_t, kDigits> counts{};
    for (const float value : values) {
      const std::uint32_t bits = ordered_bits(value, kNanIsHighest);
      if ((bits & mask) == found) {
        ++counts[bits >> shift & (kDigits - 1)];
      }
    }
    std::uint32_t digit = 0;
    while (rank >= counts[digit]) {
      rank -= counts[digit++];
    }
    found |= digit << shift;
    mask |= static_cast<std::uint32_t>(kDigits - 1) << shift;
  }
  return from_ordered_bits(found);
}

Difficulties::Difficulties(Lease lease, std::int64_t graphs)
    : lease_(std::move(lease)), values_(static_cast<std::size_t>(graphs), 0.0F) {}

Result<Difficulties> Difficulties::make(Governor governor, std::int64_t graphs) {
  PLIMSOLL_CHECK(graphs >= 0, "a number of graphs is not negative");
  PLIMSOLL_TRY(auto lease,
               governor.reserve(Tag::kOther, graphs * static_cast<std::int64_t>(sizeof(float))));
  return Difficulties{std::move(lease), graphs};
}

Result<Difficulties> Difficulties::load(Governor governor, const std::filesystem::path& path,
                                        std::int64_t graphs, const std::string& of) {
  constexpr const char* kAdvice = "delete it; the graphs are then scored again";
  PLIMSOLL_TRY(const auto reader, SafetensorsReader::open(path));
  PLIMSOLL_TRY(const auto* const entry, reader.find(kTensor));
  if (metadata_at(reader, "format") != kFormat || entry->dtype != DType::kFloat32 ||
      entry->shape.size() != 1) {
    return fail(ErrorCode::kCorrupt, fmt::format("{}: no difficulties of graphs", path.string()),
                kAdvice);
  }
  if (metadata_at(reader, "of") != of || entry->shape[0] != graphs) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: difficulties of {} graphs of {}, where {} of {} are asked for",
                            path.string(), entry->shape[0], metadata_at(reader, "of"), graphs, of),
                kAdvice);
  }
  PLIMSOLL_TRY(auto loaded, make(std::move(governor), graphs));
  PLIMSOLL_TRY_VOID(reader.read(*entry, 0, std::as_writable_bytes(std::span(loaded.values_))));
  const std::string epoch = metadata_at(reader, "epoch");
  const char* end = epoch.data() + epoch.size();
  const bool number = std::from_chars(epoch.data(), end, loaded.epoch_).ptr == end;
  if (!number || epoch.empty() ||
      metadata_at(reader, "crc32c") !=
          std::to_string(checksum(loaded.values_, loaded.epoch_, of))) {
    return fail(ErrorCode::kCorrupt, fmt::format("{}: its checksum differs", path.string()),
                kAdvice);
  }
  return loaded;
}

Result<void> Difficulties::save(const std::filesystem::path& path, const std::string& of) const {
  const std::map<std::string, std::string> metadata{
      {"crc32c", std::to_string(checksum(values_, epoch_, of))},
      {"epoch", std::to_string(epoch_)},
      {"format", kFormat},
      {"of", of}};
  const auto graphs = static_cast<std::int64_t>(values_.size());
  PLIMSOLL_TRY(auto writer,
               SafetensorsWriter::create(path, {{kTensor, DType::kFloat32, {graphs}}}, metadata));
  PLIMSOLL_TRY_VOID(writer.write(std::as_bytes(std::span(values_))));
  return writer.finish();
}

DifficultyPoint Difficulties::point(float threshold) const {
  DifficultyPoint point{epoch_, {}, threshold};
  std::transform(kDifficultyShares.begin(), kDifficultyShares.end(), point.quantiles.begin(),
                 [this](double share) { return quantile_of(values_, share); });
  return point;
}

}  // namespace plimsoll::can_kd
