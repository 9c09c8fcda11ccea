// SPDX-License-Identifier: Apache-2.0
#include "os/file_system.h"

#include <array>
#include <cerrno>
#include <utility>

#include <sys/vfs.h>

namespace plimsoll {
namespace {

struct Known {
  std::uint64_t magic;
  std::string_view name;
};

// Source: linux/magic.h, and the headers of Lustre, GPFS and BeeGFS for theirs.
constexpr std::array<Known, 14> kNetworks{{{0x6969, "NFS"},
                                           {0x517B, "SMB"},
                                           {0xFE534D42, "SMB"},
                                           {0xFF534D42, "CIFS"},
                                           {0x65735546, "FUSE"},
                                           {0x00C36400, "Ceph"},
                                           {0x0BD00BD0, "Lustre"},
                                           {0x47504653, "GPFS"},
                                           {0x19830326, "BeeGFS"},
                                           {0x01021997, "9P"},
                                           {0x5346414F, "AFS"},
                                           {0x6B414653, "AFS"},
                                           {0x7461636F, "OCFS2"},
                                           {0x01161970, "GFS2"}}};

constexpr std::array<Known, 2> kMemory{{{0x01021994, "tmpfs"}, {0x858458F6, "ramfs"}}};

template <std::size_t N>
std::string_view name_in(const std::array<Known, N>& list, std::uint64_t magic) noexcept {
  for (const Known& known : list) {
    if (known.magic == magic) {
      return known.name;
    }
  }
  return {};
}

// What statfs() says of the path, or of its nearest folder that is there; 0 when it cannot be
// asked.
std::uint64_t magic_of(std::filesystem::path path) {
  path = std::filesystem::absolute(path);
  struct statfs facts {};
  while (::statfs(path.c_str(), &facts) != 0) {
    if (errno != ENOENT || !path.has_relative_path()) {
      return 0;
    }
    path = path.parent_path();
  }
  // f_type is signed and its width differs between machines; every magic number has 32 bits.
  return static_cast<std::uint64_t>(facts.f_type) & 0xFFFFFFFFU;
}

}  // namespace

std::string_view network_file_system(std::uint64_t magic) noexcept {
  return name_in(kNetworks, magic);
}

std::string_view network_file_system(std::filesystem::path path) {
  return network_file_system(magic_of(std::move(path)));
}

std::string_view memory_file_system(std::filesystem::path path) {
  return name_in(kMemory, magic_of(std::move(path)));
}

}  // namespace plimsoll
