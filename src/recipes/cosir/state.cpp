// SPDX-License-Identifier: Apache-2.0
//
// Saving, loading and digesting a run.
//
// Threads: single-owner.   Memory: one record, for the rows' digest.
#include "recipes/cosir/state.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "base/check.h"

namespace plimsoll::cosir {
namespace {

DenseAdamOptions optimizer(double learning_rate, const CosirConfig& config) {
  DenseAdamOptions options;
  options.learning_rate = learning_rate;
  options.weight_decay = config.weight_decay;
  return options;
}

void append(std::vector<NamedTensor>& to, const std::vector<NamedTensor>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

}  // namespace

State::State(const CosirConfig& config, const ModelShape& shape)
    : model(make_model(shape, static_cast<std::uint64_t>(config.seed))),
      classifier(config.phase2_epochs > 0
                     ? make_classifier(shape.dim, static_cast<std::uint64_t>(config.seed))
                     : Classifier{}),
      combiner(combiner_parameters(model), optimizer(config.lr, config)),
      projections(projection_parameters(model), optimizer(config.projection_lr, config)),
      labeller(classifier.dim > 0 ? classifier_parameters(classifier) : std::vector<NamedTensor>{},
               optimizer(config.phase2_lr, config)) {}

std::vector<NamedTensor> State::tensors() const {
  std::vector<NamedTensor> list;
  append(list, frozen_parameters(model));
  append(list, combiner_parameters(model));
  append(list, projection_parameters(model));
  append(list, combiner.state());
  append(list, projections.state());
  if (classifier.dim > 0) {
    append(list, classifier_parameters(classifier));
    append(list, labeller.state());
  }
  return list;
}

Result<void> State::save(RunFolder& folder, EmbeddingStore& rows, std::int64_t keep) const {
  CheckpointState state;
  state.step = at.step;
  state.loader = at.loader;
  state.numbers = {{"loss_sum", at.loss_sum},
                   {"loss_steps", static_cast<double>(at.loss_steps)},
                   {"rows_skipped", static_cast<double>(at.rows_skipped)},
                   {"eval_peak", static_cast<double>(at.eval_peak)}};
  state.texts = {{"recall_before", at.recall_before}};
  PLIMSOLL_TRY_VOID(save_checkpoint(folder.checkpoint_path(at.step), state, tensors()));
  PLIMSOLL_TRY_VOID(rows.commit(at.step));
  return folder.publish(at.step, keep);
}

std::int64_t State::disk_bytes(std::int64_t keep) const {
  std::int64_t each = 1 << 20;  // The header of the tensors' file, and state.json.
  for (const auto& [name, tensor] : tensors()) {
    each += static_cast<std::int64_t>(tensor.nbytes());
  }
  return (keep + 1) * each;
}

Result<void> State::load(const RunFolder& folder, std::int64_t step) {
  PLIMSOLL_TRY(const auto state, load_checkpoint(folder.checkpoint_path(step), tensors()));
  const auto number = [&](const char* name) {
    const auto found = state.numbers.find(name);
    return found == state.numbers.end() ? 0.0 : found->second;
  };
  at.step = state.step;
  at.loader = state.loader;
  at.loss_sum = number("loss_sum");
  at.loss_steps = static_cast<std::int64_t>(number("loss_steps"));
  at.rows_skipped = static_cast<std::int64_t>(number("rows_skipped"));
  at.eval_peak = static_cast<std::int64_t>(number("eval_peak"));
  if (const auto found = state.texts.find("recall_before"); found != state.texts.end()) {
    at.recall_before = found->second;
  }
  return {};
}

Result<std::string> State::digest(EmbeddingStore& rows) const {
  StateDigest digest;
  digest_tensors(digest, tensors());
  digest.add("step", std::as_bytes(std::span{&at.step, 1}));
  const auto width = static_cast<std::size_t>(rows.dim() + rows.state_floats());
  StateDigest::Set set;
  std::vector<std::byte> record(12 + 4 * width);
  PLIMSOLL_TRY_VOID(
      rows.visit_rows([&](std::span<const std::int64_t> ids, std::span<const std::uint32_t> steps,
                          std::span<const float> values) -> Result<void> {
        for (std::size_t i = 0; i < ids.size(); ++i) {
          std::memcpy(record.data(), &ids[i], 8);
          std::memcpy(record.data() + 8, &steps[i], 4);
          std::memcpy(record.data() + 12, values.data() + i * width, 4 * width);
          set.add(record);
        }
        return {};
      }));
  digest.add("rows", set);
  return digest.hex();
}

}  // namespace plimsoll::cosir
