// SPDX-License-Identifier: Apache-2.0
//
// plimsoll._core: SampleOrder, Split and Loader. Batches are copied into arrays the caller brings,
// so that a batch kept in Python never holds a slot of the ring.
//
// Reading order: bindings.h, plimsoll/loader.h, this file.
//
// Threads: a Loader's calls queue (Guarded); Split and SampleOrder are immutable.
// Memory:  one Batch per Loader, between next() and copy().
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "core_stores.h"
#include "plimsoll/loader.h"
#include "plimsoll/sample_order.h"

namespace plimsoll::python {
namespace {

[[noreturn]] void out_of_range(const char* what, std::int64_t value, std::int64_t bound) {
  throw Exception(make_error(ErrorCode::kInvalidArgument,
                             std::string(what) + " " + std::to_string(value) + " is outside [0, " +
                                 std::to_string(bound) + ")"));
}

void check_range(const char* what, std::int64_t value, std::int64_t bound) {
  if (value < 0 || value >= bound) {
    out_of_range(what, value, bound);
  }
}

// out[i] = f(in[i]) after checking every value against [0, bound).
template <class F>
void map_checked(const char* what, const IdsIn& in, const IdsOut& out, std::int64_t bound, F f) {
  if (in.size() != out.size()) {
    throw Exception(make_error(ErrorCode::kInvalidArgument, "in and out differ in length"));
  }
  const auto from = span_of(in);
  const auto to = span_of(out);
  const nb::gil_scoped_release unlocked;
  std::transform(from.begin(), from.end(), to.begin(), [&](std::int64_t value) {
    check_range(what, value, bound);
    return f(value);
  });
}

// A split keeps the store it was made from alive.
struct SharedSplit {
  std::shared_ptr<FeatureStore> store;
  Split split;
};

// Members are destroyed from the last to the first: the loader's threads before what they read.
struct SharedLoader {
  std::shared_ptr<FeatureStore> store;
  std::shared_ptr<const SharedSplit> split;
  Loader loader;
  Batch batch{};  // The one between next() and release(); its slot is back in the ring after.
};

using PySplit = std::shared_ptr<const SharedSplit>;
using PyLoader = Guarded<SharedLoader>;

class SplitHandle {
 public:
  explicit SplitHandle(PySplit shared) : shared_(std::move(shared)) {}
  /// The split. Errors: kInvalidArgument after close().
  [[nodiscard]] const PySplit& get() const {
    if (!shared_) {
      throw Exception(
          make_error(ErrorCode::kInvalidArgument, "Split: it was closed", "make it again"));
    }
    return shared_;
  }
  void close() { shared_.reset(); }

