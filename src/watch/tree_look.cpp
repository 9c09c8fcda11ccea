// SPDX-License-Identifier: Apache-2.0
#include "watch/tree_look.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include <fmt/format.h>
#include <unistd.h>

#include "base/check.h"
#include "os/clock.h"
#include "os/mappings.h"

namespace plimsoll {
namespace {

// Shares of a core, in readings of the same length: one of so many. Together they are 1 %.
constexpr std::int64_t kFinding = 4 * Pace::kCalm;
constexpr std::int64_t kSharing = 10 * Pace::kCalm;
constexpr std::int64_t kSizing = 4 * Pace::kCalm;
constexpr std::int64_t kClosing = 5 * Pace::kCalm / 2;
// Where a process looks at itself.
constexpr std::int64_t kOwnFinding = 32 * Pace::kCalm;
constexpr std::int64_t kOwnSharing = 4 * Pace::kCalm;
constexpr std::int64_t kAloneSharing = 50 * Pace::kCalm;
constexpr std::int64_t kOwnClosing = 4 * Pace::kCalm;
constexpr std::int64_t kOwnClosingNs = 250'000'000;  // The least pause.

}  // namespace

TreeLooker::TreeLooker(int root, Root counted)
    : root_(root),
      counted_(counted == Root::kCounted),
      own_(counted_ && root == ::getpid()),
      times_(own_ ? 2 : 1),
      began_ns_(now_ns()),
      root_began_(process_began(root).value_or(-1)),
      closing_(own_ ? kOwnClosingNs : 0) {}

Result<TreeLook> TreeLooker::look(std::int64_t close_bytes) {
  if (root_ != ::getpid() && process_began(root_).value_or(-2) != root_began_) {
    return fail(ErrorCode::kNotFound, fmt::format("process {} has ended", root_),
                "watch a process that runs");
  }
  if (const std::int64_t now = now_ns();
      finding_.due(now, own_ ? kOwnFinding : kFinding) || stale(now)) {
    Result<void> found;
    finding_.time([&] { found = find(); });
    PLIMSOLL_TRY_VOID(found);
  }
  sizing_.time_warm([&] { size(); });
  share();
  const std::int64_t now = now_ns();
  now_.close = closing_.due(now, own_ ? kOwnClosing : kClosing) || hurried(now, close_bytes);
  if (now_.close) {
    closing_.time([&] { look_closely(); });
  }
  return now_;
}

std::int64_t TreeLooker::next_ns() const noexcept {
  return sizing_.ended_ns() == INT64_MIN ? began_ns_ : sizing_.next_ns(times_ * kSizing);
}

bool TreeLooker::affords(const Pace& pace, std::int64_t now) const noexcept {
  return spent_ns() + pace.took_ns() <=
         (now - began_ns_) / (times_ * Pace::kCalm) + std::chrono::nanoseconds(kAdvance).count();
}

// Whether processes that began since the last search should not wait any longer.
bool TreeLooker::stale(std::int64_t now) const noexcept {
  return finding_.due(now, Pace::kCalm) && affords(finding_, now) &&
         now - finding_.ended_ns() >= std::chrono::nanoseconds(kSearched).count();
}

// Whether a close look should not wait.
bool TreeLooker::hurried(std::int64_t now, std::int64_t close_bytes) const noexcept {
  const bool wanted =
      changed_ || (now_.tree.unbacked() > close_bytes && now_.bound_bytes > close_bytes);
  return wanted && closing_.due(now, Pace::kHurried) && affords(closing_, now);
}

Result<void> TreeLooker::find() {
  PLIMSOLL_TRY(auto found, descendants(root_));
  if (counted_) {
    found.insert(found.begin(), root_);
  }
  changed_ = changed_ || std::ranges::any_of(found, [&](int pid) {
               return std::ranges::find(pids_, pid) == pids_.end();
             });
  pids_ = std::move(found);
  return {};
}

void TreeLooker::size() {
  now_.tree = at_look_;
  now_.bound_bytes = 0;
  now_.tree.resident_peak = at_look_.resident_peak;
  std::vector<bool> lives(known_.size(), false);
  for (const int pid : pids_) {
    const auto now = read_resident(pid);
    if (!now) {
      continue;  // It has ended.
    }
    now_.bound_bytes += now->anonymous + now->shared;
    now_.tree.resident_peak = std::max(now_.tree.resident_peak, now->peak);
    if (pid == root_) {
      now_.root = *now;
    }
    const auto at = std::ranges::find(known_, pid, &Known::pid);
    if (at != known_.end()) {
      const auto named = static_cast<std::size_t>(at - known_.begin());
      lives[named] = true;
      add_growth(named, *now);
    }
  }
  at_look_.resident_peak = now_.tree.resident_peak;
  // Who has ended took along what was its own; what it shared, the others have.
  for (std::size_t named = lives.size(); named > 0; --named) {
    if (!lives[named - 1]) {
      const auto gone = now_.tree.largest.begin() + static_cast<std::ptrdiff_t>(named) - 1;
      now_.tree.anonymous -= gone->anonymous;
      now_.tree.bytes -= gone->anonymous;
      --now_.tree.processes;
      now_.tree.largest.erase(gone);
    }
  }
  // Shared pages that several processes took or dropped were added several times.
  TreeUse& tree = now_.tree;
  const std::int64_t shared =
      std::clamp<std::int64_t>(tree.shared, 0, std::max<std::int64_t>(0, now_.bound_bytes));
  tree.bytes += shared - tree.shared;
  tree.shared = shared;
  std::ranges::stable_sort(tree.largest, std::greater<>(), &ProcessUse::bytes);
}

// Adds to a process, and to the whole tree, what has become resident since the close look.
void TreeLooker::add_growth(std::size_t named, const Resident& now) {
  const Sizes& then = known_[named].at_look;
  ProcessUse& use = now_.tree.largest[named];
  const auto add = [&](std::int64_t more, std::int64_t ProcessUse::*of,
                       std::int64_t TreeUse::*sum) {
    more = std::max(more, -(use.*of));  // Of a shared page only its share can go.
    use.*of += more;
    use.bytes += more;
    now_.tree.*sum += more;
    now_.tree.bytes += more;
  };
  add(now.anonymous - then.anonymous, &ProcessUse::anonymous, &TreeUse::anonymous);
  add(now.file - then.file, &ProcessUse::file, &TreeUse::file);
  add(now.shared - then.shared, &ProcessUse::shared, &TreeUse::shared);
  use.resident_peak = std::max(use.resident_peak, now.peak);
}

// Finds what is resident in no process, where it is time, and adds it.
void TreeLooker::share() {
  const bool alone = own_ && pids_.size() == 1 && now_.in_flight_bytes == 0;
  if (sharing_.due(now_ns(), alone ? kAloneSharing : own_ ? kOwnSharing : kSharing)) {
    std::vector<std::filesystem::path> folders;
    for (const int pid : pids_) {
      folders.push_back(std::filesystem::path("/proc") / std::to_string(pid));
    }
    sharing_.time([&] { now_.in_flight_bytes = absent_shared_bytes(folders, now_.tree.shared); });
  }
  add_in_flight();
  now_.bound_bytes += now_.in_flight_bytes;
}

void TreeLooker::add_in_flight() {
  now_.tree.shared += now_.in_flight_bytes;
  now_.tree.bytes += now_.in_flight_bytes;
}

void TreeLooker::look_closely() {
  const std::int64_t peak = at_look_.resident_peak;
  at_look_ = read_tree(pids_);
  at_look_.resident_peak = std::max(at_look_.resident_peak, peak);
  known_.clear();
  for (const ProcessUse& use : at_look_.largest) {
    const auto now = read_resident(use.pid);
    known_.push_back(
        {.pid = use.pid, .at_look = now ? Sizes{now->anonymous, now->file, now->shared} : Sizes{}});
  }
  changed_ = false;
  now_.tree = at_look_;
  add_in_flight();
  now_.bound_bytes = std::max(now_.bound_bytes, now_.tree.unbacked());
}

}  // namespace plimsoll
