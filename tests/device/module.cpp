// SPDX-License-Identifier: Apache-2.0
//
// The simulated device's functions for Python; tests/device/__init__.py says what they do.
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <optional>

#include "plan/device_allocator.h"
#include "tests/device/backend.h"
#include "tests/device/kernels.h"
#include "tests/device/memory.h"
#include "tests/device/streams.h"

namespace {

// The project's own replayer of CUDA's allocator, to be compared.
class Rules {
 public:
  explicit Rules(std::int64_t limit_bytes) : allocator_(limit_bytes) {}
  std::optional<int> allocate(std::int64_t bytes) {
    const auto block = allocator_.allocate(bytes);
    return block ? std::optional(static_cast<int>(*block)) : std::nullopt;
  }
  void free(int block) { allocator_.free(plimsoll::DeviceAllocator::Block{block}); }
  std::array<std::int64_t, 3> statistics() const {
    const auto now = allocator_.stats();
    return {now.allocated_bytes, now.reserved_bytes, now.segments};
  }

 private:
  plimsoll::DeviceAllocator allocator_;
};

}  // namespace

PYBIND11_MODULE(plimsoll_simulated_device, m) {
  namespace py = pybind11;
  sim::register_hooks();
  m.def("set_device_count", &sim::set_device_count);
  m.def("device_count", &sim::device_count);
  m.def("exchange_device", &sim::exchanged_device);
  m.def("default_generator", [](int device) { return sim::default_generator(device); });
  m.def(
      "settings",
      [](int device, std::size_t capacity, std::size_t context, double fraction, bool exact,
         bool poison) {
        sim::memory(device).set({capacity, context, fraction, exact, poison});
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("refuse_after", [](int device, std::int64_t granted, std::int64_t count) {
    sim::memory(device).refuse_after(granted, count);
  });
  m.def("host_driver", &sim::host_driver);
  m.def("check_order", &sim::set_order_checked);
  m.def("run_ahead", &sim::set_run_ahead);
  m.def("hold_copies", &sim::set_copies_held);
  m.def("hold_stream", [] {
    const int device = sim::current_device();
    sim::hold_stream(device, sim::current_stream(device));
  });
  m.def("open_gates", &sim::open_gates);
  m.def("register_pinned", &sim::register_pinned);
  m.def("unregister_pinned", &sim::unregister_pinned);
  py::class_<Rules>(m, "Rules")
      .def(py::init<std::int64_t>())
      .def("allocate", &Rules::allocate)
      .def("free", &Rules::free)
      .def("statistics", [](const Rules& one) {
        const auto [allocated, reserved, segments] = one.statistics();
        return py::make_tuple(allocated, reserved, segments);
      });
}
