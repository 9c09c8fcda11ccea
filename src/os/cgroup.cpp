// SPDX-License-Identifier: Apache-2.0
#include "os/cgroup.h"

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string_view>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

bool lists_memory(std::string_view controllers) {
  while (!controllers.empty()) {
    const std::string_view word = controllers.substr(0, controllers.find(','));
    if (word == "memory") {
      return true;
    }
    controllers.remove_prefix(std::min(word.size() + 1, controllers.size()));
  }
  return false;
}

Result<void> write_text(const fs::path& path, const std::string& text) {
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
  const bool written =
      descriptor >= 0 && ::write(descriptor, text.data(), text.size()) == std::ssize(text);
  const int problem = errno;
  if (descriptor >= 0) {
    ::close(descriptor);
  }
  if (!written) {
    return fail_io(problem, path.string());
  }
  return {};
}

// A file of one number; 0 when there is none.
std::int64_t read_number(const fs::path& path) {
  std::ifstream file(path);
  std::int64_t value = 0;
  return file >> value ? value : 0;
}

// "some avg10=0.00 avg60=0.00 avg300=0.00 total=MICROSECONDS" of a file of pressure stall figures.
double read_stalled(const fs::path& path) {
  std::ifstream file(path);
  constexpr std::string_view kTotal = "total=";
  for (std::string word; file >> word;) {
    if (word.starts_with(kTotal)) {  // The first line's; "full" is the second.
      return std::strtod(word.c_str() + kTotal.size(), nullptr) / 1e6;
    }
  }
  return 0;
}

bool has_word(const fs::path& path, std::string_view word) {
  std::ifstream file(path);
  for (std::string one; file >> one;) {
    if (one == word) {
      return true;
    }
  }
  return false;
}

// The folder of the cgroup that a process's memory is charged to, and whether it is of version 2.
// In a container the path may be the one seen from outside: what is mounted is that cgroup then.
Result<std::pair<bool, fs::path>> charged_folder(int pid, const fs::path& proc,
                                                 const fs::path& root) {
  const auto lines = read_cgroup_lines(proc, pid);
  for (const bool version2 : {false, true}) {
    const char* const file = version2 ? "cgroup.controllers" : "memory.limit_in_bytes";
    for (const CgroupLine& line : lines) {
      if (line.version2 != version2 || line.path.find("..") != std::string::npos) {
        continue;
      }
      const fs::path mount = cgroup_mount(line, root);
      for (const fs::path& folder : {mount / fs::path(line.path).relative_path(), mount}) {
        std::error_code ignored;
        if (fs::exists(folder / file, ignored)) {
          return std::pair{version2, folder};
        }
      }
    }
  }
  return fail(ErrorCode::kIo, "no memory cgroup is mounted below " + root.string());
}

constexpr int kMakeTries = 3;

// create() names its cgroups plimsoll-PID-NANOSECONDS.
bool is_made_here(std::string_view name) {
  constexpr std::string_view kPrefix = "plimsoll-";
  name.remove_prefix(name.starts_with(kPrefix) ? kPrefix.size() : name.size());
  const std::size_t dash = name.find('-');
  return dash != std::string_view::npos && name.find_first_not_of("0123456789") == dash &&
         name.find_first_not_of("0123456789", dash + 1) == std::string_view::npos;
}

// The kernel lets go of a cgroup a moment after its last process ended.
void remove_emptied(const fs::path& folder) {
  for (int i = 0; i < 50 && ::rmdir(folder.c_str()) != 0 && errno == EBUSY; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

// Its maker keeps its file of processes locked (MemoryCgroup::create()), and has ended where nobody
// does: a PID may be another's by now, or of another container.
void remove_if_let_go(const fs::path& folder) {
  const int file = ::open((folder / "cgroup.procs").c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) {
    return;
  }
  char first = 0;
  if (::flock(file, LOCK_EX | LOCK_NB) == 0 && ::read(file, &first, 1) == 0) {  // Nobody is in it.
    remove_emptied(folder);
  }
  ::close(file);
}

}  // namespace

std::vector<CgroupLine> read_cgroup_lines(const fs::path& proc_root, int pid) {
  std::vector<CgroupLine> lines;
  std::ifstream file(proc_root / (pid == 0 ? "self" : std::to_string(pid)) / "cgroup");
  for (std::string line; std::getline(file, line);) {  // ID:CONTROLLERS:PATH
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) {
      continue;
    }
    const auto controllers = std::string_view(line).substr(first + 1, second - first - 1);
    if (controllers.empty() || lists_memory(controllers)) {
      lines.push_back({.version2 = controllers.empty(), .path = line.substr(second + 1)});
    }
  }
  return lines;
}

fs::path cgroup_mount(const CgroupLine& line, const fs::path& cgroup_root) {
  if (!line.version2) {
    return cgroup_root / "memory";
  }
  std::error_code ignored;
  const fs::path mixed = cgroup_root / "unified";
  return fs::is_directory(mixed, ignored) ? mixed : cgroup_root;
}

std::optional<std::int64_t> read_counter(const fs::path& path, std::string_view name) {
  std::ifstream file(path);
  std::int64_t value = 0;
  for (std::string key; file >> key >> value;) {
    if (key == name) {
      return value;
    }
  }
  return std::nullopt;
}

