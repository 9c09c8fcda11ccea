// SPDX-License-Identifier: Apache-2.0
//
// TimelineIo: the threads that write full chunks and read whole buckets of a sample-order table.
//
// A chunk is a write buffer laid out as an extent: submitted once, sealed and written by one of the
// threads, which takes several, then free again. A frame is a read buffer that holds one bucket's
// stream as it is on disk, with an index from position to row; its extents are read and checked by
// all threads at once, and only after the stream's own writes have ended. Later rows of a stream
// win.
//
//   a chunk is   free → the owner's → queued → being written → free
//   a frame is   empty → loading → ready, or failed (the owner may load it again)
//
// Reading order: timeline_format.h, timeline_space.h, this file, timeline.h.
//
// Threads: take() … drop() for the owner; one mutex, never held across the disk or checksums.
// Memory:  chunks and frames from the slab; threads × stack, of which transfers take 20 KiB.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "memory/slab.h"
#include "os/file.h"
#include "os/io_pool.h"
#include "plimsoll/embedding_store.h"
#include "store/epoch_order.h"
#include "store/timeline_layout.h"
#include "store/timeline_space.h"

namespace plimsoll {

class TimelineIo {
 public:
  static constexpr std::uint32_t kNone = 0xFFFFFFFFU;

  struct Chunk {
    std::byte* bytes{nullptr};
    TimelineSpace::Stream* stream{nullptr};
    std::uint64_t owner{0};
    TimelineSpace::Extent extent{};
    std::uint32_t rows{0};
    std::uint32_t place{0};  // side × buckets + bucket: where its owner keeps it while it is open.
    std::uint32_t next{kNone};
  };
  struct Frame {
    enum class State : std::uint8_t { kEmpty, kLoading, kReady, kFailed };
    // Set by the owner, and read by the threads while loading.
    std::int64_t bucket{-1};
    int side{0};
    std::uint64_t owner{0};
    std::int64_t first{0};  // Position of the bucket's first row.
    std::int64_t rows{0};   // Positions in it.
    TimelineSpace::Stream* stream{nullptr};
    const EpochOrder* order{nullptr};
    std::span<std::byte> bytes{};
    std::span<std::uint32_t> index{};  // By position: offset / 8 + 1 of its row; 0: there is none.
    // Guarded by the mutex while loading.
    State state{State::kEmpty};
    TimelineSpace::Walk walk{};  // The first extent that nobody has taken.
    int readers{0};
    std::uint64_t marks{0};
    std::optional<Error> error{};
  };
  struct Setup {
    TimelineShape shape{};
    std::uint64_t fingerprint{0};
    File* file{nullptr};
    IoPool* pool{nullptr};  // Borrowed; with no thread, nothing is written at once.
    TimelineSpace* space{nullptr};
    int threads{1};
  };
  struct Counts {
    std::int64_t extents_read{0};
    std::int64_t extents_written{0};
    std::int64_t bytes_read{0};
    std::int64_t bytes_written{0};
    std::int64_t stall_ns{0};
  };

  TimelineIo(const Setup& setup, const TimelineLayout& layout, Slab& slab);
  ~TimelineIo() = default;
  TimelineIo(const TimelineIo&) = delete;
  TimelineIo& operator=(const TimelineIo&) = delete;

  // ---- Writing ----

  /// A free chunk, or kNone.
  std::uint32_t take();
  [[nodiscard]] Chunk& chunk(std::uint32_t index) noexcept { return chunks_[index]; }
  /// Gives a chunk with at least one row to the disk. Its stream, owner, extent and rows are set.
  void submit(std::uint32_t index);
  /// Gives a chunk back unwritten.
  void give_back(std::uint32_t index);
  /// Waits until a chunk is free; false when none is on its way to be.
  bool wait_for_chunk();
  /// Waits for the writes of one stream.
  void settle(const TimelineSpace::Stream& stream);
  /// Waits for all writes. Errors: the first that failed; it stays.
  Result<void> drain();
  /// The first write that failed. Nothing is written after it.
  [[nodiscard]] Result<void> failed();

  // ---- Reading ----

  [[nodiscard]] Frame& frame(int index) noexcept {
    return frames_[static_cast<std::size_t>(index)];
  }
  /// Begins to load the bucket that `frame` names. Requires: it is not loading.
  void start(Frame& frame);
  /// Waits for it. Errors: kCorrupt, kIo; the frame is empty then.
  Result<void> wait(Frame& frame);
  /// Waits for it if it is loading, and empties it.
  void drop(Frame& frame);
  /// Whether its load has ended.
  bool ready(const Frame& frame);

  /// Reads `bytes` of a stream, on the calling thread. Errors: kCorrupt, kIo.
  Result<void> read(const TimelineSpace::Extent& from, std::span<std::byte> bytes);
  /// The error of an extent that is not as it was written.
  [[nodiscard]] Error damaged(const TimelineSpace::Extent& extent) const;

  /// The read buffers as plain memory. Requires: both frames are empty.
  [[nodiscard]] std::span<std::byte> frame_memory() noexcept { return frame_bytes_; }
  [[nodiscard]] std::span<std::uint32_t> index_memory() noexcept { return indexes_; }
  [[nodiscard]] Counts counts();

 private:
  void work(int index);
  static constexpr std::size_t kTogether = 16;  // Chunks that one thread writes at once.
  class Transfers;
  void write_some() PLIMSOLL_REQUIRES(mutex_);
  bool can_read(const Frame& frame) const noexcept PLIMSOLL_REQUIRES(mutex_);
  void read_some(Frame& frame) PLIMSOLL_REQUIRES(mutex_);
  Result<void> write_chunks(std::span<const std::uint32_t> taken, std::span<std::uint64_t> marks);
  Result<std::uint64_t> load_part(Frame& frame, TimelineSpace::Walk from, std::uint32_t extents,
                                  std::int64_t bytes);
  Result<std::uint64_t> load_squeezed(Frame& frame);
  Result<void> place_rows(Frame& frame, std::int64_t at, std::uint32_t rows,
                          const TimelineSpace::Extent& extent);
  std::int64_t squeeze(Frame& frame, std::int64_t end);

  const Setup setup_;
  std::span<std::byte> frame_bytes_{};
  std::span<std::uint32_t> indexes_{};
  std::span<Chunk> chunks_{};
  std::array<Frame, 2> frames_{};

  Mutex mutex_;
  CondVar work_came_;
  CondVar work_ended_;
  bool stopping_ PLIMSOLL_GUARDED_BY(mutex_){false};
  std::uint32_t free_ PLIMSOLL_GUARDED_BY(mutex_){kNone};   // A list through Chunk::next.
  std::uint32_t queue_ PLIMSOLL_GUARDED_BY(mutex_){kNone};  // First of those to be written.
  std::uint32_t queue_last_ PLIMSOLL_GUARDED_BY(mutex_){kNone};
  std::int64_t writing_ PLIMSOLL_GUARDED_BY(mutex_){0};  // Queued or being written.
  std::optional<Error> error_ PLIMSOLL_GUARDED_BY(mutex_){};
  Counts counts_ PLIMSOLL_GUARDED_BY(mutex_){};
  std::vector<std::jthread> threads_;  // Joined before what is above is destroyed.

  // Destroyed first, also when not every thread could be started: tells those there are to end.
  struct Ending {
    TimelineIo& io;
    ~Ending();
  };
  Ending ending_{*this};
};

}  // namespace plimsoll
