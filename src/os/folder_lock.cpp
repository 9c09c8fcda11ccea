// SPDX-License-Identifier: Apache-2.0
#include "os/folder_lock.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fmt/format.h>

#include "base/check.h"
#include "os/directories.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kByte = 0;
constexpr int kTriesMost = 16;  // Each is in vain only if the folder was exchanged just then.
constexpr std::chrono::milliseconds kLookAgainAfter{5};
// Who has taken a lock signs it at once; who is refused in between, or reads the name of one who
// was killed before, reads it again, so many ms later.
constexpr int kSignedAfterMost = 20;

fs::path lock_path(const fs::path& folder) {
  return folder / ".lock";
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

// "PID HOST\n".
void sign(int descriptor) {
  const std::string text = fmt::format("{} {}\n", ::getpid(), host_name());
  const bool written =
      ::ftruncate(descriptor, 0) == 0 &&
      ::pwrite(descriptor, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size());
  static_cast<void>(written);  // A full disk: a refusal then names nobody.
}

// "process 4711", by a signature; empty when it is none, or of one who is not alive.
std::string signer(std::string_view signature) {
  int pid = 0;
  const char* const last = signature.data() + signature.size();
  const auto [end, status] = std::from_chars(signature.data(), last, pid);
  if (!signature.ends_with('\n') || status != std::errc{} || pid <= 0) {
    return "";
  }
  std::string_view host = signature.substr(static_cast<std::size_t>(end - signature.data()));
  host.remove_prefix(std::min(host.find_first_not_of(' '), host.size()));
  host = host.substr(0, host.find('\n'));
  if (host != host_name()) {
    return fmt::format("process {} on {}", pid, host);
  }
  if (::kill(pid, 0) != 0 && errno == ESRCH) {
    return "";
  }
  return pid == ::getpid() ? fmt::format("this process ({})", pid) : fmt::format("process {}", pid);
}

// Who holds a lock, by what its file says.
std::string holder(int descriptor) {
  std::array<char, 300> text{};
  for (int left = kSignedAfterMost;; --left) {
    const ssize_t got = ::pread(descriptor, text.data(), text.size(), 0);
    std::string name = signer({text.data(), static_cast<std::size_t>(std::max<ssize_t>(got, 0))});
    if (!name.empty() || left == 0) {
      return name.empty() ? "another process" : name;  // On a full disk it could not sign.
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Whether `path` still names the file that is open: a folder that was exchanged or made anew has
// another lock.
bool names_it(const fs::path& path, int descriptor) noexcept {
  struct stat named {};
  struct stat open {};
  return ::stat(path.c_str(), &named) == 0 && ::fstat(descriptor, &open) == 0 &&
         named.st_ino == open.st_ino && named.st_dev == open.st_dev;
}

tl::unexpected<Error> no_locks(const fs::path& folder, int reason) {
  return fail(
      ErrorCode::kInvalidArgument,
      fmt::format("{}: its file system has no locks ({}), so that two processes could change "
                  "it at once",
                  folder.string(), std::generic_category().message(reason)),
      "choose a directory on a local disk, or mount this one with locks");
}

}  // namespace

Result<FolderLock> FolderLock::take(const fs::path& folder, const Words& words,
                                    std::chrono::milliseconds wait) {
  const auto deadline = std::chrono::steady_clock::now() + wait;
  FolderLock lock;
  lock.path_ = lock_path(folder);
  PLIMSOLL_TRY(lock.made_folder_, make_directories(folder));
  for (int left = kTriesMost; left > 0;) {
    PLIMSOLL_TRY(RangeLocks locks, RangeLocks::open(lock.path_, RangeLocks::Access::kCreate));
    const auto taken = locks.try_lock(kByte, RangeLocks::Kind::kExclusive);
    if (taken == RangeLocks::Taken::kHeldByOthers && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(kLookAgainAfter);
      continue;
    }
    if (taken == RangeLocks::Taken::kHeldByOthers) {
      return fail(
          ErrorCode::kInvalidArgument,
          fmt::format("{}: {} {}", folder.string(), holder(locks.descriptor()), words.doing),
          words.advice);
    }
    const int reason = errno;
    if (taken == RangeLocks::Taken::kNoLocksThere || names_it(lock.path_, locks.descriptor())) {
      lock.locks_ = std::move(locks);
    }
    if (taken == RangeLocks::Taken::kNoLocksThere) {
      lock.abandon();
      return no_locks(folder, reason);
    }
    if (lock.locks_.descriptor() >= 0) {
      sign(lock.locks_.descriptor());
      return lock;
    }
    --left;
  }
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("{}: it is replaced faster than it can be locked", folder.string()),
              "try again");
}

bool FolderLock::held(const fs::path& folder) {
  const auto locks = RangeLocks::open(lock_path(folder), RangeLocks::Access::kRead);
  return locks && locks->held_by_others(kByte, 1);
}

FolderLock& FolderLock::operator=(FolderLock&& other) noexcept {
  if (this != &other) {
    release();
    locks_ = std::move(other.locks_);
    path_ = std::move(other.path_);
    made_folder_ = other.made_folder_;
  }
  return *this;
}

FolderLock::~FolderLock() {
  release();
}

void FolderLock::release() noexcept {
  if (locks_.descriptor() >= 0) {
    std::ignore = ::ftruncate(locks_.descriptor(), 0);  // Nobody holds it any more.
    locks_ = RangeLocks();
  }
}

void FolderLock::abandon() noexcept {
  if (locks_.descriptor() >= 0) {
    std::error_code ignored;
    fs::remove(path_, ignored);
    if (made_folder_) {
      path_.remove_filename();     // In place: this may be said where memory has run out.
      fs::remove(path_, ignored);  // Stays when it holds anything.
    }
    release();
  }
}

}  // namespace plimsoll
