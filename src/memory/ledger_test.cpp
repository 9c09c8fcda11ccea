// SPDX-License-Identifier: Apache-2.0
//
// The sums of a ledger, with numbers chosen here: no measuring, so texts and figures are exact.
#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "memory/ledger.h"
#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

using namespace literals;

struct Bench {
  std::shared_ptr<OrphanAccount> orphans = std::make_shared<OrphanAccount>(0);
  std::shared_ptr<Ledger> ledger;

  explicit Bench(std::int64_t limit = 768_MiB, std::int64_t baseline = 225_MiB) {
    Ledger::Terms terms;
    terms.limit.candidates.push_back({"user", "--memory-limit", limit});
    terms.limit.limit_bytes = limit;
    terms.pressure_fraction = 0.85;
    terms.baseline = {.total = baseline, .anonymous = baseline / 2};
    ledger = std::make_shared<Ledger>(terms, orphans);
  }
};

// Every sum, recomputed from its parts.
void expect_sums_hold(const LedgerState& state) {
  std::int64_t leased = 0;
  std::int64_t committed = 0;
  for (const PoolState& pool : state.pools) {
    ASSERT_GE(pool.leased_bytes, 0);
    ASSERT_LE(pool.leased_bytes, pool.cap_bytes);
    ASSERT_GE(pool.peak_bytes, pool.leased_bytes);
    leased += pool.leased_bytes;
    committed += std::max(pool.floor_bytes, pool.leased_bytes);
  }
  ASSERT_EQ(state.leased_bytes, leased);
  ASSERT_EQ(state.committed_bytes, committed);
  ASSERT_GE(state.leased_peak_bytes, leased);
  ASSERT_GE(state.free_bytes(), 0);
}

TEST(LeaseTest, ReturnsItsBytesWhenDestroyed) {
  const Bench bench;
  {
    const Lease lease = bench.ledger->grant(Tag::kOther, 10_MiB).or_throw();
    EXPECT_EQ(lease.bytes(), 10_MiB);
    EXPECT_EQ(lease.tag(), Tag::kOther);
    EXPECT_EQ(bench.ledger->state().leased_bytes, 10_MiB);
  }
  EXPECT_EQ(bench.ledger->state().leased_bytes, 0);
  EXPECT_EQ(bench.ledger->state().leased_peak_bytes, 10_MiB);
}

TEST(LeaseTest, MovesWithoutLosingOrDoublingBytes) {
  const Bench bench;
  Lease first = bench.ledger->grant(Tag::kOther, 10_MiB).or_throw();
  Lease second = std::move(first);
  EXPECT_EQ(first.bytes(), 0);  // NOLINT(bugprone-use-after-move): what a moved-from lease says.
  EXPECT_EQ(second.bytes(), 10_MiB);
  Lease third = bench.ledger->grant(Tag::kLoader, 3_MiB).or_throw();
  third = std::move(second);  // Its 3 MiB return.
  EXPECT_EQ(third.tag(), Tag::kOther);
  EXPECT_EQ(bench.ledger->state().leased_bytes, 10_MiB);
  first.shrink(0);
  EXPECT_EQ(bench.ledger->state().leased_bytes, 10_MiB);
}

TEST(LeaseTest, GrowsAndShrinksOnlyInItsOwnDirection) {
  const Bench bench;
  Lease lease = bench.ledger->grant(Tag::kOther, 4_MiB).or_throw();
  lease.grow(2_MiB).or_throw();
  EXPECT_EQ(lease.bytes(), 4_MiB);
  lease.shrink(8_MiB);
  EXPECT_EQ(lease.bytes(), 4_MiB);
  lease.grow(9_MiB).or_throw();
  lease.shrink(1_MiB);
  EXPECT_EQ(lease.bytes(), 1_MiB);
  EXPECT_EQ(bench.ledger->state().leased_bytes, 1_MiB);
  EXPECT_FALSE(lease.grow(4_GiB));
  EXPECT_EQ(lease.bytes(), 1_MiB);
}

TEST(LeaseTest, WithoutAGovernorHoldsNothingAndCannotGrow) {
  Lease lease;
  lease.shrink(0);
  lease.grow(0).or_throw();
  EXPECT_EQ(lease.grow(1).error().code, ErrorCode::kInvalidArgument);
}

