// SPDX-License-Identifier: Apache-2.0
#include "os/oom_choice.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <fstream>

#include <fcntl.h>
#include <unistd.h>

#include "os/cgroup.h"
#include "plimsoll/limits.h"

namespace plimsoll {
namespace {

constexpr const char* kFile = "/proc/self/oom_score_adj";
constexpr int kLast = -999;  // −1000: never, even where nobody else is left.
constexpr int kMost = 1000;
constexpr int kRaise = 100;  // A tenth of the memory, …
constexpr std::int64_t kHeldTimes = 2;

struct Score {
  std::array<char, 8> text{};
  std::size_t size{0};
};

int depth = 0;
bool lowered = false;
Score own;
Score child;

Score score_of(int value) noexcept {
  Score made;
  const auto end = std::to_chars(made.text.data(), made.text.data() + made.text.size(), value).ptr;
  made.size = static_cast<std::size_t>(end - made.text.data());
  return made;
}

bool write_score(const Score& score) noexcept {
  const int file = ::open(kFile, O_WRONLY | O_CLOEXEC);
  const bool written =
      file >= 0 && ::write(file, score.text.data(), score.size) == static_cast<ssize_t>(score.size);
  if (file >= 0) {
    ::close(file);
  }
  return written;
}

// How much higher a child's is where ours cannot be lower.
int raise_needed() {
  const std::int64_t limit = least_limit_in(memory_cgroup(0));
  const auto held = read_resident();
  if (limit <= 0 || !held) {
    return kRaise;
  }
  const std::int64_t parts = kHeldTimes * kMost * held->total() / limit;
  return static_cast<int>(std::clamp<std::int64_t>(parts, kRaise, kMost));
}

}  // namespace

ChosenLast::ChosenLast() noexcept {
  if (depth++ > 0) {
    return;
  }
  int now = 0;
  if (!(std::ifstream(kFile) >> now)) {
    return;
  }
  own = score_of(now);
  lowered = write_score(score_of(std::min(now, kLast)));
  child = lowered ? own : score_of(std::min(now + raise_needed(), kMost));
}

ChosenLast::~ChosenLast() {
  if (--depth > 0) {
    return;
  }
  if (lowered) {
    write_score(own);
  }
  lowered = false;
  child = {};
}

void ChosenLast::leave_in_child() noexcept {
  if (child.size > 0) {
    write_score(child);
  }
}

}  // namespace plimsoll
