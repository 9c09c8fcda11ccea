// SPDX-License-Identifier: Apache-2.0
//
// plimsoll._core: import_can, GraphSet and GraphBatches. Batches are assembled in arrays the caller
// brings.
//
// Reading order: bindings.h, plimsoll/graph_set.h, plimsoll/can_import.h, this file.
//
// Threads: a GraphBatches' calls queue (Guarded); a GraphSet's run side by side.
// Memory:  none of its own.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "base/check.h"
#include "bindings.h"
#include "data/graph_import.h"
#include "over_budget.h"
#include "plimsoll/can_import.h"
#include "plimsoll/graph_set.h"

namespace plimsoll::python {
namespace {

using FlatFloatsOut = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A set that Python and batches from it own together.
class Graphs {
 public:
  explicit Graphs(GraphSet set) : set_(std::make_shared<GraphSet>(std::move(set))) {}
  /// The set. Errors: kInvalidArgument after close().
  [[nodiscard]] std::shared_ptr<GraphSet> get() const {
    if (!set_) {
      throw Exception(
          make_error(ErrorCode::kInvalidArgument, "GraphSet: it was closed", "open it again"));
    }
    set_->check_process("use").or_throw();
    return set_;
  }
  void close() { set_.reset(); }

 private:
  std::shared_ptr<GraphSet> set_;
};

struct SharedBatches {
  std::shared_ptr<GraphSet> set;
  GraphBatches batches;
};
using PyBatches = Guarded<SharedBatches>;

std::tuple<std::int64_t, std::int64_t, std::int64_t> counts_tuple(const GraphCounts& counts) {
  return {counts.graphs, counts.nodes, counts.edges};
}

void copy_into(std::span<const std::int64_t> from, const IdsOut& out) {
  const auto to = span_of(out);
  if (from.size() != to.size()) {
    throw Exception(make_error(ErrorCode::kInvalidArgument,
                               "out has " + std::to_string(to.size()) + " elements where " +
                                   std::to_string(from.size()) + " are needed"));
  }
  std::copy(from.begin(), from.end(), to.begin());
}

GraphBuffers buffers_of(const FlatFloatsOut& x, const IdsOut& edge_index,
                        const FlatFloatsOut& edge_attr, const IdsOut& graph_of_node,
                        const IdsOut& labels) {
  return {.x = span_of(x),
          .edge_index = span_of(edge_index),
          .edge_attr = span_of(edge_attr),
          .graph_of_node = span_of(graph_of_node),
          .labels = span_of(labels)};
}

GraphSplit split_named(const std::string& name) {
  for (int i = 0; i < kGraphSplits; ++i) {
    if (name == graph_split_name(static_cast<GraphSplit>(i))) {
      return static_cast<GraphSplit>(i);
    }
  }
  throw Exception(make_error(ErrorCode::kInvalidArgument, "there is no split \"" + name + "\"",
                             "it is train, validation or test"));
}

// What each graph has, in three arrays of the caller's.
void describe_graphs(const Graphs& graphs, const IdsIn& which, const IdsOut& nodes,
                     const IdsOut& edges, const IdsOut& labels, const IdsOut& files) {
  const auto set = graphs.get();
  const auto ids = span_of(which);
  if (nodes.size() != ids.size() || edges.size() != ids.size() || labels.size() != ids.size() ||
      files.size() != ids.size()) {
    throw Exception(make_error(ErrorCode::kInvalidArgument, "the arrays differ in length"));
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= set->graphs()) {
      throw Exception(make_error(
          ErrorCode::kInvalidArgument,
          "there is no graph " + std::to_string(ids[i]) + " of " + std::to_string(set->graphs())));
    }
    const GraphCounts counts = set->counts(ids[i]);
    span_of(nodes)[i] = counts.nodes;
    span_of(edges)[i] = counts.edges;
    span_of(labels)[i] = set->label(ids[i]);
    span_of(files)[i] = set->file(ids[i]);
  }
}

void bind_set(nb::module_& m) {
  nb::class_<Graphs>(m, "GraphSet", "Many small graphs; see plimsoll.GraphSet.")
      .def_static(
          "open",
          [](const Governor& governor, const std::string& directory, std::int64_t cache_bytes) {
            const nb::gil_scoped_release unlocked;
            return Graphs(
                GraphSet::open(governor, {.directory = directory, .cache_bytes = cache_bytes})
                    .or_throw());
          },
          nb::arg("governor"), nb::arg("directory"), nb::arg("cache_bytes"),
          "Errors: NotFoundError, CorruptError, BudgetExceeded, OSError.")
      .def("close", &Graphs::close, "Lets go of the set.")
      .def_prop_ro(
          "graphs", [](const Graphs& graphs) { return graphs.get()->graphs(); },
          "How many there are.")
      .def_prop_ro(
          "ids", [](const Graphs& graphs) { return graphs.get()->info().ids; },
          "Ids in the vocabulary.")
      .def_prop_ro(
          "cached", [](const Graphs& graphs) { return graphs.get()->cached(); },
          "True when the graphs stay in memory.")
      .def(
          "split_size",
          [](const Graphs& graphs, const std::string& split) {
            return graphs.get()->split(split_named(split)).size();
          },
          nb::arg("split"), "Errors: ValueError for a split that is none.")
      .def(
          "split",
          [](const Graphs& graphs, const std::string& split, const IdsOut& out) {
            copy_into(graphs.get()->split(split_named(split)), out);
          },
          nb::arg("split"), nb::arg("out").noconvert(), "Shape: out [split_size(split)].")
      .def(
          "vocabulary",
          [](const Graphs& graphs, const IdsOut& out) {
            copy_into(graphs.get()->vocabulary(), out);
          },
          nb::arg("out").noconvert(), "Shape: out [ids].")
      .def("describe", &describe_graphs, nb::arg("graphs").noconvert(),
           nb::arg("nodes").noconvert(), nb::arg("edges").noconvert(),
           nb::arg("labels").noconvert(), nb::arg("files").noconvert(),
           "Errors: ValueError for a graph out of range.")
      .def(
          "gather",
          [](const Graphs& graphs, const IdsIn& which, const FlatFloatsOut& x,
             const IdsOut& edge_index, const FlatFloatsOut& edge_attr, const IdsOut& graph_of_node,
             const IdsOut& labels) {
            const auto set = graphs.get();
            const auto out = buffers_of(x, edge_index, edge_attr, graph_of_node, labels);
            const auto ids = span_of(which);
            const nb::gil_scoped_release unlocked;
            static_cast<void>(set->gather(ids, out).or_throw());
          },
          nb::arg("graphs").noconvert(), nb::arg("x").noconvert(),
          nb::arg("edge_index").noconvert(), nb::arg("edge_attr").noconvert(),
          nb::arg("graph_of_node").noconvert(), nb::arg("labels").noconvert(),
          "Shape: flat arrays, at least as large as the batch. Errors: ValueError, CorruptError.")
      .def(
          "verify",
          [](const Graphs& graphs) {
            const auto set = graphs.get();
            const nb::gil_scoped_release unlocked;
            set->verify(nullptr).or_throw();
          },
          "Errors: CorruptError naming the graph; OSError.");
}

std::unique_ptr<PyBatches> open_batches(const Graphs& graphs, const std::string& split,
                                        const std::optional<IdsIn>& members,
                                        std::int64_t batch_graphs, std::int64_t nodes_max,
                                        std::int64_t edges_max, std::int64_t bytes_max,
                                        std::int64_t min_steps, bool shuffle, std::uint64_t seed,
                                        std::int64_t epoch, std::int64_t position) {
  auto set = graphs.get();
  GraphBatchesOptions options{.split = split_named(split),
                              .batch_graphs = batch_graphs,
                              .nodes_max = nodes_max,
                              .edges_max = edges_max,
                              .bytes_max = bytes_max,
                              .min_steps = min_steps,
                              .shuffle = shuffle,
                              .seed = seed,
                              .epoch = epoch,
                              .position = position};
  if (members) {
    const auto ids = span_of(*members);
    options.graphs.assign(ids.begin(), ids.end());
  }
  auto batches = GraphBatches::open(set.get(), std::move(options)).or_throw();
  return std::make_unique<PyBatches>(SharedBatches{std::move(set), std::move(batches)},
                                     "GraphBatches");
}

void bind_batches(nb::module_& m) {
  nb::class_<PyBatches>(m, "GraphBatches", "Batches in a seeded order; see plimsoll.GraphBatches.")
      .def_static("open", &open_batches, nb::arg("set"), nb::arg("split"), nb::arg("graphs").none(),
                  nb::arg("batch_graphs"), nb::arg("nodes_max"), nb::arg("edges_max"),
                  nb::arg("bytes_max"), nb::arg("min_steps"), nb::arg("shuffle"), nb::arg("seed"),
                  nb::arg("epoch"), nb::arg("position"), "Errors: ValueError naming the option.")
      .def(
          "peek",
          [](PyBatches& batches) {
            return counts_tuple(
                batches.use([](SharedBatches& self) { return self.batches.peek(); }));
          },
          "Graphs, nodes and edges of the next batch.")
      .def(
          "next",
          [](PyBatches& batches, const FlatFloatsOut& x, const IdsOut& edge_index,
             const FlatFloatsOut& edge_attr, const IdsOut& graph_of_node, const IdsOut& labels,
             const IdsOut& graphs) {
            GraphBuffers out = buffers_of(x, edge_index, edge_attr, graph_of_node, labels);
            out.graphs = span_of(graphs);
            const GraphBatch batch =
                batches.use([&](SharedBatches& self) { return self.batches.next(out).or_throw(); });
            return std::tuple(batch.epoch, batch.position, batch.ends_epoch);
          },
          nb::arg("x").noconvert(), nb::arg("edge_index").noconvert(),
          nb::arg("edge_attr").noconvert(), nb::arg("graph_of_node").noconvert(),
          nb::arg("labels").noconvert(), nb::arg("graphs").noconvert(),
          "Assembles a batch; its epoch, position and whether it ends the epoch.")
      .def(
          "steps",
          [](PyBatches& batches, std::int64_t epoch) {
            return batches.use([&](SharedBatches& self) { return self.batches.steps(epoch); });
          },
          nb::arg("epoch"), "Batches of an epoch.")
      .def(
          "seek",
          [](PyBatches& batches, std::int64_t epoch, std::int64_t position) {
            batches.use(
                [&](SharedBatches& self) { self.batches.seek(epoch, position).or_throw(); });
          },
          nb::arg("epoch"), nb::arg("position"),
          "Errors: ValueError for a position outside the epoch.")
      .def_prop_ro(
          "graphs",
          [](PyBatches& batches) {
            return batches.use([](SharedBatches& self) { return self.batches.graphs(); });
          },
          "Graphs of an epoch.")
      .def_prop_ro(
          "most",
          [](PyBatches& batches) {
            return counts_tuple(
                batches.use([](SharedBatches& self) { return self.batches.most(); }));
          },
          "Graphs, nodes and edges that no batch passes.")
      .def_prop_ro(
          "state",
          [](PyBatches& batches) {
            const auto [epoch, position] = batches.use([](SharedBatches& self) {
              return std::pair(self.batches.epoch(), self.batches.position());
            });
            return std::tuple(epoch, position);
          },
          "Epoch and position.")
      .def("close", &PyBatches::close, "Lets go of the set.");
}

// True when `out` already held what would have been made. Ctrl-C cancels.
bool import_frames(const Governor& governor, const std::vector<std::string>& inputs,
                   const std::string& out, std::int64_t window, std::int64_t stride,
                   double validation, std::uint64_t seed, const std::vector<std::string>& columns,
                   const std::string& vocabulary, bool normal_ids,
                   const std::vector<std::string>& exclude, std::int64_t ids_max, bool skip_bad,
                   const std::string& dialect, bool rebuild, int threads,
                   std::int64_t chunk_bytes) {
  const CanImportOptions options{.inputs = {inputs.begin(), inputs.end()},
                                 .out = out,
                                 .window = window,
                                 .stride = stride,
                                 .validation = validation,
                                 .seed = seed,
                                 .exclude = exclude,
                                 .dialect = can_dialect_named(dialect).or_throw(),
                                 .columns = columns,
                                 .vocabulary = vocabulary,
                                 .normal_ids = normal_ids,
                                 .ids_max = ids_max,
                                 .skip_bad = skip_bad,
                                 .rebuild = rebuild,
                                 .threads = threads,
                                 .chunk_bytes = chunk_bytes};
  bool interrupted = false;
  const auto go_on = [&](std::int64_t, std::int64_t) {
    const nb::gil_scoped_acquire locked;
    interrupted = PyErr_CheckSignals() != 0;
    return !interrupted;
  };
  const auto made = [&] {
    const nb::gil_scoped_release unlocked;
    return import_can(governor, options, go_on);
  }();
  if (interrupted) {
    throw nb::python_error();
  }
  if (!made) {
    throw Exception(made.error());
  }
  return made->reused;
}

using EndsIn = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

/// Hands the graphs of a block on, one by one. Without Python's lock.
Result<void> take_graphs(const SavedGraphs& saved, const FloatsIn& x, const FloatsIn& edge_attr,
                         const EndsIn& ends, const IdsIn& nodes, const IdsIn& edges,
                         const IdsIn& attack) {
  std::size_t node = 0;
  std::size_t edge = 0;
  for (std::size_t g = 0; g < nodes.size(); ++g) {
    const auto more_nodes = static_cast<std::size_t>(nodes.data()[g]);
    const auto more_edges = static_cast<std::size_t>(edges.data()[g]);
    PLIMSOLL_TRY_VOID(
        saved.take({.x = span_of(x).subspan(node * kGraphFeatures, more_nodes * kGraphFeatures),
                    .edge_attr = span_of(edge_attr).subspan(edge * kGraphFeatures,
                                                            more_edges * kGraphFeatures),
                    .ends = span_of(ends).subspan(edge * 2, more_edges * 2),
                    .attack = attack.data()[g] != 0}));
    node += more_nodes;
    edge += more_edges;
  }
  return {};
}

/// What plimsoll.data.importers has for it. Also called by the program, without Python's lock.
Result<std::vector<std::uint32_t>> read_saved_graphs(const Governor& governor,
                                                     const SavedGraphs& saved) {
  const nb::gil_scoped_acquire locked;
  bool cancelled = false;
  const auto take = [&](const FloatsIn& x, const FloatsIn& edge_attr, const EndsIn& ends,
                        const IdsIn& nodes, const IdsIn& edges, const IdsIn& attack) {
    const nb::gil_scoped_release unlocked;
    take_graphs(saved, x, edge_attr, ends, nodes, edges, attack).or_throw();
  };
  const auto step = [&](double share) {
    if (!saved.step(share)) {
      if (PyErr_Occurred() == nullptr) {  // Of the program, which has Ctrl-C to itself.
        cancelled = true;
        PyErr_SetNone(PyExc_KeyboardInterrupt);
      }
      throw nb::python_error();
    }
  };
  try {
    const nb::object module = nb::module_::import_("plimsoll.data.importers._saved_graphs");
    return nb::cast<std::vector<std::uint32_t>>(
        module.attr("read_saved_graphs")(governor, saved.path.string(), saved.window, saved.ids_max,
                                         nb::cpp_function(take), nb::cpp_function(step)));
  } catch (nb::python_error& raised) {
    return cancelled ? fail(ErrorCode::kInvalidArgument, saved.path.string() + ": import cancelled")
                     : tl::unexpected(reader_error(raised));
  }
}

}  // namespace

void bind_graphs(nb::module_& m) {
  set_saved_graphs_reader(read_saved_graphs);
  bind_set(m);
  bind_batches(m);
  m.def("import_can", &import_frames, nb::arg("governor"), nb::arg("inputs"), nb::arg("out"),
        nb::arg("window"), nb::arg("stride"), nb::arg("validation"), nb::arg("seed"),
        nb::arg("columns"), nb::arg("vocabulary"), nb::arg("normal_ids"), nb::arg("exclude"),
        nb::arg("ids_max"), nb::arg("skip_bad"), nb::arg("dialect"), nb::arg("rebuild"),
        nb::arg("threads"), nb::arg("chunk_bytes"),
        "True when `out` was left as it was. Errors: see plimsoll.import_can.");
}

}  // namespace plimsoll::python