TEST(LedgerTest, RefusesWithTheNumbersOfEveryHolder) {
  const Bench bench;
  bench.ledger->admit({.tag = Tag::kEmbedding, .floor_bytes = 128_MiB}).or_throw();
  const Lease tensors = bench.ledger->grant(Tag::kTensor, 402_MiB + 512_KiB).or_throw();
  const auto refused = bench.ledger->grant(Tag::kTensor, 64_MiB);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kOverBudget);
  EXPECT_EQ(refused.error().available_bytes, 12_MiB + 512_KiB);
  EXPECT_EQ(refused.error().to_string(),
            "tensors wanted 64.0 MiB, 12.5 MiB free of the 768.0 MiB limit "
            "(held: tensors 402.5 MiB, rows 128.0 MiB; baseline 225.0 MiB): "
            "raise memory_limit or lower batch_size");
  EXPECT_TRUE(bench.ledger->grant(Tag::kTensor, 12_MiB + 512_KiB));
  EXPECT_FALSE(bench.ledger->grant(Tag::kTensor, -1));
}

TEST(LedgerTest, KeepsAPromisedFloorForItsOwnTag) {
  const Bench bench(100_MiB, 0);
  bench.ledger->admit({.tag = Tag::kEmbedding, .floor_bytes = 60_MiB}).or_throw();
  EXPECT_FALSE(bench.ledger->grant(Tag::kTensor, 41_MiB));
  const Lease tensors = bench.ledger->grant(Tag::kTensor, 40_MiB).or_throw();
  EXPECT_EQ(bench.ledger->state().free_bytes(), 0);
  const Lease rows = bench.ledger->grant(Tag::kEmbedding, 60_MiB).or_throw();
  EXPECT_FALSE(bench.ledger->grant(Tag::kEmbedding, 1));
  expect_sums_hold(bench.ledger->state());
}

TEST(LedgerTest, NamesTheSmallestLimitWhenAFloorDoesNotFit) {
  const Bench bench;
  const auto refused = bench.ledger->admit({.tag = Tag::kFeature, .floor_bytes = 600_MiB});
  ASSERT_FALSE(refused);
  const Error& error = refused.error();
  EXPECT_EQ(error.smallest_limit_bytes,
            error.limit_bytes + error.requested_bytes - error.available_bytes);
  EXPECT_EQ(error.to_string(),
            "features wanted 600.0 MiB, 543.0 MiB free of the 768.0 MiB limit "
            "(baseline 225.0 MiB): this takes a limit of at least 825MiB; "
            "raise memory_limit or lower cache_bytes");
  const Bench larger(825_MiB);
  EXPECT_TRUE(larger.ledger->admit({.tag = Tag::kFeature, .floor_bytes = 600_MiB}));
}

TEST(LedgerTest, CapsAPoolAndNamesTheOptionToRaise) {
  const Bench bench;
  bench.ledger->admit({.tag = Tag::kFeature, .cap_bytes = 128_MiB, .option = "--set cache_bytes"})
      .or_throw();
  const Lease held = bench.ledger->grant(Tag::kFeature, 100_MiB).or_throw();
  const auto refused = bench.ledger->grant(Tag::kFeature, 64_MiB);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().to_string(),
            "features wanted 64.0 MiB, 28.0 MiB free of their 128.0 MiB cap: "
            "raise --set cache_bytes");
}

TEST(LedgerTest, AddsUpAdmissionsOfOneTagAndTakesThemBack) {
  const Bench bench;
  const PoolSpec first{.tag = Tag::kEmbedding, .floor_bytes = 10_MiB, .cap_bytes = 20_MiB};
  const PoolSpec second{.tag = Tag::kEmbedding, .floor_bytes = 5_MiB, .cap_bytes = 30_MiB};
  const PoolSpec uncapped{.tag = Tag::kEmbedding, .floor_bytes = 1_MiB};
  const auto pool = [&] {
    return bench.ledger->state().pools[static_cast<std::size_t>(Tag::kEmbedding)];
  };
  bench.ledger->admit(first).or_throw();
  bench.ledger->admit(second).or_throw();
  EXPECT_EQ(pool().floor_bytes, 15_MiB);
  EXPECT_EQ(pool().cap_bytes, 50_MiB);
  bench.ledger->admit(uncapped).or_throw();
  EXPECT_EQ(pool().cap_bytes, kUncapped);
  bench.ledger->release_admission(uncapped);
  EXPECT_EQ(pool().cap_bytes, 50_MiB);
  bench.ledger->release_admission(first);
  EXPECT_EQ(pool().floor_bytes, 5_MiB);
  EXPECT_EQ(pool().cap_bytes, 30_MiB);
  bench.ledger->release_admission(second);
  bench.ledger->release_admission(second);  // Once too often: nothing to take back.
  EXPECT_EQ(pool().floor_bytes, 0);
  EXPECT_EQ(pool().cap_bytes, kUncapped);
  EXPECT_EQ(bench.ledger->state().committed_bytes, 0);
}

