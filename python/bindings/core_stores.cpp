// SPDX-License-Identifier: Apache-2.0
//
// plimsoll._core: EmbeddingStore, FeatureStore and FeatureWriter. Rows are copied into arrays the
// caller brings; no view of a page ever leaves a store.
//
// Reading order: bindings.h, plimsoll/embedding_store.h, plimsoll/feature_store.h, this file.
//
// Threads: an EmbeddingStore's calls queue (Guarded); a FeatureStore's run side by side.
// Memory:  none of its own.
#include "core_stores.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "plimsoll/embedding_store.h"
#include "plimsoll/virtual_shard.h"
#include "tables/describe.h"

namespace plimsoll::python {
namespace {

using Table = Guarded<EmbeddingStore>;
using CountsIn = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Writer = Guarded<FeatureWriter>;
using IdsOrNone = nb::typed<nb::object, IdsIn>;  // With nb::arg().none().

using Counters = DictOf<std::variant<std::int64_t, double>>;

Counters stats_dict(const StoreStats& stats) {
  Counters out;
  out["requests"] = stats.requests;
  out["hits"] = stats.hits;
  out["hit_rate"] = stats.hit_rate();
  out["prefetch_hits"] = stats.prefetch_hits;
  out["pages_read"] = stats.pages_read;
  out["pages_written"] = stats.pages_written;
  out["bytes_read"] = stats.bytes_read;
  out["bytes_written"] = stats.bytes_written;
  out["evictions_clean"] = stats.evictions_clean;
  out["evictions_dirty"] = stats.evictions_dirty;
  out["commits"] = stats.commits;
  out["syncs"] = stats.syncs;
  out["stall_ns"] = stats.stall_ns;
  out["dirty_bytes"] = stats.dirty_bytes;
  out["dirty_bytes_max"] = stats.dirty_bytes_max;
  out["resident_pages"] = stats.resident_pages;
  out["frames"] = stats.frames;
  out["shrinks"] = stats.shrinks;
  return out;
}

Counters stats_dict(const FeatureStats& stats) {
  Counters out;
  out["requests"] = stats.requests;
  out["hits"] = stats.hits;
  out["hit_rate"] = stats.requests == 0
                        ? 1.0
                        : static_cast<double>(stats.hits) / static_cast<double>(stats.requests);
  out["blocks_read"] = stats.blocks_read;
  out["reads"] = stats.reads;
  out["bytes_read"] = stats.bytes_read;
  out["bytes_delivered"] = stats.bytes_delivered;
  out["joined"] = stats.joined;
  out["stall_ns"] = stats.stall_ns;
  out["frames"] = stats.frames;
  out["resident_frames"] = stats.resident_frames;
  return out;
}

// Name → (dtype, shape of one record), in the order of the records.
using Shape = nb::typed<nb::tuple, std::int64_t, nb::ellipsis>;

DictOf<std::tuple<nb::str, Shape>> columns_dict(const std::vector<ColumnSpec>& specs) {
  nb::dict columns;
  for (const ColumnSpec& column : specs) {
    columns[column.name.c_str()] =
        nb::make_tuple(dtype_name(column.dtype), nb::tuple(nb::cast(column.shape)));
  }
  return columns;
}

// Name of a ragged column → the most elements of a record.
DictOf<std::int64_t> ragged_dict(const std::vector<ColumnSpec>& specs) {
  nb::dict ragged;
  for (const ColumnSpec& column : specs) {
    if (column.ragged()) {
      ragged[column.name.c_str()] = column.length_max;
    }
  }
  return ragged;
}

// ---- Ids in a list of ints, rows at an address: what python/plimsoll/compat answers for. A batch
// of 32 costs a microsecond so, and four more where arrays are made of both.

using Numbers = nb::typed<nb::list, std::int64_t>;
using Marks = nb::ndarray<bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Nothing when there is something else in the list, or it is beyond 64 bits.
std::optional<std::vector<std::int64_t>> ids_listed(const nb::list& list) {
  std::vector<std::int64_t> ids(list.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    PyObject* const one = PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i));
    int overflow = 0;
    if (PyLong_CheckExact(one) == 0) {
      return std::nullopt;
    }
    ids[i] = PyLong_AsLongLongAndOverflow(one, &overflow);
    if (overflow != 0) {
      return std::nullopt;
    }
  }
  return ids;
}

