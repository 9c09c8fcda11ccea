// SPDX-License-Identifier: Apache-2.0
//
// plimsoll._core: memory that the ranks of a machine exchange through.
//
// Reading order: memory/rank_memory.h, ranks.h, this file, plimsoll/ranks/_ranks.py.
//
// Threads: waits run without Python's lock, and its handlers of signals ten times a second.
// Memory:  that of RankMemory; arrays over it keep it mapped.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "memory/rank_memory.h"
#include "plimsoll/governor.h"
#include "ranks.h"

namespace plimsoll::python {
namespace {

using RankIds = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>, nb::c_contig>;
using RankFloats = nb::ndarray<nb::numpy, float, nb::ndim<2>, nb::c_contig>;
using RankRoom = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>, nb::c_contig>;

Governor governor_or_none(const Governor* governor) {
  return governor == nullptr ? Governor() : *governor;
}

RankRoom array_of(std::shared_ptr<const RankPages> room) {
  auto held = std::make_unique<std::shared_ptr<const RankPages>>(std::move(room));
  const RankPages& pages = **held;
  const nb::capsule owner(held.release(), [](void* one) noexcept {
    delete static_cast<std::shared_ptr<const RankPages>*>(one);
  });
  return RankRoom(pages.data(), {static_cast<std::size_t>(pages.bytes())}, owner);
}

void bind_rank_rows(nb::module_& m) {
  nb::class_<RankRows>(m, "RankRows")
      .def_prop_ro("ids",
                   [](nb::handle_t<RankRows> self) {
                     const auto ids = nb::cast<const RankRows&>(self).ids();
                     return RankIds(ids.data(), {ids.size()}, self);
                   })
      .def_prop_ro("rows",
                   [](nb::handle_t<RankRows> self) {
                     const auto& rows = nb::cast<const RankRows&>(self);
                     return RankFloats(rows.rows().data(),
                                       {static_cast<std::size_t>(rows.shape().count),
                                        static_cast<std::size_t>(rows.shape().dim)},
                                       self);
                   })
      .def_prop_ro("begin", &RankRows::begin);
}

}  // namespace

void bind_ranks(nb::module_& m) {
  bind_rank_rows(m);
  nb::class_<PyRankMemory> bound(m, "RankMemory");
  bound.attr("ROOM_BYTES") = kRankRoomBytes;
  bound
      .def(
          "__init__",
          [](PyRankMemory* at, int rank, int count, std::int64_t word_bytes) {
            auto made =
                RankMemory::create({.rank = rank, .count = count, .bytes = word_bytes}).or_throw();
            new (at) PyRankMemory(std::move(made), "memory of ranks");
          },
          nb::arg("rank"), nb::arg("count"), nb::arg("word_bytes"))
      .def_prop_ro("address",
                   [](PyRankMemory& memory) {
                     return memory.use([](RankMemory& self) { return self.address(); });
                   })
      .def(
          "open",
          [](PyRankMemory& memory, const std::vector<std::string>& addresses) {
            memory.use([&](RankMemory& self) { self.open(addresses).or_throw(); });
          },
          nb::arg("addresses"))
      .def("meet",
           [](PyRankMemory& memory) {
             interruptibly(memory, [](RankMemory& self, const WaitOn& wait_on) {
               return self.meet(wait_on);
             });
           })
      .def(
          "word",
          [](PyRankMemory& memory, const BytesIn& own) {
            const auto said = interruptibly(memory, [&](RankMemory& self, const WaitOn& wait_on) {
              return self.word(bytes_of(own), wait_on);
            });
            return nb::bytes(said.data(), said.size());
          },
          nb::arg("own"))
      .def(
          "grow_room",
          [](PyRankMemory& memory, std::int64_t bytes, const Governor* governor) {
            memory.use([&](RankMemory& self) {
              self.grow_room(bytes, governor_or_none(governor)).or_throw();
            });
          },
          nb::arg("bytes"), nb::arg("governor").none())
      .def(
          "room",
          [](PyRankMemory& memory, int rank) {
            return array_of(
                memory.use([&](RankMemory& self) { return self.room(rank).or_throw(); }));
          },
          nb::arg("rank"))
      .def(
          "take",
          [](PyRankMemory& memory, std::int64_t count, std::int64_t dim, const Governor* governor) {
            return memory.use([&](RankMemory& self) {
              return self.take({.count = count, .dim = dim}, governor_or_none(governor)).or_throw();
            });
          },
          nb::arg("count"), nb::arg("dim"), nb::arg("governor").none())
      .def(
          "rows",
          [](PyRankMemory& memory, int rank, std::int64_t begin, std::int64_t count,
             std::int64_t dim) {
            return memory.use([&](RankMemory& self) {
              return self.rows(rank, begin, {.count = count, .dim = dim}).or_throw();
            });
          },
          nb::arg("rank"), nb::arg("begin"), nb::arg("count"), nb::arg("dim"))
      .def("close", &PyRankMemory::close);
}

}  // namespace plimsoll::python
