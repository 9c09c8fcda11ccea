// SPDX-License-Identifier: Apache-2.0
#include "os/memory_signals.h"

#include <charconv>
#include <cstdlib>
#include <string_view>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include "os/cgroup.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
using Buffer = std::array<char, 1024>;  // These files are a few hundred bytes.

// The file from its beginning; empty when it cannot be read.
std::string_view text_of(int file, Buffer& buffer) noexcept {
  const ssize_t got = ::pread(file, buffer.data(), buffer.size() - 1, 0);
  const std::size_t size = got > 0 ? static_cast<std::size_t>(got) : 0;
  buffer[size] = '\0';
  return {buffer.data(), size};
}

// The number after "NAME " at the beginning of a line; 0 when there is none.
std::int64_t value_of(std::string_view text, std::string_view name) noexcept {
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    if (line.starts_with(name) && line.size() > name.size() && line[name.size()] == ' ') {
      std::int64_t value = 0;
      std::from_chars(line.data() + name.size() + 1, line.data() + line.size(), value);
      return value;
    }
    text.remove_prefix(std::min(line.size() + 1, text.size()));
  }
  return 0;
}

// avg10 of the line "full", in percent. Requires: `text` ends with a zero, as text_of() has it.
double full_avg10(std::string_view text) noexcept {
  constexpr std::string_view kMark = "full avg10=";
  const std::size_t at = text.find(kMark);
  return at == std::string_view::npos ? 0.0 : std::strtod(text.data() + at + kMark.size(), nullptr);
}

int open_file(const fs::path& path) {
  return ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
}

}  // namespace

void MemorySignals::add(const fs::path& folder, bool version2) {
  if (count_ == kFilesMax) {
    return;
  }
  const int file = open_file(folder / (version2 ? "memory.events" : "memory.failcnt"));
  if (file >= 0) {
    counters_[static_cast<std::size_t>(count_++)] = {.file = file, .version2 = version2};
  }
}

MemorySignals MemorySignals::open(const fs::path& proc_root, const fs::path& cgroup_root) {
  MemorySignals signals;
  for (const CgroupLine& line : read_cgroup_lines(proc_root)) {
    const fs::path mount = cgroup_mount(line, cgroup_root);
    const bool above = line.path.find("..") != std::string::npos;  // Of the namespace's root.
    fs::path below = above ? fs::path{} : fs::path(line.path).relative_path();
    for (;; below = below.parent_path()) {
      signals.add(mount / below, line.version2);
      if (line.version2 && signals.stalls_ < 0 && !below.empty()) {
        signals.stalls_ = open_file(mount / below / "memory.pressure");
        signals.own_ = signals.stalls_ >= 0;
      }
      if (below.empty()) {
        break;
      }
    }
  }
  if (signals.stalls_ < 0) {
    signals.stalls_ = open_file(proc_root / "pressure" / "memory");
  }
  signals.read();
  return signals;
}

KernelPressure MemorySignals::read() noexcept {
  Buffer buffer{};
  bool met_any = false;
  bool refused_any = false;
  for (Counters& one : counters_) {
    if (one.file < 0) {
      continue;
    }
    const std::string_view text = text_of(one.file, buffer);
    std::int64_t met = 0;
    std::int64_t refused = 0;
    if (one.version2) {
      met = value_of(text, "high") + value_of(text, "max");
      refused = value_of(text, "oom");
    } else {
      std::from_chars(text.data(), text.data() + text.size(), met);
    }
    met_any = met > one.met || met_any;
    refused_any = refused > one.refused || refused_any;
    one.met = met;
    one.refused = refused;
  }
  const bool waiting = stalls_ >= 0 && full_avg10(text_of(stalls_, buffer)) >= kStalledPercent;
  if (refused_any || (waiting && own_)) {
    return KernelPressure::kStalled;
  }
  return met_any || waiting ? KernelPressure::kTight : KernelPressure::kNone;
}

MemorySignals::MemorySignals(MemorySignals&& other) noexcept
    : counters_(std::exchange(other.counters_, {})),
      count_(std::exchange(other.count_, 0)),
      stalls_(std::exchange(other.stalls_, -1)),
      own_(other.own_) {}

MemorySignals& MemorySignals::operator=(MemorySignals&& other) noexcept {
  std::swap(counters_, other.counters_);
  std::swap(count_, other.count_);
  std::swap(stalls_, other.stalls_);
  std::swap(own_, other.own_);
  return *this;
}

MemorySignals::~MemorySignals() {
  for (const Counters& one : counters_) {
    if (one.file >= 0) {
      ::close(one.file);
    }
  }
  if (stalls_ >= 0) {
    ::close(stalls_);
  }
}

}  // namespace plimsoll
