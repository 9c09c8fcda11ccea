// SPDX-License-Identifier: Apache-2.0
#include "store/timeline_io.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "os/background_thread.h"
#include "os/blocked_signals.h"

namespace plimsoll {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kReadBytes = 1 << 20;  // What one thread takes of a bucket at once.

std::int64_t since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

std::uint32_t entry_of(std::int64_t offset) {
  return static_cast<std::uint32_t>(offset / 8 + 1);
}

}  // namespace

// Transfers of extents, whose pieces the kernel is told of together.
class TimelineIo::Transfers {
 public:
  Transfers(const Setup& setup, IoKind kind) : setup_(setup), kind_(kind) {}
  /// Begins with those before it when there is room for no more.
  Result<void> add(const TimelineSpace::Extent& extent, std::span<std::byte> bytes) {
    return setup_.space->pieces(
        extent, bytes, [&](std::int64_t offset, std::span<std::byte> piece) -> Result<void> {
          auto done = count_ == requests_.size() ? carry_out() : Result<void>{};
          requests_[count_++] = {
              .file = setup_.file, .offset = offset, .bytes = piece, .kind = kind_};
          return done;
        });
  }
  Result<void> carry_out() {
    return setup_.pool->run(std::span(requests_).first(std::exchange(count_, 0)));
  }

 private:
  const Setup& setup_;
  const IoKind kind_;
  std::array<IoRequest, 4 * kTogether> requests_{};
  std::size_t count_{0};
};

TimelineIo::TimelineIo(const Setup& setup, const TimelineLayout& layout, Slab& slab)
    : setup_(setup) {
  chunks_ = slab.take<Chunk>(layout.chunks);
  const auto memory = slab.take<std::byte>(layout.chunks * layout.chunk_bytes, kBlockUnit);
  for (std::size_t i = chunks_.size(); i-- > 0;) {
    chunks_[i] = Chunk{};
    chunks_[i].bytes = memory.data() + i * static_cast<std::size_t>(layout.chunk_bytes);
    chunks_[i].next = free_;
    free_ = static_cast<std::uint32_t>(i);
  }
  frame_bytes_ = slab.take<std::byte>(2 * layout.frame_bytes, kBlockUnit);
  indexes_ = slab.take<std::uint32_t>(2 * layout.shape.bucket_rows);
  for (std::size_t i = 0; i < frames_.size(); ++i) {
    const auto bytes = static_cast<std::size_t>(layout.frame_bytes);
    const auto rows = static_cast<std::size_t>(layout.shape.bucket_rows);
    frames_[i].bytes = frame_bytes_.subspan(i * bytes, bytes);
    frames_[i].index = indexes_.subspan(i * rows, rows);
  }
  const BlockedSignals blocked;
  for (int i = 0; i < std::max(setup.threads, 1); ++i) {
    threads_.emplace_back([this, i] { work(i); });
  }
}

TimelineIo::Ending::~Ending() {
  {
    MutexLock lock(io.mutex_);
    io.stopping_ = true;
  }
  io.work_came_.notify_all();
}

// ---- The owner --------------------------------------------------------------------------------

std::uint32_t TimelineIo::take() {
  MutexLock lock(mutex_);
  const std::uint32_t index = free_;
  if (index != kNone) {
    free_ = chunks_[index].next;
    chunks_[index].rows = 0;
    chunks_[index].next = kNone;
  }
  return index;
}

void TimelineIo::give_back(std::uint32_t index) {
  MutexLock lock(mutex_);
  chunks_[index].next = free_;
  free_ = index;
}

void TimelineIo::submit(std::uint32_t index) {
  {
    MutexLock lock(mutex_);
    Chunk& chunk = chunks_[index];
    chunk.next = kNone;
    (queue_ == kNone ? queue_ : chunks_[queue_last_].next) = index;
    queue_last_ = index;
    ++writing_;
    ++chunk.stream->writing;
  }
  work_came_.notify_one();
}

bool TimelineIo::wait_for_chunk() {
  const auto start = Clock::now();
  MutexLock lock(mutex_);
  while (free_ == kNone && writing_ > 0) {
    work_ended_.wait(mutex_);
  }
  counts_.stall_ns += since(start);
  return free_ != kNone;
}

