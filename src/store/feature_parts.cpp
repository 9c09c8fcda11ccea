// SPDX-License-Identifier: Apache-2.0
//
// FeatureParts: see feature_parts.h.
//
// Threads, Memory: as the header says.
#include "store/feature_parts.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <system_error>
#include <utility>

#include <fmt/core.h>

#include "base/check.h"
#include "base/philox.h"
#include "store/feature_plan.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kPartDigits = 6;
constexpr const char* kPartialSuffix = ".partial";

// Every file a writer may leave in DIRECTORY.partial.
constexpr std::array<const char*, 19> kPartialFiles{
    kFeatureRecordsFile, kFeatureChecksumsFile, kFeatureIdsFile,     kFeatureGroupsFile,
    kFeatureHeaderFile,  kFeaturePlacesFile,    kFeatureLengthsFile, "features.json.new",
    kFeatureBlocksFile,  "index.ids",           "index.order",       "index.spans",
    "index.runs.0",      "index.runs.1",        "group_check.ids",   "group_check.order",
    "group_check.spans", "group_check.runs.0",  "group_check.runs.1"};

std::string part_name(std::int64_t number) {
  return fmt::format("part-{:0{}}", number, kPartDigits);
}

// Of a part behind the first, by its name; 0: it is none's.
std::int64_t part_number(const std::string& name) {
  const std::int64_t number = name.starts_with("part-") && name.size() == 5 + kPartDigits
                                  ? std::strtoll(name.c_str() + 5, nullptr, 10)
                                  : 0;
  return number > 0 && name == part_name(number) ? number : 0;
}

// Of the parts behind the first, ascending.
Result<std::vector<std::int64_t>> numbers_in(const fs::path& directory) {
  std::vector<std::int64_t> numbers;
  PLIMSOLL_TRY(const auto names, names_in(directory));
  for (const std::string& name : names) {
    if (const std::int64_t number = part_number(name); number > 0) {
      numbers.push_back(number);
    }
  }
  return numbers;
}

std::uint64_t number_of(const std::string& fingerprint) {
  return std::strtoull(fingerprint.c_str(), nullptr, 16);
}

// Adds a part, or says why it cannot follow.
Result<void> add_part(FeatureParts& all, fs::path directory, FeatureHeader header) {
  if (!all.parts.empty()) {
    const FeatureHeader& first = all.first();
    const bool grouped = header.groups > 0;
    if (header.after != all.fingerprint || header.layout.columns != first.layout.columns ||
        header.stored.compression != first.stored.compression ||
        (header.rows > 0 && all.rows > 0 && grouped != (all.groups > 0))) {
      return fail(
          ErrorCode::kCorrupt,
          fmt::format("{}: it does not follow the parts before it",
                      (directory / kFeatureHeaderFile).string()),
          "parts belong to the store that they were written for, in the order of their numbers");
    }
  }
  const std::string own = header.fingerprint();
  all.fingerprint =
      all.parts.empty()
          ? own
          : fmt::format("{:016x}", mix64(mix64(number_of(all.fingerprint)) ^ number_of(own)));
  if (header.groups > 0) {
    all.uniform_group =
        all.groups == 0 || all.uniform_group == header.uniform_group ? header.uniform_group : 0;
  }
  const std::int64_t rows = header.rows;
  all.blocks += header.blocks();
  all.records_file_bytes += header.records_file_bytes();
  const std::int64_t groups = header.groups;
  all.parts.push_back({std::move(directory), std::move(header), all.rows, all.groups});
  all.rows += rows;
  all.groups += groups;
  return {};
}

}  // namespace

std::size_t FeatureParts::part_of(std::int64_t ordinal) const noexcept {
  const auto behind = std::upper_bound(
      parts.begin(), parts.end(), ordinal,
      [](std::int64_t row, const FeaturePart& part) { return row < part.first_row; });
  return static_cast<std::size_t>(behind - parts.begin()) - 1;
}

