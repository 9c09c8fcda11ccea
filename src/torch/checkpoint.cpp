// SPDX-License-Identifier: Apache-2.0
#include "torch/checkpoint.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <system_error>
#include <vector>

#include "base/check.h"
#include "data/safetensors.h"
#include "os/directories.h"
#include "os/file.h"
#include "run/sealed_file.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
constexpr const char* kTensorFile = "tensors.safetensors";
constexpr const char* kStateFile = "state.json";
constexpr int kFormat = 2;
constexpr std::int64_t kStateBytesMax = 16 << 20;

DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kLong:
      return DType::kInt64;
    default:
      PLIMSOLL_CHECK(false, "a checkpoint holds float32, float64 and int64 tensors");
  }
}

std::span<std::byte> bytes_of(const NamedTensor& named) {
  PLIMSOLL_CHECK(named.tensor.is_cpu() && named.tensor.is_contiguous(),
                 "a checkpoint holds contiguous CPU tensors");
  return {static_cast<std::byte*>(named.tensor.data_ptr()), named.tensor.nbytes()};
}

std::string tensors_digest(std::span<const NamedTensor> tensors) {
  StateDigest digest;
  digest_tensors(digest, tensors);
  return digest.hex();
}

std::string to_document(const CheckpointState& state, const std::string& tensors_sha256) {
  nlohmann::ordered_json json{{"format", kFormat},
                              {"step", state.step},
                              {"phase", state.phase},
                              {"loader",
                               {{"seed", state.loader.seed},
                                {"epoch", state.loader.epoch},
                                {"position", state.loader.position}}},
                              {"numbers", state.numbers},
                              {"texts", state.texts},
                              {"tensors_sha256", tensors_sha256}};
  return json.dump(1) + "\n";
}

/// Typed reading of one JSON object; remembers the first key that was missing or of another type.
class Reader {
 public:
  explicit Reader(const nlohmann::json& json) : json_(json) {}

  template <class T>
  void integer(const char* key, T& value) {
    const auto at = json_.find(key);
    if (at != json_.end() && at->is_number_integer()) {
      value = at->get<T>();
    } else {
      note(key);
    }
  }
  void text(const char* key, std::string& value) {
    const auto at = json_.find(key);
    if (at != json_.end() && at->is_string()) {
      value = at->get<std::string>();
    } else {
      note(key);
    }
  }
  [[nodiscard]] const nlohmann::json& object(const char* key) {
    static const nlohmann::json nothing = nlohmann::json::object();
    const auto at = json_.find(key);
    if (at != json_.end() && at->is_object()) {
      return *at;
    }
    note(key);
    return nothing;
  }
  void note(const std::string& key) { missing_ = missing_.empty() ? key : missing_; }
  [[nodiscard]] const std::string& missing() const { return missing_; }

 private:
  const nlohmann::json& json_;
  std::string missing_{};
};

Result<CheckpointState> from_document(const fs::path& path, const std::string& text,
                                      std::string& tensors_sha256) {
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object()) {
    return fail(ErrorCode::kCorrupt, fmt::format("{}: not a JSON object", path.string()));
  }
  CheckpointState state;
  Reader reader(json);
  int format = 0;
  reader.integer("format", format);
  reader.integer("step", state.step);
  reader.integer("phase", state.phase);
  reader.text("tensors_sha256", tensors_sha256);
  Reader loader(reader.object("loader"));
  loader.integer("seed", state.loader.seed);
  loader.integer("epoch", state.loader.epoch);
  loader.integer("position", state.loader.position);
  for (const auto& [key, value] : reader.object("numbers").items()) {
    // JSON has no NaN: it was written as null.
    state.numbers[key] = value.is_number() ? value.get<double>() : std::nan("");
  }
  for (const auto& [key, value] : reader.object("texts").items()) {
    if (value.is_string()) {
      state.texts[key] = value.get<std::string>();
    } else {
      reader.note(key);
    }
  }
  const std::string missing = reader.missing().empty() ? loader.missing() : reader.missing();
  if (!missing.empty() || format != kFormat) {
    return fail(ErrorCode::kCorrupt,
                missing.empty()
                    ? fmt::format("{}: format {}, expected {}", path.string(), format, kFormat)
                    : fmt::format("{}: '{}' is missing or malformed", path.string(), missing));
  }
  return state;
}

