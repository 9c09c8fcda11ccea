// SPDX-License-Identifier: Apache-2.0
//
// python_place(): the line of Python that the calling thread is at, as Samples want it.
//
// Threads: any, with Python's lock or without: a thread reads its own frames, which stand still
//          while it is in C. set_library_folders(): with Python's lock, while nothing samples.
// Memory:  kLibraryFoldersMost paths.
#pragma once

#include <string>
#include <vector>

#include "watch/samples.h"

namespace plimsoll::python {

inline constexpr std::size_t kLibraryFoldersMost = 16;

/// Frames of files in these folders are passed over; the innermost of them counts where there is no
/// other. More than kLibraryFoldersMost are left out.
void set_library_folders(const std::vector<std::string>& folders);

/// The innermost line of the program itself. "" where the thread runs no Python, or this Python's
/// frames are not known (3.10 to 3.13 are).
void python_place(Place& place) noexcept;

}  // namespace plimsoll::python
