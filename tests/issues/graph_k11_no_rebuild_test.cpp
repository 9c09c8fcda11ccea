// SPDX-License-Identifier: Apache-2.0
//
// K11: the cache was saved as one kind of object and looked for as another, so that it was built
// anew at every start. Goal: a set is rebuilt when inputs or options changed, and only then; the
// old one stays whole until the new one is.
#include <chrono>
#include <filesystem>

#include <gtest/gtest.h>

#include "tests/support/can_traffic.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

std::vector<std::pair<std::string, std::string>> files() {
  return {{"train_1.csv", test::can_csv(3'000, 30, 1)}, {"test_1.csv", test::can_csv(900, 30, 2)}};
}

TEST(GraphK11, ASecondImportRebuildsNothing) {
  test::CanTraffic traffic(files());
  EXPECT_FALSE(traffic.import().reused);
  const auto path = traffic.options().out / kGraphSetFile;
  const auto written = fs::last_write_time(path);
  traffic.options().threads = 2;
  traffic.options().chunk_bytes = 999;
  EXPECT_TRUE(traffic.import().reused) << "threads and chunks decide nothing";
  EXPECT_EQ(fs::last_write_time(path), written);
}

TEST(GraphK11, ATouchedFileIsComparedByItsContent) {
  test::CanTraffic traffic(files());
  traffic.import();
  fs::last_write_time(traffic.file("test_1.csv"), fs::file_time_type::clock::now());
  EXPECT_TRUE(traffic.import().reused);
  std::string text = test::slurp(traffic.file("test_1.csv"));
  text[text.size() - 2] = text[text.size() - 2] == '1' ? '0' : '1';  // As long, another label.
  test::spill(traffic.file("test_1.csv"), text);
  fs::last_write_time(traffic.file("test_1.csv"),
                      fs::file_time_type::clock::now() + std::chrono::seconds(2));
  EXPECT_FALSE(traffic.import().reused);
  EXPECT_TRUE(traffic.import().reused);
}

TEST(GraphK11, OptionsAndFilesThatDecideTheGraphsRebuild) {
  test::CanTraffic traffic(files());
  std::string last = traffic.import().info.fingerprint;
  const auto changed = [&](const auto& change) {
    change(traffic.options());
    const CanImport made = traffic.import();
    EXPECT_FALSE(made.reused);
    EXPECT_NE(made.info.fingerprint, last);
    last = made.info.fingerprint;
  };
  changed([](CanImportOptions& options) { options.window = 50; });
  changed([](CanImportOptions& options) { options.stride = 25; });
  changed([](CanImportOptions& options) { options.seed = 1; });
  changed([](CanImportOptions& options) { options.validation = 0.3; });
  changed([](CanImportOptions& options) { options.skip_bad = true; });
  changed([&](CanImportOptions&) {
    test::spill(traffic.file("train_2.csv"), test::can_csv(500, 9, 5));
  });
  EXPECT_TRUE(traffic.import().reused);
  traffic.options().rebuild = true;
  const CanImport made = traffic.import();
  EXPECT_FALSE(made.reused);
  EXPECT_EQ(made.info.fingerprint, last);
}

TEST(GraphK11, TheOldSetStaysUntilTheNewOneIsWhole) {
  test::CanTraffic traffic(files());
  traffic.import();
  const std::string before = traffic.bytes();
  const GraphSet reader = traffic.open(0);
  // A cancelled import, then one that fails at a bad row.
  traffic.options().window = 10;
  const auto cancelled = import_can(traffic.governor, traffic.options(),
                                    [](std::int64_t, std::int64_t) { return false; });
  ASSERT_FALSE(cancelled);
  EXPECT_NE(cancelled.error().to_string().find("cancelled"), std::string::npos);
  test::spill(traffic.file("train_3.csv"), "timestamp,arbitration_id,data_field,attack\nx\n");
  const auto failed = import_can(traffic.governor, traffic.options(), nullptr);
  ASSERT_FALSE(failed);
  EXPECT_NE(failed.error().to_string().find("train_3.csv:2:"), std::string::npos)
      << failed.error().to_string();
  EXPECT_EQ(traffic.bytes(), before);
  EXPECT_FALSE(fs::exists(traffic.options().out / "parts.partial"));
  // A rebuild under a reader: it keeps reading the file it opened.
  fs::remove(traffic.file("train_3.csv"));
  traffic.import();
  EXPECT_NE(traffic.bytes(), before);
  EXPECT_TRUE(reader.verify(nullptr).has_value());
  EXPECT_EQ(traffic.governor.state().pools[static_cast<std::size_t>(Tag::kOther)].leased_bytes, 0);
}

TEST(GraphK11, ADamagedSetIsRebuilt) {
  test::CanTraffic traffic(files());
  traffic.import();
  const std::string good = traffic.bytes();
  std::string bad = good;
  bad.resize(bad.size() / 2);
  test::spill(traffic.options().out / kGraphSetFile, bad);
  EXPECT_FALSE(traffic.import().reused);
  EXPECT_EQ(traffic.bytes(), good);
}

TEST(GraphK11, EveryDamagedByteOfAGraphIsNoticed) {
  test::CanTraffic traffic({{"train_1.csv", test::can_csv(500, 9, 1)}});
  traffic.import();
  const std::string good = traffic.bytes();
  std::mt19937_64 random(11);
  for (int round = 0; round < 200; ++round) {
    std::string bad = good;
    const std::size_t at = random() % bad.size();
    bad[at] = static_cast<char>(bad[at] ^ (1 << random() % 8));
    test::spill(traffic.options().out / kGraphSetFile, bad);
    const auto opened =
        GraphSet::open(traffic.governor, {.directory = traffic.options().out, .cache_bytes = 0});
    const bool sound = opened && opened->verify(nullptr);
    EXPECT_FALSE(sound) << "byte " << at << " of " << bad.size();
  }
}

}  // namespace
}  // namespace plimsoll
