// SPDX-License-Identifier: Apache-2.0
//
// FolderLock: the right to change what is in a folder, of one object in one process at a time.
//
// It is an exclusive lock on the file `.lock` in the folder, which says who holds it. It ends with
// the object and with its process, however that ends; the file stays. A forked child has no part in
// it. Who reads asks held() and takes nothing.
//
// Threads: single-owner.   Memory: a descriptor.
#pragma once

#include <chrono>
#include <filesystem>

#include "os/range_locks.h"
#include "plimsoll/result.h"

namespace plimsoll {

class FolderLock {
 public:
  /// What a refusal says, both static: "DIR: process 4711 <doing>", and what to do.
  struct Words {
    const char* doing;
    const char* advice;
  };

  /// Takes the lock, making the folder where there is none; waits for who holds it, `wait` at most.
  /// Errors: kInvalidArgument when it is held, naming the process, or when the file system has no
  ///         locks; kIo.
  static Result<FolderLock> take(const std::filesystem::path& folder, const Words& words,
                                 std::chrono::milliseconds wait = {});

  /// Whether somebody holds it. False where there is no such folder.
  [[nodiscard]] static bool held(const std::filesystem::path& folder);

  FolderLock() noexcept = default;
  FolderLock(FolderLock&&) noexcept = default;
  FolderLock& operator=(FolderLock&& other) noexcept;
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock();

  /// Ends it and removes its file, and the folder if take() made it and nothing else is there.
  void abandon() noexcept;

 private:
  void release() noexcept;

  RangeLocks locks_;
  std::filesystem::path path_{};  // Of its file.
  bool made_folder_{false};
};

}  // namespace plimsoll
