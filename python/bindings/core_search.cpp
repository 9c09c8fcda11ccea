// SPDX-License-Identifier: Apache-2.0
//
// plimsoll._core: where memory is allocated and who holds it, while a watch searches.
//
// Reading order: watch/samples.h, watch/malloc_hooks.h, places.h, holders.h, this file.
//
// Threads: with Python's lock; the hooks run on any thread.
// Memory:  watch/samples.h, holders.h.
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <malloc.h>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "holders.h"
#include "places.h"
#include "plimsoll/limits.h"
#include "watch/malloc_hooks.h"
#include "watch/samples.h"

namespace plimsoll::python {
namespace {

// Python's small objects: what is larger goes to malloc().
constexpr std::size_t kSmall = 512;

// Written under Python's lock, while the hooks are not installed.
std::array<PyMemAllocatorEx, 2> plain_objects{};

template <std::size_t kDomain>
void* object_malloc(void* /*context*/, std::size_t bytes) {
  const PyMemAllocatorEx& plain = plain_objects[kDomain];
  void* const pointer = plain.malloc(plain.ctx, bytes);
  if (bytes <= kSmall) {
    Samples::allocated(pointer, bytes);
  }
  return pointer;
}
template <std::size_t kDomain>
void* object_calloc(void* /*context*/, std::size_t count, std::size_t bytes) {
  const PyMemAllocatorEx& plain = plain_objects[kDomain];
  void* const pointer = plain.calloc(plain.ctx, count, bytes);
  if (count * bytes <= kSmall) {
    Samples::allocated(pointer, count * bytes);
  }
  return pointer;
}
template <std::size_t kDomain>
void* object_realloc(void* /*context*/, void* before, std::size_t bytes) {
  const PyMemAllocatorEx& plain = plain_objects[kDomain];
  const auto address = reinterpret_cast<std::uintptr_t>(before);
  void* const pointer = plain.realloc(plain.ctx, before, bytes);
  if (pointer != nullptr && bytes <= kSmall) {
    Samples::moved(address, pointer, bytes);
  } else if (pointer != nullptr) {
    Samples::freed(reinterpret_cast<void*>(address));
  }
  return pointer;
}
template <std::size_t kDomain>
void object_free(void* /*context*/, void* pointer) {
  const PyMemAllocatorEx& plain = plain_objects[kDomain];
  Samples::freed(pointer);
  plain.free(plain.ctx, pointer);
}

template <std::size_t kDomain>
void hook_objects(PyMemAllocatorDomain domain, bool hooked) {
  PyMemAllocatorEx now{};
  PyMem_GetAllocator(domain, &now);
  const bool ours = now.malloc == &object_malloc<kDomain>;
  if (hooked && !ours) {
    // Of a hook that another (tracemalloc) has wrapped, ours is part already.
    if (plain_objects[kDomain].malloc != nullptr) {
      return;
    }
    plain_objects[kDomain] = now;
    PyMemAllocatorEx hook{nullptr, &object_malloc<kDomain>, &object_calloc<kDomain>,
                          &object_realloc<kDomain>, &object_free<kDomain>};
    PyMem_SetAllocator(domain, &hook);
  } else if (!hooked && ours) {
    PyMem_SetAllocator(domain, &plain_objects[kDomain]);
    plain_objects[kDomain] = {};
  }
}

void hook_all_objects(bool hooked) {
  hook_objects<0>(PYMEM_DOMAIN_OBJ, hooked);
  hook_objects<1>(PYMEM_DOMAIN_MEM, hooked);
}

// One search of the process. Its hooks are removed by close().
class Allocations {
 public:
  Allocations(double mean_bytes, const std::vector<std::string>& library_folders) {
    if (Samples::on()) {
      throw Exception(make_error(ErrorCode::kInvalidArgument,
                                 "Allocations: a search is under way in this process",
                                 "one plimsoll.Watch at a time searches"));
    }
    set_library_folders(library_folders);
    Samples::begin(mean_bytes, python_place);
    open_ = true;
  }
  ~Allocations() { close(); }
  Allocations(const Allocations&) = delete;
  Allocations& operator=(const Allocations&) = delete;

  void show(const std::string& of) {
    if (!open_) {
      return;
    }
    if (of == "objects") {
      hook_all_objects(true);
    } else if (of == "tensors") {
      Samples::show_tensors(true);
    } else {
      const nb::gil_scoped_release unlocked;
      MallocHooks::install(of == "heap" ? MallocHooks::Of::kHeap : MallocHooks::Of::kMaps);
    }
  }
  void step(std::uint32_t step) {
    if (open_) {
      Samples::step(step);
    }
  }
  [[nodiscard]] std::vector<std::tuple<std::string, std::int64_t, std::int64_t>> sites(
      std::uint32_t from, std::uint32_t to, std::size_t most) const {
    std::vector<std::tuple<std::string, std::int64_t, std::int64_t>> sites;
    if (open_) {
      for (const Samples::Site& one : Samples::by_site(Samples::alive(from, to), most)) {
        sites.emplace_back(one.site, one.bytes, one.samples);
      }
    }
    return sites;
  }
  [[nodiscard]] std::vector<Piece> pieces(const std::string& site, std::uint32_t from,
                                          std::uint32_t to) const {
    std::vector<Piece> pieces;
    if (open_) {
      for (const Samples::Live& one : Samples::alive(from, to)) {
        if (pieces.size() < HolderSearch::kPiecesMost && Samples::site(one.place) == site) {
          pieces.push_back({.address = one.address, .bytes = one.bytes});
        }
      }
    }
    return pieces;
  }
  void close() {
    if (open_) {
      open_ = false;
      hook_all_objects(false);
      MallocHooks::remove();
      Samples::end();
    }
  }

