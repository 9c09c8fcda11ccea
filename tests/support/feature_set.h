// SPDX-License-Identifier: Apache-2.0
//
// FeatureSet: what a feature store should hold, kept as plain arrays; the oracle of its tests.
//
// Threads: values.   Memory: everything, twice; for small sets.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <unordered_set>
#include <vector>

#include <gtest/gtest.h>

#include "plimsoll/feature_store.h"

namespace plimsoll::test {

/// A directory of its own, removed at the end.
class ScratchDirectory {
 public:
  ScratchDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "plimsoll-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~ScratchDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  [[nodiscard]] std::filesystem::path operator/(const std::string& name) const {
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

inline Governor governor_of(const std::string& limit = "2GiB") {
  return Governor::create({.memory_limit = limit}).or_throw();
}

enum class IdKind { kDense, kShuffled, kSparse };
enum class GroupKind { kNone, kUniform, kVaried };

struct FeatureSet {
  std::vector<ColumnSpec> columns;
  std::vector<std::int64_t> ids;
  std::vector<std::int64_t> groups;            // Group ids per record; empty when not grouped.
  std::vector<std::int64_t> group_index;       // Index of each record's group.
  std::vector<std::vector<std::byte>> values;  // By column: rows × bytes().

  [[nodiscard]] std::int64_t rows() const { return static_cast<std::int64_t>(ids.size()); }

  /// The bytes of column k of record `ordinal`.
  [[nodiscard]] std::span<const std::byte> at(std::int64_t ordinal, std::size_t k) const {
    const auto bytes = static_cast<std::size_t>(columns[k].bytes());
    return std::span(values[k]).subspan(static_cast<std::size_t>(ordinal) * bytes, bytes);
  }
};

inline std::vector<std::int64_t> make_ids(std::mt19937_64& random, std::int64_t rows, IdKind kind) {
  std::vector<std::int64_t> ids;
  if (kind == IdKind::kSparse) {
    std::unordered_set<std::int64_t> seen;
    while (static_cast<std::int64_t>(ids.size()) < rows) {
      const auto id = static_cast<std::int64_t>(random());
      if (seen.insert(id).second) {
        ids.push_back(id);
      }
    }
    return ids;
  }
  for (std::int64_t i = 0; i < rows; ++i) {
    ids.push_back(i);
  }
  if (kind == IdKind::kShuffled) {
    std::shuffle(ids.begin(), ids.end(), random);
  }
  return ids;
}

/// Random finite values: integers of a small range, so that every dtype has them.
inline FeatureSet make_set(std::uint64_t seed, std::int64_t rows, std::vector<ColumnSpec> columns,
                           IdKind id_kind = IdKind::kDense,
                           GroupKind group_kind = GroupKind::kNone) {
  std::mt19937_64 random(seed);
  FeatureSet set;
  set.columns = std::move(columns);
  set.ids = make_ids(random, rows, id_kind);
  for (const ColumnSpec& column : set.columns) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(rows * column.bytes()));
    for (auto& byte : bytes) {
      byte = static_cast<std::byte>(random() & 0x3F);  // No exponent of all ones.
    }
    set.values.push_back(std::move(bytes));
  }
  std::int64_t group = -1;
  std::int64_t left = 0;
  for (std::int64_t i = 0; i < rows && group_kind != GroupKind::kNone; ++i) {
    if (left == 0) {
      ++group;
      left = group_kind == GroupKind::kUniform ? 5 : 1 + static_cast<std::int64_t>(random() % 7);
    }
    --left;
    set.groups.push_back(group * 1000 - 77);
    set.group_index.push_back(group);
  }
  for (std::int64_t i = 0; i < rows && group_kind == GroupKind::kNone; ++i) {
    set.group_index.push_back(i);
  }
  return set;
}

/// Makes some of the records, about `share` of them, repeat one value: those compress.
inline void make_compressible(FeatureSet& set, std::uint64_t seed, double share) {
  std::mt19937_64 random(seed);
  for (std::int64_t i = 0; i < set.rows(); ++i) {
    if (static_cast<double>(random() % 1000) >= share * 1000) {
      continue;
    }
    for (std::size_t k = 0; k < set.columns.size(); ++k) {
      const auto bytes = set.columns[k].bytes();
      std::fill_n(set.values[k].begin() + i * bytes, bytes,
                  static_cast<std::byte>(random() & 0x3F));
    }
  }
}

/// Appends records [begin, end) of the set.
inline Result<void> append_part(FeatureWriter& writer, const FeatureSet& set, std::int64_t begin,
                                std::int64_t end) {
  const auto first = static_cast<std::size_t>(begin);
  const auto count = static_cast<std::size_t>(end - begin);
  std::vector<std::span<const std::byte>> columns;
  for (std::size_t k = 0; k < set.columns.size(); ++k) {
    const auto bytes = static_cast<std::size_t>(set.columns[k].bytes());
    columns.push_back(std::span(set.values[k]).subspan(first * bytes, count * bytes));
  }
  return writer.append(std::span(set.ids).subspan(first, count), columns,
                       set.groups.empty() ? std::span<const std::int64_t>{}
                                          : std::span(set.groups).subspan(first, count));
}

/// Writes the set as a store, in appends of uneven size.
inline Result<void> write_set(Governor governor, const std::filesystem::path& directory,
                              const FeatureSet& set, std::int64_t buffer_bytes = 1 << 20,
                              BlockCompression compression = BlockCompression::kNone) {
  auto writer = FeatureWriter::create(governor, {.directory = directory,
                                                 .columns = set.columns,
                                                 .grouped = !set.groups.empty(),
                                                 .compression = compression,
                                                 .buffer_bytes = buffer_bytes});
  if (!writer) {
    return tl::unexpected(writer.error());
  }
  std::int64_t step = 1;
  for (std::int64_t begin = 0; begin < set.rows();) {
    const std::int64_t end = std::min(set.rows(), begin + step);
    if (auto appended = append_part(*writer, set, begin, end); !appended) {
      return appended;
    }
    begin = end;
    step = step * 3 % 1009 + 1;
  }
  return writer->finish();
}

inline std::vector<std::string> names_in(const std::filesystem::path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace plimsoll::test