bool gather_listed(Table& table, const Numbers& list, std::uintptr_t rows, std::size_t floats) {
  const auto ids = ids_listed(list);
  if (!ids) {
    return false;
  }
  table.use([&](EmbeddingStore& store) {
    store.gather(*ids, std::span(reinterpret_cast<float*>(rows), floats)).or_throw();
  });
  return true;
}

// Marks the chunks that the rows belong to, `chunk_rows` to each: ids are positions there.
bool update_listed(Table& table, const Numbers& list, std::uintptr_t rows, std::size_t floats,
                   const Marks& marks, std::int64_t chunk_rows) {
  const auto ids = ids_listed(list);
  if (!ids) {
    return false;
  }
  table.use([&](EmbeddingStore& store) {
    store.update(*ids, std::span(reinterpret_cast<const float*>(rows), floats)).or_throw();
  });
  for (const std::int64_t id : *ids) {
    if (const auto chunk = static_cast<std::size_t>(id / chunk_rows); chunk < marks.size()) {
      marks.data()[chunk] = true;
    }
  }
  return true;
}

// visit(ids, sequences, values) gets arrays over the store's scratch that are valid during the
// call only; python/plimsoll/rows/_embedding.py copies them before any other code sees them.
void scan_table(Table& table,
                const nb::typed<nb::callable, nb::object(IdsIn, CountsIn, FloatsIn)>& visit) {
  std::exception_ptr raised;
  table.use([&](EmbeddingStore& store) {
    auto result =
        store.scan([&](std::span<const std::int64_t> ids, std::span<const std::uint32_t> sequences,
                       std::span<const float> values) -> Result<void> {
          const nb::gil_scoped_acquire locked;
          try {
            const std::size_t width = ids.empty() ? 0 : values.size() / ids.size();
            visit(nb::ndarray<nb::numpy, const std::int64_t, nb::ndim<1>>(ids.data(), {ids.size()},
                                                                          nb::handle()),
                  nb::ndarray<nb::numpy, const std::uint32_t, nb::ndim<1>>(
                      sequences.data(), {sequences.size()}, nb::handle()),
                  nb::ndarray<nb::numpy, const float, nb::ndim<2>>(
                      values.data(), {ids.size(), width}, nb::handle()));
          } catch (...) {
            raised = std::current_exception();
            return fail(ErrorCode::kInvalidArgument, "scan: the visitor raised an exception");
          }
          return {};
        });
    if (!raised) {
      std::move(result).or_throw();
    }
  });
  if (raised) {
    std::rethrow_exception(raised);
  }
}

