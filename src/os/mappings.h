// SPDX-License-Identifier: Apache-2.0
//
// What processes have mapped of files and of shared memory, by /proc/PID/maps and /proc/PID/fd.
//
// Threads: pure functions over files.   Memory: 64 bytes a file of shared memory while a call
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

/// Bytes of shared memory that these processes hold and have not resident: by a descriptor alone,
/// as what a worker has handed over and nobody has taken yet, or mapped and never touched, as a
/// batch that was taken and kept. `folders`: /proc/PID of each. `resident`: the shared memory that
/// they have resident in all, each page once; mapped files count by what is beyond it, so that of
/// them it is a lower bound beside much shared memory that has no file. Up to 65,536 files are
/// looked at.
[[nodiscard]] std::int64_t absent_shared_bytes(const std::vector<std::filesystem::path>& folders,
                                               std::int64_t resident);

}  // namespace plimsoll
