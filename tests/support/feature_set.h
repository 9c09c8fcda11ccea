// SPDX-License-Identifier: Apache-2.0
//
// FeatureSet: what a feature store should hold, kept as plain arrays; the oracle of its tests.
//
// Threads: values.   Memory: everything, twice; for small sets.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
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
  std::vector<std::int64_t> groups;                // Group ids per record; empty when not grouped.
  std::vector<std::int64_t> group_index;           // Index of each record's group.
  std::vector<std::vector<std::byte>> values;      // By column: all records, one after another.
  std::vector<std::vector<std::int64_t>> lengths;  // By column: of each record; none when fixed.

  [[nodiscard]] std::int64_t rows() const { return static_cast<std::int64_t>(ids.size()); }

  /// Where the bytes of a record begin in values[k].
  [[nodiscard]] std::int64_t offset(std::int64_t ordinal, std::size_t k) const {
    const std::int64_t elements =
        columns[k].ragged()
            ? std::accumulate(lengths[k].begin(), lengths[k].begin() + ordinal, std::int64_t{0})
            : ordinal;
    return elements * columns[k].bytes();
  }
  /// The bytes of column k of records [begin, end).
  [[nodiscard]] std::span<const std::byte> range(std::int64_t begin, std::int64_t end,
                                                 std::size_t k) const {
    const auto first = static_cast<std::size_t>(offset(begin, k));
    return std::span(values[k]).subspan(first, static_cast<std::size_t>(offset(end, k)) - first);
  }
  /// The bytes of column k of record `ordinal`.
  [[nodiscard]] std::span<const std::byte> at(std::int64_t ordinal, std::size_t k) const {
    return range(ordinal, ordinal + 1, k);
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
    auto& lengths = set.lengths.emplace_back();
    for (std::int64_t i = 0; column.ragged() && i < rows; ++i) {  // Of any size, many of them few.
      const auto most = static_cast<std::uint64_t>(column.length_max) >> (random() % 4 * 2);
      lengths.push_back(static_cast<std::int64_t>(random() % (most + 1)));
    }
    std::vector<std::byte> bytes(
        static_cast<std::size_t>(set.offset(rows, set.lengths.size() - 1)));
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
      std::fill_n(set.values[k].begin() + set.offset(i, k), set.at(i, k).size(),
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
  std::vector<std::span<const std::int64_t>> lengths;
  for (std::size_t k = 0; k < set.columns.size(); ++k) {
    columns.push_back(set.range(begin, end, k));
    if (set.columns[k].ragged()) {
      lengths.push_back(std::span(set.lengths[k]).subspan(first, count));
    }
  }
  return writer.append(std::span(set.ids).subspan(first, count), columns,
                       set.groups.empty() ? std::span<const std::int64_t>{}
                                          : std::span(set.groups).subspan(first, count),
                       lengths);
}

/// Appends records [begin, end) in pieces of uneven size, and finishes.
inline Result<void> write_range(FeatureWriter& writer, const FeatureSet& set, std::int64_t begin,
                                std::int64_t end) {
  std::int64_t step = 1;
  while (begin < end) {
    const std::int64_t next = std::min(end, begin + step);
    if (auto appended = append_part(writer, set, begin, next); !appended) {
      return appended;
    }
    begin = next;
    step = step * 3 % 1009 + 1;
  }
  return writer.finish();
}

/// The records [begin, end) as a set of their own.
inline FeatureSet slice(const FeatureSet& set, std::int64_t begin, std::int64_t end) {
  FeatureSet part{.columns = set.columns,
                  .ids = {set.ids.begin() + begin, set.ids.begin() + end},
                  .groups = {},
                  .group_index = {},
                  .values = {},
                  .lengths = {}};
  if (!set.groups.empty()) {
    part.groups.assign(set.groups.begin() + begin, set.groups.begin() + end);
  }
  for (std::size_t k = 0; k < set.columns.size(); ++k) {
    const auto bytes = set.range(begin, end, k);
    part.values.emplace_back(bytes.begin(), bytes.end());
    auto& lengths = part.lengths.emplace_back();
    if (set.columns[k].ragged()) {
      lengths.assign(set.lengths[k].begin() + begin, set.lengths[k].begin() + end);
    }
  }
  return part;
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
  return write_range(*writer, set, 0, set.rows());
}

/// Adds records [begin, end) of the set to a store as a part.
inline Result<void> extend_set(Governor governor, const std::filesystem::path& directory,
                               const FeatureSet& set, std::int64_t begin, std::int64_t end,
                               std::int64_t buffer_bytes = 1 << 20) {
  auto writer =
      FeatureWriter::extend(governor, {.directory = directory, .buffer_bytes = buffer_bytes});
  return writer ? write_range(*writer, set, begin, end) : tl::unexpected(writer.error());
}

/// Reads `ordinals` and compares every byte with the set. Returns a description of a difference.
inline std::string compare(FeatureStore& store, const FeatureSet& set,
                           const std::vector<std::int64_t>& ordinals,
                           const std::vector<int>& columns, bool by_id) {
  std::vector<std::vector<std::byte>> out;
  std::vector<std::span<std::byte>> spans;
  for (const int k : columns) {
    const auto column = static_cast<std::size_t>(k);
    std::size_t bytes = 0;
    for (const std::int64_t ordinal : ordinals) {
      bytes += set.at(ordinal, column).size();
    }
    out.emplace_back(bytes);
  }
  for (auto& bytes : out) {
    spans.emplace_back(bytes);
  }
  std::vector<std::int64_t> keys = ordinals;
  for (auto& key : keys) {
    key = by_id ? set.ids[static_cast<std::size_t>(key)] : key;
  }
  const auto read =
      by_id ? store.read(keys, columns, spans) : store.read_ordinals(keys, columns, spans);
  if (!read) {
    return read.error().to_string();
  }
  for (std::size_t c = 0; c < columns.size(); ++c) {
    const std::byte* at = out[c].data();
    for (std::size_t i = 0; i < ordinals.size(); ++i) {
      const auto expected = set.at(ordinals[i], static_cast<std::size_t>(columns[c]));
      if (!std::equal(expected.begin(), expected.end(), at)) {
        return "row " + std::to_string(i) + " of column " + std::to_string(columns[c]) + " differs";
      }
      at += expected.size();
    }
  }
  return {};
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
