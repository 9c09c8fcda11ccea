// SPDX-License-Identifier: Apache-2.0
//
// See backend.h. Order here: generators, hooks, guard, autocast.
#include "tests/device/backend.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "tests/device/kernels.h"
#include "tests/device/streams.h"

namespace sim {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

DeviceIndex current() {
  return DeviceIndex(current_device());
}

// The CPU's engine, with a state of the device's own.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex index, at::Generator engine = at::detail::createCPUGenerator())
      : GeneratorImpl(Device(kSim, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(std::move(engine)) {}
  void set_current_seed(std::uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(std::uint64_t) override { TORCH_CHECK(false, "sim: no offset of a generator"); }
  std::uint64_t get_offset() const override { TORCH_CHECK(false, "sim: no offset of a generator"); }
  std::uint64_t current_seed() const override { return cpu.current_seed(); }
  std::uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    cpu.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(device().index(), cpu.clone()); }

  at::Generator cpu;
};

int devices = 1;

}  // namespace

at::Generator kernel_generator(const at::Generator& one) {
  return static_cast<Generator*>(one.unsafeGetGeneratorImpl())->cpu;
}
const at::Generator& default_generator(int device) {
  static auto* all = new std::array<at::Generator, kDevices>{
      at::make_generator<Generator>(DeviceIndex(0)), at::make_generator<Generator>(DeviceIndex(1))};
  return (*all)[std::size_t(device < 0 ? current_device() : device)];
}

int device_count() {
  return devices;
}
void set_device_count(int count) {
  TORCH_CHECK(count >= 1 && count <= kDevices, "sim: 1 to ", kDevices, " devices");
  devices = count;
}
int exchanged_device(int device) {
  const int before = current_device();
  if (device >= 0) {
    TORCH_CHECK(device < devices, "sim: there is no device ", device);
    current_device() = device;
  }
  return before;
}

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DeviceIndex(devices); }
  void setCurrentDevice(DeviceIndex index) const override { exchanged_device(index); }
  DeviceIndex getCurrentDevice() const override { return current(); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return DeviceIndex(exchanged_device(index));
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return DeviceIndex(exchanged_device(index));
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current() : index);
  }
  Device getDeviceFromPtr(void* data) const override {
    return Device(kSim, DeviceIndex(device_of(data)));
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(kSim); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    auto* allocator = c10::GetAllocator(kSim);
    auto data = bytes > 0
                    ? allocator->allocate(bytes)
                    : c10::DataPtr(nullptr, nullptr, allocator->raw_deleter(), storage.device());
    if (const auto same = std::min(bytes, storage.nbytes()); same > 0 && storage.data()) {
      allocator->copy_data(data.get(), storage.data(), same);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
};

using Shared = std::shared_ptr<Event>;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  Device exchangeDevice(Device d) const override {
    return Device(kSim, DeviceIndex(exchanged_device(d.index())));
  }
  Device getDevice() const override { return Device(kSim, current()); }
  void setDevice(Device d) const override { exchanged_device(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) {
      current_device() = d.index();
    }
  }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(devices); }

  static Device full(Device d) { return Device(kSim, d.index() < 0 ? current() : d.index()); }
  static Stream stream(Device d, int id) { return Stream(Stream::UNSAFE, full(d), id); }
  Stream getStream(Device d) const override { return stream(d, current_stream(full(d).index())); }
  Stream getDefaultStream(Device d) const override { return stream(d, 0); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream getNewStream(Device d, int) const override {
    return stream(d, new_stream(full(d).index()));
  }
  Stream exchangeStream(Stream s) const override {
    const Stream before = getStream(s.device());
    current_stream(s.device_index()) = int(s.id());
    return before;
  }
  bool queryStream(const Stream& s) const override {
    const bool over = idle(s.device_index(), int(s.id()));
    if (over) {
      host_waited(s.device_index(), int(s.id()));
    }
    return over;
  }
  void synchronizeStream(const Stream& s) const override {
    drain(s.device_index(), int(s.id()));
    host_waited(s.device_index(), int(s.id()));
  }
  void synchronizeDevice(DeviceIndex index) const override {
    for (int id = 0; id < kStreams; ++id) {
      synchronizeStream(stream(Device(kSim, index), id));
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& s) const override {
    if (data.get() != nullptr) {
      memory(device_of(data.get())).record(data.get(), int(s.id()));
    }
  }

  static Shared& shared(void* event) { return *static_cast<Shared*>(event); }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Shared*>(event);
  }
  void record(void** event, const Stream& s, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Shared(std::make_shared<Event>());
    }
    sim::record(shared(*event), s.device_index(), int(s.id()));
  }
  void block(void* event, const Stream& s) const override {
    if (event != nullptr) {
      sim::block(shared(event), s.device_index(), int(s.id()));
    }
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) {
      return true;
    }
    Event& one = *shared(event);
    const std::lock_guard lock(one.mutex);
    if (one.reached < one.recorded) {
      return false;
    }
    host_waited(one.clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      synchronize(*shared(event));
    }
  }
  double elapsedTime(void* a, void* b, DeviceIndex) const override {
    TORCH_CHECK(a != nullptr && b != nullptr, "sim: both events are recorded first");
    return double(shared(b)->nanoseconds - shared(a)->nanoseconds) / 1e6;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

void register_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

}  // namespace sim

// ---- Autocast: torch's lists, for this device ----

namespace at::autocast {
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define SIM_LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIM_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIM_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIM_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOW)
  AT_FORALL_FP32(SIM_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(SIM_PROMOTE)
}
}  // namespace at::autocast
