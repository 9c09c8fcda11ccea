// SPDX-License-Identifier: Apache-2.0
#include "os/directories.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <new>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fmt/core.h>

#include "base/check.h"
#include "os/crash_point.h"
#include "os/file.h"
#include "os/file_change.h"
#include "os/power_loss.h"
#include "os/room.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

constexpr int kTakeAttempts = 8;
constexpr std::int64_t kDirectoryBytes = 4096;

// Links resolved as far as there is something, and no slash at the end.
Result<fs::path> resolved(const fs::path& path) {
  std::error_code failed;
  fs::path real = fs::weakly_canonical(fs::absolute(path), failed);
  if (failed) {
    return fail_io(failed.value(), path.string());
  }
  return real.has_filename() ? real : real.parent_path();
}

// mkdir(2); whether it was not there before.
Result<bool> make_directory(const fs::path& path) {
  RoomNeed need(path);
  while (true) {
    const int status = change_names(
        "file.mkdir.before", FileCall::kMakeDirectory,
        [&] { return UnsyncedGuard::of_make_directory(path); },
        [&] { return ::mkdir(path.c_str(), 0777); });
    const int os_errno = errno;
    const bool made = status == 0;
    if (!made && is_full(os_errno) && need.wait(kDirectoryBytes)) {
      continue;
    }
    if (!made && os_errno != EEXIST) {
      return fail_io(os_errno, fmt::format("{}: making the directory", path.string()),
                     "choose a writable directory");
    }
    crash_point("file.mkdir.after");
    return made;
  }
}

// Whether the locked descriptor is of what is called `path`: its builder may have ended meanwhile.
bool is_of(int descriptor, const fs::path& path) {
  struct stat locked {};
  struct stat named {};
  return ::fstat(descriptor, &locked) == 0 && ::lstat(path.c_str(), &named) == 0 &&
         locked.st_dev == named.st_dev && locked.st_ino == named.st_ino;
}

// A descriptor of the directory, locked; none when it has been renamed or removed meanwhile.
Result<OwnDescriptor> take(const fs::path& path) {
  OwnDescriptor folder = OwnDescriptor::open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (folder.get() < 0) {
    if (errno == ENOENT) {
      return folder;
    }
    return fail_io(errno, fmt::format("{}: opening the directory", path.string()),
                   "remove what is there, unless it is yours");
  }
  if (::flock(folder.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) {
      return fail_io(errno, fmt::format("{}: locking the directory", path.string()));
    }
    return fail(ErrorCode::kInvalidArgument, path.string() + ": another process is writing there",
                "wait for it, or name another folder");
  }
  return is_of(folder.get(), path) ? std::move(folder) : OwnDescriptor();
}

tl::unexpected<Error> already_there(const fs::path& target) {
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("{}: already there, and not an empty directory", target.string()),
              "name another folder, or remove that one first");
}

Result<void> expect_free(const fs::path& target) {
  std::error_code failed;
  const auto found = fs::symlink_status(target, failed);
  if (!fs::exists(found)) {
    return {};
  }
  if (!fs::is_directory(found)) {
    return already_there(target);
  }
  PLIMSOLL_TRY(const auto names, names_in(target));
  return names.empty() ? Result<void>{} : already_there(target);
}

}  // namespace

Result<std::vector<std::string>> names_in(const fs::path& directory) {
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::opendir(directory.c_str()), ::closedir);
  std::vector<std::string> names;
  errno = entries == nullptr ? errno : 0;
  while (entries != nullptr) {
    const dirent* entry = ::readdir(entries.get());
    if (entry == nullptr) {
      break;
    }
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") {
      names.emplace_back(name);
    }
    errno = 0;
  }
  if (errno != 0) {
    return fail_io(errno, fmt::format("{}: listing it", directory.string()));
  }
  std::sort(names.begin(), names.end());
  return names;
}

Result<bool> make_directories(const fs::path& path) {
  PLIMSOLL_TRY(fs::path at, resolved(path));
  std::error_code ignored;
  std::vector<fs::path> missing;
  for (; !fs::exists(at, ignored) && at.has_relative_path(); at = at.parent_path()) {
    missing.push_back(at);
  }
  if (!fs::is_directory(at, ignored)) {
    return fail_io(ENOTDIR, fmt::format("{}: making {} in it", at.string(), path.string()),
                   "choose another directory");
  }
  const auto synced = sync_directory(at.parent_path());
  if (!synced && synced.error().os_errno != EACCES) {  // Above what is ours we may not look.
    return tl::unexpected(synced.error());
  }
  bool made = false;
  for (auto next = missing.rbegin(); next != missing.rend(); ++next) {
    PLIMSOLL_TRY(made, make_directory(*next));
    PLIMSOLL_TRY_VOID(sync_directory(next->parent_path()));
  }
  return made;
}