Result<void> read_tensor(const SafetensorsReader& reader, const fs::path& path,
                         const NamedTensor& named) {
  PLIMSOLL_TRY(const SafetensorsEntry* entry, reader.find(named.name));
  if (entry->dtype != dtype_of(named.tensor) || entry->shape != named.tensor.sizes().vec()) {
    return fail(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: tensor '{}' is {} {}, but this run needs {} {}", path.string(), named.name,
                    entry->dtype_text, shape_text(entry->shape), dtype_name(dtype_of(named.tensor)),
                    shape_text(named.tensor.sizes().vec())),
        "the checkpoint belongs to a run with other options");
  }
  return reader.read(*entry, 0, bytes_of(named));
}

Result<void> write_tensors(const fs::path& path, std::span<const NamedTensor> tensors,
                           std::map<std::string, std::string> metadata) {
  std::vector<TensorSpec> specs;
  for (const NamedTensor& named : tensors) {
    specs.push_back({named.name, dtype_of(named.tensor), named.tensor.sizes().vec()});
  }
  PLIMSOLL_TRY(auto writer, SafetensorsWriter::create(path, specs, std::move(metadata)));
  for (const NamedTensor& named : tensors) {
    PLIMSOLL_TRY_VOID(writer.write(bytes_of(named)));
  }
  return writer.finish();
}

}  // namespace

Result<void> save_tensors(const fs::path& path, std::span<const NamedTensor> tensors,
                          const std::map<std::string, std::string>& metadata) {
  auto summed = metadata;
  summed[kSafetensorsSum];
  return write_tensors(path, tensors, std::move(summed));
}

Result<void> load_tensors(const fs::path& path, std::span<const NamedTensor> tensors) {
  PLIMSOLL_TRY(const auto reader, SafetensorsReader::open(path));
  PLIMSOLL_TRY_VOID(reader.check());
  for (const NamedTensor& named : tensors) {
    PLIMSOLL_TRY_VOID(read_tensor(reader, path, named));
  }
  return {};
}

Result<void> save_checkpoint(const fs::path& directory, const CheckpointState& state,
                             std::span<const NamedTensor> tensors) {
  const fs::path beside = directory.string() + ".new";
  PLIMSOLL_TRY_VOID(remove_tree(beside));
  std::error_code unknown;
  if (!fs::exists(beside.parent_path(), unknown) && !unknown) {  // Made anew, it is half a run.
    return fail(ErrorCode::kIo,
                fmt::format("{}: is not there any more: the run's folder was moved or removed "
                            "while it trained",
                            beside.parent_path().string()),
                "go on from the folder's last checkpoint, where it is now: plimsoll resume");
  }
  PLIMSOLL_TRY_VOID(make_directories(beside));
  PLIMSOLL_TRY_VOID(write_tensors(beside / kTensorFile, tensors, {}));  // state.json has a digest.
  PLIMSOLL_TRY_VOID(write_sealed(beside / kStateFile, to_document(state, tensors_digest(tensors))));
  return rename_durable(beside, directory);
}

Result<CheckpointState> read_checkpoint_state(const fs::path& directory) {
  std::string ignored;
  PLIMSOLL_TRY(const std::string text, read_sealed(directory / kStateFile, kStateBytesMax));
  return from_document(directory / kStateFile, text, ignored);
}

Result<CheckpointState> load_checkpoint(const fs::path& directory,
                                        std::span<const NamedTensor> tensors) {
  std::string expected;
  PLIMSOLL_TRY(const std::string text, read_sealed(directory / kStateFile, kStateBytesMax));
  PLIMSOLL_TRY(CheckpointState state, from_document(directory / kStateFile, text, expected));
  const fs::path path = directory / kTensorFile;
  PLIMSOLL_TRY(const auto reader, SafetensorsReader::open(path));
  if (reader.entries().size() != tensors.size()) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: holds {} tensors, but this run needs {}", path.string(),
                            reader.entries().size(), tensors.size()),
                "the checkpoint belongs to a run with other options");
  }
  for (const NamedTensor& named : tensors) {
    PLIMSOLL_TRY_VOID(read_tensor(reader, path, named));
  }
  if (tensors_digest(tensors) != expected) {
    return fail(ErrorCode::kCorrupt,
                fmt::format("{}: its bytes are not those that were saved (SHA-256)", path.string()),
                "restore the file from a copy, or train anew");
  }
  return state;
}

void digest_tensors(StateDigest& digest, std::span<const NamedTensor> tensors) {
  for (const NamedTensor& named : tensors) {
    digest.add(named.name, bytes_of(named));
  }
}

}  // namespace plimsoll
