// SPDX-License-Identifier: Apache-2.0
//
// The original's names in ours, and shapes from tensors.
//
// Threads: single-owner.   Memory: see teacher_file.h.
#include "recipes/can_kd/teacher_file.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "os/file.h"
#include "recipes/can_kd/teacher.h"

namespace plimsoll::can_kd {
namespace {

namespace fs = std::filesystem;

constexpr const char* kAdvice =
    "give --teacher-path weights of GATWithJK or GraphAutoencoderNeighborhood, or a finished "
    "can-kd "
    "run";

// More than any model of these kinds has; so that no file's claim is too large to count with.
constexpr std::size_t kTensorsMost = 4096;
constexpr std::size_t kTensorNameMost = 256;
constexpr std::int64_t kWidthMost = 65536;
constexpr std::int64_t kHeadsMost = 256;
constexpr std::int64_t kLayersMost = 64;

// Where checkpoints keep the state dict, and what wrappers put before its names.
constexpr std::array<std::string_view, 3> kWithin{"state_dict", "model_state_dict", "model"};
constexpr std::array<std::string_view, 4> kWrappers{"module.", "model.", "_orig_mod.",
                                                    "input_encoder."};

// The beginning and the end of a name, which a layer's number may stand between.
struct Renaming {
  std::string_view from_begin;
  std::string_view from_end;
  std::string_view begin;
  std::string_view end;
};

// The first that fits is taken. torch_geometric called a layer's matrix lin_src before 2.5.
constexpr std::array kRenamings{
    Renaming{"id_embedding.weight", "", "embedding", ""},
    Renaming{"convs.", ".lin.weight", "convs.", ".weight"},
    Renaming{"convs.", ".lin_src.weight", "convs.", ".weight"},
    Renaming{"convs.", ".att_src", "convs.", ".att_source"},
    Renaming{"convs.", ".att_dst", "convs.", ".att_target"},
    Renaming{"jk.lstm.weight_ih_l0_reverse", "", "jk.backward.input", ""},
    Renaming{"jk.lstm.weight_hh_l0_reverse", "", "jk.backward.hidden", ""},
    Renaming{"jk.lstm.bias_ih_l0_reverse", "", "jk.backward.input_bias", ""},
    Renaming{"jk.lstm.bias_hh_l0_reverse", "", "jk.backward.hidden_bias", ""},
    Renaming{"jk.lstm.weight_ih_l0", "", "jk.forward.input", ""},
    Renaming{"jk.lstm.weight_hh_l0", "", "jk.forward.hidden", ""},
    Renaming{"jk.lstm.bias_ih_l0", "", "jk.forward.input_bias", ""},
    Renaming{"jk.lstm.bias_hh_l0", "", "jk.forward.hidden_bias", ""},
    Renaming{"jk.att.", "", "jk.score.", ""},
    Renaming{"encoder_layers.", ".lin.weight", "encoder.", ".weight"},
    Renaming{"encoder_layers.", ".lin_src.weight", "encoder.", ".weight"},
    Renaming{"encoder_layers.", ".att_src", "encoder.", ".att_source"},
    Renaming{"encoder_layers.", ".att_dst", "encoder.", ".att_target"},
    Renaming{"encoder_layers.", ".bias", "encoder.", ".bias"},
    Renaming{"encoder_bns.", ".weight", "encoder.", ".norm.weight"},
    Renaming{"encoder_bns.", ".bias", "encoder.", ".norm.bias"},
    Renaming{"encoder_bns.", ".running_mean", "encoder.", ".norm.running_mean"},
    Renaming{"encoder_bns.", ".running_var", "encoder.", ".norm.running_variance"},
    Renaming{"z_mean.", "", "mean.", ""},
    Renaming{"z_logvar.", "", "log_variance.", ""},
    Renaming{"decoder_layers.", ".lin.weight", "decoder.", ".weight"},
    Renaming{"decoder_layers.", ".lin_src.weight", "decoder.", ".weight"},
    Renaming{"decoder_layers.", ".att_src", "decoder.", ".att_source"},
    Renaming{"decoder_layers.", ".att_dst", "decoder.", ".att_target"},
    Renaming{"decoder_layers.", ".bias", "decoder.", ".bias"},
    Renaming{"decoder_bns.", ".weight", "decoder.", ".norm.weight"},
    Renaming{"decoder_bns.", ".bias", "decoder.", ".norm.bias"},
    Renaming{"decoder_bns.", ".running_mean", "decoder.", ".norm.running_mean"},
    Renaming{"decoder_bns.", ".running_var", "decoder.", ".norm.running_variance"},
    Renaming{"canid_classifier.", "", "id.", ""},
};

// Dense layers stand in a list with their activation and their dropout.
struct Every3rd {
  std::string_view from;
  std::string_view to;
};
constexpr std::array kDenseLists{Every3rd{"fc_layers.", "dense."},
                                 Every3rd{"neighborhood_decoder.", "neighbours."}};

bool is_number(std::string_view text) {
  return !text.empty() && text.size() < 4 && std::all_of(text.begin(), text.end(), [](char c) {
    return std::isdigit(static_cast<unsigned char>(c)) != 0;
  });
}

std::string our_name(std::string_view name) {
  for (bool again = true; again;) {
    again = false;
    for (const std::string_view wrapper : kWrappers) {
      if (name.starts_with(wrapper)) {
        name.remove_prefix(wrapper.size());
        again = true;
      }
    }
  }
  for (const Renaming& one : kRenamings) {
    if (name.size() < one.from_begin.size() + one.from_end.size() ||
        !name.starts_with(one.from_begin) || !name.ends_with(one.from_end)) {
      continue;
    }
    const std::string_view between = name.substr(
        one.from_begin.size(), name.size() - one.from_begin.size() - one.from_end.size());
    if (one.from_end.empty() || is_number(between)) {
      return fmt::format("{}{}{}", one.begin, between, one.end);
    }
  }
  for (const Every3rd& list : kDenseLists) {
    const std::size_t dot = name.find('.', list.from.size());
    if (!name.starts_with(list.from) || dot == std::string_view::npos) {
      continue;
    }
    const std::string_view place = name.substr(list.from.size(), dot - list.from.size());
    if (is_number(place)) {
      return fmt::format("{}{}{}", list.to, std::stoi(std::string(place)) / 3, name.substr(dot));
    }
  }
  return std::string(name);
}

const char* dtype_of(TorchType type) {
  switch (type) {
    case TorchType::kFloat32:
      return "F32";
    case TorchType::kFloat64:
      return "F64";
    case TorchType::kFloat16:
      return "F16";
    case TorchType::kBFloat16:
      return "BF16";
    default:
      return "I64";  // Counters: no weight is whole.
  }
}

}  // namespace

Result<fs::path> find_teacher_file(const CanKdConfig& config, const Task& task) {
  const fs::path given = config.teacher_path;
  const std::string name = Task{Role::kTeacher, task.stage}.name();
  for (const fs::path& file : {given, given / "models" / (name + ".safetensors"),
                               given / (name + ".safetensors"), given / (name + ".pt")}) {
    if (fs::is_regular_file(file)) {
      return file;
    }
  }
  return fail(ErrorCode::kNotFound,
              fmt::format("teacher_path = {}: no {}.safetensors there", config.teacher_path, name),
              "name a finished can-kd run, its models folder, or a file of weights");
}

Result<TeacherShape> teacher_shape(const Governor& governor, const CanKdConfig& config,
                                   const Task& task, std::int64_t ids) {
  if (!config.teacher_path.empty()) {
    PLIMSOLL_TRY(const fs::path path, find_teacher_file(config, task));
    PLIMSOLL_TRY(const TeacherFile file, TeacherFile::open(governor, path));
    return file.shape(task, ids);
  }
  return own_teacher_shape(config, task, ids);
}

tl::unexpected<Error> TeacherFile::bad(const std::string& what) const {
  return fail(ErrorCode::kInvalidArgument, fmt::format("{}: {}", path_.string(), what), kAdvice);
}

Result<TeacherFile> TeacherFile::open(const Governor& governor, const fs::path& path) {
  TeacherFile made;
  made.path_ = path;
  PLIMSOLL_TRY(const File file, File::open(path, FileMode::kRead));
  PLIMSOLL_TRY(const std::int64_t size, file.size());
  std::array<std::byte, 2> begin{};
  if (size >= 2) {
    PLIMSOLL_TRY_VOID(file.read_at(0, begin));
  }
  const bool zip = begin == std::array{std::byte{'P'}, std::byte{'K'}};
  PLIMSOLL_TRY_VOID(zip ? made.read_archive(governor) : made.read_safetensors());
  if (made.entries_.empty()) {
    return made.bad("no tensors in it");
  }
  return made;
}

Result<void> TeacherFile::read_archive(const Governor& governor) {
  PLIMSOLL_TRY(archive_, TorchArchive::open(governor, path_, kAdvice));
  PLIMSOLL_TRY(
      const Pickle pickle,
      archive_->pickle(governor,
                       {.name = {}, .advice = {}, .is_record = {}, .on_record = {}, .step = {}}));
  const PickleValue* state = &pickle.value();
  for (const std::string_view key : kWithin) {
    const PickleValue* inside = state->kind == PickleKind::kDict ? state->find(key) : nullptr;
    if (inside != nullptr && inside->kind == PickleKind::kDict) {
      state = inside;
    }
  }
  if (state->kind != PickleKind::kDict) {
    return bad("no state dict");
  }
  std::vector<Entry> entries;
  const auto& items = state->items();
  for (std::size_t i = 0; i + 1 < items.size(); i += 2) {
    if (items[i].kind != PickleKind::kText || items[i + 1].kind != PickleKind::kTensor) {
      continue;
    }
    const TorchTensor& tensor = items[i + 1].tensor();
    entries.push_back({.saved_as = std::string(items[i].text()),
                       .dtype = dtype_of(tensor.type),
                       .shape = {tensor.shape.begin(), tensor.shape.begin() + tensor.dims},
                       .tensor = tensor});
  }
  return name_entries(std::move(entries));
}

Result<void> TeacherFile::read_safetensors() {
  PLIMSOLL_TRY(safetensors_, SafetensorsReader::open(path_));
  std::vector<Entry> entries;
  for (const SafetensorsEntry& entry : safetensors_->entries()) {
    entries.push_back({.saved_as = entry.name, .dtype = entry.dtype_text, .shape = entry.shape});
  }
  if (safetensors_->metadata().contains(kSafetensorsSum)) {
    PLIMSOLL_TRY_VOID(safetensors_->check());
    ours_ = true;
  }
  return name_entries(std::move(entries));
}

Result<void> TeacherFile::name_entries(std::vector<Entry> entries) {
  if (entries.size() > kTensorsMost) {
    return bad(fmt::format("{} tensors, where {} are the most", entries.size(), kTensorsMost));
  }
  for (Entry& entry : entries) {
    if (entry.saved_as.size() > kTensorNameMost) {
      continue;  // Nobody's.
    }
    std::string name = our_name(entry.saved_as);  // Our own names stay as they are.
    if (name.find(".att_") != std::string::npos && entry.shape.size() == 3 && entry.shape[0] == 1) {
      entry.shape.erase(entry.shape.begin());  // [1, heads, width]
    }
    entries_.emplace(std::move(name), std::move(entry));
  }
  return {};
}

const TeacherFile::Sizes* TeacherFile::sizes(const std::string& name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : &found->second.shape;
}

Result<TeacherFile::Sizes> TeacherFile::sizes(const std::string& name, std::size_t dims) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) {
    return bad(fmt::format("no tensor {}", name));
  }
  const Entry& entry = found->second;
  if (entry.shape.size() != dims ||
      std::any_of(entry.shape.begin(), entry.shape.end(),
                  [](auto size) { return size < 1 || size > kWidthMost; })) {
    return bad(fmt::format("{} is of shape [{}]", entry.saved_as, fmt::join(entry.shape, ", ")));
  }
  return entry.shape;
}

