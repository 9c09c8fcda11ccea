// SPDX-License-Identifier: Apache-2.0
//
// plimsoll._core: limits, the governor and its ledger, leases, and leased arrays.
//
// Reading order: bindings.h, plimsoll/governor.h, this file.
//
// Threads: Governor is thread-safe; Lease is single-owner (Python's lock serialises it).
// Memory:  leased_array() leases before it allocates; the array's owner returns both.
#include <csignal>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <tuple>

#include <pthread.h>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "memory/kept_slots.h"
#include "memory/look.h"
#include "memory/watcher.h"
#include "os/file_system.h"
#include "os/fork.h"
#include "plimsoll/bytes.h"
#include "plimsoll/governor.h"
#include "plimsoll/lease.h"
#include "plimsoll/limits.h"
#include "plimsoll/tree_memory.h"

namespace plimsoll::python {
namespace {

constexpr std::size_t kAlignment = 64;  // A cache line, and what AVX-512 loads like.

// A lease and the memory it pays for; destroyed when the last array over it is.
struct LeasedBlock {
  Lease lease{};
  std::unique_ptr<std::uint8_t, void (*)(void*)> bytes{nullptr, std::free};
};

using LeasedArray = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>, nb::c_contig>;

LeasedArray leased_array(Governor& governor, Tag tag, std::int64_t bytes) {
  auto block = std::make_unique<LeasedBlock>();
  block->lease = governor.reserve(tag, bytes).or_throw();
  const std::size_t rounded =
      (static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1)) + kAlignment - 1) / kAlignment *
      kAlignment;
  block->bytes.reset(static_cast<std::uint8_t*>(std::aligned_alloc(kAlignment, rounded)));
  if (block->bytes == nullptr) {
    throw std::bad_alloc();
  }
  std::uint8_t* const data = block->bytes.get();
  const nb::capsule owner(block.release(),
                          [](void* p) noexcept { delete static_cast<LeasedBlock*>(p); });
  return LeasedArray(data, {static_cast<std::size_t>(bytes)}, owner);
}

LimitReport limits(const std::string& memory_limit, const std::string& source) {
  LimitQuery query;
  query.user_limit = memory_limit;
  query.user_source = source;
  return find_limit(query).or_throw();
}

Governor create_governor(const std::string& memory_limit, const std::string& source,
                         const std::string& disk_limit, const std::string& directory,
                         std::int64_t foreign_bytes, double pressure_fraction) {
  GovernorOptions options;
  options.memory_limit = memory_limit;
  options.memory_limit_source = source;
  options.disk_limit = disk_limit;
  options.directory = directory;
  options.foreign_bytes = foreign_bytes;
  options.pressure_fraction = pressure_fraction;
  return Governor::create(options).or_throw();
}

// What is leased, and what was measured beside it.
struct LedgerAndLook : LedgerState {
  Measured measured{};
};

LedgerAndLook ledger_and_look(const Governor& governor) {
  LedgerAndLook all;
  static_cast<LedgerState&>(all) = governor.state();
  all.measured = last_look();
  return all;
}

DictOf<PoolState> pools_of(const LedgerAndLook& state) {
  nb::dict pools;
  for (int tag = 0; tag < kTagCount; ++tag) {
    pools[tag_name(static_cast<Tag>(tag))] = nb::cast(state.pools[static_cast<std::size_t>(tag)]);
  }
  return pools;
}

std::vector<Eviction> list_of(const EvictionLog& log) {
  return {log.entries().begin(), log.entries().end()};
}

std::string describe_eviction(const Eviction& one) {
  std::string text{"<"};
  text.append(one.owner).append(" ").append(move_name(one.move));
  text.append(": gave ").append(format_bytes(one.given_bytes));
  text.append(", freed ").append(format_bytes(one.freed_bytes()));
  return text.append(">");
}

std::string describe_resident(const Resident& one) {
  return "<Resident: " + format_bytes(one.total()) + ", of it anonymous " +
         format_bytes(one.anonymous) + ", file " + format_bytes(one.file) + ", shared " +
         format_bytes(one.shared) + ">";
}

std::string describe_tree(const TreeMemory& tree) {
  return "<TreeMemory: " + std::to_string(tree.children) + " children " +
         format_bytes(tree.children_bytes) + ", in flight " + format_bytes(tree.in_flight_bytes) +
         ", mapped " + format_bytes(tree.mapped_bytes) + ">";
}

