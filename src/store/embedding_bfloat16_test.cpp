// SPDX-License-Identifier: Apache-2.0
//
// Goal: a bfloat16 table takes half the room of a float32 one, says what it is, keeps what it is
// given as well as bfloat16 can, and has the same bits whatever computes them. Method: pairs of
// tables that differ in one thing. (The oracles of both layouts have bfloat16 cases, too.)
#include <bit>
#include <cmath>
#include <fstream>

#include <nlohmann/json.hpp>

#include "base/crc32c.h"
#include "plimsoll/sample_order.h"
#include "store/embedding_description.h"
#include "tests/support/array_files.h"
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;
namespace fs = std::filesystem;

class Bfloat16TableTest : public EmbeddingTableTest,
                          public ::testing::WithParamInterface<RowLayout> {
 protected:
  EmbeddingStoreOptions options(std::int64_t dim, std::int64_t rows) const {
    return {.directory = directory(),
            .dim = dim,
            .dtype = RowDType::kBFloat16,
            .optimizer = {.kind = RowOptimizer::kSgd, .learning_rate = 0.1F},
            .init = {.seed = 4},
            .layout = GetParam(),
            .rows = rows,
            .batch_rows = 256};
  }
  static std::vector<std::int64_t> all_ids(std::int64_t rows) {
    std::vector<std::int64_t> ids(static_cast<std::size_t>(rows));
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<std::int64_t>(i);
    }
    return ids;
  }
};

TEST_P(Bfloat16TableTest, TakesHalfTheRoomOfFloat32) {
  constexpr std::int64_t kRows = 40'000;
  const auto room = [&](RowDType dtype) {
    fs::remove_all(directory());
    EmbeddingStoreOptions how = options(128, kRows);
    how.dtype = dtype;
    how.store_bytes = 256 << 20;  // All of it in RAM, in any order.
    const SlabPlan plan = EmbeddingStore::plan(how).or_throw();
    auto store = open(how);
    std::vector<std::int64_t> ids;
    const SampleOrder order(kRows, how.order_seed, 0);
    for (std::int64_t at = 0; at < kRows; ++at) {
      ids.push_back(order.at(at));
    }
    const std::vector<float> rows(ids.size() * 128, 1.0F);
    store.update(ids, rows).or_throw();
    store.commit(1).or_throw();
    const auto info = EmbeddingStore::inspect(directory()).or_throw();
    EXPECT_EQ(info.dtype, dtype);
    EXPECT_EQ(info.record_bytes, dtype == RowDType::kFloat32 ? 528 : 272);
    return std::array{plan.disk_cap_bytes, info.disk_bytes, plan.frame_bytes};
  };
  const auto whole = room(RowDType::kFloat32);
  const auto half = room(RowDType::kBFloat16);
  const auto ratio = [&](std::size_t i) {
    return static_cast<double>(half[i]) / static_cast<double>(whole[i]);
  };
  EXPECT_NEAR(ratio(1), 0.52, 0.04) << "disk";
  if (GetParam() == RowLayout::kAnyOrder) {
    EXPECT_NEAR(ratio(0), 0.52, 0.04) << "disk, at most";
    EXPECT_NEAR(ratio(2), 0.52, 0.04) << "page frames";
  } else {
    EXPECT_LT(ratio(0), 0.65) << "disk, at most, with the tails of as many buckets";
    EXPECT_LT(ratio(2), 0.8) << "read buffers, which grow with the root of the table";
  }
}

TEST_P(Bfloat16TableTest, SaysWhatItIsAndRefusesToBeAnother) {
  EmbeddingStoreOptions how = options(5, 10);
  open(how).commit(1).or_throw();
  how.dtype = RowDType::kFloat32;
  const auto refused = EmbeddingStore::open(governor_, how);
  ASSERT_FALSE(refused);
  const std::string text = refused.error().to_string();
  EXPECT_NE(text.find("dtype is bfloat16, but float32 was asked for"), std::string::npos) << text;
  how.dtype = RowDType::kBFloat16;
  EXPECT_EQ(open(how).last_commit(), 1);
}

TEST_P(Bfloat16TableTest, ATableThatDoesNotSayItsTypeIsFloat32) {
  EmbeddingStoreOptions how = options(5, 10);
  how.dtype = RowDType::kFloat32;
  open(how).commit(1).or_throw();
  const fs::path path = directory() / table_files::kDescription;
  auto json = nlohmann::json::parse(slurp(path));
  const auto write = [&] {
    json.erase("crc32c");
    const std::string text = json.dump();
    json["crc32c"] = crc32c(std::as_bytes(std::span(text)));
    std::ofstream(path) << json.dump(2);
  };
  EXPECT_EQ(json.at("dtype"), "float32");
  json.erase("dtype");
  write();
  EXPECT_EQ(EmbeddingStore::inspect(directory()).or_throw().dtype, RowDType::kFloat32);
  EXPECT_EQ(open(how).last_commit(), 1);
  for (const char* other : {"bfloat16", "float16"}) {
    json["dtype"] = other;
    write();
    const auto info = EmbeddingStore::inspect(directory());
    ASSERT_FALSE(info) << other;
    EXPECT_EQ(info.error().code, ErrorCode::kCorrupt);
  }
}

TEST_P(Bfloat16TableTest, BeginsAtWhatFloat32BeginsAtRoundedToNearest) {
  EmbeddingStoreOptions how = options(131, 300);
  const auto ids = all_ids(300);
  auto store = open(how);
  const auto got = gather(store, ids);
  how.directory = root_ / "float32";
  how.dtype = RowDType::kFloat32;
  auto whole = open(how);
  auto wanted = gather(whole, ids);
  EXPECT_NE(got, wanted);
  for (float& value : wanted) {
    value = plain_nearest_bfloat16(value);
  }
  EXPECT_EQ(got, wanted);
}