void bind_table_options(nb::module_& m) {
  nb::enum_<RowOptimizer>(m, "RowOptimizer",
                          "How apply() turns a gradient into a change of the row.")
      .value("ADAMW", RowOptimizer::kAdamW)
      .value("ADAMW_FRESH", RowOptimizer::kAdamWFresh)
      .value("ADAGRAD", RowOptimizer::kAdagrad)
      .value("SGD", RowOptimizer::kSgd)
      .value("SGD_MOMENTUM", RowOptimizer::kSgdMomentum)
      .value("ROW_ADAGRAD", RowOptimizer::kRowAdagrad)
      .value("ADAM", RowOptimizer::kAdam);
  nb::class_<RowOptimizerOptions>(m, "RowOptimizerOptions", "The kind and its numbers.")
      .def(
          "__init__",
          [](RowOptimizerOptions* self, RowOptimizer kind, float learning_rate, float beta1,
             float beta2, float epsilon, float weight_decay, float momentum) {
            new (self) RowOptimizerOptions{kind,    learning_rate, beta1,   beta2,
                                           epsilon, weight_decay,  momentum};
          },
          nb::arg("kind"), nb::arg("learning_rate"), nb::arg("beta1"), nb::arg("beta2"),
          nb::arg("epsilon"), nb::arg("weight_decay"), nb::arg("momentum") = 0.0F);
  nb::enum_<RowInitKind>(m, "RowInitKind", "Rows before their first update.")
      .value("ZEROS", RowInitKind::kZeros)
      .value("NORMAL", RowInitKind::kNormal)
      .value("UNIFORM", RowInitKind::kUniform);
  nb::class_<RowInit>(m, "RowInit", "The kind, its scale and its seed.")
      .def(
          "__init__",
          [](RowInit* self, RowInitKind kind, float scale, std::uint64_t seed) {
            new (self) RowInit{kind, scale, seed};
          },
          nb::arg("kind"), nb::arg("scale"), nb::arg("seed"));
  nb::class_<SlabPlan>(
      m, "SlabPlan",
      "How a slab is divided and what the disk may come to hold, in bytes; str() is a table.")
      .def_ro("total_bytes", &SlabPlan::total_bytes, "The slab.")
      .def_ro("frame_bytes", &SlabPlan::frame_bytes, "Page frames.")
      .def_ro("index_bytes", &SlabPlan::index_bytes, "Id index and page table.")
      .def_ro("buffer_bytes", &SlabPlan::buffer_bytes, "I/O buffers and the scratch of a request.")
      .def_ro("queue_bytes", &SlabPlan::queue_bytes, "Look-ahead queue.")
      .def_ro("floor_bytes", &SlabPlan::floor_bytes, "The smallest slab that works for this table.")
      .def_ro("disk_cap_bytes", &SlabPlan::disk_cap_bytes, "Most the directory can reach.")
      .def_ro("rows_max", &SlabPlan::rows_max,
              "Rows all this is enough for; 0: the table cannot grow.")
      .def_ro("network", &SlabPlan::network,
              "\"NFS\", …: the directory is on a file system of a network; else empty.")
      .def("__str__", &SlabPlan::to_string);
}

EmbeddingStoreOptions table_options(const std::string& directory, std::int64_t dim,
                                    const RowOptimizerOptions& optimizer, const RowInit& init,
                                    std::int64_t store_bytes, std::int64_t rows,
                                    const IdsOrNone& ids, std::int64_t at_step,
                                    std::int64_t batch_rows, int io_threads, int compute_threads) {
  EmbeddingStoreOptions options;
  options.directory = directory;
  options.dim = dim;
  options.optimizer = optimizer;
  options.init = init;
  options.store_bytes = store_bytes;
  options.rows = rows;
  if (!ids.is_none()) {
    options.ids = span_of(nb::cast<IdsIn>(ids, false));  // The caller holds the array meanwhile.
  }
  options.at_step = at_step;
  options.batch_rows = batch_rows;
  options.io_threads = io_threads;
  options.compute_threads = compute_threads;
  return options;
}

