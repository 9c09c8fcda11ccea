// SPDX-License-Identifier: Apache-2.0
//
// Both devices through the one interface. Torch's is an allocator of this test, behind torch's own
// interface for devices, that keeps its books in a DeviceAllocator.
#include "torch/device_backend.h"

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

using namespace literals;

constexpr std::int64_t kTotal = 1_GiB;
constexpr std::int64_t kOthers = 100_MiB;  // Held by other processes.

class TestAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    auto block = device.allocate(static_cast<std::int64_t>(bytes)).or_throw();
    return {nullptr, reinterpret_cast<void*>(static_cast<std::intptr_t>(block) + 1), &release,
            c10::Device(c10::kPrivateUse1, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* /*to*/, const void* /*from*/, std::size_t /*bytes*/) const override {}
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override {
    fail_if_lost();
    device.empty_cache();
  }
  void recordStream(const c10::DataPtr& /*pointer*/, c10::Stream /*stream*/) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex /*index*/) override {
    fail_if_lost();
    const DeviceMemoryStats now = device.stats();
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = now.allocated_bytes;
    stats.allocated_bytes[0].peak = now.allocated_peak_bytes;
    stats.reserved_bytes[0].current = now.reserved_bytes;
    stats.reserved_bytes[0].peak = now.reserved_peak_bytes;
    stats.segment[0].current = now.segments;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*index*/) override {}
  void resetPeakStats(c10::DeviceIndex /*index*/) override {
    fail_if_lost();
    device.reset_peak();
  }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex /*index*/) override {
    fail_if_lost();
    return {static_cast<std::size_t>(kTotal - kOthers - device.stats().reserved_bytes),
            static_cast<std::size_t>(kTotal)};
  }

  inline static plimsoll::DeviceAllocator device{kTotal};
  bool lost{false};

 private:
  static void release(void* context) {
    device.free(plimsoll::DeviceAllocator::Block(reinterpret_cast<std::intptr_t>(context) - 1));
  }
  void fail_if_lost() const { TORCH_CHECK(!lost, "the device was lost"); }
};

class DeviceBackendTest : public testing::Test {
 protected:
  void SetUp() override { TestAllocator::device = plimsoll::DeviceAllocator(kTotal); }
  static DeviceUse use(const DeviceBackend& device) { return device.stats().or_throw(); }

  TestAllocator allocator_;
};

TEST_F(DeviceBackendTest, TorchsDeviceTellsWhatItsAllocatorHolds) {
  const auto device = torch_device(allocator_, 0, "test:0").or_throw();
  EXPECT_EQ(device->name(), "test:0");
  EXPECT_EQ(device->total_bytes(), kTotal);
  EXPECT_EQ(device->limit_bytes(), kTotal - kOthers);
  {
    const c10::DataPtr block = allocator_.allocate(3_MiB);
    EXPECT_EQ(use(*device).allocated_bytes, 3_MiB);
    EXPECT_EQ(use(*device).reserved_bytes, 20_MiB);
    EXPECT_EQ(use(*device).segments, 1);
  }
  EXPECT_EQ(use(*device).allocated_bytes, 0);
  EXPECT_EQ(use(*device).allocated_peak_bytes, 3_MiB);
  ASSERT_TRUE(device->empty_cache());
  EXPECT_EQ(use(*device).reserved_bytes, 0);
  EXPECT_EQ(use(*device).reserved_peak_bytes, 20_MiB);
  ASSERT_TRUE(device->reset_peak());
  EXPECT_EQ(use(*device).reserved_peak_bytes, 0);
  EXPECT_EQ(use(*device).allocated_peak_bytes, 0);
}

TEST_F(DeviceBackendTest, WhatIsReservedAlreadyCountsAsWhatMayBe) {
  const c10::DataPtr block = allocator_.allocate(50_MiB);
  const auto device = torch_device(allocator_, 0, "test:0").or_throw();
  EXPECT_EQ(device->limit_bytes(), kTotal - kOthers);
}

TEST_F(DeviceBackendTest, ALimitIsBetweenAByteAndWhatTheDeviceHas) {
  const auto real = torch_device(allocator_, 0, "test:0").or_throw();
  SimulatedDevice simulated(kTotal);
  for (DeviceBackend* device : {real.get(), static_cast<DeviceBackend*>(&simulated)}) {
    ASSERT_TRUE(device->set_limit(64_MiB));
    EXPECT_EQ(device->limit_bytes(), 64_MiB);
    for (const std::int64_t bad : {std::int64_t{0}, kTotal + 1}) {
      const auto refused = device->set_limit(bad);
      ASSERT_FALSE(refused);
      EXPECT_NE(refused.error().to_string().find("--device-memory-limit"), std::string::npos);
    }
    EXPECT_EQ(device->limit_bytes(), 64_MiB);
  }
}

TEST_F(DeviceBackendTest, TheSimulatedDeviceRefusesWhatPassesItsLimit) {
  SimulatedDevice device(kTotal);
  ASSERT_TRUE(device.set_limit(64_MiB));
  const auto block = device.allocator().allocate(40_MiB).or_throw();
  EXPECT_FALSE(device.allocator().allocate(30_MiB));
  EXPECT_EQ(use(device).allocated_bytes, 40_MiB);
  device.allocator().free(block);
  EXPECT_EQ(use(device).reserved_bytes, 40_MiB);
  ASSERT_TRUE(device.empty_cache());
  EXPECT_EQ(use(device).segments, 0);
  ASSERT_TRUE(device.reset_peak());
  EXPECT_EQ(use(device).reserved_peak_bytes, 0);
  EXPECT_EQ(device.name(), "simulated");
}

