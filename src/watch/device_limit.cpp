// SPDX-License-Identifier: Apache-2.0
#include "watch/device_limit.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

constexpr const char* kTorch = "PYTORCH_CUDA_ALLOC_CONF";
constexpr const char* kTorchShare = "per_process_memory_fraction";
constexpr std::int64_t kWhole = 1'000'000;  // Of which a share is told.

// nvml.h's nvmlMemory_t.
struct CardMemory {
  unsigned long long total, free, used;
};

template <class F>
F* function(void* library, const char* name) {
  return reinterpret_cast<F*>(::dlsym(library, name));
}

// The memory of the largest GPU; 0: NVIDIA's driver is not there, or has none.
std::int64_t largest_card_bytes() {
  void* const library = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return 0;
  }
  const auto begin = function<int()>(library, "nvmlInit_v2");
  const auto end = function<int()>(library, "nvmlShutdown");
  const auto count = function<int(unsigned*)>(library, "nvmlDeviceGetCount_v2");
  const auto card = function<int(unsigned, void**)>(library, "nvmlDeviceGetHandleByIndex_v2");
  const auto memory = function<int(void*, CardMemory*)>(library, "nvmlDeviceGetMemoryInfo");
  std::int64_t most = 0;
  if (begin != nullptr && end != nullptr && count != nullptr && card != nullptr &&
      memory != nullptr && begin() == 0) {
    unsigned cards = 0;
    if (count(&cards) != 0) {
      cards = 0;
    }
    for (unsigned at = 0; at < cards; ++at) {
      void* one = nullptr;
      CardMemory has{};
      if (card(at, &one) == 0 && memory(one, &has) == 0) {
        most = std::max(most, static_cast<std::int64_t>(has.total));
      }
    }
    end();
  }
  ::dlclose(library);
  return most;
}

}  // namespace

Result<std::string> limit_devices(const std::string& limit) {
  const bool is_share = limit.find('%') != std::string::npos;
  const auto asked = parse_bytes(limit, is_share ? kWhole : 0);
  if (!asked || *asked == 0) {
    return fail(ErrorCode::kInvalidArgument,
                asked ? "--device-memory-limit: " + limit + " is no memory at all"
                      : "--device-memory-limit: " + asked.error().to_string(),
                "such as 20GiB, or 80%");
  }
  ::setenv(kDeviceLimitVariable, limit.c_str(), 1);
  const std::int64_t whole = is_share ? kWhole : largest_card_bytes();
  if (whole == 0) {
    return std::string(
        "NVIDIA's driver does not tell how large the GPU is: runs of plimsoll keep the limit of "
        "its memory, and other programs know nothing of it; a share, 80%, they would keep, too");
  }
  const char* const had = std::getenv(kTorch);
  const std::string before = had == nullptr ? "" : had;
  if (before.find(kTorchShare) != std::string::npos) {
    return fmt::format("{} says {} already, which stays", kTorch, before);
  }
  const double share = std::min(1.0, static_cast<double>(*asked) / static_cast<double>(whole));
  ::setenv(
      kTorch,
      fmt::format("{}{}{}:{:.6f}", before, before.empty() ? "" : ",", kTorchShare, share).c_str(),
      1);
  return std::string();
}

}  // namespace plimsoll
