// SPDX-License-Identifier: Apache-2.0
//
// TokenSet: reading. A row's index entry is read, then its bytes, whose checksum covers both.
//
// Reading order: include/plimsoll/token_set.h, token_set_format.h, this file.
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
#include "os/file.h"

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
  [[nodiscard]] Result<TokenIndexEntry> entry(std::int64_t row) const;
  Result<void> read(std::int64_t row, std::span<std::int32_t> ids,
                    std::span<std::uint8_t> trained) const;
  Result<void> verify(const std::function<bool(std::int64_t, std::int64_t)>& progress) const;

  TokenSetPlaces places;

 private:
  [[nodiscard]] tl::unexpected<Error> corrupt(const std::string& what) const {
    return fail(ErrorCode::kCorrupt, fmt::format("{}: {}", file_.path().string(), what),
                "import the files again, or restore the file");
  }
  File file_;
};

Result<std::unique_ptr<TokenSet::Impl>> TokenSet::Impl::open(const fs::path& path) {
  auto set = std::make_unique<Impl>();
  PLIMSOLL_TRY(set->file_, File::open(path, FileMode::kRead));
  PLIMSOLL_TRY(const std::int64_t bytes, set->file_.size());
  TokenHeader header{};
  if (bytes < kTokenHeaderBytes) {
    return fail(ErrorCode::kCorrupt, path.string() + ": not a token set", "import the files again");
  }
  PLIMSOLL_TRY_VOID(set->file_.read_at(0, header));
  PLIMSOLL_TRY(set->places, parse_token_header(header, bytes, path.string()));
  std::string about(static_cast<std::size_t>(set->places.about_bytes), '\0');
  PLIMSOLL_TRY_VOID(
      set->file_.read_at(set->places.about_at, std::as_writable_bytes(std::span(about))));
  if (crc32c(std::as_bytes(std::span(about))) != set->places.about_crc) {
    return set->corrupt("the checksum of what it says of itself does not match");
  }
  set->places.info.about = std::move(about);
  return set;
}

Result<TokenIndexEntry> TokenSet::Impl::entry(std::int64_t row) const {
  if (row < 0 || row >= places.info.rows) {
    return fail(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: there is no row {} of {}", file_.path().string(), row, places.info.rows));
  }
  TokenIndexEntry entry;
  PLIMSOLL_TRY_VOID(
      file_.read_at(places.index_at + row * 16, std::as_writable_bytes(std::span(&entry, 1))));
  if (entry.tokens > places.info.longest_row || entry.offset < kTokenHeaderBytes ||
      entry.offset > places.index_at - token_row_bytes(entry.tokens, places.info.id_bytes)) {
    return corrupt(fmt::format("the index entry of row {} is damaged", row));
  }
  return entry;
}

Result<void> TokenSet::Impl::read(std::int64_t row, std::span<std::int32_t> ids,
                                  std::span<std::uint8_t> trained) const {
  PLIMSOLL_TRY(const TokenIndexEntry found, entry(row));
  if (ids.size() != found.tokens || trained.size() != found.tokens) {
    return fail(
        ErrorCode::kInvalidArgument,
        fmt::format("row {} has {} tokens; room for {} was given", row, found.tokens, ids.size()));
  }
  std::vector<std::byte> bytes(
      static_cast<std::size_t>(token_row_bytes(found.tokens, places.info.id_bytes)));
  PLIMSOLL_TRY_VOID(file_.read_at(found.offset, bytes));
  const bool sound = token_row_crc(row, found, crc32c(bytes)) == found.crc &&
                     (places.info.id_bytes == 2
                          ? unpack_row<std::uint16_t>(bytes, places.info.vocabulary, ids, trained)
                          : unpack_row<std::uint32_t>(bytes, places.info.vocabulary, ids, trained));
  if (!sound) {
    return corrupt(fmt::format("the checksum of row {} does not match", row));
  }
  return {};
}

Result<void> TokenSet::Impl::verify(
    const std::function<bool(std::int64_t, std::int64_t)>& progress) const {
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> trained;
  std::int64_t tokens = 0;
  std::int64_t trained_tokens = 0;
  for (std::int64_t row = 0; row < places.info.rows; ++row) {
    PLIMSOLL_TRY(const TokenIndexEntry found, entry(row));
    ids.resize(found.tokens);
    trained.resize(found.tokens);
    PLIMSOLL_TRY_VOID(read(row, ids, trained));
    tokens += found.tokens;
    trained_tokens += std::count(trained.begin(), trained.end(), 1);
    if (row % 1024 == 0 && progress && !progress(row, places.info.rows)) {
      return fail(ErrorCode::kInvalidArgument, file_.path().string() + ": verify cancelled");
    }
  }
  if (tokens != places.info.tokens || trained_tokens != places.info.trained_tokens) {
    return corrupt("its rows have other numbers of tokens than the header says");
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
  return impl->places.info;
}

const TokenSetInfo& TokenSet::info() const noexcept {
  return impl_->places.info;
}

Result<std::int64_t> TokenSet::length(std::int64_t row) const {
  PLIMSOLL_TRY(const TokenIndexEntry found, impl_->entry(row));
  return static_cast<std::int64_t>(found.tokens);
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
