// SPDX-License-Identifier: Apache-2.0
//
// Loader: threads claim batch numbers in order, find their samples by arithmetic, read the features
// into ring slots; next() hands the slots out in order.
//
// Reading order: include/plimsoll/loader.h, loader_ring.h, this file.
//
// Threads: as the header says; names pl-loader-0, ….   Memory: the ring (loader_ring.h).
#include "plimsoll/loader.h"

#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <exception>
#include <thread>
#include <utility>

#include <fmt/core.h>

#include "base/check.h"
#include "data/loader_ring.h"
#include "data/loader_sweep.h"
#include "os/background_thread.h"
#include "os/fork.h"
#include "plimsoll/bytes.h"
#include "plimsoll/sample_order.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kSlotsDefault = 4;
constexpr std::int64_t kSlotsMax = 256;
constexpr int kThreadsMax = 64;

// Which samples make up batch n, counted from a state.
struct Schedule {
  std::int64_t train_rows{0};
  std::int64_t batch_rows{0};
  bool drop_last{false};

  struct Place {
    std::int64_t epoch{0};
    std::int64_t position{0};
    std::int64_t rows{0};
    bool ends_epoch{false};
  };

  [[nodiscard]] std::int64_t batches(std::int64_t samples) const noexcept {
    return drop_last ? samples / batch_rows : (samples + batch_rows - 1) / batch_rows;
  }

  [[nodiscard]] Place place(const LoaderState& origin, std::int64_t number) const noexcept {
    Place place{.epoch = origin.epoch, .position = origin.position};
    const std::int64_t in_first = batches(train_rows - origin.position);
    if (number >= in_first) {
      const std::int64_t per_epoch = batches(train_rows);
      number -= in_first;
      place.epoch += 1 + number / per_epoch;
      place.position = 0;
      number %= per_epoch;
    }
    place.position += number * batch_rows;
    const std::int64_t left = train_rows - place.position;
    place.rows = std::min(batch_rows, left);
    place.ends_epoch = batches(left - place.rows) == 0;
    return place;
  }

  [[nodiscard]] LoaderState after(const Place& at, std::uint64_t seed) const noexcept {
    return at.ends_epoch ? LoaderState{seed, at.epoch + 1, 0}
                         : LoaderState{seed, at.epoch, at.position + at.rows};
  }
};

Error of_exception(const std::exception& thrown) {
  return make_error(ErrorCode::kInternal, fmt::format("a loader thread failed: {}", thrown.what()));
}

Result<std::vector<int>> find_columns(const FeatureStore& store,
                                      const std::vector<std::string>& names) {
  std::vector<int> columns;
  if (names.empty()) {
    for (std::size_t k = 0; k < store.info().columns.size(); ++k) {
      columns.push_back(static_cast<int>(k));
    }
  }
  for (const std::string& name : names) {
    PLIMSOLL_TRY(const int column, store.column(name));
    columns.push_back(column);
  }
  for (const int column : columns) {
    const ColumnSpec& spec = store.info().columns[static_cast<std::size_t>(column)];
    if (spec.ragged()) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("column \"{}\" is ragged; a loader's batches have columns of fixed "
                              "shape",
                              spec.name),
                  "name the other columns, and read this one with FeatureStore.read(batch.ids)");
    }
  }
  if (columns.size() > 64) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{} columns were asked for, at most 64 can be", columns.size()));
  }
  return columns;
}

