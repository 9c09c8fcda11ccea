// SPDX-License-Identifier: Apache-2.0
//
// Goal: an id index answers as a plain map does, however small its buffer and its cache, and says
// so when its files were tampered with.
#include "store/id_index.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <numeric>
#include <random>
#include <thread>
#include <unordered_map>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "memory/slab.h"
#include "os/file_faults.h"
#include "store/id_page.h"

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
    auto index = IdIndex::open(directory_, "t", info, slab, cached_pages, pool_).or_throw();
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
  IoPool pool_{2};
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

TEST_F(IdIndexTest, TakesAsManyPagesAsTheBytesHold) {
  for (const std::int64_t rows : {1, 340, 341, 100'000, 4'000'000}) {
    const IdIndexInfo info{.rows = rows, .dense = false};
    const std::int64_t all = (rows + kIdsPerSortedPage - 1) / kIdsPerSortedPage;
    EXPECT_LE(IdIndex::memory_bytes(info, all), rows * 16 + 24'000) << rows;
    const std::int64_t least = IdIndex::memory_bytes(info, 2);
    for (const std::int64_t room : {0, 1000, 6000, 400'000, 3'000'000, 100'000'000}) {
      const std::int64_t pages = IdIndex::pages_within(info, least + room, 2);
      EXPECT_GE(pages, 2);
      EXPECT_LE(IdIndex::memory_bytes(info, pages), least + room) << rows << " " << room;
      EXPECT_TRUE(pages >= all || IdIndex::memory_bytes(info, pages + 1) > least + room)
          << rows << " " << room;
    }
  }
}

// The look-ups of several threads meet in a cache of a few pages; some of them read.
TEST_F(IdIndexTest, ThreadsFindWhatAMapHolds) {
  const auto ids = distinct_ids(50'000, 31);
  const auto info = build(ids, 1 << 16, 4096).or_throw();
  auto slab = Slab::create(governor_, Tag::kOther, IdIndex::memory_bytes(info, 20) + 1).or_throw();
  const auto index = IdIndex::open(directory_, "t", info, slab, 20, pool_).or_throw();
  std::atomic<int> wrong{0};
  {
    std::vector<std::jthread> threads;
    for (std::uint64_t t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937_64 random(t);
        std::vector<std::int64_t> asked(500);
        std::vector<std::int64_t> positions(asked.size());
        std::vector<std::int64_t> ordinals(asked.size());
        for (int round = 0; round < 20; ++round) {
          for (std::size_t i = 0; i < asked.size(); ++i) {
            positions[i] = static_cast<std::int64_t>(random() % ids.size());
            asked[i] = ids[static_cast<std::size_t>(positions[i])];
          }
          index.find(asked, ordinals).or_throw();
          wrong += ordinals == positions ? 0 : 1;
        }
      });
    }
  }
  EXPECT_EQ(wrong.load(), 0);
}

TEST_F(IdIndexTest, LooksUpOnlyWhatIsLeft) {
  for (const bool dense : {false, true}) {
    auto ids = distinct_ids(5000, 12);
    if (dense) {
      std::iota(ids.begin(), ids.end(), 0);
    }
    const auto info = build(ids, 1 << 16, 4096).or_throw();
    auto slab = Slab::create(governor_, Tag::kOther, IdIndex::memory_bytes(info, 2) + 1).or_throw();
    const auto index = IdIndex::open(directory_, "t", info, slab, 2, pool_).or_throw();
    std::vector<std::int64_t> ordinals(ids.size(), -1);
    ordinals[7] = 123'456;
    ordinals[4000] = 0;
    index.find_rest(ids, ordinals).or_throw();
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto there = static_cast<std::int64_t>(i);
      ASSERT_EQ(ordinals[i], i == 7 ? 123'456 : i == 4000 ? 0 : there);
    }
  }
}

// What the disk did to a page after the index was opened, or does to a read of it.
TEST_F(IdIndexTest, SaysSoWhenAPageCannotBeReadAndGoesOnWhenItCan) {
  const auto ids = distinct_ids(20'000, 13);
  const auto info = build(ids, 1 << 16, 4096).or_throw();
  auto slab = Slab::create(governor_, Tag::kOther, IdIndex::memory_bytes(info, 4) + 1).or_throw();
  const auto index = IdIndex::open(directory_, "t", info, slab, 4, pool_).or_throw();
  std::vector<std::int64_t> ordinals(ids.size());
  std::vector<std::int64_t> positions(ids.size());
  std::iota(positions.begin(), positions.end(), 0);
  for (const std::int64_t nth : {1, 2, 17, 55}) {
    const ScopedFileFault armed({.call = FileCall::kRead, .nth = nth, .os_errno = EIO});
    const auto failed = index.find(ids, ordinals);
    ASSERT_FALSE(failed) << nth;
    EXPECT_EQ(failed.error().os_errno, EIO);
  }
  for (const FileCall call : {FileCall::kRead, FileCall::kAioRead}) {
    const ScopedFileFault cut(
        {.call = call, .nth = 3, .os_errno = 0, .short_bytes = 512, .keeps_failing = false});
    index.find(ids, ordinals).or_throw();
    EXPECT_EQ(ordinals, positions);
  }
  const auto flip = [&] {
    std::fstream file(directory_ / "t.ids", std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(30 * kIdPageBytes + 100);
    const char before = static_cast<char>(file.get());
    file.seekp(30 * kIdPageBytes + 100);
    file.put(static_cast<char>(before ^ 4));
  };
  flip();
  const auto corrupt = index.find(ids, ordinals);
  ASSERT_FALSE(corrupt);
  EXPECT_NE(corrupt.error().to_string().find("t.ids: page 30 fails its checksum"),
            std::string::npos);
  flip();
  index.find(ids, ordinals).or_throw();
  EXPECT_EQ(ordinals, positions);
}

// Few ids far from the others, ids in clusters, all in one: wherever a search begins, it finds
// them.
TEST_F(IdIndexTest, FindsIdsHoweverUnevenlyTheyAreSpread) {
  for (const int kind : {0, 1, 2, 3}) {
    SCOPED_TRACE(kind);
    std::mt19937_64 random(static_cast<std::uint64_t>(kind));
    std::vector<std::int64_t> ids;
    for (std::int64_t i = 0; i < 30'000; ++i) {
      const std::int64_t near = 3 * i;  // Not consecutive: kept as pages.
      ids.push_back(kind == 0   ? near
                    : kind == 1 ? near - 40'000
                    : kind == 2 ? (near << 20) + (i / 5000 << 50)
                                : INT64_MIN + near);
    }
    if (kind > 0) {
      ids.push_back(INT64_MAX);
    }
    std::shuffle(ids.begin(), ids.end(), random);
    const auto info = build(ids, 1 << 16, 4096).or_throw();
    ASSERT_EQ(info.spans, 0);
    expect_answers(ids, info, 5, 1);
    expect_answers(ids, info, 1 << 20, 2);
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

// Ascending ids in spans of up to `longest`, the first from `first` on.
std::vector<std::int64_t> ids_in_spans(std::size_t count, std::int64_t first, std::uint64_t longest,
                                       std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::int64_t> ids;
  for (std::int64_t next = first; ids.size() < count;) {
    for (std::uint64_t left = 1 + random() % longest; left > 0 && ids.size() < count; --left) {
      ids.push_back(next);
      next += ids.size() < count ? 1 : 0;  // The last may be the last there is.
    }
    const auto gap = 1 + static_cast<std::int64_t>(random() % 1000);
    next += ids.size() < count ? gap : 0;
  }
  return ids;
}

TEST_F(IdIndexTest, KeepsSpansOfAscendingIdsAndNothingElse) {
  for (const std::int64_t first : {INT64_MIN, std::int64_t{-40'000}, std::int64_t{3}}) {
    for (const std::size_t count : {100U, 9000U, 100'000U}) {  // The last: two pages of spans.
      SCOPED_TRACE(std::to_string(first) + " " + std::to_string(count));
      const auto ids = ids_in_spans(count, first, 400, count);
      const auto info = build(ids, IdIndexWriter::kBufferBytesMin, 777).or_throw();
      EXPECT_FALSE(info.dense);
      ASSERT_GT(info.spans, 0);
      EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory_), {}), 1);
      EXPECT_EQ(static_cast<std::int64_t>(std::filesystem::file_size(directory_ / "t.spans")),
                IdIndex::disk_bytes(info));
      EXPECT_LE(IdIndex::memory_bytes(info, 1 << 20), info.spans * 16 + 128);
      expect_answers(ids, info, 1, count);
      EXPECT_TRUE(IdIndex::verify(directory_, "t", info));
      IdIndexInfo other = info;
      other.fingerprint ^= 1;
      EXPECT_FALSE(IdIndex::verify(directory_, "t", other));
    }
  }
  const std::vector<std::int64_t> last = ids_in_spans(64, INT64_MAX - 63, 64 << 10, 1);
  ASSERT_EQ(last.back(), INT64_MAX);
  const auto info = build(last, 1 << 16, 64).or_throw();
  EXPECT_EQ(info.spans, 1);
  expect_answers(last, info, 1, 1);
}

TEST_F(IdIndexTest, GivesSpansUpForIdsThatDoNotAscendOrLieScattered) {
  auto scattered = ids_in_spans(9000, 5, 9, 3);
  auto falling = ids_in_spans(200'000, -7, 400, 4);  // Two pages of spans, then 100 once more.
  falling.push_back(falling[100] - 1 == falling[99] ? -1'000'000 : falling[100] - 1);
  for (const auto& ids : {scattered, falling}) {
    const auto info = build(ids, IdIndexWriter::kBufferBytesMin, 1000).or_throw();
    EXPECT_EQ(info.spans, 0);
    EXPECT_FALSE(std::filesystem::exists(directory_ / "t.spans"));
    expect_answers(ids, info, 3, 8);
    EXPECT_TRUE(IdIndex::verify(directory_, "t", info));
  }
  auto twice = ids_in_spans(5000, 0, 400, 5);
  twice.push_back(twice.back());
  const auto refused = build(twice, 1 << 16, 512);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().to_string().find("appears twice, at positions 4999 and 5000"),
            std::string::npos)
      << refused.error().to_string();
  EXPECT_TRUE(std::filesystem::is_empty(directory_));
}

TEST_F(IdIndexTest, RefusesSpansThatOverlapThoughTheirPagesAreSealed) {
  const auto ids = ids_in_spans(9000, 3, 400, 6);
  const auto info = build(ids, 1 << 16, 512).or_throw();
  const auto path = directory_ / "t.spans";
  std::vector<std::byte> page(static_cast<std::size_t>(kIdPageBytes));
  std::ifstream(path, std::ios::binary).read(reinterpret_cast<char*>(page.data()), kIdPageBytes);
  const auto with = [&](std::int64_t span, std::int64_t field, std::int64_t value) {
    auto changed = page;
    std::memcpy(changed.data() + kIdPageHeaderBytes + span * 16 + field * 8, &value, 8);
    seal_id_page(changed, IdPageKind::kSpans, 0, id_page_count(page));
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(changed.data()), kIdPageBytes);
    auto slab = Slab::create(governor_, Tag::kOther, IdIndex::memory_bytes(info, 1) + 1).or_throw();
    const auto opened = IdIndex::open(directory_, "t", info, slab, 1, pool_);
    EXPECT_FALSE(IdIndex::verify(directory_, "t", info));
    return opened ? std::string("opened") : opened.error().to_string();
  };
  const std::string expected = "its spans are not 9000 ascending ids";
  EXPECT_NE(with(2, 0, 3).find(expected), std::string::npos);          // Below the one before.
  EXPECT_NE(with(2, 0, INT64_MIN).find(expected), std::string::npos);  // Below everything.
  EXPECT_NE(with(2, 1, 0).find(expected), std::string::npos);          // An empty span before it.
  EXPECT_NE(with(2, 1, 1 << 30).find(expected), std::string::npos);    // Beyond the table.
  EXPECT_NE(with(0, 1, 1).find(expected), std::string::npos);          // Nothing for ordinal 0.
  EXPECT_NE(with(info.spans - 1, 0, INT64_MAX).find(expected), std::string::npos);  // 64 bits.
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

// Sound by their checksums, and yet none that this table's writer wrote.
TEST_F(IdIndexTest, RefusesRowsThatThereAreNotAndIdsOfOtherRows) {
  auto ids = distinct_ids(2000, 22);
  const auto info = build(ids, 1 << 16, 4096).or_throw();
  const auto path = directory_ / "t.ids";
  alignas(64) std::array<std::byte, kIdPageBytes> page;
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.read(reinterpret_cast<char*>(page.data()), kIdPageBytes);
  const auto sound = page;
  for (const std::uint32_t ordinal : {2000U, 0xFFFFFFFFU}) {
    std::memcpy(page.data() + kOrdinalsAt + 7 * 4, &ordinal, sizeof ordinal);
    seal_id_page(page, IdPageKind::kSorted, 0, kIdsPerSortedPage);
    file.seekp(0);
    file.write(reinterpret_cast<const char*>(page.data()), kIdPageBytes).flush();
    auto slab = Slab::create(governor_, Tag::kOther, IdIndex::memory_bytes(info, 4) + 1).or_throw();
    const auto opened = IdIndex::open(directory_, "t", info, slab, 4, pool_);
    ASSERT_FALSE(opened);
    EXPECT_NE(opened.error().to_string().find("t.ids: page 0 names row " + std::to_string(ordinal)),
              std::string::npos);
    EXPECT_FALSE(IdIndex::verify(directory_, "t", info));
  }
  file.seekp(0);
  file.write(reinterpret_cast<const char*>(sound.data()), kIdPageBytes).flush();
  ASSERT_TRUE(IdIndex::verify(directory_, "t", info));
  // The sorted file of the same ids in another order.
  std::filesystem::copy_file(directory_ / "t.order", directory_ / "kept");
  std::swap(ids[3], ids[1500]);
  ASSERT_TRUE(build(ids, 1 << 16, 4096));
  std::filesystem::rename(directory_ / "kept", directory_ / "t.order");
  const auto verdict = IdIndex::verify(directory_, "t", info);
  ASSERT_FALSE(verdict);
  EXPECT_NE(verdict.error().to_string().find("t.ids: not the rows of"), std::string::npos);
}

TEST_F(IdIndexTest, NoticesAFlippedBitAnywhere) {
  std::mt19937_64 random(7);
  for (const char* name : {"t.ids", "t.order", "t.spans"}) {
    const bool spans = std::string(name) == "t.spans";
    const auto ids = spans ? ids_in_spans(9000, 0, 400, 21) : distinct_ids(2000, 21);
    const auto info = build(ids, 1 << 16, 4096).or_throw();
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
    EXPECT_TRUE(IdIndex::verify(directory_, "t", info));
  }
}

}  // namespace
}  // namespace plimsoll
