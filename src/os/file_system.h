// SPDX-License-Identifier: Apache-2.0
//
// Which file system a folder is on, as far as it matters: one that is reached over a network, or
// one that is memory itself.
//
// There an fdatasync is as good as the server's word, other machines may write the same file, and
// O_DIRECT may be refused (File then goes through the page cache: slower, and just as safe).
//
// Threads: any.   Memory: none.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

namespace plimsoll {

/// The name of a file system that statfs() calls `magic`, if it is a network's; else empty.
/// FUSE counts as one: what is behind it cannot be known, and is most often sshfs or an object
/// store.
[[nodiscard]] std::string_view network_file_system(std::uint64_t magic) noexcept;

/// The same for the file system that holds `path`, or will: of one that is not there, its nearest
/// folder that is. Empty, too, when it cannot be asked.
[[nodiscard]] std::string_view network_file_system(std::filesystem::path path);

/// "tmpfs" or "ramfs" when what is written below `path` stays in memory, as it does in /dev/shm
/// and, on some machines, in /tmp; else empty. Of a path that is not there, as above.
[[nodiscard]] std::string_view memory_file_system(std::filesystem::path path);

}  // namespace plimsoll
