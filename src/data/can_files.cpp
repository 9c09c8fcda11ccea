// SPDX-License-Identifier: Apache-2.0
#include "data/can_files.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

#include <sys/stat.h>

#include <fmt/core.h>

#include "base/check.h"
#include "data/can_bytes.h"
#include "data/can_forms.h"
#include "data/column_shards.h"
#include "os/directories.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  });
  return text;
}

// Whether the first line is one that needs no header; false as well where it cannot be read.
bool begins_with_frame(const fs::path& path) {
  std::array<std::byte, 512> packed{};
  std::array<std::byte, 512> text{};
  auto bytes = CanBytes::open(path, packed);
  const auto size = bytes ? bytes->read(text) : Result<std::int64_t>(0);
  const std::string_view read(reinterpret_cast<const char*>(text.data()),
                              size ? static_cast<std::size_t>(*size) : 0);
  return can_shape(read.substr(0, read.find('\n')), false).form != CanForm::kColumns;
}

// A .csv, a .log, or a text of frames that needs no header to be known.
bool has_frames(const fs::path& path) {
  std::string name = lower(path.filename().string());
  if (name.ends_with(".gz")) {
    name.resize(name.size() - 3);
  }
  if (name.ends_with(".csv") || name.ends_with(".log")) {
    return true;
  }
  return name.ends_with(".txt") && begins_with_frame(path);
}

// "set_01/a.csv" for a.csv below the folder …/set_01, or given by itself from there.
std::string name_of(const fs::path& folder, const fs::path& path) {
  const fs::path absolute = fs::absolute(folder).lexically_normal();
  const fs::path last =
      absolute.has_filename() ? absolute.filename() : absolute.parent_path().filename();
  return (last / path.lexically_relative(folder)).generic_string();
}

Result<CanFile> look_at(const fs::path& path, std::string name) {
  constexpr std::int64_t kNsPerSecond = 1'000'000'000;
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    return fail_io(errno, path.string());
  }
  CanFile file{.path = path, .name = std::move(name)};
  file.test = is_test_name(file.name);
  file.bytes = status.st_size;
  file.modified_ns = status.st_mtim.tv_sec * kNsPerSecond + status.st_mtim.tv_nsec;
  return file;
}

// Every file below `folder`, by its name from `root`. A link to a folder is not followed.
Result<void> add_folder(const fs::path& root, const fs::path& folder, std::vector<CanFile>& found) {
  PLIMSOLL_TRY(const auto names, names_in(folder));
  for (const std::string& name : names) {
    const fs::path path = folder / name;
    std::error_code status;
    if (fs::is_directory(fs::symlink_status(path, status))) {
      PLIMSOLL_TRY_VOID(add_folder(root, path, found));
    } else if (has_frames(path) && !fs::is_directory(path, status)) {  // A link to nothing, too.
      PLIMSOLL_TRY(found.emplace_back(), look_at(path, name_of(root, path)));
    }
  }
  return {};
}

}  // namespace

bool is_test_name(const fs::path& name) {
  std::vector<std::string> parts;
  for (const fs::path& part : name) {
    parts.push_back(lower(part.string()));
  }
  for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
    if (part->starts_with("test_") || part->starts_with("train_")) {
      return part->starts_with("test_");
    }
  }
  return false;
}

Result<CanFiles> find_can_files(const CanImportOptions& options) {
  std::vector<CanFile> found;
  for (const fs::path& input : options.inputs) {
    std::error_code status;
    if (fs::is_directory(input, status)) {
      PLIMSOLL_TRY_VOID(add_folder(input, input, found));
    } else if (fs::exists(input, status)) {
      const fs::path absolute = fs::absolute(input);
      PLIMSOLL_TRY(found.emplace_back(), look_at(input, name_of(absolute.parent_path(), absolute)));
    } else {
      return fail(ErrorCode::kNotFound, input.string() + ": no such file or directory");
    }
  }
  std::sort(found.begin(), found.end(), [](const CanFile& a, const CanFile& b) {
    if (name_before(a.name, b.name) || name_before(b.name, a.name)) {
      return name_before(a.name, b.name);
    }
    return std::pair(a.name, a.path) < std::pair(b.name, b.path);  // "a01" and "a1" tie above.
  });
  const auto twice =
      std::adjacent_find(found.begin(), found.end(), [](const CanFile& a, const CanFile& b) {
        std::error_code status;
        return a.name == b.name && fs::equivalent(a.path, b.path, status);
      });
  if (twice != found.end()) {
    return fail(ErrorCode::kInvalidArgument, twice->path.string() + ": given twice");
  }
  CanFiles files;
  for (CanFile& file : found) {
    const std::string name = lower(file.name);
    const bool excluded =
        std::any_of(options.exclude.begin(), options.exclude.end(), [&](const std::string& word) {
          return !word.empty() && name.find(lower(word)) != std::string::npos;
        });
    if (excluded) {
      files.excluded.push_back(std::move(file.name));
    } else {
      files.files.push_back(std::move(file));
    }
  }
  if (files.files.empty()) {
    return fail(ErrorCode::kNotFound,
                fmt::format("no .csv, .log or text of frames to import; {} left out by their names",
                            files.excluded.size()),
                "name other inputs, or pass --include-all (exclude) to take every file");
  }
  return files;
}

}  // namespace plimsoll
