// SPDX-License-Identifier: Apache-2.0
#include "os/mappings.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <string_view>

#include <sys/stat.h>

#include "os/directories.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kFilesMost = 65536;       // Of shared memory, looked at in one call.
constexpr std::int64_t kMappingLeast = 1 << 20;  // A smaller mapping is no model's weights.

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

}  // namespace

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

std::int64_t absent_shared_bytes(const std::vector<fs::path>& folders, std::int64_t resident) {
  struct Seen {
    std::int64_t bytes{0};
    bool mapped{false};
  };
  std::map<std::uint64_t, Seen> files;
  const auto take = [&](const fs::path& path, std::uint64_t inode, bool mapped) {
    if (std::ssize(files) == kFilesMost && !files.contains(inode)) {
      return;
    }
    Seen& file = files[inode];
    file.mapped = file.mapped || mapped;
    struct stat facts {};
    if (file.bytes == 0 && ::stat(path.c_str(), &facts) == 0 && facts.st_ino == inode) {
      file.bytes = static_cast<std::int64_t>(facts.st_blocks) * 512;
    }
  };
  for (const fs::path& folder : folders) {
    for_each_mapping(folder, [&](const Mapping& one) {
      if (is_shared_memory(one.path)) {
        take(folder / "root" / fs::path(one.path).relative_path(), one.inode, true);
      }
    });
    for (const auto& name : names_in(folder / "fd").value_or(std::vector<std::string>{})) {
      const fs::path file = folder / "fd" / name;
      std::error_code closed;
      struct stat facts {};
      if (is_shared_memory(fs::read_symlink(file, closed).string()) &&
          ::stat(file.c_str(), &facts) == 0) {
        take(file, facts.st_ino, false);
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
