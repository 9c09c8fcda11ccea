// SPDX-License-Identifier: Apache-2.0
//
// Rows out of order: a frame, else the stream of the bucket where the row must be, else the
// initialiser. A stream in the order of the epoch that wrote it is searched by interpolation;
// others, or for many rows at once, are read through. scan() reads all streams, in as many passes
// as the read buffers hold rows; visit_rows() loads each bucket once.
//
// Threads: see embedding_store.h.   Memory: the scratch in timeline.h; scan uses the read buffers.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "store/row_init.h"
#include "store/timeline.h"

namespace plimsoll {
namespace {

// A stream is read through rather than searched when that costs less than so many bytes a row.
constexpr std::int64_t kProbeBytes = 128 << 10;
constexpr int kInterpolations = 4;  // Then bisection: orders are even, so two or three suffice.

std::int64_t ordinal_of(const std::byte* record) {
  RowHeader header;
  std::memcpy(&header, record, sizeof header);
  return header.id;
}

}  // namespace

std::byte* EmbeddingStore::Timeline::staged(const Wanted& wanted) noexcept {
  return staging_.data() + wanted.slot * grid_.record_bytes;
}

bool EmbeddingStore::Timeline::copy_from_frame(const Wanted& wanted) {
  Frame* const frame =
      wanted.position >= cursor_ ? find_frame(grid_.bucket_of(wanted.position)) : nullptr;
  if (frame == nullptr || !io_->ready(*frame)) {
    return false;
  }
  const std::uint32_t entry =
      frame->index[static_cast<std::size_t>(wanted.position - frame->first)];
  if (entry != 0) {
    std::memcpy(staged(wanted), frame->bytes.data() + (std::int64_t{entry} - 1) * 8,
                static_cast<std::size_t>(grid_.record_bytes));
  }
  return true;
}

// Puts the newest version of each row into its slot of staging_. Sorts `wanted` by place.
Result<void> EmbeddingStore::Timeline::lookup(std::span<Wanted> wanted) {
  std::uint32_t slot = 0;
  for (Wanted& row : wanted) {
    row.slot = slot++;
    const bool moved = row.position < cursor_;
    const std::int64_t bucket =
        grid_.bucket_of(moved ? target_.position_of(row.ordinal) : row.position);
    row.place = stream_place(moved ? 1 - source_side_ : source_side_, bucket);
  }
  std::sort(wanted.begin(), wanted.end(), [](const Wanted& a, const Wanted& b) {
    return a.place != b.place ? a.place < b.place : a.ordinal < b.ordinal;
  });
  PLIMSOLL_TRY_VOID(io_->drain());
  while (!wanted.empty()) {
    std::size_t count = 1;
    while (count < wanted.size() && wanted[count].place == wanted[0].place) {
      ++count;
    }
    const auto group = wanted.first(count);
    wanted = wanted.subspan(count);
    const bool in_frame = copy_from_frame(group[0]);
    if (!in_frame) {
      const Stream& s = stream(group[0].place);
      const bool search = s.sorted && static_cast<std::int64_t>(count) * kProbeBytes < s.bytes;
      PLIMSOLL_TRY_VOID(search ? probe(group) : look_through(group));
      look_in_chunk(group);
    }
    for (Wanted& row : group) {
      if (in_frame) {
        Frame* const frame = find_frame(grid_.bucket_of(row.position));
        static_cast<void>(copy_from_frame(row));
        row.found = frame->index[static_cast<std::size_t>(row.position - frame->first)] != 0;
      }
      if (row.found == 0) {
        init_record(shape_, table_.init, row.ordinal, row.id, staged(row));
      }
    }
  }
  return {};
}

// Reads the extents of a stream in order, and calls rows(records, count) for each. Requires: none
// of its extents is on its way to the disk. An old extent in the place of a lost one is an error at
// the end: what `rows` was given must not be used then.
template <class Rows>
Result<void> EmbeddingStore::Timeline::each_extent(std::uint32_t place, Rows&& rows) {
  const Stream& s = stream(place);
  const std::uint64_t owner =
      extent_owner(grid_, table_.fingerprint(), key_of(static_cast<int>(place / grid_.buckets)),
                   place % grid_.buckets);
  std::uint64_t marks = 0;
  for (auto walk = space_.begin(s); walk.extent.index < s.extents; space_.next(walk)) {
    const std::uint32_t count = space_.rows(walk);
    const auto bytes =
        scratch_.first(static_cast<std::size_t>(extent_bytes(grid_.record_bytes, count)));
    PLIMSOLL_TRY_VOID(io_->read(walk.extent, bytes));
    std::uint64_t mark = 0;
    if (!extent_is_sound(grid_.record_bytes, owner, walk.extent.index, count, bytes, mark)) {
      return tl::unexpected(io_->damaged(walk.extent));
    }
    marks += mark;
    rows(bytes.data() + kExtentHeaderBytes, count);
  }
  if (marks != s.marks) {
    return tl::unexpected(io_->damaged(space_.begin(s).extent));
  }
  return {};
}

// Later versions of a row replace earlier ones.
Result<void> EmbeddingStore::Timeline::look_through(std::span<Wanted> group) {
  return each_extent(group[0].place, [&](const std::byte* rows, std::uint32_t count) {
    look_in_rows(group, rows, count);
  });
}

void EmbeddingStore::Timeline::look_in_rows(std::span<Wanted> group, const std::byte* rows,
                                            std::uint32_t count) noexcept {
  for (std::uint32_t i = 0; i < count; ++i, rows += grid_.record_bytes) {
    const std::int64_t ordinal = ordinal_of(rows);
    const auto found = std::lower_bound(
        group.begin(), group.end(), ordinal,
        [](const Wanted& row, std::int64_t value) { return std::int64_t{row.ordinal} < value; });
    for (auto at = found; at != group.end() && std::int64_t{at->ordinal} == ordinal; ++at) {
      std::memcpy(staged(*at), rows, static_cast<std::size_t>(grid_.record_bytes));
      at->found = 1;
    }
  }
}

void EmbeddingStore::Timeline::look_in_chunk(std::span<Wanted> group) noexcept {
  if (const std::uint32_t open = open_[group[0].place]; open != kNone) {
    const TimelineIo::Chunk& chunk = io_->chunk(open);
    look_in_rows(group, chunk.bytes + kExtentHeaderBytes, chunk.rows);
  }
}

Result<void> EmbeddingStore::Timeline::probe(std::span<Wanted> group) {
  const int side = static_cast<int>(group[0].place / grid_.buckets);
  for (Wanted& row : group) {
    PLIMSOLL_TRY_VOID(probe_one(row, side == source_side_ ? parent_ : source_));
  }
  return {};
}

// Where row `row` of a stream begins: its extent, and the byte within it.
std::pair<TimelineSpace::Walk, std::int64_t> EmbeddingStore::Timeline::find_row(
    const Stream& s, std::int64_t row) const noexcept {
  auto walk = space_.begin(s);
  while (walk.rows_seen + space_.rows(walk) <= row) {
    space_.next(walk);
  }
  return {walk, kExtentHeaderBytes + (row - walk.rows_seen) * grid_.record_bytes};
}

// Searches a stream whose rows stand in the order `order`. Each probe reads the blocks of one row
// and of those beside it.
Result<void> EmbeddingStore::Timeline::probe_one(Wanted& wanted, const EpochOrder& order) {
  const Stream& s = stream(wanted.place);
  const std::int64_t key = order.position_of(wanted.ordinal);
  const auto record = static_cast<std::size_t>(grid_.record_bytes);
  std::int64_t low = 0;  // The row, if there, is in [low, high).
  std::int64_t high = s.rows;
  double low_key = 0;  // Keys that enclose those of [low, high).
  double high_key = static_cast<double>(count_);
  for (int tries = 0; low < high; ++tries) {
    std::int64_t guess = low + (high - low) / 2;
    if (tries < kInterpolations) {
      const double part = (static_cast<double>(key) - low_key) / (high_key - low_key);
      guess = std::clamp(low + static_cast<std::int64_t>(part * static_cast<double>(high - low)),
                         low, high - 1);
    }
    const auto [walk, at] = find_row(s, guess);
    const std::int64_t from = at / kBlockUnit * kBlockUnit;
    const std::int64_t bytes = round_to_block(at + grid_.record_bytes) - from;
    TimelineSpace::Extent extent = walk.extent;
    space_.skip(extent, from);
    const auto block = scratch_.first(static_cast<std::size_t>(bytes));
    PLIMSOLL_TRY_VOID(io_->read(extent, block));
    // Whole rows of this extent within the block.
    const std::int64_t first =
        (std::max(from - kExtentHeaderBytes, std::int64_t{0}) + grid_.record_bytes - 1) /
        grid_.record_bytes;
    const std::int64_t last = std::min<std::int64_t>(
        (from + bytes - kExtentHeaderBytes) / grid_.record_bytes, space_.rows(walk));
    for (std::int64_t row = first; row < last; ++row) {
      const std::byte* const data =
          block.data() + kExtentHeaderBytes + row * grid_.record_bytes - from;
      const std::int64_t ordinal = ordinal_of(data);
      if (!row_is_sound({data, record}) || ordinal < 0 || ordinal >= count_) {
        return tl::unexpected(io_->damaged(walk.extent));
      }
      const std::int64_t seen = order.position_of(ordinal);
      if (seen == key) {
        std::memcpy(staged(wanted), data, record);
        wanted.found = 1;
        return {};
      }
      if (seen < key) {
        low = std::max(low, walk.rows_seen + row + 1);
        low_key = static_cast<double>(seen);
      } else {
        high = std::min(high, walk.rows_seen + row);
        high_key = static_cast<double>(seen);
        break;
      }
    }
  }
  return {};
}

// ---- scan -------------------------------------------------------------------------------------

Result<void> EmbeddingStore::Timeline::scan(const Visit& visit) {
  PLIMSOLL_TRY_VOID(sound());
  PLIMSOLL_TRY_VOID(io_->drain());
  drop_frames();
  const std::int64_t at_once =
      std::min(static_cast<std::int64_t>(io_->frame_memory().size()) / grid_.record_bytes,
               static_cast<std::int64_t>(io_->index_memory().size()));
  for (std::int64_t first = 0; first < count_; first += at_once) {
    const std::int64_t count = std::min(at_once, count_ - first);
    PLIMSOLL_TRY_VOID(scan_pass(first, count));
    PLIMSOLL_TRY_VOID(check_still_there());
    PLIMSOLL_TRY_VOID(show_rows(first, count, visit));
  }
  return {};
}

// Collects the newest versions of ordinals first, first + 1, … in the read buffers; the index
// memory says which were found.
Result<void> EmbeddingStore::Timeline::scan_pass(std::int64_t first, std::int64_t count) {
  std::fill_n(io_->index_memory().begin(), count, 0U);
  for (std::uint32_t place = 0; place < open_.size(); ++place) {
    const int side = static_cast<int>(place / grid_.buckets);
    PLIMSOLL_TRY_VOID(each_extent(place, [&](const std::byte* rows, std::uint32_t found) {
      scan_rows(side, rows, found, first, count);
    }));
    if (open_[place] != kNone) {
      const TimelineIo::Chunk& chunk = io_->chunk(open_[place]);
      scan_rows(side, chunk.bytes + kExtentHeaderBytes, chunk.rows, first, count);
    }
  }
  return {};
}

void EmbeddingStore::Timeline::scan_rows(int side, const std::byte* rows, std::uint32_t count,
                                         std::int64_t first, std::int64_t wanted) noexcept {
  const auto record = static_cast<std::size_t>(grid_.record_bytes);
  for (std::uint32_t i = 0; i < count; ++i, rows += record) {
    const std::int64_t at = ordinal_of(rows) - first;
    if (at < 0 || at >= wanted ||
        (side == source_side_ && source_.position_of(at + first) < cursor_)) {
      continue;  // Of another pass, or left behind by the cursor.
    }
    std::memcpy(io_->frame_memory().data() + at * grid_.record_bytes, rows, record);
    io_->index_memory()[static_cast<std::size_t>(at)] = 1;
  }
}

// Hands out what scan_pass() collected.
Result<void> EmbeddingStore::Timeline::show_rows(std::int64_t first, std::int64_t count,
                                                 const Visit& visit) {
  Shown piece(scratch_, shape_, visit);
  for (std::int64_t i = 0; i < count; ++i) {
    PLIMSOLL_TRY(const std::int64_t id, id_of(first + i));
    std::byte* const record = io_->frame_memory().data() + i * grid_.record_bytes;
    if (io_->index_memory()[static_cast<std::size_t>(i)] == 0) {
      init_record(shape_, table_.init, first + i, id, record);
    }
    PLIMSOLL_TRY_VOID(piece.add(id, record));
  }
  return piece.flush();
}

// Every bucket once: the source's for the rows that have not moved, the target's for those that
// have. One is read while another is shown.
Result<void> EmbeddingStore::Timeline::visit_rows(const Visit& visit) {
  PLIMSOLL_TRY_VOID(sound());
  for (std::uint32_t& open : open_) {
    if (open != kNone) {
      PLIMSOLL_TRY_VOID(keep_room());
    }
    if (open != kNone) {  // Folding may have written it.
      PLIMSOLL_TRY_VOID(flush(open));
    }
  }
  const std::int64_t begin = grid_.bucket_of(cursor_);  // Those before it are empty.
  const std::int64_t end = cursor_ == 0 ? grid_.buckets : 2 * grid_.buckets;
  const auto load = [&](std::int64_t i) -> Result<void> {
    const bool moved = i >= grid_.buckets;
    return i < end
               ? begin_load(io_->frame(static_cast<int>(i % 2)),
                            moved ? 1 - source_side_ : source_side_, moved ? i - grid_.buckets : i)
               : Result<void>{};
  };
  drop_frames();
  PLIMSOLL_TRY_VOID(load(begin));
  for (std::int64_t i = begin; i < end; ++i) {
    Frame& frame = io_->frame(static_cast<int>(i % 2));
    PLIMSOLL_TRY_VOID(io_->wait(frame));
    PLIMSOLL_TRY_VOID(check_still_there());
    PLIMSOLL_TRY_VOID(load(i + 1));
    PLIMSOLL_TRY_VOID(show_bucket(frame, visit));
  }
  drop_frames();
  return {};
}

Result<void> EmbeddingStore::Timeline::show_bucket(const Frame& frame, const Visit& visit) {
  const bool moved = frame.side != source_side_;
  Shown piece(scratch_, shape_, visit);
  for (std::int64_t i = 0; i < frame.rows && frame.first + i < count_; ++i) {
    const std::int64_t ordinal = frame.order->at(frame.first + i);
    const std::int64_t position = moved ? source_.position_of(ordinal) : frame.first + i;
    if ((position < cursor_) != moved) {
      continue;
    }
    PLIMSOLL_TRY(const std::int64_t id, id_of(ordinal));
    const std::uint32_t entry = frame.index[static_cast<std::size_t>(i)];
    if (entry == 0) {
      init_record(shape_, table_.init, ordinal, id, staging_.data());
    }
    PLIMSOLL_TRY_VOID(piece.add(
        id, entry == 0 ? staging_.data() : frame.bytes.data() + (std::int64_t{entry} - 1) * 8));
  }
  return piece.flush();
}

}  // namespace plimsoll
