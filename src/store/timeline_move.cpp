// SPDX-License-Identifier: Apache-2.0
//
// Buckets in RAM, the cursor that moves rows to their next use, epochs, and folding.
//
// Threads: see embedding_store.h.   Memory: one block's addresses, in Timeline.
#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "os/crash_point.h"
#include "store/row_ahead.h"
#include "store/row_init.h"
#include "store/timeline.h"

namespace plimsoll {

void EmbeddingStore::Timeline::follow(EpochKey source, EpochKey parent, EpochKey target) noexcept {
  source_key_ = source;
  parent_key_ = parent;
  source_ = EpochOrder(source);
  parent_ = EpochOrder(parent);
  aim(target);
}

// Requires: nothing was written for the next epoch.
void EmbeddingStore::Timeline::aim(EpochKey target) noexcept {
  target_key_ = target;
  target_ = EpochOrder(target);
}

const EpochKey& EmbeddingStore::Timeline::key_of(int side) const noexcept {
  return side == source_side_ ? source_key_ : target_key_;
}

std::uint32_t EmbeddingStore::Timeline::stream_place(int side, std::int64_t bucket) const noexcept {
  return static_cast<std::uint32_t>(side * grid_.buckets + bucket);
}

EmbeddingStore::Timeline::Stream& EmbeddingStore::Timeline::stream(std::uint32_t place) noexcept {
  return space_.stream(static_cast<int>(place / grid_.buckets), place % grid_.buckets);
}

// ---- Frames -----------------------------------------------------------------------------------

EmbeddingStore::Timeline::Frame* EmbeddingStore::Timeline::find_frame(
    std::int64_t bucket) noexcept {
  for (int i = 0; i < 2; ++i) {
    Frame& frame = io_->frame(i);
    if (frame.bucket == bucket && frame.side == source_side_) {
      return &frame;
    }
  }
  return nullptr;
}

Result<void> EmbeddingStore::Timeline::begin_load(Frame& frame, int side, std::int64_t bucket) {
  io_->drop(frame);
  const std::uint32_t place = stream_place(side, bucket);
  if (open_[place] != kNone) {
    PLIMSOLL_TRY_VOID(flush(open_[place]));
  }
  frame.bucket = bucket;
  frame.side = side;
  frame.owner = extent_owner(grid_, table_.fingerprint(), key_of(side), bucket);
  frame.first = bucket * grid_.bucket_rows;
  frame.rows = grid_.rows_in_bucket(bucket);
  frame.stream = &stream(place);
  frame.order = side == source_side_ ? &source_ : &target_;
  io_->start(frame);
  return {};
}

// The frame of a source bucket, loaded.
Result<EmbeddingStore::Timeline::Frame*> EmbeddingStore::Timeline::ensure(std::int64_t bucket) {
  Frame* frame = find_frame(bucket);
  if (frame == nullptr) {
    const std::int64_t under_cursor = grid_.bucket_of(cursor_);
    frame = &io_->frame(0);
    if (frame->bucket >= 0 && frame->side == source_side_ &&
        (frame->bucket == under_cursor || io_->frame(1).bucket < 0)) {
      frame = &io_->frame(1);
    }
    PLIMSOLL_TRY_VOID(begin_load(*frame, source_side_, bucket));
  }
  PLIMSOLL_TRY_VOID(io_->wait(*frame));
  return frame;
}

// Starts to read the bucket after the one under the cursor.
Result<void> EmbeddingStore::Timeline::load_next() {
  const std::int64_t bucket = grid_.bucket_of(cursor_);
  if (bucket + 1 >= grid_.buckets || find_frame(bucket + 1) != nullptr) {
    return {};
  }
  Frame* const here = find_frame(bucket);
  return begin_load(here == &io_->frame(0) ? io_->frame(1) : io_->frame(0), source_side_,
                    bucket + 1);
}

void EmbeddingStore::Timeline::drop_frames() {
  io_->drop(io_->frame(0));
  io_->drop(io_->frame(1));
}

// ---- Chunks -----------------------------------------------------------------------------------

// Gives an open chunk to the disk as it is.
Result<void> EmbeddingStore::Timeline::flush(std::uint32_t& open) {
  PLIMSOLL_TRY_VOID(drop_newer_commit());
  const std::uint32_t index = open;
  TimelineIo::Chunk& chunk = io_->chunk(index);
  chunk.stream = &stream(chunk.place);
  chunk.owner = extent_owner(grid_, table_.fingerprint(),
                             key_of(static_cast<int>(chunk.place / grid_.buckets)),
                             chunk.place % grid_.buckets);
  PLIMSOLL_TRY(chunk.extent, space_.append(*chunk.stream, chunk.rows));
  open_rows_ += -std::int64_t{chunk.rows};
  open = kNone;
  const std::int64_t end = std::int64_t{chunk.stream->last_segment} + 1;
  if (end > reserved_) {
    const std::int64_t to = std::min(end + std::max<std::int64_t>(layout_.sizes.segments / 64, 8),
                                     layout_.sizes.segments);
    rows_file_.reserve(reserved_ * grid_.segment_bytes, to * grid_.segment_bytes);
    reserved_ = to;
  }
  io_->submit(index);
  return {};
}

// Forgets the open chunk of a bucket, whose rows have gone elsewhere.
void EmbeddingStore::Timeline::drop_open(std::uint32_t place) {
  open_rows_ += -std::int64_t{io_->chunk(open_[place]).rows};
  io_->give_back(open_[place]);
  open_[place] = kNone;
}

// Room for one more row at the end of a bucket's stream, or nullptr when no chunk is free. A chunk
// that is full by this goes to full_, to be submitted when its rows have been filled in.
std::byte* EmbeddingStore::Timeline::reserve(std::uint32_t place) {
  std::uint32_t& open = open_[place];
  if (open == kNone) {
    open = io_->take();
    if (open == kNone) {
      return nullptr;
    }
    io_->chunk(open).place = place;
  }
  TimelineIo::Chunk& chunk = io_->chunk(open);
  std::byte* const at = chunk.bytes + kExtentHeaderBytes + chunk.rows * grid_.record_bytes;
  open_rows_ += 1;
  if (++chunk.rows == rows_per_chunk_) {
    full_[static_cast<std::size_t>(fulls_++)] = open;
    open = kNone;
  }
  return at;
}

Result<void> EmbeddingStore::Timeline::submit_full() {
  for (std::int64_t i = 0; i < fulls_; ++i) {
    PLIMSOLL_TRY_VOID(flush(full_[static_cast<std::size_t>(i)]));
  }
  fulls_ = 0;
  return {};
}

// Waits for a free chunk. Requires: every reserved row has been filled in.
Result<void> EmbeddingStore::Timeline::make_room() {
  if (io_->wait_for_chunk()) {
    return io_->failed();
  }
  std::uint32_t* fullest = nullptr;
  for (std::uint32_t& open : open_) {
    if (open != kNone &&
        (fullest == nullptr || io_->chunk(open).rows > io_->chunk(*fullest).rows)) {
      fullest = &open;
    }
  }
  PLIMSOLL_CHECK(fullest != nullptr, "no chunk is free, open or being written");
  PLIMSOLL_TRY_VOID(flush(*fullest));
  static_cast<void>(io_->wait_for_chunk());
  return io_->failed();
}

// One row to the end of a bucket's stream. Requires: nothing is reserved and not filled in.
Result<void> EmbeddingStore::Timeline::append(std::uint32_t place, const std::byte* record) {
  std::byte* to = reserve(place);
  while (to == nullptr) {
    PLIMSOLL_TRY_VOID(make_room());
    to = reserve(place);
  }
  std::memcpy(to, record, static_cast<std::size_t>(grid_.record_bytes));
  return submit_full();
}

// ---- The cursor -------------------------------------------------------------------------------

// Moves every row at a position below `end` to its target bucket; those of `run` are changed on
// the way. Rows that were never written and are not changed stay unwritten.
Result<void> EmbeddingStore::Timeline::advance(std::int64_t end, const Run& run, const Change* how,
                                               bool& changed) {
  while (cursor_ < end) {
    const std::int64_t bucket = grid_.bucket_of(cursor_);
    const std::int64_t bucket_end = std::min((bucket + 1) * grid_.bucket_rows, count_);
    const std::int64_t stop = std::min(end, bucket_end);
    const std::uint32_t place = stream_place(source_side_, bucket);
    if (stream(place).extents == 0 && open_[place] == kNone && stop <= run.begin) {
      changed = true;
      cursor_ = stop;
    } else {
      PLIMSOLL_TRY(Frame* const frame, ensure(bucket));
      PLIMSOLL_TRY_VOID(load_next());
      while (cursor_ < stop) {
        PLIMSOLL_TRY_VOID(keep_room());
        if (find_frame(bucket) == nullptr) {
          break;  // Folding needed its memory.
        }
        changed = true;
        const std::int64_t count = std::min(stop - cursor_, kTimelineBlockRows);
        PLIMSOLL_TRY(const std::int64_t moved, move_block(*frame, count, run, how));
        cursor_ += moved;
        if (moved == 0) {
          PLIMSOLL_TRY_VOID(make_room());
        }
      }
    }
    if (cursor_ == bucket_end) {  // Its segments are free once a commit knows that, too.
      if (Frame* const frame = find_frame(bucket); frame != nullptr) {
        io_->drop(*frame);
      }
      if (open_[place] != kNone) {  // Newer versions, which have moved with their rows.
        drop_open(place);
      }
      io_->settle(stream(place));
      space_.clear(stream(place));
      crash_point("store.timeline.bucket");
    }
  }
  return {};
}

// Moves up to `count` rows; returns how many, fewer when no chunk was free.
Result<std::int64_t> EmbeddingStore::Timeline::move_block(Frame& frame, std::int64_t count,
                                                          const Run& run, const Change* how) {
  const std::int64_t first = cursor_ - frame.first;
  crew_.run(count, kGrain, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::uint32_t entry = frame.index[static_cast<std::size_t>(first + i)];
      std::int64_t ordinal = -1;
      if (cursor_ + i >= run.begin) {
        const auto u = static_cast<std::size_t>(run.first + cursor_ + i - run.begin);
        ordinal = found_.ordinals[place_of(keys_[u])];
      } else if (entry != 0) {
        std::memcpy(&ordinal, frame.bytes.data() + (std::int64_t{entry} - 1) * 8, sizeof ordinal);
      }
      block_target_[static_cast<std::size_t>(i)] =
          ordinal < 0 ? -1 : grid_.bucket_of(target_.position_of(ordinal));
    }
  });
  const int target_side = 1 - source_side_;
  std::int64_t reserved = 0;
  for (; reserved < count; ++reserved) {
    const auto i = static_cast<std::size_t>(reserved);
    if (block_target_[i] < 0) {
      block_to_[i] = nullptr;
      continue;
    }
    const std::uint32_t place = stream_place(target_side, block_target_[i]);
    block_to_[i] = reserve(place);
    if (block_to_[i] == nullptr) {
      break;
    }
    ++stream(place).live;
  }
  crew_.run(reserved, kGrain, [&](std::int64_t begin, std::int64_t end, int member) {
    fill_block(frame, begin, end, run, how, member);
  });
  Stream& left = *frame.stream;
  for (std::int64_t i = 0; i < reserved; ++i) {
    left.live -= frame.index[static_cast<std::size_t>(first + i)] != 0 ? 1 : 0;
  }
  PLIMSOLL_TRY_VOID(submit_full());
  return reserved;
}

