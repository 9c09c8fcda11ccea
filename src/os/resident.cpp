// SPDX-License-Identifier: Apache-2.0
//
// read_resident() and free_disk_bytes(): what is used and what is left, from the kernel.
//
// Threads: pure functions.   Memory: one 8 KiB stack buffer; no allocation unless they fail.
#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <string_view>

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <fmt/core.h>

#include "plimsoll/limits.h"

namespace plimsoll {

namespace {

// The value of "Name:   123 kB" in bytes, or -1 when `status` has no such line.
std::int64_t status_bytes(std::string_view status, std::string_view name) noexcept {
  std::size_t at = 0;
  while ((at = status.find(name, at)) != std::string_view::npos) {
    const bool begins_line = at == 0 || status[at - 1] == '\n';
    at += name.size();
    if (!begins_line) {
      continue;
    }
    const std::size_t digit = status.find_first_not_of(" \t", at);
    std::int64_t kibibytes = 0;
    if (digit != std::string_view::npos &&
        std::from_chars(status.data() + digit, status.data() + status.size(), kibibytes).ec ==
            std::errc()) {
      return kibibytes << 10;
    }
  }
  return -1;
}

}  // namespace

Result<Resident> read_resident(int pid) {
  std::array<char, 32> path{};
  if (pid == 0) {
    std::snprintf(path.data(), path.size(), "/proc/self/status");
  } else {
    std::snprintf(path.data(), path.size(), "/proc/%d/status", pid);
  }
  const int descriptor = ::open(path.data(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) {
    return fail_io(errno, path.data());
  }
  std::array<char, 8192> buffer;  // The lines we want stand in the first kilobyte or two.
  std::size_t length = 0;
  ssize_t got = 0;
  do {
    got = ::read(descriptor, buffer.data() + length, buffer.size() - length);
    length += got > 0 ? static_cast<std::size_t>(got) : 0;
  } while ((got > 0 && length < buffer.size()) || (got < 0 && errno == EINTR));
  const int os_errno = errno;
  ::close(descriptor);
  if (got < 0) {
    return fail_io(os_errno, path.data());
  }
  const std::string_view status(buffer.data(), length);
  const auto value = [&](std::string_view name) {
    return std::max<std::int64_t>(0, status_bytes(status, name));
  };
  Resident resident{.anonymous = value("RssAnon:"),
                    .file = value("RssFile:"),
                    .shared = value("RssShmem:"),
                    .swapped = value("VmSwap:"),
                    .peak = value("VmHWM:")};
  if (status_bytes(status, "RssAnon:") < 0) {
    resident.anonymous = value("VmRSS:");  // Kernels before 4.5, and some sandboxes.
  }
  resident.peak = std::max(resident.peak, resident.total());
  return resident;
}

Result<std::int64_t> free_disk_bytes(const std::filesystem::path& directory) {
  std::error_code status;
  std::filesystem::path at = std::filesystem::absolute(directory, status);
  while (!std::filesystem::exists(at, status) && at.has_parent_path() && at != at.parent_path()) {
    at = at.parent_path();
  }
  struct statvfs facts {};
  if (::statvfs(at.c_str(), &facts) != 0) {
    return fail_io(errno, fmt::format("{}: asking its free space", at.string()));
  }
  return static_cast<std::int64_t>(facts.f_bavail) * static_cast<std::int64_t>(facts.f_frsize);
}

}  // namespace plimsoll
