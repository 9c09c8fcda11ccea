// SPDX-License-Identifier: Apache-2.0
//
// plimsoll._core: a watch over this process, and what the process says of itself.
//
// Reading order: bindings.h, watch/watch.h, this file.
//
// Threads: Guarded queues calls from several threads; a look runs without Python's lock.
// Memory:  watch/watch.h.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <unistd.h>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "holders.h"
#include "memory/ledger.h"
#include "memory/look.h"
#include "os/clock.h"
#include "os/pace.h"
#include "watch/inside.h"
#include "watch/picture.h"
#include "watch/restarts.h"
#include "watch/room.h"
#include "watch/watch.h"

namespace plimsoll::python {
namespace {

// Bytes of Python's arenas that came since count_arenas(), less those that went.
std::atomic<std::int64_t> arena_bytes{0};
PyObjectArenaAllocator plain_arenas{};  // Written once, under Python's lock.

void* take_arena(void* /*context*/, std::size_t bytes) {
  void* const arena = plain_arenas.alloc(plain_arenas.ctx, bytes);
  if (arena != nullptr) {
    arena_bytes += static_cast<std::int64_t>(bytes);
  }
  return arena;
}

void free_arena(void* /*context*/, void* arena, std::size_t bytes) {
  arena_bytes -= static_cast<std::int64_t>(bytes);
  plain_arenas.free(plain_arenas.ctx, arena, bytes);
}

// Once, and for good: an arena may be freed long after the last watch.
void count_arenas() {
  if (plain_arenas.alloc == nullptr) {
    PyObject_GetArenaAllocator(&plain_arenas);
    PyObjectArenaAllocator counting{nullptr, take_arena, free_arena};
    PyObject_SetArenaAllocator(&counting);
  }
}

Inside inside_with_python(bool ask_malloc) {
  Inside inside = inside_now(ask_malloc);
  inside.python = std::max<std::int64_t>(arena_bytes, 0);
  if (inside.native >= 0) {
    inside.native -= HolderSearch::held_bytes();
  }
  return inside;
}

class OwnWatch {
 public:
  explicit OwnWatch(double window_steps) : watch_(::getpid(), window_steps) {}

  enum class At : std::uint8_t { kStep, kPhaseBegins, kPhaseEnds };

  // Looks where it is time to; whether it was. What grows between two looks is a phase's where no
  // phase began or ended between them. So who looked as one began looks as it ends, too, and pays
  // for both by a longer pause; and phases wait half as long as steps, or they had no turn.
  bool look(double step, const std::string& phase, At at) {
    const bool second = at == At::kPhaseEnds && began_took_ > 0;
    const bool first = at == At::kPhaseBegins;
    const std::int64_t times = first ? kTimes / 2 : kTimes;
    if (!second && !pace_.due(now_ns(), times)) {
      mixed_ = mixed_ || at != At::kStep;
      began_took_ = at == At::kStep ? began_took_ : 0;
      return false;
    }
    const bool cold = watch_.looks() == 0;  // The next one would wait long for it.
    for (int left = cold ? 2 : 1; left > 0; --left) {
      const bool asks = second ? asking_took_ > 0 : cold || asking_.due(now_ns(), times);
      const Inside inside = asks ? asked(second, first) : inside_with_python(false);
      asking_took_ = asks ? asking_took_ : 0;
      const std::int64_t began = thread_cpu_ns() - watch_.rare_ns();
      watch_.look(step, inside, mixed_ ? std::nullopt : std::optional<std::string_view>(phase))
          .or_throw();
      const std::int64_t took = thread_cpu_ns() - watch_.rare_ns() - began;
      pace_.record(now_ns(), second ? began_took_ + took : took);
      began_took_ = first ? pace_.took_ns() : 0;
      mixed_ = false;
    }
    return true;
  }
  Watch& watch() { return watch_; }

