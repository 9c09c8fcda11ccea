// SPDX-License-Identifier: Apache-2.0
//
// Goal: an epoch holds every training sample exactly once and nothing held out; batches are the
// same for any number of threads, ring size and point of resumption; the ring never grows and never
// waits for its caller.
// Method: FeatureSet (plain arrays) as the oracle of contents; whole sequences compared.
#include "plimsoll/loader.h"

#include <cstdio>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include <gtest/gtest.h>

#include "data/loader_ring.h"
#include "os/file_faults.h"
#include "tests/support/feature_set.h"

namespace plimsoll {
namespace {

using test::FeatureSet;
using test::GroupKind;
using test::IdKind;
using test::ScratchDirectory;

std::vector<ColumnSpec> two_columns() {
  return {{.name = "image", .dtype = DType::kFloat32, .shape = {20}},
          {.name = "text", .dtype = DType::kFloat16, .shape = {7}}};
}

// A set on disk, opened, and split.
struct Fixture {
  explicit Fixture(std::int64_t rows, GroupKind groups = GroupKind::kNone,
                   std::int64_t held_groups = 0, IdKind ids = IdKind::kSparse)
      : set(test::make_set(31, rows, two_columns(), ids, groups)) {
    test::write_set(governor, scratch / "set", set).or_throw();
    store.emplace(
        FeatureStore::open(governor, {.directory = scratch / "set", .cache_bytes = 256 << 10})
            .or_throw());
    split.emplace(
        Split::create(governor, &*store, {.held_out_groups = held_groups, .seed = 5}).or_throw());
  }
  Loader open(const LoaderOptions& options) {
    return Loader::open(governor, &*store, &*split, options).or_throw();
  }

