// SPDX-License-Identifier: Apache-2.0
//
// Goal: an id index answers as a plain map does, however small its buffer and its cache, and says
// so when its files were tampered with.
#include "store/id_index.h"

#include <algorithm>
#include <fstream>
#include <random>
#include <unordered_map>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "memory/slab.h"

namespace plimsoll {
namespace {

class IdIndexTest : public ::testing::Test {
 protected:
  void SetUp() override {
    directory_ = std::filesystem::temp_directory_path() /
                 ("plimsoll-id-index-" + std::to_string(::getpid()));
    std::filesystem::create_directories(directory_);
    governor_ = Governor::create({.memory_limit = "1GiB"}).or_throw();
  }
  void TearDown() override {
    governor_.close();
    std::filesystem::remove_all(directory_);
  }

  Result<IdIndexInfo> build(const std::vector<std::int64_t>& ids, std::int64_t buffer_bytes,
                            std::size_t piece) {
    auto slab = Slab::create(governor_, Tag::kOther, buffer_bytes).or_throw();
    auto writer =
        IdIndexWriter::create(directory_, "t", slab.take<std::byte>(buffer_bytes)).or_throw();
    for (std::size_t at = 0; at < ids.size(); at += piece) {
      auto done = writer.append(std::span(ids).subspan(at, std::min(piece, ids.size() - at)));
      if (!done) {
        return tl::unexpected(std::move(done).error());
      }
    }
    return writer.finish();
  }

  void expect_answers(const std::vector<std::int64_t>& ids, const IdIndexInfo& info,
                      std::int64_t cached_pages, std::uint64_t seed) {
    auto slab = Slab::create(governor_, Tag::kOther, IdIndex::memory_bytes(info, cached_pages) + 1)
                    .or_throw();
    auto index = IdIndex::open(directory_, "t", info, slab, cached_pages).or_throw();
    std::unordered_map<std::int64_t, std::int64_t> oracle;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      oracle[ids[i]] = static_cast<std::int64_t>(i);
    }
    std::mt19937_64 random(seed);
    std::vector<std::int64_t> asked(2000);
    for (auto& id : asked) {
      id = random() % 4 == 0 ? static_cast<std::int64_t>(random()) : ids[random() % ids.size()];
    }
    std::vector<std::int64_t> ordinals(asked.size());
    index.find(asked, ordinals).or_throw();
    for (std::size_t i = 0; i < asked.size(); ++i) {
      const auto found = oracle.find(asked[i]);
      ASSERT_EQ(ordinals[i], found == oracle.end() ? -1 : found->second) << "seed " << seed;
    }
    std::vector<std::int64_t> back(ids.size());
    index.ids_at(0, back).or_throw();
    ASSERT_EQ(back, ids);
    const auto rows = static_cast<std::int64_t>(ids.size());
    std::vector<std::int64_t> tail(static_cast<std::size_t>(std::min<std::int64_t>(rows, 700)));
    const auto first = rows - static_cast<std::int64_t>(tail.size());
    index.ids_at(first, tail).or_throw();
    EXPECT_TRUE(std::equal(tail.begin(), tail.end(), ids.begin() + first));
  }

