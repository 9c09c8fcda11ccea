// SPDX-License-Identifier: Apache-2.0
//
// What processes have mapped of files and of shared memory, by /proc/PID/maps and /proc/PID/fd.
//
// Threads: pure functions over files.   Memory: 40 bytes a file of shared memory while a call
// lasts.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace plimsoll {

/// Bytes of a process's private and writable mappings of files of 1 MiB or more: what torch maps of
/// a file of weights. Data sets are mapped shared, and code is in small pieces of .so files.
/// `folder`: /proc/PID.
[[nodiscard]] std::int64_t private_file_bytes(const std::filesystem::path& folder);

/// Bytes of shared memory that these processes hold by a descriptor alone, and none of them has
/// mapped: what a worker has handed over, and nobody has taken yet. Up to 65,536 files are looked
/// at. `folders`: /proc/PID of each.
[[nodiscard]] std::int64_t unmapped_shared_bytes(const std::vector<std::filesystem::path>& folders);

}  // namespace plimsoll
