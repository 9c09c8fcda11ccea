// SPDX-License-Identifier: Apache-2.0
#include "os/rank_board.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <utility>

#include <fmt/format.h>
#include <unistd.h>

#include "base/check.h"
#include "base/round.h"
#include "os/meeting.h"
#include "os/process_tree.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kLeftAt = 64;  // Behind the counters.
constexpr std::int64_t kWordsAligned = 64;
constexpr std::int64_t kLookMs = 100;  // How long a rank that has ended may be waited for.

std::int64_t words_at(const RankWords& words) noexcept {
  return round_up(kLeftAt + words.count, kWordsAligned);
}

}  // namespace

std::int64_t RankBoard::bytes_of(const RankWords& words) noexcept {
  return round_up(words_at(words) + 2 * words.count * words.bytes, ::sysconf(_SC_PAGESIZE));
}

RankBoard::RankBoard(RankPages pages, const RankWords& words, std::vector<int> pids,
                     std::uint32_t met)
    : pages_(std::move(pages)), words_(words), pids_(std::move(pids)), all_{met, met} {
  PLIMSOLL_CHECK(pages_.bytes() >= bytes_of(words) && std::ssize(pids_) == words.count,
                 "a board for other ranks");
  for (const int pid : pids_) {
    began_.push_back(process_began(pid));
  }
}

std::uint32_t& RankBoard::counter(Meeting which) const noexcept {
  return reinterpret_cast<std::uint32_t*>(pages_.data())[static_cast<std::size_t>(which)];
}

std::uint8_t& RankBoard::left(int rank) const noexcept {
  return reinterpret_cast<std::uint8_t*>(pages_.data())[kLeftAt + rank];
}

std::optional<int> RankBoard::gone() const {
  for (int rank = 0; rank < words_.count; ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    const std::optional<std::int64_t> began = process_began(pids_[at]);
    if (std::atomic_ref(left(rank)).load(std::memory_order_acquire) != 0 || !began ||
        began != began_[at]) {
      return rank;
    }
  }
  return std::nullopt;
}

Result<void> RankBoard::meet(Meeting which, const WaitOn& wait_on) {
  std::uint32_t& everybody = all_[static_cast<std::size_t>(which)];
  everybody += static_cast<std::uint32_t>(words_.count);
  std::uint32_t& come_so_far = counter(which);
  come(come_so_far, everybody);
  const auto began = std::chrono::steady_clock::now();
  while (!met(come_so_far, everybody, kLookMs)) {
    if (const std::optional<int> rank = gone()) {
      if (met(come_so_far, everybody, 0)) {
        return {};  // It came before.
      }
      return fail(ErrorCode::kIo, fmt::format("rank {} has left", *rank));
    }
    if (wait_on && !wait_on()) {
      return fail_io(EINTR, "waiting for other ranks");
    }
    if (words_.longest.count() > 0 && std::chrono::steady_clock::now() - began > words_.longest) {
      return fail(ErrorCode::kIo,
                  fmt::format("a rank has not come for {} s", words_.longest.count()));
    }
  }
  return {};
}

Result<std::span<const std::byte>> RankBoard::word(std::span<const std::byte> own,
                                                   const WaitOn& wait_on) {
  PLIMSOLL_CHECK(std::ssize(own) == words_.bytes, "a word of another size");
  turn_ ^= 1;  // Others may still read what was said before.
  std::byte* const words = pages_.data() + words_at(words_) + turn_ * words_.count * words_.bytes;
  std::copy(own.begin(), own.end(), words + words_.rank * words_.bytes);
  PLIMSOLL_TRY_VOID(meet(Meeting::kWords, wait_on));
  return std::span<const std::byte>(words, static_cast<std::size_t>(words_.count * words_.bytes));
}

void RankBoard::leave() noexcept {
  std::atomic_ref(left(words_.rank)).store(1, std::memory_order_release);
  wake(counter(Meeting::kRooms));
  wake(counter(Meeting::kWords));
}

}  // namespace plimsoll
