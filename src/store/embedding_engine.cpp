// SPDX-License-Identifier: Apache-2.0
//
// What both layouts do alike: opening, finding ids, changing rows, committing; and what they
// refuse, in the same words.
//
// Threads: see embedding_store.h.   Memory: the scratch in embedding_engine.h.
#include "store/embedding_engine.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include <fmt/format.h>

#include "base/check.h"
#include "os/crash_point.h"
#include "store/row_ahead.h"
#include "store/row_optimizer.h"

namespace plimsoll {

EmbeddingStore::Engine::Engine(const EmbeddingStoreOptions& options, const TableDescription& table,
                               const SlabPlan& plan, int io_threads)
    : directory_(options.directory),
      table_(table),
      shape_(table.shape()),
      plan_(plan),
      pinned_(options.pinned),
      pool_(io_threads),
      crew_(options.compute_threads),
      batch_rows_(options.batch_rows) {}

// ---- Opening ----------------------------------------------------------------------------------

Result<void> EmbeddingStore::Engine::take_slab(const Governor& governor) {
  if (!pinned_) {  // Who only reads makes nothing.
    PLIMSOLL_TRY_VOID(
        governor.check_disk_limit("the table " + directory_.string(), plan_.disk_cap_bytes));
  }
  PLIMSOLL_TRY_VOID(admission_.take(governor, Tag::kEmbedding, plan_.total_bytes, "store_bytes"));
  PLIMSOLL_TRY(slab_, Slab::create(governor, Tag::kEmbedding, plan_.total_bytes, true));
  return {};
}

void EmbeddingStore::Engine::take_scratch() {
  found_.ordinals = slab_.take<std::uint32_t>(batch_rows_);
  found_.ids = slab_.take<std::int64_t>(FoundRows::ids_of(table_, batch_rows_));
  keys_ = slab_.take<std::uint64_t>(batch_rows_);
  next_ = slab_.take<std::uint32_t>(batch_rows_);
  sums_ = slab_.take<float>(crew_.threads() * shape_.dim);
  wide_ = slab_.take<float>(crew_.threads() * shape_.scratch_floats());
  corrections_ = slab_.take<AdamCorrection>(RowOptimizerStep::kCorrections);
}

Result<void> EmbeddingStore::Engine::open_files(const EmbeddingStoreOptions& options,
                                                std::int64_t id_pages) {
  PLIMSOLL_TRY(ids_,
               IdIndex::open(directory_, table_files::kIds, table_.ids, slab_, id_pages, pool_));
  const FileMode mode = pinned_ ? FileMode::kRead : FileMode::kReadWrite;
  PLIMSOLL_TRY(rows_file_, File::open(directory_ / table_files::kRows, mode, true));
  PLIMSOLL_TRY(map_files_, open_maps(directory_, !pinned_));
  PLIMSOLL_TRY(super_, SuperFile::open(directory_ / table_files::kSuper, !pinned_));
  optimizer_ = RecordStep(shape_, table_.init, options.optimizer, corrections_);
  return {};
}

Result<int> EmbeddingStore::Engine::choose_commit(std::int64_t pages, std::int64_t at_step) const {
  int chosen = -1;
  std::string steps;
  for (int slot = 0; slot < 2; ++slot) {
    const auto& [state, root] = super_.slots()[static_cast<std::size_t>(slot)];
    const bool ours =
        root.fingerprint == table_.fingerprint() && (pages == kAnyPages || root.pages == pages);
    if ((state == SuperFile::SlotState::kDamaged && at_step < 0) ||
        (state == SuperFile::SlotState::kValid && !ours)) {
      return fail(ErrorCode::kCorrupt,
                  fmt::format("{}: slot {} {}", super_.path().string(), slot,
                              ours ? "fails its checksum" : "is of another table"),
                  "name the step to open (at_step), or restore the file");
    }
    if (state != SuperFile::SlotState::kValid) {
      continue;
    }
    steps += fmt::format("{}{}", steps.empty() ? "" : " and ", root.step);
    const auto best = chosen < 0 ? -1 : superblock(chosen).step;
    if (at_step < 0 ? root.step > best : root.step == at_step) {
      chosen = slot;
    }
  }
  if (at_step >= 0 && chosen < 0) {
    return fail(ErrorCode::kNotFound,
                fmt::format("{}: no commit at step {}; there {}", directory_.string(), at_step,
                            steps.empty() ? "is none at all" : "is one at " + steps));
  }
  return chosen;
}

void EmbeddingStore::Engine::opened(int slot) noexcept {
  slot_ = slot;
  last_commit_ = superblock(slot).step;
}

bool EmbeddingStore::Engine::holds_commit(int slot) const noexcept {
  return super_.slots()[static_cast<std::size_t>(slot)].state == SuperFile::SlotState::kValid;
}

tl::unexpected<Error> EmbeddingStore::Engine::bad_map(int slot, const std::string& why) const {
  const Superblock& root = superblock(slot);
  return fail(ErrorCode::kCorrupt,
              fmt::format("{}: the map of commit {} {}",
                          table_files::map_path(directory_, root.map).string(), root.step, why),
              "name another step to open (at_step), or restore the file");
}

// ---- Ids --------------------------------------------------------------------------------------

Result<void> EmbeddingStore::Engine::resolve(std::span<const std::int64_t> ids) {
  const auto no_row = [this](std::int64_t id) {
    return fail(ErrorCode::kNotFound,
                fmt::format("{}: there is no row with id {}", directory_.string(), id));
  };
  if (!growing_ && ids_.dense()) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (static_cast<std::uint64_t>(ids[i]) >= static_cast<std::uint64_t>(shape_.rows)) {
        return no_row(ids[i]);
      }
      found_.ordinals[i] = static_cast<std::uint32_t>(ids[i]);
    }
    return {};
  }
  if (std::ranges::equal(ids, found_.ids.first(found_.known))) {
    return {};
  }
  found_.forget();
  const auto places = found_.ids.first(ids.size());
  PLIMSOLL_TRY_VOID(growing_ ? growing_->find(ids, places) : ids_.find(ids, places));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (places[i] < 0) {
      return no_row(ids[i]);
    }
    found_.ordinals[i] = static_cast<std::uint32_t>(places[i]);
  }
  std::ranges::copy(ids, places.begin());
  found_.known = ids.size();
  return {};
}