Result<void> remove_file(const fs::path& path) {
  const int status = change_names(
      "file.remove.before", FileCall::kRemove, [&] { return UnsyncedGuard::of_remove(path); },
      [&] { return std::remove(path.c_str()); });
  if (status != 0 && errno != ENOENT) {
    return fail_io(errno, fmt::format("{}: removing it", path.string()));
  }
  crash_point("file.remove.after");
  return {};
}

Result<void> remove_tree(const fs::path& path) {
  std::error_code status;
  const auto found = fs::symlink_status(path, status);
  if (!fs::exists(found)) {
    return {};
  }
  if (fs::is_directory(found)) {
    PLIMSOLL_TRY(const auto names, names_in(path));
    for (const std::string& name : names) {
      PLIMSOLL_TRY_VOID(remove_tree(path / name));
    }
  }
  return remove_file(path);
}

Result<void> exchange_names(const fs::path& one, const fs::path& other) {
  const int status = change_names(
      "file.rename.before", FileCall::kRename,
      [&] { return UnsyncedGuard::of_exchange(one, other); },
      [&] { return ::renameat2(AT_FDCWD, one.c_str(), AT_FDCWD, other.c_str(), RENAME_EXCHANGE); });
  if (status != 0) {
    return fail_io(errno, fmt::format("{}: exchanging it for {}", one.string(), other.string()),
                   errno == EINVAL ? "this file system cannot exchange two folders at once; export "
                                     "and import"
                                   : "");
  }
  crash_point("file.rename.after");
  return {};
}

Result<PartialDirectory> PartialDirectory::create(const fs::path& target, Target kind,
                                                  std::string_view suffix,
                                                  std::span<const char* const> names) {
  PartialDirectory partial;
  PLIMSOLL_TRY(partial.target_, resolved(target));
  partial.path_ = partial.target_;
  partial.path_ += suffix;
  partial.names_ = names;
  if (kind == Target::kNew) {  // Said before anything is made; finish() looks again.
    PLIMSOLL_TRY_VOID(expect_free(partial.target_));
  }
  for (int attempt = 0; partial.folder_.get() < 0; ++attempt) {
    if (attempt == kTakeAttempts) {
      return fail(ErrorCode::kInvalidArgument,
                  partial.path_.string() + ": other processes are writing there",
                  "wait for them, or name another folder");
    }
    PLIMSOLL_TRY_VOID(make_directories(partial.target_.parent_path()));
    PLIMSOLL_TRY_VOID(make_directory(partial.path_));
    PLIMSOLL_TRY(partial.folder_, take(partial.path_));
  }
  // What happened to the names here before may be known to the kernel alone.
  auto ready = sync_directory(partial.target_.parent_path());
  ready = ready && kind == Target::kNew ? expect_free(partial.target_) : ready;
  ready = ready ? partial.clear() : ready;
  PLIMSOLL_TRY_VOID(std::move(ready));
  PLIMSOLL_TRY(const auto left, names_in(partial.path_));
  if (!left.empty()) {
    partial.release();
    return fail(ErrorCode::kInvalidArgument,
                partial.path_.string() + ": holds files that are not ours; remove it first");
  }
  return partial;
}

PartialDirectory::~PartialDirectory() {
  if (folder_.get() >= 0) {
    try {
      if (is_of(folder_.get(), path_)) {  // Else it was moved; another may be building there.
        static_cast<void>(clear());
        static_cast<void>(remove_file(path_));  // Only when it is empty.
      }
    } catch (const std::bad_alloc&) {
      // No room for the names: whoever builds here next clears what is left.
    }
    release();
  }
}

Result<void> PartialDirectory::clear() {
  for (const char* name : names_) {
    PLIMSOLL_TRY_VOID(remove_file(path_ / name));
  }
  return {};
}

void PartialDirectory::release() noexcept {
  if (folder_.get() >= 0) {
    ::flock(folder_.get(), LOCK_UN);  // A child forked just now may not have closed its own.
    folder_ = OwnDescriptor();
  }
}

Result<void> PartialDirectory::finish() {
  PLIMSOLL_TRY_VOID(sync_directory(path_));
  PLIMSOLL_TRY_VOID(expect_free(target_));
  if (auto renamed = rename_file(path_, target_); !renamed) {
    const int reason = renamed.error().os_errno;
    if (reason == ENOTEMPTY || reason == EEXIST || reason == ENOTDIR) {
      return already_there(target_);
    }
    return renamed;
  }
  release();
  return sync_directory(target_.parent_path());
}

Result<void> PartialDirectory::exchange() {
  PLIMSOLL_TRY_VOID(sync_directory(path_));
  PLIMSOLL_TRY(OwnDescriptor old, take(target_));
  if (old.get() < 0) {
    return fail(ErrorCode::kNotFound, target_.string() + ": it was removed meanwhile");
  }
  PLIMSOLL_TRY_VOID(exchange_names(path_, target_));
  release();
  folder_ = std::move(old);
  auto durable = sync_directory(target_.parent_path());
  if (!durable) {
    release();
  }
  return durable;
}

}  // namespace plimsoll
