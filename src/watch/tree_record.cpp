// SPDX-License-Identifier: Apache-2.0
#include "watch/tree_record.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/check.h"
#include "os/cgroup.h"

namespace plimsoll {
namespace {

constexpr double kRecordWidth = 25;  // Of a trend's windows, in steps or seconds.

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

Result<TreeRecord> TreeRecord::open(const std::filesystem::path& file, int pid, bool steps,
                                    const std::string& command) {
  std::filesystem::path cgroup = memory_cgroup(pid);
  PLIMSOLL_TRY(LookHistory history, LookHistory::open(file, {.pid = pid,
                                                             .began = wall_seconds(),
                                                             .steps = steps,
                                                             .cgroup = cgroup.string(),
                                                             .command = command}));
  return TreeRecord(pid, kRecordWidth, std::move(history), std::move(cgroup));
}

Finding TreeRecord::add(TreeLook seen, double at, const Inside& inside, std::string_view phase,
                        KeptLook more) {
  watch_.take(std::move(seen), at, inside, phase);
  Finding finding = watch_.verdict();
  more.time = wall_seconds();
  more.held_bytes = std::max<std::int64_t>(watch_.seen().tree.unbacked(), 0);
  for (std::size_t owner = 0; owner < kOwnerCount; ++owner) {
    more.owners[owner] = watch_.holdings().of(static_cast<Owner>(owner));
  }
  more.phase = phase;
  more.course = finding.course;
  more.owner = finding.owner;
  more.bytes_per_unit = finding.bytes_per_unit;
  more.cgroup_oom_kills = cgroup_.empty() ? 0 : oom_kills_in(cgroup_).value_or(0);
  more.machine_oom_kills = machine_oom_kills();
  more.booted = booted_;
  for (const ProcessUse& use : watch_.seen().tree.largest) {
    if (more.largest.size() < KeptLook::kProcessesMost) {
      more.largest.push_back({.pid = use.pid, .name = use.name, .bytes = use.unbacked()});
    }
  }
  static_cast<void>(history_.add(std::move(more)));
  return finding;
}

}  // namespace plimsoll