void TimelineIo::settle(const TimelineSpace::Stream& stream) {
  MutexLock lock(mutex_);
  while (stream.writing > 0) {
    work_ended_.wait(mutex_);
  }
}

Result<void> TimelineIo::drain() {
  const auto start = Clock::now();
  MutexLock lock(mutex_);
  while (writing_ > 0) {
    work_ended_.wait(mutex_);
  }
  counts_.stall_ns += since(start);
  if (error_) {
    return tl::unexpected(*error_);
  }
  return {};
}

Result<void> TimelineIo::failed() {
  MutexLock lock(mutex_);
  if (error_) {
    return tl::unexpected(*error_);
  }
  return {};
}

void TimelineIo::start(Frame& frame) {
  std::fill_n(frame.index.begin(), frame.rows, 0U);
  {
    MutexLock lock(mutex_);
    frame.state = Frame::State::kLoading;
    frame.walk = setup_.space->begin(*frame.stream);
    frame.readers = 0;
    frame.marks = 0;
    frame.error.reset();
    if (frame.stream->extents == 0 && frame.stream->writing == 0) {
      frame.state = Frame::State::kReady;
    }
  }
  work_came_.notify_all();
}

Result<void> TimelineIo::wait(Frame& frame) {
  const auto start = Clock::now();
  MutexLock lock(mutex_);
  while (frame.state == Frame::State::kLoading) {
    work_ended_.wait(mutex_);
  }
  counts_.stall_ns += since(start);
  if (frame.state == Frame::State::kFailed) {
    frame.state = Frame::State::kEmpty;
    frame.bucket = -1;
    return tl::unexpected(error_ ? *error_ : *frame.error);  // What was not written is not there.
  }
  return {};
}

void TimelineIo::drop(Frame& frame) {
  static_cast<void>(wait(frame));  // What failed to load is dropped all the same.
  const MutexLock lock(mutex_);
  frame.state = Frame::State::kEmpty;
  frame.bucket = -1;
}

bool TimelineIo::ready(const Frame& frame) {
  MutexLock lock(mutex_);
  return frame.state == Frame::State::kReady;
}

TimelineIo::Counts TimelineIo::counts() {
  MutexLock lock(mutex_);
  return counts_;
}

Result<void> TimelineIo::read(const TimelineSpace::Extent& from, std::span<std::byte> bytes) {
  Transfers reads(setup_, IoKind::kRead);
  PLIMSOLL_TRY_VOID(reads.add(from, bytes));
  PLIMSOLL_TRY_VOID(reads.carry_out());
  MutexLock lock(mutex_);
  counts_.bytes_read += static_cast<std::int64_t>(bytes.size());
  return {};
}

Error TimelineIo::damaged(const TimelineSpace::Extent& extent) const {
  return make_error(
      ErrorCode::kCorrupt,
      fmt::format("{}: extent {} of its stream, in segment {} at byte {}, fails its checksum",
                  setup_.file->path().string(), extent.index, extent.segment,
                  extent.segment * setup_.shape.segment_bytes + extent.at),
      "name another step to open (at_step), or restore the file");
}

// ---- The threads ------------------------------------------------------------------------------

void TimelineIo::work(int index) {
  enter_background(fmt::format("pl-rows-{}", index));
  const bool reads_first = index % 2 == 1;
  MutexLock lock(mutex_);
  while (!stopping_) {
    Frame* readable = nullptr;
    for (Frame& frame : frames_) {
      if (can_read(frame)) {
        readable = &frame;
        break;
      }
    }
    if (readable != nullptr && (reads_first || queue_ == kNone)) {
      read_some(*readable);
    } else if (queue_ != kNone) {
      write_some();
    } else {
      work_came_.wait(mutex_);
    }
  }
}

