// SPDX-License-Identifier: Apache-2.0
//
// Goal: a table gives back parts of its slab while it is trained, and takes them again, and nothing
// but its speed depends on it. Method: the operations of the random comparison with a plain map,
// with shrinks and regrowths between them, or from a thread of their own at any moment, while the
// look-ahead and the write-back are at work; bytes leased and resident are compared with what was
// said to be given. Run under TSan by its label.
#include <atomic>
#include <optional>
#include <thread>

#include "plimsoll/bytes.h"
#include "plimsoll/limits.h"
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;
using namespace literals;

constexpr std::int64_t kRegion = 2_MiB;
constexpr std::size_t kRows = 12'000;
constexpr std::int64_t kDim = 128;  // A page of 4 KiB holds two rows: 24 MiB of them.
#ifdef __SANITIZE_ADDRESS__
constexpr double kSlack = 16_MiB;  // What it keeps of freed memory, and its shadow.
#else
constexpr double kSlack = 512_KiB;
#endif

class EmbeddingShrinkTest : public EmbeddingTableTest {
 protected:
  static constexpr std::uint64_t kSeed = 11;

  [[nodiscard]] EmbeddingStoreOptions options(std::int64_t store_bytes) const {
    return {.directory = directory(),
            .dim = kDim,
            .optimizer = {.kind = RowOptimizer::kAdamW, .learning_rate = 0.1F},
            .init = {.kind = RowInitKind::kNormal, .scale = 0.5F, .seed = kSeed},
            .store_bytes = store_bytes,
            .ids = ids_,
            .batch_rows = 512,
            .io_threads = 2,
            .compute_threads = 2};
  }
  [[nodiscard]] std::int64_t leased() const { return governor_.state().leased_bytes; }
  static std::int64_t resident() { return read_resident().or_throw().anonymous; }

  // Reads every row once, in pieces.
  static void read_all(EmbeddingStore& store, const std::vector<std::int64_t>& ids) {
    const std::span<const std::int64_t> all(ids);
    for (std::size_t at = 0; at < all.size(); at += 500) {
      gather(store, all.subspan(at, std::min<std::size_t>(500, all.size() - at)));
    }
  }

  const std::vector<std::int64_t> ids_ = sparse_ids(kRows, kSeed);
};

TEST_F(EmbeddingShrinkTest, GivesBackWhatItSaysAndTakesItAgain) {
  EmbeddingStore store = open(options(16_MiB));
  read_all(store, ids_);
  const SlabPlan full = store.plan();
  const std::int64_t frames = store.stats().frames;
  const std::int64_t leased_full = leased();
  const std::int64_t resident_full = resident();
  ASSERT_EQ(leased_full, full.total_bytes);

  EXPECT_EQ(store.shrink(0), 0);
  EXPECT_EQ(store.shrink(-1), 0);
  const std::int64_t given = store.shrink(3_MiB);
  EXPECT_EQ(given, 2 * kRegion) << "whole regions";
  EXPECT_EQ(leased(), leased_full - given);
  EXPECT_NEAR(static_cast<double>(resident()), static_cast<double>(resident_full - given), kSlack);
  EXPECT_EQ(store.plan().total_bytes, full.total_bytes - given);
  EXPECT_EQ(store.plan().frame_bytes, full.frame_bytes - given);
  const std::int64_t left = frames - given / 4096;
  EXPECT_NEAR(static_cast<double>(store.stats().frames), static_cast<double>(left), 512);
  EXPECT_LE(store.stats().resident_pages, store.stats().frames);

  // As far as the floor, and no further.
  store.shrink(INT64_MAX);
  EXPECT_EQ(store.shrink(kRegion), 0);
  EXPECT_GE(leased(), full.floor_bytes);
  EXPECT_LT(leased(), full.total_bytes - 4 * kRegion);
  EXPECT_EQ(store.plan().floor_bytes, full.floor_bytes);
  read_all(store, ids_);
  EXPECT_NEAR(static_cast<double>(resident()),
              static_cast<double>(resident_full - (leased_full - leased())), kSlack)
      << "pages that were given back are touched";

  EXPECT_EQ(store.grow_back(kRegion - 1), 0);
  EXPECT_EQ(store.grow_back(kRegion), kRegion);
  store.grow_back(INT64_MAX);
  EXPECT_EQ(store.grow_back(INT64_MAX), 0);
  EXPECT_EQ(store.stats().shrinks, 1) << "three requests, all of one shortage";
  EXPECT_EQ(leased(), leased_full);
  EXPECT_EQ(store.stats().frames, frames);
  EXPECT_EQ(store.plan().total_bytes, full.total_bytes);
  read_all(store, ids_);
  EXPECT_GT(store.stats().resident_pages, frames - 128) << "frames that came back are used";
  EXPECT_GT(store.shrink(kRegion), 0);
  EXPECT_EQ(store.stats().shrinks, 2) << "it was whole again";
}

