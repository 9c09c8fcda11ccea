// SPDX-License-Identifier: Apache-2.0
//
// gather, apply and update of a table in sample order.
//
// Threads: see embedding_store.h.   Memory: the scratch in timeline.h.
#include "store/timeline.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "store/row_ahead.h"
#include "store/row_init.h"

namespace plimsoll {
namespace {

std::uint32_t request_place(std::uint64_t key) {
  return static_cast<std::uint32_t>(key);
}
std::int64_t position_in(std::uint64_t key) {
  return static_cast<std::int64_t>(key >> 32);
}

}  // namespace

// ---- Changes ----------------------------------------------------------------------------------

// Sets the first floats of a row, and zeroes those behind them.
class EmbeddingStore::Timeline::SetRows final : public Change {
 public:
  /// `sequences`: one per row; empty means 0 for all. `width`: floats per row of `rows`.
  SetRows(const Timeline& table, std::span<const float> rows,
          std::span<const std::uint32_t> sequences, std::int64_t width)
      : table_(table), rows_(rows), sequences_(sequences), width_(width) {}
  void row(std::int64_t unique, std::byte* record, int) const noexcept override {
    const std::uint32_t last = request_place(table_.keys_of(unique).back());
    write_values(table_.rows_, sequences_.empty() ? 0 : sequences_[last],
                 rows_.data() + last * width_, width_, record);
  }

 private:
  const Timeline& table_;
  std::span<const float> rows_;
  std::span<const std::uint32_t> sequences_;
  std::int64_t width_;
};

class EmbeddingStore::Timeline::OptimizerStep final : public Change {
 public:
  OptimizerStep(const Timeline& table, std::span<const float> grads, double rate_scale)
      : table_(table), grads_(grads), rate_scale_(rate_scale) {}
  void row(std::int64_t unique, std::byte* record, int member) const noexcept override {
    const auto dim = static_cast<std::size_t>(table_.rows_.dim);
    const auto sum = table_.sums_.subspan(static_cast<std::size_t>(member) * dim, dim);
    const std::int64_t id = table_.request_ids_[request_place(table_.keys_of(unique)[0])];
    table_.optimizer_.step(record, id, table_.gradient_of(unique, grads_, sum), rate_scale_,
                           table_.wide_.data() + member * table_.rows_.scratch_floats());
  }

 private:
  const Timeline& table_;
  std::span<const float> grads_;
  double rate_scale_;
};

// ---- Requests ---------------------------------------------------------------------------------

Result<void> EmbeddingStore::Timeline::sound() {
  if (!poison_) {
    if (auto written = io_->failed(); !written) {
      poison(written.error());
    }
  }
  if (poison_) {
    return tl::unexpected(*poison_);
  }
  return {};
}

void EmbeddingStore::Timeline::find_positions(std::int64_t count) {
  crew_->run(count, 4 * kGrain, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) {
      const auto at = static_cast<std::size_t>(i);
      keys_[at] = static_cast<std::uint64_t>(source_.position_of(found_.ordinals[at])) << 32 | at;
    }
  });
}

// Sorts keys_ by position, then by place in the request; returns how many different rows there are.
std::int64_t EmbeddingStore::Timeline::sort_unique(std::int64_t count) {
  const auto keys = keys_.first(static_cast<std::size_t>(count));
  if (!std::is_sorted(keys.begin(), keys.end())) {
    std::sort(keys.begin(), keys.end());
  }
  std::int64_t unique = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i == 0 || position_in(keys[i]) != position_in(keys[i - 1])) {
      unique_[static_cast<std::size_t>(unique++)] = static_cast<std::uint32_t>(i);
    }
  }
  unique_[static_cast<std::size_t>(unique)] = static_cast<std::uint32_t>(count);
  return unique;
}

std::span<const std::uint64_t> EmbeddingStore::Timeline::keys_of(
    std::int64_t unique) const noexcept {
  const auto at = static_cast<std::size_t>(unique);
  return keys_.subspan(unique_[at], unique_[at + 1] - unique_[at]);
}