void bind_table(nb::module_& m) {
  nb::enum_<RowDType>(m, "RowDType", "Data type that a weight is stored as.")
      .value("FLOAT32", RowDType::kFloat32)
      .value("BFLOAT16", RowDType::kBFloat16);
  nb::enum_<RowLayout>(m, "RowLayout", "Where rows lie on disk.")
      .value("ANY_ORDER", RowLayout::kAnyOrder)
      .value("SAMPLE_ORDER", RowLayout::kSampleOrder);
  nb::class_<EmbeddingStoreOptions>(m, "EmbeddingStoreOptions",
                                    "Options of EmbeddingStore.open() and plan().")
      .def(
          "__init__",
          [](EmbeddingStoreOptions* self, const std::string& directory, std::int64_t dim,
             const RowOptimizerOptions& optimizer, const RowInit& init, std::int64_t store_bytes,
             std::int64_t rows, const IdsOrNone& ids, std::int64_t at_step, std::int64_t batch_rows,
             int io_threads, int compute_threads) {
            new (self) EmbeddingStoreOptions(
                table_options(directory, dim, optimizer, init, store_bytes, rows, ids, at_step,
                              batch_rows, io_threads, compute_threads));
          },
          nb::arg("directory"), nb::arg("dim"), nb::arg("optimizer"), nb::arg("init"),
          nb::arg("store_bytes"), nb::arg("rows"), nb::arg("ids").none(), nb::arg("at_step"),
          nb::arg("batch_rows"), nb::arg("io_threads"), nb::arg("compute_threads"),
          nb::keep_alive<1, 8>())
      .def_rw("dtype", &EmbeddingStoreOptions::dtype)
      .def_rw("layout", &EmbeddingStoreOptions::layout)
      .def_rw("order_seed", &EmbeddingStoreOptions::order_seed)
      .def_rw("rows_max", &EmbeddingStoreOptions::rows_max)
      .def_rw("pinned", &EmbeddingStoreOptions::pinned)
      .def_rw("dirty_bytes", &EmbeddingStoreOptions::dirty_bytes);
  m.def(
      "virtual_shards",
      [](const IdsIn& ids, const IdsOut& shards) {
        if (ids.size() != shards.size()) {
          throw Exception(
              make_error(ErrorCode::kInvalidArgument, "ids and shards differ in length"));
        }
        std::ranges::transform(span_of(ids), span_of(shards).begin(), virtual_shard);
      },
      nb::arg("ids").noconvert(), nb::arg("shards").noconvert(),
      "Writes the shard of each id, from 0 to 4,095 (docs/formats/embedding_store.md). Shape: [n] "
      "each.");
  nb::class_<Table>(m, "EmbeddingStore", "Rows by id; see plimsoll.EmbeddingStore.")
      .def_static(
          "open",
          [](const Governor& governor, const EmbeddingStoreOptions& options) {
            const nb::gil_scoped_release unlocked;
            return std::make_unique<Table>(EmbeddingStore::open(governor, options).or_throw(),
                                           "EmbeddingStore");
          },
          nb::arg("governor"), nb::arg("options"),
          "Errors: BudgetExceeded, ValueError, NotFoundError, CorruptError, OSError.")
      .def_static(
          "plan",
          [](const EmbeddingStoreOptions& options) {
            const nb::gil_scoped_release unlocked;
            return EmbeddingStore::plan(options).or_throw();
          },
          nb::arg("options"), "The slab this table would need. Creates nothing.")
      .def("close", &Table::close, "Returns the slab; what was not committed is gone.")
      .def(
          "gather",
          [](Table& table, const IdsIn& ids, const FloatsOut& out) {
            table.use([&](EmbeddingStore& store) {
              store.gather(span_of(ids), span_of(out)).or_throw();
            });
          },
          nb::arg("ids").noconvert(), nb::arg("out").noconvert(),
          "Shape: ids [n], out [n, dim]. Errors: NotFoundError, CorruptError, OSError.")
      .def(
          "apply",
          [](Table& table, const IdsIn& ids, const FloatsIn& grads, float rate_scale) {
            table.use([&](EmbeddingStore& store) {
              store.apply(span_of(ids), span_of(grads), rate_scale).or_throw();
            });
          },
          nb::arg("ids").noconvert(), nb::arg("grads").noconvert(), nb::arg("rate_scale"),
          "Shape: ids [n], grads [n, dim]. Errors: as gather(), ValueError.")
      .def(
          "update",
          [](Table& table, const IdsIn& ids, const FloatsIn& rows) {
            table.use([&](EmbeddingStore& store) {
              store.update(span_of(ids), span_of(rows)).or_throw();
            });
          },
          nb::arg("ids").noconvert(), nb::arg("rows").noconvert(),
          "Shape: ids [n], rows [n, dim]. Errors: as gather().")
      .def(
          "restore",
          [](Table& table, const IdsIn& ids, const CountsIn& sequences, const FloatsIn& values) {
            table.use([&](EmbeddingStore& store) {
              store.restore(span_of(ids), span_of(sequences), span_of(values)).or_throw();
            });
          },
          nb::arg("ids").noconvert(), nb::arg("sequences").noconvert(),
          nb::arg("values").noconvert(),
          "Records as scan() shows them. Shape: ids [n], distinct; values [n, dim + state_floats]. "
          "Errors: as gather().")
      .def("gather_listed", &gather_listed, nb::arg("ids"), nb::arg("rows"), nb::arg("floats"),
           "gather() to the address `rows`, of so many floats. False, and nothing done, when there "
           "is something else than 64-bit ints in the list.")
      .def("update_listed", &update_listed, nb::arg("ids"), nb::arg("rows"), nb::arg("floats"),
           nb::arg("marks").noconvert(), nb::arg("chunk_rows"),
           "update() from the address `rows`, likewise; then sets marks[id // chunk_rows].")
      .def(
          "prefetch",
          [](Table& table, const IdsIn& ids) {
            table.use([&](EmbeddingStore& store) { store.prefetch(span_of(ids)); });
          },
          nb::arg("ids").noconvert(), "A hint; cannot fail.")
      .def(
          "insert",
          [](Table& table, const IdsIn& ids) {
            return table.use(
                [&](EmbeddingStore& store) { return store.insert(span_of(ids)).or_throw(); });
          },
          nb::arg("ids").noconvert(),
          "Shape: ids [n]. How many are new. Errors: ValueError, CorruptError, OSError.")
      .def(
          "erase",
          [](Table& table, const IdsIn& ids) {
            table.use([&](EmbeddingStore& store) { store.erase(span_of(ids)).or_throw(); });
          },
          nb::arg("ids").noconvert(), "Shape: ids [n]. Errors: as gather(), ValueError.")
      .def(
          "begin_epoch",
          [](Table& table, std::int64_t epoch) {
            table.use([&](EmbeddingStore& store) { store.begin_epoch(epoch).or_throw(); });
          },
          nb::arg("epoch"), "Errors: CorruptError, OSError.")
      .def(
          "commit",
          [](Table& table, std::int64_t step) {
            table.use([&](EmbeddingStore& store) { store.commit(step).or_throw(); });
          },
          nb::arg("step"), "Makes everything so far durable. Errors: ValueError, OSError.")
      .def("scan", &scan_table, nb::arg("visit"),
           "The arrays given to visit are valid during that call only.")
      .def(
          "set_optimizer",
          [](Table& table, const RowOptimizerOptions& options) {
            table.use([&](EmbeddingStore& store) { store.set_optimizer(options).or_throw(); });
          },
          nb::arg("options"), "Errors: ValueError for another kind.")
      .def_prop_ro(
          "rows", [](Table& table) { return table.use([](auto& store) { return store.rows(); }); },
          "Rows in the table.")
      .def_prop_ro(
          "rows_max",
          [](Table& table) { return table.use([](auto& store) { return store.rows_max(); }); },
          "Rows there may be at most; 0: the rows are fixed.")
      .def_prop_ro(
          "dim", [](Table& table) { return table.use([](auto& store) { return store.dim(); }); },
          "Floats per row.")
      .def_prop_ro(
          "slots",
          [](Table& table) { return table.use([](auto& store) { return store.slots(); }); },
          "Optimizer floats per weight: 0, 1 or 2.")
      .def_prop_ro(
          "state_floats",
          [](Table& table) { return table.use([](auto& store) { return store.state_floats(); }); },
          "Optimizer floats per row: dim × slots, and one for row-wise Adagrad.")
      .def_prop_ro(
          "last_commit",
          [](Table& table) { return table.use([](auto& store) { return store.last_commit(); }); },
          "−1 before the first.")
      .def(
          "slab_plan",
          [](Table& table) {
            return table.use([](const EmbeddingStore& store) { return store.plan(); });
          },
          "How the slab is divided.")
      .def(
          "stats",
          [](Table& table) {
            return stats_dict(table.use([](const EmbeddingStore& store) { return store.stats(); }));
          },
          "Counters since open.");
}

