// SPDX-License-Identifier: Apache-2.0
//
// plimsoll._torch: the tensor arena, linked to the user's torch.
//
// Importing it installs the arena; a Governor attaches to it. Types and exceptions come from
// plimsoll._core, which this module imports first.
// Reading order: bindings.h, plimsoll/torch.h, this file.
//
// Threads: attach() and detach() want no torch operator running.
// Memory:  none of its own.
#include <string>

#include <nanobind/stl/string.h>

#include "bindings.h"
#include "plimsoll/governor.h"
#include "plimsoll/torch.h"
#include "torch/tensor_arena.h"
#include "torch_plan.h"

namespace plimsoll::python {
namespace {

DictOf<std::int64_t> arena_stats() {
  const ArenaStats stats = TensorArena::stats();
  nb::dict out;
  out["live_bytes"] = stats.live_bytes;
  out["live_peak_bytes"] = stats.live_peak_bytes;
  out["cached_bytes"] = stats.cached_bytes;
  out["leased_bytes"] = stats.leased_bytes;
  out["leased_peak_bytes"] = stats.leased_peak_bytes;
  out["allocations"] = stats.allocations;
  out["foreign_frees"] = stats.foreign_frees;
  out["purges"] = stats.purges;
  out["refusals"] = stats.refusals;
  return out;
}

void bind_arena(nb::module_& m) {
  m.def(
      "attach", [](const Governor& governor) { TensorArena::attach(governor).or_throw(); },
      nb::arg("governor"),
      "From now on new tensors are leased from `governor`.\n\nRequires: no torch operator is "
      "running.\nErrors:   ValueError in a forked child.");
  m.def("detach", &TensorArena::detach,
        "New tensors pass through to torch's own allocator; those alive keep their leases.");
  m.def("installed", &TensorArena::installed, "Whether the arena is torch's CPU allocator.");
  m.def(
      "owns",
      [](std::uintptr_t address) {
        return TensorArena::owns(reinterpret_cast<const void*>(address));
      },
      nb::arg("address"),
      "Whether the byte at this address (tensor.data_ptr()) lies in the arena.");
  m.def("arena_stats", &arena_stats,
        "live_bytes, live_peak_bytes, cached_bytes, leased_bytes, allocations, foreign_frees, …");
  m.def("reset_peak", &TensorArena::reset_peak, "Starts the peaks again from what is live.");
  m.def(
      "clean_up",
      []() -> DictOf<nb::any> {
        const CleanUp done = [] {
          nb::gil_scoped_release unlocked;
          return clean_up().or_throw();
        }();
        nb::dict out;
        out["arena_bytes"] = done.arena_bytes;
        out["resident_before_bytes"] = done.resident_before_bytes;
        out["resident_after_bytes"] = done.resident_after_bytes;
        out["freed_bytes"] = done.freed_bytes();
        out["seconds"] = done.seconds;
        return out;
      },
      "Governor.clean_up(). Errors: OSError.");
  m.def(
      "refuse",
      [](std::int64_t first, std::int64_t count) { tensor_arena_pages().refuse(first, count); },
      nb::arg("first"), nb::arg("count"),
      "For tests: the `first`-th allocation from now and the `count - 1` after it are refused.");
  m.def("purge", &TensorArena::purge, nb::call_guard<nb::gil_scoped_release>(),
        "Gives free pages back to the system; returns the bytes.");
  m.def(
      "make_deterministic",
      [](int compute_threads) { make_deterministic(compute_threads).or_throw(); },
      nb::arg("compute_threads"),
      "Fixes what makes torch's results depend on the run. Errors: ValueError without MKL_CBWR.");
}

}  // namespace
}  // namespace plimsoll::python

NB_MODULE(_torch, m) {
  namespace nb = nanobind;
  using namespace plimsoll::python;
  nb::set_leak_warnings(false);
  m.doc() =
      "The tensor arena, linked to the installed torch. Importing it installs the "
      "arena.\n\nPrivate: "
      "plimsoll.Governor attaches the arena. Where plimsoll was built without torch, importing "
      "this "
      "raises ImportError saying how.";
  nb::module_::import_("torch");
  nb::module_::import_("plimsoll._core");
  static_cast<void>(plimsoll::TensorArena::install());  // Where it could not be, attach() says why.
  bind_arena(m);
  bind_plan(m);
}
