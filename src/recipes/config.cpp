// SPDX-License-Identifier: Apache-2.0
//
// The table of `cosir` options, and setting them from text. Files are read in config_files.cpp.
#include "recipes/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <system_error>
#include <thread>

#include "base/check.h"
#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

using C = CosirConfig;
constexpr auto kIdentity = FieldRole::kIdentity;
constexpr auto kFree = FieldRole::kFree;
constexpr auto kPlace = FieldRole::kPlace;
constexpr double kCountMax = 1e12;
constexpr double kRateMax = 1e3;
constexpr double kBytesMax = 1e15;

constexpr Field text(const char* name, FieldRole role, std::string C::*member, const char* help) {
  return {name, FieldKind::kText, role, member, help};
}
constexpr Field limit(const char* name, std::string C::*member, const char* help) {
  return {name, FieldKind::kLimit, kFree, member, help};
}
constexpr Field bytes(const char* name, std::int64_t C::*member, const char* help) {
  return {name, FieldKind::kBytes, kFree, member, help, 0, kBytesMax};
}
constexpr Field whole(const char* name, FieldRole role, std::int64_t C::*member, double least,
                      double most, const char* help) {
  return {name, FieldKind::kInteger, role, member, help, least, most};
}
constexpr Field whole_or_auto(const char* name, std::int64_t C::*member, double least, double most,
                              const char* help) {
  return {name, FieldKind::kAuto, kIdentity, member, help, least, most};
}
constexpr Field real(const char* name, double C::*member, double least, double most,
                     const char* help) {
  return {name, FieldKind::kReal, kIdentity, member, help, least, most};
}
constexpr Field on_off(const char* name, FieldRole role, bool C::*member, const char* help) {
  return {name, FieldKind::kSwitch, role, member, help};
}
constexpr Field choice(const char* name, std::string C::*member, const char* choices,
                       const char* help, FieldRole role = kIdentity) {
  return {name, FieldKind::kChoice, role, member, help, 0, 0, choices};
}

