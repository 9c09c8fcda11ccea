// SPDX-License-Identifier: Apache-2.0
#include "os/file.h"

#include <algorithm>
#include <cerrno>
#include <optional>
#include <tuple>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fmt/core.h>

#include "base/check.h"
#include "os/crash_point.h"
#include "os/file_change.h"
#include "os/file_faults.h"
#include "os/power_loss.h"
#include "os/room.h"
#include "plimsoll/replace_file.h"

namespace plimsoll {

namespace {

constexpr std::int64_t kNameBytes = 4096;  // What a new name may take.
constexpr const char* kFullAdvice = "free some space there, or choose another directory";

// The advice that fits an errno met while writing.
const char* write_advice(int os_errno) noexcept {
  return is_full(os_errno) ? kFullAdvice : "";
}

int open_retrying(const char* path, int flags) noexcept {
  int descriptor = -1;
  do {
    descriptor = ::open(path, flags | O_CLOEXEC, 0644);
  } while (descriptor < 0 && errno == EINTR);
  return descriptor;
}

// How far a transfer has come. A direct one that stops within a block goes on at the block's start.
class Progress {
 public:
  Progress(bool direct, std::size_t wanted) noexcept : direct_(direct), wanted_(wanted) {}
  [[nodiscard]] std::size_t done() const noexcept { return done_; }
  [[nodiscard]] std::size_t left() const noexcept { return wanted_ - done_; }
  /// What to ask for, at most `most` where that can be asked for: direct transfers are of blocks.
  [[nodiscard]] std::size_t next(std::size_t most) const noexcept {
    return std::min(left(), direct_ ? std::max(most - most % kDirectUnit, kDirectUnit) : most);
  }
  /// False when it has come no further for a while.
  bool advance(std::size_t moved) noexcept {
    const std::size_t before = done_;
    done_ += moved;
    if (direct_ && done_ < wanted_) {
      done_ -= done_ % kDirectUnit;
    }
    stuck_ = done_ > before ? 0 : stuck_ + 1;
    return stuck_ < kStuckMost;
  }

