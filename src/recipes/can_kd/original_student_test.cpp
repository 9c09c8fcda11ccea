// SPDX-License-Identifier: Apache-2.0
//
// Goal: a published student is read by its names and runs as its layers say; what is missing or of
// another shape is refused by name.
// Method: a file of random weights in torch_geometric's names, against the layers put together by
// hand (they are compared with the formulas in the other tests).
#include "recipes/can_kd/original_student.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <functional>
#include <numeric>

#include "data/safetensors.h"
#include "recipes/can_kd/random_graphs.h"
#include "torch/random_tensors.h"

namespace plimsoll::can_kd {
namespace {

namespace fs = std::filesystem;
using testing::same_bits;

constexpr std::uint64_t kSeed = 60;

struct Entry {
  std::string name;
  at::Tensor value;
};

std::vector<Entry> random_state() {
  std::vector<Entry> state;
  const auto add = [&](const std::string& name, at::IntArrayRef shape) {
    state.push_back({name, random_normal(shape, 0.3, kSeed, 100 + state.size())});
  };
  std::int64_t in = kContinuous;
  for (const char* conv : {"convs.0", "convs.1"}) {
    add(std::string(conv) + ".att_src", {1, 2, 3});
    add(std::string(conv) + ".att_dst", {1, 2, 3});
    add(std::string(conv) + ".bias", {6});
    add(std::string(conv) + ".lin.weight", {6, in});
    in = 6;
  }
  for (const char* end : {"", "_reverse"}) {
    add(std::string("jk.lstm.weight_ih_l0") + end, {24, 6});
    add(std::string("jk.lstm.weight_hh_l0") + end, {24, 6});
    add(std::string("jk.lstm.bias_ih_l0") + end, {24});
    add(std::string("jk.lstm.bias_hh_l0") + end, {24});
  }
  add("jk.att.weight", {1, 12});
  add("jk.att.bias", {1});
  add("lin.weight", {1, 6});
  add("lin.bias", {1});
  return state;
}

class OriginalStudentTest : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = fs::temp_directory_path() /
            ("original_student_test." + std::to_string(::getpid()) + ".safetensors");
  }
  void TearDown() override { fs::remove(path_); }

  void write(const std::vector<Entry>& state) const {
    std::vector<TensorSpec> specs;
    for (const auto& entry : state) {
      specs.push_back({entry.name, DType::kFloat32, entry.value.sizes().vec()});
    }
    auto writer = SafetensorsWriter::create(path_, specs).or_throw();
    for (const auto& entry : state) {
      writer
          .write(
              {static_cast<const std::byte*>(entry.value.const_data_ptr()), entry.value.nbytes()})
          .or_throw();
    }
    writer.finish().or_throw();
  }

  fs::path path_;
};

TEST_F(OriginalStudentTest, RunsAsItsLayersSay) {
  const auto state = random_state();
  write(state);
  const auto student = OriginalStudent::load(path_).or_throw();
  const auto graphs = testing::batch_of(testing::random_graphs(30, 12, kSeed));
  const auto adjacency = make_adjacency(graphs);
  const auto features = graphs.x.narrow(1, 1, kContinuous).contiguous();
  std::vector<at::Tensor> v;
  for (const auto& entry : state) {
    v.push_back(entry.value);
  }
  const auto head_of = [&](std::size_t k, std::int64_t in) {
    return GatConv{
        {in, 3, 2, true, 0.0}, v[k + 3], v[k].view({2, 3}), v[k + 1].view({2, 3}), v[k + 2]};
  };
  const auto first =
      relu_dropout(head_of(0, kContinuous).forward(features, adjacency, {}, 0), 0.0, {}, 0);
  const auto second = relu_dropout(head_of(4, 6).forward(first, adjacency, {}, 0), 0.0, {}, 0);
  const LayerAttention attention{v[8],  v[9],  v[10], v[11],         v[12],
                                 v[13], v[14], v[15], {v[16], v[17]}};
  const auto mixed = mean_of_nodes(attention.forward({first, second}, {}), adjacency);
  const auto wanted = Linear{v[18], v[19]}.forward(mixed, {}).squeeze(1);
  const auto made = student.forward(features, adjacency);
  EXPECT_EQ(student.parameter_count(), std::accumulate(v.begin(), v.end(), std::int64_t{0},
                                                       [](std::int64_t sum, const at::Tensor& one) {
                                                         return sum + one.numel();
                                                       }));
  EXPECT_EQ(made.sizes(), (at::IntArrayRef{30}));
  EXPECT_TRUE(same_bits(made, wanted));
}

TEST_F(OriginalStudentTest, NamesWhatIsMissingOrOfAnotherShape) {
  EXPECT_EQ(OriginalStudent::load(path_).error().code, ErrorCode::kNotFound);
  for (const char* name : {"convs.0.att_src", "convs.1.bias", "jk.lstm.bias_hh_l0_reverse",
                           "jk.att.weight", "lin.weight"}) {
    auto state = random_state();
    const auto at = std::find_if(state.begin(), state.end(),
                                 [&](const Entry& entry) { return entry.name == name; });
    at->value = random_normal({5, 7}, 1.0, kSeed, 1);
    write(state);
    auto loaded = OriginalStudent::load(path_);
    ASSERT_FALSE(loaded.has_value()) << name;
    EXPECT_EQ(loaded.error().code, ErrorCode::kCorrupt) << name;
    EXPECT_NE(loaded.error().to_string().find(name), std::string::npos) << name;
    state.erase(at);
    write(state);
    loaded = OriginalStudent::load(path_);
    ASSERT_FALSE(loaded.has_value()) << name;
    EXPECT_EQ(loaded.error().code, ErrorCode::kNotFound) << name;
    EXPECT_NE(loaded.error().to_string().find(name), std::string::npos) << name;
  }
}

TEST(OriginalFeaturesTest, TurnOursBackIntoIdsBytesAndCounts) {
  testing::PlainGraph graph;
  graph.x = {1.0F, 0.2F, 0.4F, 0, 0, 0, 0, 0, 1.0F, 0.5F, 0.9F,  // Id 1, bytes 51, 102, … 255.
             2.0F, 0,    0,    0, 0, 0, 0, 0, 0,    0,    0};    // An id not in the vocabulary.
  graph.sources = {0, 0, 1};
  graph.targets = {0, 1, 0};
  const auto graphs = testing::batch_of(std::span(&graph, 1));
  auto edges = at::zeros({3, 11}, at::kFloat);
  edges.select(1, 0).copy_(at::tensor({4.0F, 2.0F, 3.0F}));
  const std::vector<std::int64_t> vocabulary{0x100, 0x2B0};
  const auto made = original_features(graphs, edges, vocabulary);
  const auto wanted =
      at::tensor({688.0F, 51.0F, 102.0F, 0.0F, 0.0F, 0.0F, 0.0F, 0.0F, 255.0F, 6.0F,
                  0.0F,   0.0F,  0.0F,   0.0F, 0.0F, 0.0F, 0.0F, 0.0F, 0.0F,   3.0F})
          .view({2, 10});
  EXPECT_TRUE(at::allclose(made, wanted)) << made;
}

}  // namespace
}  // namespace plimsoll::can_kd
