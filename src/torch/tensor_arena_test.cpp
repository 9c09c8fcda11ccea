// SPDX-License-Identifier: Apache-2.0
//
// The arena inside torch. The process makes tensors first, then installs, as Python does after
// `import torch`.
#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "plimsoll/bytes.h"
#include "plimsoll/torch.h"
#include "torch/arena_pages.h"

namespace plimsoll {
namespace {

using namespace literals;

// Convolution, linear and gelu: on the CPU these go through oneDNN, in the plain layout here.
struct SmallNet : torch::nn::Module {
  torch::nn::Conv2d conv{nullptr};
  torch::nn::Linear linear{nullptr};
  SmallNet() {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 32, 3)));
    linear = register_module("linear", torch::nn::Linear(32 * 30 * 30, 64));
  }
  at::Tensor forward(const at::Tensor& x) { return linear(torch::gelu(conv(x)).flatten(1)); }
};

// Everything here is born before the arena is installed.
struct BornBefore {
  std::shared_ptr<SmallNet> net = std::make_shared<SmallNet>();
  at::Tensor loss = net->forward(torch::randn({4, 3, 32, 32})).square().sum();  // Holds its graph.
  at::Tensor packed = torch::randn({8, 16}).to_mkldnn();  // Freed through the current allocator.
  at::Tensor grown = torch::ones({10});
};

class Environment : public testing::Environment {
 public:
  void SetUp() override {
    born = std::make_unique<BornBefore>();
    TensorArena::install().or_throw();
  }
  void TearDown() override { born.reset(); }
  static inline std::unique_ptr<BornBefore> born;
};
const auto* const kEnvironment = testing::AddGlobalTestEnvironment(new Environment);

std::int64_t status_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(key, 0) == 0) {
      return std::atoll(line.c_str() + key.size()) * 1024;
    }
  }
  return -1;
}

class TensorArenaTest : public testing::Test {
 protected:
  void SetUp() override {
    GovernorOptions options;
    options.memory_limit = "8GiB";
    governor_ = Governor::create(options).or_throw();
    TensorArena::attach(governor_).or_throw();
    TensorArena::reset_peak();
    before_ = TensorArena::stats();
  }
  void TearDown() override {
    TensorArena::detach();
    governor_.close();
  }
  std::int64_t ledger_bytes() const { return governor_.state().pools[0].leased_bytes; }

  Governor governor_;
  ArenaStats before_;
};

TEST_F(TensorArenaTest, EveryTensorByteIsLeased) {
  EXPECT_NE(kEnvironment, nullptr);
  std::vector<at::Tensor> tensors;
  std::int64_t live = 0;
  for (const std::int64_t elements : {1, 16, 300, 9'000, 100'000, 5'000'000}) {
    tensors.push_back(torch::empty({elements}));
    EXPECT_TRUE(TensorArena::owns(tensors.back().data_ptr()));
    live += arena_block_bytes(elements * 4);
  }
  EXPECT_EQ(TensorArena::stats().live_bytes - before_.live_bytes, live);
  EXPECT_EQ(TensorArena::stats().leased_bytes - before_.leased_bytes, ledger_bytes());
  EXPECT_GE(ledger_bytes(), live);
  tensors.clear();
  EXPECT_EQ(TensorArena::stats().live_bytes, before_.live_bytes);
}

TEST_F(TensorArenaTest, ATrainingStepLeavesOnlyWhatItKeeps) {
  auto net = std::make_shared<SmallNet>();
  torch::optim::AdamW optimizer(net->parameters());
  auto step = [&] {
    optimizer.zero_grad();
    net->forward(torch::randn({8, 3, 32, 32})).square().mean().backward();
    optimizer.step();
  };
  step();
  const std::int64_t settled = TensorArena::stats().live_bytes;
  for (int i = 0; i < 5; ++i) {
    step();
    EXPECT_EQ(TensorArena::stats().live_bytes, settled);
    EXPECT_EQ(TensorArena::stats().leased_bytes - before_.leased_bytes, ledger_bytes());
  }
}

TEST_F(TensorArenaTest, TensorsBornBeforeItAreFreedAfterIt) {
  auto& born = *Environment::born;
  const std::int64_t foreign = TensorArena::stats().foreign_frees;
  EXPECT_FALSE(TensorArena::owns(born.grown.data_ptr()));
  born.loss.backward();  // Frees the old graph piece by piece, makes new gradients.
  born.loss.reset();
  born.packed.reset();
  born.net.reset();
  // oneDNN's packed buffer reaches our deleter, which must know it for another's.
  EXPECT_GT(TensorArena::stats().foreign_frees, foreign);
  EXPECT_EQ(TensorArena::stats().live_bytes, before_.live_bytes);
}