std::string describe_measured(const Measured& seen) {
  return "<Measured: " + format_bytes(seen.held_bytes()) + " held, " +
         format_bytes(seen.unexplained_bytes) + " of it without a lease>";
}

std::string describe_pressure(const PressureReport& report) {
  return "<PressureReport: " + format_bytes(report.resident.total()) + " held, " +
         format_bytes(report.unexplained_bytes) + " of it without a lease; " +
         (report.stop       ? "stop: a limit of " + format_bytes(report.needed_bytes) + " would do"
          : report.pressure ? "pressure"
                            : "no pressure") +
         ">";
}

std::string describe_change(const LimitChange& change) {
  return "<LimitChange: " + format_bytes(change.before_bytes) + " to " +
         format_bytes(change.asked_bytes) +
         (change.settled() ? "" : ", in force " + format_bytes(change.limit_bytes)) + ">";
}

// Called by the watcher's thread, which never enters Python: the interpreter does the rest on its
// main thread, between two of its instructions.
int deliver_news(void* /*unused*/) {
  try {
    nb::module_::import_("plimsoll.memory._memory").attr("_deliver")();
    return 0;
  } catch (nb::python_error& raised) {
    raised.restore();
    return -1;
  }
}

// plimsoll.memory._memory asks for news, and closes the watcher with its governor.
class NewsOfWatcher {
 public:
  // `wake`: the signal whose Python handler takes a stop, 0 for none. It ends a system call in
  // which the thread that made this one, the main thread, waits: for workers, say. Sent only as
  // long as Python handles it.
  explicit NewsOfWatcher(int wake)
      : watcher_(std::make_unique<Watcher>(
            [wake, main = ::pthread_self(), handler = handler_of(wake)](bool stop) {
              static_cast<void>(Py_AddPendingCall(&deliver_news, nullptr));
              if (stop && wake != 0 && handler_of(wake) == handler) {
                ::pthread_kill(main, wake);
              }
            })) {}
  std::optional<std::tuple<bool, bool, PressureReport>> take() {
    const auto news = watcher_ == nullptr ? std::nullopt : watcher_->take();
    return news ? std::optional(std::tuple(news->stop, news->late, news->report)) : std::nullopt;
  }
  void defer() noexcept {
    if (watcher_ != nullptr) {
      watcher_->defer();
    }
  }
  void avert() {
    if (watcher_ != nullptr) {
      watcher_->avert();
    }
  }
  void close() { watcher_.reset(); }

 private:
  using Handler = void (*)(int);
  static Handler handler_of(int number) {
    struct sigaction now {};
    return number != 0 && ::sigaction(number, nullptr, &now) == 0 ? now.sa_handler : SIG_DFL;
  }

  std::unique_ptr<Watcher> watcher_;
};

void bind_limits(nb::module_& m) {
  nb::class_<LimitCandidate>(m, "LimitCandidate", "One thing that bounds the process.")
      .def_ro("source", &LimitCandidate::source,
              "\"user\", \"cgroup v2 memory.max\", \"SLURM_MEM_PER_NODE\", \"available\", …")
      .def_ro("where", &LimitCandidate::where,
              "The file, the variable or the option it was read from.")
      .def_ro("bytes", &LimitCandidate::bytes, "The bound, in bytes.")
      .def("__repr__", [](const LimitCandidate& one) {
        return "<" + one.source + " (" + one.where + "): " + format_bytes(one.bytes) + ">";
      });
  nb::class_<LimitReport>(m, "LimitReport",
                          "All bounds found, and the one that holds; str() is one line.")
      .def_ro("candidates", &LimitReport::candidates, "In the order looked up; at least one.")
      .def_ro("limit_bytes", &LimitReport::limit_bytes, "The limit that holds, in bytes.")
      .def_ro("winner", &LimitReport::winner, "Index into candidates.")
      .def_ro("defaulted", &LimitReport::defaulted,
              "True: no user limit, so limit_bytes is 80 % of the winner.")
      .def("explain", &LimitReport::explain, "\"768.0 MiB (user: --memory-limit)\".")
      .def("__str__", &LimitReport::explain)
      .def("__repr__", [](const LimitReport& r) { return "<limit " + r.explain() + ">"; });
  nb::class_<Resident>(m, "Resident",
                       "Memory that the operating system charges the process, in bytes.")
      .def_ro("anonymous", &Resident::anonymous, "Heap, stacks, arenas.")
      .def_ro("file", &Resident::file, "Mapped files and code, which the kernel can take back.")
      .def_ro("shared", &Resident::shared, "Shared memory.")
      .def_ro("swapped", &Resident::swapped, "On swap.")
      .def_ro("peak", &Resident::peak, "Highest total so far.")
      .def_prop_ro("total", &Resident::total, "anonymous + file + shared.")
      .def("__repr__", &describe_resident);
  m.def("limits", &limits, nb::arg("memory_limit") = "", nb::arg("source") = "memory_limit",
        nb::call_guard<nb::gil_scoped_release>(),
        "Every bound on this process. Errors: ValueError.");
  m.def(
      "in_memory_file_system",
      [](const std::string& path) { return std::string(memory_file_system(path)); },
      nb::arg("path"),
      "\"tmpfs\" or \"ramfs\" when what is written below the path stays in memory, else \"\".");
  m.def(
      "resident", [] { return read_resident().or_throw(); },
      nb::call_guard<nb::gil_scoped_release>(),
      "Returns the memory that the operating system charges this process now.");
}

