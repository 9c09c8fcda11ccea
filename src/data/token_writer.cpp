// SPDX-License-Identifier: Apache-2.0
//
// TokenWriter: rows are appended to PATH.partial/rows and their entries to PATH.partial/index.
//
// A commit syncs both and then replaces PATH.partial/journal, which says how long they were. Work
// that goes on cuts off what is beyond. At the end the index is copied behind the rows, the header
// is written, and the file takes the set's name.
// Reading order: include/plimsoll/token_set.h, token_set_format.h, this file.
//
// Threads: single-owner.   Memory: as the header says.
#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/utf8.h"
#include "data/buffered_file.h"
#include "data/token_set_format.h"
#include "memory/slab.h"
#include "os/directories.h"
#include "os/file.h"
#include "os/folder_lock.h"
#include "plimsoll/token_set.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRowsFile = "rows";
constexpr const char* kIndexFile = "index";
constexpr const char* kJournalFile = "journal";
constexpr std::int64_t kIndexBufferBytes = 64 << 10;
constexpr std::int64_t kPositionMost = 4 << 20;
constexpr std::int64_t kNarrowVocabulary = 65536;

struct Journal {
  TokenSetInfo info{};
  std::int64_t rows_bytes{0};  // Of the file of rows.
  std::string position{};
};

std::string journal_text(const Journal& journal) {
  const nlohmann::ordered_json json{{"fingerprint", journal.info.fingerprint},
                                    {"vocabulary", journal.info.vocabulary},
                                    {"rows", journal.info.rows},
                                    {"tokens", journal.info.tokens},
                                    {"trained_tokens", journal.info.trained_tokens},
                                    {"longest_row", journal.info.longest_row},
                                    {"rows_bytes", journal.rows_bytes},
                                    {"position", journal.position}};
  const std::string text = json.dump();
  return fmt::format("{:08x} {}", crc32c(std::as_bytes(std::span(text))), text);
}

// Nothing when there is none, or it is damaged: work is then begun anew.
std::optional<Journal> read_journal(const fs::path& folder) {
  const auto text = read_small_file(folder / kJournalFile, kPositionMost * 2 + 4096);
  constexpr std::size_t kCrcDigits = 8;
  if (!text || text->size() < kCrcDigits + 1) {
    return std::nullopt;
  }
  std::uint32_t crc = 0;
  std::from_chars(text->data(), text->data() + kCrcDigits, crc, 16);
  const auto body = std::string_view(*text).substr(kCrcDigits + 1);
  if (crc32c(std::as_bytes(std::span(body))) != crc) {
    return std::nullopt;
  }
  const auto json = nlohmann::json::parse(body, nullptr, false);
  const auto number = [&](const char* key) {
    const auto found = json.find(key);
    return found != json.end() && found->is_number_unsigned() ? found->get<std::int64_t>() : -1;
  };
  Journal journal{.info = {.rows = number("rows"),
                           .tokens = number("tokens"),
                           .trained_tokens = number("trained_tokens"),
                           .longest_row = number("longest_row"),
                           .vocabulary = number("vocabulary")},
                  .rows_bytes = number("rows_bytes")};
  const auto fingerprint = json.find("fingerprint");
  const auto position = json.find("position");
  const TokenSetInfo& info = journal.info;
  constexpr std::int64_t kMost = std::int64_t{1} << 56;
  const bool sensible = info.rows >= 0 && info.rows <= info.tokens && info.tokens <= kMost &&
                        info.trained_tokens >= 0 && info.trained_tokens <= info.tokens &&
                        info.longest_row >= 0 && info.longest_row <= info.tokens &&
                        info.longest_row <= kRowTokensMost &&
                        journal.rows_bytes >= kTokenHeaderBytes && journal.rows_bytes <= kMost;
  if (!sensible || fingerprint == json.end() || position == json.end() ||
      !fingerprint->is_string() || !position->is_string()) {
    return std::nullopt;
  }
  journal.info.fingerprint = fingerprint->get<std::string>();
  journal.position = position->get<std::string>();
  return journal;
}

bool is_fingerprint(const std::string& text) {
  return !text.empty() && static_cast<std::int64_t>(text.size()) <= kTokenFingerprintBytes &&
         is_utf8(text);
}

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
  if (!is_fingerprint(options.fingerprint)) {
    return wrong("a fingerprint is 1 to 64 bytes of text");
  }
  std::error_code status;
  if (fs::exists(options.path, status) && !is_token_set(options.path)) {
    return fail(ErrorCode::kInvalidArgument,
                options.path.string() + ": there is something else, which is no token set",
                "choose another name with out (--out)");
  }
  return {};
}

}  // namespace