// The gradient of a row: its only one, or the sum in `sum`, added up in request order.
const float* EmbeddingStore::Timeline::gradient_of(std::int64_t unique,
                                                   std::span<const float> grads,
                                                   std::span<float> sum) const noexcept {
  const auto keys = keys_of(unique);
  const float* const first = grads.data() + request_place(keys[0]) * rows_.dim;
  if (keys.size() == 1) {
    return first;
  }
  std::memcpy(sum.data(), first, sum.size_bytes());
  for (const std::uint64_t key : keys.subspan(1)) {
    const float* const more = grads.data() + request_place(key) * rows_.dim;
    for (std::size_t k = 0; k < sum.size(); ++k) {
      sum[k] += more[k];
    }
  }
  return sum.data();
}

// Refuses NaN and infinity, in a gradient or in a sum of gradients, before anything is changed.
Result<void> EmbeddingStore::Timeline::check_gradients(std::span<const std::int64_t> ids,
                                                       std::span<const float> grads,
                                                       std::int64_t unique) {
  const auto dim = static_cast<std::size_t>(rows_.dim);
  std::atomic<std::uint32_t> bad{kNone};  // Lowest place in the request, so that chance names none.
  crew_->run(unique, kGrain, [&](std::int64_t begin, std::int64_t end, int member) {
    const auto sum = sums_.subspan(static_cast<std::size_t>(member) * dim, dim);
    for (std::int64_t u = begin; u < end; ++u) {
      if (!all_finite(gradient_of(u, grads, sum), rows_.dim)) {
        const std::uint32_t place = request_place(keys_of(u)[0]);
        std::uint32_t seen = bad.load(std::memory_order_relaxed);
        while (place < seen && !bad.compare_exchange_weak(seen, place, std::memory_order_relaxed)) {
        }
      }
    }
  });
  if (bad.load(std::memory_order_relaxed) == kNone) {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("{}: the gradient of id {} is not finite", directory_.string(),
                          ids[bad.load(std::memory_order_relaxed)]),
              "nothing was changed: skip this step, or lower the learning rate");
}

Result<void> EmbeddingStore::Timeline::gather(std::span<const std::int64_t> ids,
                                              std::span<float> out) {
  PLIMSOLL_TRY_VOID(check_rows("out", ids.size(), out.size()));
  PLIMSOLL_TRY_VOID(sound());
  requests_ += static_cast<std::int64_t>(ids.size());
  while (!ids.empty()) {
    const std::size_t count = std::min(ids.size(), found_.ordinals.size());
    const std::size_t floats = count * static_cast<std::size_t>(rows_.dim);
    PLIMSOLL_TRY_VOID(gather_piece(ids.first(count), out.first(floats)));
    ids = ids.subspan(count);
    out = out.subspan(floats);
  }
  return check_still_there();
}

// Reads the two buckets if the request is about them.
Result<EmbeddingStore::Timeline::Near> EmbeddingStore::Timeline::load_near(std::int64_t count) {
  const std::int64_t bucket = shape_.bucket_of(cursor_);
  const std::int64_t here = std::min((bucket + 1) * shape_.bucket_rows, count_);
  const std::int64_t next = std::min((bucket + 2) * shape_.bucket_rows, count_);
  std::int64_t in_here = 0;
  std::int64_t in_next = 0;
  for (const std::uint64_t key : keys_.first(static_cast<std::size_t>(count))) {
    const std::int64_t position = position_in(key);
    in_here += position >= cursor_ && position < here ? 1 : 0;
    in_next += position >= here && position >= cursor_ && position < next ? 1 : 0;
  }
  if ((in_here + in_next) * 4 >= count) {
    if (in_here > 0) {
      PLIMSOLL_TRY_VOID(ensure(bucket));
      PLIMSOLL_TRY_VOID(load_next());
    }
    if (in_next > 0) {
      PLIMSOLL_TRY_VOID(ensure(bucket + 1));
    }
  }
  Near near{.here = here, .next = next, .frames = {find_frame(bucket), find_frame(bucket + 1)}};
  for (const Frame*& frame : near.frames) {
    frame = frame != nullptr && io_->ready(*frame) ? frame : nullptr;
  }
  return near;
}