Result<GatShape> TeacherFile::classifier() const {
  GatShape shape;
  PLIMSOLL_TRY(const Sizes attention, sizes("convs.0.att_source", 2));
  shape.heads = attention[0];
  shape.hidden = attention[1];
  if (shape.heads > kHeadsMost ||
      sizes(fmt::format("convs.{}.att_source", kLayersMost)) != nullptr) {
    return bad(fmt::format("more than {} heads or {} layers", kHeadsMost, kLayersMost));
  }
  while (sizes(fmt::format("convs.{}.att_source", shape.layers)) != nullptr) {
    shape.layers += 1;
  }
  shape.lstm = sizes("jk.score.weight") != nullptr;
  PLIMSOLL_TRY(const Sizes first, sizes("dense.0.weight", 2));
  shape.fc_layers = 0;
  while (sizes(fmt::format("dense.{}.weight", shape.fc_layers)) != nullptr) {
    shape.fc_layers += 1;
  }
  shape.fc_width = shape.fc_layers > 1 ? first[0] : 0;
  return shape;
}

Result<VgaeShape> TeacherFile::autoencoder() const {
  VgaeShape shape;
  PLIMSOLL_TRY(const Sizes attention, sizes("encoder.0.att_source", 2));
  shape.heads = attention[0];
  if (shape.heads > kHeadsMost) {
    return bad(fmt::format("more than {} heads", kHeadsMost));
  }
  do {
    PLIMSOLL_TRY(const Sizes width, sizes(fmt::format("encoder.{}.bias", shape.hidden.size()), 1));
    shape.hidden.push_back(width[0]);
  } while (sizes(fmt::format("encoder.{}.bias", shape.hidden.size())) != nullptr);
  PLIMSOLL_TRY(const Sizes latent, sizes("mean.weight", 2));
  shape.hidden.push_back(latent[0]);
  return shape;
}