// Of ids to ordinals, or back.
template <auto kTranslate>
void translated(Features& features, const IdsIn& from, const IdsOut& to) {
  const auto store = features.get();
  const nb::gil_scoped_release unlocked;
  (*store.*kTranslate)(span_of(from), span_of(to)).or_throw();
}

void bind_feature_store(nb::module_& m) {
  nb::class_<FeaturePlan>(
      m, "FeaturePlan",
      "How a feature store's slab is divided, in bytes; the parts add up to total_bytes.")
      .def_ro("total_bytes", &FeaturePlan::total_bytes, "The slab.")
      .def_ro("frame_bytes", &FeaturePlan::frame_bytes,
              "Frames of blocks, and the map that finds them.")
      .def_ro("buffer_bytes", &FeaturePlan::buffer_bytes,
              "Where neighbours, and compressed blocks, are read to.")
      .def_ro("table_bytes", &FeaturePlan::table_bytes,
              "Tables kept whole: checksums, places, ids, groups.")
      .def_ro("index_bytes", &FeaturePlan::index_bytes, "Pages and fences of the id index.")
      .def_ro("slack_bytes", &FeaturePlan::slack_bytes, "Alignment.");
  nb::class_<Features>(m, "FeatureStore", "Columns by id; see plimsoll.FeatureStore.")
      .def_static(
          "open",
          [](const Governor& governor, const std::string& directory, std::int64_t cache_bytes,
             int io_threads, std::int64_t join_gap_bytes, std::int64_t parts) {
            const nb::gil_scoped_release unlocked;
            return std::make_unique<Features>(
                FeatureStore::open(governor,
                                   {directory, cache_bytes, io_threads, join_gap_bytes, parts})
                    .or_throw());
          },
          nb::arg("governor"), nb::arg("directory"), nb::arg("cache_bytes"), nb::arg("io_threads"),
          nb::arg("join_gap_bytes"), nb::arg("parts"),
          "Errors: NotFoundError, CorruptError, BudgetExceeded.")
      .def("close", &Features::close, "Lets go of the store.")
      .def(
          "read",
          [](Features& features, const IdsIn& ids, const std::vector<int>& columns,
             const std::vector<BytesOut>& out) {
            const auto store = features.get();
            std::vector<std::span<std::byte>> spans;
            for (const BytesOut& array : out) {
              spans.push_back(bytes_of(array));
            }
            const nb::gil_scoped_release unlocked;
            store->read(span_of(ids), columns, spans).or_throw();
          },
          nb::arg("ids").noconvert(), nb::arg("columns"), nb::arg("out").noconvert(),
          "Shape: out[k] has n × the bytes of column k. Errors: NotFoundError, CorruptError, "
          "OSError.")
      .def(
          "read_ordinals",
          [](Features& features, const IdsIn& ordinals, const std::vector<int>& columns,
             const std::vector<BytesOut>& out) {
            const auto store = features.get();
            std::vector<std::span<std::byte>> spans;
            for (const BytesOut& array : out) {
              spans.push_back(bytes_of(array));
            }
            const nb::gil_scoped_release unlocked;
            store->read_ordinals(span_of(ordinals), columns, spans).or_throw();
          },
          nb::arg("ordinals").noconvert(), nb::arg("columns"), nb::arg("out").noconvert(),
          "Reads as read(); of a ragged column out[k] has the elements of all records.")
      .def(
          "lengths",
          [](Features& features, const IdsIn& ordinals, int column, const IdsOut& out) {
            const auto store = features.get();
            const nb::gil_scoped_release unlocked;
            store->lengths(span_of(ordinals), column, span_of(out)).or_throw();
          },
          nb::arg("ordinals").noconvert(), nb::arg("column"), nb::arg("out").noconvert(),
          "Elements of a ragged column. Errors: ValueError.")
      .def("ordinals_of", &translated<&FeatureStore::ordinals_of>, nb::arg("ids").noconvert(),
           nb::arg("out").noconvert(), "Errors: NotFoundError.")
      .def("find", &translated<&FeatureStore::find>, nb::arg("ids").noconvert(),
           nb::arg("out").noconvert(),
           "Ordinals, −1 where there is none. Errors: CorruptError; OSError.")
      .def("ids_of", &translated<&FeatureStore::ids_of>, nb::arg("ordinals").noconvert(),
           nb::arg("out").noconvert(), "Errors: ValueError for an ordinal out of range.")
      .def(
          "column",
          [](Features& features, const std::string& name) {
            return features.get()->column(name).or_throw();
          },
          nb::arg("name"), "Index of a column. Errors: NotFoundError naming the columns there are.")
      .def_prop_ro(
          "rows", [](Features& features) { return features.get()->info().rows; },
          "Records in the store.")
      .def_prop_ro(
          "parts", [](Features& features) { return features.get()->info().parts; },
          "Parts that it reads.")
      .def_prop_ro(
          "columns",
          [](Features& features) { return columns_dict(features.get()->info().columns); },
          "Name → (dtype, shape of one record, or of one element).")
      .def_prop_ro(
          "ragged", [](Features& features) { return ragged_dict(features.get()->info().columns); },
          "Ragged column → the most elements of a record.")
      .def(
          "describe",
          [](Features& features, const std::string& directory) {
            return describe_features(directory, features.get()->info()).json;
          },
          nb::arg("directory"), "JSON, as describe() of the module; of the parts that it reads.")
      .def(
          "plan", [](Features& features) { return features.get()->plan(); },
          "How the slab is divided.")
      .def(
          "stats", [](Features& features) { return stats_dict(features.get()->stats()); },
          "Counters since open.");
}