TEST_F(TensorArenaTest, OneDnnTensorsBornAttachedAreFreedDetached) {
  at::Tensor packed = torch::randn({64, 256}).to_mkldnn();
  at::Tensor active = torch::gelu(packed).to_dense();
  EXPECT_TRUE(TensorArena::owns(active.data_ptr()));
  EXPECT_GT(TensorArena::stats().live_bytes, before_.live_bytes);
  TensorArena::detach();
  at::Tensor passed = torch::randn({64, 256}).to_mkldnn();  // And born passing through.
  packed.reset();
  active.reset();
  EXPECT_EQ(TensorArena::stats().live_bytes, before_.live_bytes);
  EXPECT_EQ(ledger_bytes(), 0);
  TensorArena::attach(governor_).or_throw();
  passed.reset();  // Freed attached.
  EXPECT_EQ(TensorArena::stats().live_bytes, before_.live_bytes);
}

TEST_F(TensorArenaTest, OldStoragesResizeInTheirOwnAllocator) {
  at::Tensor& old = Environment::born->grown;
  old.resize_({100'000}).fill_(2);
  EXPECT_EQ(old.sum().item<float>(), 200'000.0F);
  EXPECT_FALSE(TensorArena::owns(old.data_ptr()));
  at::Tensor young = torch::ones({10});
  young.resize_({100'000});
  EXPECT_TRUE(TensorArena::owns(young.data_ptr()));
  EXPECT_EQ(young.slice(0, 0, 10).sum().item<float>(), 10.0F);
  young.set_(at::Storage(c10::Storage::use_byte_size_t(), 64, c10::GetCPUAllocator(), true), 0,
             {16}, {1});
  EXPECT_TRUE(TensorArena::owns(young.data_ptr()));
}

TEST_F(TensorArenaTest, CopyOnWriteCloneUsesTheArena) {
  at::Tensor tensor = torch::arange(1000);
  at::Tensor lazy = tensor._lazy_clone();
  lazy.add_(1);
  EXPECT_TRUE(TensorArena::owns(lazy.data_ptr()));
  EXPECT_EQ(lazy[10].item<std::int64_t>(), 11);
  EXPECT_EQ(tensor[10].item<std::int64_t>(), 10);
}

TEST_F(TensorArenaTest, EveryBlockIsAlignedTo64BytesAndNothingHasNoBlock) {
  for (std::int64_t bytes = 1; bytes < 200'000; bytes += bytes / 7 + 1) {
    const auto tensor = torch::empty({bytes}, torch::kUInt8);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) % 64, 0U) << bytes;
  }
  const auto nothing = torch::empty({0});
  EXPECT_EQ(nothing.data_ptr(), nullptr);
  EXPECT_EQ(TensorArena::stats().live_bytes, before_.live_bytes);
}

TEST_F(TensorArenaTest, RefusalIsTorchsOutOfMemoryErrorWithOurTextAndTheNextStepWorks) {
  TensorArena::attach(governor_, 32_MiB).or_throw();
  const auto held = torch::zeros({4 << 20});  // 16 MiB.
  std::string text;
  try {
    const auto refused = torch::zeros({8 << 20});
    FAIL() << "32 MiB more were granted";
  } catch (const c10::OutOfMemoryError& error) {
    text = error.what_without_backtrace();
  }
  EXPECT_EQ(text.find("tensors wanted 32.0 MiB, "), 0U) << text;
  EXPECT_NE(text.find("raise the cap that the tensor arena was attached with, or lower batch_size"),
            std::string::npos)
      << text;
  EXPECT_EQ(TensorArena::stats().refusals, before_.refusals + 1);
  EXPECT_EQ(torch::ones({1 << 20}).sum().item<float>(), static_cast<float>(1 << 20));
}

TEST_F(TensorArenaTest, RefusalByTheLimitNamesTheHoldersAndTheOption) {
  auto others = governor_.reserve(Tag::kEmbedding, governor_.state().free_bytes() - 8_MiB);
  ASSERT_TRUE(others);
  try {
    const auto refused = torch::zeros({16 << 20});
    FAIL() << "64 MiB were granted out of 8";
  } catch (const c10::OutOfMemoryError& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_EQ(text.find("tensors wanted 64.0 MiB, "), 0U) << text;
    EXPECT_NE(text.find("of the 8.0 GiB limit (held: "), std::string::npos) << text;
    EXPECT_NE(text.find("raise memory_limit or lower batch_size"), std::string::npos) << text;
    // R59: what batch finders of other libraries look for.
    EXPECT_NE(text.find("DefaultCPUAllocator: can't allocate memory"), std::string::npos) << text;
  }
  others = Lease{};
  EXPECT_EQ(torch::zeros({16 << 20}).numel(), 16 << 20);
}

// What torch.profiler listens through.
struct Listener : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, std::int64_t bytes, std::size_t allocated, std::size_t reserved,
                         c10::Device) override {
    (bytes > 0 ? allocations : frees) += 1;
    sum += bytes;
    EXPECT_LE(allocated, reserved);
  }
  void reportOutOfMemory(std::int64_t bytes, std::size_t, std::size_t, c10::Device) override {
    refused_bytes += bytes;
  }
  bool memoryProfilingEnabled() const override { return true; }
  int allocations{0};
  int frees{0};
  std::int64_t sum{0};
  std::int64_t refused_bytes{0};
};

TEST_F(TensorArenaTest, TorchsProfilerSeesEveryBlockComeAndGo) {
  const auto listener = std::make_shared<Listener>();
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, listener);
    auto net = std::make_shared<SmallNet>();
    net->forward(torch::randn({2, 3, 32, 32})).sum().backward();
    EXPECT_EQ(listener->sum, TensorArena::stats().live_bytes - before_.live_bytes);
    net.reset();
    EXPECT_THROW(torch::empty({1LL << 50}), c10::OutOfMemoryError);
  }
  EXPECT_GT(listener->allocations, 20);
  EXPECT_EQ(listener->allocations, listener->frees);
  EXPECT_EQ(listener->sum, 0);
  EXPECT_EQ(listener->refused_bytes, 4LL << 50);
}