TEST_F(EmbeddingShrinkTest, MovesChangedPagesAndWritesNothing) {
  EmbeddingOracle live(kDim, options(0).optimizer, options(0).init);
  EmbeddingStore store = open(options(16_MiB));
  read_all(store, ids_);
  std::mt19937_64 random(kSeed);
  // Fewer than the write-back begins with, all over the slab.
  const auto some = draw(ids_, 250, random);
  const auto grads = random_floats(some.size() * kDim, random);
  store.apply(some, grads).or_throw();
  live.apply(some, grads, 1.0F);
  const StoreStats before = store.stats();
  ASSERT_GT(before.dirty_bytes, 900_KiB);
  EXPECT_EQ(store.shrink(4 * kRegion), 4 * kRegion);
  const StoreStats after = store.stats();
  EXPECT_EQ(after.pages_written, before.pages_written);
  EXPECT_EQ(after.pages_read, before.pages_read);
  EXPECT_EQ(after.dirty_bytes, before.dirty_bytes);
  expect_rows(store, live, some);
  store.commit(1).or_throw();
  EXPECT_EQ(store.stats().dirty_bytes, 0);
  expect_all_rows(store, live, ids_);
}

TEST_F(EmbeddingShrinkTest, ATableWhollyInMemoryShrinksToo) {
  EmbeddingOracle live(kDim, options(0).optimizer, options(0).init);
  EmbeddingStore store = open(options(64_MiB));
  std::mt19937_64 random(kSeed);
  // Every page is changed, and there is no clean one to make room: the disk must come first.
  const auto values = random_floats(ids_.size() * kDim, random);
  store.update(ids_, values).or_throw();
  live.update(ids_, values);
  const std::int64_t whole = leased();
  EXPECT_EQ(store.shrink(INT64_MAX), 0);
  for (int round = 0; round < 2000 && leased() > whole - 9 * kRegion; ++round) {
    const auto some = draw(ids_, 50, random);
    expect_rows(store, live, some);
  }
  EXPECT_LE(leased(), whole - 9 * kRegion) << "it follows with the requests";
  EXPECT_GT(store.stats().pages_written, 0);
  expect_all_rows(store, live, ids_);
  store.commit(1).or_throw();
  store.grow_back(INT64_MAX);
  EXPECT_EQ(leased(), whole);
  read_all(store, ids_);
  const std::int64_t read = store.stats().pages_read;
  read_all(store, ids_);
  EXPECT_EQ(store.stats().pages_read, read) << "all of it is in memory again";
}

TEST_F(EmbeddingShrinkTest, RowsInSampleOrderGiveNothing) {
  auto how = options(0);
  how.layout = RowLayout::kSampleOrder;
  EmbeddingStore store = open(how);
  const std::int64_t before = leased();
  EXPECT_EQ(store.shrink(INT64_MAX), 0);
  EXPECT_EQ(store.grow_back(INT64_MAX), 0);
  EXPECT_EQ(leased(), before);
}

