// SPDX-License-Identifier: Apache-2.0
#include "recipes/can_kd/spellings.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "recipes/can_kd/config.h"

namespace plimsoll::can_kd {
namespace {

using KeyText = std::pair<const char*, const char*>;

/// What a word of --preset chooses; two words of one kind contradict each other.
enum class Chooses : std::uint8_t { kStage, kWhose, kArchitecture };

struct Preset {
  const char* word;
  Chooses what;
  std::span<const KeyText> values;
};

constexpr std::array<KeyText, 1> kAutoencoder{{{"stage", "autoencoder"}}};
constexpr std::array<KeyText, 1> kCurriculum{{{"stage", "curriculum"}}};
constexpr std::array<KeyText, 1> kFusion{{{"stage", "fusion"}}};
constexpr std::array<KeyText, 1> kTeacher{{{"model_size", "teacher"}}};
constexpr std::array<KeyText, 1> kStudent{{{"model_size", "student"}}};
constexpr std::array<KeyText, 1> kBoth{{{"model_size", "both"}}};

// Trains in minutes on two cores; the student has a few per cent of the teacher's parameters.
constexpr std::array<KeyText, 20> kSmall{{{"teacher_vgae_hidden_dims", "128,64,24"},
                                          {"teacher_vgae_heads", "2"},
                                          {"teacher_vgae_embedding_dim", "16"},
                                          {"teacher_gat_hidden", "24"},
                                          {"teacher_gat_layers", "3"},
                                          {"teacher_gat_heads", "4"},
                                          {"teacher_gat_embedding_dim", "8"},
                                          {"teacher_gat_fc_layers", "2"},
                                          {"student_vgae_hidden_dims", "16,8,4"},
                                          {"student_vgae_heads", "1"},
                                          {"student_vgae_embedding_dim", "2"},
                                          {"student_gat_hidden", "8"},
                                          {"student_gat_layers", "2"},
                                          {"student_gat_heads", "3"},
                                          {"student_gat_embedding_dim", "3"},
                                          {"student_gat_fc_layers", "1"},
                                          {"max_epochs", "100"},
                                          {"patience", "25"},
                                          {"student_gat_patience", "25"},
                                          {"batch_size", "256"}}};

// The original's later teacher: about a quarter of its first one.
constexpr std::array<KeyText, 6> kLarge{{{"teacher_vgae_hidden_dims", "480,240,48"},
                                         {"teacher_vgae_embedding_dim", "32"},
                                         {"teacher_gat_hidden", "48"},
                                         {"teacher_gat_layers", "3"},
                                         {"teacher_gat_heads", "8"},
                                         {"teacher_gat_embedding_dim", "16"}}};

// "original" stands for the defaults of all that the others change.
constexpr std::array kPresets{Preset{"vgae", Chooses::kStage, kAutoencoder},
                              Preset{"gat", Chooses::kStage, kCurriculum},
                              Preset{"fusion", Chooses::kStage, kFusion},
                              Preset{"dqn", Chooses::kStage, kFusion},
                              Preset{"teacher", Chooses::kWhose, kTeacher},
                              Preset{"student", Chooses::kWhose, kStudent},
                              Preset{"both", Chooses::kWhose, kBoth},
                              Preset{"small", Chooses::kArchitecture, kSmall},
                              Preset{"original", Chooses::kArchitecture, {}},
                              Preset{"large", Chooses::kArchitecture, kLarge}};
constexpr const char* kPresetWords =
    "vgae|gat|fusion|dqn|teacher|student|both|small|original|large";

const Preset& preset_named(std::string_view word) {
  const auto at = std::find_if(kPresets.begin(), kPresets.end(),
                               [&](const Preset& preset) { return word == preset.word; });
  PLIMSOLL_CHECK(at != kPresets.end(), "a preset that is listed and has no values");
  return *at;
}

Result<void> use_preset(AnySettings& settings, const Shorthand& /*self*/, std::string_view text,
                        std::string_view source) {
  std::vector<const Preset*> chosen;
  for (bool more = true; more;) {
    const auto comma = text.find(',');
    const Preset& preset = preset_named(text.substr(0, comma));
    for (const Preset* other : chosen) {
      if (other->what == preset.what) {
        return fail(ErrorCode::kInvalidArgument,
                    fmt::format("{}: the presets '{}' and '{}' exclude each other", source,
                                other->word, preset.word));
      }
    }
    chosen.push_back(&preset);
    more = comma != std::string_view::npos;
    text = more ? text.substr(comma + 1) : "";
  }
  const CanKdSettings defaults;
  for (const Preset* preset : chosen) {
    const std::string from = fmt::format("preset {}", preset->word);
    for (const auto& [key, value] : preset->values) {
      PLIMSOLL_TRY_VOID(settings.set(key, value, from));
    }
    if (preset->values.empty()) {
      for (const auto& [key, value] : kSmall) {
        PLIMSOLL_TRY_VOID(settings.set(key, defaults.text_of(key), from));
      }
    }
  }
  return {};
}

/// Sets each key named in `sets` to the same text.
Result<void> set_same(AnySettings& settings, const Shorthand& self, std::string_view text,
                      std::string_view source) {
  for (std::string_view rest = self.sets; !rest.empty();) {
    const auto space = rest.find(' ');
    PLIMSOLL_TRY_VOID(settings.set(rest.substr(0, space), text, source));
    rest = space == std::string_view::npos ? "" : rest.substr(space + 1);
  }
  return {};
}

/// "teacher_", "student_" or both, as model_size says so far.
std::vector<std::string> chosen_sizes(const AnySettings& settings) {
  const std::string size = settings.text_of("model_size");
  return size == "both" ? std::vector<std::string>{"teacher_", "student_"}
                        : std::vector<std::string>{size + "_"};
}

/// gat_heads is teacher_gat_heads, student_gat_heads or both.
Result<void> set_of_sizes(AnySettings& settings, const Shorthand& self, std::string_view text,
                          std::string_view source) {
  for (const auto& size : chosen_sizes(settings)) {
    PLIMSOLL_TRY_VOID(settings.set(size + self.form.name, text, source));
  }
  return {};
}

/// Replaces the last of the encoder's widths.
Result<void> set_latent(AnySettings& settings, const Shorthand& /*self*/, std::string_view text,
                        std::string_view source) {
  for (const auto& size : chosen_sizes(settings)) {
    const std::string key = size + "vgae_hidden_dims";
    const std::string widths = settings.text_of(key);
    const std::string changed =
        fmt::format("{},{}", std::string_view(widths).substr(0, widths.rfind(',')), text);
    if (changed != widths) {
      PLIMSOLL_TRY_VOID(settings.set(key, changed, source));
    }
  }
  return {};
}

Result<void> set_auto(AnySettings& settings, const Shorthand& /*self*/, std::string_view text,
                      std::string_view source) {
  return text == "true" ? settings.set("batch_size", "auto", source) : Result<void>{};
}

Result<void> set_stage(AnySettings& settings, const Shorthand& /*self*/, std::string_view text,
                       std::string_view source) {
  return settings.set("stage", preset_named(text).values.front().second, source);
}

Result<void> set_scale(AnySettings& settings, const Shorthand& /*self*/, std::string_view text,
                       std::string_view source) {
  return settings.set("model_size", text == "large" ? "teacher" : "student", source);
}

Result<void> set_distillation(AnySettings& settings, const Shorthand& /*self*/,
                              std::string_view /*text*/, std::string_view source) {
  return settings.set("use_kd", "true", source);
}

constexpr Field form(const char* name, FieldKind kind, const char* help, double least = 0,
                     double most = 0, const char* choices = "") {
  return {name, kind, FieldRole::kFree, nullptr, help, least, most, choices};
}
constexpr Shorthand of_sizes(const char* name, double least, double most, const char* help) {
  return {form(name, FieldKind::kInteger, help, least, most), KeyOrder::kBefore, set_of_sizes};
}
constexpr Shorthand whole(const char* name, const char* target, const char* help, double least,
                          double most) {
  return {form(name, FieldKind::kInteger, help, least, most), KeyOrder::kBefore, set_same, target};
}
constexpr Shorthand share(const char* name, const char* target, const char* help) {
  return {form(name, FieldKind::kReal, help, 0, 1), KeyOrder::kBefore, set_same, target};
}

constexpr double kWidthMax = 65536;
constexpr std::array kShorthands{
    Shorthand{
        form("preset", FieldKind::kWords,
             "Presets, joined by commas: model and stage, whose, and size", 0, 0, kPresetWords),
        KeyOrder::kFirst, use_preset},
    Shorthand{form("model_type", FieldKind::kChoice,
                   "Model whose stage is trained (the same as --stage)", 0, 0, "vgae|gat|dqn"),
              KeyOrder::kFirst, set_stage},
    Shorthand{form("scale", FieldKind::kChoice,
                   "Size of model: large is the teacher, small the student (as --model-size)", 0, 0,
                   "large|small"),
              KeyOrder::kFirst, set_scale},
    Shorthand{form("lr", FieldKind::kReal,
                   "Learning rate of all models: vgae_lr, gat_lr and fusion_lr", 0, 1e3),
              KeyOrder::kBefore, set_same, "vgae_lr gat_lr fusion_lr"},
    Shorthand{form("vgae_hidden_dims", FieldKind::kWidths,
                   "Widths of the autoencoder's layers, the latent's last; teacher and student", 1,
                   kWidthMax),
              KeyOrder::kBefore, set_of_sizes},
    Shorthand{form("vgae_latent_dim", FieldKind::kInteger,
                   "Width of the autoencoder's latent layer (the last of vgae_hidden_dims)", 1,
                   kWidthMax),
              KeyOrder::kAfter, set_latent},
    of_sizes("vgae_heads", 1, 256,
             "Attention heads of the autoencoder's first layer; teacher and student"),
    of_sizes("vgae_embedding_dim", 1, kWidthMax,
             "Width of the autoencoder's CAN-id embedding; teacher and student"),
    of_sizes("gat_hidden", 1, kWidthMax,
             "Width of one attention head of the classifier; teacher and student"),
    of_sizes("gat_layers", 1, 64,
             "Number of attention layers of the classifier; teacher and student"),
    of_sizes("gat_heads", 1, 256,
             "Attention heads of each layer of the classifier; teacher and student"),
    of_sizes("gat_embedding_dim", 1, kWidthMax,
             "Width of the classifier's CAN-id embedding; teacher and student"),
    of_sizes("gat_fc_layers", 1, 16,
             "Number of dense layers after pooling in the classifier; teacher and student"),
    whole("dqn_hidden", "fusion_hidden", "Width of the Q-network's hidden layers (fusion_hidden)",
          1, kWidthMax),
    share("dqn_gamma", "fusion_gamma", "Discount factor of the Q-network (fusion_gamma)"),
    share("dqn_epsilon", "fusion_epsilon",
          "Exploration rate of the Q-learning at first (fusion_epsilon)"),
    share("dqn_epsilon_decay", "fusion_epsilon_decay",
          "Factor of the exploration rate per episode (fusion_epsilon_decay)"),
    share("dqn_min_epsilon", "fusion_epsilon_min", "Lowest exploration rate (fusion_epsilon_min)"),
    whole("dqn_buffer_size", "fusion_replay", "Replay buffer size, in transitions (fusion_replay)",
          1, 1e8),
    whole("dqn_batch_size", "fusion_batch", "Batch size of the Q-network (fusion_batch)", 1,
          1 << 20),
    whole("dqn_target_update", "fusion_target_update",
          "Steps between copies to the target network (fusion_target_update)", 1, 1e12),
    Shorthand{form("optimize_batch_size", FieldKind::kSwitch,
                   "Batch size is planned (the same as --batch-size auto)"),
              KeyOrder::kAfter, set_auto},
    Shorthand{form("kd_type", FieldKind::kChoice,
                   "Knowledge distillation (the same as --use-kd true)", 0, 0, "kd"),
              KeyOrder::kBefore, set_distillation},
    Shorthand{form("kd_model_path", FieldKind::kText,
                   "Teacher to distil from (the same as --teacher-path)"),
              KeyOrder::kBefore, set_same, "teacher_path"},
};

constexpr const char* kLimitSays = "the batch is planned for all of --memory-limit, and measured";
constexpr const char* kOwnLoss = "a stage watches its own validation loss";
constexpr const char* kAllGraphs = "the fusion learns from all graphs";
constexpr const char* kAtImport = "windows are cut by `plimsoll import can`";
constexpr std::array kIgnored{
    IgnoredKey{"dataset", "--data names the graph set"},
    IgnoredKey{"modality", "a graph set is CAN traffic"},
    IgnoredKey{"experiment_root", "--out names the run folder"},
    IgnoredKey{"mlflow", "in Python, plimsoll.log_to_mlflow(RUN) brings a run to MLflow"},
    IgnoredKey{"device", "can-kd computes on the CPU"},
    IgnoredKey{"num_workers", "no process loads graphs beside this one"},
    IgnoredKey{"mp_start_method", "no process is started"},
    IgnoredKey{"deterministic", "every run is"},
    IgnoredKey{"cudnn_benchmark", "can-kd computes on the CPU"},
    IgnoredKey{"compile_model", "the models are compiled already"},
    IgnoredKey{"find_unused_parameters", "one process trains"},
    IgnoredKey{"dynamic_batching", "batch_nodes and batch_edges bound every batch"},
    IgnoredKey{"safety_factor", kLimitSays},
    IgnoredKey{"batch_size_mode", kLimitSays},
    IgnoredKey{"max_batch_size_trials", kLimitSays},
    IgnoredKey{"memory_estimation", kLimitSays},
    IgnoredKey{"curriculum_memory_multiplier", "the curriculum's batches are batches like others"},
    IgnoredKey{"monitor_metric", kOwnLoss},
    IgnoredKey{"monitor_mode", kOwnLoss},
    IgnoredKey{"log_teacher_student_comparison", "both are always reported"},
    IgnoredKey{"dqn_layers", "the fusion's network has two hidden layers"},
    IgnoredKey{"alpha_steps", "the fusion chooses among 21 weights"},
    IgnoredKey{"fusion_max_samples", kAllGraphs},
    IgnoredKey{"max_val_samples", kAllGraphs},
    IgnoredKey{"episode_sample_size", kAllGraphs},
    IgnoredKey{"training_step_interval", "fusion_batch memories are a step"},
    IgnoredKey{"gpu_training_steps", "fusion_batch memories are a step"},
    IgnoredKey{"preprocessing_window_size", kAtImport},
    IgnoredKey{"preprocessing_stride", kAtImport},
};

constexpr std::array kGroups{KeyGroup{"vgae", "vgae_"},
                             KeyGroup{"gat", "gat_"},
                             KeyGroup{"dqn", "dqn_"},
                             KeyGroup{"fusion", "fusion_"},
                             KeyGroup{"training", ""},
                             KeyGroup{"auxiliaries", "kd_"},
                             KeyGroup{"preprocessing", "preprocessing_"}};

}  // namespace

std::span<const Shorthand> shorthands() noexcept {
  return kShorthands;
}
std::span<const IgnoredKey> ignored_keys() noexcept {
  return kIgnored;
}
std::span<const KeyGroup> key_groups() noexcept {
  return kGroups;
}

}  // namespace plimsoll::can_kd