void TimelineIo::write_some() {
  std::array<std::uint32_t, kTogether> taken{};
  std::array<std::uint64_t, kTogether> marks{};
  std::size_t count = 0;
  for (; queue_ != kNone && count < kTogether; ++count) {
    taken[count] = queue_;
    queue_ = chunks_[queue_].next;
  }
  const auto chunks = std::span(taken).first(count);
  const bool skip = error_.has_value();  // After a failed write nothing more is written.
  Result<void> done;
  if (!skip) {
    mutex_.unlock();
    done = write_chunks(chunks, marks);
    mutex_.lock();
  }
  if (!done && !error_) {
    error_ = std::move(done).error();
  }
  bool readable = false;  // All that a bucket to be read waited for.
  for (std::size_t i = 0; i < count; ++i) {
    Chunk& chunk = chunks_[chunks[i]];
    chunk.stream->marks += marks[i];
    --chunk.stream->writing;
    --writing_;
    ++counts_.extents_written;
    counts_.bytes_written += extent_bytes(setup_.shape.record_bytes, chunk.rows);
    chunk.next = free_;
    free_ = chunks[i];
    for (const Frame& frame : frames_) {
      readable = readable || (can_read(frame) && frame.stream == chunk.stream);
    }
  }
  work_ended_.notify_all();
  if (readable) {
    work_came_.notify_all();
  }
}

Result<void> TimelineIo::write_chunks(std::span<const std::uint32_t> taken,
                                      std::span<std::uint64_t> marks) {
  Transfers writes(setup_, IoKind::kWrite);
  for (std::size_t i = 0; i < taken.size(); ++i) {
    Chunk& chunk = chunks_[taken[i]];
    const std::span<std::byte> bytes(
        chunk.bytes, static_cast<std::size_t>(extent_bytes(setup_.shape.record_bytes, chunk.rows)));
    const std::uint32_t crc =
        seal_extent(setup_.shape.record_bytes, chunk.owner, chunk.extent.index, chunk.rows, bytes);
    marks[i] = extent_mark(chunk.extent.index, crc);
    PLIMSOLL_TRY_VOID(writes.add(chunk.extent, bytes));
  }
  return writes.carry_out();
}

bool TimelineIo::can_read(const Frame& frame) const noexcept {
  return frame.state == Frame::State::kLoading && frame.stream->writing == 0 && !frame.error &&
         frame.walk.extent.index < frame.stream->extents;
}

// Takes the next extents of a bucket, reads and checks them; whoever comes last ends the load.
void TimelineIo::read_some(Frame& frame) {
  const TimelineSpace::Stream& stream = *frame.stream;
  const TimelineSpace::Walk from = frame.walk;
  const bool squeezed = stream.bytes > static_cast<std::int64_t>(frame.bytes.size());
  std::uint32_t extents = 0;
  while (frame.walk.extent.index < stream.extents &&
         (squeezed || extents == 0 || frame.walk.offset - from.offset < kReadBytes)) {
    setup_.space->next(frame.walk);
    ++extents;
  }
  const std::int64_t bytes = frame.walk.offset - from.offset;
  ++frame.readers;
  mutex_.unlock();
  auto marks = squeezed ? load_squeezed(frame) : load_part(frame, from, extents, bytes);
  mutex_.lock();
  --frame.readers;
  counts_.extents_read += extents;
  if (marks) {
    frame.marks += *marks;
  } else if (!frame.error) {
    frame.error = std::move(marks).error();
  }
  if (frame.readers > 0 || (!frame.error && frame.walk.extent.index < stream.extents)) {
    return;
  }
  if (!frame.error && frame.marks != stream.marks) {
    frame.error = damaged(setup_.space->begin(stream).extent);
  }
  frame.state = frame.error ? Frame::State::kFailed : Frame::State::kReady;
  work_ended_.notify_all();
}

// Enters `rows` rows that lie at `at` of the frame. Later rows of a stream lie further on.
Result<void> TimelineIo::place_rows(Frame& frame, std::int64_t at, std::uint32_t rows,
                                    const TimelineSpace::Extent& extent) {
  const std::byte* const data = frame.bytes.data();
  for (std::uint32_t row = 0; row < rows; ++row, at += setup_.shape.record_bytes) {
    RowHeader header;
    std::memcpy(&header, data + at, sizeof header);
    if (static_cast<std::uint64_t>(header.id) >= static_cast<std::uint64_t>(setup_.shape.rows)) {
      return tl::unexpected(damaged(extent));
    }
    const std::int64_t slot = frame.order->position_of(header.id) - frame.first;
    if (slot < 0 || slot >= frame.rows) {
      return tl::unexpected(damaged(extent));
    }
    std::atomic_ref<std::uint32_t> entry(frame.index[static_cast<std::size_t>(slot)]);
    const std::uint32_t mine = entry_of(at);
    std::uint32_t seen = entry.load(std::memory_order_relaxed);
    while (seen < mine && !entry.compare_exchange_weak(seen, mine, std::memory_order_relaxed)) {
    }
  }
  return {};
}