 private:
  PySplit shared_;
};

nb::tuple state_tuple(const LoaderState& state) {
  return nb::make_tuple(state.seed, state.epoch, state.position);
}

void bind_order(nb::module_& m) {
  nb::class_<SampleOrder>(m, "SampleOrder", "A keyed permutation; see plimsoll.SampleOrder.")
      .def(
          "__init__",
          [](SampleOrder* self, std::int64_t samples, std::uint64_t seed, std::int64_t epoch) {
            if (samples < 0) {
              throw Exception(
                  make_error(ErrorCode::kInvalidArgument,
                             "samples is " + std::to_string(samples) + "; it cannot be negative"));
            }
            new (self) SampleOrder(samples, seed, epoch);
          },
          nb::arg("samples"), nb::arg("seed"), nb::arg("epoch"))
      .def(
          "at",
          [](const SampleOrder& order, const IdsIn& positions, const IdsOut& out) {
            map_checked("position", positions, out, order.samples(),
                        [&](std::int64_t p) { return order.at(p); });
          },
          nb::arg("positions").noconvert(), nb::arg("out").noconvert(),
          "Errors: ValueError for a position out of range.")
      .def(
          "position_of",
          [](const SampleOrder& order, const IdsIn& samples, const IdsOut& out) {
            map_checked("sample", samples, out, order.samples(),
                        [&](std::int64_t s) { return order.position_of(s); });
          },
          nb::arg("samples").noconvert(), nb::arg("out").noconvert(),
          "Errors: ValueError for a sample out of range.")
      .def_prop_ro("samples", &SampleOrder::samples, "How many there are.");
}

void bind_split(nb::module_& m) {
  nb::class_<SplitHandle>(m, "Split", "Which records train; see plimsoll.Split.")
      .def_static(
          "create",
          [](const Governor& governor, const Features& features, std::int64_t held_out_groups,
             std::uint64_t seed) {
            auto store = features.get();
            const nb::gil_scoped_release unlocked;
            auto split = Split::create(governor, store.get(), {held_out_groups, seed}).or_throw();
            return SplitHandle(
                std::make_shared<SharedSplit>(SharedSplit{std::move(store), std::move(split)}));
          },
          nb::arg("governor"), nb::arg("store"), nb::arg("held_out_groups"), nb::arg("seed"),
          "Errors: ValueError, BudgetExceeded.")
      .def("close", &SplitHandle::close, "Returns what it leases.")
      .def_prop_ro(
          "train_rows", [](const SplitHandle& s) { return s.get()->split.train_rows(); },
          "Records that train.")
      .def_prop_ro(
          "held_out_rows", [](const SplitHandle& s) { return s.get()->split.held_out_rows(); },
          "Records held out.")
      .def_prop_ro(
          "held_out_groups", [](const SplitHandle& s) { return s.get()->split.held_out_groups(); },
          "Groups held out.")
      .def(
          "train_ordinals",
          [](const SplitHandle& s, const IdsIn& ranks, const IdsOut& out) {
            const Split& split = s.get()->split;
            map_checked("rank", ranks, out, split.train_rows(),
                        [&](std::int64_t r) { return split.train_ordinal(r); });
          },
          nb::arg("ranks").noconvert(), nb::arg("out").noconvert(),
          "Errors: ValueError for a rank out of range.")
      .def(
          "held_out_ordinals",
          [](const SplitHandle& s, const IdsIn& ranks, const IdsOut& out) {
            const Split& split = s.get()->split;
            map_checked("rank", ranks, out, split.held_out_rows(),
                        [&](std::int64_t r) { return split.held_out_ordinal(r); });
          },
          nb::arg("ranks").noconvert(), nb::arg("out").noconvert(),
          "Errors: ValueError for a rank out of range.")
      .def(
          "groups_of",
          [](const SplitHandle& s, const IdsIn& ordinals, const IdsOut& out) {
            const Split& split = s.get()->split;
            map_checked("ordinal", ordinals, out, split.train_rows() + split.held_out_rows(),
                        [&](std::int64_t o) { return split.group_of(o); });
          },
          nb::arg("ordinals").noconvert(), nb::arg("out").noconvert(),
          "Errors: ValueError for an ordinal out of range.");
}

std::unique_ptr<PyLoader> open_loader(const Governor& governor, const Features& features,
                                      const SplitHandle& split,
                                      const std::vector<std::string>& columns,
                                      std::int64_t batch_rows, std::int64_t queue_bytes,
                                      int threads, bool drop_last, std::int64_t sweep_batches,
                                      std::uint64_t seed, std::int64_t epoch,
                                      std::int64_t position) {
  auto store = features.get();
  auto shared = split.get();
  const nb::gil_scoped_release unlocked;
  LoaderOptions options;
  options.columns = columns;
  options.batch_rows = batch_rows;
  options.queue_bytes = queue_bytes;
  options.threads = threads;
  options.drop_last = drop_last;
  options.sweep_batches = sweep_batches;
  options.start = {seed, epoch, position};
  auto loader = Loader::open(governor, store.get(), &shared->split, options).or_throw();
  return std::make_unique<PyLoader>(
      SharedLoader{std::move(store), std::move(shared), std::move(loader), {}}, "Loader");
}

// The description of the batch just taken; its columns follow through copy().
DictOf<nb::any> next_batch(PyLoader& loader) {
  const auto [rows, epoch, position, ends, after] = loader.use([](SharedLoader& self) {
    self.batch = Batch();  // First, so that its slot can be filled again.
    self.loader.next(self.batch).or_throw();
    return std::tuple(self.batch.rows(), self.batch.epoch(), self.batch.position(),
                      self.batch.ends_epoch(), self.batch.state_after());
  });
  nb::dict out;
  out["rows"] = rows;
  out["epoch"] = epoch;
  out["position"] = position;
  out["ends_epoch"] = ends;
  out["state_after"] = state_tuple(after);
  return out;
}

void copy_exact(std::span<const std::byte> from, std::span<std::byte> to) {
  if (from.size() != to.size()) {
    throw Exception(make_error(ErrorCode::kInternal, "batch of " + std::to_string(from.size()) +
                                                         " bytes copied into " +
                                                         std::to_string(to.size())));
  }
  std::copy(from.begin(), from.end(), to.begin());
}

void copy_batch(PyLoader& loader, const IdsOut& ids, const IdsOut& groups,
                const std::vector<BytesOut>& columns) {
  std::vector<std::span<std::byte>> spans;
  for (const BytesOut& array : columns) {
    spans.push_back(bytes_of(array));
  }
  loader.use([&](SharedLoader& self) {
    if (!self.batch.valid()) {
      throw Exception(make_error(ErrorCode::kInvalidArgument, "no batch: call next() first"));
    }
    copy_exact(std::as_bytes(self.batch.ids()), std::as_writable_bytes(span_of(ids)));
    copy_exact(std::as_bytes(self.batch.groups()), std::as_writable_bytes(span_of(groups)));
    for (std::size_t k = 0; k < spans.size(); ++k) {
      copy_exact(self.batch.column(static_cast<int>(k)), spans[k]);
    }
    self.batch = Batch();
  });
}

void bind_loader(nb::module_& m) {
  nb::class_<PyLoader>(m, "Loader", "Batches in a seeded order; see plimsoll.Loader.")
      .def_static("open", &open_loader, nb::arg("governor"), nb::arg("store"), nb::arg("split"),
                  nb::arg("columns"), nb::arg("batch_rows"), nb::arg("queue_bytes"),
                  nb::arg("threads"), nb::arg("drop_last"), nb::arg("sweep_batches"),
                  nb::arg("seed"), nb::arg("epoch"), nb::arg("position"),
                  "Errors: ValueError, NotFoundError, BudgetExceeded.")
      .def("next", &next_batch,
           "Takes a batch and describes it: rows, epoch, position, ends_epoch, state_after.")
      .def("copy", &copy_batch, nb::arg("ids").noconvert(), nb::arg("groups").noconvert(),
           nb::arg("columns").noconvert(), "Copies the batch taken last and gives its slot back.")
      .def(
          "upcoming_ids",
          [](PyLoader& loader) {
            return loader.use([](SharedLoader& self) {
              std::vector<std::int64_t> ids;
              self.loader.upcoming_ids(ids).or_throw();
              return ids;
            });
          },
          "Ids of the batch after the one handed out last.")
      .def(
          "seek",
          [](PyLoader& loader, std::uint64_t seed, std::int64_t epoch, std::int64_t position) {
            loader.use([&](SharedLoader& self) {
              self.batch = Batch();
              self.loader.seek({seed, epoch, position}).or_throw();
            });
          },
          nb::arg("seed"), nb::arg("epoch"), nb::arg("position"),
          "Errors: ValueError for a position outside the epoch.")
      .def_prop_ro(
          "batches_per_epoch",
          [](PyLoader& loader) {
            return loader.use([](auto& self) { return self.loader.batches_per_epoch(); });
          },
          "Batches in one epoch.")
      .def_prop_ro(
          "slot_bytes",
          [](PyLoader& loader) {
            return loader.use([](auto& self) { return self.loader.slot_bytes(); });
          },
          "Bytes of one batch in the ring.")
      .def_prop_ro(
          "slots",
          [](PyLoader& loader) {
            return loader.use([](auto& self) { return self.loader.slots(); });
          },
          "Batches that fit the ring.")
      .def_prop_ro(
          "stall_ns",
          [](PyLoader& loader) {
            return loader.use([](auto& self) { return self.loader.stall_ns(); });
          },
          "Time next() waited.")
      .def("close", &PyLoader::close, "Ends the threads and returns the ring.");
}

}  // namespace

void bind_data(nb::module_& m) {
  bind_order(m);
  bind_split(m);
  bind_loader(m);
}

}  // namespace plimsoll::python