TEST_F(TensorArenaTest, PurgeLowersAnonymousResidentMemory) {
  torch::ones({64 << 20});  // 256 MiB.
  const std::int64_t cached = TensorArena::stats().cached_bytes;
  const std::int64_t resident = status_bytes("RssAnon:");
  EXPECT_GE(cached, 256_MiB);
  const std::int64_t purged = TensorArena::purge();
  EXPECT_EQ(purged, cached);
  EXPECT_LE(status_bytes("RssAnon:"), resident - 255_MiB);
  EXPECT_EQ(TensorArena::stats().cached_bytes, 0);
}

TEST_F(TensorArenaTest, ResidentStaysWithinTheLease) {
  ::malloc_trim(0);
  const std::int64_t resident = status_bytes("RssAnon:");
  std::mt19937 random(5);
  std::vector<at::Tensor> tensors(40);
  for (int i = 0; i < 2'000; ++i) {
    const auto elements = static_cast<std::int64_t>(1 + random() % (1U << (4 + random() % 18)));
    tensors[random() % tensors.size()] = torch::ones({elements});
    if (i % 100 == 0) {
      EXPECT_LE(status_bytes("RssAnon:") - resident, ledger_bytes() + 4_MiB) << "step " << i;
    }
  }
  const ArenaStats stats = TensorArena::stats();
  EXPECT_LE(stats.leased_peak_bytes, stats.live_peak_bytes * 33 / 32 + 8_MiB + 2_MiB);
}

