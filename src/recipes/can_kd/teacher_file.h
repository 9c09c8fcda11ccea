// SPDX-License-Identifier: Apache-2.0
//
// TeacherFile: the weights that teacher_path names, whoever saved them.
//
// A finished model of ours says by its tensors what shape it has, so a teacher may have been
// trained with other sizes than this run's. So do the original's weights, a state dict of
// torch.save or safetensors made of it, under its names (id_embedding.weight, convs.0.lin.weight,
// encoder_bns.0.running_var, …), alone or within a checkpoint (state_dict); a prefix that wrappers
// put before every name is dropped. Nothing of a pickle is run (data/pickle_reader.h).
// Reading order: shapes.h, teacher.h, data/torch_archive.h, this file.
//
// Threads: single-owner.
// Memory:  at most 4,096 names of 256 bytes and shapes; of a file of torch.save a window and its
//          pickle, leased; a tensor at a time while a copy is written.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "data/safetensors.h"
#include "data/torch_archive.h"
#include "plimsoll/governor.h"
#include "plimsoll/result.h"
#include "recipes/can_kd/config.h"
#include "recipes/can_kd/shapes.h"
#include "recipes/can_kd/task.h"

namespace plimsoll::can_kd {

/// The file of the teacher that `task` learns from within teacher_path: that itself, or in the
/// folder or run it names. Requires: teacher_path is not empty. Errors: kNotFound.
Result<std::filesystem::path> find_teacher_file(const CanKdConfig& config, const Task& task);

/// Of that file, or without a teacher_path of this run's own teacher.
/// Errors: those of find_teacher_file(), TeacherFile::open() and shape().
Result<TeacherShape> teacher_shape(const Governor& governor, const CanKdConfig& config,
                                   const Task& task, std::int64_t ids);

class TeacherFile {
 public:
  /// Reads names and shapes. Errors: kNotFound, kIo, kCorrupt (no such file, damage, a class that
  /// is not known), kInvalidArgument (no tensors in it), kOverBudget.
  static Result<TeacherFile> open(const Governor& governor, const std::filesystem::path& path);

  /// The shape of the model it holds; `ids` as GraphSetInfo::table_rows(). Errors: kInvalidArgument
  /// for another kind of model than the task's, or one of another vocabulary; for a tensor that is
  /// missing, of another shape or not float32, by its name.
  [[nodiscard]] Result<TeacherShape> shape(const Task& task, std::int64_t ids) const;

  /// Whether load_tensors() reads it as it is: a finished model of ours, whose checksum matched.
  [[nodiscard]] bool is_ours() const noexcept { return ours_; }

  /// Writes its float32 tensors under our names, for load_tensors(). Errors: kIo, kCorrupt.
  Result<void> write_ours(const std::filesystem::path& path);

 private:
  struct Entry {
    std::string saved_as{};
    std::string dtype{};  ///< As safetensors calls it.
    std::vector<std::int64_t> shape{};
    TorchTensor tensor{};  ///< Of a file of torch.save.
  };
  using Sizes = std::vector<std::int64_t>;

  TeacherFile() = default;
  Result<void> read_archive(const Governor& governor);
  Result<void> read_safetensors();
  Result<void> name_entries(std::vector<Entry> entries);
  [[nodiscard]] const Sizes* sizes(const std::string& name) const;
  /// Of a tensor of so many dimensions.
  [[nodiscard]] Result<Sizes> sizes(const std::string& name, std::size_t dims) const;
  [[nodiscard]] Result<GatShape> classifier() const;
  [[nodiscard]] Result<VgaeShape> autoencoder() const;
  [[nodiscard]] tl::unexpected<Error> bad(const std::string& what) const;

  std::filesystem::path path_;
  bool ours_{false};
  std::map<std::string, Entry> entries_;  // By our names; those that have none keep their own.
  std::optional<TorchArchive> archive_;
  std::optional<SafetensorsReader> safetensors_;
};

}  // namespace plimsoll::can_kd
