// SPDX-License-Identifier: Apache-2.0
#include "os/process_tree.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string_view>

#include <fmt/format.h>
#include <unistd.h>

#include "base/check.h"
#include "os/directories.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

struct Process {
  int pid;
  int parent;
};

struct Stat {
  std::string name;
  int parent{0};
  bool ended{false};  // A zombie holds nothing.
  std::int64_t began{0};
};

// /proc/PID/stat is "PID (NAME) STATE PARENT … BEGAN …", and NAME may hold anything.
std::optional<Stat> read_stat(const fs::path& folder) {
  std::ifstream file(folder / "stat");
  std::string text;
  if (!std::getline(file, text)) {
    return std::nullopt;
  }
  const std::size_t open = text.find('(');
  const std::size_t close = text.rfind(')');
  if (open == std::string::npos || close == std::string::npos || close + 4 > text.size()) {
    return std::nullopt;
  }
  Stat stat{.name = text.substr(open + 1, close - open - 1)};
  stat.ended = text[close + 2] == 'Z' || text[close + 2] == 'X';
  const char* const end = text.data() + text.size();
  if (std::from_chars(text.data() + close + 4, end, stat.parent).ec != std::errc()) {
    return std::nullopt;
  }
  constexpr int kBeganAt = 20;  // The field's number, the state's being 1.
  std::size_t at = close + 1;
  for (int field = 1; field < kBeganAt && at != std::string::npos; ++field) {
    at = text.find(' ', at + 1);
  }
  if (at != std::string::npos) {
    std::from_chars(text.data() + at + 1, end, stat.began);
  }
  return stat;
}

Result<std::vector<Process>> all_processes(const fs::path& proc) {
  std::vector<Process> all;
  PLIMSOLL_TRY(const auto names, names_in(proc));
  for (const std::string& name : names) {
    int pid = 0;
    const auto [stop, status] = std::from_chars(name.data(), name.data() + name.size(), pid);
    if (status != std::errc() || stop != name.data() + name.size()) {
      continue;
    }
    if (const auto stat = read_stat(proc / name); stat && !stat->ended) {
      all.push_back({.pid = pid, .parent = stat->parent});
    }
  }
  return all;
}

// What smaps_rollup lacks.
void read_status(const fs::path& folder, ProcessUse& use) {
  std::ifstream status(folder / "status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) {
      use.resident_peak = std::strtoll(line.c_str() + 6, nullptr, 10) << 10;
    } else if (line.starts_with("VmPTE:")) {
      use.page_tables = std::strtoll(line.c_str() + 6, nullptr, 10) << 10;
      return;  // It stands behind the other.
    }
  }
}

// Lines "Pss:   123 kB" of smaps_rollup; without leave to read it, the resident pages of statm.
bool read_use(const fs::path& folder, ProcessUse& use) {
  std::ifstream rollup(folder / "smaps_rollup");
  bool told = false;
  for (std::string line; std::getline(rollup, line);) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) {
      continue;
    }
    const std::string_view key(line.data(), colon);
    std::int64_t* const into = key == "Pss"         ? &use.bytes
                               : key == "Pss_Anon"  ? &use.anonymous
                               : key == "Pss_File"  ? &use.file
                               : key == "Pss_Shmem" ? &use.shared
                                                    : nullptr;
    if (into != nullptr) {
      *into = std::strtoll(line.c_str() + colon + 1, nullptr, 10) << 10;
      told = told || into == &use.bytes;
    }
  }
  if (told) {
    return true;
  }
  std::ifstream statm(folder / "statm");
  std::int64_t size = 0;
  std::int64_t resident = 0;
  if (!(statm >> size >> resident)) {
    return false;
  }
  use.bytes = resident * ::sysconf(_SC_PAGESIZE);
  return true;
}

// Adds the children of a process that still lives, as its threads' lists have them. False: the
// kernel keeps no such lists.
bool add_listed_children(const fs::path& folder, std::vector<int>& found) {
  for (const auto& thread : names_in(folder / "task").value_or(std::vector<std::string>{})) {
    const fs::path path = folder / "task" / thread;
    std::ifstream file(path / "children");
    if (!file) {
      std::error_code ended;
      return !fs::exists(path, ended);
    }
    for (int pid = 0; file >> pid;) {
      found.push_back(pid);
    }
  }
  return true;
}

std::optional<std::vector<int>> listed_descendants(int root, const fs::path& proc) {
  std::error_code none;
  const std::string own = std::to_string(root);
  if (!fs::exists(proc / own / "task" / own / "children", none)) {
    return std::nullopt;
  }
  std::vector<int> found;
  for (std::size_t next = 0; next <= found.size(); ++next) {
    const int parent = next == 0 ? root : found[next - 1];
    if (!add_listed_children(proc / std::to_string(parent), found)) {
      return std::nullopt;
    }
  }
  std::erase_if(found, [&](int pid) {
    const auto stat = read_stat(proc / std::to_string(pid));
    return !stat || stat->ended;
  });
  return found;
}

}  // namespace

Result<std::vector<int>> descendants(int root, const fs::path& proc) {
  if (auto listed = listed_descendants(root, proc); listed) {
    return *std::move(listed);
  }
  PLIMSOLL_TRY(auto all, all_processes(proc));
  std::ranges::sort(all, {}, &Process::parent);
  std::vector<int> found;
  for (std::size_t next = 0; next <= found.size(); ++next) {
    const int parent = next == 0 ? root : found[next - 1];
    const auto children = std::ranges::equal_range(all, parent, {}, &Process::parent);
    for (const Process& child : children) {
      if (child.pid != root && found.size() < all.size()) {
        found.push_back(child.pid);
      }
    }
  }
  return found;
}

std::optional<ProcessUse> read_process(int pid, const fs::path& proc) {
  const fs::path folder = proc / std::to_string(pid);
  auto stat = read_stat(folder);
  ProcessUse use{.pid = pid};
  if (!stat || !read_use(folder, use)) {
    return std::nullopt;
  }
  read_status(folder, use);
  use.parent = stat->parent;
  use.name = std::move(stat->name);
  return use;
}

TreeUse read_tree(const std::vector<int>& pids, const fs::path& proc) {
  TreeUse tree;
  for (const int pid : pids) {
    auto use = read_process(pid, proc);
    if (!use) {
      continue;  // It ended.
    }
    ++tree.processes;
    tree.bytes += use->bytes;
    tree.anonymous += use->anonymous;
    tree.file += use->file;
    tree.shared += use->shared;
    tree.page_tables += use->page_tables;
    tree.resident_peak = std::max(tree.resident_peak, use->resident_peak);
    const auto at =
        std::ranges::upper_bound(tree.largest, use->bytes, std::greater<>(), &ProcessUse::bytes);
    tree.largest.insert(at, *std::move(use));
    if (tree.largest.size() > TreeUse::kNamedMost) {
      tree.largest.pop_back();
    }
  }
  return tree;
}

std::optional<std::int64_t> process_began(int pid, const fs::path& proc) {
  const auto stat = read_stat(proc / std::to_string(pid));
  return stat && !stat->ended ? std::optional(stat->began) : std::nullopt;
}

}  // namespace plimsoll
