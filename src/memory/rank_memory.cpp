// SPDX-License-Identifier: Apache-2.0
#include "memory/rank_memory.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <unistd.h>

#include "base/check.h"
#include "base/mutex.h"
#include "base/round.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kRowsAligned = 64;
constexpr std::int64_t kRowsKept = 32 << 20;  // What is less is not given back.

// Behind the ids.
std::int64_t floats_at(const RankRowsShape& shape) noexcept {
  return round_up(8 * shape.count, kRowsAligned);
}

std::int64_t bytes_of(const RankRowsShape& shape) noexcept {
  return round_up(floats_at(shape) + 4 * shape.count * shape.dim, kRowsAligned);
}

}  // namespace

// Which parts of this rank's rows are in use.
class RankMemory::Places {
 public:
  // Where the first gap of `bytes` begins, which may lie behind the end of the file.
  std::int64_t gap(std::int64_t bytes) const {
    const MutexLock lock(mutex_);
    std::int64_t begin = 0;
    for (const auto& [first, end] : taken_) {
      if (begin + bytes <= first) {
        break;
      }
      begin = end;
    }
    return begin;
  }
  bool empty() const {
    const MutexLock lock(mutex_);
    return taken_.empty();
  }
  void take(std::int64_t begin, std::int64_t bytes) {
    const MutexLock lock(mutex_);
    taken_.emplace(begin, begin + bytes);
  }
  void free(std::int64_t begin) {
    const MutexLock lock(mutex_);
    taken_.erase(begin);
  }

 private:
  mutable Mutex mutex_;
  std::map<std::int64_t, std::int64_t> taken_ PLIMSOLL_GUARDED_BY(mutex_);  // From, and to.
};

class RankMemory::Place {
 public:
  Place(std::shared_ptr<Places> places, std::int64_t begin, std::int64_t bytes)
      : places_(std::move(places)), begin_(begin) {
    places_->take(begin, bytes);
  }
  ~Place() {
    if (!mark_.forked()) {  // There another thread of the parent's may have had the lock.
      places_->free(begin_);
    }
  }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

 private:
  const std::shared_ptr<Places> places_;  // Shared: rows outlive the RankMemory.
  const std::int64_t begin_;
  const ForkMark mark_;
};

std::span<std::int64_t> RankRows::ids() const noexcept {
  return {reinterpret_cast<std::int64_t*>(pages_->data() + begin_),
          static_cast<std::size_t>(shape_.count)};
}

std::span<float> RankRows::rows() const noexcept {
  return {reinterpret_cast<float*>(pages_->data() + begin_ + floats_at(shape_)),
          static_cast<std::size_t>(shape_.count * shape_.dim)};
}

RankMemory::RankMemory(const RankWords& words, RankFile own)
    : words_(words),
      room_begin_(RankBoard::bytes_of(words)),
      rows_begin_(room_begin_ + kRankRoomBytes),
      places_(std::make_shared<Places>()) {
  files_.push_back(std::move(own));
}

Result<RankMemory> RankMemory::create(const RankWords& words) {
  if (words.rank < 0 || words.rank >= words.count || words.bytes < 0) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("rank {} of {}, with words of {} bytes",
                                                         words.rank, words.count, words.bytes));
  }
  PLIMSOLL_TRY(RankFile own, RankFile::create(RankBoard::bytes_of(words) + kRankRoomBytes));
  return RankMemory(words, std::move(own));
}

RankMemory::~RankMemory() {
  close();
}

std::string RankMemory::address() const {
  PLIMSOLL_CHECK(!files_.empty(), "the address of memory that was closed");
  return files_[board_ == nullptr ? 0 : static_cast<std::size_t>(words_.rank)].address();
}

Result<void> RankMemory::open(std::span<const std::string> addresses) {
  if (std::ssize(addresses) != words_.count || board_ != nullptr || files_.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{} addresses for {} ranks, or opened or closed before",
                            addresses.size(), words_.count));
  }
  std::vector<RankFile> files(addresses.size());
  std::vector<int> pids;
  for (int rank = 0; rank < words_.count; ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    if (rank != words_.rank) {
      PLIMSOLL_TRY(files[at], RankFile::open(addresses[at], rank));
    }
    pids.push_back(rank == words_.rank ? files_.front().pid() : files[at].pid());
  }
  const RankFile& first = words_.rank == 0 ? files_.front() : files.front();
  PLIMSOLL_TRY(RankPages board, first.map(0, room_begin_));
  board_ = std::make_unique<RankBoard>(std::move(board), words_, std::move(pids));
  files[static_cast<std::size_t>(words_.rank)] = std::move(files_.front());
  files_ = std::move(files);
  rooms_.resize(files_.size());
  rows_.resize(files_.size());
  return {};
}

Result<void> RankMemory::check() const {
  if (board_ == nullptr || mark_.forked()) {
    return fail(ErrorCode::kInvalidArgument, mark_.forked()
                                                 ? "memory of ranks: used in a forked child"
                                                 : "memory of ranks: not open");
  }
  return {};
}

