// SPDX-License-Identifier: Apache-2.0
//
// change_names(): a system call that changes names, as the tests' seams see it.
//
// Reading order: crash_point.h, file_faults.h, power_loss.h, this file, directories.cpp.
//
// Threads: any.   Memory: none.
#pragma once

#include <cerrno>

#include "os/crash_point.h"
#include "os/file_faults.h"
#include "os/power_loss.h"

namespace plimsoll {

/// Makes `call`, which returns 0 or sets errno, after the crash point `before` and unless a fault
/// of `kind` is armed; `note` makes the UnsyncedGuard that is held meanwhile. Returns what `call`
/// does.
template <class Note, class Call>
int change_names(const char* before, FileCall kind, Note note, Call call) {
  crash_point(before);
  const FaultVerdict fault = ask_file_fault(kind);
  if (fault.fails) {
    errno = fault.os_errno;
    return -1;
  }
  const UnsyncedGuard noted = note();
  return call();
}

}  // namespace plimsoll
