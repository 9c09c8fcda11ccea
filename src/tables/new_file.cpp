// SPDX-License-Identifier: Apache-2.0
#include "tables/new_file.h"

#include <system_error>
#include <utility>

#include "base/check.h"
#include "base/npy_header.h"

namespace plimsoll {

Result<NewFile> NewFile::create(const std::filesystem::path& path) {
  NewFile made;
  made.path_ = path;
  made.partial_ = path.string() + ".partial";
  PLIMSOLL_TRY(made.file_, File::open(made.partial_, FileMode::kCreate));
  return made;
}

NewFile::NewFile(NewFile&& other) noexcept
    : file_(std::move(other.file_)),
      path_(std::move(other.path_)),
      partial_(std::exchange(other.partial_, {})),
      at_(other.at_) {}

NewFile::~NewFile() {
  if (!partial_.empty() && file_.still_named()) {
    std::error_code ignored;
    std::filesystem::remove(partial_, ignored);
  }
}

Result<void> NewFile::write(std::span<const std::byte> bytes) {
  PLIMSOLL_TRY_VOID(file_.write_at(at_, bytes));
  at_ += static_cast<std::int64_t>(bytes.size());
  return {};
}

Result<void> NewFile::rewrite_head(std::string_view text) {
  return file_.write_at(0, std::as_bytes(std::span(text)));
}

Result<void> NewFile::finish() {
  PLIMSOLL_TRY_VOID(file_.sync());
  if (!file_.still_named()) {
    return fail(ErrorCode::kInvalidArgument,
                partial_.string() + ": another process is writing there",
                "wait for it, or name another file");
  }
  PLIMSOLL_TRY_VOID(rename_durable(partial_, path_));
  partial_.clear();
  return {};
}

const char* npy_descriptor(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "<f4";
    case DType::kFloat16:
      return "<f2";
    case DType::kFloat64:
      return "<f8";
    case DType::kInt64:
      return "<i8";
    case DType::kInt32:
      return "<i4";
    case DType::kUint8:
      return "|u1";
    case DType::kBFloat16:
      return "";
  }
  return "";
}

std::string npy_header(const TensorSpec& spec) {
  return npy_header(npy_descriptor(spec.dtype), spec.shape);
}

}  // namespace plimsoll
