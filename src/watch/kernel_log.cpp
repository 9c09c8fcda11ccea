// SPDX-License-Identifier: Apache-2.0
#include "watch/kernel_log.h"

#include <array>
#include <cerrno>
#include <charconv>

#include <fcntl.h>
#include <unistd.h>

namespace plimsoll {
namespace {

constexpr std::size_t kRecordBytes = 8192;      // No record is longer.
constexpr std::int64_t kFacilities = 8;         // Priorities of the kernel's own records are below.
constexpr std::int64_t kRecordsMost = 1 << 20;  // In the log of a machine that writes all the time.

// The number behind `word`, whose place in the text is taken away.
std::optional<std::int64_t> number_after(std::string_view text, std::string_view word) {
  const std::size_t at = text.find(word);
  if (at == std::string_view::npos) {
    return std::nullopt;
  }
  const std::string_view rest = text.substr(at + word.size());
  std::int64_t value = 0;
  const auto [end, status] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
  return status == std::errc{} ? std::optional(value) : std::nullopt;
}

}  // namespace

std::optional<KernelKill> parse_kill(std::string_view record) {
  constexpr std::string_view kKilled = "illed process ";  // "Killed"; "killed" in older kernels.
  const std::size_t begin = record.find(';');
  if (begin == std::string_view::npos) {
    return std::nullopt;
  }
  const std::string_view text = record.substr(begin + 1);
  // Of facility 0, the kernel's own: programs that write there have others.
  if (number_after(record, "").value_or(kFacilities) >= kFacilities) {
    return std::nullopt;
  }
  const bool of_cgroup = text.starts_with("Memory cgroup out of memory: ");
  if (!of_cgroup && !text.starts_with("Out of memory")) {
    return std::nullopt;
  }
  const auto pid = number_after(text, kKilled);
  if (!pid || *pid <= 0 || *pid > INT32_MAX) {
    return std::nullopt;
  }
  KernelKill kill{.pid = static_cast<int>(*pid), .of_cgroup = of_cgroup};
  const std::size_t open = text.find('(');
  if (const std::size_t close = text.find(')', open); close != std::string_view::npos) {
    kill.name = std::string(text.substr(open + 1, close - open - 1));
  }
  kill.anonymous_bytes = number_after(text, "anon-rss:").value_or(0) << 10;
  const std::size_t second = record.find(',', record.find(',') + 1);
  if (second < begin) {
    kill.seconds = static_cast<double>(number_after(record.substr(second), ",").value_or(0)) / 1e6;
  }
  return kill;
}

std::optional<std::vector<KernelKill>> kernel_kills() {
  const int log = ::open("/dev/kmsg", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (log < 0) {
    return std::nullopt;
  }
  std::vector<KernelKill> kills;
  std::array<char, kRecordBytes> record{};
  for (std::int64_t read = 0; read < kRecordsMost; ++read) {
    const ssize_t bytes = ::read(log, record.data(), record.size());
    if (bytes < 0 && errno == EPIPE) {
      continue;  // Overwritten meanwhile: the next one is there.
    }
    if (bytes <= 0) {
      break;
    }
    if (auto kill = parse_kill({record.data(), static_cast<std::size_t>(bytes)})) {
      if (kills.size() == kKillsMost) {
        kills.erase(kills.begin());
      }
      kills.push_back(std::move(*kill));
    }
  }
  ::close(log);
  return kills;
}

}  // namespace plimsoll
