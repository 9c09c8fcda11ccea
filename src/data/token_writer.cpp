// SPDX-License-Identifier: Apache-2.0
//
// TokenWriter: ids and masks as rows of a RowWriter.
//
// Reading order: include/plimsoll/token_set.h, token_set_format.h, row_writer.h, this file.
//
// Threads: single-owner.   Memory: as the header says.
#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/check.h"
#include "data/row_writer.h"
#include "data/token_set_format.h"
#include "plimsoll/token_set.h"

namespace plimsoll {
namespace {

static_assert(kTokenWriterBytes == kRowWriterBytes);
constexpr std::int64_t kNarrowVocabulary = 65536;

Result<void> check_writer_options(const TokenWriterOptions& options) {
  const auto wrong = [&](const std::string& what) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("{}: {}", options.path.string(), what));
  };
  if (options.vocabulary < 1 || options.vocabulary > std::int64_t{1} << 31) {
    return wrong(fmt::format("a vocabulary of {} ids; 1 to 2^31 are possible", options.vocabulary));
  }
  if (options.row_tokens_max < 1 || options.row_tokens_max > kRowTokensMost) {
    return wrong(fmt::format("rows of at most {} tokens; 1 to {} are possible",
                             options.row_tokens_max, kRowTokensMost));
  }
  return {};
}

}  // namespace

class TokenWriter::Impl {
 public:
  Impl(const TokenWriterOptions& options, RowWriter rows)
      : options_(options), out(std::move(rows)) {
    info = token_info(out.counts(), id_bytes(options));
    info.fingerprint = options.fingerprint;
  }
  static Result<std::unique_ptr<Impl>> open(Governor governor, const TokenWriterOptions& options);
  Result<void> append(std::span<const std::uint32_t> ids, std::span<const TokenSpan> trained);
  Result<RowEnd> end_row();
  void drop_row() noexcept;
  Result<std::int64_t> append_rows(const TokenSet& from, std::int64_t begin, std::int64_t end);

 private:
  [[nodiscard]] static std::uint32_t id_bytes(const TokenWriterOptions& options) noexcept {
    return options.vocabulary <= kNarrowVocabulary ? 2 : 4;
  }
  template <class Id>
  Result<void> put_ids(std::span<const std::uint32_t> ids);
  void mark(std::int64_t begin, std::int64_t end) noexcept;

  TokenWriterOptions options_;
  Lease mask_lease_;
  // The row under way.
  std::vector<std::byte> mask_;
  RowEnd row_{};

 public:
  RowWriter out;
  TokenSetInfo info{};
};

Result<std::unique_ptr<TokenWriter::Impl>> TokenWriter::Impl::open(
    Governor governor, const TokenWriterOptions& options) {
  PLIMSOLL_TRY_VOID(check_writer_options(options));
  const auto sensible = [vocabulary = options.vocabulary, bytes = id_bytes(options)](
                            const std::array<std::int64_t, kRowCounts>& counts) {
    return counts[0] == vocabulary && sensible_tokens(token_info(counts, bytes));
  };
  PLIMSOLL_TRY(auto rows, RowWriter::open(governor, {.kind = &kTokenSetKind,
                                                     .path = options.path,
                                                     .fingerprint = options.fingerprint,
                                                     .rebuild = options.rebuild,
                                                     .unit = id_bytes(options),
                                                     .counts = {options.vocabulary},
                                                     .sensible = sensible}));
  auto impl = std::make_unique<Impl>(options, std::move(rows));
  PLIMSOLL_TRY(impl->mask_lease_, governor.reserve(Tag::kOther, 0));
  return impl;
}

template <class Id>
Result<void> TokenWriter::Impl::put_ids(std::span<const std::uint32_t> ids) {
  std::array<Id, 4096> some;
  while (!ids.empty()) {
    const std::size_t count = std::min(ids.size(), some.size());
    for (std::size_t i = 0; i < count; ++i) {
      if (ids[i] >= options_.vocabulary) {
        return fail(ErrorCode::kInvalidArgument,
                    fmt::format("{}: id {} in a vocabulary of {}", options_.path.string(), ids[i],
                                options_.vocabulary));
      }
      some[i] = static_cast<Id>(ids[i]);
    }
    PLIMSOLL_TRY_VOID(out.put(std::as_bytes(std::span(some).first(count))));
    ids = ids.subspan(count);
  }
  return {};
}

// Sets the bits [begin, end) of the row under way.
void TokenWriter::Impl::mark(std::int64_t begin, std::int64_t end) noexcept {
  for (std::int64_t i = begin; i < end; ++i) {
    auto& bits = mask_[static_cast<std::size_t>(i / 8)];
    const auto bit = std::byte{1} << (i % 8);
    row_.trained += (bits & bit) == std::byte{} ? 1 : 0;
    bits |= bit;
  }
}