void bind_ledger(nb::module_& m) {
  nb::class_<PoolState>(m, "PoolState", "One tag's line in the ledger, in bytes.")
      .def_ro("floor_bytes", &PoolState::floor_bytes, "Promised at admission.")
      .def_ro("yielded_bytes", &PoolState::yielded_bytes,
              "Admitted, and taken by a lower limit until it rises again.")
      .def_ro("cap_bytes", &PoolState::cap_bytes, "Never passed.")
      .def_ro("leased_bytes", &PoolState::leased_bytes, "Leased now.")
      .def_ro("peak_bytes", &PoolState::peak_bytes, "Highest leased so far.")
      .def("__repr__", [](const PoolState& pool) {
        return "<PoolState: floor " + format_bytes(pool.floor_bytes) + ", leased " +
               format_bytes(pool.leased_bytes) + ", peak " + format_bytes(pool.peak_bytes) + ">";
      });
  nb::class_<LedgerAndLook>(m, "Ledger",
                            "A consistent copy of who holds what, in bytes; str() is a table.")
      .def_ro("limit_bytes", &LedgerAndLook::limit_bytes, "Allowed.")
      .def_ro("asked_bytes", &LedgerAndLook::asked_bytes,
              "The limit asked for last; below limit_bytes until it fits.")
      .def_ro("baseline_bytes", &LedgerAndLook::baseline_bytes,
              "Resident before anything was leased.")
      .def_ro("leased_bytes", &LedgerAndLook::leased_bytes, "Over all pools.")
      .def_ro("leased_peak_bytes", &LedgerAndLook::leased_peak_bytes, "Highest leased so far.")
      .def_ro("committed_bytes", &LedgerAndLook::committed_bytes,
              "Sum over pools of max(floor, leased).")
      .def_ro("orphan_bytes", &LedgerAndLook::orphan_bytes,
              "Leases of earlier governors that are still alive.")
      .def_prop_ro("free_bytes", &LedgerAndLook::free_bytes, "limit − baseline − committed.")
      .def_prop_ro("pools", &pools_of,
                   "By tag: \"tensors\", \"rows\", \"features\", \"loader\", \"pinned\", "
                   "\"foreign\", \"other\".")
      .def_ro("measured", &LedgerAndLook::measured,
              "Result of the last measurement, beside the leases.")
      .def_prop_ro(
          "crowded_bytes",
          [](const LedgerAndLook& all) { return crowded_bytes(all, all.measured); },
          "Measured without a lease, beyond what was set aside for it.")
      .def(
          "explain", [](const LedgerAndLook& all) { return explain_held(all, all.measured); },
          "Names the holders of memory without a lease, in a sentence.")
      .def("__str__",
           [](const LedgerAndLook& all) { return all.to_string() + measured_lines(all.measured); })
      .def("__repr__", [](const LedgerAndLook& state) {
        return "<Ledger: " + format_bytes(state.leased_bytes) + " leased, " +
               format_bytes(state.free_bytes()) + " free of " + format_bytes(state.limit_bytes) +
               ">";
      });
  nb::class_<Eviction>(
      m, "Eviction",
      "Bytes that one owner gave back; resident bytes of the process, before and after.")
      .def_prop_ro(
          "owner", [](const Eviction& e) { return e.owner; },
          "\"arena\", \"heap\", \"features\", \"loader\", …")
      .def_prop_ro(
          "move", [](const Eviction& e) { return move_name(e.move); }, "\"purge\" or \"shrink\".")
      .def_ro("wanted_bytes", &Eviction::wanted_bytes, "Asked for.")
      .def_ro("given_bytes", &Eviction::given_bytes, "Given, as the owner says.")
      .def_ro("before_bytes", &Eviction::before_bytes, "Resident before it.")
      .def_ro("after_bytes", &Eviction::after_bytes, "Resident after it.")
      .def_prop_ro("freed_bytes", &Eviction::freed_bytes, "before_bytes − after_bytes.")
      .def("__repr__", &describe_eviction);
  nb::class_<TreeMemory>(
      m, "TreeMemory",
      "Memory held beside this process's own resident memory, and a part of that; in bytes.")
      .def_ro("children_bytes", &TreeMemory::children_bytes,
              "Anonymous and shared memory of all descendants; what they share counts once.")
      .def_ro("in_flight_bytes", &TreeMemory::in_flight_bytes,
              "Shared memory that is resident in no process: batches on their way from a worker, "
              "or never touched.")
      .def_ro("mapped_bytes", &TreeMemory::mapped_bytes,
              "Bytes of the process's mapped files: private mappings, as weights are loaded from "
              "safetensors.")
      .def_ro("children", &TreeMemory::children, "How many descendants there are.")
      .def("__repr__", &describe_tree);
  nb::class_<Measured>(m, "Measured", "The governor's last measurement, in bytes.")
      .def_ro("resident", &Measured::resident, "Memory of this process alone.")
      .def_ro("tree", &Measured::tree, "Memory of its children, and shared memory.")
      .def_ro("unexplained_bytes", &Measured::unexplained_bytes,
              "Without a lease, and not there before the governor; mapped weights among it.")
      .def_prop_ro("held_bytes", &Measured::held_bytes, "All that is held to the limit.")
      .def("__repr__", &describe_measured);
  nb::class_<PressureReport>(m, "PressureReport", "Result of step_boundary().")
      .def_ro("resident", &PressureReport::resident,
              "Memory of the process and its children, shared memory included.")
      .def_ro("unexplained_bytes", &PressureReport::unexplained_bytes,
              "Part of `resident` without a lease that was not there before the governor.")
      .def_ro("pressure", &PressureReport::pressure,
              "It was near the limit, and more without a lease than was set aside.")
      .def_prop_ro(
          "kernel",
          [](const PressureReport& r) {
            return r.kernel == KernelPressure::kNone    ? ""
                   : r.kernel == KernelPressure::kTight ? "tight"
                                                        : "stalled";
          },
          "Signal of the kernel: \"\", \"tight\" (a cgroup met its bound) or \"stalled\" (PSI).")
      .def_ro("stop", &PressureReport::stop,
              "Nothing helped, or a limit that was asked for does not fit: save and end the run.")
      .def_ro("needed_bytes", &PressureReport::needed_bytes,
              "When `stop`: the smallest limit that would do just now.")
      .def_ro("purged_bytes", &PressureReport::purged_bytes,
              "Given back from caches of free memory.")
      .def_ro("shrunk_bytes", &PressureReport::shrunk_bytes, "Given back by stores and loaders.")
      .def_ro("grown_bytes", &PressureReport::grown_bytes,
              "Taken again by stores, once there was room.")
      .def_prop_ro(
          "evictions", [](const PressureReport& r) { return list_of(r.evictions); },
          "One for every owner that gave memory back.")
      .def("__repr__", &describe_pressure);
  nb::class_<LimitChange>(m, "LimitChange", "Result of set_limit().")
      .def_ro("before_bytes", &LimitChange::before_bytes, "The limit until then.")
      .def_ro("asked_bytes", &LimitChange::asked_bytes,
              "The smallest of what was asked for and every other bound.")
      .def_ro("limit_bytes", &LimitChange::limit_bytes,
              "The limit in force; above asked_bytes as long as that does not fit.")
      .def_prop_ro("settled", &LimitChange::settled, "limit_bytes == asked_bytes.")
      .def_ro("purged_bytes", &LimitChange::purged_bytes, "Given back from caches of free memory.")
      .def_ro("shrunk_bytes", &LimitChange::shrunk_bytes, "Given back by stores and loaders.")
      .def_ro("grown_bytes", &LimitChange::grown_bytes, "Taken again by them.")
      .def_ro("resident", &LimitChange::resident, "Resident memory now.")
      .def_prop_ro(
          "evictions", [](const LimitChange& c) { return list_of(c.evictions); },
          "One for every owner that gave memory back.")
      .def("__repr__", &describe_change);
}

