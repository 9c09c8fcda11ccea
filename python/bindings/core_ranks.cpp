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
  nb::class_<RankRows>(m, "RankRows",
                       "Ids and rows behind them, in a rank's file. The place is kept until "
                       "neither this nor any array of it is left.")
      .def_prop_ro(
          "ids",
          [](nb::handle_t<RankRows> self) {
            const auto ids = nb::cast<const RankRows&>(self).ids();
            return RankIds(ids.data(), {ids.size()}, self);
          },
          "Shape: int64 [count].")
      .def_prop_ro(
          "rows",
          [](nb::handle_t<RankRows> self) {
            const auto& rows = nb::cast<const RankRows&>(self);
            return RankFloats(rows.rows().data(),
                              {static_cast<std::size_t>(rows.shape().count),
                               static_cast<std::size_t>(rows.shape().dim)},
                              self);
          },
          "Shape: float32 [count, dim].")
      .def_prop_ro("begin", &RankRows::begin, "Where it is, for others' rows().");
}

}  // namespace

void bind_ranks(nb::module_& m) {
  bind_rank_rows(m);
  nb::class_<PyRankMemory> bound(
      m, "RankMemory",
      "Memory that the ranks of a machine exchange through, as one rank sees it, from open() to "
      "close().\n\nErrors: ValueError after close(), and in a forked child.");
  bound.attr("ROOM_BYTES") = kRankRoomBytes;
  bound
      .def(
          "__init__",
          [](PyRankMemory* at, int rank, int count, std::int64_t word_bytes) {
            auto made =
                RankMemory::create({.rank = rank, .count = count, .bytes = word_bytes}).or_throw();
            new (at) PyRankMemory(std::move(made), "memory of ranks");
          },
          nb::arg("rank"), nb::arg("count"), nb::arg("word_bytes"),
          "Makes this rank's. Errors: OSError where the system has no memory files.")
      .def_prop_ro(
          "address",
          [](PyRankMemory& memory) {
            return memory.use([](RankMemory& self) { return self.address(); });
          },
          "For the others' open().")
      .def(
          "open",
          [](PyRankMemory& memory, const std::vector<std::string>& addresses) {
            memory.use([&](RankMemory& self) { self.open(addresses).or_throw(); });
          },
          nb::arg("addresses"),
          "Opens the memory of all ranks in their order, this one's too. Errors: OSError where "
          "another process's file may not be opened, or is another one.")
      .def(
          "meet",
          [](PyRankMemory& memory) {
            interruptibly(
                memory, [](RankMemory& self, const WaitOn& wait_on) { return self.meet(wait_on); });
          },
          "Waits until all ranks have come here, and have written what they wrote before. Errors: "
          "OSError where one has left, or ended, or has not come for half an hour; what a signal's "
          "handler raises.")
      .def(
          "word",
          [](PyRankMemory& memory, const BytesIn& own) {
            const auto said = interruptibly(memory, [&](RankMemory& self, const WaitOn& wait_on) {
              return self.word(bytes_of(own), wait_on);
            });
            return nb::bytes(said.data(), said.size());
          },
          nb::sig("def word(self, own: bytes | memoryview | numpy.typing.NDArray[numpy.uint8]) -> "
                  "bytes"),
          nb::arg("own"),
          "Exchanges words: returns those of all ranks, each `word_bytes`, in their order. Errors: "
          "as meet().")
      .def(
          "grow_room",
          [](PyRankMemory& memory, std::int64_t bytes, const Governor* governor) {
            memory.use([&](RankMemory& self) {
              self.grow_room(bytes, governor_or_none(governor)).or_throw();
            });
          },
          nb::arg("bytes"), nb::arg("governor").none(),
          "Leases that much of the own room. Errors: BudgetExceeded; then unchanged.")
      .def(
          "room",
          [](PyRankMemory& memory, int rank) {
            return array_of(
                memory.use([&](RankMemory& self) { return self.room(rank).or_throw(); }));
          },
          nb::arg("rank"),
          "A rank's, which has grown it. Shape: uint8 [ROOM_BYTES]. Errors: OSError.")
      .def(
          "take",
          [](PyRankMemory& memory, std::int64_t count, std::int64_t dim, const Governor* governor) {
            return memory.use([&](RankMemory& self) {
              return self.take({.count = count, .dim = dim}, governor_or_none(governor)).or_throw();
            });
          },
          nb::arg("count"), nb::arg("dim"), nb::arg("governor").none(),
          "Room for so many rows of this rank's. Requires: no other rank is at its rows. Errors: "
          "BudgetExceeded; OSError.")
      .def(
          "rows",
          [](PyRankMemory& memory, int rank, std::int64_t begin, std::int64_t count,
             std::int64_t dim) {
            return memory.use([&](RankMemory& self) {
              return self.rows(rank, begin, {.count = count, .dim = dim}).or_throw();
            });
          },
          nb::arg("rank"), nb::arg("begin"), nb::arg("count"), nb::arg("dim"),
          "Returns rows that a rank has taken. Errors: OSError; ValueError where it has no such "
          "place.")
      .def("close", &PyRankMemory::close,
           "Leaves the others; arrays stay. A second close does nothing.");
}

}  // namespace plimsoll::python
