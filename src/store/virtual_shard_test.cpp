// SPDX-License-Identifier: Apache-2.0
//
// Goal: the shard of an id never changes, and rows move by whole shards between the tables of any
// number of ranks without a bit of them, or of what is trained afterwards, being another.
// Method: golden values, computed by a program of its own; a table of all rows beside tables of 1,
// 3, 2 and 5 ranks, which take the same steps and between them deal their shards anew.
#include <limits>

#include "plimsoll/virtual_shard.h"
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;

TEST(VirtualShardTest, IsFrozen) {
  const std::map<std::int64_t, std::int64_t> golden{
      {0, 3618},
      {1, 2320},
      {2, 2421},
      {4095, 3137},
      {4096, 3443},
      {std::int64_t{1} << 32, 3138},
      {std::numeric_limits<std::int64_t>::max(), 678},
      {-1, 3661},
      {std::numeric_limits<std::int64_t>::min(), 1153}};
  for (const auto& [id, shard] : golden) {
    EXPECT_EQ(virtual_shard(id), shard) << "id " << id;
  }
}

TEST(VirtualShardTest, DealsDenseIdsEvenly) {
  constexpr std::int64_t kEach = 256;
  std::vector<std::int64_t> rows(kVirtualShards);
  for (std::int64_t id = 0; id < kEach * kVirtualShards; ++id) {
    ++rows[static_cast<std::size_t>(virtual_shard(id))];
  }
  const auto [least, most] = std::minmax_element(rows.begin(), rows.end());
  EXPECT_GT(*least, kEach - 6 * 16);  // Six standard deviations of a fair deal.
  EXPECT_LT(*most, kEach + 6 * 16);
}

class ShardMoveTest : public EmbeddingTableTest, public ::testing::WithParamInterface<RowLayout> {
 protected:
  static constexpr std::int64_t kDim = 5;

  [[nodiscard]] static std::size_t owner(std::int64_t id, std::size_t ranks) {
    return static_cast<std::size_t>(virtual_shard(id)) * ranks / kVirtualShards;
  }
  [[nodiscard]] std::vector<std::int64_t> owned(std::size_t rank, std::size_t ranks) const {
    std::vector<std::int64_t> ids;
    for (const std::int64_t id : ids_) {
      if (owner(id, ranks) == rank) {
        ids.push_back(id);
      }
    }
    return ids;
  }
  EmbeddingStore open_rank(const std::string& name, std::span<const std::int64_t> ids) {
    return open(with_floor({.directory = root_ / name,
                            .dim = kDim,
                            .dtype = RowDType::kBFloat16,
                            .init = {.seed = 5},
                            .layout = GetParam(),
                            .ids = ids,
                            .rows_max = static_cast<std::int64_t>(ids_.size()),
                            .batch_rows = 128}));
  }

  /// One step of everybody: each rank applies the gradients of its own ids.
  void train(std::mt19937_64& random) {
    const auto some = draw(ids_, 100, random);
    const auto grads = random_floats(some.size() * kDim, random);
    oracle_.apply(some, grads);
    for (std::size_t rank = 0; rank < tables_.size(); ++rank) {
      std::vector<std::int64_t> ids;
      std::vector<float> own;
      for (std::size_t i = 0; i < some.size(); ++i) {
        if (owner(some[i], tables_.size()) == rank) {
          ids.push_back(some[i]);
          own.insert(own.end(), grads.begin() + static_cast<std::ptrdiff_t>(i * kDim),
                     grads.begin() + static_cast<std::ptrdiff_t>((i + 1) * kDim));
        }
      }
      tables_[rank].apply(ids, own).or_throw();
    }
    ++step_;
    for (auto& table : tables_) {
      table.commit(step_).or_throw();
    }
  }

  /// Copies those rows of `from` that rank `rank` of `ranks` owns; returns their ids.
  std::vector<std::int64_t> copy_owned(EmbeddingStore& from, EmbeddingStore& to, std::size_t rank,
                                       std::size_t ranks) {
    std::vector<std::int64_t> moved;
    const auto floats = static_cast<std::size_t>(kDim + from.state_floats());
    from.visit_rows([&](std::span<const std::int64_t> ids, std::span<const std::uint32_t> sequences,
                        std::span<const float> values) -> Result<void> {
          for (std::size_t i = 0; i < ids.size(); ++i) {
            if (owner(ids[i], ranks) == rank) {
              to.insert(ids.subspan(i, 1)).or_throw();
              to.restore(ids.subspan(i, 1), sequences.subspan(i, 1),
                         values.subspan(i * floats, floats))
                  .or_throw();
              moved.push_back(ids[i]);
            }
          }
          return {};
        })
        .or_throw();
    return moved;
  }

  /// Deals the shards to another number of ranks, by moving rows between tables or into new ones.
  void deal(std::size_t ranks) {
    ++deals_;
    const bool erases = GetParam() == RowLayout::kAnyOrder;
    std::vector<EmbeddingStore> old = std::move(tables_);
    tables_.clear();
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const bool stays = erases && rank < old.size();
      tables_.push_back(stays
                            ? std::move(old[rank])
                            : open_rank("rank" + std::to_string(deals_ * 100 + rank),
                                        erases ? std::vector<std::int64_t>{} : owned(rank, ranks)));
    }
    for (std::size_t from = 0; from < old.size(); ++from) {
      EmbeddingStore& source = erases && from < ranks ? tables_[from] : old[from];
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        if (&source == &tables_[rank]) {
          continue;
        }
        const auto moved = copy_owned(source, tables_[rank], rank, ranks);
        if (erases) {
          source.erase(moved).or_throw();
        }
      }
    }
  }

  std::vector<std::int64_t> ids_ = sparse_ids(500, 11);
  EmbeddingOracle oracle_{kDim, {}, {.seed = 5}, RowDType::kBFloat16};
  std::vector<EmbeddingStore> tables_{};
  std::int64_t step_{0};
  std::size_t deals_{0};
};

INSTANTIATE_TEST_SUITE_P(Layouts, ShardMoveTest, both_layouts(), layout_case);

TEST_P(ShardMoveTest, OfWholeShardsChangesNoBitOfAnyRowOrLaterStep) {
  std::mt19937_64 random(3);
  // Rows that came can go and leave their places; those a table was made with keep them.
  const bool erases = GetParam() == RowLayout::kAnyOrder;
  tables_.push_back(open_rank("rank0", erases ? std::vector<std::int64_t>{} : ids_));
  tables_[0].insert(ids_).or_throw();
  for (const std::size_t ranks : {std::size_t{3}, std::size_t{2}, std::size_t{5}}) {
    train(random);
    train(random);
    deal(ranks);
    train(random);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      SCOPED_TRACE(testing::Message() << "rank " << rank << " of " << ranks);
      expect_all_rows(tables_[rank], oracle_, owned(rank, ranks));
    }
  }
}

}  // namespace
}  // namespace plimsoll
