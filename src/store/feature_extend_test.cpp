// SPDX-License-Identifier: Apache-2.0
//
// Goal: a store that was extended reads as one that was written at once; an extension is there
// whole or not at all, whatever goes wrong; and nobody who reads is disturbed by it.
// Method: FeatureSet (plain arrays) cut into parts at random; kills at every crash point, every
// failing call, a power failure; readers of other processes beside a writer.
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <thread>

#include <sys/wait.h>

#include <gtest/gtest.h>

#include "os/crash_point.h"
#include "os/file_faults.h"
#include "os/power_loss.h"
#include "plimsoll/feature_store.h"
#include "store/feature_block.h"
#include "store/feature_parts.h"
#include "tests/support/array_files.h"
#include "tests/support/feature_set.h"

namespace plimsoll {
namespace {

using test::compare;
using test::extend_set;
using test::FeatureSet;
using test::GroupKind;
using test::IdKind;
using test::ScratchDirectory;
namespace fs = std::filesystem;

std::vector<ColumnSpec> two_columns() {
  return {{.name = "image", .dtype = DType::kFloat32, .shape = {24}},
          {.name = "flag", .dtype = DType::kUint8, .shape = {}}};
}

std::vector<std::int64_t> range(std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> all;
  for (std::int64_t i = begin; i < end; ++i) {
    all.push_back(i);
  }
  return all;
}

// Where a store of these records may be cut: at any record, or between groups.
std::vector<std::int64_t> random_cuts(const FeatureSet& set, std::mt19937_64& random,
                                      std::size_t parts) {
  std::vector<std::int64_t> cuts{0, set.rows()};
  for (std::size_t tries = 0; cuts.size() < parts + 1 && tries < 100 * parts; ++tries) {
    const auto at = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(set.rows()));
    const auto i = static_cast<std::size_t>(at);
    const bool inside = at > 0 && !set.groups.empty() && set.groups[i] == set.groups[i - 1];
    if (!inside && std::find(cuts.begin(), cuts.end(), at) == cuts.end()) {
      cuts.push_back(at);
    }
  }
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

struct Shape {
  IdKind ids;
  GroupKind groups;
  BlockCompression compression;
  std::size_t parts;
  std::int64_t cache_bytes;  // 0: the floor.
};

class FeatureExtendShapes : public ::testing::TestWithParam<Shape> {};

TEST_P(FeatureExtendShapes, ReadAsOneStore) {
  const Shape shape = GetParam();
  if (shape.compression == BlockCompression::kLz4 && !lz4_available()) {
    GTEST_SKIP() << "this build has no LZ4";
  }
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  const std::uint64_t seed = 90 + shape.parts;
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  FeatureSet set = test::make_set(seed, 6000, two_columns(), shape.ids, shape.groups);
  test::make_compressible(set, seed, 0.5);
  const auto cuts = random_cuts(set, random, shape.parts);
  ASSERT_EQ(cuts.size(), shape.parts + 1);
  const fs::path directory = scratch / "set";
  ASSERT_TRUE(test::write_set(governor, directory, test::slice(set, 0, cuts[1]), 1 << 20,
                              shape.compression));
  for (std::size_t p = 1; p < shape.parts; ++p) {
    ASSERT_TRUE(extend_set(governor, directory, set, cuts[p], cuts[p + 1]));
  }
  ASSERT_TRUE(FeatureStore::verify(directory, nullptr));

  const FeatureInfo info = FeatureStore::inspect(directory).or_throw();
  EXPECT_EQ(info.rows, 6000);
  EXPECT_EQ(info.parts, static_cast<std::int64_t>(shape.parts));
  EXPECT_EQ(info.groups, shape.groups == GroupKind::kNone ? 0 : set.group_index.back() + 1);
  const std::int64_t bytes = shape.cache_bytes > 0 ? shape.cache_bytes : info.floor_bytes;
  auto store =
      FeatureStore::open(governor, {.directory = directory, .cache_bytes = bytes}).or_throw();
  EXPECT_LE(governor.state().pools[static_cast<std::size_t>(Tag::kFeature)].leased_bytes,
            bytes + 4095);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::int64_t> ordinals(random() % 5000);
    for (auto& ordinal : ordinals) {
      ordinal = static_cast<std::int64_t>(random() % 6000);
    }
    ASSERT_EQ(compare(store, set, ordinals, {1, 0}, round % 2 == 1), "") << "round " << round;
    std::vector<std::int64_t> ids(ordinals.size());
    ASSERT_TRUE(store.ids_of(ordinals, ids));
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ASSERT_EQ(ids[i], set.ids[static_cast<std::size_t>(ordinals[i])]);
    }
    std::vector<std::int64_t> found(ids.size());
    ids.resize(ids.size() / 2);
    ids.resize(found.size(), INT64_MIN + round);  // None has these.
    ASSERT_TRUE(store.find(ids, found));
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ASSERT_EQ(found[i], i < ids.size() / 2 ? ordinals[i] : -1);
    }
  }
  std::int64_t begin = 0;
  for (std::int64_t g = 0; g < info.groups; ++g) {
    const auto [first, count] = store.group(g).or_throw();
    ASSERT_EQ(first, begin);
    for (std::int64_t i = first; i < first + count; ++i) {
      ASSERT_EQ(set.group_index[static_cast<std::size_t>(i)], g);
    }
    begin += count;
  }
  // Each earlier version can still be opened, and holds what it held.
  for (std::size_t p = 1; p < shape.parts; p += 7) {
    auto old = FeatureStore::open(governor,
                                  {.directory = directory, .parts = static_cast<std::int64_t>(p)})
                   .or_throw();
    ASSERT_EQ(old.info().rows, cuts[p]);
    ASSERT_EQ(compare(old, set, range(0, cuts[p]), {0, 1}, true), "");
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, FeatureExtendShapes,
    ::testing::Values(
        Shape{IdKind::kDense, GroupKind::kNone, BlockCompression::kNone, 2, 0},
        Shape{IdKind::kDense, GroupKind::kUniform, BlockCompression::kLz4, 5, 8 << 20},
        Shape{IdKind::kShuffled, GroupKind::kVaried, BlockCompression::kNone, 17, 0},
        Shape{IdKind::kSparse, GroupKind::kVaried, BlockCompression::kLz4, 9, 0},
        Shape{IdKind::kSparse, GroupKind::kNone, BlockCompression::kNone, 64, 0},
        Shape{IdKind::kSparse, GroupKind::kUniform, BlockCompression::kNone, 64, 32 << 20}));

