// SPDX-License-Identifier: Apache-2.0
//
// What the embedding store's tests share: a directory, a governor, ids and values by seed.
//
// Threads: single-owner.   Memory: for tests.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <filesystem>
#include <map>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "plimsoll/embedding_store.h"
#include "plimsoll/governor.h"
#include "tests/support/embedding_oracle.h"

namespace plimsoll::test {

/// For tests of what must hold of rows in any order and of rows in sample order.
inline auto both_layouts() {
  return ::testing::Values(RowLayout::kAnyOrder, RowLayout::kSampleOrder);
}
inline std::string layout_case(const ::testing::TestParamInfo<RowLayout>& info) {
  return info.param == RowLayout::kAnyOrder ? "AnyOrder" : "SampleOrder";
}

/// Distinct 64-bit ids, shuffled: none is next to another but by chance.
inline std::vector<std::int64_t> sparse_ids(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::int64_t> ids;
  while (ids.size() < count) {
    ids.push_back(static_cast<std::int64_t>(random()));
    if (ids.size() == count) {
      std::sort(ids.begin(), ids.end());
      ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    }
  }
  std::shuffle(ids.begin(), ids.end(), random);
  return ids;
}

inline std::vector<float> random_floats(std::size_t count, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) {
    value = normal(random);
  }
  return values;
}

/// `count` of `ids`, drawn with repetition.
inline std::vector<std::int64_t> draw(const std::vector<std::int64_t>& ids, std::size_t count,
                                      std::mt19937_64& random) {
  std::vector<std::int64_t> drawn(count);
  for (auto& id : drawn) {
    id = ids[random() % ids.size()];
  }
  return drawn;
}

class EmbeddingTableTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = std::filesystem::temp_directory_path() /
            ("plimsoll-embedding-" + std::to_string(::getpid()));
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_);
    governor_ = Governor::create({.memory_limit = "2GiB"}).or_throw();
  }
  void TearDown() override {
    governor_.close();
    std::filesystem::remove_all(root_);
  }

  [[nodiscard]] std::filesystem::path directory() const { return root_ / "table"; }

  /// The smallest slab this table can have.
  static EmbeddingStoreOptions with_floor(EmbeddingStoreOptions options) {
    options.store_bytes = 0;
    options.store_bytes = EmbeddingStore::plan(options).or_throw().floor_bytes;
    return options;
  }
  EmbeddingStore open(const EmbeddingStoreOptions& options) {
    return EmbeddingStore::open(governor_, options).or_throw();
  }

  static std::vector<float> gather(EmbeddingStore& store, std::span<const std::int64_t> ids) {
    std::vector<float> out(ids.size() * static_cast<std::size_t>(store.dim()));
    store.gather(ids, out).or_throw();
    return out;
  }

  /// Every row of the store, by id.
  static std::map<std::int64_t, OracleRow> all_rows(EmbeddingStore& store) {
    std::map<std::int64_t, OracleRow> rows;
    const auto dim = store.dim();
    const auto floats = dim + store.state_floats();
    store
        .scan([&](std::span<const std::int64_t> ids, std::span<const std::uint32_t> sequences,
                  std::span<const float> values) -> Result<void> {
          for (std::size_t i = 0; i < ids.size(); ++i) {
            const float* at = values.data() + static_cast<std::int64_t>(i) * floats;
            OracleRow row;
            row.sequence = sequences[i];
            row.weights.assign(at, at + dim);
            row.slot1.assign(static_cast<std::size_t>(dim), 0.0F);
            row.slot2.assign(static_cast<std::size_t>(dim), 0.0F);
            for (std::int64_t k = 0; k < dim; ++k) {
              const auto to = static_cast<std::size_t>(k);
              row.slot1[to] = store.slots() > 0 ? at[dim + k] : 0.0F;
              row.slot2[to] = store.slots() > 1 ? at[2 * dim + k] : 0.0F;
            }
            if (store.state_floats() == 1 && dim > 1) {  // One for the whole row.
              row.slot1[0] = at[dim];
            }
            EXPECT_TRUE(rows.emplace(ids[i], std::move(row)).second) << "id " << ids[i] << " twice";
          }
          return {};
        })
        .or_throw();
    return rows;
  }

  /// Compares gather() of `ids` with the oracle, bit by bit.
  static void expect_rows(EmbeddingStore& store, EmbeddingOracle& oracle,
                          std::span<const std::int64_t> ids) {
    const auto got = gather(store, ids);
    const auto dim = static_cast<std::size_t>(store.dim());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto& wanted = oracle.row(ids[i]).weights;
      for (std::size_t k = 0; k < dim; ++k) {
        ASSERT_EQ(std::bit_cast<std::uint32_t>(got[i * dim + k]),
                  std::bit_cast<std::uint32_t>(wanted[k]))
            << "id " << ids[i] << " position " << i << " column " << k << ": " << got[i * dim + k]
            << " and " << wanted[k];
      }
    }
  }

  /// Compares every row, slots and sequences included.
  static void expect_all_rows(EmbeddingStore& store, EmbeddingOracle& oracle,
                              std::span<const std::int64_t> ids) {
    const auto rows = all_rows(store);
    ASSERT_EQ(rows.size(), ids.size());
    for (const std::int64_t id : ids) {
      const auto found = rows.find(id);
      ASSERT_NE(found, rows.end()) << "id " << id;
      ASSERT_EQ(found->second, oracle.row(id)) << "id " << id;
    }
  }

  std::filesystem::path root_;
  Governor governor_;
};

}  // namespace plimsoll::test
