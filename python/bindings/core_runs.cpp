// SPDX-License-Identifier: Apache-2.0
//
// plimsoll._core: the pieces of a run (plimsoll.run._run puts them together), what other programs
// ask of one, and the tools that look after stores.
//
// Reading order: bindings.h, run/run_folder.h, run/control.h, tables/store_export.h, this
// file.
//
// Threads: the pieces of a run are for the thread that trains; the rest from any, without Python's
//          lock. Ctrl-C ends a store's tool between two parts.
// Memory:  that of the tool, inside its memory_limit.
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "os/room.h"
#include "over_budget.h"
#include "plimsoll/governor.h"
#include "run/control.h"
#include "run/counter_track.h"
#include "run/limit_requests.h"
#include "run/metrics.h"
#include "run/page.h"
#include "run/progress.h"
#include "run/run_folder.h"
#include "run/why.h"
#include "tables/describe.h"
#include "tables/store_compact.h"
#include "tables/store_export.h"
#include "tables/store_import.h"

namespace plimsoll::python {
namespace {

/// Calls `work` with a progress function that Ctrl-C ends. Throws what it returns as an error.
template <class Work>
auto interruptible(Work&& work) {
  bool interrupted = false;
  const auto go_on = [&](std::int64_t, std::int64_t) {
    const nb::gil_scoped_acquire locked;
    interrupted = PyErr_CheckSignals() != 0;
    return !interrupted;
  };
  auto done = [&] {
    const nb::gil_scoped_release unlocked;
    return work(go_on);
  }();
  if (interrupted) {
    throw nb::python_error();
  }
  return std::move(done).or_throw();
}

/// What plimsoll.data.importers has for it. Also called by the program, without Python's lock.
Result<std::int64_t> read_saved_rows(const Governor& governor, const std::filesystem::path& path,
                                     bool with_rows, const VisitRows& visit) {
  const nb::gil_scoped_acquire locked;
  const auto take = [&](const IdsIn& ids, const FloatsIn& rows) {
    Result<void> taken;
    {
      const nb::gil_scoped_release unlocked;
      taken = visit(span_of(ids), span_of(rows));
    }
    if (PyErr_Occurred() != nullptr) {  // Ctrl-C, as interruptible() heard it.
      throw nb::python_error();
    }
    std::move(taken).or_throw();
  };
  try {
    const nb::object module = nb::module_::import_("plimsoll.data.importers._saved_rows");
    return nb::cast<std::int64_t>(
        module.attr("read_saved_rows")(governor, path.string(), with_rows, nb::cpp_function(take)));
  } catch (nb::python_error& raised) {
    return tl::unexpected(reader_error(raised));
  }
}

Governor governor_of(const std::string& memory_limit) {
  return Governor::create({.memory_limit = memory_limit}).or_throw();
}

std::int64_t export_rows(const std::string& directory, const std::string& out,
                         const std::string& format, const std::string& column, std::int64_t since,
                         std::int64_t step, const std::string& memory_limit) {
  const ExportOptions options{.directory = directory,
                              .out = out,
                              .format = format,
                              .column = column,
                              .since = since,
                              .step = step};
  return interruptible(
      [&](const auto& go_on) { return export_store(governor_of(memory_limit), options, go_on); });
}

std::int64_t import_rows(const std::vector<std::string>& files, const std::string& out,
                         const std::string& format, const std::string& optimizer,
                         const std::string& dtype, bool number_rows,
                         const std::string& memory_limit) {
  const auto optimizers = optimizers_by_name();
  const auto named = optimizers.find(optimizer);
  if (named == optimizers.end() || (dtype != "float32" && dtype != "bfloat16")) {
    std::string names;
    for (const auto& [name, ignored] : optimizers) {
      names += (names.empty() ? "" : ", ") + name;
    }
    throw Exception(make_error(ErrorCode::kInvalidArgument,
                               named == optimizers.end()
                                   ? "optimizer must be one of " + names + ", not " + optimizer
                                   : "dtype must be float32 or bfloat16, not " + dtype));
  }
  const ImportOptions options{
      .files = {files.begin(), files.end()},
      .out = out,
      .format = format,
      .optimizer = named->second,
      .dtype = dtype == "bfloat16" ? RowDType::kBFloat16 : RowDType::kFloat32,
      .number_rows = number_rows};
  return interruptible(
      [&](const auto& go_on) { return import_store(governor_of(memory_limit), options, go_on); });
}

std::pair<std::int64_t, std::int64_t> compact(const std::string& directory, std::int64_t rows_max,
                                              const std::string& memory_limit) {
  const Compacted done = interruptible([&](const auto& go_on) {
    return compact_store(governor_of(memory_limit), directory, go_on, rows_max);
  });
  return {done.bytes_before, done.bytes};
}

/// A run's folder until close(). A forked child closes its copy, so that the lock ends with the
/// process that took it; nothing in the folder changes then.
class OpenRun {
 public:
  explicit OpenRun(RunFolder folder) : folder_(std::make_unique<RunFolder>(std::move(folder))) {}
  void close() { folder_.reset(); }
  RunFolder& get() {
    if (folder_ == nullptr) {
      throw Exception(make_error(ErrorCode::kInvalidArgument, "run: it was closed",
                                 "make plimsoll.Run(...) again"));
    }
    return *folder_;
  }