void EmbeddingStore::Timeline::fill_block(const Frame& frame, std::int64_t begin, std::int64_t end,
                                          const Run& run, const Change* how, int member) noexcept {
  const std::uint32_t* const index = frame.index.data() + (cursor_ - frame.first);
  for (std::int64_t i = begin; i < end; ++i) {
    if (i + kRecordsAhead < end && index[i + kRecordsAhead] != 0) {
      fetch_ahead(frame.bytes.data() + (std::int64_t{index[i + kRecordsAhead]} - 1) * 8,
                  grid_.record_bytes);
    }
    std::byte* const to = block_to_[static_cast<std::size_t>(i)];
    if (to == nullptr) {
      continue;
    }
    const std::int64_t in_run = cursor_ + i - run.begin;
    if (index[i] != 0) {
      std::memcpy(to, frame.bytes.data() + (std::int64_t{index[i]} - 1) * 8,
                  static_cast<std::size_t>(grid_.record_bytes));
    } else {
      const auto place = place_of(keys_[static_cast<std::size_t>(run.first + in_run)]);
      init_record(shape_, table_.init, found_.ordinals[place], request_ids_[place], to);
    }
    if (in_run >= 0) {
      how->row(keys_[static_cast<std::size_t>(run.first + in_run)], to, member);
    }
  }
}