// Arrays over a slot keep all of them. A forked child has none of the memory.
struct OpenSlots {
  ~OpenSlots() { destroy_if_own(slots, mark); }

  std::unique_ptr<KeptSlots> slots;
  ForkMark mark{};
};

std::shared_ptr<OpenSlots> open_kept(const Governor& governor, std::int64_t count,
                                     std::int64_t slot_bytes, std::int64_t fixed_bytes,
                                     std::uintptr_t add, std::uintptr_t remove, unsigned flags) {
  const HostRegistration driver{
      .add = reinterpret_cast<decltype(HostRegistration::add)>(add),           // NOLINT
      .remove = reinterpret_cast<decltype(HostRegistration::remove)>(remove),  // NOLINT
      .flags = flags};
  return std::make_shared<OpenSlots>(
      KeptSlots::open(governor, count, slot_bytes, fixed_bytes, driver).or_throw());
}

LeasedArray kept_array(const std::shared_ptr<OpenSlots>& kept, std::int64_t slot) {
  if (slot < 0 || slot >= kept->slots->count()) {
    throw nb::index_error("a slot that is not there");
  }
  const std::int64_t stride = kept->slots->stride();
  auto* const data = reinterpret_cast<std::uint8_t*>(kept->slots->data() + slot * stride);
  const nb::capsule owner(new std::shared_ptr<OpenSlots>(kept), [](void* p) noexcept {
    delete static_cast<std::shared_ptr<OpenSlots>*>(p);
  });
  return LeasedArray(data, {static_cast<std::size_t>(stride)}, owner);
}