TEST(LedgerTest, RefusesAFloorAboveItsCap) {
  const Bench bench;
  const auto bad = bench.ledger->admit({.floor_bytes = 2_MiB, .cap_bytes = 1_MiB});
  ASSERT_FALSE(bad);
  EXPECT_EQ(bad.error().code, ErrorCode::kInvalidArgument);
}

TEST(LedgerTest, CountsOrphansAgainstItsSuccessor) {
  Bench old(100_MiB, 0);
  Lease orphan = old.ledger->grant(Tag::kTensor, 30_MiB).or_throw();
  old.ledger->close();
  old.ledger->close();
  EXPECT_EQ(old.orphans->load(), 30_MiB);
  EXPECT_EQ(old.ledger->grant(Tag::kTensor, 1).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(orphan.grow(31_MiB).error().code, ErrorCode::kInvalidArgument);

  const auto next = std::make_shared<Ledger>(old.ledger->terms(), old.orphans);
  EXPECT_EQ(next->state().free_bytes(), 70_MiB);
  EXPECT_FALSE(next->grant(Tag::kOther, 71_MiB));
  orphan.shrink(10_MiB);
  EXPECT_EQ(next->state().free_bytes(), 90_MiB);
  orphan = Lease();
  EXPECT_EQ(next->state().free_bytes(), 100_MiB);
  EXPECT_EQ(old.orphans->load(), 0);
}

TEST(LedgerTest, LeavesTheBaselineAloneWhileAnythingIsLeased) {
  const Bench bench;
  {
    const Lease lease = bench.ledger->grant(Tag::kOther, 1).or_throw();
    EXPECT_EQ(bench.ledger->rebaseline({.total = 1_MiB, .anonymous = 0}).total, 225_MiB);
  }
  EXPECT_EQ(bench.ledger->rebaseline({.total = 1_MiB, .anonymous = 0}).total, 1_MiB);
  EXPECT_EQ(bench.ledger->state().baseline_bytes, 1_MiB);
}

TEST(LedgerTest, WhatWentBackToTheSystemLeavesTheBaselineAndIsFreeAgain) {
  Bench bench;
  const std::int64_t free = bench.ledger->state().free_bytes();
  const Lease lease = bench.ledger->grant(Tag::kTensor, 40_MiB).or_throw();
  EXPECT_EQ(bench.ledger->lower_baseline({.total = 40_MiB, .anonymous = 30_MiB}).total, 185_MiB);
  EXPECT_EQ(bench.ledger->baseline().anonymous, 225_MiB / 2 - 30_MiB);
  EXPECT_EQ(bench.ledger->state().free_bytes(), free);
  EXPECT_EQ(bench.ledger->lower_baseline({.total = 999_MiB, .anonymous = 999_MiB}).total, 0);
  EXPECT_EQ(bench.ledger->baseline().anonymous, 0);
}

TEST(LedgerTest, PrintsAnAlignedTable) {
  const Bench bench;
  bench.ledger->admit({.tag = Tag::kEmbedding, .floor_bytes = 128_MiB, .cap_bytes = 1_GiB})
      .or_throw();
  const Lease tensors = bench.ledger->grant(Tag::kTensor, 300_MiB).or_throw();
  EXPECT_EQ(bench.ledger->state().to_string(),
            "owner            floor      leased        peak         cap\n"
            "tensors            0 B   300.0 MiB   300.0 MiB           -\n"
            "rows         128.0 MiB         0 B         0 B     1.0 GiB\n"
            "baseline                 225.0 MiB\n"
            "committed                428.0 MiB\n"
            "free                     115.0 MiB\n"
            "limit                    768.0 MiB\n");
}

// Goal: no interleaving of threads breaks a sum or passes the limit.
// Method: each thread makes random moves on its own leases, checking the whole ledger after each.
TEST(LedgerPropertyTest, SumsHoldAfterEveryMoveOfManyThreads) {
  constexpr int kThreads = 4;
  constexpr int kMoves = 4000;
  constexpr std::uint64_t kSeed = 31;
  const Bench bench(100_MiB, 20_MiB);
  bench.ledger->admit({.tag = Tag::kEmbedding, .floor_bytes = 50_MiB, .cap_bytes = 90_MiB})
      .or_throw();
  std::atomic<std::int64_t> refused{0};
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937_64 random(kSeed + static_cast<std::uint64_t>(t));
        std::array<Lease, 8> leases;
        for (int move = 0; move < kMoves; ++move) {
          Lease& lease = leases[random() % leases.size()];
          const auto bytes = static_cast<std::int64_t>(random() % (20U << 20U));
          bool fine = true;
          switch (random() % 4) {
            case 0: {
              auto granted = bench.ledger->grant(static_cast<Tag>(random() % kTagCount), bytes);
              fine = granted.has_value();
              if (fine) {
                lease = *std::move(granted);
              }
              break;
            }
            case 1:
              fine = lease.tag() == Tag::kOther || lease.bytes() == 0 || lease.grow(bytes);
              break;
            case 2:
              lease.shrink(bytes);
              break;
            default:
              lease = Lease();
          }
          refused += fine ? 0 : 1;
          expect_sums_hold(bench.ledger->state());
          if (testing::Test::HasFatalFailure()) {
            ADD_FAILURE() << "seed " << kSeed << ", thread " << t << ", move " << move;
            return;
          }
        }
      });
    }
  }
  EXPECT_GT(refused.load(), 0);  // Or the limit was never tried.
  EXPECT_EQ(bench.ledger->state().leased_bytes, 0);
  EXPECT_EQ(bench.ledger->state().committed_bytes, 50_MiB);
}