TEST_F(DeviceBackendTest, WhatTorchThrowsIsAnError) {
  const auto device = torch_device(allocator_, 0, "test:0").or_throw();
  allocator_.lost = true;
  for (const auto& error :
       {device->stats().error(), device->reset_peak().error(), device->empty_cache().error()}) {
    EXPECT_EQ(error.code, ErrorCode::kInternal);
    EXPECT_NE(error.to_string().find("test:0: the device was lost"), std::string::npos)
        << error.to_string();
  }
  EXPECT_FALSE(torch_device(allocator_, 0, "test:0"));
}

TEST_F(DeviceBackendTest, TheHostIsNoDevice) {
  EXPECT_EQ(open_device({}).or_throw(), nullptr);
}

TEST_F(DeviceBackendTest, ASimulatedDeviceHasTheMemoryItIsGiven) {
  const auto device = open_device({"simulated", "8GiB"}).or_throw();
  EXPECT_EQ(device->name(), "simulated");
  EXPECT_EQ(device->total_bytes(), 8_GiB);
  EXPECT_EQ(device->limit_bytes(), 8_GiB);
}

TEST_F(DeviceBackendTest, WrongChoicesNameTheOptionToChange) {
  struct Case {
    DeviceChoice choice;
    const char* says;
    const char* advises;
  };
  for (const Case& one :
       {Case{{"cpu", "8GiB"}, "--device-memory-limit 8GiB: there is no device", "--device cuda"},
        Case{{"simulated", ""}, "--device simulated: nothing says", "--device-memory-limit"},
        Case{{"simulated", "much"}, "--device-memory-limit: ", "8GiB"},
        Case{{"simulated", "80%"}, "--device-memory-limit: ", "8GiB"},
        Case{{"simulated", "0"}, "--device-memory-limit: 0 is no memory", "8GiB"},
        Case{{"tpu", ""}, "--device tpu: no such device", "simulated"}}) {
    const auto refused = open_device(one.choice);
    ASSERT_FALSE(refused) << one.says;
    EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
    EXPECT_EQ(refused.error().to_string().find(one.says), 0U) << refused.error().to_string();
    EXPECT_NE(refused.error().to_string().find(one.advises), std::string::npos)
        << refused.error().to_string();
  }
}

TEST_F(DeviceBackendTest, WithoutCudaThereIsAWordOnWhatToInstall) {
  const auto opened = open_device({"cuda", ""});
  if (opened) {  // A machine with a device.
    EXPECT_GT((*opened)->total_bytes(), 0);
    EXPECT_LE((*opened)->limit_bytes(), (*opened)->total_bytes());
    return;
  }
  EXPECT_EQ(opened.error().code, ErrorCode::kInvalidArgument);
  const std::string text = opened.error().to_string();
  EXPECT_EQ(text.find("--device cuda: this torch ("), 0U) << text;
  EXPECT_NE(text.find("has no CUDA"), std::string::npos) << text;
  EXPECT_NE(text.find("--device simulated"), std::string::npos) << text;
}

// A real device's allocator, and ours in its place: the same requests, the same segments.
TEST_F(DeviceBackendTest, OnADeviceTheSameSegmentsAreBought) {
  const auto opened = open_device({"cuda", ""});
  if (!opened) {
    GTEST_SKIP() << opened.error().to_string();
  }
  DeviceBackend& real = **opened;
  c10::Allocator& device_blocks = *c10::GetAllocator(at::kCUDA);
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    ASSERT_TRUE(real.empty_cache());
    ASSERT_EQ(use(real).reserved_bytes, 0);
    SimulatedDevice simulated(real.total_bytes());
    std::mt19937_64 random(seed);
    std::vector<std::pair<c10::DataPtr, plimsoll::DeviceAllocator::Block>> held;
    for (int i = 0; i < 600; ++i) {
      if (!held.empty() && random() % 5 < 2) {
        const std::size_t one = random() % held.size();
        simulated.allocator().free(held[one].second);
        std::swap(held[one], held.back());
        held.pop_back();
      } else {
        // Of every order from 1 B to 64 MiB.
        const std::int64_t bytes =
            1 + static_cast<std::int64_t>(random() % (std::uint64_t{1} << (1 + random() % 26)));
        held.emplace_back(device_blocks.allocate(static_cast<std::size_t>(bytes)),
                          simulated.allocator().allocate(bytes).or_throw());
      }
      const DeviceUse there = use(real);
      const DeviceUse ours = use(simulated);
      ASSERT_EQ(there.allocated_bytes, ours.allocated_bytes)
          << "seed " << seed << ", request " << i;
      ASSERT_EQ(there.reserved_bytes, ours.reserved_bytes) << "seed " << seed << ", request " << i;
      ASSERT_EQ(there.segments, ours.segments) << "seed " << seed << ", request " << i;
    }
  }
}

}  // namespace
}  // namespace plimsoll