Result<void> EmbeddingStore::Engine::resolve_ahead(std::span<const std::int64_t> ids) {
  const std::size_t most = batch_rows();
  for (std::size_t at = 0; ids.size() > most && at < ids.size(); at += most) {
    PLIMSOLL_TRY_VOID(resolve(ids.subspan(at, std::min(most, ids.size() - at))));
  }
  return {};
}

Result<std::int64_t> EmbeddingStore::Engine::insert(std::span<const std::int64_t> ids) {
  PLIMSOLL_TRY_VOID(check_growing("insert()"));
  found_.forget();
  PLIMSOLL_TRY(const std::int64_t added, growing_->add(ids, found_.ids));
  if (added < 0) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: no place for all of the new ids: rows_max is {}, {} rows are there"
                            ", and {} erased ones keep their places until the table is compacted",
                            directory_.string(), table_.rows_max, rows(), growing_->erased()),
                "nothing was inserted: erase rows, or compact the table with a larger rows_max; "
                "in sample order, make one with a larger rows_max");
  }
  bool changed = false;
  if (auto done = write_new_rows(added, changed); !done) {
    if (changed) {
      poison(done.error());  // Half a request: nobody may see or keep it.
    } else {
      growing_->undo();
    }
    return tl::unexpected(std::move(done).error());
  }
  growing_->settle();
  return added;
}

// ---- Rows that change -------------------------------------------------------------------------