void bind_feature_writer(nb::module_& m) {
  nb::class_<Writer>(m, "FeatureWriter", "Builds a FeatureStore; see plimsoll.FeatureWriter.")
      .def_static(
          "create",
          [](const Governor& governor, const std::string& directory,
             const std::vector<std::string>& names, const std::vector<std::string>& dtypes,
             const std::vector<std::vector<std::int64_t>>& shapes,
             const std::vector<std::int64_t>& lengths_max, bool grouped, bool allow_non_finite,
             const std::string& compression) {
            FeatureWriterOptions options;
            options.directory = directory;
            for (std::size_t k = 0; k < names.size(); ++k) {
              options.columns.push_back({names[k], parse_dtype(dtypes.at(k)).or_throw(),
                                         shapes.at(k), lengths_max.at(k)});
            }
            options.grouped = grouped;
            options.allow_non_finite = allow_non_finite;
            options.compression = parse_compression(compression).or_throw();
            const nb::gil_scoped_release unlocked;
            return std::make_unique<Writer>(FeatureWriter::create(governor, options).or_throw(),
                                            "FeatureWriter");
          },
          nb::arg("governor"), nb::arg("directory"), nb::arg("names"), nb::arg("dtypes"),
          nb::arg("shapes"), nb::arg("lengths_max"), nb::arg("grouped"),
          nb::arg("allow_non_finite"), nb::arg("compression"),
          "Errors: ValueError, BudgetExceeded, OSError.")
      .def_static(
          "extend",
          [](const Governor& governor, const std::string& directory, bool allow_non_finite) {
            const nb::gil_scoped_release unlocked;
            return std::make_unique<Writer>(
                FeatureWriter::extend(governor, {directory, allow_non_finite}).or_throw(),
                "FeatureWriter");
          },
          nb::arg("governor"), nb::arg("directory"), nb::arg("allow_non_finite"),
          "Errors: NotFoundError, CorruptError, ValueError, BudgetExceeded, OSError.")
      .def_prop_ro(
          "columns",
          [](Writer& writer) {
            return columns_dict(writer.use([](auto& one) { return one.options().columns; }));
          },
          "Name → (dtype, shape of one record, or of one element).")
      .def_prop_ro(
          "ragged",
          [](Writer& writer) {
            return ragged_dict(writer.use([](auto& one) { return one.options().columns; }));
          },
          "Ragged column → the most elements of a record.")
      .def_prop_ro(
          "grouped",
          [](Writer& writer) {
            return writer.use([](auto& one) { return one.options().grouped; });
          },
          "append() takes group ids.")
      .def(
          "append",
          [](Writer& writer, const IdsIn& ids, const std::vector<BytesIn>& columns,
             const IdsOrNone& groups, const std::vector<IdsIn>& lengths) {
            std::vector<std::span<const std::int64_t>> of_records;
            for (const IdsIn& array : lengths) {
              of_records.push_back(span_of(array));
            }
            std::vector<std::span<const std::byte>> spans;
            for (const BytesIn& array : columns) {
              spans.push_back(bytes_of(array));
            }
            std::span<const std::int64_t> group_ids;
            if (!groups.is_none()) {
              group_ids = span_of(nb::cast<IdsIn>(groups, false));
            }
            writer.use([&](FeatureWriter& one) {
              one.append(span_of(ids), spans, group_ids, of_records).or_throw();
            });
          },
          nb::arg("ids").noconvert(), nb::arg("columns").noconvert(), nb::arg("groups").none(),
          nb::arg("lengths").noconvert(),
          "Errors: ValueError naming record, id and column; OSError.")
      .def(
          "finish",
          [](Writer& writer) { writer.use([](FeatureWriter& one) { one.finish().or_throw(); }); },
          "Errors: ValueError for a duplicate id; OSError.")
      .def_prop_ro(
          "rows", [](Writer& writer) { return writer.use([](auto& one) { return one.rows(); }); },
          "Records appended so far.")
      .def("close", &Writer::close, "Without finish(): removes what was written.");
}