Result<void> RankMemory::meet(const WaitOn& wait_on) {
  PLIMSOLL_TRY_VOID(check());
  return board_->meet(Meeting::kRooms, wait_on);
}

Result<std::span<const std::byte>> RankMemory::word(std::span<const std::byte> own,
                                                    const WaitOn& wait_on) {
  PLIMSOLL_TRY_VOID(check());
  if (std::ssize(own) != words_.bytes) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("a word of {} bytes, not {}", own.size(), words_.bytes));
  }
  return board_->word(own, wait_on);
}

Result<void> RankMemory::lease(Lease& held, std::int64_t bytes, Governor governor) {
  if (!governor.valid()) {
    return {};
  }
  if (held.bytes() == 0) {
    PLIMSOLL_TRY(held, governor.reserve(Tag::kOther, 0));
  }
  return held.grow(bytes);
}

Result<void> RankMemory::grow_room(std::int64_t bytes, Governor governor) {
  PLIMSOLL_CHECK(bytes <= kRankRoomBytes, "a room is that large at most");
  if (bytes > room_bytes_) {
    PLIMSOLL_TRY_VOID(lease(room_lease_, bytes, std::move(governor)));
    room_bytes_ = bytes;
  }
  return {};
}

Result<std::shared_ptr<const RankPages>> RankMemory::room(int rank) {
  PLIMSOLL_TRY_VOID(check());
  PLIMSOLL_CHECK(rank >= 0 && rank < words_.count, "the room of a rank that is not there");
  auto& room = rooms_[static_cast<std::size_t>(rank)];
  if (room == nullptr) {
    PLIMSOLL_TRY(RankPages pages,
                 files_[static_cast<std::size_t>(rank)].map(room_begin_, kRankRoomBytes));
    room = std::make_shared<const RankPages>(std::move(pages));
  }
  return room;
}

Result<void> RankMemory::resize(std::int64_t bytes, Governor governor) {
  const std::int64_t whole = round_up(bytes, ::sysconf(_SC_PAGESIZE));
  const std::int64_t leased = rows_lease_.bytes();
  if (whole > rows_bytes_) {
    PLIMSOLL_TRY_VOID(lease(rows_lease_, whole, std::move(governor)));
  }
  auto resized = files_[static_cast<std::size_t>(words_.rank)].resize(rows_begin_ + whole);
  rows_lease_.shrink(resized ? whole : leased);
  if (resized) {
    rows_bytes_ = whole;
  }
  return resized;
}

Result<std::shared_ptr<const RankPages>> RankMemory::rows_of(int rank, std::int64_t needed) {
  auto& rows = rows_[static_cast<std::size_t>(rank)];
  if (rows == nullptr || rows->bytes() < needed) {
    const RankFile& file = files_[static_cast<std::size_t>(rank)];
    PLIMSOLL_TRY(const std::int64_t bytes, file.bytes());
    if (bytes - rows_begin_ < needed) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("rank {} has no {} bytes of rows", rank, needed));
    }
    PLIMSOLL_TRY(RankPages pages, file.map(rows_begin_, bytes - rows_begin_));
    rows = std::make_shared<const RankPages>(std::move(pages));
  }
  return rows;
}

Result<RankRows> RankMemory::take(const RankRowsShape& shape, Governor governor) {
  PLIMSOLL_TRY_VOID(check());
  const std::int64_t bytes = std::max(bytes_of(shape), kRowsAligned);
  if (places_->empty() && bytes < rows_bytes_ / 4 && rows_bytes_ > kRowsKept) {
    PLIMSOLL_TRY_VOID(resize(std::max(bytes, kRowsKept), governor));
  }
  RankRows made;
  made.begin_ = places_->gap(bytes);
  made.shape_ = shape;
  const std::int64_t end = made.begin_ + bytes;
  if (end > rows_bytes_) {
    // What grows by little each time would be mapped anew each time.
    PLIMSOLL_TRY_VOID(resize(end + end / 8, std::move(governor)));
  }
  PLIMSOLL_TRY(made.pages_, rows_of(words_.rank, end));
  made.place_ = std::make_shared<Place>(places_, made.begin_, bytes);
  return made;
}

Result<RankRows> RankMemory::rows(int rank, std::int64_t begin, const RankRowsShape& shape) {
  PLIMSOLL_TRY_VOID(check());
  PLIMSOLL_CHECK(rank >= 0 && rank < words_.count && begin >= 0 && begin % kRowsAligned == 0,
                 "rows where none begin");
  RankRows made;
  made.begin_ = begin;
  made.shape_ = shape;
  PLIMSOLL_TRY(made.pages_, rows_of(rank, begin + std::max(bytes_of(shape), kRowsAligned)));
  return made;
}

void RankMemory::close() noexcept {
  if (mark_.forked()) {
    return;  // All of it is the parent's.
  }
  if (board_ != nullptr) {
    board_->leave();
    board_.reset();
  }
  rooms_.clear();
  rows_.clear();
  files_.clear();
  room_lease_ = Lease();
  rows_lease_ = Lease();
}

}  // namespace plimsoll