inline const EmbeddingStore::Timeline::Frame* EmbeddingStore::Timeline::frame_of(
    const Near& near, std::uint64_t key) const noexcept {
  const std::int64_t position = position_in(key);
  return position < cursor_ || position >= near.next ? nullptr
                                                     : near.frames[position < near.here ? 0 : 1];
}

// Rows of the bucket under the cursor and of the one after it come from their frames, if the
// request is about them; all others are looked up.
Result<void> EmbeddingStore::Timeline::gather_piece(std::span<const std::int64_t> ids,
                                                    std::span<float> out) {
  const auto count = static_cast<std::int64_t>(ids.size());
  PLIMSOLL_TRY_VOID(resolve(ids));
  find_positions(count);
  PLIMSOLL_TRY(const Near near, load_near(count));
  std::atomic<std::int64_t> served{0};
  crew_->run(count, kGrain, [&](std::int64_t begin, std::int64_t end, int) {
    std::int64_t mine = 0;
    const auto entry_of = [&](std::int64_t i, const Frame& frame) {
      return frame.index[static_cast<std::size_t>(position_in(keys_[static_cast<std::size_t>(i)]) -
                                                  frame.first)];
    };
    for (std::int64_t i = begin; i < end; ++i) {
      const auto at = static_cast<std::size_t>(i);
      if (const auto* ahead =
              i + kRecordsAhead < end ? frame_of(near, keys_[at + kRecordsAhead]) : nullptr;
          ahead != nullptr) {
        const std::uint32_t entry = entry_of(i + kRecordsAhead, *ahead);
        fetch_ahead(ahead->bytes.data() + std::max<std::int64_t>(entry, 1) * 8 - 8,
                    entry == 0 ? 0 : shape_.record_bytes);
      }
      const Frame* const frame = frame_of(near, keys_[at]);
      if (frame == nullptr) {
        continue;
      }
      float* const to = out.data() + i * rows_.dim;
      const std::uint32_t entry = entry_of(i, *frame);
      if (entry == 0) {
        init_weights(rows_, table_.init, ids[at], to);
      } else {
        read_weights(rows_, frame->bytes.data() + (std::int64_t{entry} - 1) * 8, to);
      }
      ++mine;
    }
    served.fetch_add(mine, std::memory_order_relaxed);
  });
  hits_ += served.load();
  if (served.load() == count) {
    return {};
  }
  return gather_far(ids, out, near);
}

Result<void> EmbeddingStore::Timeline::gather_far(std::span<const std::int64_t> ids,
                                                  std::span<float> out, const Near& near) {
  std::size_t staged = 0;
  const auto fetch = [&]() -> Result<void> {
    const auto some = wanted_.first(staged);
    PLIMSOLL_TRY_VOID(lookup(some));
    for (const Wanted& row : some) {
      read_weights(rows_, this->staged(row), out.data() + row.tag * rows_.dim);
    }
    staged = 0;
    return {};
  };
  for (const std::uint64_t key : keys_.first(ids.size())) {
    if (frame_of(near, key) != nullptr) {
      continue;
    }
    wanted_[staged++] = {.position = position_in(key),
                         .id = ids[request_place(key)],
                         .ordinal = found_.ordinals[request_place(key)],
                         .tag = request_place(key),
                         .place = 0,
                         .slot = 0,
                         .found = 0,
                         .reserved = 0};
    if (staged == wanted_.size()) {
      PLIMSOLL_TRY_VOID(fetch());
    }
  }
  return fetch();
}

Result<void> EmbeddingStore::Timeline::update(std::span<const std::int64_t> ids,
                                              std::span<const float> rows) {
  PLIMSOLL_TRY_VOID(check_rows("rows", ids.size(), rows.size()));
  return set_rows(ids, {}, rows, rows_.dim);
}