void bind_inspection(nb::module_& m) {
  m.def(
      "describe", [](const std::string& path) { return plimsoll::describe(path).or_throw().json; },
      nb::arg("path"), nb::call_guard<nb::gil_scoped_release>(),
      "Returns the content of a Plimsoll directory or file, as JSON. Errors: NotFoundError, "
      "CorruptError.");
  const auto proceed = [](std::int64_t, std::int64_t) { return true; };
  m.def(
      "embedding_verify",
      [proceed](const std::string& directory) {
        const nb::gil_scoped_release unlocked;
        EmbeddingStore::verify(directory, proceed).or_throw();
      },
      nb::arg("directory"),
      "Compares every checksum. Errors: CorruptError naming file and page; OSError.");
  m.def(
      "feature_verify",
      [proceed](const std::string& directory) {
        const nb::gil_scoped_release unlocked;
        FeatureStore::verify(directory, proceed).or_throw();
      },
      nb::arg("directory"),
      "Compares every checksum. Errors: CorruptError naming file and block; OSError.");
}

}  // namespace

std::shared_ptr<FeatureStore> Features::get() const {
  if (!store_) {
    throw Exception(
        make_error(ErrorCode::kInvalidArgument, "FeatureStore: it was closed", "open it again"));
  }
  return store_;
}

void bind_stores(nb::module_& m) {
  bind_table_options(m);
  bind_table(m);
  bind_feature_store(m);
  bind_feature_writer(m);
  bind_inspection(m);
}

}  // namespace plimsoll::python
