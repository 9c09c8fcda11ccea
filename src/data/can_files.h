// SPDX-License-Identifier: Apache-2.0
//
// can_files: which files an import takes, in which order, and which of them are for testing.
//
// Reading order: this file, can_import.cpp.
//
// Threads: pure function of the file system.   Memory: the names.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "plimsoll/can_import.h"
#include "plimsoll/result.h"

namespace plimsoll {

struct CanFile {
  std::filesystem::path path{};
  std::string name{};  ///< The folder it was found in, or that stands before it, and the rest.
  bool test{false};
  std::int64_t bytes{0};
  std::int64_t modified_ns{0};
};

struct CanFiles {
  std::vector<CanFile> files{};         ///< By name: numbers as numbers, so that 2 is before 10.
  std::vector<std::string> excluded{};  ///< Names of files left out.
};

/// True for a name whose last part that says so, from the file's name up, begins with "test_".
[[nodiscard]] bool is_test_name(const std::filesystem::path& name);

/// Errors: kNotFound (an input; nothing left, naming the option), kInvalidArgument (a file twice),
/// kIo.
Result<CanFiles> find_can_files(const CanImportOptions& options);

}  // namespace plimsoll