 private:
  std::unique_ptr<RunFolder> folder_;
};

/// A write of Python's own that may wait for room.
class NeedOfRoom {
 public:
  explicit NeedOfRoom(const std::string& path)
      : path_(path), need_(std::make_unique<RoomNeed>(path_)) {}
  bool wait(std::int64_t bytes) { return need_ != nullptr && need_->wait(bytes); }
  void close() { need_.reset(); }

 private:
  std::filesystem::path path_;  // Before what refers to it.
  std::unique_ptr<RoomNeed> need_;
};

/// Of a rank that does not write the run's folder, and has tables in it.
struct RoomOfRank {
  explicit RoomOfRank(const std::string& root) : room(room_of_run(root, {})) {}
  std::shared_ptr<RoomWait> room;
};

/// Texts are kept until the event is written.
class EventOfDict {
 public:
  explicit EventOfDict(const nb::dict& values) {
    names_.reserve(values.size());
    texts_.reserve(values.size());
    for (const auto& [key, value] : values) {
      names_.push_back(nb::cast<std::string>(key));
      fields_.push_back({names_.back().c_str(), value_of(value)});
    }
  }
  [[nodiscard]] std::span<const EventField> fields() const { return fields_; }

 private:
  EventValue value_of(nb::handle value) {
    if (nb::isinstance<nb::bool_>(value)) {
      return nb::cast<bool>(value);
    }
    if (nb::isinstance<nb::int_>(value)) {
      return nb::cast<std::int64_t>(value);
    }
    if (nb::isinstance<nb::float_>(value)) {
      return nb::cast<double>(value);
    }
    return std::string_view(texts_.emplace_back(nb::cast<std::string>(value)));
  }

  std::vector<std::string> names_;
  std::vector<std::string> texts_;
  std::vector<EventField> fields_;
};

/// LimitRequests has a thread, so it stays where it is made.
class LimitsOfRun {
 public:
  LimitsOfRun(const Governor& governor, const std::string& run)
      : requests_(std::make_unique<LimitRequests>(governor, run), "limit requests") {}
  /// (asked, what has changed or None, why not or "", whether it is of devices) of each request
  /// since the last call.
  nb::typed<nb::list, std::tuple<std::string, std::optional<LimitChange>, std::string, bool>>
  take() {
    nb::list taken;
    for (auto& one : requests_.use([](auto& held) { return held->take(); })) {
      taken.append(one.change ? nb::make_tuple(one.asked, *one.change, "", one.of_devices)
                              : nb::make_tuple(one.asked, nb::none(),
                                               one.change.error().to_string(), one.of_devices));
    }
    return taken;
  }
  void close() { requests_.close(); }