// Goal: an admission and its release, among leases, leave the oracle's numbers.
TEST(LedgerPropertyTest, AgreesWithAPlainRecordOfFloorsAndLeases) {
  constexpr std::uint64_t kSeed = 77;
  std::mt19937_64 random(kSeed);
  const Bench bench(300_MiB, 0);
  std::vector<PoolSpec> admitted;
  std::vector<Lease> leases;
  for (int move = 0; move < 5000; ++move) {
    const auto tag = static_cast<Tag>(random() % kTagCount);
    const auto bytes = static_cast<std::int64_t>(random() % (30U << 20U));
    const auto choice = random() % 4;
    if (choice == 0) {
      const PoolSpec spec{.tag = tag, .floor_bytes = bytes};
      if (bench.ledger->admit(spec)) {
        admitted.push_back(spec);
      }
    } else if (choice == 1 && !admitted.empty()) {
      bench.ledger->release_admission(admitted.back());
      admitted.pop_back();
    } else if (choice == 2) {
      if (auto lease = bench.ledger->grant(tag, bytes); lease) {
        leases.push_back(*std::move(lease));
      }
    } else if (!leases.empty()) {
      leases.erase(leases.begin() + static_cast<std::ptrdiff_t>(random() % leases.size()));
    }
    std::array<PoolState, kTagCount> expected{};
    for (const PoolSpec& spec : admitted) {
      expected[static_cast<std::size_t>(spec.tag)].floor_bytes += spec.floor_bytes;
    }
    for (const Lease& lease : leases) {
      expected[static_cast<std::size_t>(lease.tag())].leased_bytes += lease.bytes();
    }
    const LedgerState state = bench.ledger->state();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      ASSERT_EQ(state.pools[i].floor_bytes, expected[i].floor_bytes) << kSeed << " " << move;
      ASSERT_EQ(state.pools[i].leased_bytes, expected[i].leased_bytes) << kSeed << " " << move;
    }
    ASSERT_NO_FATAL_FAILURE(expect_sums_hold(state)) << "seed " << kSeed << ", move " << move;
  }
}

}  // namespace
}  // namespace plimsoll