  ScratchDirectory scratch;
  Governor governor{test::governor_of()};
  FeatureSet set;
  std::optional<FeatureStore> store;
  std::optional<Split> split;
};

// Everything a batch says, copied.
struct Seen {
  std::vector<std::int64_t> ids;
  std::vector<std::int64_t> groups;
  std::vector<std::byte> image;
  std::vector<std::byte> text;
  std::int64_t epoch;
  std::int64_t position;
  bool ends_epoch;
  LoaderState after;
  bool operator==(const Seen&) const = default;
};

Seen copy_of(const Batch& batch) {
  const auto ids = batch.ids();
  const auto groups = batch.groups();
  const auto image = batch.column(0);
  const auto text = batch.column(1);
  return {{ids.begin(), ids.end()},
          {groups.begin(), groups.end()},
          {image.begin(), image.end()},
          {text.begin(), text.end()},
          batch.epoch(),
          batch.position(),
          batch.ends_epoch(),
          batch.state_after()};
}

std::vector<Seen> take(Loader& loader, int batches) {
  std::vector<Seen> seen;
  Batch batch;
  for (int i = 0; i < batches; ++i) {
    loader.next(batch).or_throw();
    seen.push_back(copy_of(batch));
  }
  return seen;
}

class SplitKinds : public ::testing::TestWithParam<GroupKind> {};

TEST_P(SplitKinds, PartsWholeGroupsWithoutOverlapOrGap) {
  Fixture fixture(3000, GetParam(), 123);
  const Split& split = *fixture.split;
  EXPECT_EQ(split.held_out_groups(), 123);
  EXPECT_EQ(split.train_rows() + split.held_out_rows(), 3000);
  std::set<std::int64_t> held_groups;
  std::set<std::int64_t> ordinals;
  for (std::int64_t r = 0; r < split.held_out_rows(); ++r) {
    const std::int64_t ordinal = split.held_out_ordinal(r);
    ordinals.insert(ordinal);
    held_groups.insert(split.group_of(ordinal));
    ASSERT_EQ(split.group_of(ordinal), fixture.set.group_index[static_cast<std::size_t>(ordinal)]);
  }
  EXPECT_EQ(held_groups.size(), 123U);
  std::int64_t last = -1;
  for (std::int64_t r = 0; r < split.train_rows(); ++r) {
    const std::int64_t ordinal = split.train_ordinal(r);
    ASSERT_GT(ordinal, std::exchange(last, ordinal));
    ordinals.insert(ordinal);
    ASSERT_FALSE(held_groups.contains(split.group_of(ordinal)));
  }
  EXPECT_EQ(ordinals.size(), 3000U);
  EXPECT_EQ(*ordinals.begin(), 0);
  EXPECT_EQ(*ordinals.rbegin(), 2999);
}

INSTANTIATE_TEST_SUITE_P(All, SplitKinds,
                         ::testing::Values(GroupKind::kNone, GroupKind::kUniform,
                                           GroupKind::kVaried));

TEST(SplitTest, FollowsItsSeedAndMayHoldOutNothingOrEverything) {
  Fixture fixture(700, GroupKind::kVaried, 40);
  const auto held = [&](std::int64_t groups, std::uint64_t seed) {
    const Split split =
        Split::create(fixture.governor, &*fixture.store, {.held_out_groups = groups, .seed = seed})
            .or_throw();
    std::set<std::int64_t> ordinals;
    for (std::int64_t r = 0; r < split.held_out_rows(); ++r) {
      ordinals.insert(split.held_out_ordinal(r));
    }
    return ordinals;
  };
  const std::int64_t all = fixture.store->info().groups;
  EXPECT_EQ(held(40, 5), held(40, 5));
  EXPECT_NE(held(40, 5), held(40, 6));
  EXPECT_TRUE(held(0, 5).empty());
  EXPECT_EQ(held(all, 5).size(), 700U);
  const auto refused =
      Split::create(fixture.governor, &*fixture.store, {.held_out_groups = all + 1});
  ASSERT_FALSE(refused);
  EXPECT_EQ(*refused.error().detail, "held_out_groups = " + std::to_string(all + 1) +
                                         ": the store has " + std::to_string(all) +
                                         " groups of records");
}

TEST(LoaderTest, HandsOutEveryTrainingSampleOnceAnEpochAndNothingHeldOut) {
  Fixture fixture(2000, GroupKind::kVaried, 50);
  Loader loader = fixture.open({.batch_rows = 64, .threads = 3});
  std::vector<std::vector<std::int64_t>> orders;
  std::map<std::int64_t, std::int64_t> ordinal_of;
  for (std::int64_t i = 0; i < 2000; ++i) {
    ordinal_of[fixture.set.ids[static_cast<std::size_t>(i)]] = i;
  }
  std::set<std::int64_t> trained;
  for (std::int64_t r = 0; r < fixture.split->train_rows(); ++r) {
    trained.insert(fixture.split->train_ordinal(r));
  }
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    std::vector<std::int64_t> order;
    std::int64_t batches = 0;
    for (Batch batch; !batch.ends_epoch();) {
      loader.next(batch).or_throw();
      ++batches;
      ASSERT_EQ(batch.epoch(), epoch);
      ASSERT_EQ(batch.position(), static_cast<std::int64_t>(order.size()));
      ASSERT_EQ(reinterpret_cast<std::uintptr_t>(batch.column(1).data()) % 64, 0U);
      for (std::size_t i = 0; i < batch.ids().size(); ++i) {
        const std::int64_t ordinal = ordinal_of.at(batch.ids()[i]);
        order.push_back(ordinal);
        ASSERT_EQ(batch.groups()[i], fixture.set.group_index[static_cast<std::size_t>(ordinal)]);
        for (int k = 0; k < 2; ++k) {
          const auto expected = fixture.set.at(ordinal, static_cast<std::size_t>(k));
          ASSERT_EQ(std::memcmp(batch.column(k).data() + i * expected.size(), expected.data(),
                                expected.size()),
                    0);
        }
      }
    }
    EXPECT_EQ(batches, loader.batches_per_epoch());
    EXPECT_EQ(order.size(), trained.size());
    EXPECT_EQ(std::set<std::int64_t>(order.begin(), order.end()), trained);
    orders.push_back(order);
  }
  EXPECT_NE(orders[0], orders[1]);
  EXPECT_NE(orders[1], orders[2]);
}

TEST(LoaderTest, BatchesDoNotDependOnThreadsOrRing) {
  Fixture fixture(1500, GroupKind::kUniform, 20);
  std::vector<Seen> first;
  for (const int threads : {1, 2, 4}) {
    for (const std::int64_t slots : {2, 3, 9}) {
      Loader sized = fixture.open({.batch_rows = 100, .threads = 1});
      const std::int64_t queue_bytes = slots * sized.slot_bytes();
      Loader loader = fixture.open({.batch_rows = 100,
                                    .queue_bytes = queue_bytes,
                                    .threads = threads,
                                    .start = {.seed = 9}});
      ASSERT_EQ(loader.slots(), slots);
      const auto seen = take(loader, 40);
      if (first.empty()) {
        first = seen;
      }
      ASSERT_TRUE(seen == first) << threads << " threads, " << slots << " slots";
    }
  }
}

TEST(LoaderTest, ResumingAtAnyStateContinuesTheSequence) {
  for (const bool drop_last : {false, true}) {
    Fixture fixture(530, GroupKind::kNone, 7);
    const LoaderOptions options{.batch_rows = 50, .drop_last = drop_last, .start = {.seed = 3}};
    Loader loader = fixture.open(options);
    const auto all = take(loader, 35);
    for (std::size_t at = 0; at < 30; ++at) {
      ASSERT_TRUE(loader.seek(all[at].after));
      ASSERT_TRUE(take(loader, 5) ==
                  std::vector<Seen>(all.begin() + static_cast<std::ptrdiff_t>(at) + 1,
                                    all.begin() + static_cast<std::ptrdiff_t>(at) + 6))
          << "after batch " << at;
      LoaderOptions reopened = options;
      reopened.start = all[at].after;
      Loader again = fixture.open(reopened);
      ASSERT_TRUE(take(again, 1)[0] == all[at + 1]);
    }
    EXPECT_EQ(all[9].ends_epoch, drop_last);
    EXPECT_EQ(all[10].ends_epoch, !drop_last);
    EXPECT_FALSE(loader.seek({.seed = 3, .epoch = 0, .position = 600}));
  }
}

TEST(LoaderTest, TellsTheIdsOfTheNextBatch) {
  Fixture fixture(400);
  Loader loader = fixture.open({.batch_rows = 64, .threads = 2});
  Batch batch;
  std::vector<std::int64_t> upcoming;
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(loader.upcoming_ids(upcoming));
    loader.next(batch).or_throw();
    ASSERT_EQ(upcoming, std::vector<std::int64_t>(batch.ids().begin(), batch.ids().end()));
  }
}