// Sets the first floats of a row, and zeroes those behind them.
class EmbeddingStore::Engine::SetRows final : public Change {
 public:
  /// `sequences`: one per row; empty means 0 for all. `width`: floats per row of `rows`.
  SetRows(const Engine& table, std::span<const float> rows,
          std::span<const std::uint32_t> sequences, std::int64_t width)
      : table_(table), rows_(rows), sequences_(sequences), width_(width) {}
  void row(std::uint64_t key, std::byte* record, int) const noexcept override {
    std::uint32_t last = place_of(key);
    for (std::uint32_t next = last; next != kNone; next = table_.next_[next]) {
      last = next;
    }
    write_values(table_.shape_, sequences_.empty() ? 0 : sequences_[last],
                 rows_.data() + last * width_, width_, record);
  }

 private:
  const Engine& table_;
  std::span<const float> rows_;
  std::span<const std::uint32_t> sequences_;
  std::int64_t width_;
};

class EmbeddingStore::Engine::OptimizerStep final : public Change {
 public:
  OptimizerStep(const Engine& table, std::span<const float> grads, double rate_scale)
      : table_(table), grads_(grads), rate_scale_(rate_scale) {}
  void row(std::uint64_t key, std::byte* record, int member) const noexcept override {
    table_.optimizer_.step(record, table_.request_ids_[place_of(key)],
                           table_.gradient_of(place_of(key), grads_, member), rate_scale_,
                           table_.wide_.data() + member * table_.shape_.scratch_floats());
  }

 private:
  const Engine& table_;
  std::span<const float> grads_;
  double rate_scale_;
};

Result<void> EmbeddingStore::Engine::gather(std::span<const std::int64_t> ids,
                                            std::span<float> out) {
  PLIMSOLL_TRY_VOID(check_rows("out", ids.size(), out.size()));
  PLIMSOLL_TRY_VOID(begin_request(ids, true));
  while (!ids.empty()) {
    const std::size_t count = std::min(ids.size(), batch_rows());
    const std::size_t floats = count * static_cast<std::size_t>(shape_.dim);
    PLIMSOLL_TRY_VOID(resolve(ids.first(count)));
    PLIMSOLL_TRY_VOID(gather_piece(ids.first(count), out.first(floats)));
    ids = ids.subspan(count);
    out = out.subspan(floats);
  }
  return {};
}

Result<void> EmbeddingStore::Engine::update(std::span<const std::int64_t> ids,
                                            std::span<const float> rows) {
  PLIMSOLL_TRY_VOID(check_rows("rows", ids.size(), rows.size()));
  return set_rows(ids, {}, rows, shape_.dim);
}

Result<void> EmbeddingStore::Engine::restore(std::span<const std::int64_t> ids,
                                             std::span<const std::uint32_t> sequences,
                                             std::span<const float> values) {
  const auto each = static_cast<std::size_t>(shape_.floats());
  if (sequences.size() != ids.size() || values.size() != ids.size() * each) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("restore() of {} ids with {} sequences and {} floats; a record has {}",
                            ids.size(), sequences.size(), values.size(), each));
  }
  return set_rows(ids, sequences, values, shape_.floats());
}

// Sets the first `width` floats of each record and zeroes those behind them; no sequences: all 0.
Result<void> EmbeddingStore::Engine::set_rows(std::span<const std::int64_t> ids,
                                              std::span<const std::uint32_t> sequences,
                                              std::span<const float> values, std::int64_t width) {
  PLIMSOLL_TRY_VOID(begin_request(ids, false));
  PLIMSOLL_TRY_VOID(resolve_ahead(ids));
  bool changed = false;
  while (!ids.empty()) {
    const std::size_t count = std::min(ids.size(), batch_rows());
    request_ids_ = ids.first(count);
    auto done = resolve(request_ids_);
    if (done) {
      done = change(find_unique(static_cast<std::int64_t>(count)),
                    SetRows(*this, values, sequences, width), changed);
    }
    if (!done) {
      if (changed) {
        poison(done.error());  // Half a request: nobody may see or keep it.
      }
      return done;
    }
    ids = ids.subspan(count);
    sequences = sequences.empty() ? sequences : sequences.subspan(count);
    values = values.subspan(count * static_cast<std::size_t>(width));
  }
  return {};
}

