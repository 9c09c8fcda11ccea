// SPDX-License-Identifier: Apache-2.0
#include "os/tree_meter.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <string>
#include <utility>

#include <unistd.h>

#include "os/cgroup.h"
#include "os/mappings.h"
#include "os/process_tree.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMappingsAgain = 1'000'000'000;  // One file may have come for another.
constexpr std::int64_t kFilesChanged = 1 << 20;  // Weights may have been mapped, or unmapped.

std::int64_t unbacked(const Resident& one) noexcept {
  return one.anonymous + one.shared;
}

}  // namespace

TreeMeter::TreeMeter(fs::path proc_root, const fs::path& cgroup_root)
    : proc_(std::move(proc_root)), group_of_all_(memory_cgroup(0, proc_, cgroup_root)) {}

TreeMemory TreeMeter::read(const Resident& own, std::int64_t close_bytes) {
  const std::int64_t now = now_ns();
  if (finding_.due(now, Pace::kCalm)) {
    finding_.time([&] { find_children(); });
  }
  const bool files_changed = std::abs(own.file - mapped_at_file_bytes_) >= kFilesChanged;
  if (mapping_.due(now, Pace::kCalm) &&
      (files_changed || now - mapping_.ended_ns() > kMappingsAgain)) {
    mapping_.time([&] { mapped_bytes_ = private_file_bytes(proc_ / "self"); });
    mapped_at_file_bytes_ = own.file;
  }
  if (group_is_ours_) {
    if (grouping_.due(now, Pace::kCalm)) {
      grouping_.time([&] {
        beside_bytes_ = std::max<std::int64_t>(0, unbacked_bytes(group_of_all_) - unbacked(own));
      });
      in_flight_bytes_ = 0;  // Among what the cgroup counts.
    }
  } else if (children_.empty()) {
    beside_bytes_ = grown_bytes_ = 0;
    if (in_flight_bytes_ > 0 && looking_.due(now, Pace::kCalm)) {  // The process may have kept it.
      looking_.time([&] { in_flight_bytes_ = absent_shared_bytes({proc_ / "self"}, own.shared); });
    }
  } else {
    if (sizing_.due(now, Pace::kCalm)) {
      sizing_.time([&] { grown_bytes_ = growth(own); });
    }
    const bool close =
        changed_ || own.total() + beside_bytes_ + in_flight_bytes_ + grown_bytes_ > close_bytes;
    if (looking_.due(now, close ? Pace::kHurried : Pace::kCalm)) {
      looking_.time([&] { look(own); });
    }
  }
  return {.children_bytes = beside_bytes_ + (group_is_ours_ ? 0 : grown_bytes_),
          .in_flight_bytes = in_flight_bytes_,
          .mapped_bytes = std::min(mapped_bytes_, own.file),
          .children = static_cast<int>(children_.size())};
}

void TreeMeter::find_children() {
  auto found = descendants(::getpid(), proc_);
  std::vector<Child> now;
  for (const int pid : found ? *found : std::vector<int>{}) {
    const auto known = std::ranges::find(children_, pid, &Child::pid);
    if (now.size() < kKnownMost) {
      now.push_back(known == children_.end() ? Child{.pid = pid} : *known);
    }
  }
  changed_ = changed_ || !std::ranges::equal(now, children_, {}, &Child::pid, &Child::pid);
  children_ = std::move(now);
  find_group();
}

// Ours: nobody else is in it. A cgroup that we share tells what the others hold as well.
void TreeMeter::find_group() {
  group_is_ours_ = false;
  std::ifstream file(group_of_all_ / "cgroup.procs");
  if (group_of_all_.empty() || !file) {
    return;
  }
  std::size_t ours = 0;
  for (int pid = 0; file >> pid;) {
    // A pid of 0 is of another namespace.
    if (pid != ::getpid() && std::ranges::find(children_, pid, &Child::pid) == children_.end()) {
      // It may have been forked since we looked, and then it is ours at the next look.
      return;
    }
    ++ours;
  }
  group_is_ours_ = ours == children_.size() + 1 && unbacked_bytes(group_of_all_) > 0;
}

// How much more than at the last look the descendants have resident. Of who came since only what is
// beyond this process's own: a forked child begins with all of that, and shares it.
std::int64_t TreeMeter::growth(const Resident& own) {
  std::int64_t bytes = 0;
  for (Child& child : children_) {
    if (const auto now = read_resident(child.pid); now) {
      child.resident = unbacked(*now);
    }
    const std::int64_t before =
        child.resident_at_look >= 0 ? child.resident_at_look : unbacked(own);
    bytes += std::max<std::int64_t>(0, child.resident - before);
  }
  return bytes;
}

void TreeMeter::look(const Resident& own) {
  std::vector<fs::path> folders{proc_ / std::to_string(::getpid())};
  std::int64_t bytes = 0;
  std::int64_t shared = 0;
  const auto add = [&](int pid) {
    if (const auto use = read_process(pid, proc_); use) {
      bytes += use->unbacked();
      shared += use->shared;
    }
  };
  add(::getpid());
  for (Child& child : children_) {
    add(child.pid);
    folders.push_back(proc_ / std::to_string(child.pid));
    const auto resident = read_resident(child.pid);
    child.resident_at_look = child.resident = resident ? unbacked(*resident) : 0;
  }
  beside_bytes_ = std::max<std::int64_t>(0, bytes - unbacked(own));
  in_flight_bytes_ = absent_shared_bytes(folders, shared);
  grown_bytes_ = 0;
  changed_ = false;
}

}  // namespace plimsoll
