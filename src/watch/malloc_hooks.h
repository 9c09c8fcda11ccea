// SPDX-License-Identifier: Apache-2.0
//
// MallocHooks: shows Samples what the loaded libraries allocate, without preloading anything.
//
// A library calls malloc() by way of a table that the dynamic linker filled (ELF's global offset
// table). install() writes our function's address there, in each library but the C library, the
// linker and ours; remove() writes back what the name stands for. What a library has of the table's
// entries in pages that were made read-only after loading is made writable for the moment. Calls
// that do not go by the table are not seen: those through dlsym() (ctypes), and the C library's own
// (stacks of threads, getline()).
//
// Threads: install() and remove() queue up; the libraries' threads may run on.
// Memory:  none; hooks stay callable for good, since a library may have kept their address.
#pragma once

namespace plimsoll {

class MallocHooks {
 public:
  /// What Samples are shown.
  enum class Of {
    kHeap,  ///< malloc() and its kin.
    kMaps   ///< mmap() and munmap().
  };

  /// Shows those to Samples from now on, of the libraries that are loaded now: another call takes
  /// in what was loaded since. Returns how many entries it wrote; 0 where nothing is new.
  static int install(Of of);
  /// Writes back what was there.
  static void remove();
};

}  // namespace plimsoll
