// SPDX-License-Identifier: Apache-2.0
#include "tables/chunk_file.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/check.h"
#include "data/torch_archive.h"

namespace plimsoll {
namespace {

constexpr const char* kAdvice = "save the original's rows again, with torch.save of {id: tensor}";
constexpr std::size_t kBlockBytes = 1 << 20;

// The width of the rows, all of which are as they must be.
Result<std::int64_t> width_of(const PickleValue& dict, const std::filesystem::path& path) {
  const auto wrong = [&](const std::string& what) {
    return fail(ErrorCode::kCorrupt, fmt::format("{}: {}", path.string(), what), kAdvice);
  };
  if (dict.kind != PickleKind::kDict || dict.items().empty()) {
    return wrong("holds no dict of rows");
  }
  const auto& items = dict.items();
  std::int64_t dim = 0;
  for (std::size_t i = 0; i < items.size(); i += 2) {
    if (items[i].kind != PickleKind::kNumber) {
      return wrong("an id that is no whole number");
    }
    if (items[i + 1].kind != PickleKind::kTensor) {
      return wrong(fmt::format("id {} has no tensor", items[i].number));
    }
    const TorchTensor& row = items[i + 1].tensor();
    if (row.type != TorchType::kFloat32 || row.dims != 1 || row.shape[0] < 1 ||
        (i > 0 && row.shape[0] != dim)) {
      return wrong(fmt::format("the row of id {} is not float32 [{}]", items[i].number,
                               i > 0 ? std::to_string(dim) : "dim"));
    }
    dim = row.shape[0];
  }
  return dim;
}

}  // namespace

ChunkFile::ChunkFile(Governor governor, std::filesystem::path path) noexcept
    : governor_(std::move(governor)), path_(std::move(path)) {}

Result<ChunkFile> ChunkFile::open(Governor governor, const std::filesystem::path& path) {
  ChunkFile file(std::move(governor), path);
  PLIMSOLL_TRY(auto archive, TorchArchive::open(file.governor_, path, kAdvice));
  PLIMSOLL_TRY(const Pickle pickle, archive.pickle(file.governor_, {}));
  PLIMSOLL_TRY(file.dim_, width_of(pickle.value(), path));
  return file;
}

Result<void> ChunkFile::visit(bool with_rows, const Visit& visit) const {
  PLIMSOLL_TRY(auto archive, TorchArchive::open(governor_, path_, kAdvice));
  PLIMSOLL_TRY(const Pickle pickle, archive.pickle(governor_, {}));
  PLIMSOLL_TRY(const std::int64_t width, width_of(pickle.value(), path_));
  if (width != dim_) {
    return fail(ErrorCode::kCorrupt, path_.string() + ": it changed while it was read", kAdvice);
  }
  const auto& items = pickle.value().items();
  const auto dim = static_cast<std::size_t>(dim_);
  const std::size_t most = std::max<std::size_t>(1, kBlockBytes / (dim * sizeof(float)));
  std::vector<std::int64_t> ids;
  std::vector<float> rows;
  for (std::size_t i = 0; i + 1 < items.size(); i += 2) {
    ids.push_back(items[i].number);
    if (with_rows) {
      rows.resize(ids.size() * dim);
      PLIMSOLL_TRY_VOID(
          archive.read(items[i + 1].tensor(), std::as_writable_bytes(std::span(rows).last(dim))));
    }
    if (ids.size() == most || i + 2 == items.size()) {
      PLIMSOLL_TRY_VOID(visit(ids, rows));
      ids.clear();
      rows.clear();
    }
  }
  return {};
}

}  // namespace plimsoll