std::int64_t unbacked_bytes(const fs::path& folder) {
  std::ifstream file(folder / "memory.stat");
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

fs::path memory_cgroup(int pid, const fs::path& proc_root, const fs::path& cgroup_root) {
  auto found = charged_folder(pid, proc_root, cgroup_root);
  return found ? std::move(found->second) : fs::path();
}

std::optional<std::int64_t> oom_kills_in(const fs::path& folder) {
  const auto kills = read_counter(folder / "memory.events", "oom_kill");
  return kills ? kills : read_counter(folder / "memory.oom_control", "oom_kill");
}

std::int64_t least_limit_in(fs::path folder) {
  constexpr std::int64_t kNoBound = std::int64_t{1} << 60;  // As version 1 writes "none".
  std::int64_t least = 0;
  for (; folder.has_relative_path() && folder != "/sys/fs/cgroup"; folder = folder.parent_path()) {
    for (const char* name : {"memory.max", "memory.limit_in_bytes"}) {
      const std::int64_t bytes = read_number(folder / name);
      if (bytes > 0 && bytes < kNoBound) {
        least = least == 0 ? bytes : std::min(least, bytes);
      }
    }
  }
  return least;
}

std::int64_t machine_oom_kills() {
  return read_counter("/proc/vmstat", "oom_kill").value_or(0);
}

Result<MemoryCgroup> MemoryCgroup::create(std::int64_t limit_bytes) {
  PLIMSOLL_TRY(auto own, charged_folder(0, "/proc", "/sys/fs/cgroup"));
  auto& [version2, parent] = own;
  if (version2 && !has_word(parent / "cgroup.subtree_control", "memory")) {
    PLIMSOLL_TRY_VOID(write_text(parent / "cgroup.subtree_control", "+memory"));
  }
  remove_left_behind();
  for (int tries = kMakeTries;; --tries) {
    MemoryCgroup made;
    made.version2_ = version2;
    const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
    const fs::path folder = parent / fmt::format("plimsoll-{}-{}", ::getpid(), now);
    if (::mkdir(folder.c_str(), 0755) != 0) {
      return fail_io(errno, folder.string());
    }
    made.folder_ = folder;
    const fs::path processes = folder / "cgroup.procs";
    made.processes_ = ::open(processes.c_str(), O_WRONLY | O_CLOEXEC);
    const int problem = errno;
    // Until it is locked, another start may take it for one that was left behind.
    if (made.processes_ >= 0 && ::flock(made.processes_, LOCK_EX) == 0 &&
        ::access(processes.c_str(), F_OK) == 0) {
      PLIMSOLL_TRY_VOID(made.limit(limit_bytes));
      return made;
    }
    if (tries == 1) {
      return fail_io(problem, processes.string());
    }
  }
}

void MemoryCgroup::remove_left_behind() noexcept {
  const auto own = charged_folder(0, "/proc", "/sys/fs/cgroup");
  std::error_code problem;
  fs::directory_iterator at(own ? own->second : fs::path(), problem);
  for (; !problem && at != fs::directory_iterator(); at.increment(problem)) {
    if (is_made_here(at->path().filename().string())) {
      remove_if_let_go(at->path());
    }
  }
}

Result<void> MemoryCgroup::limit(std::int64_t bytes) const {
  const std::string text = std::to_string(bytes);
  PLIMSOLL_TRY_VOID(
      write_text(folder_ / (version2_ ? "memory.max" : "memory.limit_in_bytes"), text));
  // Swapped-out memory would not be held by the limit. Kernels without swap accounting lack these.
  std::error_code ignored;
  const fs::path swap = folder_ / (version2_ ? "memory.swap.max" : "memory.memsw.limit_in_bytes");
  if (fs::exists(swap, ignored)) {
    return write_text(swap, version2_ ? "0" : text);
  }
  return {};
}

MemoryCgroup::MemoryCgroup(MemoryCgroup&& other) noexcept
    : version2_(other.version2_),
      folder_(std::exchange(other.folder_, {})),
      processes_(std::exchange(other.processes_, -1)) {}

MemoryCgroup& MemoryCgroup::operator=(MemoryCgroup&& other) noexcept {
  std::swap(version2_, other.version2_);
  std::swap(folder_, other.folder_);
  std::swap(processes_, other.processes_);
  return *this;
}

MemoryCgroup::~MemoryCgroup() {
  if (processes_ >= 0) {
    ::close(processes_);
  }
  if (folder_.empty()) {
    return;
  }
  remove_emptied(folder_);
}

bool MemoryCgroup::join() const noexcept {
  return ::write(processes_, "0", 1) == 1;
}

Result<std::int64_t> MemoryCgroup::oom_kills() const {
  const fs::path path = folder_ / (version2_ ? "memory.events" : "memory.oom_control");
  if (const auto kills = read_counter(path, "oom_kill")) {
    return *kills;
  }
  return fail(ErrorCode::kIo, path.string() + ": no oom_kill counter");
}

// Version 1 does not count how often, but how much was charged: at a kill all but some pages that
// processors keep for the next charge.
bool MemoryCgroup::met_limit() const {
  if (version2_) {
    return read_counter(folder_ / "memory.events", "oom").value_or(1) > 0;
  }
  constexpr std::int64_t kKept = 64;  // Of the limit, at most.
  const std::int64_t limit = read_number(folder_ / "memory.limit_in_bytes");
  return read_number(folder_ / "memory.max_usage_in_bytes") >= limit - limit / kKept;
}

CgroupUse MemoryCgroup::use() const {
  const fs::path pressure = version2_ ? folder_ / "memory.pressure" : "/proc/pressure/memory";
  return {.bytes = read_number(folder_ / (version2_ ? "memory.current" : "memory.usage_in_bytes")),
          .peak_bytes =
              read_number(folder_ / (version2_ ? "memory.peak" : "memory.max_usage_in_bytes")),
          .major_faults = read_counter(folder_ / "memory.stat", "pgmajfault").value_or(0),
          .stalled_seconds = read_stalled(pressure)};
}

}  // namespace plimsoll