  // The verdict, and how long it lasts to the least of the governor's limit, the cgroups', the
  // machine's.
  Finding verdict() {
    Finding finding = watch_.verdict();
    if (finding.bytes_per_second > 0) {
      const auto ledger = current_ledger();
      const std::int64_t limit = ledger == nullptr ? 0 : ledger->state().limit_bytes;
      if (const auto room = least_room(::getpid(), watch_.seen().tree.unbacked(), limit)) {
        finding.seconds_left = room->seconds_left(finding.bytes_per_second);
      }
    }
    return finding;
  }

 private:
  static constexpr std::int64_t kTimes = 8 * Pace::kCalm;  // What each look does: an eighth of 1 %.

  // malloc() has a pace of its own, another eighth: where it answers late, looks go on without it.
  Inside asked(bool second, bool first) {
    const std::int64_t began = thread_cpu_ns();
    const Inside inside = inside_with_python(true);
    const std::int64_t took = thread_cpu_ns() - began;
    asking_.record(now_ns(), second ? asking_took_ + took : took);
    asking_took_ = first ? asking_.took_ns() : 0;
    return inside;
  }

  Watch watch_;
  Pace pace_{};
  std::int64_t began_took_{0};  // By the look at the phase's begin, the last one; 0 for none.
  Pace asking_{};
  std::int64_t asking_took_{0};  // As began_took_; 0 where that look did not ask malloc().
  bool mixed_{false};            // A phase began or ended since the last look.
};

using WatchHandle = Guarded<OwnWatch>;

auto looks_at(OwnWatch::At at) {
  return [at](WatchHandle& handle, double step, const std::string& phase) {
    return handle.use([&](OwnWatch& own) { return own.look(step, phase, at); });
  };
}

std::optional<Owner> owner_named(const std::string& name) {
  for (std::size_t at = 0; at < kOwnerCount; ++at) {
    if (name == owner_name(static_cast<Owner>(at))) {
      return static_cast<Owner>(at);
    }
  }
  return std::nullopt;
}

// Bytes of an owner now; what cannot be asked in a moment, all anonymous memory stands for.
std::int64_t own_bytes(const std::string& name) {
  const Inside inside = inside_with_python(true);
  switch (owner_named(name).value_or(Owner::kHeap)) {
    case Owner::kTensors:
      return inside.tensors;
    case Owner::kPython:
      return inside.python;
    case Owner::kNative:
      if (inside.native >= 0) {
        return inside.native;
      }
      break;
    default:
      break;
  }
  const Resident now = read_resident().or_throw();
  return now.anonymous + now.shared;
}

DictOf<std::int64_t> holdings_of(WatchHandle& handle) {
  const Holdings held = handle.use([](OwnWatch& own) { return own.watch().holdings(); });
  nb::dict owners;
  for (std::size_t at = 0; at < kOwnerCount; ++at) {
    const auto owner = static_cast<Owner>(at);
    if (held.of(owner) >= 0) {
      owners[owner_name(owner)] = held.of(owner);
    }
  }
  return owners;
}

}  // namespace

std::function<Inside()> counted_inside() {
  count_arenas();
  return [] { return inside_with_python(true); };
}

void bind_watch(nb::module_& m) {
  m.def("own_bytes", &own_bytes, nb::arg("owner"),
        "Bytes of an owner in this process now; for an owner that cannot be asked, all anonymous "
        "and shared memory.");
  m.def(
      "decide_restart",
      [](int status, bool stopped, const std::string& progress, std::int64_t most,
         std::int64_t done, const std::string& before) {
        Restarts restarts{.most = most, .done = done, .progress = before};
        const auto next =
            decide_restart({.status = status, .stopped = stopped, .progress = progress}, restarts);
        return std::make_tuple(next.again, next.pause.count(), next.why);
      },
      nb::arg("status"), nb::arg("stopped"), nb::arg("progress"), nb::arg("most"), nb::arg("done"),
      nb::arg("before"),
      "Whether a command that ended so is started again, after how many seconds, and why. most, "
      "done: times that it may be, and was. before: its progress when it ended the last time.");
  // Finding.holder of what backward(create_graph=True) leaves in circles that Python does not see.
  m.attr("NOBODY_CREATE_GRAPH") = kNobodyCreateGraph;
  m.attr("EVALUATION_ADVICE") = evaluation_advice();  // Where an evaluation holds the memory.
  nb::class_<Finding>(m, "Finding", "Finding of a watch about growth; str() is one line.")
      .def_prop_ro(
          "kind", [](const Finding& one) { return course_name(one.course); },
          "\"too short\", \"plateau\", \"warm-up\", \"saturating\", \"step\", \"sawtooth\", "
          "\"leak\", \"uncollected garbage\", \"retention\", \"cache\".")
      .def_prop_ro(
          "owner", [](const Finding& one) { return owner_name(one.owner); },
          "Whose course that is: \"tensors\", \"leased\", \"python\", \"native\", \"shared\", "
          "\"children\", …")
      .def_ro("bytes_per_step", &Finding::bytes_per_unit,
              "Median slope; of a leak, how much it grows; while it is too early, how fast "
              "something rose so far.")
      .def_ro("bytes_per_second", &Finding::bytes_per_second,
              "Growth of a leak per second, by the time that its steps took; else 0.")
      .def_ro("grown_bytes", &Finding::grown_bytes,
              "How much it grew while it was judged; of a warm-up, before.")
      .def_ro("bound_bytes", &Finding::bound_bytes,
              "Where what saturates is expected to end; else 0.")
      .def_ro("windows_seen", &Finding::windows_seen,
              "While it is too early: windows that are over, of `windows_wanted`.")
      .def_ro("windows_wanted", &Finding::windows_wanted,
              "While it is too early: windows that a verdict takes, 7 or more.")
      .def_ro("steps_wanted", &Finding::units_wanted,
              "While it is too early: steps until then, as looks were made so far.")
      .def_ro("seconds_wanted", &Finding::seconds_wanted,
              "While it is too early: seconds until then.")
      .def_ro("phase", &Finding::phase,
              "In which most of a leak came; \"\" where in none above others.")
      .def_ro("process", &Finding::process,
              "\"python 4711\": of children that leak, the one that grew most; else \"\".")
      .def_prop_ro("site", &Finding::site,
                   "\"path/to/file.py:123\", the line that allocates most of what grows; \"\" "
                   "where that is not known: in children, in threads that run no Python, of what "
                   "ctypes calls, and before the search has ended.")
      .def_ro("sites", &Finding::sites,
              "At most 8 such lines, each with the bytes of it that survived while it was "
              "searched; most first.")
      .def_ro("holder", &Finding::holder,
              "The holder whose letting go frees the bytes: \"list `kept` in module __main__\", "
              "\"attribute `history` of Trainer\", \"autograd graph of Tensor `meter.sum` in "
              "main()\", \"closure of …\", \"thread-local: …\", \"exception traceback: …\", "
              "NOBODY_CREATE_GRAPH; \"\" where nobody was found.")
      .def_ro("trimmed_bytes", &Finding::trimmed_bytes,
              "For retention, the bytes that one malloc_trim() gave back to the system; None "
              "before it.")
      .def_ro("seconds_left", &Finding::seconds_left,
              "Until the nearest limit (the governor's, a cgroup's, the machine's) at this growth; "
              "None where nothing grows.")
      .def_prop_ro("advice", &Finding::advice,
                   "Steps to take, a line each; empty where nothing is to be done.")
      .def("__str__", [](const Finding& one) { return one.text("step"); })
      .def("__repr__", [](const Finding& one) { return "<Finding: " + one.text("step") + ">"; });
  nb::class_<WatchHandle>(
      m, "Watch", "Looks at this process and its children. Errors: ValueError in a forked child.")
      .def(
          "__init__",
          [](WatchHandle* self, double window_steps) {
            count_arenas();
            new (self) WatchHandle(OwnWatch(window_steps), "Watch");
          },
          nb::arg("window_steps"), "Windows of so many steps.")
      .def("look", looks_at(OwnWatch::At::kStep), nb::arg("step"), nb::arg("phase"),
           "Looks, where that keeps to 1 % of a core; says whether it did.")
      .def(
          "look_as_phase_begins", looks_at(OwnWatch::At::kPhaseBegins), nb::arg("step"),
          nb::arg("before"),
          "Looks as look(), for the phase before it; where it did, look_as_phase_ends() does, too.")
      .def("look_as_phase_ends", looks_at(OwnWatch::At::kPhaseEnds), nb::arg("step"),
           nb::arg("phase"), "Looks as look(), for the phase that ends.")
      .def(
          "verdict",
          [](WatchHandle& handle) {
            return handle.use([](OwnWatch& own) { return own.verdict(); });
          },
          "By what was seen so far.")
      .def(
          "suspect",
          [](WatchHandle& handle) {
            return handle.use([](OwnWatch& own) {
              const auto suspect = own.watch().suspect();
              return std::tuple(own.watch().windows(),
                                std::string(suspect ? owner_name(suspect->owner) : ""),
                                suspect ? suspect->bytes_per_unit : 0.0);
            });
          },
          "Windows that are over; the owner that has risen fastest in the newest half of them "
          "(four at least), or \"\"; by how many bytes a step.")
      .def(
          "retains",
          [](WatchHandle& handle) {
            return handle.use([](OwnWatch& own) { return own.watch().retains(); });
          },
          "Whether what malloc() keeps rises so.")
      .def(
          "tell",
          [](WatchHandle& handle, const std::string& owner,
             std::vector<std::pair<std::string, std::int64_t>> sites, const std::string& holder,
             bool garbage, double bytes_per_step) {
            Where where{.owner = owner_named(owner).value_or(Owner::kHeap),
                        .sites = std::move(sites),
                        .holder = holder,
                        .garbage = garbage,
                        .bytes_per_unit = bytes_per_step};
            handle.use([&](OwnWatch& own) { own.watch().tell(std::move(where)); });
          },
          nb::arg("owner"), nb::arg("sites"), nb::arg("holder"), nb::arg("garbage"),
          nb::arg("bytes_per_step"), "Adds a cause of that owner's growth to its Finding.")
      .def(
          "tell_trimmed",
          [](WatchHandle& handle, std::int64_t bytes) {
            handle.use([&](OwnWatch& own) { own.watch().tell_trimmed(bytes); });
          },
          nb::arg("bytes"), "Adds the bytes that trim() returned.")
      .def(
          "picture",
          [](WatchHandle& handle, std::int64_t limit_bytes) {
            return handle.use([&](OwnWatch& own) {
              auto points = own.watch().points();
              for (PicturePoint& point : points) {
                point.limit_bytes = limit_bytes;
              }
              return owner_legend(points) + memory_picture(points, {}, PictureUnit::kSteps);
            });
          },
          nb::arg("limit_bytes"), "HTML: who held how much, by steps; 0: no limit is drawn.")
      .def_prop_ro(
          "processes",
          [](WatchHandle& handle) {
            return handle.use([](OwnWatch& own) { return own.watch().seen().tree.processes; });
          },
          "The process and its descendants, at the last look.")
      .def_prop_ro(
          "held_bytes",
          [](WatchHandle& handle) {
            return handle.use([](OwnWatch& own) { return own.watch().seen().tree.unbacked(); });
          },
          "Anonymous and shared memory of the process and its children, at the last look.")
      .def_prop_ro("owners", &holdings_of,
                   "The same by owner, files and page tables beside it; in bytes.");
}

}  // namespace plimsoll::python
