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

std::int64_t position_in(std::uint64_t key) {
  return static_cast<std::int64_t>(key >> 32);
}

}  // namespace

Result<void> EmbeddingStore::Timeline::begin_request(std::span<const std::int64_t> ids, bool) {
  PLIMSOLL_TRY_VOID(sound());
  requests_ += std::ssize(ids);
  return {};
}

void EmbeddingStore::Timeline::poison(const Error& error) {
  if (!poison_) {
    poison_ = error;
  }
}

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
  crew_.run(count, 4 * kGrain, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) {
      const auto at = static_cast<std::size_t>(i);
      keys_[at] = static_cast<std::uint64_t>(source_.position_of(found_.ordinals[at])) << 32 | at;
    }
  });
}

// Keys are position << 32 | first place, in the order of positions.
std::int64_t EmbeddingStore::Timeline::find_unique(std::int64_t count) {
  find_positions(count);
  const auto keys = keys_.first(static_cast<std::size_t>(count));
  if (!std::is_sorted(keys.begin(), keys.end())) {
    std::sort(keys.begin(), keys.end());
  }
  std::size_t unique = 0;
  std::uint32_t last = 0;
  for (const std::uint64_t key : keys) {
    const std::uint32_t place = place_of(key);
    if (unique > 0 && position_in(key) == position_in(keys[unique - 1])) {
      next_[last] = place;
    } else {
      keys[unique++] = key;
    }
    next_[place] = kNone;
    last = place;
  }
  return static_cast<std::int64_t>(unique);
}

// Reads the two buckets if the request is about them.
Result<EmbeddingStore::Timeline::Near> EmbeddingStore::Timeline::load_near(std::int64_t count) {
  const std::int64_t bucket = grid_.bucket_of(cursor_);
  const std::int64_t here = std::min((bucket + 1) * grid_.bucket_rows, count_);
  const std::int64_t next = std::min((bucket + 2) * grid_.bucket_rows, count_);
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
  find_positions(count);
  PLIMSOLL_TRY(const Near near, load_near(count));
  std::atomic<std::int64_t> served{0};
  crew_.run(count, kGrain, [&](std::int64_t begin, std::int64_t end, int) {
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
                    entry == 0 ? 0 : grid_.record_bytes);
      }
      const Frame* const frame = frame_of(near, keys_[at]);
      if (frame == nullptr) {
        continue;
      }
      float* const to = out.data() + i * shape_.dim;
      const std::uint32_t entry = entry_of(i, *frame);
      if (entry == 0) {
        init_weights(shape_, table_.init, ids[at], to);
      } else {
        read_weights(shape_, frame->bytes.data() + (std::int64_t{entry} - 1) * 8, to);
      }
      ++mine;
    }
    served.fetch_add(mine, std::memory_order_relaxed);
  });
  hits_ += served.load();
  if (served.load() < count) {
    PLIMSOLL_TRY_VOID(gather_far(ids, out, near));
  }
  return check_still_there();
}

Result<void> EmbeddingStore::Timeline::gather_far(std::span<const std::int64_t> ids,
                                                  std::span<float> out, const Near& near) {
  std::size_t staged = 0;
  const auto fetch = [&]() -> Result<void> {
    const auto some = wanted_.first(staged);
    PLIMSOLL_TRY_VOID(lookup(some));
    for (const Wanted& row : some) {
      read_weights(shape_, this->staged(row), out.data() + row.tag * shape_.dim);
    }
    staged = 0;
    return {};
  };
  for (const std::uint64_t key : keys_.first(ids.size())) {
    if (frame_of(near, key) != nullptr) {
      continue;
    }
    wanted_[staged++] = {.position = position_in(key),
                         .id = ids[place_of(key)],
                         .ordinal = found_.ordinals[place_of(key)],
                         .tag = place_of(key),
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

// The rows of a request that continue the order: the first at or after the cursor and those that
// follow it without a gap. What it jumps over must be in proportion: one row far ahead is a change
// out of order, a batch behind a skipped batch is the order going on.
EmbeddingStore::Timeline::Run EmbeddingStore::Timeline::in_order(
    std::int64_t unique) const noexcept {
  const auto position = [&](std::int64_t u) {
    return position_in(keys_[static_cast<std::size_t>(u)]);
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
      gap <= grid_.bucket_rows && 8 * run.count >= std::min<std::int64_t>(gap, 64);
  return continues ? run : Run{.first = unique, .count = 0, .begin = shape_.rows};
}

Result<void> EmbeddingStore::Timeline::change(std::int64_t unique, const Change& how,
                                              bool& changed) {
  const Run run = in_order(unique);
  if (run.count > 0) {  // What can fail without harm comes first.
    const std::int64_t bucket = grid_.bucket_of(cursor_);
    PLIMSOLL_TRY_VOID(ensure(bucket));
    if (run.begin + run.count > (bucket + 1) * grid_.bucket_rows) {
      PLIMSOLL_TRY_VOID(ensure(bucket + 1));
    }
  }
  PLIMSOLL_TRY_VOID(change_strays(0, run.first, how, changed));
  PLIMSOLL_TRY_VOID(change_strays(run.first + run.count, unique, how, changed));
  return run.count > 0 ? advance(run.begin + run.count, run, &how, changed) : Result<void>{};
}

// Rows out of order: a newer version of each goes to the end of the bucket where the row is.
Result<void> EmbeddingStore::Timeline::change_strays(std::int64_t begin, std::int64_t end,
                                                     const Change& how, bool& changed) {
  while (begin < end) {
    const auto count = std::min(end - begin, static_cast<std::int64_t>(wanted_.size()));
    const auto some = wanted_.first(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < some.size(); ++i) {
      const std::int64_t u = begin + static_cast<std::int64_t>(i);
      const std::uint64_t key = keys_[static_cast<std::size_t>(u)];
      some[i] = {.position = position_in(key),
                 .id = request_ids_[place_of(key)],
                 .ordinal = found_.ordinals[place_of(key)],
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
      how.row(keys_[static_cast<std::size_t>(begin + row.tag)], record, 0);
      const int side = row.position >= cursor_ ? source_side_ : 1 - source_side_;
      const std::int64_t bucket = row.place % grid_.buckets;
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
              static_cast<std::size_t>(grid_.record_bytes));
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
  stats.dirty_bytes = open_rows_.get() * grid_.record_bytes;
  stats.frames = 2;
  return stats;
}

}  // namespace plimsoll