Result<std::uint64_t> TimelineIo::load_part(Frame& frame, TimelineSpace::Walk from,
                                            std::uint32_t extents, std::int64_t bytes) {
  const auto target =
      frame.bytes.subspan(static_cast<std::size_t>(from.offset), static_cast<std::size_t>(bytes));
  PLIMSOLL_TRY_VOID(read(from.extent, target));
  std::uint64_t marks = 0;
  for (; extents > 0; --extents) {
    const std::uint32_t rows = setup_.space->rows(from);
    const std::int64_t size = extent_bytes(setup_.shape.record_bytes, rows);
    std::uint64_t mark = 0;
    if (!extent_is_sound(setup_.shape.record_bytes, frame.owner, from.extent.index, rows,
                         frame.bytes.subspan(static_cast<std::size_t>(from.offset),
                                             static_cast<std::size_t>(size)),
                         mark)) {
      return tl::unexpected(damaged(from.extent));
    }
    marks += mark;
    PLIMSOLL_TRY_VOID(place_rows(frame, from.offset + kExtentHeaderBytes, rows, from.extent));
    setup_.space->next(from);
  }
  return marks;
}

// A stream with many short extents or old versions does not fit as it is: whenever the frame is
// full, the rows that still count move to its front.
Result<std::uint64_t> TimelineIo::load_squeezed(Frame& frame) {
  const std::int64_t record = setup_.shape.record_bytes;
  std::uint64_t marks = 0;
  std::int64_t end = 0;
  auto walk = setup_.space->begin(*frame.stream);
  for (; walk.extent.index < frame.stream->extents; setup_.space->next(walk)) {
    const std::uint32_t rows = setup_.space->rows(walk);
    const std::int64_t size = extent_bytes(record, rows);
    if (end + size > static_cast<std::int64_t>(frame.bytes.size())) {
      end = round_to_block(squeeze(frame, end));
    }
    const auto bytes =
        frame.bytes.subspan(static_cast<std::size_t>(end), static_cast<std::size_t>(size));
    PLIMSOLL_TRY_VOID(read(walk.extent, bytes));
    std::uint64_t mark = 0;
    if (!extent_is_sound(record, frame.owner, walk.extent.index, rows, bytes, mark)) {
      return tl::unexpected(damaged(walk.extent));
    }
    marks += mark;
    PLIMSOLL_TRY_VOID(place_rows(frame, end + kExtentHeaderBytes, rows, walk.extent));
    end += size;
  }
  return marks;
}

// Moves the rows that the index names to the front of the frame; returns where they end.
std::int64_t TimelineIo::squeeze(Frame& frame, std::int64_t end) {
  const std::int64_t record = setup_.shape.record_bytes;
  std::int64_t to = 0;
  for (std::int64_t at = 0; at + record <= end;) {
    RowHeader header;
    std::memcpy(&header, frame.bytes.data() + at, sizeof header);
    const auto id = static_cast<std::uint64_t>(header.id);
    const std::int64_t slot = id < static_cast<std::uint64_t>(setup_.shape.rows)
                                  ? frame.order->position_of(header.id) - frame.first
                                  : -1;
    const bool lives = slot >= 0 && slot < frame.rows &&
                       frame.index[static_cast<std::size_t>(slot)] == entry_of(at);
    if (!lives) {
      at += 8;  // A row that was replaced, a header, zeros: rows begin at multiples of 8.
      continue;
    }
    std::memmove(frame.bytes.data() + to, frame.bytes.data() + at,
                 static_cast<std::size_t>(record));
    frame.index[static_cast<std::size_t>(slot)] = entry_of(to);
    to += record;
    at += record;
  }
  return to;
}

}  // namespace plimsoll