class TokenWriter::Impl {
 public:
  static Result<std::unique_ptr<Impl>> open(Governor governor, const TokenWriterOptions& options);
  Result<void> append(std::span<const std::uint32_t> ids, std::span<const TokenSpan> trained);
  Result<RowEnd> end_row();
  void drop_row() noexcept;
  Result<void> commit(const std::string& position);
  Result<void> finish(const std::string& about, const std::string& fingerprint);

  bool whole{false};
  Journal done;  // Of the last commit, but for info and rows_bytes, which are of the last row.

 private:
  Result<void> begin(bool again);
  Result<void> clear();
  template <class Id>
  Result<void> put_ids(std::span<const std::uint32_t> ids);
  void mark(std::int64_t begin, std::int64_t end) noexcept;
  Result<void> copy_index();

  TokenWriterOptions options_;
  fs::path folder_;
  FolderLock lock_;
  Slab slab_;
  Lease mask_lease_;
  File rows_file_{};
  File index_file_{};
  BufferedFile rows_{.file = &rows_file_};
  BufferedFile index_{.file = &index_file_};
  // The row under way.
  std::vector<std::byte> mask_;
  std::uint32_t crc_{0};  // Of its ids.
  RowEnd row_{};
};

Result<std::unique_ptr<TokenWriter::Impl>> TokenWriter::Impl::open(
    Governor governor, const TokenWriterOptions& options) {
  PLIMSOLL_TRY_VOID(check_writer_options(options));
  auto impl = std::make_unique<Impl>();
  impl->options_ = options;
  impl->folder_ = options.path;
  impl->folder_ += ".partial";
  std::error_code status;
  const auto made = options.rebuild ? Result<TokenSetInfo>(tl::unexpected(Error{}))
                                    : TokenSet::inspect(options.path);
  impl->whole = made && made->fingerprint == options.fingerprint;
  if (impl->whole && !fs::exists(impl->folder_, status)) {
    return impl;
  }
  PLIMSOLL_TRY(impl->lock_,
               FolderLock::take(impl->folder_, {.doing = "is making this token set",
                                                .advice = "wait for it, or choose another name"}));
  if (impl->whole) {  // Killed before it was cleared away.
    PLIMSOLL_TRY_VOID(impl->clear());
    return impl;
  }
  PLIMSOLL_TRY(impl->slab_, Slab::create(governor, Tag::kOther, kTokenWriterBytes));
  PLIMSOLL_TRY(impl->mask_lease_, governor.reserve(Tag::kOther, 0));
  impl->index_.buffer = impl->slab_.take<std::byte>(kIndexBufferBytes);
  impl->rows_.buffer = impl->slab_.take<std::byte>(kTokenWriterBytes - kIndexBufferBytes);
  PLIMSOLL_TRY_VOID(impl->begin(!options.rebuild));
  return impl;
}

// Goes on with what the journal says, or begins anew.
Result<void> TokenWriter::Impl::begin(bool again) {
  if (again) {
    if (auto journal = read_journal(folder_); journal &&
                                              journal->info.fingerprint == options_.fingerprint &&
                                              journal->info.vocabulary == options_.vocabulary) {
      auto rows = File::open(folder_ / kRowsFile, FileMode::kReadWrite);
      auto index = File::open(folder_ / kIndexFile, FileMode::kReadWrite);
      if (rows && index && rows->size().value_or(0) >= journal->rows_bytes &&
          index->size().value_or(0) >= journal->info.rows * 16) {
        PLIMSOLL_TRY_VOID(rows->truncate(journal->rows_bytes));
        PLIMSOLL_TRY_VOID(index->truncate(journal->info.rows * 16));
        rows_file_ = std::move(*rows);
        index_file_ = std::move(*index);
        rows_.written = journal->rows_bytes;
        index_.written = journal->info.rows * 16;
        done = std::move(*journal);
        done.info.id_bytes = options_.vocabulary <= kNarrowVocabulary ? 2 : 4;
        return {};
      }
    }
  }
  PLIMSOLL_TRY_VOID(remove_file(folder_ / kJournalFile));
  PLIMSOLL_TRY_VOID(sync_directory(folder_));
  PLIMSOLL_TRY(rows_file_, File::open(folder_ / kRowsFile, FileMode::kCreate));
  PLIMSOLL_TRY(index_file_, File::open(folder_ / kIndexFile, FileMode::kCreate));
  done = {.info = {.vocabulary = options_.vocabulary,
                   .id_bytes = options_.vocabulary <= kNarrowVocabulary ? 2 : 4,
                   .fingerprint = options_.fingerprint},
          .rows_bytes = kTokenHeaderBytes};
  return rows_.put(TokenHeader{});
}