Result<void> EmbeddingStore::Timeline::restore(std::span<const std::int64_t> ids,
                                               std::span<const std::uint32_t> sequences,
                                               std::span<const float> values) {
  PLIMSOLL_TRY_VOID(check_records(ids.size(), sequences.size(), values.size()));
  return set_rows(ids, sequences, values, rows_.floats());
}

Result<void> EmbeddingStore::Timeline::set_rows(std::span<const std::int64_t> ids,
                                                std::span<const std::uint32_t> sequences,
                                                std::span<const float> values, std::int64_t width) {
  PLIMSOLL_TRY_VOID(sound());
  requests_ += static_cast<std::int64_t>(ids.size());
  const std::size_t most = found_.ordinals.size();
  PLIMSOLL_TRY_VOID(resolve_ahead(ids, most, [this](const auto some) { return resolve(some); }));
  bool first = true;
  while (!ids.empty()) {
    const std::size_t count = std::min(ids.size(), most);
    auto done = resolve(ids.first(count));
    if (done) {
      request_ids_ = ids;
      find_positions(static_cast<std::int64_t>(count));
      done = change(sort_unique(static_cast<std::int64_t>(count)),
                    SetRows(*this, values, sequences, width));
    }
    if (!done) {
      if (!first) {
        poison(done.error());  // Half a request: nobody may see or keep it.
      }
      return done;
    }
    first = false;
    ids = ids.subspan(count);
    sequences = sequences.empty() ? sequences : sequences.subspan(count);
    values = values.subspan(count * static_cast<std::size_t>(width));
  }
  return {};
}

Result<void> EmbeddingStore::Timeline::apply(std::span<const std::int64_t> ids,
                                             std::span<const float> grads, float rate_scale) {
  PLIMSOLL_TRY_VOID(check_rows("grads", ids.size(), grads.size()));
  if (ids.size() > found_.ordinals.size()) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: apply() of {} rows, but batch_rows is {}", directory_.string(),
                            ids.size(), found_.ordinals.size()),
                "raise batch_rows");
  }
  PLIMSOLL_TRY_VOID(sound());
  requests_ += static_cast<std::int64_t>(ids.size());
  PLIMSOLL_TRY_VOID(resolve(ids));
  request_ids_ = ids;
  find_positions(static_cast<std::int64_t>(ids.size()));
  const std::int64_t unique = sort_unique(static_cast<std::int64_t>(ids.size()));
  PLIMSOLL_TRY_VOID(check_gradients(ids, grads, unique));
  return change(unique, OptimizerStep(*this, grads, static_cast<double>(rate_scale)));
}

// The rows of a request that continue the order: the first at or after the cursor and those that
// follow it without a gap. What it jumps over must be in proportion: one row far ahead is a change
// out of order, a batch behind a skipped batch is the order going on.
EmbeddingStore::Timeline::Run EmbeddingStore::Timeline::in_order(
    std::int64_t unique) const noexcept {
  const auto position = [&](std::int64_t u) {
    return position_in(keys_[unique_[static_cast<std::size_t>(u)]]);
  };
  Run run;
  while (run.first < unique && position(run.first) < cursor_) {
    ++run.first;
  }
  if (run.first == unique) {
    return run;
  }
  run.begin = position(run.first);
  while (run.first + run.count < unique &&
         position(run.first + run.count) == run.begin + run.count) {
    ++run.count;
  }
  const std::int64_t gap = run.begin - cursor_;
  const bool continues =
      gap <= shape_.bucket_rows && 8 * run.count >= std::min<std::int64_t>(gap, 64);
  return continues ? run : Run{.first = unique, .count = 0, .begin = rows_.rows};
}

Result<void> EmbeddingStore::Timeline::change(std::int64_t unique, const Change& how) {
  const Run run = in_order(unique);
  bool changed = false;
  const auto all = [&]() -> Result<void> {
    if (run.count > 0) {  // What can fail without harm comes first.
      const std::int64_t bucket = shape_.bucket_of(cursor_);
      PLIMSOLL_TRY_VOID(ensure(bucket));
      if (run.begin + run.count > (bucket + 1) * shape_.bucket_rows) {
        PLIMSOLL_TRY_VOID(ensure(bucket + 1));
      }
    }
    PLIMSOLL_TRY_VOID(change_strays(0, run.first, how, changed));
    PLIMSOLL_TRY_VOID(change_strays(run.first + run.count, unique, how, changed));
    if (run.count > 0) {
      PLIMSOLL_TRY_VOID(advance(run.begin + run.count, run, &how, changed));
    }
    return {};
  };
  auto done = all();
  if (!done && changed) {
    poison(done.error());
  }
  return done;
}

