// SPDX-License-Identifier: Apache-2.0
//
// Loading, asking and releasing a teacher; the file of its answers.
//
// Threads: single-owner.   Memory: see teacher.h.
#include "recipes/can_kd/teacher.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <cstring>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

#include "base/check.h"
#include "data/disk_room.h"
#include "recipes/can_kd/learner.h"
#include "recipes/can_kd/shapes.h"
#include "torch/random_tensors.h"

namespace plimsoll::can_kd {
namespace {

class ClassifierTeacher final : public TeacherModel {
 public:
  explicit ClassifierTeacher(const GatShape& shape) : model_(shape, 0) {}
  at::Tensor answers(const GraphTensors& batch, const Adjacency& adjacency) const override {
    return model_.forward(batch, adjacency, answering_mode());
  }
  [[nodiscard]] std::vector<NamedTensor> tensors() const override {
    return joined(model_.parameters(), model_.buffers());
  }

 private:
  GatClassifier model_;
};

class AutoencoderTeacher final : public TeacherModel {
 public:
  explicit AutoencoderTeacher(const VgaeShape& shape) : model_(shape, 0) {}
  at::Tensor answers(const GraphTensors& batch, const Adjacency& adjacency) const override {
    const VgaeOutput out = model_.forward(batch, adjacency, answering_mode());
    return at::cat({out.mean, out.reconstruction}, 1);
  }
  [[nodiscard]] std::vector<NamedTensor> tensors() const override {
    return joined(model_.parameters(), model_.buffers());
  }

