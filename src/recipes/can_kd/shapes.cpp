// SPDX-License-Identifier: Apache-2.0
#include "recipes/can_kd/shapes.h"

#include <charconv>
#include <string_view>

#include "base/check.h"
#include "base/philox.h"

namespace plimsoll::can_kd {
namespace {

constexpr std::uint64_t kWeights = 0x77656967;  // Streams: no two uses share a random number.
constexpr std::uint64_t kNoise = 0x6e6f6973;

std::vector<std::int64_t> read_widths(std::string_view text) {
  std::vector<std::int64_t> widths;
  while (!text.empty()) {
    std::int64_t width = 0;
    const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), width);
    PLIMSOLL_CHECK(status == std::errc{} && width > 0, "widths are checked when they are set");
    widths.push_back(width);
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    text.remove_prefix(text.empty() ? 0 : 1);
  }
  return widths;
}

}  // namespace

const CanKdSizes& sizes_of(const CanKdConfig& config, Role role) noexcept {
  return role == Role::kTeacher ? config.teacher : config.student;
}

GatShape gat_shape(const CanKdConfig& config, Role role, std::int64_t ids) {
  const CanKdSizes& sizes = sizes_of(config, role);
  return {.ids = ids,
          .embedding = sizes.gat_embedding_dim,
          .hidden = sizes.gat_hidden,
          .layers = sizes.gat_layers,
          .heads = sizes.gat_heads,
          .fc_layers = sizes.gat_fc_layers,
          .lstm = config.gat_jk == "lstm",
          .dropout = config.gat_dropout};
}

VgaeShape vgae_shape(const CanKdConfig& config, Role role, std::int64_t ids) {
  const CanKdSizes& sizes = sizes_of(config, role);
  return {.ids = ids,
          .embedding = sizes.vgae_embedding_dim,
          .hidden = read_widths(sizes.vgae_hidden_dims),
          .heads = sizes.vgae_heads,
          .dropout = config.vgae_dropout};
}

TeacherShape own_teacher_shape(const CanKdConfig& config, const Task& task, std::int64_t ids) {
  if (task.stage == Stage::kAutoencoder) {
    return vgae_shape(config, Role::kTeacher, ids);
  }
  return gat_shape(config, Role::kTeacher, ids);
}

std::uint64_t weight_seed(const CanKdConfig& config, const Task& task) noexcept {
  return mix64(mix64(static_cast<std::uint64_t>(config.seed) ^ kWeights) + task.number());
}

std::uint64_t step_noise(const CanKdConfig& config, const Task& task, std::int64_t epoch,
                         std::int64_t position) noexcept {
  const auto words = philox(static_cast<std::uint64_t>(config.seed) ^ kNoise,
                            (task.number() << 32) | static_cast<std::uint64_t>(epoch),
                            static_cast<std::uint64_t>(position));
  return (static_cast<std::uint64_t>(words[0]) << 32) | words[1];
}

Mode training_mode(const CanKdConfig& config, std::uint64_t noise) noexcept {
  Mode mode;
  mode.training = true;
  mode.noise = noise;
  mode.checkpointing = config.gradient_checkpointing;
  mode.bf16 = config.precision != "32";
  return mode;
}

Mode answering_mode() noexcept {
  return {};
}

}  // namespace plimsoll::can_kd