constexpr std::array kFields{
    text("data", kPlace, &C::data, "Feature store to train on (plimsoll import, plimsoll synth)"),
    text("out", kPlace, &C::out, "Run folder to make"),
    limit("memory_limit", &C::memory_limit, "Memory the whole process may hold; 768MiB, 6GB, 25%"),
    limit("disk_limit", &C::disk_limit, "Disk the run may fill"),
    whole("epochs", kIdentity, &C::epochs, 1, 1e6, "Passes over the training pairs"),
    whole_or_auto("batch_size", &C::batch_size, 2, 1 << 20,
                  "Pairs per step; auto: planned once, see `plimsoll plan cosir`"),
    whole("seed", kIdentity, &C::seed, 0, 9e15, "Decides every random choice"),
    whole("dim", kIdentity, &C::dim, 0, 65536, "Width of the shared space; 0: from the features"),
    whole("label_dim", kIdentity, &C::label_dim, 2, 4096, "Width of a sample's condition vector"),
    choice("projections", &C::projections, "auto|true|false",
           "Trainable linear maps of both features to dim"),
    real("temperature", &C::temperature, 1e-6, 1e3, "Of the contrastive loss"),
    real("loss_infonce", &C::loss_infonce, 0, 1e6, "Weight of the contrastive loss"),
    real("loss_laplacian", &C::loss_laplacian, 0, 1e6, "Weight: neighbours act alike"),
    real("loss_angular", &C::loss_angular, 0, 1e6, "Weight: equal angles act alike"),
    real("loss_radius", &C::loss_radius, 0, 1e6, "Weight: a larger radius acts more"),
    real("loss_rotation", &C::loss_rotation, 0, 1e6, "Weight: quarter turns act orthogonally"),
    real("loss_boundary", &C::loss_boundary, 0, 1e6, "Weight: the radius stays below 10"),
    real("lr", &C::lr, 0, kRateMax, "Learning rate of the combiner"),
    real("projection_lr", &C::projection_lr, 0, kRateMax, "Learning rate of the projections"),
    real("weight_decay", &C::weight_decay, 0, kRateMax, "Of the model"),
    choice("label_dtype", &C::label_dtype, "float32|bfloat16",
           "Condition vectors on disk and in memory; bfloat16 halves them"),
    choice("label_optimizer", &C::label_optimizer, "adamw|adamw_fresh|adagrad",
           "How a condition vector follows its gradient"),
    real("label_lr", &C::label_lr, 0, kRateMax, "Learning rate of the condition vectors"),
    real("label_weight_decay", &C::label_weight_decay, 0, kRateMax, "Of the condition vectors"),
    choice("label_init", &C::label_init, "normal|zeros|uniform", "Condition vectors at first"),
    real("label_init_scale", &C::label_init_scale, 0, 1e6, "Deviation or half-width at first"),
    choice("label_schedule", &C::label_schedule, "constant|cosine", "Of label_lr over the steps"),
    choice("label_layout", &C::label_layout, "auto|any_order|sample_order",
           "Of a new run's condition vectors on disk; auto: any order if they fit into memory",
           kFree),
    on_off("drop_last", kIdentity, &C::drop_last, "Skip an epoch's last, partial batch"),
    whole("holdout", kIdentity, &C::holdout, -1, kCountMax,
          "Groups held out for evaluation; -1: 5,000 pairs' worth, at most a fifth"),
    whole("eval_pairs", kFree, &C::eval_pairs, 0, kCountMax, "Held-out pairs evaluated, at most"),
    whole("eval_every_n_epochs", kFree, &C::eval_every_n_epochs, 0, 1e6,
          "0: only before and after training"),
    whole("oracle_angles", kFree, &C::oracle_angles, 1, 3600, "Of the evaluation's polar grid"),
    whole("phase2_epochs", kIdentity, &C::phase2_epochs, 0, 1e6,
          "Epochs of the classifier of conditions"),
    real("phase2_lr", &C::phase2_lr, 0, kRateMax, "Learning rate of that classifier"),
    whole("checkpoint_every_n_steps", kFree, &C::checkpoint_every_n_steps, 0, kCountMax,
          "Steps between commits; 0: one at the end of each epoch"),
    whole("keep_checkpoints", kFree, &C::keep_checkpoints, 1, 1e6, "The newest ones are kept"),
    whole("cleanup_every_n_steps", kFree, &C::cleanup_every_n_steps, 0, kCountMax,
          "Steps between giving unused memory back; 0: after evaluations and under pressure only"),
    bytes("queue_bytes", &C::queue_bytes, "The loader's ring; 0: chosen"),
    bytes("store_bytes", &C::store_bytes, "Memory of the condition vectors; 0: chosen"),
    bytes("cache_bytes", &C::cache_bytes, "Memory of the features; 0: chosen"),
    bytes("foreign_bytes", &C::foreign_bytes, "Set aside for code and libraries' own memory"),
    whole("loader_threads", kFree, &C::loader_threads, 1, 256, "Threads that read batches"),
    whole("compute_threads", kIdentity, &C::compute_threads, 0, 4096,
          "Threads that compute; 0: one per core. Part of the result's bits"),
    whole("io_threads", kFree, &C::io_threads, 1, 256, "Threads that read and write rows"),
    whole("stats_every_n_epochs", kFree, &C::stats_every_n_epochs, 0, 1e6,
          "Cache statistics in words; 0: never"),
    whole("metrics_every_n_steps", kFree, &C::metrics_every_n_steps, 1, kCountMax,
          "Steps between recorded losses"),
    on_off("tensorboard", kFree, &C::tensorboard, "Write event files under RUN/metrics"),
    text("mlflow", kPlace, &C::mlflow, "Also write MLflow's file layout into this folder"),
};

std::int64_t index_of(std::string_view key) {
  for (std::size_t i = 0; i < kFields.size(); ++i) {
    if (key == kFields[i].name) {
      return static_cast<std::int64_t>(i);
    }
  }
  return -1;
}

/// Levenshtein distance of two short words. Source: Wagner and Fischer (1974).
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) {
    row[j] = j;
  }
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

template <class T>
bool read_number(std::string_view text, T& value) {
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  return status == std::errc{} && end == text.data() + text.size();
}

bool listed(std::string_view choices, std::string_view word) {
  while (!choices.empty()) {
    const auto bar = choices.find('|');
    if (choices.substr(0, bar) == word) {
      return true;
    }
    choices = bar == std::string_view::npos ? "" : choices.substr(bar + 1);
  }
  return false;
}

bool printable(std::string_view text) {
  return std::none_of(text.begin(), text.end(),
                      [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; });
}