Result<void> TokenWriter::Impl::clear() {
  for (const char* name : {kJournalFile, "journal.new", kIndexFile, kRowsFile}) {
    PLIMSOLL_TRY_VOID(remove_file(folder_ / name));
  }
  lock_.abandon();
  std::error_code status;
  if (fs::exists(folder_, status)) {
    PLIMSOLL_TRY_VOID(remove_file(folder_));
  }
  return {};
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
    const auto bytes = std::as_bytes(std::span(some).first(count));
    crc_ = crc32c(bytes, crc_);
    PLIMSOLL_TRY_VOID(rows_.put(bytes));
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
  PLIMSOLL_TRY_VOID(done.info.id_bytes == 2 ? put_ids<std::uint16_t>(ids)
                                            : put_ids<std::uint32_t>(ids));
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
  PLIMSOLL_TRY_VOID(rows_.put(mask_));
  TokenIndexEntry entry{.offset = done.rows_bytes,
                        .tokens = static_cast<std::uint32_t>(row.tokens)};
  entry.crc = token_row_crc(done.info.rows, entry, crc32c(mask_, crc_));
  PLIMSOLL_TRY_VOID(index_.put(std::as_bytes(std::span(&entry, 1))));
  ++done.info.rows;
  done.info.tokens += row.tokens;
  done.info.trained_tokens += row.trained;
  done.info.longest_row = std::max(done.info.longest_row, row.tokens);
  done.rows_bytes = rows_.bytes();
  drop_row();
  return row;
}

void TokenWriter::Impl::drop_row() noexcept {
  rows_.rewind(done.rows_bytes);
  mask_.clear();
  crc_ = 0;
  row_ = {};
}

Result<void> TokenWriter::Impl::commit(const std::string& position) {
  if (row_.tokens > 0 || static_cast<std::int64_t>(position.size()) > kPositionMost ||
      !is_utf8(position)) {
    return fail(ErrorCode::kInvalidArgument,
                options_.path.string() + ": a commit needs every row ended, and a short position");
  }
  PLIMSOLL_TRY_VOID(rows_.flush());
  PLIMSOLL_TRY_VOID(index_.flush());
  PLIMSOLL_TRY_VOID(rows_file_.sync());
  PLIMSOLL_TRY_VOID(index_file_.sync());
  done.position = position;
  return replace_file(folder_ / kJournalFile, journal_text(done));
}

Result<void> TokenWriter::Impl::copy_index() {
  PLIMSOLL_TRY_VOID(index_.flush());
  const std::int64_t bytes = done.info.rows * 16;
  for (std::int64_t at = 0; at < bytes;) {
    const auto part =
        index_.buffer.first(static_cast<std::size_t>(std::min(kIndexBufferBytes, bytes - at)));
    PLIMSOLL_TRY_VOID(index_file_.read_at(at, part));
    PLIMSOLL_TRY_VOID(rows_.put(part));
    at += static_cast<std::int64_t>(part.size());
  }
  return {};
}

Result<void> TokenWriter::Impl::finish(const std::string& about, const std::string& fingerprint) {
  if (row_.tokens > 0 || static_cast<std::int64_t>(about.size()) > kTokenAboutMost ||
      !(fingerprint.empty() || is_fingerprint(fingerprint))) {
    return fail(ErrorCode::kInvalidArgument,
                options_.path.string() + ": a set ends with every row ended, and a short text");
  }
  constexpr std::array<std::byte, 16> kPadding{};
  const auto padding = static_cast<std::size_t>((16 - rows_.bytes() % 16) % 16);
  PLIMSOLL_TRY_VOID(rows_.put(std::span(kPadding).first(padding)));
  TokenSetPlaces places{.info = done.info,
                        .index_at = rows_.bytes(),
                        .about_at = rows_.bytes() + done.info.rows * 16,
                        .about_bytes = static_cast<std::int64_t>(about.size()),
                        .about_crc = crc32c(std::as_bytes(std::span(about)))};
  if (!fingerprint.empty()) {
    places.info.fingerprint = fingerprint;
  }
  PLIMSOLL_TRY_VOID(copy_index());
  PLIMSOLL_TRY_VOID(rows_.put(std::as_bytes(std::span(about))));
  PLIMSOLL_TRY_VOID(rows_.flush());
  PLIMSOLL_TRY_VOID(rows_file_.write_at(0, token_header(places)));
  PLIMSOLL_TRY_VOID(rows_file_.sync());
  PLIMSOLL_TRY_VOID(rename_durable(folder_ / kRowsFile, options_.path));
  return clear();
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
  return impl_->whole;
}
const std::string& TokenWriter::position() const noexcept {
  return impl_->done.position;
}
const TokenSetInfo& TokenWriter::info() const noexcept {
  return impl_->done.info;
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
Result<void> TokenWriter::commit(const std::string& position) {
  return impl_->commit(position);
}
Result<void> TokenWriter::finish(const std::string& about, const std::string& fingerprint) {
  return impl_->finish(about, fingerprint);
}

}  // namespace plimsoll