// Rows out of order: a newer version of each goes to the end of the bucket where the row is.
Result<void> EmbeddingStore::Timeline::change_strays(std::int64_t begin, std::int64_t end,
                                                     const Change& how, bool& changed) {
  while (begin < end) {
    const auto count = std::min(end - begin, static_cast<std::int64_t>(wanted_.size()));
    const auto some = wanted_.first(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < some.size(); ++i) {
      const std::int64_t u = begin + static_cast<std::int64_t>(i);
      const std::uint64_t key = keys_of(u)[0];
      some[i] = {.position = position_in(key),
                 .id = request_ids_[request_place(key)],
                 .ordinal = found_.ordinals[request_place(key)],
                 .tag = static_cast<std::uint32_t>(i),
                 .place = 0,
                 .slot = 0,
                 .found = 0,
                 .reserved = 0};
    }
    PLIMSOLL_TRY_VOID(lookup(some));
    changed = true;
    for (const Wanted& row : some) {
      std::byte* const record = staged(row);
      how.row(begin + row.tag, record, 0);
      const int side = row.position >= cursor_ ? source_side_ : 1 - source_side_;
      const std::int64_t bucket = row.place % shape_.buckets;
      PLIMSOLL_TRY_VOID(keep_room());
      if (side == source_side_) {
        renew_frame(bucket, row.position, record);
      }
      PLIMSOLL_TRY_VOID(append(row.place, record));
      Stream& grown = stream(row.place);
      grown.sorted = false;
      grown.live += row.found == 0 ? 1 : 0;
    }
    begin += count;
  }
  return {};
}

// Keeps the frame of a bucket that a row is about to be appended to true, or empties it. Nothing is
// appended to a stream that is being loaded.
void EmbeddingStore::Timeline::renew_frame(std::int64_t bucket, std::int64_t position,
                                           const std::byte* record) {
  Frame* const frame = find_frame(bucket);
  if (frame == nullptr) {
    return;
  }
  const bool loaded = io_->wait(*frame).has_value();
  const std::uint32_t entry =
      loaded ? frame->index[static_cast<std::size_t>(position - frame->first)] : 0;
  if (entry == 0) {
    io_->drop(*frame);
    return;
  }
  std::memcpy(frame->bytes.data() + (std::int64_t{entry} - 1) * 8, record,
              static_cast<std::size_t>(shape_.record_bytes));
}

Result<void> EmbeddingStore::Timeline::set_optimizer(const RowOptimizerOptions& options) {
  if (options.kind != table_.optimizer) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: optimizer.kind is {}, but {} was asked for",
                            (directory_ / table_files::kDescription).string(),
                            optimizer_name(table_.optimizer), optimizer_name(options.kind)));
  }
  PLIMSOLL_TRY_VOID(check_optimizer(options));
  optimizer_ = RecordStep(rows_, table_.init, options, corrections_);
  return {};
}

StoreStats EmbeddingStore::Timeline::stats() const {
  const auto counts = io_->counts();
  StoreStats stats;
  stats.requests = requests_.get();
  stats.hits = hits_.get();
  stats.prefetch_hits = stats.hits;
  stats.pages_read = counts.extents_read;
  stats.pages_written = counts.extents_written;
  stats.bytes_read = counts.bytes_read;
  stats.bytes_written = counts.bytes_written + map_bytes_written_.get();
  stats.commits = commits_.get();
  stats.syncs = syncs_.get();
  stats.stall_ns = counts.stall_ns;
  stats.dirty_bytes = open_rows_.get() * shape_.record_bytes;
  stats.frames = 2;
  return stats;
}

}  // namespace plimsoll