/// Assigns `text` to the field's member. False when the field does not accept it.
bool assign(const Field& field, std::string_view text, CosirConfig& config) {
  switch (field.kind) {
    case FieldKind::kText:
      if (!printable(text)) {
        return false;
      }
      config.*std::get<std::string C::*>(field.member) = text;
      return true;
    case FieldKind::kLimit:
      // A percentage is of something known only later: any whole will do to check the form.
      if (!text.empty() && !parse_bytes(text, 1LL << 40)) {
        return false;
      }
      config.*std::get<std::string C::*>(field.member) = text;
      return true;
    case FieldKind::kChoice:
      if (!listed(field.choices, text)) {
        return false;
      }
      config.*std::get<std::string C::*>(field.member) = text;
      return true;
    case FieldKind::kSwitch:
      if (text != "true" && text != "false") {
        return false;
      }
      config.*std::get<bool C::*>(field.member) = text == "true";
      return true;
    case FieldKind::kReal: {
      double value = 0;
      if (!read_number(text, value) || !(value >= field.least && value <= field.most)) {
        return false;
      }
      config.*std::get<double C::*>(field.member) = value;
      return true;
    }
    case FieldKind::kAuto:
      if (text == "auto") {
        config.*std::get<std::int64_t C::*>(field.member) = 0;
        return true;
      }
      [[fallthrough]];
    case FieldKind::kBytes:
    case FieldKind::kInteger: {
      std::int64_t value = 0;
      if (field.kind != FieldKind::kBytes) {
        if (!read_number(text, value)) {
          return false;
        }
      } else if (auto size = parse_bytes(text); size) {
        value = *size;
      } else {
        return false;
      }
      const auto number = static_cast<double>(value);
      if (number < field.least || number > field.most) {
        return false;
      }
      config.*std::get<std::int64_t C::*>(field.member) = value;
      return true;
    }
  }
  return false;
}

std::string quote(std::string_view text) {
  std::string quoted{"\""};
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
    }
    quoted += c;
  }
  return quoted + '"';
}

std::string print_real(double value) {
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".e") == std::string::npos) {
    text += ".0";
  }
  return text;
}

std::string print_bytes(std::int64_t value) {
  if (value > 0 && value % (1LL << 20) == 0) {
    return fmt::format("\"{}MiB\"", value >> 20);
  }
  return fmt::format("{}", value);
}

}  // namespace

std::span<const Field> cosir_fields() noexcept {
  return kFields;
}

std::string Field::accepts() const {
  switch (kind) {
    case FieldKind::kText:
      return "text without control characters";
    case FieldKind::kLimit:
      return "a size such as 768MiB or 6GB, or a share such as 25%";
    case FieldKind::kBytes:
      return "a size such as 64MiB, or a number of bytes";
    case FieldKind::kAuto:
    case FieldKind::kInteger:
      return fmt::format("a whole number from {} to {}{}", static_cast<std::int64_t>(least),
                         static_cast<std::int64_t>(most),
                         kind == FieldKind::kAuto ? ", or auto" : "");
    case FieldKind::kReal:
      return fmt::format("a number from {} to {}", least, most);
    case FieldKind::kSwitch:
      return "true or false";
    case FieldKind::kChoice: {
      std::string words = choices;
      for (std::size_t at = 0; (at = words.find('|', at)) != std::string::npos; at += 2) {
        words.replace(at, 1, ", ");
      }
      return "one of " + words;
    }
  }
  return "";
}

std::string Field::print(const CosirConfig& config) const {
  switch (kind) {
    case FieldKind::kText:
    case FieldKind::kLimit:
    case FieldKind::kChoice:
      return quote(config.*std::get<std::string C::*>(member));
    case FieldKind::kBytes:
      return print_bytes(config.*std::get<std::int64_t C::*>(member));
    case FieldKind::kAuto:
      if (config.*std::get<std::int64_t C::*>(member) == 0) {
        return "\"auto\"";
      }
      [[fallthrough]];
    case FieldKind::kInteger:
      return fmt::format("{}", config.*std::get<std::int64_t C::*>(member));
    case FieldKind::kReal:
      return print_real(config.*std::get<double C::*>(member));
    case FieldKind::kSwitch:
      return config.*std::get<bool C::*>(member) ? "true" : "false";
  }
  return "";
}

