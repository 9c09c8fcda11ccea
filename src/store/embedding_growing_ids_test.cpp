// SPDX-License-Identifier: Apache-2.0
//
// Goal: ids that come and go are found where a plain map has them, places are reused lowest first,
// and what is kept in the file is enough to go on. Method: random adds and removes by seed.
#include "store/embedding_growing_ids.h"

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>

namespace plimsoll {
namespace {

// The bytes that the block map would hold, and what a GrowingIds takes beside them.
struct Held {
  Held(Governor& governor, const GrowthShape& growth)
      : shape(growth),
        slab(Slab::create(governor, Tag::kOther,
                          shape.bytes() + kBlockUnit + GrowingIds::memory_bytes(shape))
                 .or_throw()),
        file(slab.take<std::byte>(shape.bytes(), kBlockUnit)),
        made(IdIndex::open({}, "", IdFingerprint::dense(shape.made), slab, 1, pool).or_throw()),
        ids(shape, made, file, slab) {}

  Result<std::int64_t> add(std::span<const std::int64_t> some) {
    std::array<std::int64_t, 7> scratch;
    return ids.add(some, scratch);
  }

  GrowthShape shape;
  Slab slab;
  IoPool pool{0};
  std::span<std::byte> file;
  IdIndex made;
  GrowingIds ids;
};

class PlainIds {
 public:
  explicit PlainIds(const GrowthShape& shape) : shape_(shape) {
    for (std::int64_t id = 0; id < shape.made; ++id) {
      places_[id] = id;
    }
    for (std::int64_t place = shape.made; place < shape.places; ++place) {
      free_.insert(place);
    }
  }
  std::int64_t add(std::span<const std::int64_t> some) {
    const PlainIds before = *this;
    std::int64_t added = 0;
    for (const std::int64_t id : some) {
      if (places_.contains(id)) {
        continue;
      }
      if (free_.empty()) {
        *this = before;
        return -1;
      }
      places_[id] = *free_.begin();
      free_.erase(free_.begin());
      ++added;
    }
    return added;
  }
  void remove(std::int64_t id) {
    const auto at = places_.find(id);
    if (at->second >= shape_.made) {
      free_.insert(at->second);
    }
    places_.erase(at);
  }
  [[nodiscard]] const std::map<std::int64_t, std::int64_t>& places() const { return places_; }

 private:
  GrowthShape shape_;
  std::map<std::int64_t, std::int64_t> places_;
  std::set<std::int64_t> free_;
};

class GrowingIdsTest : public ::testing::Test {
 protected:
  void TearDown() override { governor_.close(); }
  Governor governor_ = Governor::create({.memory_limit = "1GiB"}).or_throw();
};

void expect_same(const GrowingIds& ids, const PlainIds& plain, std::int64_t universe) {
  std::vector<std::int64_t> asked;
  for (std::int64_t id = -3; id < universe; ++id) {
    asked.push_back(id);
  }
  std::vector<std::int64_t> places(asked.size());
  ids.find(asked, places).or_throw();
  std::set<std::int64_t> held;
  for (std::size_t i = 0; i < asked.size(); ++i) {
    const auto found = plain.places().find(asked[i]);
    ASSERT_EQ(places[i], found == plain.places().end() ? -1 : found->second) << "id " << asked[i];
    if (places[i] >= 0) {
      held.insert(places[i]);
    }
  }
  ASSERT_EQ(ids.rows(), static_cast<std::int64_t>(held.size()));
  for (std::int64_t place = ids.next_held(0); place >= 0; place = ids.next_held(place + 1)) {
    ASSERT_EQ(held.erase(place), 1U) << "place " << place;
  }
  ASSERT_TRUE(held.empty());
}

TEST_F(GrowingIdsTest, FindsWhatAPlainMapFinds) {
  const std::vector<GrowthShape> shapes{{0, 1}, {0, 70}, {64, 64}, {10, 200}, {100, 163}, {5, 900}};
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    for (const GrowthShape& shape : shapes) {
      SCOPED_TRACE(testing::Message()
                   << "seed " << seed << " made " << shape.made << " places " << shape.places);
      std::mt19937_64 random(seed);
      Held held(governor_, shape);
      PlainIds plain(shape);
      const std::int64_t universe = shape.places * 2 + 5;
      for (int round = 0; round < 300; ++round) {
        std::vector<std::int64_t> some(random() % 40);
        for (auto& id : some) {
          id = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(universe));
        }
        if (random() % 2 == 0) {
          ASSERT_EQ(held.add(some).or_throw(), plain.add(some)) << "round " << round;
          held.ids.settle();
        } else {
          std::vector<std::int64_t> places(some.size());
          held.ids.find(some, places).or_throw();
          for (std::size_t i = 0; i < some.size(); ++i) {
            if (plain.places().contains(some[i])) {
              plain.remove(some[i]);
            }
            if (places[i] >= 0) {
              held.ids.remove(places[i]);
            }
          }
        }
        if (round % 10 == 0) {
          expect_same(held.ids, plain, universe);
        }
        if (round % 60 == 59) {  // What the file holds is all there is to know.
          Held other(governor_, shape);
          std::copy(held.file.begin(), held.file.end(), other.file.begin());
          other.ids.adopt().or_throw();
          ASSERT_EQ(other.ids.erased(), held.ids.erased());
          expect_same(other.ids, plain, universe);
        }
        if (testing::Test::HasFatalFailure()) {
          return;
        }
      }
    }
  }
}