TEST(LoaderTest, SaysWhoHoldsTheBatchesInsteadOfWaiting) {
  Fixture fixture(1000);
  Loader loader = fixture.open({.batch_rows = 100, .threads = 2});
  ASSERT_EQ(loader.slots(), 4);
  std::vector<Batch> held(5);
  for (std::size_t i = 0; i < 4; ++i) {
    ASSERT_TRUE(loader.next(held[i]));
  }
  const auto refused = loader.next(held[4]);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(*refused.error().detail,
            "4 of 4 batches are still held, the oldest since epoch 0, position 0; there is none "
            "left to fill");
  EXPECT_EQ(std::string(refused.error().advice),
            "drop batches (and tensors made from them) before asking for more, or raise "
            "queue_bytes");
  EXPECT_EQ(held[3].position(), 300);
  held[1] = Batch();
  ASSERT_TRUE(loader.next(held[4]));
  EXPECT_EQ(held[4].position(), 400);
  ASSERT_TRUE(loader.next(held[0])) << "what the argument held is returned first";
  EXPECT_EQ(held[0].position(), 500);
}

TEST(LoaderTest, BatchesOutliveTheirLoaderAndReturnFromAnyThread) {
  Fixture fixture(1000);
  Batch kept;
  std::vector<std::byte> before;
  {
    Loader loader = fixture.open({.batch_rows = 100, .threads = 2});
    std::vector<Batch> passed(2);
    for (int round = 0; round < 20; ++round) {
      for (Batch& batch : passed) {
        ASSERT_TRUE(loader.next(batch));
      }
      std::jthread elsewhere([given = std::move(passed)]() mutable { given.clear(); });
      passed = std::vector<Batch>(2);
    }
    ASSERT_TRUE(loader.next(kept));
    before.assign(kept.column(0).begin(), kept.column(0).end());
  }
  EXPECT_GT(fixture.governor.state().pools[static_cast<std::size_t>(Tag::kLoader)].leased_bytes, 0);
  EXPECT_TRUE(std::equal(before.begin(), before.end(), kept.column(0).begin()));
  kept = Batch();
  EXPECT_EQ(fixture.governor.state().pools[static_cast<std::size_t>(Tag::kLoader)].leased_bytes, 0);
}

