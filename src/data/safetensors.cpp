// SPDX-License-Identifier: Apache-2.0
//
// Reading and writing .safetensors: see safetensors.h. The header is parsed event by event, so that
// what is kept is bounded by what the format allows, whatever the text.
//
// Threads, Memory: as the header says.
#include "data/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <utility>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/crc32c.h"

namespace plimsoll {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr std::size_t kTensorsMax = 1 << 17;
constexpr std::size_t kShapeMax = 16;
constexpr const char* kMetadataKey = "__metadata__";

struct TypeRow {
  const char* text;
  std::int64_t bytes;
  std::optional<DType> dtype;
};

constexpr std::array<TypeRow, 15> kTypes{{{"F32", 4, DType::kFloat32},
                                          {"F16", 2, DType::kFloat16},
                                          {"BF16", 2, DType::kBFloat16},
                                          {"F64", 8, DType::kFloat64},
                                          {"I64", 8, DType::kInt64},
                                          {"I32", 4, DType::kInt32},
                                          {"U8", 1, DType::kUint8},
                                          {"I8", 1, std::nullopt},
                                          {"I16", 2, std::nullopt},
                                          {"U16", 2, std::nullopt},
                                          {"U32", 4, std::nullopt},
                                          {"U64", 8, std::nullopt},
                                          {"BOOL", 1, std::nullopt},
                                          {"F8_E4M3", 1, std::nullopt},
                                          {"F8_E5M2", 1, std::nullopt}}};

const TypeRow* type_named(const std::string& text) {
  const auto found = std::find_if(kTypes.begin(), kTypes.end(),
                                  [&](const TypeRow& row) { return text == row.text; });
  return found == kTypes.end() ? nullptr : &*found;
}

const char* type_text(DType dtype) {
  const auto found = std::find_if(kTypes.begin(), kTypes.end(),
                                  [&](const TypeRow& row) { return row.dtype == dtype; });
  return found == kTypes.end() ? "" : found->text;
}

// Accepts exactly: { NAME: {"dtype": S, "shape": [N…], "data_offsets": [N, N]}, …,
//                    "__metadata__": {S: S, …} }. Any other event ends the parse.
class HeaderEvents : public nlohmann::json_sax<json> {
 public:
  explicit HeaderEvents(SafetensorsHeader& header) : header_(header) {}

  bool start_object(std::size_t) override { return depth_ < 2 && !in_array_ && ++depth_ > 0; }
  bool end_object() override {
    if (depth_-- == 2 && !in_metadata_) {
      const bool complete = seen_ == 7 && header_.entries.size() < kTensorsMax;
      header_.entries.push_back(std::exchange(entry_, {}));
      return complete;
    }
    return true;
  }
  bool key(std::string& text) override {
    if (depth_ == 1) {
      in_metadata_ = text == kMetadataKey;
      entry_.name = text;
      seen_ = 0;
      return !in_metadata_ || !std::exchange(had_metadata_, true);
    }
    key_ = std::move(text);
    return true;
  }
  bool string(std::string& text) override {
    if (depth_ != 2 || in_array_) {
      return false;
    }
    if (in_metadata_) {
      return header_.metadata.emplace(std::move(key_), std::move(text)).second;
    }
    entry_.dtype_text = text.substr(0, 16);
    return key_ == "dtype" && mark(1);
  }
  bool start_array(std::size_t) override {
    in_array_ = depth_ == 2 && !in_metadata_ && !in_array_;
    numbers_.clear();
    return in_array_ && (key_ == "shape" || key_ == "data_offsets");
  }
  bool end_array() override {
    in_array_ = false;
    if (key_ == "shape") {
      entry_.shape = numbers_;
      return mark(2);
    }
    if (numbers_.size() != 2) {
      return false;
    }
    entry_.begin = numbers_[0];
    entry_.end = numbers_[1];
    return mark(4);
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (!in_array_ || value > (1ULL << 62) || numbers_.size() == kShapeMax) {
      return false;
    }
    numbers_.push_back(static_cast<std::int64_t>(value));
    return true;
  }
  bool null() override { return false; }
  bool boolean(bool) override { return false; }
  bool number_integer(number_integer_t) override { return false; }
  bool number_float(number_float_t, const std::string&) override { return false; }
  bool binary(json::binary_t&) override { return false; }
  bool parse_error(std::size_t, const std::string&, const json::exception&) override {
    return false;
  }