 private:
  bool open_{false};
};

using LookAt = nb::typed<nb::callable, std::int64_t(nb::object)>;

}  // namespace

void bind_search(nb::module_& m) {
  nb::class_<Allocations>(
      m, "Allocations",
      "Samples what this process allocates, until close(). Errors: ValueError while another does.")
      .def(nb::init<double, const std::vector<std::string>&>(), nb::arg("mean_bytes"),
           nb::arg("library_folders"),
           "One in so many bytes. Frames of files in these folders are passed over for the line of "
           "an allocation.")
      .def("show", &Allocations::show, nb::arg("of"),
           "Samples \"objects\" (Python's, to 512 bytes), \"tensors\" (of the arena), \"heap\" "
           "(malloc()) or \"maps\" (mmap(), also in files), beside what was asked for before; "
           "again: in libraries that were loaded since.")
      .def("step", &Allocations::step, nb::arg("step"),
           "Counts allocations from now on for that step.")
      .def("sites", &Allocations::sites, nb::arg("from_step"), nb::arg("to_step"), nb::arg("most"),
           "Returns live allocations of steps from_step to to_step - 1: line, bytes it stands for, "
           "samples; most bytes first.")
      .def("close", &Allocations::close, "Samples no more; a second close does nothing.")
      .def_prop_ro(
          "mean_bytes", [](const Allocations&) { return Samples::mean_bytes(); },
          "It doubles where samples take more than 1/200 of the time, or there are more than "
          "16,384.")
      .def_prop_ro(
          "spent_seconds",
          [](const Allocations&) { return static_cast<double>(Samples::spent_ns()) / 1e9; },
          "Seconds that sampling took, over all threads.");
  nb::class_<HolderSearch>(
      m, "HolderSearch",
      "Looks for who holds what a line allocated, from roots on, a piece at a time.")
      .def(
          "__init__",
          [](HolderSearch* self, const Allocations& allocations, const std::string& site,
             std::uint32_t from_step, std::uint32_t to_step, Objects roots, Objects later,
             Objects skipped, nb::typed<nb::object, nb::type_object> tensor,
             nb::typed<nb::object, LookAt> look_at) {
            new (self) HolderSearch(allocations.pieces(site, from_step, to_step), std::move(roots),
                                    std::move(later), std::move(skipped), std::move(tensor),
                                    std::move(look_at));
          },
          nb::arg("allocations"), nb::arg("site"), nb::arg("from_step"), nb::arg("to_step"),
          nb::arg("roots"), nb::arg("later"), nb::arg("skipped"), nb::arg("tensor").none(),
          nb::arg("look_at").none(),
          "`later`: gone into only when all else was; `skipped`: never. Of each `tensor` look_at() "
          "gives the address of its memory, negative where a live graph hangs on it, 0 for none.")
      .def(
          "advance",
          [](HolderSearch& search, double seconds) {
            return search.advance(static_cast<std::int64_t>(seconds * 1e9));
          },
          nb::arg("seconds"), "Goes on for about so long; True when it has ended.")
      .def(
          "weigh",
          [](HolderSearch& search, double seconds) {
            return search.weigh(static_cast<std::int64_t>(seconds * 1e9));
          },
          nb::arg("seconds"),
          "When it has ended: goes through the containers it met again, for about so long, to see "
          "which have grown; True when through all.")
      .def("grown", &HolderSearch::grown,
           "By how many elements (of an io.BytesIO: bytes) since they were met, and the way up; "
           "most first, 16 at most.")
      .def(
          "release",
          [](HolderSearch& search, double seconds) {
            return search.release(static_cast<std::int64_t>(seconds * 1e9));
          },
          nb::arg("seconds"),
          "Lets go of the containers it kept alive, for about so long; True when of all.")
      .def("holder", &HolderSearch::holder,
           "From the container that most of what was found lies below, up to a root; [] for none.")
      .def("graphs", &HolderSearch::graphs, nb::arg("first"),
           "The tensors with live graphs that it met, from the `first` on: the number of each, and "
           "the tensor.")
      .def("mark_graph", &HolderSearch::mark_graph, nb::arg("node"), nb::arg("addresses"),
           "Memory at these addresses is kept by the graph of the tensor of that number.")
      .def_prop_ro("enough", &HolderSearch::enough, "Whether so much was found that it has ended.")
      .def("ways", &HolderSearch::ways, nb::arg("most"),
           "From the container of each piece that was found, up to a root.")
      .def_prop_ro("found", &HolderSearch::found, "Pieces found, and looked for.")
      .def_prop_ro("visited", &HolderSearch::visited, "Containers met: 1,048,576 at most.");
  m.def(
      "trim",
      [] {
        const nb::gil_scoped_release unlocked;
        const std::int64_t before = read_resident().or_throw().anonymous;
        ::malloc_trim(0);
        return before - read_resident().or_throw().anonymous;
      },
      "malloc_trim(0), without Python's lock; returns by how much that lowered anonymous memory, "
      "in bytes.");
}

}  // namespace plimsoll::python