// Operations of all kinds on a store and a plain map, `between` before each.
template <class Between>
void train_and_compare(EmbeddingStore& store, EmbeddingOracle& live,
                       const std::vector<std::int64_t>& ids, std::mt19937_64& random, int rounds,
                       Between between) {
  std::int64_t step = store.last_commit();
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE("operation " + std::to_string(round));
    between();
    const auto some = draw(ids, 1 + random() % 500, random);
    const auto what = random() % 100;
    std::vector<float> out(some.size() * kDim);
    if (what < 30) {
      store.gather(some, out).or_throw();
      for (std::size_t i = 0; i < some.size(); ++i) {
        // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): bits are compared.
        ASSERT_EQ(0, std::memcmp(live.row(some[i]).weights.data(), &out[i * kDim], kDim * 4))
            << "id " << some[i];
      }
    } else if (what < 60) {
      const auto grads = random_floats(out.size(), random);
      store.apply(some, grads).or_throw();
      live.apply(some, grads, 1.0F);
    } else if (what < 70) {
      const auto values = random_floats(out.size(), random);
      store.update(some, values).or_throw();
      live.update(some, values);
    } else if (what < 95) {
      store.prefetch(some);
    } else {
      store.commit(++step).or_throw();
    }
  }
}

TEST_F(EmbeddingShrinkTest, HoldsWhatAPlainMapHoldsWhateverIsGivenBackBetween) {
  for (const std::int64_t slab : {12_MiB, 64_MiB}) {
    SCOPED_TRACE("seed " + std::to_string(kSeed) + ", slab " + std::to_string(slab));
    std::filesystem::remove_all(directory());
    std::mt19937_64 random(kSeed);
    EmbeddingOracle live(kDim, options(0).optimizer, options(0).init);
    EmbeddingStore store = open(options(slab));
    const std::int64_t whole = leased();
    const std::int64_t floor = store.plan().floor_bytes;
    train_and_compare(store, live, ids_, random, 150, [&] {
      const auto bytes = static_cast<std::int64_t>(random() % 12) * 1_MiB;
      if (const auto what = random() % 4; what == 0) {
        store.shrink(bytes);
      } else if (what == 1) {
        store.grow_back(bytes);
      }
      ASSERT_LE(leased(), whole);
      ASSERT_GE(leased(), floor);
    });
    expect_all_rows(store, live, ids_);
  }
}

TEST_F(EmbeddingShrinkTest, AnotherThreadMayShrinkItAtAnyMoment) {
  for (const std::int64_t slab : {8_MiB, 64_MiB}) {
    SCOPED_TRACE("seed " + std::to_string(kSeed) + ", slab " + std::to_string(slab));
    std::filesystem::remove_all(directory());
    std::mt19937_64 random(kSeed);
    EmbeddingOracle live(kDim, options(0).optimizer, options(0).init);
    EmbeddingStore store = open(options(slab));
    const std::int64_t whole = leased();
    std::atomic<bool> done{false};
    {
      std::jthread shrinker([&] {
        std::mt19937_64 other(kSeed + 1);
        while (!done.load()) {
          const auto bytes = static_cast<std::int64_t>(other() % 30) * 1_MiB;
          if (other() % 2 == 0) {
            store.shrink(bytes);
          } else {
            store.grow_back(bytes);
          }
          std::this_thread::sleep_for(std::chrono::microseconds(other() % 8000));
        }
      });
      train_and_compare(store, live, ids_, random, 120, [] {});
      done = true;
    }
    expect_all_rows(store, live, ids_);
    store.grow_back(INT64_MAX);
    EXPECT_EQ(leased(), whole);
    expect_all_rows(store, live, ids_);
  }
}

}  // namespace
}  // namespace plimsoll