 private:
  bool mark(int bit) {
    const bool first = (seen_ & bit) == 0;
    seen_ |= bit;
    return first;
  }

  SafetensorsHeader& header_;
  SafetensorsEntry entry_{};
  std::string key_{};
  std::vector<std::int64_t> numbers_{};
  int depth_{0};
  int seen_{0};  // Bits: dtype, shape, data_offsets.
  bool in_array_{false};
  bool in_metadata_{false};
  bool had_metadata_{false};
};

// Types, sizes, and that the tensors tile the data section.
Result<void> check_entries(SafetensorsHeader& header, std::int64_t data_bytes,
                           const std::string& name) {
  std::int64_t at = 0;
  for (SafetensorsEntry& entry : header.entries) {
    const TypeRow* type = type_named(entry.dtype_text);
    if (type == nullptr) {
      return fail(ErrorCode::kCorrupt, fmt::format("{}: tensor \"{}\" has the unknown type \"{}\"",
                                                   name, entry.name, entry.dtype_text));
    }
    entry.dtype = type->dtype;
    const auto bytes = tensor_bytes(type->bytes, entry.shape);
    if (entry.begin > entry.end || !bytes || *bytes != entry.end - entry.begin) {
      return fail(ErrorCode::kCorrupt,
                  fmt::format("{}: tensor \"{}\" of shape {} and type {} has offsets {} to {}",
                              name, entry.name, shape_text(entry.shape), entry.dtype_text,
                              entry.begin, entry.end));
    }
  }
  std::stable_sort(header.entries.begin(), header.entries.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  for (const SafetensorsEntry& entry : header.entries) {
    if (entry.begin != at) {
      return fail(ErrorCode::kCorrupt,
                  fmt::format("{}: tensor \"{}\" begins at byte {}, the one before ends at {}",
                              name, entry.name, entry.begin, at));
    }
    at = entry.end;
  }
  if (at != data_bytes) {
    return fail(ErrorCode::kCorrupt,
                fmt::format("{}: truncated or too long: its tensors take {} bytes, it has {}", name,
                            at, data_bytes));
  }
  std::vector<const std::string*> names;
  for (const SafetensorsEntry& entry : header.entries) {
    names.push_back(&entry.name);
  }
  std::sort(names.begin(), names.end(), [](auto* a, auto* b) { return *a < *b; });
  const auto twice =
      std::adjacent_find(names.begin(), names.end(), [](auto* a, auto* b) { return *a == *b; });
  if (twice != names.end()) {
    return fail(ErrorCode::kCorrupt,
                fmt::format("{}: tensor \"{}\" is there twice", name, **twice));
  }
  return {};
}

}  // namespace

Result<SafetensorsHeader> parse_safetensors_header(const std::string& text, std::int64_t data_bytes,
                                                   const std::string& name) {
  SafetensorsHeader header;
  HeaderEvents events(header);
  if (!json::sax_parse(text, &events)) {
    return fail(ErrorCode::kCorrupt, fmt::format("{}: malformed safetensors header", name));
  }
  PLIMSOLL_TRY_VOID(check_entries(header, data_bytes, name));
  return header;
}

// ---- checksum ----

namespace {

constexpr std::string_view kNoSum = "00000000";
constexpr std::int64_t kCheckBytes = 1 << 20;

std::size_t index(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

// Where in the file the digits of the checksum are, of a header that we wrote; −1 in any other.
std::int64_t sum_place(const std::string& header) {
  const std::string before = fmt::format("\"{}\":\"", kSafetensorsSum);
  const std::size_t at = header.find(before);
  const std::size_t end = at + before.size() + kNoSum.size();
  if (at == std::string::npos || end >= header.size() || header[end] != '"') {
    return -1;
  }
  return 8 + static_cast<std::int64_t>(at + before.size());
}

}  // namespace

Result<void> SafetensorsReader::check() const {
  if (sum_at_ < 0) {
    return fail(
        ErrorCode::kCorrupt,
        fmt::format("{}: there is no checksum in its header: it was damaged, or not written "
                    "by this version of Plimsoll",
                    file_.path().string()),
        "restore the file from a copy, or train anew");
  }
  PLIMSOLL_TRY(const std::int64_t size, file_.size());
  std::vector<std::byte> buffer(index(std::min(kCheckBytes, size)));
  std::string digits(kNoSum.size(), '\0');
  PLIMSOLL_TRY_VOID(
      file_.read_at(sum_at_, std::as_writable_bytes(std::span(digits.data(), digits.size()))));
  std::uint32_t sum = 0;
  for (std::int64_t begin = 0; begin < size; begin += kCheckBytes) {
    const auto part = std::span(buffer).first(index(std::min(kCheckBytes, size - begin)));
    PLIMSOLL_TRY_VOID(file_.read_at(begin, part));
    for (std::size_t i = 0; i < kNoSum.size(); ++i) {
      const std::int64_t place = sum_at_ + static_cast<std::int64_t>(i) - begin;
      if (place >= 0 && place < static_cast<std::int64_t>(part.size())) {
        part[index(place)] = static_cast<std::byte>(kNoSum[i]);
      }
    }
    sum = crc32c(part, sum);
  }
  if (fmt::format("{:08x}", sum) != digits) {
    return fail(
        ErrorCode::kCorrupt,
        fmt::format("{}: its bytes are not those that were saved (CRC-32C)", file_.path().string()),
        "restore the file from a copy, or train anew");
  }
  return {};
}

// ---- reader ----

Result<SafetensorsReader> SafetensorsReader::open(const fs::path& path) {
  SafetensorsReader reader;
  PLIMSOLL_TRY(reader.file_, File::open(path, FileMode::kRead));
  PLIMSOLL_TRY(const std::int64_t file_bytes, reader.file_.size());
  std::uint64_t length = 0;
  if (file_bytes >= 8) {
    PLIMSOLL_TRY_VOID(reader.file_.read_at(0, std::as_writable_bytes(std::span(&length, 1))));
  }
  if (file_bytes < 8 || length > static_cast<std::uint64_t>(kSafetensorsHeaderMax) ||
      static_cast<std::int64_t>(length) > file_bytes - 8) {
    return fail(
        ErrorCode::kCorrupt,
        fmt::format("{}: not a safetensors file, or truncated inside its header", path.string()));
  }
  std::string text(static_cast<std::size_t>(length), '\0');
  PLIMSOLL_TRY_VOID(
      reader.file_.read_at(8, std::as_writable_bytes(std::span(text.data(), text.size()))));
  reader.data_offset_ = 8 + static_cast<std::int64_t>(length);
  reader.sum_at_ = sum_place(text);
  PLIMSOLL_TRY(reader.header_,
               parse_safetensors_header(text, file_bytes - reader.data_offset_, path.string()));
  return reader;
}

Result<const SafetensorsEntry*> SafetensorsReader::find(const std::string& name) const {
  for (const SafetensorsEntry& entry : header_.entries) {
    if (entry.name == name) {
      return &entry;
    }
  }
  return fail(ErrorCode::kNotFound,
              fmt::format("{}: there is no tensor \"{}\"", file_.path().string(), name));
}

Result<void> SafetensorsReader::read(const SafetensorsEntry& entry, std::int64_t offset,
                                     std::span<std::byte> out) const {
  const auto size = static_cast<std::int64_t>(out.size());
  if (offset < 0 || size > entry.end - entry.begin - offset) {
    return fail(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: tensor \"{}\" has {} bytes; {} were asked for at {}",
                    file_.path().string(), entry.name, entry.end - entry.begin, size, offset));
  }
  return file_.read_at(data_offset_ + entry.begin + offset, out);
}

Result<TensorRows> SafetensorsReader::rows_of(const SafetensorsEntry& entry) const {
  if (!entry.dtype || entry.shape.empty()) {
    return fail(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: tensor \"{}\" ({}, shape {}) cannot be read by rows",
                    file_.path().string(), entry.name, entry.dtype_text, shape_text(entry.shape)));
  }
  PLIMSOLL_TRY(File file, File::open(file_.path(), FileMode::kRead));
  return TensorRows(std::move(file), *entry.dtype, entry.shape, data_offset_ + entry.begin);
}