 private:
  Vgae model_;
};

std::unique_ptr<TeacherModel> make_model(const TeacherShape& shape) {
  if (const auto* autoencoder = std::get_if<VgaeShape>(&shape)) {
    return std::make_unique<AutoencoderTeacher>(*autoencoder);
  }
  return std::make_unique<ClassifierTeacher>(std::get<GatShape>(shape));
}

std::span<std::byte> row_bytes(const at::Tensor& rows, std::int64_t first, std::int64_t count) {
  const std::int64_t width = rows.size(1);
  return {reinterpret_cast<std::byte*>(rows.data_ptr<float>() + first * width),
          static_cast<std::size_t>(4 * count * width)};
}

}  // namespace

std::vector<NamedTensor> teacher_tensors(const TeacherShape& shape) {
  const UndrawnWeights shapes(UndrawnWeights::Kind::kShapes);
  return make_model(shape)->tensors();
}

Result<std::unique_ptr<Teacher>> Teacher::open(const Governor& governor, const GraphSet& set,
                                               const TeacherOptions& options) {
  std::unique_ptr<Teacher> teacher(new Teacher);
  teacher->options_ = options;
  teacher->set_ = &set;
  const auto* autoencoder = std::get_if<VgaeShape>(&options.shape);
  teacher->by_node_ = autoencoder != nullptr;
  teacher->width_ = autoencoder != nullptr ? autoencoder->latent() + kContinuous : kClasses;
  PLIMSOLL_TRY_VOID(teacher->load());
  teacher->parameters_ = parameter_count(teacher->model_->tensors());
  if (options.cache.empty()) {
    return teacher;
  }
  const std::int64_t graphs = set.graphs();
  teacher->first_row_ = at::empty({graphs}, at::kLong);
  teacher->known_ = at::zeros({graphs}, at::kByte);
  std::int64_t rows = 0;
  auto* first = teacher->first_row_.data_ptr<std::int64_t>();
  for (std::int64_t graph = 0; graph < graphs; ++graph) {
    first[graph] = rows;
    rows += teacher->by_node_ ? set.counts(graph).nodes : 1;
  }
  PLIMSOLL_TRY_VOID(
      check_disk_room(governor, options.cache.parent_path(), 4 * rows * teacher->width_));
  PLIMSOLL_TRY(teacher->file_, File::open(options.cache, FileMode::kCreate));
  PLIMSOLL_TRY_VOID(teacher->file_.truncate(4 * rows * teacher->width_));
  return teacher;
}

Result<void> Teacher::load() {
  if (model_) {
    return {};
  }
  const c10::AutoGradMode off{false};
  std::optional<UndrawnWeights> unset;
  if (!options_.weights.empty()) {
    unset.emplace(UndrawnWeights::Kind::kUnset);
  }
  auto made = make_model(options_.shape);
  if (!options_.weights.empty()) {
    PLIMSOLL_TRY_VOID(load_tensors(options_.weights, made->tensors()));
  }
  model_ = std::move(made);
  stats_.loads += 1;
  return {};
}

std::int64_t Teacher::weight_bytes() const noexcept {
  std::int64_t bytes = 0;
  if (model_) {
    for (const NamedTensor& named : model_->tensors()) {
      bytes += static_cast<std::int64_t>(named.tensor.nbytes());
    }
  }
  return bytes;
}

Result<void> Teacher::for_rows(
    const GraphTensors& batch,
    const std::function<Result<void>(std::int64_t, std::int64_t, std::int64_t, std::int64_t)>& work)
    const {
  const auto* graphs = batch.graphs.data_ptr<std::int64_t>();
  const auto* first = first_row_.data_ptr<std::int64_t>();
  std::int64_t row = 0;
  for (std::int64_t i = 0; i < batch.graphs.numel(); ++i) {
    const std::int64_t rows = by_node_ ? set_->counts(graphs[i]).nodes : 1;
    PLIMSOLL_TRY_VOID(work(graphs[i], row, rows, first[graphs[i]]));
    row += rows;
  }
  return {};
}

bool Teacher::has_all(const GraphTensors& batch) const {
  const auto* graphs = batch.graphs.data_ptr<std::int64_t>();
  const auto* known = known_.data_ptr<std::uint8_t>();
  for (std::int64_t i = 0; i < batch.graphs.numel(); ++i) {
    if (known[graphs[i]] == 0) {
      return false;
    }
  }
  return true;
}

Result<void> Teacher::read_cached(const GraphTensors& batch, const at::Tensor& out) {
  return for_rows(batch, [&](std::int64_t, std::int64_t row, std::int64_t rows, std::int64_t at) {
    return file_.read_at(4 * at * width_, row_bytes(out, row, rows));
  });
}

Result<void> Teacher::keep(const GraphTensors& batch, const at::Tensor& answers) {
  auto* known = known_.data_ptr<std::uint8_t>();
  return for_rows(
      batch,
      [&](std::int64_t graph, std::int64_t row, std::int64_t rows,
          std::int64_t at) -> Result<void> {
        if (known[graph] == 0) {
          PLIMSOLL_TRY_VOID(file_.write_at(4 * at * width_, row_bytes(answers, row, rows)));
          known[graph] = 1;
        }
        return {};
      });
}

Result<at::Tensor> Teacher::computed(const GraphTensors& batch, const Adjacency& adjacency) {
  PLIMSOLL_TRY_VOID(load());
  const c10::AutoGradMode off{false};
  return model_->answers(batch, adjacency).contiguous();
}

Result<at::Tensor> Teacher::answers(const GraphTensors& batch, const Adjacency& adjacency) {
  stats_.asked += batch.graphs.numel();
  if (!file_.valid()) {
    return computed(batch, adjacency);
  }
  if (has_all(batch)) {
    const at::Tensor out =
        at::empty({by_node_ ? batch.x.size(0) : batch.graphs.numel(), width_}, at::kFloat);
    PLIMSOLL_TRY_VOID(read_cached(batch, out));
    stats_.cached += batch.graphs.numel();
    return out;
  }
  PLIMSOLL_TRY(at::Tensor made, computed(batch, adjacency));
  PLIMSOLL_TRY_VOID(keep(batch, made));
  return made;
}

Result<void> Teacher::end_step() {
  if (options_.released) {
    model_.reset();
  }
  steps_ += 1;
  if (file_.valid() && options_.clear_cache_every_n > 0 &&
      steps_ % options_.clear_cache_every_n == 0) {
    PLIMSOLL_TRY_VOID(file_.sync());  // Only what is written can be given back.
    file_.drop_cache();
    stats_.cleared += 1;
  }
  return {};
}

}  // namespace plimsoll::can_kd
