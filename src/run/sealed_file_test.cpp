// SPDX-License-Identifier: Apache-2.0
#include "run/sealed_file.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

class R64SealedFile : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    folder_ =
        fs::temp_directory_path() / fmt::format("plimsoll-sealed-{}-{}", ::getpid(),
                                                ::testing::UnitTest::GetInstance()->random_seed());
    fs::create_directories(folder_);
    path_ = folder_ / GetParam();
    ASSERT_TRUE(write_sealed(path_, text()));
    std::stringstream read;
    read << std::ifstream(path_, std::ios::binary).rdbuf();
    sound_ = read.str();
  }
  void TearDown() override { fs::remove_all(folder_); }

  [[nodiscard]] std::string text() const {
    return path_.extension() == ".toml" ? "[cosir]\nepochs = 3\nseed = 1\n"
                                        : "{\"step\":12,\"name\":\"a\"}\n";
  }
  void expect_corrupt(const std::string& content, const std::string& what) const {
    std::ofstream(path_, std::ios::binary) << content;
    const auto read = read_sealed(path_);
    ASSERT_FALSE(read) << what;
    EXPECT_EQ(read.error().code, ErrorCode::kCorrupt) << what;
    EXPECT_NE(read.error().to_string().find(path_.string()), std::string::npos) << what;
  }

  fs::path folder_;
  fs::path path_;
  std::string sound_;
};

TEST_P(R64SealedFile, ComesBackAndStaysWhatItWasToOtherReaders) {
  EXPECT_EQ(read_sealed(path_).value(), sound_);
  if (path_.extension() == ".json") {
    const auto json = nlohmann::json::parse(sound_);
    EXPECT_EQ(json["step"], 12);
    EXPECT_EQ(json[kSealKey].get<std::string>().size(), 8U);
  } else {
    EXPECT_TRUE(sound_.starts_with(text() + "# crc32c ")) << sound_;
  }
}

TEST_P(R64SealedFile, EveryFlippedBitIsNoticed) {
  for (std::size_t bit = 0; bit < 8 * sound_.size(); ++bit) {
    std::string damaged = sound_;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    expect_corrupt(damaged, fmt::format("bit {}", bit));
  }
}

TEST_P(R64SealedFile, CutAnywhereIsNoticed) {
  for (std::size_t size = 0; size < sound_.size(); ++size) {
    expect_corrupt(sound_.substr(0, size), fmt::format("{} bytes", size));
  }
  expect_corrupt(sound_ + "\n", "a line more");
}

TEST_P(R64SealedFile, OneFromBeforeNamesTheVersionThatWroteIt) {
  std::ofstream(path_, std::ios::binary) << text();
  const auto read = read_sealed(path_);
  ASSERT_FALSE(read);
  EXPECT_NE(read.error().to_string().find("it does not end with its checksum: it was cut short, "
                                          "damaged, or written by Plimsoll 0.1.0 (run format 1)"),
            std::string::npos)
      << read.error().to_string();
}

INSTANTIATE_TEST_SUITE_P(, R64SealedFile, ::testing::Values("run.toml", "manifest.json"));

}  // namespace
}  // namespace plimsoll