// 900 records, of which 500 are the store as it was.
class FeatureExtendTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(write_first(directory_)); }
  Result<void> write_first(const fs::path& directory) {
    return test::write_set(governor_, directory, test::slice(set_, 0, 500));
  }
  Result<void> extend(std::int64_t begin = 500, std::int64_t end = 900) {
    return extend_set(governor_, directory_, set_, begin, end, 64 << 10);
  }
  // The rows it holds, all compared with the set; −1: not a sound store of these.
  std::int64_t sound_rows() {
    auto store = FeatureStore::open(governor_, {.directory = directory_});
    if (!store || !FeatureStore::verify(directory_, nullptr)) {
      return -1;
    }
    const std::int64_t rows = store->info().rows;
    return compare(*store, set_, range(0, rows), {0, 1}, true).empty() ? rows : -1;
  }

  ScratchDirectory scratch_{};
  Governor governor_{test::governor_of()};
  fs::path directory_{scratch_ / "set"};
  FeatureSet set_{test::make_set(7, 900, two_columns(), IdKind::kSparse, GroupKind::kUniform)};
};

TEST_F(FeatureExtendTest, LeavesTheOldRecordsOrAllWhereverTheWriterIsKilled) {
  bool old_seen = false;
  bool ended = false;
  for (long nth = 1; !ended; ++nth) {
    ASSERT_LT(nth, 300);
    const pid_t child = ::fork();
    if (child == 0) {
      ::setenv("PLIMSOLL_CRASH", std::string("*:").append(std::to_string(nth)).c_str(), 1);
      reload_crash_points();
      std::_Exit(extend_set(test::governor_of(), directory_, set_, 500, 900, 0) ? 0 : 3);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0) << "point " << nth;
    ended = WIFEXITED(status);
    const std::int64_t rows = sound_rows();
    ASSERT_TRUE(rows == 900 || (!ended && rows == 500)) << rows << " rows, killed at " << nth;
    old_seen = old_seen || rows == 500;
    if (rows == 900) {
      fs::remove_all(feature_part_path(directory_, 1));
    }
  }
  EXPECT_TRUE(old_seen);
  EXPECT_TRUE(extend());  // Over what the killed ones left.
  EXPECT_EQ(sound_rows(), 900);
}