// ---- Epochs -----------------------------------------------------------------------------------

bool EmbeddingStore::Timeline::target_is_empty() noexcept {
  for (std::int64_t bucket = 0; bucket < grid_.buckets; ++bucket) {
    const std::uint32_t place = stream_place(1 - source_side_, bucket);
    if (stream(place).extents > 0 || open_[place] != kNone) {
      return false;
    }
  }
  return true;
}

// Carries every row that was not visited into the target, which then is the source.
Result<void> EmbeddingStore::Timeline::end_epoch() {
  bool changed = false;
  auto done = advance(count_, {.first = 0, .count = 0, .begin = shape_.rows}, nullptr, changed);
  if (!done) {
    poison(done.error());
    return done;
  }
  drop_frames();
  source_side_ = 1 - source_side_;
  cursor_ = 0;
  follow(target_key_, source_key_, {order_seed_, target_key_.epoch + 1, count_});
  return {};
}

Result<void> EmbeddingStore::Timeline::begin_epoch(std::int64_t epoch) {
  PLIMSOLL_TRY_VOID(check_writable("begin_epoch"));
  PLIMSOLL_TRY_VOID(sound());
  if (epoch < 0) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("begin_epoch({}) makes no sense", epoch));
  }
  const EpochKey wanted{order_seed_, epoch, count_};
  if (cursor_ > 0 && source_key_ == EpochKey{order_seed_, epoch, source_key_.rows}) {
    return {};  // Under way: rows that have come since stand behind its order.
  }
  while (source_key_ != wanted) {
    if (cursor_ == 0 && target_is_empty()) {  // Nothing was moved yet: straight to where it shall.
      aim(wanted);
    }
    PLIMSOLL_TRY_VOID(end_epoch());
  }
  return {};
}

