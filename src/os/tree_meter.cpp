// SPDX-License-Identifier: Apache-2.0
#include "os/tree_meter.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

#include <sys/stat.h>
#include <unistd.h>

#include "os/cgroup.h"
#include "os/clock.h"
#include "os/directories.h"
#include "os/process_tree.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kCalm = 100;  // A reading is repeated after so many times of what it took:
constexpr std::int64_t kClose = 10;  // 1 % of a core, and 10 % where the limit may be near.
constexpr std::int64_t kMappingsAgain = 1'000'000'000;  // One file may have come for another.
constexpr std::int64_t kFilesMost = 65536;              // Of shared memory, looked at in one look.
constexpr std::int64_t kMappingLeast = 1 << 20;         // A smaller mapping is no model's weights.

bool is_shared_memory(std::string_view path) noexcept {
  return path.starts_with("/dev/shm/") || path.starts_with("/memfd:");
}

// A line of /proc/PID/maps: BEGIN-END rwxp OFFSET DEVICE INODE PATH.
struct Mapping {
  std::int64_t bytes{0};
  std::string access{};
  std::uint64_t inode{0};
  std::string path{};
};

template <class Visit>
void for_each_mapping(const fs::path& folder, Visit visit) {
  std::ifstream file(folder / "maps");
  for (std::string line; std::getline(file, line);) {
    if (line.find('/') == std::string::npos) {
      continue;  // Of no file.
    }
    std::istringstream fields(line);
    Mapping mapping;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    char dash = 0;
    std::string skipped;
    fields >> std::hex >> begin >> dash >> end >> mapping.access >> skipped >> skipped >>
        std::dec >> mapping.inode >> std::ws;
    std::getline(fields, mapping.path);
    mapping.bytes = static_cast<std::int64_t>(end - begin);
    visit(mapping);
  }
}

// What torch maps of a file of weights: its own copy on write. Data sets are mapped shared, and
// code is in small pieces of .so files.
std::int64_t private_file_bytes(const fs::path& folder) {
  std::int64_t bytes = 0;
  for_each_mapping(folder, [&](const Mapping& one) {
    if (one.access == "rw-p" && one.bytes >= kMappingLeast && !is_shared_memory(one.path) &&
        one.path.find(".so") == std::string::npos) {
      bytes += one.bytes;
    }
  });
  return bytes;
}

// Shared memory that these processes hold by a descriptor alone: what a worker has handed over and
// nobody has mapped yet.
std::int64_t unmapped_shared_bytes(const std::vector<fs::path>& folders) {
  std::set<std::uint64_t> mapped;
  for (const fs::path& folder : folders) {
    for_each_mapping(folder, [&](const Mapping& one) {
      if (is_shared_memory(one.path) && std::ssize(mapped) < kFilesMost) {
        mapped.insert(one.inode);
      }
    });
  }
  std::int64_t bytes = 0;
  for (const fs::path& folder : folders) {
    for (const auto& name : names_in(folder / "fd").value_or(std::vector<std::string>{})) {
      const fs::path file = folder / "fd" / name;
      std::error_code closed;
      struct stat facts {};
      if (is_shared_memory(fs::read_symlink(file, closed).string()) &&
          ::stat(file.c_str(), &facts) == 0 && std::ssize(mapped) < kFilesMost &&
          mapped.insert(facts.st_ino).second) {
        bytes += static_cast<std::int64_t>(facts.st_blocks) * 512;
      }
    }
  }
  return bytes;
}

std::int64_t unbacked(const Resident& one) noexcept {
  return one.anonymous + one.shared;
}

// The folder of the memory cgroup that this process is in; empty when there is none to be read.
fs::path own_group(const fs::path& proc, const fs::path& cgroup_root) {
  for (const bool version2 : {false, true}) {  // The kernel gives the controller to one of them.
    for (const CgroupLine& line : read_cgroup_lines(proc)) {
      const fs::path folder = cgroup_mount(line, cgroup_root) / fs::path(line.path).relative_path();
      std::error_code none;
      if (line.version2 == version2 && line.path.find("..") == std::string::npos &&
          fs::exists(folder / "memory.stat", none)) {
        return folder;
      }
    }
  }
  return {};
}

}  // namespace

bool TreeMeter::Pace::due(std::int64_t now, std::int64_t times_cost) const noexcept {
  return began_ns == INT64_MIN || now - began_ns >= std::max(least_ns, took_ns * times_cost);
}

template <class Reading>
void TreeMeter::Pace::time(Reading reading) {
  began_ns = now_ns();
  const std::int64_t before = thread_cpu_ns();
  reading();
  took_ns = thread_cpu_ns() - before;
}

TreeMeter::TreeMeter(fs::path proc_root, const fs::path& cgroup_root)
    : proc_(std::move(proc_root)), group_of_all_(own_group(proc_, cgroup_root)) {}

TreeMemory TreeMeter::read(const Resident& own, std::int64_t close_bytes) {
  const std::int64_t now = now_ns();
  if (finding_.due(now, kCalm)) {
    finding_.time([&] { find_children(); });
  }
  const bool files_changed = std::abs(own.file - mapped_at_file_bytes_) >= kMappingLeast;
  if (mapping_.due(now, kCalm) && (files_changed || now - mapping_.began_ns > kMappingsAgain)) {
    mapping_.time([&] { mapped_bytes_ = private_file_bytes(proc_ / "self"); });
    mapped_at_file_bytes_ = own.file;
  }
  if (group_is_ours_) {
    if (grouping_.due(now, kCalm)) {
      grouping_.time(
          [&] { beside_bytes_ = std::max<std::int64_t>(0, group_bytes() - unbacked(own)); });
      in_flight_bytes_ = 0;  // Among what the cgroup counts.
    }
  } else if (children_.empty()) {
    beside_bytes_ = in_flight_bytes_ = grown_bytes_ = 0;
  } else {
    if (sizing_.due(now, kCalm)) {
      sizing_.time([&] { grown_bytes_ = growth(own); });
    }
    const bool close =
        changed_ || own.total() + beside_bytes_ + in_flight_bytes_ + grown_bytes_ > close_bytes;
    if (looking_.due(now, close ? kClose : kCalm)) {
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
  group_is_ours_ = ours == children_.size() + 1 && group_bytes() > 0;
}

// Anonymous and shared memory, its own and that of cgroups below it.
std::int64_t TreeMeter::group_bytes() const {
  std::ifstream file(group_of_all_ / "memory.stat");
  std::int64_t here = 0;
  std::int64_t whole = 0;  // Version 1 says both, version 2 the whole under the plain names.
  std::int64_t value = 0;
  for (std::string key; file >> key >> value;) {
    if (key == "anon" || key == "shmem") {
      here += value;
    } else if (key == "total_rss" || key == "total_shmem") {
      whole += value;
    }
  }
  return whole > 0 ? whole : here;
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
  const auto add = [&](int pid) {
    if (const auto use = read_process(pid, proc_); use) {
      const std::int64_t known = use->anonymous + use->shared;
      bytes += known > 0 ? known : use->bytes;
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
  in_flight_bytes_ = unmapped_shared_bytes(folders);
  grown_bytes_ = 0;
  changed_ = false;
}

}  // namespace plimsoll