// ---- writer ----

namespace {

Result<void> check_specs(const std::vector<TensorSpec>& tensors, const std::string& path) {
  std::map<std::string, int> seen;
  for (const TensorSpec& tensor : tensors) {
    const bool printable = std::all_of(tensor.name.begin(), tensor.name.end(),
                                       [](char c) { return c >= ' ' && c <= '~'; });
    if (!printable || tensor.name.empty() || tensor.name == kMetadataKey ||
        seen[tensor.name]++ > 0) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("{}: a tensor's name is empty, twice there or not printable", path));
    }
    if (!tensor_bytes(dtype_bytes(tensor.dtype), tensor.shape)) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("{}: tensor \"{}\" has the impossible shape {}", path, tensor.name,
                              shape_text(tensor.shape)));
    }
  }
  return {};
}

}  // namespace

Result<SafetensorsWriter> SafetensorsWriter::create(const fs::path& path,
                                                    const std::vector<TensorSpec>& tensors,
                                                    std::map<std::string, std::string> metadata) {
  PLIMSOLL_TRY_VOID(check_specs(tensors, path.string()));
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  const bool summed = metadata.contains(kSafetensorsSum);
  if (summed) {
    metadata[kSafetensorsSum] = kNoSum;
  }
  if (!metadata.empty()) {
    header[kMetadataKey] = metadata;
  }
  std::int64_t at = 0;
  for (const TensorSpec& tensor : tensors) {
    const std::int64_t end = at + *tensor_bytes(dtype_bytes(tensor.dtype), tensor.shape);
    header[tensor.name] = {
        {"dtype", type_text(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {at, end}}};
    at = end;
  }
  std::string text = header.dump(-1, ' ', false, json::error_handler_t::replace);
  // Spaces after the header put the data on a 64-byte boundary.
  text.resize((text.size() + 8 + 63) / 64 * 64 - 8, ' ');
  SafetensorsWriter writer;
  writer.path_ = path;
  fs::path partial = path;
  partial += ".partial";
  PLIMSOLL_TRY(writer.file_, File::open(partial, FileMode::kCreate));
  writer.partial_ = std::move(partial);
  const std::uint64_t length = text.size();
  const auto first = std::as_bytes(std::span(&length, 1));
  const auto second = std::as_bytes(std::span(text.data(), text.size()));
  PLIMSOLL_TRY_VOID(writer.file_.write_at(0, first));
  PLIMSOLL_TRY_VOID(writer.file_.write_at(8, second));
  writer.sum_ = crc32c(second, crc32c(first));
  writer.sum_at_ = summed ? sum_place(text) : -1;
  writer.at_ = 8 + static_cast<std::int64_t>(text.size());
  writer.end_ = writer.at_ + at;
  return writer;
}

SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&& other) noexcept
    : file_(std::move(other.file_)),
      path_(std::move(other.path_)),
      partial_(std::exchange(other.partial_, {})),
      at_(other.at_),
      end_(other.end_),
      sum_at_(other.sum_at_),
      sum_(other.sum_) {}