FeatureInfo FeatureParts::info() const {
  FeatureInfo info;
  info.rows = rows;
  info.columns = first().layout.columns;
  info.record_bytes = first().layout.record_bytes_max();
  info.floor_bytes = feature_floor_bytes(*this);
  info.compression = first().stored.compression;
  info.block_bytes = first().layout.block_bytes;
  info.blocks = blocks;
  info.stored_bytes = records_file_bytes;
  info.dense_ids = parts.size() == 1 && first().ids.dense;
  info.groups = groups;
  info.uniform_group = uniform_group;
  info.parts = static_cast<std::int64_t>(parts.size());
  info.fingerprint = fingerprint;
  for (const FeaturePart& part : parts) {
    info.plain_blocks +=
        part.header.compressed() ? part.header.stored.plain_blocks : part.header.blocks();
    std::error_code ignored;
    for (const std::string& name : names_in(part.directory).value_or(std::vector<std::string>{})) {
      const auto size = fs::file_size(part.directory / name, ignored);
      info.disk_bytes += ignored ? 0 : static_cast<std::int64_t>(size);
    }
  }
  return info;
}

fs::path feature_part_path(const fs::path& directory, std::int64_t number) {
  return number == 0 ? directory : directory / part_name(number);
}

Result<PartialDirectory> start_partial(const fs::path& target) {
  return PartialDirectory::create(target, PartialDirectory::Target::kNew, kPartialSuffix,
                                  kPartialFiles);
}

Result<void> expect_only_features(const fs::path& directory, std::int64_t parts) {
  for (std::int64_t part = 0; part < parts; ++part) {
    const fs::path path = feature_part_path(directory, part);
    PLIMSOLL_TRY(const auto names, names_in(path));
    for (const std::string& name : names) {
      const std::int64_t number = part_number(name);
      const bool is_part =
          (number > 0 && number < parts) || name == part_name(parts) + kPartialSuffix;
      if (!(part == 0 && is_part) &&
          std::count(kPartialFiles.begin(), kPartialFiles.end(), name) == 0) {
        return fail(ErrorCode::kInvalidArgument,
                    fmt::format("{}: holds \"{}\", which is no part of a feature store",
                                path.string(), name),
                    "move it elsewhere first");
      }
    }
  }
  return {};
}

namespace {

// As read_feature_parts(), of a store that nobody joins meanwhile.
Result<FeatureParts> read_parts(const fs::path& directory, FeatureHeader first,
                                std::int64_t wanted) {
  FeatureParts all;
  if (!first.after.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                directory.string() + ": this is one part of a feature store",
                "name the directory above it");
  }
  PLIMSOLL_TRY_VOID(add_part(all, directory, std::move(first)));
  PLIMSOLL_TRY(const auto numbers, numbers_in(directory));
  const auto there = static_cast<std::int64_t>(numbers.size()) + 1;
  if (wanted > there) {
    return fail(ErrorCode::kNotFound,
                fmt::format("{}: it has {} parts, not {}", directory.string(), there, wanted));
  }
  for (std::int64_t number = 1; number < (wanted > 0 ? wanted : there); ++number) {
    const fs::path path = feature_part_path(directory, number);
    if (numbers[static_cast<std::size_t>(number - 1)] != number || number >= kFeaturePartsMax) {
      return fail(ErrorCode::kCorrupt, number < kFeaturePartsMax
                                           ? fmt::format("{}: missing, though there is {}",
                                                         path.string(), part_name(numbers.back()))
                                           : fmt::format("{}: a store has at most {} parts",
                                                         directory.string(), kFeaturePartsMax));
    }
    auto header = read_feature_header(path);
    if (!header && header.error().code == ErrorCode::kNotFound) {
      return fail(ErrorCode::kCorrupt, (path / kFeatureHeaderFile).string() + ": missing");
    }
    PLIMSOLL_TRY(FeatureHeader part, std::move(header));
    PLIMSOLL_TRY_VOID(add_part(all, path, std::move(part)));
  }
  return all;
}

}  // namespace

Result<FeatureParts> read_feature_parts(const fs::path& directory, std::int64_t wanted) {
  for (;;) {  // Again only after a join, which takes as long as copying the store.
    PLIMSOLL_TRY(FeatureHeader first, read_feature_header(directory));
    const std::string before = first.fingerprint();
    auto parts = read_parts(directory, std::move(first), wanted);
    PLIMSOLL_TRY(const FeatureHeader now, read_feature_header(directory));
    if (now.fingerprint() == before) {
      return parts;
    }
  }
}

}  // namespace plimsoll