// Checks the options and sizes the ring.
Result<BatchRingPlan> plan_ring(const FeatureStore& store, const std::vector<int>& columns,
                                const LoaderOptions& options) {
  BatchRingPlan plan;
  plan.batch_rows = options.batch_rows;
  for (const int column : columns) {
    plan.column_row_bytes.push_back(store.info().columns[static_cast<std::size_t>(column)].bytes());
  }
  const std::int64_t slot = plan.slot_bytes();
  plan.slots = kSlotsDefault;
  if (options.queue_bytes > 0) {
    plan.slots = std::min(kSlotsMax, options.queue_bytes / slot);
  }
  if (plan.slots < 2) {
    Error error =
        make_error(ErrorCode::kOverBudget,
                   fmt::format("queue_bytes = {} is below the {} that two batches of {} rows need",
                               options.queue_bytes, 2 * slot, options.batch_rows),
                   "raise queue_bytes, or lower the batch size");
    error.tag = Tag::kLoader;
    error.requested_bytes = 2 * slot;
    error.available_bytes = options.queue_bytes;
    error.limit_bytes = options.queue_bytes;
    return tl::unexpected(std::move(error));
  }
  return plan;
}

Result<void> check_options(const Split& split, const LoaderOptions& options) {
  if (options.batch_rows < 1 || options.batch_rows > (std::int64_t{1} << 31) ||
      options.threads < 1 || options.threads > kThreadsMax || options.queue_bytes < 0) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("batch_rows = {} and threads = {} (at most {}) must be positive, "
                            "queue_bytes = {} not negative",
                            options.batch_rows, options.threads, kThreadsMax, options.queue_bytes));
  }
  if (options.sweep_batches < 1 || options.sweep_batches > BatchSweep::kBatchesMax) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("sweep_batches = {} must be 1 to {}", options.sweep_batches,
                            BatchSweep::kBatchesMax));
  }
  const std::int64_t rows = split.train_rows();
  if (rows < (options.drop_last ? options.batch_rows : 1)) {
    return fail(
        ErrorCode::kInvalidArgument,
        fmt::format("{} training samples do not make one batch of {}", rows, options.batch_rows),
        "hold out fewer groups, or lower the batch size");
  }
  return {};
}

Result<void> check_state(const LoaderState& state, std::int64_t train_rows) {
  if (state.epoch < 0 || state.position < 0 || state.position > train_rows) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("a loader cannot start at epoch {}, position {}: an epoch has {} "
                            "samples",
                            state.epoch, state.position, train_rows));
  }
  return {};
}

}  // namespace

