// SPDX-License-Identifier: Apache-2.0
#include "torch/checkpoint.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <span>
#include <sstream>

#include "data/safetensors.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

class CheckpointTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() /
              fmt::format("plimsoll-checkpoint-{}-{}", ::getpid(),
                          ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::create_directories(folder_);
    directory_ = folder_ / "step-000000007";
    state_.step = 7;
    state_.loader = {.seed = UINT64_MAX, .epoch = 2, .position = 512};
    state_.numbers = {{"loss_sum", 0.1 + 0.2}, {"lost", std::nan("")}};
    state_.texts = {{"recall", "{\"r1\": 1.0}"}};
  }
  void TearDown() override { fs::remove_all(folder_); }

  static std::vector<NamedTensor> tensors(double first) {
    return {{"model.w", at::arange(12, at::kFloat).reshape({3, 4}) + first},
            {"model.empty", at::zeros({0, 4}, at::kFloat)},
            {"adamw.step", at::full({}, first, at::kDouble)},
            {"counts", at::full({5}, static_cast<std::int64_t>(first), at::kLong)}};
  }

  fs::path folder_;
  fs::path directory_;
  CheckpointState state_;
};

TEST_F(CheckpointTest, ComesBackBitForBit) {
  const auto saved = tensors(1.25);
  ASSERT_TRUE(save_checkpoint(directory_, state_, saved));
  const auto read = tensors(0.0);
  const auto state = load_checkpoint(directory_, read);
  ASSERT_TRUE(state) << state.error().to_string();
  for (std::size_t i = 0; i < saved.size(); ++i) {
    EXPECT_TRUE(at::equal(saved[i].tensor, read[i].tensor)) << saved[i].name;
  }
  EXPECT_EQ(state->step, 7);
  EXPECT_EQ(state->phase, 1);
  EXPECT_EQ(state->loader, state_.loader);
  EXPECT_EQ(state->numbers.at("loss_sum"), 0.1 + 0.2);
  EXPECT_TRUE(std::isnan(state->numbers.at("lost")));
  EXPECT_EQ(state->texts, state_.texts);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
}

TEST_F(CheckpointTest, AHalfWrittenOneFromBeforeIsInNobodysWay) {
  fs::create_directories(directory_.string() + ".new");
  std::ofstream(directory_.string() + ".new/tensors.safetensors") << "half";
  ASSERT_TRUE(save_checkpoint(directory_, state_, tensors(1)));
  EXPECT_TRUE(load_checkpoint(directory_, tensors(0)));
}

TEST_F(CheckpointTest, EveryFlippedBitIsNoticed) {
  ASSERT_TRUE(save_checkpoint(directory_, state_, tensors(1)));
  const fs::path path = directory_ / "tensors.safetensors";
  const auto size = fs::file_size(path);
  for (std::uintmax_t at = 0; at < size; ++at) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(at));
    const int byte = file.get();
    file.seekp(static_cast<std::streamoff>(at));
    file.put(static_cast<char>(byte ^ 1));
    file.close();
    EXPECT_FALSE(load_checkpoint(directory_, tensors(0))) << "byte " << at << " of " << size;
    file.open(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(at));
    file.put(static_cast<char>(byte));
  }
  EXPECT_TRUE(load_checkpoint(directory_, tensors(0)));
}

TEST_F(CheckpointTest, R64_EveryFlippedBitOfAFinishedModelIsNoticed) {
  const auto path = folder_ / "model.safetensors";
  ASSERT_TRUE(save_tensors(path, tensors(1), {{"held_out_loss", "0.5"}}));
  ASSERT_TRUE(load_tensors(path, tensors(0)));
  std::stringstream read;
  read << std::ifstream(path, std::ios::binary).rdbuf();
  const std::string sound = read.str();
  for (std::size_t bit = 0; bit < 8 * sound.size(); ++bit) {
    std::string damaged = sound;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    std::ofstream(path, std::ios::binary) << damaged;
    const auto loaded = load_tensors(path, tensors(0));
    ASSERT_FALSE(loaded) << "bit " << bit;
    ASSERT_EQ(loaded.error().code, ErrorCode::kCorrupt) << "bit " << bit;
  }
}

TEST_F(CheckpointTest, R64_AModelWithoutAChecksumIsRefused) {
  const auto path = folder_ / "model.safetensors";
  auto writer = SafetensorsWriter::create(path, {{"w", DType::kFloat32, {1}}}).or_throw();
  const float one = 1.0F;
  ASSERT_TRUE(writer.write(std::as_bytes(std::span(&one, 1))));
  ASSERT_TRUE(writer.finish());
  const auto loaded = load_tensors(path, std::vector<NamedTensor>{{"w", at::zeros({1})}});
  ASSERT_FALSE(loaded);
  EXPECT_NE(loaded.error().to_string().find("there is no checksum in its header"),
            std::string::npos)
      << loaded.error().to_string();
}

TEST_F(CheckpointTest, AnotherModelsTensorsAreRefusedByName) {
  ASSERT_TRUE(save_checkpoint(directory_, state_, tensors(1)));
  auto wanted = tensors(0);
  wanted[0].tensor = at::zeros({4, 3}, at::kFloat);
  const auto shape = load_checkpoint(directory_, wanted);
  ASSERT_FALSE(shape);
  EXPECT_EQ(shape.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(shape.error().to_string().find("'model.w' is F32 [3, 4]"), std::string::npos)
      << shape.error().to_string();
  wanted = tensors(0);
  wanted[0].name = "model.v";
  EXPECT_FALSE(load_checkpoint(directory_, wanted));
  wanted.pop_back();
  EXPECT_FALSE(load_checkpoint(directory_, wanted));
}

TEST_F(CheckpointTest, ADamagedStateFileIsCorruptAndNamed) {
  ASSERT_TRUE(save_checkpoint(directory_, state_, tensors(1)));
  for (const char* text : {"", "{", "[]", "{\"format\": 1}", "{\"format\": \"x\", \"step\": 1}"}) {
    std::ofstream(directory_ / "state.json") << text;
    const auto state = load_checkpoint(directory_, tensors(0));
    ASSERT_FALSE(state) << text;
    EXPECT_EQ(state.error().code, ErrorCode::kCorrupt);
    EXPECT_NE(state.error().to_string().find("state.json"), std::string::npos);
  }
  fs::remove(directory_ / "state.json");
  EXPECT_EQ(load_checkpoint(directory_, tensors(0)).error().code, ErrorCode::kNotFound);
}

TEST_F(CheckpointTest, TheDigestFollowsNamesOrderAndBytes) {
  const auto digest = [](const std::vector<NamedTensor>& named) {
    StateDigest state;
    digest_tensors(state, named);
    return state.hex();
  };
  EXPECT_EQ(digest(tensors(1)), digest(tensors(1)));
  EXPECT_NE(digest(tensors(1)), digest(tensors(2)));
  auto swapped = tensors(1);
  std::swap(swapped[0], swapped[1]);
  EXPECT_NE(digest(tensors(1)), digest(swapped));
}

}  // namespace
}  // namespace plimsoll