void bind_kept(nb::module_& m) {
  nb::enum_<KeptSlots::Found>(m, "Found", "A slot's state when it is taken.")
      .value("CONTENT", KeptSlots::Found::kContent)
      .value("ROOM", KeptSlots::Found::kRoom)
      .value("NOTHING", KeptSlots::Found::kNothing);
  nb::class_<OpenSlots>(
      m, "KeptSlots",
      "Equal pieces of memory whose content is found again, unless the memory was "
      "needed. All calls are quick, and may come from any thread.")
      .def_static("open", &open_kept, nb::arg("governor"), nb::arg("count"), nb::arg("slot_bytes"),
                  nb::arg("fixed_bytes"), nb::arg("add") = 0, nb::arg("remove") = 0,
                  nb::arg("flags") = 0, nb::call_guard<nb::gil_scoped_release>(),
                  "Leases and touches all of them, and leases fixed_bytes. add, remove: addresses "
                  "of C functions that "
                  "register memory with a device's driver. Errors: BudgetExceeded, OSError.")
      .def(
          "take", [](OpenSlots& kept, std::int64_t slot) { return kept.slots->take(slot); },
          nb::arg("slot"), "The slot's memory stays until give().")
      .def(
          "give",
          [](OpenSlots& kept, std::int64_t slot, bool has_content) {
            kept.slots->give(slot, has_content);
          },
          nb::arg("slot"), nb::arg("has_content"), "From here on the slot's memory may go.")
      .def(
          "has_content",
          [](OpenSlots& kept, std::int64_t slot) { return kept.slots->has_content(slot); },
          nb::arg("slot"), "Whether take() would find the content now.")
      .def(
          "give_back",
          [](OpenSlots& kept) { return kept.slots->reclaim(PressureMove::kShrink, INT64_MAX); },
          "Gives the memory of slots that are not taken back to the system; returns the bytes.")
      .def("array", &kept_array, nb::arg("slot"),
           "uint8 [stride] over a slot. Requires: it is taken whenever the array is used.")
      .def_prop_ro(
          "leased_bytes", [](OpenSlots& kept) { return kept.slots->leased_bytes(); },
          "Leased now.");
}

