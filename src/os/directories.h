// SPDX-License-Identifier: Apache-2.0
//
// Directories: listed, made durable, removed, exchanged; and one that is there whole or not at all.
//
// Everything that is written into a directory goes with it if a power failure takes the directory,
// so none is made but by make_directories(). Like those of File (file.h), these calls pass crash
// points, file faults and the power-loss model.
//
// Threads: any; PartialDirectory is single-owner.   Memory: paths; a PartialDirectory a descriptor.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "os/fork.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// Names of all that is in a directory, sorted. In place of std::filesystem's iterators, which end
/// the program when memory is short. Errors: kIo, of ENOENT where there is none.
Result<std::vector<std::string>> names_in(const std::filesystem::path& directory);

/// Makes a directory and those above it that are missing, each durable before anything is put into
/// it, and the first that is there already too: whoever made it may have been killed before that.
/// Returns whether the last of them was made here; of two who make it at once one is told so.
/// Errors: kIo.
Result<bool> make_directories(const std::filesystem::path& path);

/// Removes a file, a link or an empty directory; one that is not there is no error. Durable after
/// sync_directory(). Errors: kIo.
Result<void> remove_file(const std::filesystem::path& path);

/// Removes a file or a directory with all that is in it, and no link's target. Errors: kIo.
Result<void> remove_tree(const std::filesystem::path& path);

/// Exchanges the names of two directories in one step. Durable after sync_directory() of what holds
/// them. Errors: kIo; nothing has changed then.
Result<void> exchange_names(const std::filesystem::path& one, const std::filesystem::path& other);

/// A directory that is built beside its name, `TARGET` + suffix, locked against a second builder,
/// and takes the name when it is whole; or is removed again. Only files of the names given are ever
/// removed: those that its builder may leave.
class PartialDirectory {
 public:
  enum class Target : std::uint8_t { kNew, kReplaced };

  /// Makes it, or clears what a killed builder left. A link at `target` is followed: it is built
  /// beside the directory itself. `names` must outlive this.
  /// Errors: kInvalidArgument: the target is to be new and is neither missing nor empty, another
  /// process builds there, or there are files of other names; kIo.
  static Result<PartialDirectory> create(const std::filesystem::path& target, Target kind,
                                         std::string_view suffix,
                                         std::span<const char* const> names);

  PartialDirectory() noexcept = default;
  PartialDirectory(PartialDirectory&& other) noexcept = default;
  PartialDirectory& operator=(PartialDirectory&&) = delete;
  ~PartialDirectory();

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  /// Where it will be: absolute, links resolved.
  [[nodiscard]] const std::filesystem::path& target() const noexcept { return target_; }

  /// Takes the target's name, where nothing or an empty directory is, durably. Requires: all that
  /// is in it is synced. Errors: kInvalidArgument when something else is there by now; kIo.
  Result<void> finish();
  /// Exchanges it for the target, durably; what the target was is then removed with this. When it
  /// cannot be made durable, both stay: which of them has the name after a power failure is open.
  /// Errors: kIo.
  Result<void> exchange();

 private:
  void release() noexcept;
  Result<void> clear();

  std::filesystem::path target_{};
  std::filesystem::path path_{};
  std::span<const char* const> names_{};
  OwnDescriptor folder_{};  // At path_, locked; none: it is not ours to remove, nor a child's.
};

}  // namespace plimsoll