// The gradient of the id at `place`, its first in the request: its only one, or the sum of all, in
// request order.
const float* EmbeddingStore::Engine::gradient_of(std::uint32_t place, std::span<const float> grads,
                                                 int member) const noexcept {
  const float* const only = grads.data() + place * shape_.dim;
  if (next_[place] == kNone) {
    return only;
  }
  const auto dim = static_cast<std::size_t>(shape_.dim);
  const auto sum = sums_.subspan(static_cast<std::size_t>(member) * dim, dim);
  std::memcpy(sum.data(), only, sum.size_bytes());
  while ((place = next_[place]) != kNone) {
    const float* const more = grads.data() + place * shape_.dim;
    for (std::size_t k = 0; k < sum.size(); ++k) {
      sum[k] += more[k];
    }
  }
  return sum.data();
}

// Refuses NaN and infinity before anything is changed. A sum of finite numbers may overflow, and a
// sum with an infinite one is not finite: one look at what will be used is enough.
Result<void> EmbeddingStore::Engine::check_gradients(std::span<const float> grads,
                                                     std::int64_t unique) {
  std::atomic<std::uint32_t> bad{kNone};  // Lowest place in the request, so that chance names none.
  crew_.run(unique, kGrain, [&](std::int64_t begin, std::int64_t end, int member) {
    for (std::int64_t u = begin; u < end; ++u) {
      const std::uint32_t place = place_of(keys_[static_cast<std::size_t>(u)]);
      if (!all_finite(gradient_of(place, grads, member), shape_.dim)) {
        std::uint32_t seen = bad.load(std::memory_order_relaxed);
        while (place < seen && !bad.compare_exchange_weak(seen, place, std::memory_order_relaxed)) {
        }
      }
    }
  });
  const std::uint32_t place = bad.load(std::memory_order_relaxed);
  return place == kNone ? Result<void>{}
                        : fail(ErrorCode::kInvalidArgument,
                               fmt::format("{}: the gradient of id {} is not finite",
                                           directory_.string(), request_ids_[place]),
                               "nothing was changed: skip this step, or lower the learning rate");
}

Result<void> EmbeddingStore::Engine::apply(std::span<const std::int64_t> ids,
                                           std::span<const float> grads, float rate_scale) {
  PLIMSOLL_TRY_VOID(check_rows("grads", ids.size(), grads.size()));
  if (ids.size() > batch_rows()) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: apply() of {} rows, but batch_rows is {}", directory_.string(),
                            ids.size(), batch_rows()),
                "raise batch_rows");
  }
  PLIMSOLL_TRY_VOID(begin_request(ids, false));
  PLIMSOLL_TRY_VOID(resolve(ids));
  request_ids_ = ids;
  const std::int64_t unique = find_unique(static_cast<std::int64_t>(ids.size()));
  PLIMSOLL_TRY_VOID(check_gradients(grads, unique));
  bool changed = false;
  auto done = change(unique, OptimizerStep(*this, grads, static_cast<double>(rate_scale)), changed);
  if (!done && changed) {
    poison(done.error());  // Half a step: nobody may see or keep it.
  }
  return done;
}

Result<void> EmbeddingStore::Engine::set_optimizer(const RowOptimizerOptions& options) {
  if (options.kind != table_.optimizer) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: optimizer.kind is {}, but {} was asked for",
                            (directory_ / table_files::kDescription).string(),
                            optimizer_name(table_.optimizer), optimizer_name(options.kind)));
  }
  PLIMSOLL_TRY_VOID(check_optimizer(options));
  optimizer_ = RecordStep(shape_, table_.init, options, corrections_);
  return {};
}

// ---- Rows that are shown ----------------------------------------------------------------------