std::string nearest_key(std::string_view key) {
  std::string nearest;
  std::size_t best = std::max<std::size_t>(2, key.size() / 3) + 1;
  for (const Field& field : kFields) {
    if (const std::size_t distance = edit_distance(key, field.name); distance < best) {
      best = distance;
      nearest = field.name;
    }
  }
  return nearest;
}

CosirSettings::CosirSettings() : sources_(kFields.size(), "default") {}

Result<void> CosirSettings::set(std::string_view key, std::string_view text,
                                std::string_view source) {
  const auto index = index_of(key);
  if (index < 0) {
    const std::string near = nearest_key(key);
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: unknown key '{}'{}", source, key,
                            near.empty() ? "" : fmt::format("; did you mean '{}'?", near)),
                "`plimsoll train cosir --help` lists every key");
  }
  const Field& field = kFields[static_cast<std::size_t>(index)];
  if (!assign(field, text, config_)) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: {} must be {}, not '{}'", source, key, field.accepts(), text));
  }
  sources_[static_cast<std::size_t>(index)] = source;
  return {};
}

Result<void> CosirSettings::set_pair(std::string_view pair, std::string_view source) {
  const auto equals = pair.find('=');
  if (equals == std::string_view::npos || equals == 0) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: '{}' is not of the form key=value", source, pair));
  }
  return set(pair.substr(0, equals), pair.substr(equals + 1), source);
}

Result<void> CosirSettings::resolve(bool wants_out) {
  if (config_.data.empty()) {
    return fail(
        ErrorCode::kInvalidArgument, "no data given",
        "name a feature store with --data DIR; plimsoll synth and plimsoll import make one");
  }
  if (wants_out && config_.out.empty()) {
    return fail(ErrorCode::kInvalidArgument, "no run folder given", "name one with --out RUN");
  }
  // A run may be resumed from another folder than the one it was started in.
  for (std::string* place : {&config_.data, &config_.out, &config_.mlflow}) {
    if (!place->empty()) {
      *place = std::filesystem::absolute(*place).lexically_normal().string();
    }
  }
  if (config_.compute_threads == 0) {
    config_.compute_threads = std::max(1U, std::thread::hardware_concurrency());
    sources_[static_cast<std::size_t>(index_of("compute_threads"))] += ", one per core";
  }
  return {};
}

Result<void> CosirSettings::override_with(
    std::span<const std::pair<std::string, std::string>> overrides, std::string_view source) {
  for (const auto& [key, text] : overrides) {
    CosirSettings changed = *this;
    PLIMSOLL_TRY_VOID(changed.set(key, text, source));
    const Field& field = kFields[static_cast<std::size_t>(index_of(key))];
    const std::string before = field.print(config_);
    const std::string after = field.print(changed.config_);
    if (before == after) {
      continue;
    }
    if (field.role == FieldRole::kIdentity || key == "out") {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("{}: {} is part of this run's identity ({}) and cannot become {}",
                              source, key, before, after),
                  "start a new run with `plimsoll train`; limits, caches, queues and loader "
                  "threads may change");
    }
    *this = std::move(changed);
  }
  return {};
}

std::string CosirSettings::to_toml() const {
  std::string toml = "# Every option of this run and where it came from.\n[cosir]\n";
  for (std::size_t i = 0; i < kFields.size(); ++i) {
    toml += fmt::format("{:<40}  # from {}\n",
                        fmt::format("{} = {}", kFields[i].name, kFields[i].print(config_)),
                        sources_[i]);
  }
  return toml;
}

std::vector<std::pair<std::string, std::string>> CosirSettings::items() const {
  std::vector<std::pair<std::string, std::string>> items;
  for (const Field& field : kFields) {
    const auto* text = std::get_if<std::string C::*>(&field.member);
    items.emplace_back(field.name, text != nullptr ? config_.**text : field.print(config_));
  }
  return items;
}

std::vector<std::pair<std::string, std::string>> CosirSettings::identity() const {
  std::vector<std::pair<std::string, std::string>> items;
  for (const Field& field : kFields) {
    if (field.role == FieldRole::kIdentity) {
      items.emplace_back(field.name, field.print(config_));
    }
  }
  return items;
}

const std::string& CosirSettings::source_of(std::string_view key) const {
  const auto index = index_of(key);
  PLIMSOLL_CHECK(index >= 0, "source_of() of an unknown key");
  return sources_[static_cast<std::size_t>(index)];
}

}  // namespace plimsoll
