// SPDX-License-Identifier: Apache-2.0
//
// TokenSet: reading. A row's index entry is read, then its bytes, whose checksum covers both.
//
// Reading order: include/plimsoll/token_set.h, row_file.h, token_set_format.h, this file.
//
// Threads, Memory: as the header says.
#include "plimsoll/token_set.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include <fmt/core.h>

#include "base/check.h"
#include "base/crc32c.h"
#include "data/token_set_format.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

// A row's bytes as ids and a mask. False when an id is none of the vocabulary, or a bit is set
// beyond the row.
template <class Id>
bool unpack_row(std::span<const std::byte> bytes, std::int64_t vocabulary,
                std::span<std::int32_t> ids, std::span<std::uint8_t> trained) noexcept {
  bool sound = true;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    Id id{};
    std::memcpy(&id, bytes.data() + i * sizeof(Id), sizeof(Id));
    sound = sound && static_cast<std::int64_t>(id) < vocabulary;
    ids[i] = static_cast<std::int32_t>(id);
  }
  const auto bits = bytes.subspan(ids.size() * sizeof(Id));
  for (std::size_t i = 0; i < trained.size(); ++i) {
    trained[i] = static_cast<std::uint8_t>(std::to_integer<unsigned>(bits[i / 8]) >> (i % 8) & 1U);
  }
  const std::size_t rest = ids.size() % 8;
  return sound && (rest == 0 || std::to_integer<unsigned>(bits.back()) >> rest == 0);
}

}  // namespace

class TokenSet::Impl {
 public:
  static Result<std::unique_ptr<Impl>> open(const fs::path& path);
  [[nodiscard]] Result<RowEntry> entry(std::int64_t row) const;
  Result<void> read(std::int64_t row, std::span<std::int32_t> ids,
                    std::span<std::uint8_t> trained) const;
  Result<void> verify(const std::function<bool(std::int64_t, std::int64_t)>& progress) const;

  TokenSetInfo info;

 private:
  RowFile file_;
};

Result<std::unique_ptr<TokenSet::Impl>> TokenSet::Impl::open(const fs::path& path) {
  auto set = std::make_unique<Impl>();
  PLIMSOLL_TRY(set->file_, RowFile::open(path, kTokenSetKind));
  const RowFileHeader& header = set->file_.header();
  set->info = token_info(header.counts, header.unit);
  if (!sensible_tokens(set->info)) {
    return set->file_.corrupt("its header has numbers that no token set has");
  }
  set->info.fingerprint = header.fingerprint;
  set->info.about = set->file_.about();
  set->info.disk_bytes = set->file_.disk_bytes();
  return set;
}

Result<RowEntry> TokenSet::Impl::entry(std::int64_t row) const {
  PLIMSOLL_TRY(const RowEntry entry, file_.entry(row));
  if (entry.length > info.longest_row ||
      !file_.holds(entry.offset, token_row_bytes(entry.length, info.id_bytes))) {
    return file_.corrupt(fmt::format("the index entry of row {} is damaged", row));
  }
  return entry;
}

Result<void> TokenSet::Impl::read(std::int64_t row, std::span<std::int32_t> ids,
                                  std::span<std::uint8_t> trained) const {
  PLIMSOLL_TRY(const RowEntry found, entry(row));
  if (ids.size() != found.length || trained.size() != found.length) {
    return fail(
        ErrorCode::kInvalidArgument,
        fmt::format("row {} has {} tokens; room for {} was given", row, found.length, ids.size()));
  }
  std::vector<std::byte> bytes(
      static_cast<std::size_t>(token_row_bytes(found.length, info.id_bytes)));
  PLIMSOLL_TRY_VOID(file_.read_at(found.offset, bytes));
  const bool sound =
      row_crc(row, found, crc32c(bytes)) == found.crc &&
      (info.id_bytes == 2 ? unpack_row<std::uint16_t>(bytes, info.vocabulary, ids, trained)
                          : unpack_row<std::uint32_t>(bytes, info.vocabulary, ids, trained));
  if (!sound) {
    return file_.corrupt(fmt::format("the checksum of row {} does not match", row));
  }
  return {};
}

Result<void> TokenSet::Impl::verify(
    const std::function<bool(std::int64_t, std::int64_t)>& progress) const {
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> trained;
  std::int64_t tokens = 0;
  std::int64_t trained_tokens = 0;
  for (std::int64_t row = 0; row < info.rows; ++row) {
    PLIMSOLL_TRY(const RowEntry found, entry(row));
    ids.resize(found.length);
    trained.resize(found.length);
    PLIMSOLL_TRY_VOID(read(row, ids, trained));
    tokens += found.length;
    trained_tokens += std::count(trained.begin(), trained.end(), 1);
    if (row % 1024 == 0 && progress && !progress(row, info.rows)) {
      return fail(ErrorCode::kInvalidArgument, file_.name() + ": verify cancelled");
    }
  }
  if (tokens != info.tokens || trained_tokens != info.trained_tokens) {
    return file_.corrupt("its rows have other numbers of tokens than the header says");
  }
  return {};
}

TokenSet::TokenSet(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
TokenSet::TokenSet(TokenSet&&) noexcept = default;
TokenSet& TokenSet::operator=(TokenSet&&) noexcept = default;
TokenSet::~TokenSet() = default;

Result<TokenSet> TokenSet::open(const fs::path& path) {
  PLIMSOLL_TRY(auto impl, Impl::open(path));
  return TokenSet(std::move(impl));
}

Result<TokenSetInfo> TokenSet::inspect(const fs::path& path) {
  PLIMSOLL_TRY(const auto impl, Impl::open(path));
  return impl->info;
}

const TokenSetInfo& TokenSet::info() const noexcept {
  return impl_->info;
}

Result<std::int64_t> TokenSet::length(std::int64_t row) const {
  PLIMSOLL_TRY(const RowEntry found, impl_->entry(row));
  return static_cast<std::int64_t>(found.length);
}

Result<void> TokenSet::read(std::int64_t row, std::span<std::int32_t> ids,
                            std::span<std::uint8_t> trained) const {
  return impl_->read(row, ids, trained);
}

Result<void> TokenSet::verify(
    const std::function<bool(std::int64_t, std::int64_t)>& progress) const {
  return impl_->verify(progress);
}

}  // namespace plimsoll