TEST_F(TensorArenaTest, ThreadsShareItAndTheLedgerAgrees) {
  {
    std::vector<std::jthread> threads;
    for (unsigned t = 0; t < 4; ++t) {
      threads.emplace_back([t] {
        std::mt19937 random(t);
        std::vector<at::Tensor> mine(16);
        for (int i = 0; i < 2'000; ++i) {
          const auto elements = static_cast<std::int64_t>(1 + random() % 20'000);
          mine[random() % mine.size()] = torch::full({elements}, static_cast<double>(t));
        }
        for (const auto& tensor : mine) {
          EXPECT_TRUE(!tensor.defined() || (tensor == static_cast<double>(t)).all().item<bool>());
        }
      });
    }
  }
  EXPECT_EQ(TensorArena::stats().live_bytes, before_.live_bytes);
  EXPECT_EQ(TensorArena::stats().leased_bytes - before_.leased_bytes, ledger_bytes());
}

TEST_F(TensorArenaTest, ATensorOutlivesItsGovernor) {
  const std::int64_t foreign = before_.leased_bytes;
  at::Tensor kept = torch::full({1 << 20}, 3.0);
  TensorArena::detach();
  governor_.close();
  EXPECT_EQ(kept.sum().item<float>(), 3.0F * (1 << 20));
  EXPECT_EQ(TensorArena::stats().leased_bytes - foreign, 4_MiB);
  governor_ = Governor::create({.memory_limit = "8GiB"}).or_throw();
  EXPECT_EQ(governor_.state().orphan_bytes, 4_MiB);
  TensorArena::attach(governor_).or_throw();
  at::Tensor young = kept * 2;
  EXPECT_GE(ledger_bytes(), 4_MiB);
  kept.reset();
  EXPECT_EQ(governor_.state().orphan_bytes, 0);
  EXPECT_EQ(young[7].item<float>(), 6.0F);
}

TEST_F(TensorArenaTest, AForkedChildPassesThroughAndFreesWhatItInherited) {
  at::Tensor inherited = torch::ones({1 << 20});
  const std::int64_t leased = ledger_bytes();
  const pid_t child = ::fork();
  if (child == 0) {
    const bool whole = inherited.data_ptr<float>()[9] == 1.0F;
    inherited.reset();
    const at::Tensor own = torch::empty({1000});
    ::_exit(whole && !TensorArena::owns(own.data_ptr()) ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(ledger_bytes(), leased);
  EXPECT_EQ(inherited.sum().item<float>(), static_cast<float>(1 << 20));
}

TEST_F(TensorArenaTest, InstallingTwiceIsHarmless) {
  EXPECT_TRUE(TensorArena::install());
  EXPECT_TRUE(TensorArena::owns(torch::empty({3}).data_ptr()));
}

TEST(TensorOverTest, IsAViewThatKeepsItsOwner) {
  auto owner = std::make_shared<std::vector<float>>(std::vector<float>{1, 2, 3, 4, 5, 6});
  const std::weak_ptr<std::vector<float>> watch = owner;
  const auto bytes = std::as_writable_bytes(std::span<float>(*owner));
  at::Tensor view = tensor_over(bytes, {2, 3}, at::kFloat, std::move(owner));
  EXPECT_EQ(view.data_ptr(), static_cast<void*>(bytes.data()));
  EXPECT_EQ(view[1][0].item<float>(), 4.0F);
  at::Tensor column = view.select(1, 2);
  view.reset();
  EXPECT_FALSE(watch.expired());
  EXPECT_EQ(column.sum().item<float>(), 9.0F);
  column.reset();
  EXPECT_TRUE(watch.expired());
}

TEST(TensorOverTest, RefusesAShapeThatIsNotTheBytes) {
  std::vector<float> values(6);
  EXPECT_THROW(tensor_over(std::as_writable_bytes(std::span(values)), {2, 4}, at::kFloat, nullptr),
               Exception);
}

TEST(MakeDeterministicTest, SetsTorchAndWantsMklsSetting) {
  const char* cbwr = std::getenv("MKL_CBWR");
  const std::string old = cbwr != nullptr ? cbwr : "COMPATIBLE";
  ::unsetenv("MKL_CBWR");
  const auto refused = make_deterministic(1);
  ::setenv("MKL_CBWR", old.c_str(), 1);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().to_string(),
            "MKL_CBWR is not set: MKL would pick its kernels by the address of the data: "
            "export MKL_CBWR=COMPATIBLE before the process starts");
  EXPECT_FALSE(make_deterministic(0));
  ASSERT_TRUE(make_deterministic(2));
  EXPECT_TRUE(at::globalContext().deterministicAlgorithms());
  EXPECT_FALSE(at::globalContext().deterministicFillUninitializedMemory());
  EXPECT_EQ(at::get_num_threads(), 2);
}

TEST(MakeDeterministicTest, IndexGradientsAtTwoThreadsHaveTheSameBitsEveryTime) {
  ASSERT_TRUE(make_deterministic(2));
  torch::manual_seed(3);
  const auto ids = torch::randint(0, 50, {20'000});
  const auto weights = torch::randn({20'000, 16});
  at::Tensor first;
  for (int i = 0; i < 10; ++i) {
    auto table = torch::zeros({50, 16}, torch::requires_grad());
    (table.index({ids}) * weights).sum().backward();
    if (i == 0) {
      first = table.grad().clone();
    }
    EXPECT_TRUE(torch::equal(first, table.grad())) << "run " << i;
  }
}

}  // namespace
}  // namespace plimsoll