TEST_F(FeatureExtendTest, LeavesTheOldRecordsOrAllWhicheverCallFails) {
  const auto before = test::names_in(directory_);
  for (const FileCall call :
       {FileCall::kWrite, FileCall::kSync, FileCall::kRename, FileCall::kRead}) {
    int failures = 0;
    for (std::int64_t nth = 1;; ++nth) {
      Result<void> result;
      {
        const ScopedFileFault fault({.call = call, .nth = nth, .os_errno = 28});
        result = extend();
      }
      const std::int64_t rows = sound_rows();
      fs::remove_all(feature_part_path(directory_, 1));
      EXPECT_EQ(test::names_in(directory_), before) << "call " << nth;
      if (result) {
        EXPECT_EQ(rows, 900);
        break;
      }
      ++failures;
      EXPECT_EQ(result.error().code, ErrorCode::kIo) << result.error().to_string();
      // A failed sync after the rename leaves a whole part.
      EXPECT_TRUE(rows == 500 || (rows == 900 && call == FileCall::kSync)) << rows;
    }
    EXPECT_GT(failures, 0);
  }
}

TEST_F(FeatureExtendTest, OutlivesAPowerFailureOnceFinished) {
  record_unsynced({});
  const bool extended = extend().has_value();
  strike(
      unsynced_changes(), [](std::size_t, std::int64_t) { return false; }, 512);
  stop_recording_unsynced();
  ASSERT_TRUE(extended);
  EXPECT_EQ(sound_rows(), 900);
}

TEST_F(FeatureExtendTest, AnOpenStoreKeepsTheRecordsThatItWasOpenedWith) {
  auto store = FeatureStore::open(governor_, {.directory = directory_}).or_throw();
  const std::string fingerprint = store.info().fingerprint;
  ASSERT_TRUE(extend());
  EXPECT_EQ(store.info().rows, 500);
  EXPECT_EQ(compare(store, set_, range(0, 500), {0, 1}, true), "");
  std::vector<std::int64_t> found(1);
  ASSERT_TRUE(store.find(std::span(set_.ids).subspan(600, 1), found));
  EXPECT_EQ(found[0], -1);
  auto again = FeatureStore::open(governor_, {.directory = directory_}).or_throw();
  EXPECT_EQ(again.info().rows, 900);
  EXPECT_NE(again.info().fingerprint, fingerprint);
  const auto old = FeatureStore::open(governor_, {.directory = directory_, .parts = 1});
  EXPECT_EQ(old->info().fingerprint, fingerprint);
}

