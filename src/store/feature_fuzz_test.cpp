// SPDX-License-Identifier: Apache-2.0
//
// Goal: no content of features.json or of the other files can crash the reader or make it return
// altered bytes. Method: seeded random damage to a small store; whatever still reads must be equal.
#include <gtest/gtest.h>

#include "plimsoll/feature_store.h"
#include "store/feature_format.h"
#include "tests/support/array_files.h"
#include "tests/support/feature_set.h"

namespace plimsoll {
namespace {

using test::damage;
using test::FeatureSet;
using test::ScratchDirectory;
using test::slurp;
using test::spill;
namespace fs = std::filesystem;

TEST(FeatureFuzzTest, AnyHeaderTextIsReadOrRefused) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  std::vector<std::string> all;
  for (const std::int64_t length_max : {0, 30}) {
    const FeatureSet set = test::make_set(
        1, 40, {{.name = "x", .dtype = DType::kFloat32, .shape = {4}, .length_max = length_max}},
        test::IdKind::kSparse, test::GroupKind::kVaried);
    ASSERT_TRUE(test::write_set(governor, scratch / "set", set));
    all.push_back(slurp(scratch / "set" / "features.json"));
    ASSERT_TRUE(test::extend_set(
        governor, scratch / "set",
        test::make_set(2, 9, set.columns, test::IdKind::kSparse, test::GroupKind::kUniform), 0, 9));
    all.push_back(slurp(scratch / "set" / "part-000001" / "features.json"));
    fs::remove_all(scratch / "set");
  }
  for (std::uint64_t seed = 0; seed < 20'000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const std::string& good = all[seed % all.size()];
    ASSERT_TRUE(parse_feature_header(good, "good"));
    const std::string bad = damage(good, random);
    const auto parsed = parse_feature_header(bad, "bad");
    if (parsed) {
      ASSERT_EQ(parsed->to_json(), good) << "only white space may differ";
    } else {
      ASSERT_EQ(parsed.error().code, ErrorCode::kCorrupt);
    }
  }
}

TEST(FeatureFuzzTest, AHeaderNestedAsDeepAsItIsLongIsRefused) {
  for (const std::size_t levels : {20U, 400'000U}) {
    const std::string text = R"({"format":"plimsoll-features","version":1,"crc32c":0,"x":)" +
                             std::string(levels, '[') + std::string(levels, ']') + "}";
    const auto parsed = parse_feature_header(text, "deep");
    ASSERT_FALSE(parsed);
    EXPECT_EQ(parsed.error().code, ErrorCode::kCorrupt);
  }
}

TEST(FeatureFuzzTest, DamagedFilesNeverYieldOtherBytes) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  const FeatureSet set =
      test::make_set(2, 600, {{.name = "x", .dtype = DType::kFloat32, .shape = {40}}},
                     test::IdKind::kSparse, test::GroupKind::kVaried);
  const fs::path directory = scratch / "set";
  ASSERT_TRUE(test::write_set(governor, directory, set));
  const std::vector<std::string> names = test::names_in(directory);
  std::vector<std::byte> out(600 * 160);
  const std::vector<std::span<std::byte>> spans{out};
  int refused = 0;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const fs::path victim = directory / names[random() % names.size()];
    const std::string good = slurp(victim);
    spill(victim, damage(good, random));
    auto store = FeatureStore::open(governor, {.directory = directory, .cache_bytes = 256 << 10});
    const bool read = store && store->read(set.ids, std::vector<int>{0}, spans);
    refused += read ? 0 : 1;
    if (read) {
      ASSERT_EQ(out, set.values[0]) << victim;
    }
    spill(victim, good);
  }
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace plimsoll