Result<void> TokenWriter::Impl::append(std::span<const std::uint32_t> ids,
                                       std::span<const TokenSpan> trained) {
  for (const TokenSpan& span : trained) {
    if (span.begin < 0 || span.end < span.begin ||
        span.end > static_cast<std::int64_t>(ids.size())) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("{}: trained tokens [{}, {}) of {}", options_.path.string(),
                              span.begin, span.end, ids.size()));
    }
  }
  const std::int64_t room = options_.row_tokens_max - row_.tokens;
  if (static_cast<std::int64_t>(ids.size()) > room) {
    row_.cut = true;
    ids = ids.first(static_cast<std::size_t>(room));
  }
  const std::int64_t first = row_.tokens;
  const std::int64_t last = first + static_cast<std::int64_t>(ids.size());
  const std::int64_t mask_bytes = (last + 7) / 8;
  if (mask_bytes > mask_lease_.bytes()) {
    PLIMSOLL_TRY_VOID(mask_lease_.grow(std::max<std::int64_t>(4096, 2 * mask_bytes)));
    mask_.reserve(static_cast<std::size_t>(mask_lease_.bytes()));
  }
  mask_.resize(static_cast<std::size_t>(mask_bytes));
  PLIMSOLL_TRY_VOID(info.id_bytes == 2 ? put_ids<std::uint16_t>(ids) : put_ids<std::uint32_t>(ids));
  row_.tokens = last;
  for (const TokenSpan& span : trained) {
    mark(first + span.begin, std::min(first + span.end, last));
  }
  return {};
}

Result<RowEnd> TokenWriter::Impl::end_row() {
  const RowEnd row = row_;
  if (row.trained == 0) {
    drop_row();
    return row;
  }
  PLIMSOLL_TRY_VOID(out.put(mask_));
  PLIMSOLL_TRY_VOID(out.end_row(static_cast<std::uint32_t>(row.tokens)));
  ++info.rows;
  info.tokens += row.tokens;
  info.trained_tokens += row.trained;
  info.longest_row = std::max(info.longest_row, row.tokens);
  out.counts() = token_counts(info);
  drop_row();
  return row;
}

void TokenWriter::Impl::drop_row() noexcept {
  out.drop_row();
  mask_.clear();
  row_ = {};
}

Result<std::int64_t> TokenWriter::Impl::append_rows(const TokenSet& from, std::int64_t begin,
                                                    std::int64_t end) {
  constexpr std::int64_t kTokenBytes = 10;  // Of an id and its mask, here and while they are read.
  std::int64_t bytes = 0;
  for (std::int64_t row = begin; row < end; ++row) {
    PLIMSOLL_TRY(const std::int64_t tokens, from.length(row));
    if (tokens * kTokenBytes > mask_lease_.bytes()) {
      PLIMSOLL_TRY_VOID(mask_lease_.grow(tokens * kTokenBytes));
    }
    std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens));
    std::vector<std::uint8_t> trained(ids.size());
    PLIMSOLL_TRY_VOID(from.read(row, ids, trained));
    PLIMSOLL_TRY_VOID(append({reinterpret_cast<const std::uint32_t*>(ids.data()), ids.size()}, {}));
    for (std::int64_t i = 0; i < row_.tokens; ++i) {
      if (trained[static_cast<std::size_t>(i)] != 0) {
        mark(i, i + 1);
      }
    }
    PLIMSOLL_TRY_VOID(end_row());
    bytes += token_row_bytes(tokens, info.id_bytes);
  }
  return bytes;
}

TokenWriter::TokenWriter(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
TokenWriter::TokenWriter(TokenWriter&&) noexcept = default;
TokenWriter& TokenWriter::operator=(TokenWriter&&) noexcept = default;
TokenWriter::~TokenWriter() = default;

Result<TokenWriter> TokenWriter::open(Governor governor, const TokenWriterOptions& options) {
  PLIMSOLL_TRY(auto impl, Impl::open(std::move(governor), options));
  return TokenWriter(std::move(impl));
}

bool TokenWriter::whole() const noexcept {
  return impl_->out.whole();
}
const std::string& TokenWriter::position() const noexcept {
  return impl_->out.position();
}
const TokenSetInfo& TokenWriter::info() const noexcept {
  return impl_->info;
}
Result<void> TokenWriter::append(std::span<const std::uint32_t> ids,
                                 std::span<const TokenSpan> trained) {
  return impl_->append(ids, trained);
}
Result<RowEnd> TokenWriter::end_row() {
  return impl_->end_row();
}
void TokenWriter::drop_row() noexcept {
  impl_->drop_row();
}
Result<std::int64_t> TokenWriter::append_rows(const TokenSet& from, std::int64_t begin,
                                              std::int64_t end) {
  return impl_->append_rows(from, begin, end);
}
Result<void> TokenWriter::commit(const std::string& position) {
  return impl_->out.commit(position);
}
Result<void> TokenWriter::finish(const std::string& about, const std::string& fingerprint) {
  return impl_->out.finish(about, fingerprint);
}

}  // namespace plimsoll