EmbeddingStore::Engine::Shown::Shown(std::span<std::byte> memory, const TableShape& shape,
                                     const Visit& visit)
    : shape_(shape),
      visit_(visit),
      most_(memory.size() / static_cast<std::size_t>(12 + 4 * shape.floats())),
      ids_(reinterpret_cast<std::int64_t*>(memory.data())),
      sequences_(reinterpret_cast<std::uint32_t*>(ids_ + most_)),
      values_(reinterpret_cast<float*>(sequences_ + most_)) {}

Result<void> EmbeddingStore::Engine::Shown::add(std::int64_t id, const std::byte* record) {
  RowHeader header;
  std::memcpy(&header, record, sizeof header);
  ids_[count_] = id;
  sequences_[count_] = header.sequence;
  read_values(shape_, record, values_ + count_ * static_cast<std::size_t>(shape_.floats()));
  return ++count_ == most_ ? flush() : Result<void>{};
}

Result<void> EmbeddingStore::Engine::Shown::flush() {
  const std::size_t count = std::exchange(count_, 0);
  return count == 0 ? Result<void>{}
                    : visit_({ids_, count}, {sequences_, count},
                             {values_, count * static_cast<std::size_t>(shape_.floats())});
}

// ---- Commits ----------------------------------------------------------------------------------

Result<void> EmbeddingStore::Engine::commit(std::int64_t step) {
  PLIMSOLL_TRY_VOID(sound());
  if (step <= last_commit_) {
    return fail(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: commit({}) after commit({})", directory_.string(), step, last_commit_),
        "steps must grow");
  }
  auto done = make_durable(step);
  if (!done) {
    poison(done.error());
  }
  return done;
}

Result<void> EmbeddingStore::Engine::write_superblock(Superblock root) {
  const int slot = other_slot();
  root.fingerprint = table_.fingerprint();
  crash_point("store.commit.superblock.before");
  PLIMSOLL_TRY_VOID(super_.write(slot, root));
  crash_point("store.commit.superblock.after");
  slot_ = slot;
  last_commit_ = root.step;
  return {};
}

// What a commit refers to is written again only after another has replaced it in its slot.
Result<void> EmbeddingStore::Engine::check_still_there() const {
  if (!pinned_ || slot_ < 0) {
    return {};
  }
  PLIMSOLL_TRY(const bool there, super_.still_holds(slot_));
  return there ? Result<void>{}
               : fail(ErrorCode::kNotFound,
                      fmt::format("{}: commit {} is gone: training has written over it while it "
                                  "was being read",
                                  directory_.string(), last_commit_),
                      "read a newer commit, from the start");
}

Error EmbeddingStore::Engine::explained(Error error) const {
  if (error.code == ErrorCode::kCorrupt) {
    if (auto there = check_still_there(); !there) {
      return std::move(there).error();
    }
  }
  return error;
}

// ---- What is refused --------------------------------------------------------------------------

Result<void> EmbeddingStore::Engine::check_process(const char* what) const {
  return mark_.check(directory_, what, "open it in this process, to be read (pinned)");
}

Result<void> EmbeddingStore::Engine::check_writable(const char* what) const {
  PLIMSOLL_TRY_VOID(check_process(what));
  return !pinned_ ? Result<void>{}
                  : fail(ErrorCode::kInvalidArgument,
                         fmt::format("{}: {}() in a table that was opened to be read",
                                     directory_.string(), what),
                         "open it without `pinned`");
}

Result<void> EmbeddingStore::Engine::check_growing(const char* what) {
  return growing_ ? sound()
                  : fail(ErrorCode::kInvalidArgument,
                         fmt::format("{}: {} of a table that was made without rows_max",
                                     directory_.string(), what),
                         "compact it with a rows_max, or make it with one");
}

Result<void> EmbeddingStore::Engine::check_rows(const char* what, std::size_t ids,
                                                std::size_t floats) const {
  const auto dim = static_cast<std::size_t>(shape_.dim);
  return floats == ids * dim ? Result<void>{}
                             : fail(ErrorCode::kInvalidArgument,
                                    fmt::format("{} has {} floats, expected {} ids × dim {} = {}",
                                                what, floats, ids, dim, ids * dim));
}

}  // namespace plimsoll