TEST_F(FeatureExtendTest, ReadersOfOtherProcessesSeeWholePartsOnlyBesideAWriter) {
  constexpr std::int64_t kEach = 20;
  const pid_t reader = ::fork();
  if (reader == 0) {  // Exit status: 0 once it has seen every record, else what was wrong.
    Governor governor = test::governor_of();
    for (std::int64_t rows = 0; rows < 900;) {
      auto store = FeatureStore::open(governor, {.directory = directory_});
      if (!store || store->info().rows < rows || (store->info().rows - 500) % kEach != 0) {
        std::_Exit(3);
      }
      rows = store->info().rows;
      if (!compare(*store, set_, range(0, rows), {0, 1}, true).empty()) {
        std::_Exit(4);
      }
    }
    std::_Exit(0);
  }
  for (std::int64_t begin = 500; begin < 900; begin += kEach) {
    ASSERT_TRUE(extend(begin, begin + kEach));
  }
  int status = 0;
  ::waitpid(reader, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST_F(FeatureExtendTest, RefusesASecondWriter) {
  auto first = FeatureWriter::extend(governor_, {.directory = directory_}).or_throw();
  const auto second = FeatureWriter::extend(governor_, {.directory = directory_});
  ASSERT_FALSE(second);
  EXPECT_EQ(*second.error().detail, feature_part_path(directory_, 1).string() +
                                        ".partial: another process is writing there");
  EXPECT_TRUE(test::write_range(first, set_, 500, 900));
  EXPECT_EQ(sound_rows(), 900);
}

TEST_F(FeatureExtendTest, RefusesIdsThatTheStoreHas) {
  ASSERT_TRUE(extend(500, 700));
  set_.ids[800] = set_.ids[600];
  const auto refused = extend(700, 900);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(*refused.error().detail, "record 100 of this part: the store has id " +
                                         std::to_string(set_.ids[600]) + " already, as record 600");
  EXPECT_EQ(sound_rows(), 700);
}

TEST_F(FeatureExtendTest, OfNoRecordsAddsNoPart) {
  const auto before = test::names_in(directory_);
  EXPECT_TRUE(extend(500, 500));
  EXPECT_EQ(test::names_in(directory_), before);
}

TEST_F(FeatureExtendTest, RefusesMorePartsThanAStoreCanHaveAndNamesTheWayOut) {
  for (std::int64_t part = 1; part < kFeaturePartsMax; ++part) {
    ASSERT_TRUE(extend(499 + part, 500 + part));
  }
  const auto refused = extend(800, 801);
  ASSERT_FALSE(refused);
  EXPECT_EQ(*refused.error().detail,
            directory_.string() + ": it has 64 parts, as many as a store can");
  EXPECT_STREQ(refused.error().advice, "join them: plimsoll store compact DIR");
  EXPECT_EQ(sound_rows(), 563);
}

TEST_F(FeatureExtendTest, RefusesPartsThatAreMissingForeignOrMoved) {
  ASSERT_TRUE(extend(500, 700));
  ASSERT_TRUE(extend(700, 900));
  const auto refusal = [&] {
    return FeatureStore::open(governor_, {.directory = directory_}).error().to_string();
  };
  const fs::path one = feature_part_path(directory_, 1);
  const fs::path two = feature_part_path(directory_, 2);
  EXPECT_NE(FeatureStore::open(governor_, {.directory = one})
                .error()
                .to_string()
                .find(one.string() + ": this is one part of a feature store"),
            std::string::npos);
  fs::rename(one, scratch_ / "away");
  EXPECT_NE(refusal().find(one.string() + ": missing, though there is part-000002"),
            std::string::npos);
  fs::rename(two, one);
  EXPECT_NE(refusal().find("features.json: it does not follow the parts before it"),
            std::string::npos);
  fs::rename(one, two);
  fs::rename(scratch_ / "away", one);
  EXPECT_EQ(sound_rows(), 900);
  fs::remove_all(two);
  EXPECT_EQ(sound_rows(), 700);
  EXPECT_NE(FeatureStore::open(governor_, {.directory = directory_, .parts = 3})
                .error()
                .to_string()
                .find("it has 2 parts, not 3"),
            std::string::npos);
}

TEST_F(FeatureExtendTest, FlippedBitsOfAPartAreNoticedOrHarmless) {
  ASSERT_TRUE(extend());
  const fs::path part = feature_part_path(directory_, 1);
  std::mt19937_64 random(5);
  for (const std::string& name : test::names_in(part)) {
    const std::string good = test::slurp(part / name);
    int noticed = 0;
    for (int round = 0; round < 40; ++round) {
      std::string bad = good;
      bad[random() % bad.size()] ^= static_cast<char>(1 << random() % 8);
      test::spill(part / name, bad);
      auto store = FeatureStore::open(governor_, {.directory = directory_});
      const std::string wrong =
          store ? compare(*store, set_, range(0, 900), {0, 1}, true) : store.error().to_string();
      EXPECT_EQ(wrong.find("differs"), std::string::npos) << name;
      noticed += FeatureStore::verify(directory_, nullptr) ? 0 : 1;
    }
    EXPECT_GT(noticed, 0) << name;
    test::spill(part / name, good);
  }
  EXPECT_EQ(sound_rows(), 900);
}

TEST_F(FeatureExtendTest, JoinedPartsAreOneOfTheSameRecordsAndCanBeExtendedAgain) {
  ASSERT_TRUE(extend(500, 700));
  ASSERT_TRUE(extend(700, 800));
  auto open = FeatureStore::open(governor_, {.directory = directory_}).or_throw();
  {
    const auto writer = FeatureWriter::extend(governor_, {.directory = directory_}).or_throw();
    EXPECT_FALSE(FeatureStore::join(governor_, directory_, nullptr)) << "beside a writer";
  }
  std::int64_t seen = 0;
  ASSERT_TRUE(FeatureStore::join(governor_, directory_, [&](std::int64_t done, std::int64_t total) {
    seen = done;
    return total == 800;
  }));
  EXPECT_EQ(seen, 800);
  EXPECT_EQ(test::names_in(scratch_.path()), std::vector<std::string>{"set"});
  EXPECT_EQ(FeatureStore::inspect(directory_)->parts, 1);
  EXPECT_EQ(FeatureStore::inspect(directory_)->uniform_group, 5);
  EXPECT_EQ(sound_rows(), 800);
  EXPECT_EQ(compare(open, set_, range(0, 800), {0, 1}, true), "") << "opened before";
  ASSERT_TRUE(extend(800, 900));
  EXPECT_EQ(sound_rows(), 900);
}

TEST_F(FeatureExtendTest, JoiningLeavesTheSameRecordsWhereverItIsKilled) {
  ASSERT_TRUE(extend(500, 700));
  ASSERT_TRUE(extend(700, 900));
  fs::copy(directory_, scratch_ / "original", fs::copy_options::recursive);
  std::vector<std::int64_t> parts;
  bool left = false;
  bool ended = false;
  for (long nth = 1; !ended; nth += 3) {
    ASSERT_LT(nth, 300);
    const pid_t child = ::fork();
    if (child == 0) {
      ::setenv("PLIMSOLL_CRASH", std::string("*:").append(std::to_string(nth)).c_str(), 1);
      reload_crash_points();
      std::_Exit(FeatureStore::join(test::governor_of(), directory_, nullptr) ? 0 : 3);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0) << "point " << nth;
    ended = WIFEXITED(status);
    ASSERT_EQ(sound_rows(), 900) << "killed at " << nth;
    parts.push_back(FeatureStore::inspect(directory_)->parts);
    if (const fs::path copy = directory_.string() + ".joined"; fs::exists(copy)) {
      left = true;
      EXPECT_NE(FeatureStore::join(governor_, directory_, nullptr)
                    .error()
                    .to_string()
                    .find(copy.string() + ": in the way"),
                std::string::npos);
      fs::remove_all(copy);
    }
    if (!ended && parts.back() == 1) {
      fs::remove_all(directory_);
      fs::copy(scratch_ / "original", directory_, fs::copy_options::recursive);
    }
  }
  EXPECT_EQ(parts.front(), 3);
  EXPECT_EQ(parts.back(), 1);
  EXPECT_TRUE(left);
}

TEST_F(FeatureExtendTest, JoiningIsRefusedWhereItWouldRemoveWhatIsNotTheStores) {
  ASSERT_TRUE(extend(500, 700));
  ASSERT_TRUE(extend(700, 900));
  for (const fs::path& mine : {directory_ / "README.md", directory_ / "part-000001" / "notes",
                               directory_ / "part-000004.partial"}) {
    test::spill(mine, "mine");
    const auto refused = FeatureStore::join(governor_, directory_, nullptr);
    ASSERT_FALSE(refused) << mine;
    EXPECT_NE(refused.error().to_string().find(mine.parent_path().string() + ": holds \"" +
                                               mine.filename().string() + "\""),
              std::string::npos)
        << refused.error().to_string();
    EXPECT_EQ(test::slurp(mine), "mine");
    fs::remove(mine);
  }
  // What comes while it copies, too.
  const auto refused = FeatureStore::join(governor_, directory_, [&](std::int64_t, std::int64_t) {
    test::spill(directory_ / "late", "mine");
    return true;
  });
  EXPECT_FALSE(refused);
  EXPECT_EQ(test::slurp(directory_ / "late"), "mine");
  fs::remove(directory_ / "late");
  fs::remove_all(directory_.string() + ".joined");
  ASSERT_TRUE(FeatureStore::join(governor_, directory_, nullptr));
  EXPECT_EQ(sound_rows(), 900);
}

// A join exchanges the directory between a header and the names beside it, or the files.
TEST_F(FeatureExtendTest, AStoreThatIsOpenedBesideAJoinHoldsAllItsParts) {
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (std::int64_t rows = 500; rows < 900; rows += 5) {
      extend(rows, rows + 5).or_throw();
      FeatureStore::join(governor_, directory_, nullptr).or_throw();
    }
    done = true;
  });
  std::int64_t seen = 500;
  std::int64_t fewer = 0;
  const auto see = [&](std::int64_t rows) {
    fewer += rows < seen ? 1 : 0;
    seen = std::max(seen, rows);
  };
  for (int turn = 0; !done.load(); ++turn) {
    if (const auto info = FeatureStore::inspect(directory_); info) {
      see(info->rows);
    }
    if (turn % 50 != 0) {
      continue;
    }
    if (auto store = FeatureStore::open(governor_, {.directory = directory_}); store) {
      see(store->info().rows);
      EXPECT_EQ(compare(*store, set_, range(0, store->info().rows), {0, 1}, true), "");
    }
  }
  writer.join();
  EXPECT_EQ(fewer, 0);
  EXPECT_GT(seen, 500);
}

TEST_F(FeatureExtendTest, TheFirstPartsFilesStayAsTheyWere) {
  std::vector<std::string> before;
  for (const std::string& name : test::names_in(directory_)) {
    before.push_back(test::slurp(directory_ / name));
  }
  ASSERT_TRUE(extend());
  auto names = test::names_in(directory_);
  ASSERT_EQ(std::erase(names, "part-000001"), 1U);
  ASSERT_EQ(names.size(), before.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(test::slurp(directory_ / names[i]), before[i]) << names[i];
  }
}

}  // namespace
}  // namespace plimsoll