 private:
  Guarded<std::unique_ptr<LimitRequests>> requests_;
};

const char* name_of(Request request) {
  return request == Request::kStop ? "stop" : request == Request::kPause ? "pause" : "";
}

void bind_run_folder(nb::module_& m) {
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<DeviceStatus>(
      m, "DeviceStatus",
      "A device's line of status.json. peak_bytes: the most that context and "
      "reserved memory were together. others: other processes on it, in words; "
      "others_bytes −1: nobody knows.")
      .def(
          "__init__",
          [](DeviceStatus* at, const std::string& name, const std::string& kind, std::int64_t limit,
             std::int64_t context, std::int64_t allocated, std::int64_t reserved, std::int64_t peak,
             std::int64_t others_bytes, const std::string& others) {
            new (at) DeviceStatus{name,     kind, limit,        context, allocated,
                                  reserved, peak, others_bytes, others};
          },
          nb::arg("name"), nb::arg("kind"), nb::arg("limit_bytes"), nb::arg("context_bytes"),
          nb::arg("allocated_bytes"), nb::arg("reserved_bytes"), nb::arg("peak_bytes"),
          nb::arg("others_bytes") = -1, nb::arg("others") = "");
  nb::class_<RunStatus>(m, "RunStatus",
                        "Content of status.json; bytes are filled in by read_memory().")
      .def(nb::init<>())
      .def_rw("status", &RunStatus::status)
      .def_rw("step", &RunStatus::step)
      .def_rw("steps_total", &RunStatus::steps_total)
      .def_rw("epoch", &RunStatus::epoch)
      .def_rw("epochs", &RunStatus::epochs)
      .def_rw("loss", &RunStatus::loss)
      .def_rw("rows_per_second", &RunStatus::rows_per_second)
      .def_rw("seconds", &RunStatus::seconds)
      .def_rw("seconds_left", &RunStatus::seconds_left)
      .def_rw("devices", &RunStatus::devices)
      .def_rw("hit_rate", &RunStatus::hit_rate)
      .def_rw("checkpoint_step", &RunStatus::checkpoint_step)
      .def_rw("message", &RunStatus::message)
      .def_rw("cause", &RunStatus::cause)
      .def("read_memory", &RunStatus::read_memory, nb::arg("governor"),
           "From the ledger and /proc.");
  nb::class_<OpenRun>(
      m, "RunFolder",
      "The files of a run and its lock, until close(). A forked child closes its copy.")
      .def_static(
          "create",
          [](const std::string& root, const std::string& toml) {
            return OpenRun(RunFolder::create(root, toml).or_throw());
          },
          nb::arg("root"), nb::arg("run_toml"), unlocked,
          "Errors: ValueError (it is a run, is not empty, another process makes it); OSError.")
      .def_static(
          "open", [](const std::string& root) { return OpenRun(RunFolder::open(root).or_throw()); },
          nb::arg("root"), unlocked,
          "Errors: NotFoundError; ValueError (another process trains in it).")
      .def_static(
          "is_run", [](const std::string& root) { return RunFolder::is_run(root); },
          nb::arg("root"), "Whether there is a run.toml.")
      .def(
          "check_identity",
          [](OpenRun& run, const std::map<std::string, std::string>& identity,
             const std::vector<std::string>& accepted,
             const std::vector<std::string>& of_processor) {
            run.get()
                .check_identity(identity, {.any = accepted,
                                           .wishes = of_processor,
                                           .advice = "the same bits need the same kernels: resume "
                                                     "where the run was started, or go on with "
                                                     "other bits: --accept-other-processor"})
                .or_throw();
          },
          nb::arg("identity"), nb::arg("accepted"), nb::arg("of_processor"), unlocked,
          "Writes it, or compares. Errors: ValueError naming what differs and is not accepted, and "
          "where only keys of_processor do, --accept-other-processor.")
      .def(
          "write_config",
          [](OpenRun& run, const std::string& toml) { run.get().write_config(toml).or_throw(); },
          nb::arg("run_toml"), unlocked, "Replaces run.toml.")
      .def(
          "event",
          [](OpenRun& run, const std::string& name, const DictOf<nb::any>& values) {
            run.get().event(name.c_str(), EventOfDict(values).fields()).or_throw();
          },
          nb::arg("name"), nb::arg("values"), "A line of events.jsonl. Errors: OSError.")
      .def(
          "write_status",
          [](OpenRun& run, const RunStatus& status, bool force) {
            run.get().write_status(status, force).or_throw();
          },
          nb::arg("status"), nb::arg("force") = false, unlocked,
          "Replaces status.json, at most every 0.5 s unless `force`. Left out where the disk is "
          "full, as are events.")
      .def_prop_ro(
          "waits_for_room", [](OpenRun& run) { return run.get().waits_for_room(); },
          "Whether a write of its checkpoints or tables waits, as the disk is full.")
      .def(
          "wait_for_room", [](OpenRun& run) { return run.get().wait_for_room(); }, unlocked,
          "Waits while one does. False: it was given up, as the run is asked to stop.")
      .def(
          "published_step", [](OpenRun& run) { return run.get().published_step().or_throw(); },
          unlocked, "Errors: CorruptError, OSError.")
      .def(
          "checkpoint_path",
          [](OpenRun& run, std::int64_t step) { return run.get().checkpoint_path(step).string(); },
          nb::arg("step"), "The folder of a step.")
      .def(
          "publish",
          [](OpenRun& run, std::int64_t step, std::int64_t keep) {
            run.get().publish(step, keep).or_throw();
          },
          nb::arg("step"), nb::arg("keep"), unlocked,
          "Names the step in the manifest, then deletes older checkpoints. Errors: OSError.")
      .def(
          "discard_unpublished", [](OpenRun& run) { run.get().discard_unpublished().or_throw(); },
          unlocked, "Deletes checkpoints of steps that were not published.")
      .def(
          "discard_rows", [](OpenRun& run) { run.get().discard_rows().or_throw(); }, unlocked,
          "Deletes the tables.")
      .def(
          "record",
          [](OpenRun& run, const Governor& governor) {
            run.get().record(governor, counted_inside());
          },
          nb::arg("governor"), "From here on a thread keeps looks at the memory, in looks.bin.")
      .def(
          "phase", [](OpenRun& run, const std::string& name) { run.get().phase(name); },
          nb::arg("name"), unlocked,
          "Names the phase of the loop from now on, for the looks; \"\": it trains.")
      .def(
          "end_record", [](OpenRun& run) { run.get().end_record(); }, unlocked,
          "Takes a last look, and ends the thread.")
      .def(
          "abandon", [](OpenRun& run) { run.get().abandon(); },
          "Removes a folder that create() made.")
      .def("close", &OpenRun::close, unlocked, "Ends the lock.");
}

void bind_room(nb::module_& m) {
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<RoomOfRank>(m, "RunRoom",
                         "While it is there, writes below the run in `root` wait where the disk is "
                         "full: for a rank that has no RunFolder.")
      .def(nb::init<const std::string&>(), nb::arg("root"))
      .def_prop_ro(
          "waits_for_room", [](const RoomOfRank& one) { return one.room->waits(); },
          "Returns as RunFolder's.")
      .def(
          "wait_for_room", [](const RoomOfRank& one) { return one.room->wait_until_written(); },
          unlocked, "Returns as RunFolder's.");
  nb::class_<NeedOfRoom>(m, "RoomNeed", "A write that may wait for room, until close().")
      .def(nb::init<const std::string&>(), nb::arg("path"))
      .def("wait", &NeedOfRoom::wait, nb::arg("bytes"), unlocked,
           "After it failed for want of room. True: try again. False: no run waits there, or it is "
           "asked to stop.")
      .def("close", &NeedOfRoom::close, unlocked, "It was made, or has failed.");
}

void bind_run_loop(nb::module_& m) {
  nb::class_<LimitsOfRun>(m, "LimitRequests", "A thread that obeys `plimsoll limit`.")
      .def(nb::init<const Governor&, const std::string&>(), nb::arg("governor"), nb::arg("run"))
      .def("take", &LimitsOfRun::take,
           "Returns requests: (the size asked for, what has changed, why nothing has, whether it "
           "is of "
           "devices, which the caller serves).")
      .def("close", &LimitsOfRun::close, "Ends the thread.");
  nb::class_<StopSignals>(m, "StopSignals",
                          "SIGINT, SIGTERM and SIGUSR1 set a flag while this is alive; a second "
                          "SIGINT ends the process.")
      .def(
          "__init__", [](StopSignals* at, bool keeps) { new (at) StopSignals(nullptr, keeps); },
          nb::arg("keeps") = false, "keeps: what another one has seen still counts.")
      .def_static("pass_on", &StopSignals::pass_on,
                  "Hands the signal on to the handlers that are there again.");
  nb::class_<RunControl>(m, "RunControl", "Request to a run, by signal or file.")
      .def(
          "__init__", [](RunControl* at, const std::string& run) { new (at) RunControl(run); },
          nb::arg("run"))
      .def(
          "poll", [](RunControl& control) { return name_of(control.poll()); },
          "\"\", \"stop\" or \"pause\".")
      .def_prop_ro("reason", &RunControl::reason, "Names who asked for the stop.");
  nb::class_<Metrics>(m, "Metrics", "Scalars for TensorBoard.")
      .def_static(
          "open",
          [](const std::string& folder, std::int64_t resumed_step) {
            return Metrics::open(folder, resumed_step).or_throw();
          },
          nb::arg("folder"), nb::arg("resumed_step"), "Errors: OSError.")
      .def("scalar", &Metrics::scalar, nb::arg("tag"), nb::arg("value"), nb::arg("step"),
           "A failure waits for flush().")
      .def(
          "flush", [](Metrics& metrics) { metrics.flush().or_throw(); },
          "Errors: OSError, the first since the last call.");
  nb::class_<Progress>(m, "Progress", "The bar, or lines, on stderr.")
      .def(
          "__init__", [](Progress* at, bool quiet) { new (at) Progress({.quiet = quiet}); },
          nb::arg("quiet"))
      .def("update", &Progress::update, nb::arg("status"), nb::arg("epoch_fraction"),
           nb::arg("force") = false, "Drops what comes too fast.")
      .def("text", &Progress::text, nb::arg("message"), "Above the bar.")
      .def("clear", &Progress::clear, "Removes the bar.");
  m.def("instruction_set", &instruction_set, "The processor's, as far as kernels choose by it.");
}

}  // namespace

void bind_runs(nb::module_& m) {
  set_saved_rows_reader(read_saved_rows);
  bind_run_folder(m);
  bind_room(m);
  bind_run_loop(m);
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  m.def(
      "run_status",
      [](const std::string& run) { return RunFolder::view(run).or_throw().to_json(); },
      nb::arg("run"), unlocked,
      "JSON of what a run is doing. Errors: NotFoundError, CorruptError.");
  m.def(
      "run_why", [](const std::string& run) { return explain_end(run).or_throw().to_json(); },
      nb::arg("run"), unlocked, "JSON of how a run ended. Errors: NotFoundError, CorruptError.");
  m.def(
      "run_report",
      [](const std::string& run, const std::string& out) {
        return write_report(run, out).or_throw().string();
      },
      nb::arg("run"), nb::arg("out"), unlocked,
      "Writes the page; \"\" is RUN/report.html. Returns where it is. Errors: NotFoundError, "
      "CorruptError, OSError.");
  m.def(
      "run_trace",
      [](const std::string& run, const std::string& out) {
        write_counter_tracks(run, out).or_throw();
      },
      nb::arg("run"), nb::arg("out"), unlocked,
      "Writes the looks as counters of a trace. Errors: as run_report().");
  m.def(
      "run_stop", [](const std::string& run) { return ask_to_stop(run).or_throw(); },
      nb::arg("run"), unlocked, "False: no process trains there. Errors: NotFoundError, OSError.");
  m.def(
      "run_pause", [](const std::string& run) { return ask_to_pause(run).or_throw(); },
      nb::arg("run"), unlocked, "Returns as run_stop().");
  m.def(
      "run_continue", [](const std::string& run) { return ask_to_continue(run).or_throw(); },
      nb::arg("run"), unlocked, "Returns as run_stop().");
  m.def(
      "run_limit",
      [](const std::string& run, const std::string& size) {
        return ask_for_limit(run, size).or_throw();
      },
      nb::arg("run"), nb::arg("size"), unlocked,
      "Returns as run_stop(). Errors: ValueError for a size that cannot be read.");
  m.def(
      "store_directory", [](const std::string& path) { return store_directory(path).string(); },
      nb::arg("path"), "The folder of a run's rows; any other path as it is.");
  m.def(
      "store_verify",
      [](const std::string& directory) {
        interruptible([&](const auto& go_on) { return verify_store(directory, go_on); });
      },
      nb::arg("directory"), "Errors: CorruptError naming file and page; NotFoundError; OSError.");
  m.def("store_export", &export_rows, nb::arg("directory"), nb::arg("out"), nb::arg("format"),
        nb::arg("column"), nb::arg("since"), nb::arg("step"), nb::arg("memory_limit"),
        "Returns the number of rows. Errors: ValueError, NotFoundError, OSError.");
  m.def("store_import", &import_rows, nb::arg("files"), nb::arg("out"), nb::arg("format"),
        nb::arg("optimizer"), nb::arg("dtype"), nb::arg("number_rows"), nb::arg("memory_limit"),
        "Returns the number of rows. Errors: ValueError, OSError.");
  m.def("store_compact", &compact, nb::arg("directory"), nb::arg("rows_max"),
        nb::arg("memory_limit"),
        "Returns the bytes before and after. Errors: ValueError, NotFoundError, OSError.");
}

}  // namespace plimsoll::python
