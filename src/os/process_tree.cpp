// SPDX-License-Identifier: Apache-2.0
#include "os/process_tree.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string_view>
#include <utility>

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
  bool ended{false};    // A zombie holds nothing.
  bool stopped{false};  // By a signal, or a debugger.
  std::int64_t began{0};
  std::uint64_t stack{0};  // Where it starts: random at each exec, kept by fork(); 0: not told.
};

// /proc/PID/stat is "PID (NAME) STATE PARENT … BEGAN … STACK …", and NAME may hold anything.
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
  stat.stopped = text[close + 2] == 'T' || text[close + 2] == 't';
  const char* const end = text.data() + text.size();
  if (std::from_chars(text.data() + close + 4, end, stat.parent).ec != std::errc()) {
    return std::nullopt;
  }
  constexpr int kBeganAt = 20;  // The field's number, the state's being 1.
  constexpr int kStackAt = 26;
  std::size_t at = close + 1;
  for (int field = 1; field <= kStackAt && at != std::string::npos; ++field) {
    if (field == kBeganAt) {
      std::from_chars(text.data() + at + 1, end, stat.began);
    } else if (field == kStackAt) {
      std::from_chars(text.data() + at + 1, end, stat.stack);
    }
    at = text.find(' ', at + 1);
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

// What smaps_rollup lacks, and resident sizes.
struct Status {
  std::int64_t resident_peak{0};
  std::int64_t page_tables{0};
  std::int64_t anonymous{0};
  std::int64_t file{0};
  std::int64_t shared{0};
};

Status read_status(const fs::path& folder) {
  Status found;
  std::ifstream status(folder / "status");
  for (std::string line; std::getline(status, line);) {
    const std::size_t colon = std::min(line.find(':'), line.size());
    const std::string_view key(line.data(), colon);
    std::int64_t* const into = key == "VmHWM"      ? &found.resident_peak
                               : key == "RssAnon"  ? &found.anonymous
                               : key == "RssFile"  ? &found.file
                               : key == "RssShmem" ? &found.shared
                               : key == "VmPTE"    ? &found.page_tables
                                                   : nullptr;
    if (into != nullptr) {
      *into = std::strtoll(line.c_str() + colon + 1, nullptr, 10) << 10;
    }
    if (into == &found.page_tables) {
      break;  // It stands behind the others.
    }
  }
  return found;
}

// Walking the pages of a process holds up whoever maps memory in it, for 10 ms a gigabyte.
constexpr std::int64_t kWalkedMost = std::int64_t{64} << 20;
constexpr std::int64_t kSharedMost = std::int64_t{16} << 20;

bool walked(const Status& status, bool alone) {
  return !alone || status.anonymous + status.file <= kWalkedMost || status.shared > kSharedMost;
}

// Lines "Pss:   123 kB" of smaps_rollup; false without leave to read it.
bool read_shares(const fs::path& folder, ProcessUse& use) {
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
  return told;
}

// What is resident: what processes share counts for each.
bool read_sizes(const fs::path& folder, const Status& status, ProcessUse& use) {
  use.anonymous = status.anonymous;
  use.file = status.file;
  use.shared = status.shared;
  use.bytes = use.anonymous + use.file + use.shared;
  if (use.bytes > 0) {
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
    for (auto child = std::ranges::lower_bound(all, parent, {}, &Process::parent);
         child != all.end() && child->parent == parent; ++child) {
      if (child->pid != root && found.size() < all.size()) {
        found.push_back(child->pid);
      }
    }
  }
  return found;
}

namespace {

// `alone`: no other process has pages that it wrote to.
std::optional<ProcessUse> read_one(int pid, Stat stat, bool alone, const fs::path& folder) {
  const Status status = read_status(folder);
  ProcessUse use{.pid = pid, .parent = stat.parent, .name = std::move(stat.name)};
  if (!(walked(status, alone) && read_shares(folder, use)) && !read_sizes(folder, status, use)) {
    return std::nullopt;
  }
  use.page_tables = status.page_tables;
  use.resident_peak = status.resident_peak;
  return use;
}

}  // namespace

std::optional<ProcessUse> read_process(int pid, const fs::path& proc) {
  const fs::path folder = proc / std::to_string(pid);
  auto stat = read_stat(folder);
  return stat ? read_one(pid, *std::move(stat), false, folder) : std::nullopt;
}

TreeUse read_tree(const std::vector<int>& pids, const fs::path& proc) {
  std::vector<std::uint64_t> stacks;  // Of the processes and their parents, each once.
  std::vector<std::pair<int, Stat>> living;
  for (const int pid : pids) {
    if (auto stat = read_stat(proc / std::to_string(pid))) {
      stacks.push_back(stat->stack);
      if (std::ranges::find(pids, stat->parent) == pids.end()) {
        stacks.push_back(process_stack(stat->parent, proc));
      }
      living.emplace_back(pid, *std::move(stat));
    }
  }
  TreeUse tree;
  for (auto& [pid, stat] : living) {
    const bool alone = stat.stack != 0 && std::ranges::count(stacks, stat.stack) == 1;
    auto use = read_one(pid, std::move(stat), alone, proc / std::to_string(pid));
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

bool process_stopped(int pid, const fs::path& proc) {
  const auto stat = read_stat(proc / std::to_string(pid));
  return stat && stat->stopped;
}

std::uint64_t process_stack(int pid, const fs::path& proc) {
  const auto stat = read_stat(proc / std::to_string(pid));
  return stat ? stat->stack : 0;
}

}  // namespace plimsoll
