// SPDX-License-Identifier: Apache-2.0
//
// replace_file_with(): a file that is the old one or the new one after any crash.
//
// It completes the commit of a training loop: first EmbeddingStore::commit(step) of each table,
// then the file that names the step. Killed in between, the file names the step before, which the
// tables still have (EmbeddingStoreOptions::at_step). docs/how-to/cpp.md has such a loop. Reading
// order: result.h, this file, then src/os/file.cpp.
//
// Threads: a free function; one caller at a time per path.   Memory: two paths.
#pragma once

#include <filesystem>
#include <functional>

#include "plimsoll/result.h"

namespace plimsoll {

/// Has `write` make the file PATH.new, then syncs it and gives it the name `path`, durably.
///
/// Requires: the folder of `path` exists; `write` has closed the file when it returns.
/// Errors:   those of `write`; kNotFound when it made no file; kIo. `path` is then as it was; only
///           after a failed last sync it may be the new file. What `write` throws passes through,
///           and PATH.new stays.
Result<void> replace_file_with(
    const std::filesystem::path& path,
    const std::function<Result<void>(const std::filesystem::path& beside)>& write);

}  // namespace plimsoll