// ---- Folding ----------------------------------------------------------------------------------

// Keeps the lists of extents and the file within their bounds: rewrites the stream that has most to
// give back. Requires: every reserved row has been filled in.
Result<void> EmbeddingStore::Timeline::keep_room() {
  while (space_.wants_nodes() || space_.wants_segments()) {
    const bool nodes = space_.wants_nodes();
    std::uint32_t worst = 0;
    std::int64_t most = 0;
    for (std::uint32_t place = 0; place < open_.size(); ++place) {
      const Stream& s = stream(place);
      const std::int64_t extents = s.live / rows_per_chunk_ + 1;
      const std::int64_t waste =
          nodes ? (s.extents - extents) / 15
                : (s.bytes - s.live * grid_.record_bytes - extents * 8192) / grid_.segment_bytes;
      if (waste > most) {
        most = waste;
        worst = place;
      }
    }
    if (most <= 0) {
      return {};
    }
    PLIMSOLL_TRY_VOID(fold(worst));
  }
  return {};
}

Result<void> EmbeddingStore::Timeline::fold(std::uint32_t place) {
  const int side = static_cast<int>(place / grid_.buckets);
  const std::int64_t bucket = place % grid_.buckets;
  Frame* frame = side == source_side_ ? find_frame(bucket) : nullptr;
  if (frame == nullptr) {
    frame =
        find_frame(grid_.bucket_of(cursor_)) == &io_->frame(1) ? &io_->frame(0) : &io_->frame(1);
    PLIMSOLL_TRY_VOID(begin_load(*frame, side, bucket));
  }
  PLIMSOLL_TRY_VOID(io_->wait(*frame));
  Stream& folded = stream(place);
  if (open_[place] != kNone) {  // Its rows are in the frame, too.
    drop_open(place);
  }
  io_->settle(folded);
  PLIMSOLL_TRY_VOID(io_->failed());
  space_.clear(folded);
  folded.sorted = false;
  for (std::int64_t i = 0; i < frame->rows; ++i) {
    const std::uint32_t entry = frame->index[static_cast<std::size_t>(i)];
    if (entry == 0 || (side == source_side_ && frame->first + i < cursor_)) {
      continue;
    }
    if (auto done = append(place, frame->bytes.data() + (std::int64_t{entry} - 1) * 8); !done) {
      poison(done.error());  // Some of its rows are in the frame alone.
      return done;
    }
    ++folded.live;
  }
  crash_point("store.timeline.fold");
  if (side != source_side_) {
    io_->drop(*frame);
  }
  return {};
}

}  // namespace plimsoll