class Loader::Impl : public Reclaimer {
 public:
  Impl(FeatureStore* store, const Split* split, const LoaderOptions& options,
       std::vector<int> columns, std::shared_ptr<BatchRing> ring)
      : store_(store),
        split_(split),
        columns_(std::move(columns)),
        schedule_{split->train_rows(), options.batch_rows, options.drop_last},
        ring_(std::move(ring)) {}
  [[nodiscard]] const ForkMark& mark() const noexcept { return mark_; }
  ~Impl() override {
    reclaimer_ = {};
    ring_->stop();
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Result<void> start(Governor& governor, const LoaderOptions& options) {
    ring_->restart(options.start);
    if (options.sweep_batches > 1) {
      PLIMSOLL_TRY(
          sweep_, BatchSweep::create(governor, store_, options.sweep_batches, options.batch_rows,
                                     [this](auto&&... batch) { return batch_ordinals(batch...); }));
    }
    PLIMSOLL_TRY(reclaimer_, governor.add_reclaimer(this));
    // Signals belong to the program's own threads; these inherit a full mask.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 0; i < options.threads; ++i) {
      threads_.emplace_back([this, i] { work(i); });
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return {};
  }

  Result<void> upcoming_ids(std::vector<std::int64_t>& ids) {
    BatchRing::Claim next;
    if (ring_->peek_ids(ids, next)) {
      return {};
    }
    const Schedule::Place place = schedule_.place(next.origin, next.number);
    const auto ordinals = ring_->scratch().first(static_cast<std::size_t>(place.rows));
    find_ordinals(next.origin.seed, place, ordinals);
    ids.resize(ordinals.size());
    return store_->ids_of(ordinals, ids);
  }

  [[nodiscard]] BatchRing& ring() noexcept { return *ring_; }
  [[nodiscard]] const Schedule& schedule() const noexcept { return schedule_; }

  std::int64_t reclaim(PressureMove move, std::int64_t wanted_bytes) noexcept override {
    return move == PressureMove::kShrink ? ring_->shrink(wanted_bytes) : 0;
  }
  std::int64_t grow_back(std::int64_t room_bytes) noexcept override {
    return ring_->grow_back(room_bytes);
  }
  [[nodiscard]] const char* name() const noexcept override { return "loader"; }

 private:
  void work(int index) {
    enter_background(fmt::format("pl-loader-{}", index));
    for (;;) {
      const BatchRing::Claim claim = ring_->claim();
      if (claim.slot == nullptr) {
        return;
      }
      try {
        if (sweep_) {
          sweep_->before(claim);
        }
        if (auto done = fill(claim); !done) {
          claim.slot->error = std::move(done).error();
        }
      } catch (const std::exception& thrown) {  // Thread entry: nothing may leave it.
        claim.slot->error = of_exception(thrown);
      }
      ring_->filled(claim.slot);
    }
  }

  void find_ordinals(std::uint64_t seed, const Schedule::Place& place,
                     std::span<std::int64_t> ordinals) const noexcept {
    const SampleOrder order(schedule_.train_rows, seed, place.epoch);
    for (std::size_t i = 0; i < ordinals.size(); ++i) {
      const std::int64_t rank = order.at(place.position + static_cast<std::int64_t>(i));
      ordinals[i] = split_->train_ordinal(rank);
    }
  }

  // Ordinals of batch `number`, counted from `origin`.
  std::int64_t batch_ordinals(const LoaderState& origin, std::int64_t number,
                              std::span<std::int64_t> ordinals) const noexcept {
    const Schedule::Place place = schedule_.place(origin, number);
    find_ordinals(origin.seed, place, ordinals.first(static_cast<std::size_t>(place.rows)));
    return place.rows;
  }

  Result<void> fill(const BatchRing::Claim& claim) {
    BatchSlot& slot = *claim.slot;
    const Schedule::Place place = schedule_.place(claim.origin, claim.number);
    slot.rows = place.rows;
    slot.epoch = place.epoch;
    slot.position = place.position;
    slot.ends_epoch = place.ends_epoch;
    slot.after = schedule_.after(place, claim.origin.seed);
    const auto rows = static_cast<std::size_t>(place.rows);
    const auto ordinals = slot.ordinals.first(rows);
    find_ordinals(claim.origin.seed, place, ordinals);
    for (std::size_t i = 0; i < rows; ++i) {
      slot.groups[i] = split_->group_of(ordinals[i]);
    }
    PLIMSOLL_TRY_VOID(store_->ids_of(ordinals, slot.ids.first(rows)));
    std::array<std::span<std::byte>, 64> out;
    for (std::size_t k = 0; k < columns_.size(); ++k) {
      out[k] = slot.columns[k].first(rows * static_cast<std::size_t>(slot.column_row_bytes[k]));
    }
    return store_->read_ordinals(ordinals, columns_, std::span(out).first(columns_.size()));
  }

  const ForkMark mark_;
  FeatureStore* store_;
  const Split* split_;
  std::vector<int> columns_;
  Schedule schedule_;
  std::shared_ptr<BatchRing> ring_;    // Shared: batches may outlive the loader.
  std::unique_ptr<BatchSweep> sweep_;  // Null: every batch is read for itself.
  ReclaimerHandle reclaimer_;
  std::vector<std::jthread> threads_;  // Last: joined before the rest is destroyed.
};

// ---- Batch ----

Batch::Batch() noexcept = default;
Batch::Batch(Batch&&) noexcept = default;
Batch& Batch::operator=(Batch&&) noexcept = default;
Batch::~Batch() = default;

bool Batch::valid() const noexcept {
  return slot_ != nullptr;
}
std::int64_t Batch::rows() const noexcept {
  return slot_ ? slot_->rows : 0;
}
std::int64_t Batch::epoch() const noexcept {
  return slot_ ? slot_->epoch : 0;
}
std::int64_t Batch::position() const noexcept {
  return slot_ ? slot_->position : 0;
}
bool Batch::ends_epoch() const noexcept {
  return slot_ && slot_->ends_epoch;
}
LoaderState Batch::state_after() const noexcept {
  return slot_ ? slot_->after : LoaderState{};
}

std::span<const std::int64_t> Batch::ids() const noexcept {
  return slot_ ? slot_->ids.first(static_cast<std::size_t>(slot_->rows))
               : std::span<std::int64_t>{};
}

std::span<const std::int64_t> Batch::groups() const noexcept {
  return slot_ ? slot_->groups.first(static_cast<std::size_t>(slot_->rows))
               : std::span<std::int64_t>{};
}

std::span<std::byte> Batch::column(int k) const noexcept {
  if (!slot_ || k < 0 || static_cast<std::size_t>(k) >= slot_->columns.size()) {
    return {};
  }
  const auto index = static_cast<std::size_t>(k);
  return slot_->columns[index].first(
      static_cast<std::size_t>(slot_->rows * slot_->column_row_bytes[index]));
}

// ---- Loader ----

Loader::Loader(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
Loader::Loader(Loader&&) noexcept = default;
Loader& Loader::operator=(Loader&& other) noexcept {
  std::swap(impl_, other.impl_);
  other.close();
  return *this;
}
Loader::~Loader() {
  close();
}
void Loader::close() noexcept {
  if (impl_ != nullptr) {
    destroy_if_own(impl_, impl_->mark());
  }
}

Result<Loader> Loader::open(Governor governor, FeatureStore* store, const Split* split,
                            const LoaderOptions& options) {
  PLIMSOLL_TRY_VOID(check_options(*split, options));
  PLIMSOLL_TRY_VOID(check_state(options.start, split->train_rows()));
  PLIMSOLL_TRY(std::vector<int> columns, find_columns(*store, options.columns));
  PLIMSOLL_TRY(const BatchRingPlan plan, plan_ring(*store, columns, options));
  PLIMSOLL_TRY(auto ring, BatchRing::create(governor, plan));
  auto impl = std::make_unique<Impl>(store, split, options, std::move(columns), std::move(ring));
  PLIMSOLL_TRY_VOID(impl->start(governor, options));
  return Loader(std::move(impl));
}

Result<void> Loader::next(Batch& batch) {
  PLIMSOLL_TRY_VOID(impl_->mark().check("loader", "next"));
  batch.slot_.reset();
  PLIMSOLL_TRY(batch.slot_, impl_->ring().take());
  return {};
}

Result<void> Loader::upcoming_ids(std::vector<std::int64_t>& ids) {
  PLIMSOLL_TRY_VOID(impl_->mark().check("loader", "upcoming_ids"));
  return impl_->upcoming_ids(ids);
}

Result<void> Loader::seek(const LoaderState& state) {
  PLIMSOLL_TRY_VOID(impl_->mark().check("loader", "seek"));
  PLIMSOLL_TRY_VOID(check_state(state, impl_->schedule().train_rows));
  impl_->ring().restart(state);
  return {};
}

std::int64_t Loader::batches_per_epoch() const noexcept {
  return impl_->schedule().batches(impl_->schedule().train_rows);
}
std::int64_t Loader::slot_bytes() const noexcept {
  return impl_->ring().slot_bytes();
}
std::int64_t Loader::slots() const noexcept {
  return impl_->mark().forked() ? 0 : impl_->ring().slots_in_use();
}
std::int64_t Loader::stall_ns() const noexcept {
  return impl_->mark().forked() ? 0 : impl_->ring().stall_ns();
}
std::int64_t Loader::shrink(std::int64_t wanted_bytes) noexcept {
  return impl_->mark().forked() ? 0 : impl_->ring().shrink(wanted_bytes);
}
std::int64_t Loader::grow_back(std::int64_t wanted_bytes) noexcept {
  return impl_->mark().forked() ? 0 : impl_->ring().grow_back(wanted_bytes);
}

}  // namespace plimsoll
