// SPDX-License-Identifier: Apache-2.0
//
// Threads, Memory: as disk_room.h says.
#include "data/disk_room.h"

#include <cerrno>

#include <fmt/core.h>

#include "base/check.h"
#include "plimsoll/bytes.h"
#include "plimsoll/limits.h"

namespace plimsoll {

Result<void> check_disk_room(const Governor& governor, const std::filesystem::path& directory,
                             std::int64_t bytes) {
  PLIMSOLL_TRY(const std::int64_t free_bytes,
               free_disk_bytes(std::filesystem::absolute(directory)));
  if (bytes > free_bytes) {
    return fail_io(ENOSPC,
                   fmt::format("{}: {} will be written, {} are free", directory.string(),
                               format_bytes(bytes), format_bytes(free_bytes)),
                   "free some space there, or choose another directory");
  }
  const std::int64_t limit = governor.valid() ? governor.disk_limit_bytes() : bytes;
  if (bytes > limit) {
    Error error =
        make_error(ErrorCode::kOverBudget,
                   fmt::format("{}: {} will be written, the disk limit is {}", directory.string(),
                               format_bytes(bytes), format_bytes(limit)),
                   "raise the disk limit");
    error.requested_bytes = bytes;
    error.available_bytes = limit;
    error.limit_bytes = limit;
    return tl::unexpected(std::move(error));
  }
  return {};
}

}  // namespace plimsoll
