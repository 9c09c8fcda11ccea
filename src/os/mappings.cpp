// SPDX-License-Identifier: Apache-2.0
#include "os/mappings.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "os/rank_file.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kFilesMost = 65536;  // Of shared memory, looked at in one call.
constexpr std::string_view kDeleted = " (deleted)";
constexpr std::string_view kMemoryFile = "/memfd:";
constexpr std::int64_t kMappingLeast = 1 << 20;  // A smaller mapping is no model's weights.

// But for what ranks exchange (rank_file.h): each maps all others', and touches a part.
bool is_shared_memory(std::string_view path) noexcept {
  return path.starts_with("/dev/shm/") ||
         (path.starts_with(kMemoryFile) &&
          !path.substr(kMemoryFile.size()).starts_with(kRankFileName));
}

// As "libm.so.6": not all that has these letters in its path, or its folder's.
bool is_library(std::string_view path) noexcept {
  path.remove_prefix(path.rfind('/') + 1);
  path.remove_suffix(path.ends_with(kDeleted) ? kDeleted.size() : 0);
  return path.ends_with(".so") || path.find(".so.") != std::string_view::npos;
}

// A line of /proc/PID/maps: BEGIN-END rwxp OFFSET DEVICE INODE PATH.
struct Mapping {
  std::int64_t bytes{0};
  std::string_view access{};
  std::uint64_t inode{0};
  std::string_view path{};
};

// The next field of what is left of a line, which is cut off.
std::string_view next_field(std::string_view& left) noexcept {
  left.remove_prefix(std::min(left.find_first_not_of(' '), left.size()));
  const std::string_view field = left.substr(0, left.find(' '));
  left.remove_prefix(field.size());
  return field;
}

Mapping mapping_of(std::string_view line) noexcept {
  const std::string_view range = next_field(line);
  const char* const end = range.data() + range.size();
  std::uint64_t first = 0;
  std::uint64_t last = 0;
  const char* const dash = std::from_chars(range.data(), end, first, 16).ptr;
  std::from_chars(std::min(dash + 1, end), end, last, 16);
  Mapping mapping{.bytes = static_cast<std::int64_t>(last - first), .access = next_field(line)};
  next_field(line);  // Where in the file it begins, …
  next_field(line);  // … and the file's device.
  const std::string_view inode = next_field(line);
  std::from_chars(inode.data(), inode.data() + inode.size(), mapping.inode);
  line.remove_prefix(std::min(line.find_first_not_of(' '), line.size()));
  mapping.path = line;
  return mapping;
}

template <class Visit>
void for_each_mapping(const fs::path& folder, Visit visit) {
  std::ifstream file(folder / "maps");
  for (std::string line; std::getline(file, line);) {
    if (line.find('/') != std::string::npos) {  // Of a file.
      visit(mapping_of(line));
    }
  }
}

}  // namespace

std::int64_t private_file_bytes(const fs::path& folder) {
  std::int64_t bytes = 0;
  for_each_mapping(folder, [&](const Mapping& one) {
    if (one.access == "rw-p" && one.bytes >= kMappingLeast && !is_shared_memory(one.path) &&
        !is_library(one.path)) {
      bytes += one.bytes;
    }
  });
  return bytes;
}

std::int64_t absent_shared_bytes(const std::vector<fs::path>& folders, std::int64_t resident) {
  struct Seen {
    std::int64_t bytes{0};
    bool mapped{false};
  };
  std::map<std::uint64_t, Seen> files;
  const auto take = [&](std::uint64_t inode, bool mapped, auto size) {
    if (std::ssize(files) == kFilesMost && !files.contains(inode)) {
      return;
    }
    Seen& file = files[inode];
    file.mapped = file.mapped || mapped;
    if (file.bytes == 0) {
      file.bytes = size();
    }
  };
  const auto size_of = [](const struct stat& facts) {
    return static_cast<std::int64_t>(facts.st_blocks) * 512;
  };
  for (const fs::path& folder : folders) {
    for_each_mapping(folder, [&](const Mapping& one) {
      if (is_shared_memory(one.path)) {
        take(one.inode, true, [&] {
          struct stat facts {};
          if (!one.path.starts_with('/') || one.path.ends_with(kDeleted)) {
            return std::int64_t{0};
          }
          const fs::path file = folder / "root" / fs::path(one.path).relative_path();
          const bool found = ::stat(file.c_str(), &facts) == 0 && facts.st_ino == one.inode;
          return found ? size_of(facts) : 0;
        });
      }
    });
    const std::unique_ptr<DIR, int (*)(DIR*)> open(::opendir((folder / "fd").c_str()), ::closedir);
    while (const dirent* const one = open ? ::readdir(open.get()) : nullptr) {
      const int directory = ::dirfd(open.get());
      std::array<char, 32> path{};  // Its beginning.
      const ssize_t length = ::readlinkat(directory, one->d_name, path.data(), path.size());
      struct stat facts {};
      if (length > 0 && is_shared_memory({path.data(), static_cast<std::size_t>(length)}) &&
          ::fstatat(directory, one->d_name, &facts, 0) == 0) {
        take(facts.st_ino, false, [&] { return size_of(facts); });
      }
    }
  }
  std::int64_t unmapped = 0;
  std::int64_t mapped = 0;
  for (const auto& [inode, file] : files) {
    (file.mapped ? mapped : unmapped) += file.bytes;
  }
  return unmapped + std::max<std::int64_t>(0, mapped - resident);
}

}  // namespace plimsoll