SafetensorsWriter::~SafetensorsWriter() {
  if (!partial_.empty() && file_.still_named()) {
    std::error_code ignored;
    fs::remove(partial_, ignored);
  }
}

Result<void> SafetensorsWriter::write(std::span<const std::byte> bytes) {
  const auto size = static_cast<std::int64_t>(bytes.size());
  if (size > end_ - at_) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: {} bytes more than the tensors declared", path_.string(),
                            size - (end_ - at_)));
  }
  PLIMSOLL_TRY_VOID(file_.write_at(at_, bytes));
  if (sum_at_ >= 0) {
    sum_ = crc32c(bytes, sum_);
  }
  at_ += size;
  return {};
}

Result<void> SafetensorsWriter::finish() {
  if (partial_.empty() || at_ != end_) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: {} bytes of the declared tensors are missing, or it is finished",
                            path_.string(), end_ - at_));
  }
  if (sum_at_ >= 0) {
    const std::string digits = fmt::format("{:08x}", sum_);
    PLIMSOLL_TRY_VOID(
        file_.write_at(sum_at_, std::as_bytes(std::span(digits.data(), digits.size()))));
  }
  PLIMSOLL_TRY_VOID(file_.sync());
  if (!file_.still_named()) {
    return fail(ErrorCode::kInvalidArgument,
                partial_.string() + ": another process is writing there",
                "wait for it, or name another file");
  }
  PLIMSOLL_TRY_VOID(rename_durable(partial_, path_));
  partial_.clear();
  file_ = File();
  return {};
}

}  // namespace plimsoll