void bind_governor(nb::module_& m) {
  nb::enum_<Tag>(m, "Tag", "Whose bytes they are.")
      .value("TENSORS", Tag::kTensor)
      .value("ROWS", Tag::kEmbedding)
      .value("FEATURES", Tag::kFeature)
      .value("LOADER", Tag::kLoader)
      .value("PINNED", Tag::kPinned)
      .value("WEIGHTS", Tag::kWeights)
      .value("FOREIGN", Tag::kForeign)
      .value("OTHER", Tag::kOther);
  nb::class_<Lease>(m, "Lease", "The right to hold a number of bytes.")
      .def_prop_ro("bytes", &Lease::bytes, "Held now.")
      .def_prop_ro(
          "tag", [](const Lease& lease) { return tag_name(lease.tag()); }, "Whose bytes they are.")
      .def(
          "grow", [](Lease& lease, std::int64_t bytes) { lease.grow(bytes).or_throw(); },
          nb::arg("bytes"), "Errors: BudgetExceeded; then unchanged.")
      .def("shrink", &Lease::shrink, nb::arg("bytes"), "Lowers the lease, never raising it.")
      .def(
          "close", [](Lease& lease) { lease = Lease(); }, "Returns every byte.");
  nb::class_<NewsOfWatcher>(
      m, "Watcher",
      "A thread that looks at what the process's governor holds, as long as it is open.")
      .def(nb::init<int>(), nb::arg("wake"),
           "`wake`: a signal that Python handles, sent to the calling thread at a stop; 0: none.")
      .def("take", &NewsOfWatcher::take,
           "News, once: whether it asks for a stop, whether the next step boundary comes too late "
           "for it, and what was seen.")
      .def("avert", &NewsOfWatcher::avert,
           "The stop that was taken need not be; the watcher reports the next one at once.")
      .def("defer", &NewsOfWatcher::defer,
           "The last stop waits for a step boundary: the watcher repeats it as long as it holds.")
      .def("close", &NewsOfWatcher::close, nb::call_guard<nb::gil_scoped_release>(),
           "Ends the thread; a second close does nothing.");
  nb::class_<Governor>(m, "Governor", "A handle on the process's governor.")
      .def_static("create", &create_governor, nb::arg("memory_limit"), nb::arg("source"),
                  nb::arg("disk_limit"), nb::arg("directory"), nb::arg("foreign_bytes"),
                  nb::arg("pressure_fraction"), nb::call_guard<nb::gil_scoped_release>(),
                  "Errors: ValueError, BudgetExceeded.")
      .def_static("current", &Governor::current,
                  "The process's governor; not valid when there is none.")
      .def_prop_ro("valid", &Governor::valid, "False: an empty handle.")
      .def(
          "reserve",
          [](Governor& governor, Tag tag, std::int64_t bytes) {
            return governor.reserve(tag, bytes).or_throw();
          },
          nb::arg("tag"), nb::arg("bytes"), nb::call_guard<nb::gil_scoped_release>(),
          "Errors: BudgetExceeded.")
      .def(
          "admit",
          [](Governor& governor, Tag tag, std::int64_t bytes) {
            governor.admit({.tag = tag, .floor_bytes = bytes}).or_throw();
          },
          nb::arg("tag"), nb::arg("bytes"),
          "Promises a tag so much more, whether it is leased yet or not. Errors: BudgetExceeded.")
      .def(
          "leased_array", &leased_array, nb::arg("tag"), nb::arg("bytes"),
          "Uninitialised, 64-byte aligned memory that holds its own lease. Errors: BudgetExceeded.")
      .def("ledger", &ledger_and_look, "A consistent copy.")
      .def("limit", &Governor::limit, "The limit asked for last and where it comes from.")
      .def(
          "set_limit",
          [](Governor& governor, const std::string& text, const std::string& source) {
            return governor.set_limit(text, source).or_throw();
          },
          nb::arg("text"), nb::arg("source"), nb::call_guard<nb::gil_scoped_release>(),
          "Moves the limit. Errors: ValueError.")
      .def_prop_ro("disk_limit_bytes", &Governor::disk_limit_bytes,
                   "Most the stores may hold on disk.")
      .def("step_boundary", &Governor::step_boundary, nb::call_guard<nb::gil_scoped_release>(),
           "To be called between steps.")
      .def(
          "before_stop", [](Governor&) { return act_before_stop(); },
          nb::call_guard<nb::gil_scoped_release>(),
          "The moves of step_boundary(), for a loop that calls none.")
      .def("rebaseline", &Governor::rebaseline, nb::call_guard<nb::gil_scoped_release>(),
           "Measures the baseline again; only while nothing is leased.")
      .def("lower_baseline", &Governor::lower_baseline, nb::arg("bytes"),
           nb::arg("anonymous_bytes"), nb::call_guard<nb::gil_scoped_release>(),
           "Takes from it what has gone back to the system since; returns it.")
      .def("close", &Governor::close, nb::call_guard<nb::gil_scoped_release>(),
           "Ends the governor; leases still out become orphans.");
}

}  // namespace

void bind_memory(nb::module_& m) {
  bind_limits(m);
  bind_ledger(m);
  bind_kept(m);
  bind_governor(m);
}

}  // namespace plimsoll::python
