// SPDX-License-Identifier: Apache-2.0
#include "watch/room.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "os/cgroup.h"
#include "plimsoll/limits.h"

namespace plimsoll {

double Room::seconds_left(double bytes_per_second) const noexcept {
  return bytes_per_second > 0 ? static_cast<double>(left_bytes) / bytes_per_second
                              : std::numeric_limits<double>::infinity();
}

Result<Room> least_room(int pid, std::int64_t held_bytes, std::int64_t run_limit_bytes,
                        const std::filesystem::path& proc_root,
                        const std::filesystem::path& cgroup_root) {
  LimitQuery query{.resident_bytes = held_bytes,
                   .pid = pid,
                   .proc_root = proc_root,
                   .cgroup_root = cgroup_root,
                   .getenv = [](const char*) -> const char* { return nullptr; }};  // It is ours.
  PLIMSOLL_TRY(const LimitReport report, find_limit(query));
  Room least{.source = "limit of the run",
             .limit_bytes = run_limit_bytes,
             .left_bytes = run_limit_bytes > 0 ? run_limit_bytes - held_bytes
                                               : std::numeric_limits<std::int64_t>::max()};
  for (const LimitCandidate& bound : report.candidates) {
    const std::int64_t taken =
        bound.source.starts_with("cgroup")
            ? unbacked_bytes(std::filesystem::path(bound.where).parent_path())
            : held_bytes;
    const std::int64_t left = bound.bytes - std::max(taken, held_bytes);
    if (left < least.left_bytes) {
      least = {.source = bound.source, .limit_bytes = bound.bytes, .left_bytes = left};
    }
  }
  least.left_bytes = std::max<std::int64_t>(least.left_bytes, 0);
  return least;
}

}  // namespace plimsoll