TEST(LoaderTest, ASlowConsumerStaysWithinTheRing) {
  Fixture fixture(4000);
  Loader loader = fixture.open({.batch_rows = 100, .queue_bytes = 100 << 10, .threads = 4});
  const auto leased = [&] {
    return fixture.governor.state().pools[static_cast<std::size_t>(Tag::kLoader)].peak_bytes;
  };
  const std::int64_t at_open = leased();
  EXPECT_LE(at_open, (100 << 10) + 4096);
  Batch batch;
  for (int i = 0; i < 10; ++i) {
    loader.next(batch).or_throw();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    // At most the slots that are not held can have been read ahead.
    ASSERT_LE(fixture.store->stats().requests, (i + 1 + loader.slots() - 1) * 100);
  }
  EXPECT_EQ(leased(), at_open);
}

TEST(LoaderTest, ShrinkGivesSlotsBackAndChangesNoBatch) {
  Fixture fixture(2000);
  const LoaderOptions options{.batch_rows = 100, .queue_bytes = 200 << 10, .threads = 2};
  Loader plain = fixture.open(options);
  const auto expected = take(plain, 30);
  Loader loader = fixture.open(options);
  const std::int64_t slots = loader.slots();
  ASSERT_GE(slots, 5);
  auto seen = take(loader, 10);
  const std::int64_t before = fixture.governor.state().leased_bytes;
  loader.shrink(INT64_MAX);
  // Slots that were full or being filled leave when they come back.
  std::vector<Batch> held(3);
  for (Batch& batch : held) {
    loader.next(batch).or_throw();
    seen.push_back(copy_of(batch));
  }
  held.clear();
  for (const Seen& next : take(loader, 17)) {
    seen.push_back(next);
  }
  EXPECT_TRUE(seen == expected);
  EXPECT_LT(loader.slots(), slots);
  EXPECT_LT(fixture.governor.state().leased_bytes, before);
  // Holding every slot that is left brings one back instead of an error.
  std::vector<Batch> many(static_cast<std::size_t>(slots));
  for (Batch& batch : many) {
    ASSERT_TRUE(loader.next(batch));
  }
  Batch last;
  EXPECT_FALSE(loader.next(last));
}

TEST(LoaderTest, GrowsBackToItsSlotsAndStaysSmallWhereMemoryIsRefused) {
  Fixture fixture(2000);
  const LoaderOptions options{.batch_rows = 100, .queue_bytes = 200 << 10, .threads = 2};
  Loader plain = fixture.open(options);
  const auto expected = take(plain, 40);
  Loader loader = fixture.open(options);
  const std::int64_t slots = loader.slots();
  const std::int64_t full = fixture.governor.state().leased_bytes;
  auto seen = take(loader, 10);
  const auto take_more = [&](int count) {
    for (const Seen& next : take(loader, count)) {
      seen.push_back(next);
    }
  };
  loader.shrink(INT64_MAX);
  take_more(10);
  EXPECT_EQ(loader.slots(), 2);  // One was held at a time: two are enough.
  const std::int64_t given = full - fixture.governor.state().leased_bytes;
  EXPECT_EQ(given, (slots - 2) * loader.slot_bytes());

  // A lower limit takes the room; what is asked for then is refused, which is no error.
  const LedgerState now = fixture.governor.state();
  const std::int64_t limit = now.limit_bytes - now.free_bytes() - given;
  ASSERT_TRUE(fixture.governor.set_limit(std::to_string(limit)).or_throw().settled());
  const std::int64_t free = fixture.governor.state().free_bytes();  // Room that others worked in.
  Lease rest = fixture.governor.reserve(Tag::kOther, free).or_throw();
  EXPECT_EQ(loader.grow_back(INT64_MAX), 0);
  take_more(10);
  EXPECT_EQ(loader.slots(), 2);
  {
    std::vector<Batch> held(3);
    EXPECT_TRUE(loader.next(held[0]));
    seen.push_back(copy_of(held[0]));
    EXPECT_TRUE(loader.next(held[1]));
    seen.push_back(copy_of(held[1]));
    const auto third = loader.next(held[2]);
    ASSERT_FALSE(third);
    EXPECT_NE(third.error().to_string().find("were given back, and their memory is refused"),
              std::string::npos)
        << third.error().to_string();
  }
  rest = Lease();
  ASSERT_TRUE(fixture.governor.set_limit(std::to_string(now.limit_bytes)).or_throw().settled());
  EXPECT_EQ(loader.slots(), slots);  // The governor asked it to grow back.
  EXPECT_EQ(fixture.governor.state().leased_bytes, full);
  take_more(8);
  EXPECT_TRUE(seen == expected);
}

