// SPDX-License-Identifier: Apache-2.0
//
// Goal: a flipped bit anywhere in a table's files is noticed, or harmless; no wrong row is ever
// returned. Method: flip random bits, open, read everything, compare with the oracle.
#include <fstream>

#include "tests/support/array_files.h"
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;

class CorruptionTest : public EmbeddingTableTest {
 protected:
  void SetUp() override {
    EmbeddingTableTest::SetUp();
    auto store = open(options_ = {.directory = directory(), .dim = 48, .ids = ids_});
    std::mt19937_64 random(5);
    for (std::int64_t step = 1; step <= 3; ++step) {
      const auto some = draw(ids_, 100, random);
      const auto grads = random_floats(some.size() * 48, random);
      store.apply(some, grads).or_throw();
      oracle_.apply(some, grads);
      store.commit(step).or_throw();
    }
  }
  void flip(const std::filesystem::path& path, std::uint64_t bit) const {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(bit / 8));
    const char byte = static_cast<char>(file.get());
    file.seekp(static_cast<std::streamoff>(bit / 8));
    file.put(static_cast<char>(byte ^ (1 << (bit % 8))));
  }
  // True when the damage was noticed; fails the test when a wrong row came back.
  bool noticed(const std::string& what) {
    auto store = EmbeddingStore::open(governor_, options_);
    if (!store) {
      EXPECT_EQ(store.error().code, ErrorCode::kCorrupt) << what << store.error().to_string();
      EXPECT_NE(store.error().to_string().find(directory().string()), std::string::npos) << what;
      return true;
    }
    EXPECT_EQ(store->last_commit(), 3) << what;
    std::vector<float> row(48);
    for (const std::int64_t id : ids_) {
      if (const auto got = store->gather({&id, 1}, row); !got) {
        EXPECT_EQ(got.error().code, ErrorCode::kCorrupt) << what;
        return true;
      }
      EXPECT_EQ(row, oracle_.row(id).weights) << what << " id " << id;
    }
    return false;
  }
  std::vector<std::int64_t> ids_ = sparse_ids(1500, 12);
  EmbeddingStoreOptions options_;
  EmbeddingOracle oracle_{48, {}, {}};
};

TEST_F(CorruptionTest, NoFlippedBitGivesAWrongRow) {
  ASSERT_FALSE(noticed("before any damage"));
  std::mt19937_64 random(31);
  for (const char* name :
       {"rows.dat", "map.0", "map.1", "map.2", "super", "table.json", "rows.ids", "rows.order"}) {
    const auto path = directory() / name;
    int seen = 0;
    for (int trial = 0; trial < 40; ++trial) {
      const auto bit = random() % (std::filesystem::file_size(path) * 8);
      flip(path, bit);
      seen += noticed(std::string(name) + " bit " + std::to_string(bit)) ? 1 : 0;
      flip(path, bit);
      ASSERT_FALSE(HasFailure());
    }
    // A superblock has two copies, two of map.N do not belong to the newest commit, and rows.dat
    // holds blocks that the newest commit does not use.
    EXPECT_TRUE(seen > 0 || std::string(name) == "super" || std::string(name).starts_with("map"))
        << name;
  }
  ASSERT_FALSE(noticed("after all damage was undone"));
}

TEST_F(CorruptionTest, AFlippedBitOfTheNewestPageTableIsNoticed) {
  // Commits go to map.0, map.1, map.2: the newest is in the last.
  flip(directory() / "map.2", 3);
  EXPECT_TRUE(noticed("map.2"));
  EXPECT_FALSE(EmbeddingStore::verify(directory(), {}));
  EXPECT_EQ(EmbeddingStore::inspect(directory()).or_throw().commit_steps,
            std::vector<std::int64_t>{2});
  options_.at_step = 2;
  EXPECT_EQ(open(options_).last_commit(), 2);
}

TEST_F(CorruptionTest, BothCopiesOfASuperblockDamagedIsNoticedNotForgotten) {
  flip(directory() / "super", 16 * 8);
  EXPECT_FALSE(noticed("one copy"));  // Opening writes both copies once more.
  flip(directory() / "super", 16 * 8);
  flip(directory() / "super", (7 * 512 + 16) * 8);
  EXPECT_TRUE(noticed("both copies"));
  EXPECT_FALSE(EmbeddingStore::verify(directory(), {}));
}

TEST_F(CorruptionTest, AMissingDescriptionDoesNotMakeANewTableOverTheOld) {
  std::filesystem::remove(directory() / "table.json");
  const auto store = EmbeddingStore::open(governor_, options_);
  ASSERT_FALSE(store);
  EXPECT_EQ(store.error().code, ErrorCode::kCorrupt);
  EXPECT_NE(store.error().to_string().find("table.json"), std::string::npos);
  EXPECT_GT(std::filesystem::file_size(directory() / "rows.dat"), 0U);
}

TEST_F(CorruptionTest, ADescriptionNestedAsDeepAsItIsLongIsRefused) {
  test::spill(directory() / "table.json",
              R"({"format":"plimsoll embedding table","version":2,"crc32c":0,"x":)" +
                  std::string(400'000, '[') + std::string(400'000, ']') + "}");
  const auto inspected = EmbeddingStore::inspect(directory());
  ASSERT_FALSE(inspected);
  EXPECT_EQ(inspected.error().code, ErrorCode::kCorrupt);
}

TEST_F(CorruptionTest, ATruncatedFileIsNoticed) {
  for (const char* name : {"rows.dat", "map.2", "super", "rows.ids", "rows.order"}) {
    SCOPED_TRACE(name);
    const auto path = directory() / name;
    const auto kept = root_ / "kept";
    std::filesystem::copy_file(path, kept, std::filesystem::copy_options::overwrite_existing);
    std::filesystem::resize_file(path, std::filesystem::file_size(path) / 2 / 4096 * 4096);
    EXPECT_TRUE(noticed(name));
    std::filesystem::copy_file(kept, path, std::filesystem::copy_options::overwrite_existing);
  }
}

TEST_F(CorruptionTest, VerifyNamesTheFileAndThePage) {
  const auto bytes =
      static_cast<std::int64_t>(std::filesystem::file_size(directory() / "rows.dat"));
  for (std::int64_t page = 0; page < bytes; page += 4096) {  // Which of them are in use, who knows.
    flip(directory() / "rows.dat", (page + 1096) * 8);
  }
  const auto verdict = EmbeddingStore::verify(directory(), {});
  ASSERT_FALSE(verdict);
  EXPECT_EQ(verdict.error().code, ErrorCode::kCorrupt);
  const auto text = verdict.error().to_string();
  EXPECT_NE(text.find("rows.dat: page "), std::string::npos) << text;
}

}  // namespace
}  // namespace plimsoll