 private:
  static constexpr std::size_t kDirectUnit = 4096;
  static constexpr int kStuckMost = 4;
  const bool direct_;
  const std::size_t wanted_;
  std::size_t done_{0};
  int stuck_{0};
};

}  // namespace

tl::unexpected<Error> open_failed(const std::filesystem::path& path, int flags) {
  if (errno == ENOENT) {
    return fail(ErrorCode::kNotFound, fmt::format("{}: no such file or directory", path.string()));
  }
  if (errno == ELOOP && (flags & O_NOFOLLOW) != 0) {
    return fail_io(errno, fmt::format("{}: not written through a symbolic link", path.string()),
                   "remove the link, or put the file itself in its place");
  }
  return fail_io(errno, path.string());
}

Result<int> open_descriptor(const std::filesystem::path& path, int flags) {
  const int descriptor = open_retrying(path.c_str(), flags | O_NOFOLLOW);
  if (descriptor < 0) {
    return open_failed(path, flags | O_NOFOLLOW);
  }
  return descriptor;
}

Result<File> File::open(const std::filesystem::path& path, FileMode mode, bool direct) {
  const bool creates = mode == FileMode::kCreate;
  const int flags = mode == FileMode::kRead ? O_RDONLY
                    : creates               ? O_RDWR | O_NOFOLLOW | O_CREAT | O_EXCL
                                            : O_RDWR | O_NOFOLLOW;
  File file;
  file.path_ = path;
  if (mode != FileMode::kRead) {
    if (const auto fault = ask_file_fault(FileCall::kOpenToWrite); fault.fails) {
      errno = fault.os_errno;
      return open_failed(path, flags);
    }
  }
  std::optional<UnsyncedGuard> creation;
  if (creates) {
    creation.emplace(UnsyncedGuard::of_create(path));
  }
  const auto open_with = [&](int more) {
    if (creates && ::unlink(path.c_str()) != 0 && errno != ENOENT) {
      return false;
    }
    file.descriptor_ = open_retrying(path.c_str(), flags | more);
    return file.descriptor_ >= 0;
  };
  RoomNeed need(path);
  const auto open_with_room = [&](int more) {
    while (!open_with(more)) {
      const int os_errno = errno;
      if (!creates || !is_full(os_errno) || !need.wait(kNameBytes)) {
        errno = os_errno;
        return false;
      }
    }
    return true;
  };
  file.direct_ = direct && open_with_room(O_DIRECT);
  if (direct && !file.direct_ && errno != EINVAL) {  // EINVAL: this file system has no direct I/O.
    return open_failed(path, flags);
  }
  if (!file.direct_ && !open_with_room(0)) {
    return open_failed(path, flags);
  }
  return file;
}

File::File(File&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      direct_(other.direct_),
      path_(std::move(other.path_)) {}

File& File::operator=(File&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(direct_, other.direct_);
  path_.swap(other.path_);
  return *this;
}

File::~File() {
  if (descriptor_ >= 0) {
    ::close(descriptor_);
  }
}

Result<void> File::read_at(std::int64_t offset, std::span<std::byte> out) const {
  Progress progress(direct_, out.size());
  while (progress.left() > 0) {
    const FaultVerdict fault = ask_file_fault(FileCall::kRead);
    const std::size_t wanted = progress.next(fault.bytes_max);
    const auto at = offset + static_cast<std::int64_t>(progress.done());
    ssize_t got = -1;
    if (fault.fails) {
      errno = fault.os_errno;
    } else {
      got = ::pread(descriptor_, out.data() + progress.done(), wanted, at);
    }
    if (got < 0) {
      if (errno == EINTR) {
        continue;
      }
      return fail_io(errno,
                     fmt::format("{}: reading {} bytes at {}", path_.string(), out.size(), offset));
    }
    const bool ended = got == 0 && wanted > 0;
    if (ended || !progress.advance(static_cast<std::size_t>(got))) {
      return fail(ErrorCode::kCorrupt,
                  fmt::format("{}: ends at byte {}, but {} bytes at {} were expected",
                              path_.string(), at + got, out.size(), offset));
    }
  }
  return {};
}

Result<void> File::write_at(std::int64_t offset, std::span<const std::byte> bytes) {
  crash_point("file.write.before");
  Progress progress(direct_, bytes.size());
  RoomNeed need(path_);
  while (progress.left() > 0) {
    const FaultVerdict fault = ask_file_fault(FileCall::kWrite);
    const std::size_t wanted = progress.next(fault.bytes_max);
    const auto at = offset + static_cast<std::int64_t>(progress.done());
    ssize_t put = -1;
    if (fault.fails) {
      errno = fault.os_errno;
    } else {
      const auto noted = UnsyncedGuard::of_write(path_, at, wanted);
      put = ::pwrite(descriptor_, bytes.data() + progress.done(), wanted, at);
    }
    if (put < 0 && errno == EINTR) {
      continue;
    }
    if (put >= 0 && !progress.advance(static_cast<std::size_t>(put))) {
      put = -1;
      errno = EIO;  // A disk that takes no whole block.
    }
    if (put < 0) {
      const int os_errno = errno;
      if (is_full(os_errno) && need.wait(static_cast<std::int64_t>(progress.left()))) {
        continue;
      }
      return fail_io(
          os_errno, fmt::format("{}: writing {} bytes at {}", path_.string(), bytes.size(), offset),
          write_advice(os_errno));
    }
  }
  crash_point("file.write.after");
  return {};
}

Result<void> File::sync() {
  crash_point("file.sync.before");
  const FaultVerdict fault = ask_file_fault(FileCall::kSync);
  int status = -1;
  if (fault.fails) {
    errno = fault.os_errno;
  } else if (recording_unsynced()) [[unlikely]] {
    status = 0;
  } else {
    status = ::fdatasync(descriptor_);  // Not retried: after an error the pages may be clean.
  }
  const bool lies = fault.bytes_max != SIZE_MAX;  // A test's disk that only says so.
  if (recording_unsynced() && !lies) [[unlikely]] {
    note_sync(path_, status != 0);
  }
  if (status != 0) {
    return fail_io(errno, fmt::format("{}: syncing", path_.string()), write_advice(errno));
  }
  crash_point("file.sync.after");
  return {};
}

Result<void> File::truncate(std::int64_t bytes) {
  crash_point("file.truncate.before");
  int status = 0;
  do {
    const auto noted = UnsyncedGuard::of_resize(path_, bytes);
    status = ::ftruncate(descriptor_, bytes);
  } while (status != 0 && errno == EINTR);
  if (status != 0) {
    return fail_io(errno, fmt::format("{}: setting its size to {}", path_.string(), bytes),
                   write_advice(errno));
  }
  crash_point("file.truncate.after");
  return {};
}

void File::reserve(std::int64_t from, std::int64_t to) {
  const auto noted = UnsyncedGuard::of_resize(path_, to);
  std::ignore = ::fallocate(descriptor_, 0, from, to - from);  // No room: the write says so.
}

void File::drop_cache() noexcept {
  if (!direct_ && descriptor_ >= 0) {
    ::posix_fadvise(descriptor_, 0, 0, POSIX_FADV_DONTNEED);
  }
}

Result<std::int64_t> File::size() const {
  struct stat facts {};
  if (::fstat(descriptor_, &facts) != 0) {
    return fail_io(errno, fmt::format("{}: asking its size", path_.string()));
  }
  return static_cast<std::int64_t>(facts.st_size);
}

bool File::still_named() const noexcept {
  struct stat own {};
  struct stat named {};
  return descriptor_ >= 0 && ::fstat(descriptor_, &own) == 0 &&
         ::lstat(path_.c_str(), &named) == 0 && own.st_dev == named.st_dev &&
         own.st_ino == named.st_ino;
}

Result<std::string> read_small_file(const std::filesystem::path& path, std::int64_t bytes_max) {
  PLIMSOLL_TRY(const File file, File::open(path, FileMode::kRead));
  PLIMSOLL_TRY(const std::int64_t bytes, file.size());
  if (bytes > bytes_max) {
    return fail(ErrorCode::kCorrupt, fmt::format("{}: {} bytes where at most {} were expected",
                                                 path.string(), bytes, bytes_max));
  }
  std::string content(static_cast<std::size_t>(bytes), '\0');
  PLIMSOLL_TRY_VOID(file.read_at(0, std::as_writable_bytes(std::span(content))));
  return content;
}

Result<void> sync_directory(const std::filesystem::path& directory) {
  const std::filesystem::path named = directory.empty() ? "." : directory;
  const int descriptor = open_retrying(named.c_str(), O_RDONLY | O_DIRECTORY);
  if (descriptor < 0) {
    return open_failed(named, O_RDONLY);
  }
  crash_point("file.sync.before");
  const FaultVerdict fault = ask_file_fault(FileCall::kSync);
  const bool recording = recording_unsynced();
  const int status = fault.fails ? -1 : (recording ? 0 : ::fsync(descriptor));
  const int os_errno = fault.fails ? fault.os_errno : errno;
  ::close(descriptor);
  if (recording && status == 0) [[unlikely]] {
    note_directory_sync(named);
  }
  if (status != 0 && os_errno != EINVAL) {  // EINVAL: nothing to sync on this file system.
    return fail_io(os_errno, fmt::format("{}: syncing the directory", named.string()),
                   write_advice(os_errno));
  }
  crash_point("file.sync.after");
  return {};
}

Result<void> rename_file(const std::filesystem::path& from, const std::filesystem::path& to) {
  const auto rename = [&] {
    return change_names(
        "file.rename.before", FileCall::kRename, [&] { return UnsyncedGuard::of_rename(from, to); },
        [&] { return ::rename(from.c_str(), to.c_str()); });
  };
  RoomNeed need(to);
  while (rename() != 0) {
    const int os_errno = errno;
    if (!is_full(os_errno) || !need.wait(kNameBytes)) {
      return fail_io(os_errno, fmt::format("{}: renaming it to {}", from.string(), to.string()),
                     write_advice(os_errno));
    }
  }
  crash_point("file.rename.after");
  return {};
}

namespace {

Result<void> write_new(const std::filesystem::path& path, std::string_view content,
                       Durable durable) {
  PLIMSOLL_TRY(File file, File::open(path, FileMode::kCreate));
  PLIMSOLL_TRY_VOID(file.write_at(0, std::as_bytes(std::span(content))));
  return durable == Durable::kYes ? file.sync() : Result<void>{};
}

}  // namespace

Result<void> replace_file(const std::filesystem::path& path, std::string_view content,
                          Durable durable) {
  std::filesystem::path beside = path;
  beside += ".new";
  auto written = write_new(beside, content, durable);
  if (written) {
    written = rename_file(beside, path);
  }
  if (!written) {
    ::unlink(beside.c_str());  // Best effort: the old file is untouched, which is what counts.
    return written;
  }
  return durable == Durable::kYes ? sync_directory(path.parent_path()) : Result<void>{};
}

Result<void> replace_file_with(
    const std::filesystem::path& path,
    const std::function<Result<void>(const std::filesystem::path& beside)>& write) {
  std::filesystem::path beside = path;
  beside += ".new";
  const auto replaced = [&]() -> Result<void> {
    PLIMSOLL_TRY_VOID(write(beside));
    PLIMSOLL_TRY(File file, File::open(beside, FileMode::kReadWrite));
    PLIMSOLL_TRY_VOID(file.sync());
    return rename_file(beside, path);
  }();
  if (!replaced) {
    ::unlink(beside.c_str());  // As above.
    return replaced;
  }
  return sync_directory(path.parent_path());
}

Result<void> rename_durable(const std::filesystem::path& from, const std::filesystem::path& to) {
  PLIMSOLL_TRY_VOID(rename_file(from, to));
  if (from.parent_path() != to.parent_path()) {
    PLIMSOLL_TRY_VOID(sync_directory(from.parent_path()));
  }
  return sync_directory(to.parent_path());
}

}  // namespace plimsoll