Result<TeacherShape> TeacherFile::shape(const Task& task, std::int64_t ids) const {
  const bool wants_autoencoder = task.stage == Stage::kAutoencoder;
  if (sizes(wants_autoencoder ? "encoder.0.att_source" : "convs.0.att_source") == nullptr) {
    return bad(fmt::format("no {}, which {} learns from",
                           wants_autoencoder ? "autoencoder" : "classifier", task.name()));
  }
  const Sizes* table = sizes("embedding");
  if (table == nullptr || table->size() != 2 || table->back() < 1 || table->back() > kWidthMost) {
    return bad("no table of ids");
  }
  if (table->front() != ids) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: a teacher of {} ids (the unknown one is one of them), but the set "
                            "has {}",
                            path_.string(), table->front(), ids),
                "import the graphs that it was trained on");
  }
  TeacherShape found;
  if (wants_autoencoder) {
    PLIMSOLL_TRY(found, autoencoder());
  } else {
    PLIMSOLL_TRY(found, classifier());
  }
  std::visit(
      [&](auto& shape) {
        shape.ids = ids;
        shape.embedding = table->back();
      },
      found);
  for (const NamedTensor& needed : teacher_tensors(found)) {
    const auto entry = entries_.find(needed.name);
    if (entry == entries_.end()) {
      return bad(fmt::format("no tensor {}", needed.name));
    }
    if (entry->second.shape != needed.tensor.sizes().vec()) {
      return bad(fmt::format("{} is of shape [{}], where the others say [{}]",
                             entry->second.saved_as, fmt::join(entry->second.shape, ", "),
                             fmt::join(needed.tensor.sizes(), ", ")));
    }
    if (entry->second.dtype != "F32") {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("{}: {} is {}, not F32", path_.string(), entry->second.saved_as,
                              entry->second.dtype),
                  "save the teacher in float32: torch.save(model.float().state_dict(), …)");
    }
  }
  return found;
}

Result<void> TeacherFile::write_ours(const fs::path& path) {
  std::vector<TensorSpec> specs;
  for (const auto& [name, entry] : entries_) {
    if (entry.dtype == "F32") {  // A batch norm's count of steps is not.
      specs.push_back({name, DType::kFloat32, entry.shape});
    }
  }
  PLIMSOLL_TRY(auto writer, SafetensorsWriter::create(path, specs, {{kSafetensorsSum, ""}}));
  for (const TensorSpec& spec : specs) {
    const Entry& entry = entries_.at(spec.name);
    const at::Tensor values = at::empty(entry.shape, at::kFloat);
    const std::span bytes{static_cast<std::byte*>(values.data_ptr()), values.nbytes()};
    if (archive_) {
      PLIMSOLL_TRY_VOID(archive_->read(entry.tensor, bytes));
    } else {
      PLIMSOLL_TRY(const SafetensorsEntry* saved, safetensors_->find(entry.saved_as));
      PLIMSOLL_TRY_VOID(safetensors_->read(*saved, 0, bytes));
    }
    PLIMSOLL_TRY_VOID(writer.write(bytes));
  }
  return writer.finish();
}

}  // namespace plimsoll::can_kd