  std::filesystem::path directory_;
  Governor governor_;
};

std::vector<std::int64_t> distinct_ids(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::int64_t> ids;
  while (ids.size() < count) {
    for (std::size_t i = ids.size(); i < count; ++i) {
      ids.push_back(static_cast<std::int64_t>(random()));
    }
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  }
  std::shuffle(ids.begin(), ids.end(), random);
  return ids;
}

TEST_F(IdIndexTest, AnswersAsAMapDoesForAnyNumberOfRuns) {
  // 64 KiB sort 3,840 entries at a time, 15 runs at a time: 200,000 ids need two merges.
  for (const std::size_t count : {1U, 339U, 340U, 341U, 3839U, 3840U, 3841U, 20'000U, 200'000U}) {
    SCOPED_TRACE(count);
    const auto ids = distinct_ids(count, count);
    const auto info = build(ids, IdIndexWriter::kBufferBytesMin, 777).or_throw();
    EXPECT_FALSE(info.dense);
    EXPECT_EQ(info.rows, static_cast<std::int64_t>(count));
    expect_answers(ids, info, 2, count);
    expect_answers(ids, info, 1 << 20, count);
    EXPECT_TRUE(IdIndex::verify(directory_, "t", info));
    EXPECT_FALSE(std::filesystem::exists(directory_ / "t.runs.0"));
    EXPECT_FALSE(std::filesystem::exists(directory_ / "t.runs.1"));
  }
}

TEST_F(IdIndexTest, KnowsExtremeIds) {
  const std::vector<std::int64_t> ids{INT64_MAX, 0, INT64_MIN, -1, 1};
  const auto info = build(ids, 1 << 16, 2).or_throw();
  expect_answers(ids, info, 1, 5);
}

TEST_F(IdIndexTest, WritesNothingForDenseIds) {
  std::vector<std::int64_t> ids(5000);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<std::int64_t>(i);
  }
  const auto info = build(ids, 1 << 16, 999).or_throw();
  EXPECT_TRUE(info.dense);
  EXPECT_EQ(info, IdFingerprint::dense(5000));
  EXPECT_TRUE(std::filesystem::is_empty(directory_));
  expect_answers(ids, info, 4, 9);
}

TEST_F(IdIndexTest, KeepsDenseBeginningsOfSparseSets) {
  std::vector<std::int64_t> ids(9000);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<std::int64_t>(i);
  }
  ids[8000] = 1'000'000;
  const auto info = build(ids, 1 << 16, 100).or_throw();
  EXPECT_FALSE(info.dense);
  expect_answers(ids, info, 3, 4);
}

TEST_F(IdIndexTest, FingerprintDependsOnIdsAndOrderOnly) {
  const auto ids = distinct_ids(1000, 3);
  IdFingerprint whole;
  whole.add(ids);
  IdFingerprint pieces;
  pieces.add(std::span(ids).first(10));
  pieces.add(std::span(ids).subspan(10));
  EXPECT_EQ(whole.info(), pieces.info());
  auto swapped = ids;
  std::swap(swapped[4], swapped[5]);
  IdFingerprint other;
  other.add(swapped);
  EXPECT_NE(whole.info(), other.info());
  EXPECT_EQ(build(ids, 1 << 16, 64).or_throw(), whole.info());
}

TEST_F(IdIndexTest, NamesADuplicateIdAndLeavesNoFiles) {
  for (const std::size_t count : {100U, 50'000U}) {
    auto ids = distinct_ids(count, 11);
    ids.push_back(ids[17]);
    const auto built = build(ids, 1 << 16, 4096);
    ASSERT_FALSE(built);
    EXPECT_EQ(built.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(built.error().to_string().find("id " + std::to_string(ids[17]) +
                                             " appears twice, at positions 17 and " +
                                             std::to_string(count)),
              std::string::npos)
        << built.error().to_string();
    EXPECT_TRUE(std::filesystem::is_empty(directory_));
  }
}

TEST_F(IdIndexTest, NoticesAFlippedBitAnywhere) {
  const auto ids = distinct_ids(2000, 21);
  const auto info = build(ids, 1 << 16, 4096).or_throw();
  std::mt19937_64 random(7);
  for (const char* name : {"t.ids", "t.order"}) {
    const auto path = directory_ / name;
    for (int trial = 0; trial < 20; ++trial) {
      const auto at = static_cast<std::int64_t>(random() % std::filesystem::file_size(path));
      std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
      file.seekg(at);
      const char before = static_cast<char>(file.get());
      file.seekp(at);
      file.put(static_cast<char>(before ^ (1 << (trial % 8))));
      file.close();
      const auto verdict = IdIndex::verify(directory_, "t", info);
      ASSERT_FALSE(verdict) << name << " at " << at;
      EXPECT_EQ(verdict.error().code, ErrorCode::kCorrupt);
      file.open(path, std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(at);
      file.put(before);
    }
  }
  EXPECT_TRUE(IdIndex::verify(directory_, "t", info));
}

}  // namespace
}  // namespace plimsoll