TEST_F(GrowingIdsTest, UndoesWhatHasNotBecomeRows) {
  Held held(governor_, {3, 10});
  const std::vector<std::int64_t> first{50, 51, 0};
  EXPECT_EQ(held.add(first).or_throw(), 2);
  held.ids.settle();
  const std::vector<std::byte> before(held.file.begin(), held.file.end());
  const std::vector<std::int64_t> second{60, 61, 60, 50};
  EXPECT_EQ(held.add(second).or_throw(), 2);
  EXPECT_EQ(held.ids.next_new(0), 5);
  EXPECT_EQ(held.ids.next_new(6), 6);
  EXPECT_EQ(held.ids.next_new(7), -1);
  held.ids.undo();
  EXPECT_EQ(held.ids.next_new(0), -1);
  EXPECT_EQ(held.ids.rows(), 5);
  EXPECT_TRUE(std::equal(before.begin(), before.end(), held.file.begin()));
}

TEST_F(GrowingIdsTest, TouchesTheUnitsThatDifferAndNoOthers) {
  const GrowthShape shape{100, 400'000};
  Held held(governor_, shape);
  constexpr std::int64_t kPages = 700;
  auto slab =
      Slab::create(governor_, Tag::kOther, BlockMap::memory_bytes(kPages, 8, shape.bytes()) + 4096)
          .or_throw();
  BlockMap map(kPages, 8, slab, shape.bytes());
  map.files_are_zeros();
  ASSERT_EQ(static_cast<std::int64_t>(map.behind().size()), shape.bytes());
  std::vector<std::byte> file(map.bytes().size());
  std::mt19937_64 random(5);
  for (int commit = 0; commit < 40; ++commit) {
    std::vector<std::int64_t> some(random() % 60);
    for (auto& id : some) {
      id = static_cast<std::int64_t>(random() % 3000);
    }
    std::vector<std::int64_t> places(some.size());
    held.ids.find(some, places).or_throw();
    if (random() % 3 == 0) {
      for (const std::int64_t place : places) {
        held.ids.remove(std::max<std::int64_t>(place, 0));
      }
    } else {
      ASSERT_GE(held.add(some).or_throw(), 0);
      held.ids.settle();
    }
    std::copy(held.file.begin(), held.file.end(), map.behind().begin());
    held.ids.touch(map);
    std::int64_t written = 0;
    for (auto units = map.stale_units(0, 0); units.count > 0;
         units = map.stale_units(0, units.first + units.count)) {
      const auto begin = units.first * kBlockUnit;
      std::copy_n(map.bytes().begin() + begin, units.count * kBlockUnit, file.begin() + begin);
      written += units.count;
    }
    EXPECT_LE(written, 30) << "of " << shape.bytes() / kBlockUnit;
    ASSERT_TRUE(std::equal(file.begin(), file.end(), map.bytes().begin())) << "commit " << commit;
    ASSERT_EQ(map.root(0), chain_root(0, file)) << "commit " << commit;
    map.committed(0);
    map.mark_same(0);
  }
}

TEST_F(GrowingIdsTest, RefusesAFileThatCannotBe) {
  {
    Held twice(governor_, {0, 100});
    const std::vector<std::int64_t> two{7, 8};
    ASSERT_EQ(twice.add(two).or_throw(), 2);
    twice.ids.settle();
    auto* const ids = reinterpret_cast<std::int64_t*>(twice.file.data() + kBlockUnit);
    ids[1] = 7;
    EXPECT_FALSE(twice.ids.adopt());
  }
  {
    Held behind(governor_, {0, 100});
    behind.file[13] = std::byte{0x80};  // Place 111.
    EXPECT_FALSE(behind.ids.adopt());
  }
  Held made(governor_, {10, 100});
  made.file[2] = std::byte{1};  // Place 16 holds id 0, and so does place 0.
  EXPECT_FALSE(made.ids.adopt());
}

}  // namespace
}  // namespace plimsoll
