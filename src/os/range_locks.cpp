// SPDX-License-Identifier: Apache-2.0
#include "os/range_locks.h"

#include <cerrno>
#include <utility>

#include <fcntl.h>

#include "os/file.h"
#include "os/file_faults.h"

namespace plimsoll {
namespace {

struct flock range(short type, std::int64_t first, std::int64_t bytes) noexcept {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = first;
  lock.l_len = bytes;
  return lock;
}

short type_of(RangeLocks::Kind kind) noexcept {
  return kind == RangeLocks::Kind::kShared ? F_RDLCK : F_WRLCK;
}

// Interrupted calls are made again.
int control(int descriptor, int command, struct flock& lock) noexcept {
  int done = -1;
  do {
    done = ::fcntl(descriptor, command, &lock);
  } while (done != 0 && errno == EINTR);
  return done;
}

}  // namespace

Result<RangeLocks> RangeLocks::open(const std::filesystem::path& path, Access access) {
  const int flags = access == Access::kRead        ? O_RDONLY
                    : access == Access::kReadWrite ? O_RDWR
                                                   : O_RDWR | O_CREAT | O_NOFOLLOW;
  RangeLocks locks;
  const FaultVerdict fault =
      access == Access::kRead ? FaultVerdict{} : ask_file_fault(FileCall::kOpenToWrite);
  if (fault.fails) {
    errno = fault.os_errno;
  } else {
    locks.file_ = OwnDescriptor::open(path, flags);
    if (locks.file_.get() >= 0) {
      return locks;
    }
  }
  return open_failed(path, flags);
}

RangeLocks& RangeLocks::operator=(RangeLocks&& other) noexcept {
  unlock_all();
  file_ = std::move(other.file_);
  return *this;
}

RangeLocks::~RangeLocks() {
  unlock_all();
}

// Before the descriptor is closed: a child that was forked just now may not have closed its own.
void RangeLocks::unlock_all() noexcept {
  if (file_.get() >= 0) {
    struct flock lock = range(F_UNLCK, 0, 0);
    control(file_.get(), F_OFD_SETLK, lock);
  }
}

RangeLocks::Taken RangeLocks::try_lock(std::int64_t byte, Kind kind) noexcept {
  if (const FaultVerdict fault = ask_file_fault(FileCall::kLock); fault.fails) {
    errno = fault.os_errno;
    return Taken::kNoLocksThere;
  }
  struct flock lock = range(type_of(kind), byte, 1);
  if (control(file_.get(), F_OFD_SETLK, lock) == 0) {
    return Taken::kYes;
  }
  return errno == EAGAIN || errno == EACCES ? Taken::kHeldByOthers : Taken::kNoLocksThere;
}

RangeLocks::Taken RangeLocks::lock(std::int64_t byte, Kind kind) noexcept {
  struct flock lock = range(type_of(kind), byte, 1);
  return control(file_.get(), F_OFD_SETLKW, lock) == 0 ? Taken::kYes : Taken::kNoLocksThere;
}

void RangeLocks::unlock(std::int64_t byte) noexcept {
  struct flock lock = range(F_UNLCK, byte, 1);
  control(file_.get(), F_OFD_SETLK, lock);
}

bool RangeLocks::held_by_others(std::int64_t first, std::int64_t bytes, Kind kind) const noexcept {
  struct flock lock = range(type_of(kind), first, bytes);
  return control(file_.get(), F_OFD_GETLK, lock) == 0 && lock.l_type != F_UNLCK;
}

}  // namespace plimsoll