TEST_P(Bfloat16TableTest, RestoresExactlyWhatScanShowed) {
  EmbeddingStoreOptions how = options(33, 500);
  how.optimizer.kind = RowOptimizer::kAdamW;
  const auto ids = all_ids(500);
  auto store = open(how);
  std::mt19937_64 random(2);
  for (int step = 0; step < 5; ++step) {
    const auto some = draw(ids, 200, random);
    store.apply(some, random_floats(some.size() * 33, random)).or_throw();
  }
  how.directory = root_ / "copy";
  auto copy = open(how);
  store
      .scan([&](std::span<const std::int64_t> some, std::span<const std::uint32_t> sequences,
                std::span<const float> values) { return copy.restore(some, sequences, values); })
      .or_throw();
  EXPECT_EQ(all_rows(copy), all_rows(store));
  const auto rows = random_floats(ids.size() * 33, random);
  store.update(ids, rows).or_throw();
  const auto got = gather(store, ids);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    ASSERT_EQ(got[i], plain_nearest_bfloat16(rows[i]));
  }
}

TEST_P(Bfloat16TableTest, HasTheSameBitsWithAnyThreadsAndAnySlab) {
  const auto ids = all_ids(3000);
  const auto train = [&](const char* name, int threads, std::int64_t slab) {
    EmbeddingStoreOptions how = options(70, 3000);
    how.directory = root_ / name;
    how.optimizer.kind = RowOptimizer::kAdam;
    how.compute_threads = threads;
    how = with_floor(how);
    how.store_bytes += slab;
    auto store = open(how);
    std::mt19937_64 random(6);
    for (std::int64_t step = 1; step <= 20; ++step) {
      const auto some = draw(ids, 250, random);
      store.apply(some, random_floats(some.size() * 70, random)).or_throw();
      if (step % 5 == 0) {
        store.commit(step).or_throw();
      }
    }
    return all_rows(store);
  };
  const auto one = train("one", 1, 0);
  EXPECT_EQ(train("three", 3, 0), one);
  EXPECT_EQ(train("large", 2, 16 << 20), one);
}

TEST_P(Bfloat16TableTest, RefusesAGradientThatIsNotFiniteAndChangesNothing) {
  auto store = open(options(3, 10));
  const auto ids = all_ids(10);
  const auto before = gather(store, ids);
  std::vector<float> grads(30, 1.0F);
  grads[17] = std::nanf("");
  const auto refused = store.apply(ids, grads);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().to_string().find("id 5"), std::string::npos);
  EXPECT_EQ(gather(store, ids), before);
}

// Between an odd number of weights and the slots, and behind them: bytes that hold nothing.
TEST_P(Bfloat16TableTest, ChecksumsCoverTheBytesThatHoldNothing) {
  EmbeddingStoreOptions how = options(5, 1);
  how.optimizer.kind = RowOptimizer::kAdagrad;  // 16 + 10, 2 of zeros, 20: 48 in all.
  {
    auto store = open(how);
    const std::vector<std::int64_t> id{0};
    store.apply(id, std::vector<float>(5, 1.0F)).or_throw();
    store.commit(1).or_throw();
  }
  ASSERT_EQ(EmbeddingStore::inspect(directory()).or_throw().record_bytes, 48);
  ASSERT_TRUE(EmbeddingStore::verify(directory(), {}));
  const fs::path rows = directory() / table_files::kRows;
  const std::string sound = slurp(rows);
  for (std::size_t block = 0; block + 4096 <= sound.size(); block += 4096) {
    if (std::all_of(sound.begin() + static_cast<std::ptrdiff_t>(block),
                    sound.begin() + static_cast<std::ptrdiff_t>(block) + 4096,
                    [](char c) { return c == 0; })) {
      continue;
    }
    for (const std::size_t pad : {26U, 27U}) {  // Both layouts have 32 bytes before the first row.
      std::string damaged = sound;
      ASSERT_EQ(damaged[block + 32 + pad], 0);
      damaged[block + 32 + pad] = 1;
      std::ofstream(rows, std::ios::binary) << damaged;
      const auto found = EmbeddingStore::verify(directory(), {});
      ASSERT_FALSE(found) << block << " " << pad;
      EXPECT_EQ(found.error().code, ErrorCode::kCorrupt);
    }
    std::ofstream(rows, std::ios::binary) << sound;
    EXPECT_TRUE(EmbeddingStore::verify(directory(), {}));
    return;
  }
  FAIL() << "no row on disk";
}

// A row whose float32 values are longer than the page that holds it, in the smallest slab.
TEST_P(Bfloat16TableTest, ShowsRowsLongerThanTheirPages) {
  for (const std::int64_t dim : {2'030, 30'000, 140'000}) {
    fs::remove_all(directory());
    EmbeddingStoreOptions how = options(dim, 3);
    how.batch_rows = 3;
    how = with_floor(how);
    auto store = open(how);
    const auto ids = all_ids(3);
    std::mt19937_64 random(5);
    const auto rows = random_floats(static_cast<std::size_t>(3 * dim), random);
    store.update(ids, rows).or_throw();
    store.commit(1).or_throw();
    const auto shown = all_rows(store);
    const auto got = gather(store, ids);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto width = static_cast<std::size_t>(dim);
      EXPECT_TRUE(std::equal(shown.at(ids[i]).weights.begin(), shown.at(ids[i]).weights.end(),
                             got.begin() + static_cast<std::ptrdiff_t>(i * width)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, Bfloat16TableTest, both_layouts(), layout_case);

}  // namespace
}  // namespace plimsoll