TEST(LoaderTest, ABatchThatNeverComesIsAnErrorAfterAWhile) {
  const Governor governor = test::governor_of();
  const BatchRingPlan plan{.slots = 3,
                           .batch_rows = 10,
                           .column_row_bytes = {80},
                           .patience = std::chrono::milliseconds(50)};
  const auto ring = BatchRing::create(governor, plan).or_throw();
  ring->restart({});
  const BatchRing::Claim claim = ring->claim();  // Taken, and not filled.
  ASSERT_NE(claim.slot, nullptr);
  const auto none = ring->take();
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, ErrorCode::kIo);
  EXPECT_NE(none.error().to_string().find("no batch came for 0.1 s: 1 of 3 are being filled"),
            std::string::npos)
      << none.error().to_string();
  ring->filled(claim.slot);
  EXPECT_TRUE(ring->take());  // It may still come.
}

TEST(LoaderTest, AReadErrorComesAtItsBatchAndStaysUntilSeek) {
  Fixture fixture(20'000, GroupKind::kNone, 0, IdKind::kDense);
  Loader loader = fixture.open({.batch_rows = 100, .threads = 1});
  Batch batch;
  ASSERT_TRUE(loader.next(batch));
  int good = 0;
  {
    const ScopedFileFault fault(
        {.call = FileCall::kRead, .nth = 1, .os_errno = 5, .keeps_failing = true});
    for (Result<void> got; got && good < 20; good += got ? 1 : 0) {
      got = loader.next(batch);
      if (!got) {
        EXPECT_EQ(got.error().code, ErrorCode::kIo);
        EXPECT_NE(got.error().to_string().find("records.dat"), std::string::npos);
        EXPECT_FALSE(batch.valid());
      }
    }
    EXPECT_LE(good, 4) << "only what was read before the fault";
    EXPECT_FALSE(loader.next(batch));
  }
  EXPECT_FALSE(loader.next(batch));
  ASSERT_TRUE(loader.seek({.epoch = 0, .position = 200}));
  ASSERT_TRUE(loader.next(batch));
  EXPECT_EQ(batch.position(), 200);
}

TEST(LoaderTest, RefusesWhatCannotWork) {
  Fixture fixture(90);
  const auto text = [&](const LoaderOptions& options) {
    const auto opened = Loader::open(fixture.governor, &*fixture.store, &*fixture.split, options);
    return opened ? std::string() : *opened.error().detail;
  };
  EXPECT_EQ(text({.batch_rows = 50, .queue_bytes = 10'000}),
            "queue_bytes = 10000 is below the 16384 that two batches of 50 rows need");
  EXPECT_EQ(text({.columns = {"pixels"}, .batch_rows = 5}),
            "there is no column \"pixels\"; the store has image, text");
  EXPECT_EQ(text({.batch_rows = 91, .drop_last = true}),
            "90 training samples do not make one batch of 91");
  EXPECT_EQ(text({.batch_rows = 5, .start = {.position = 91}}),
            "a loader cannot start at epoch 0, position 91: an epoch has 90 samples");
  EXPECT_NE(text({.batch_rows = 0}), "");
  EXPECT_NE(text({.batch_rows = 5, .threads = 0}), "");
  EXPECT_EQ(text({.columns = {"text"}, .batch_rows = 90}), "");
}

// One epoch of 6000 records, a page each, in batches of 64 from a cold store with room for 2800.
struct SweepRun {
  std::vector<Seen> seen;
  FeatureStats stats;
};

class LoaderSweepTest : public ::testing::Test {
 protected:
  static constexpr std::int64_t kRows = 6000;
  void SetUp() override {
    const FeatureSet set =
        test::make_set(51, kRows,
                       {{.name = "image", .dtype = DType::kFloat32, .shape = {1000}},
                        {.name = "text", .dtype = DType::kFloat32, .shape = {24}}});
    test::write_set(governor_, scratch_ / "set", set).or_throw();
  }
  FeatureStore open_store(std::int64_t join_gap_bytes) {
    return FeatureStore::open(governor_, {.directory = scratch_ / "set",
                                          .cache_bytes = 12 << 20,
                                          .join_gap_bytes = join_gap_bytes})
        .or_throw();
  }
  SweepRun epoch(std::int64_t sweep_batches, int threads, std::int64_t join_gap_bytes) {
    FeatureStore store = open_store(join_gap_bytes);
    const Split split = Split::create(governor_, &store, {}).or_throw();
    SweepRun run;
    {
      // Two slots: hardly anything of the next epoch is read before the counters are.
      Loader loader = Loader::open(governor_, &store, &split,
                                   {.batch_rows = 64,
                                    .queue_bytes = 600 << 10,
                                    .threads = threads,
                                    .sweep_batches = sweep_batches})
                          .or_throw();
      run.seen = take(loader, static_cast<int>(loader.batches_per_epoch()));
    }
    run.stats = store.stats();
    return run;
  }
  ScratchDirectory scratch_;
  Governor governor_{test::governor_of()};
};

TEST_F(LoaderSweepTest, WiderSweepsGiveTheSameBatchesFromFewerReads) {
  const SweepRun alone = epoch(1, 1, 0);
  for (const std::int64_t gap : {0, 16 << 10}) {
    std::int64_t reads_before = INT64_MAX;
    for (const std::int64_t sweep_batches : {1, 4, 16}) {
      const SweepRun run = epoch(sweep_batches, 1 + static_cast<int>(sweep_batches % 3), gap);
      SCOPED_TRACE("sweep_batches " + std::to_string(sweep_batches));
      EXPECT_TRUE(run.seen == alone.seen);
      // Nothing is read twice; what is beyond the epoch's end is of the window it shares.
      EXPECT_LE(run.stats.blocks_read, kRows + (sweep_batches + 3) * 64);
      EXPECT_LT(run.stats.reads, reads_before);
      reads_before = run.stats.reads;
      if (gap == 0) {
        EXPECT_EQ(run.stats.bytes_read, run.stats.blocks_read * 4096);
      }
      std::printf("sweep_batches %2lld, gap %5lld: %lld reads, %.2f bytes read per byte wanted\n",
                  static_cast<long long>(sweep_batches), static_cast<long long>(gap),
                  static_cast<long long>(run.stats.reads),
                  static_cast<double>(run.stats.bytes_read) /
                      static_cast<double>(run.stats.blocks_read * 4096));
    }
  }
}

TEST_F(LoaderSweepTest, SeekingDropsTheWindowsUnderWay) {
  const SweepRun alone = epoch(1, 1, 0);
  FeatureStore store = open_store(0);
  const Split split = Split::create(governor_, &store, {}).or_throw();
  Loader loader =
      Loader::open(governor_, &store, &split, {.batch_rows = 64, .threads = 3, .sweep_batches = 8})
          .or_throw();
  constexpr std::uint64_t kSeed = 12;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937_64 random(kSeed);
  Batch batch;
  for (int round = 0; round < 60; ++round) {
    const auto at = static_cast<std::size_t>(random() % (alone.seen.size() - 5));
    ASSERT_TRUE(loader.seek({.epoch = 0, .position = static_cast<std::int64_t>(at) * 64}));
    for (std::size_t i = 0; i < random() % 5; ++i) {
      ASSERT_TRUE(loader.next(batch));
      ASSERT_TRUE(copy_of(batch) == alone.seen[at + i]) << "round " << round;
    }
  }
}

TEST_F(LoaderSweepTest, RefusesWindowsThatTheStoreCannotHold) {
  FeatureStore store = open_store(0);
  const Split split = Split::create(governor_, &store, {}).or_throw();
  const auto refused =
      Loader::open(governor_, &store, &split, {.batch_rows = 64, .sweep_batches = 40});
  ASSERT_FALSE(refused);
  EXPECT_EQ(*refused.error().detail,
            "sweep_batches = 40 of 64 rows need room for 5120 blocks of features; there is room "
            "for " +
                std::to_string(store.stats().frames));
  EXPECT_FALSE(Loader::open(governor_, &store, &split, {.batch_rows = 64, .sweep_batches = 0}));
}

}  // namespace
}  // namespace plimsoll
