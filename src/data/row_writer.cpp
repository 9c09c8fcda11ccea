// SPDX-License-Identifier: Apache-2.0
#include "data/row_writer.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/utf8.h"
#include "os/directories.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRowsFile = "rows";
constexpr const char* kIndexFile = "index";
constexpr const char* kRowJournalFile = "journal";
constexpr std::int64_t kIndexBufferBytes = 64 << 10;
constexpr std::int64_t kPositionMost = 32 << 20;  // Some 25 bytes an input.
constexpr std::int64_t kEntryBytes = sizeof(RowEntry);

struct RowJournal {
  std::string fingerprint{};
  std::array<std::int64_t, kRowCounts> counts{};
  std::int64_t rows_bytes{0};  // Of the file of rows.
  std::string position{};
};

std::string journal_text(const RowJournal& journal) {
  const nlohmann::ordered_json json{{"fingerprint", journal.fingerprint},
                                    {"counts", journal.counts},
                                    {"rows_bytes", journal.rows_bytes},
                                    {"position", journal.position}};
  const std::string text = json.dump();
  return fmt::format("{:08x} {}", crc32c(std::as_bytes(std::span(text))), text);
}

// Nothing when there is none, or it is damaged: work is then begun anew.
std::optional<RowJournal> read_journal(const fs::path& folder) {
  const auto text = read_small_file(folder / kRowJournalFile, kPositionMost * 2 + 4096);
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
  try {
    const auto json = nlohmann::json::parse(body);
    constexpr std::uint64_t kMost = std::uint64_t{1} << 56;
    const auto number = [](const nlohmann::json& value) {
      const bool sensible = value.is_number_unsigned() && value.get<std::uint64_t>() <= kMost;
      return sensible ? value.get<std::int64_t>() : -1;
    };
    RowJournal journal{.fingerprint = json.at("fingerprint"),
                       .rows_bytes = number(json.at("rows_bytes")),
                       .position = json.at("position")};
    bool sensible = journal.rows_bytes >= kRowFileHeaderBytes;
    for (std::size_t i = 0; i < kRowCounts; ++i) {
      journal.counts[i] = number(json.at("counts").at(i));
      sensible = sensible && journal.counts[i] >= 0;
    }
    return sensible ? std::optional(std::move(journal)) : std::nullopt;
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

bool is_fingerprint(const std::string& text) {
  return !text.empty() && static_cast<std::int64_t>(text.size()) <= kRowFileFingerprintBytes &&
         is_utf8(text);
}

}  // namespace

Result<RowWriter> RowWriter::open(Governor governor, const RowWriterOptions& options) {
  RowWriter writer;
  const std::string name = options.path.string();
  if (!is_fingerprint(options.fingerprint)) {
    return fail(ErrorCode::kInvalidArgument, name + ": a fingerprint is 1 to 64 bytes of text");
  }
  std::error_code status;
  const bool ours = is_row_file(options.path, *options.kind);
  if (!ours && fs::exists(options.path, status)) {
    return fail(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: there is something else, which is no {}", name, options.kind->name),
        "choose another name with out (--out)");
  }
  writer.options_ = options;
  writer.folder_ = options.path;
  writer.folder_ += ".partial";
  if (ours && !options.rebuild) {
    const auto made = RowFile::open(options.path, *options.kind);
    writer.whole_ = made && made->header().fingerprint == options.fingerprint;
  }
  if (writer.whole_ && !fs::exists(writer.folder_, status)) {
    return writer;
  }
  PLIMSOLL_TRY(writer.lock_,
               FolderLock::take(writer.folder_, {.doing = options.kind->doing,
                                                 .advice = "wait for it, or choose another name"}));
  if (writer.whole_) {  // Killed before it was cleared away.
    PLIMSOLL_TRY_VOID(writer.clear());
    return writer;
  }
  PLIMSOLL_TRY_VOID(writer.begin(std::move(governor)));
  return writer;
}

Result<void> RowWriter::begin(Governor governor) {
  PLIMSOLL_TRY(slab_, Slab::create(std::move(governor), Tag::kOther, kRowWriterBytes));
  files_ = std::make_unique<std::array<File, 2>>();
  rows_ = {.file = files_->data(),
           .buffer = slab_.take<std::byte>(kRowWriterBytes - kIndexBufferBytes)};
  index_ = {.file = files_->data() + 1, .buffer = slab_.take<std::byte>(kIndexBufferBytes)};
  if (!options_.rebuild) {
    PLIMSOLL_TRY(const bool going, go_on());
    if (going) {
      return {};
    }
  }
  PLIMSOLL_TRY_VOID(remove_file(folder_ / kRowJournalFile));
  PLIMSOLL_TRY_VOID(sync_directory(folder_));
  PLIMSOLL_TRY(*rows_.file, File::open(folder_ / kRowsFile, FileMode::kCreate));
  PLIMSOLL_TRY(*index_.file, File::open(folder_ / kIndexFile, FileMode::kCreate));
  counts_ = options_.counts;
  return rows_.put(RowFileHeaderBytes{});
}

// Goes on with what the journal says; false where there is nothing to go on with.
Result<bool> RowWriter::go_on() {
  auto journal = read_journal(folder_);
  if (!journal || journal->fingerprint != options_.fingerprint ||
      !options_.sensible(journal->counts)) {
    return false;
  }
  auto rows = File::open(folder_ / kRowsFile, FileMode::kReadWrite);
  auto index = File::open(folder_ / kIndexFile, FileMode::kReadWrite);
  const std::int64_t index_bytes = journal->counts[1] * kEntryBytes;
  if (!rows || !index || rows->size().value_or(0) < journal->rows_bytes ||
      index->size().value_or(0) < index_bytes) {
    return false;
  }
  PLIMSOLL_TRY_VOID(rows->truncate(journal->rows_bytes));
  PLIMSOLL_TRY_VOID(index->truncate(index_bytes));
  *rows_.file = std::move(*rows);
  *index_.file = std::move(*index);
  rows_.written = ended_bytes_ = journal->rows_bytes;
  index_.written = index_bytes;
  counts_ = journal->counts;
  position_ = std::move(journal->position);
  return true;
}

Result<void> RowWriter::clear() {
  for (const char* name : {kRowJournalFile, "journal.new", kIndexFile, kRowsFile}) {
    PLIMSOLL_TRY_VOID(remove_file(folder_ / name));
  }
  lock_.abandon();
  std::error_code status;
  if (fs::exists(folder_, status)) {
    PLIMSOLL_TRY_VOID(remove_file(folder_));
  }
  return {};
}

Result<void> RowWriter::put(std::span<const std::byte> bytes) {
  crc_ = crc32c(bytes, crc_);
  return rows_.put(bytes);
}

Result<void> RowWriter::end_row(std::uint32_t length) {
  RowEntry entry{.offset = ended_bytes_, .length = length};
  entry.crc = row_crc(rows(), entry, crc_);
  PLIMSOLL_TRY_VOID(index_.put(std::as_bytes(std::span(&entry, 1))));
  ++counts_[1];
  ended_bytes_ = rows_.bytes();
  crc_ = 0;
  return {};
}

void RowWriter::drop_row() noexcept {
  rows_.rewind(ended_bytes_);
  crc_ = 0;
}

Result<void> RowWriter::commit(const std::string& position) {
  if (row_bytes() > 0 || static_cast<std::int64_t>(position.size()) > kPositionMost ||
      !is_utf8(position)) {
    return fail(ErrorCode::kInvalidArgument,
                options_.path.string() + ": a commit needs every row ended, and a short position");
  }
  PLIMSOLL_TRY_VOID(rows_.flush());
  PLIMSOLL_TRY_VOID(index_.flush());
  PLIMSOLL_TRY_VOID(rows_.file->sync());
  PLIMSOLL_TRY_VOID(index_.file->sync());
  position_ = position;
  return replace_file(folder_ / kRowJournalFile, journal_text({.fingerprint = options_.fingerprint,
                                                               .counts = counts_,
                                                               .rows_bytes = ended_bytes_,
                                                               .position = position}));
}

Result<void> RowWriter::copy_index() {
  PLIMSOLL_TRY_VOID(index_.flush());
  const std::int64_t bytes = rows() * kEntryBytes;
  for (std::int64_t at = 0; at < bytes;) {
    const auto part =
        index_.buffer.first(static_cast<std::size_t>(std::min(kIndexBufferBytes, bytes - at)));
    PLIMSOLL_TRY_VOID(index_.file->read_at(at, part));
    PLIMSOLL_TRY_VOID(rows_.put(part));
    at += static_cast<std::int64_t>(part.size());
  }
  return {};
}

Result<void> RowWriter::finish(const std::string& about, const std::string& fingerprint) {
  if (static_cast<std::int64_t>(about.size()) > kRowFileAboutMost) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: what is to be said of its inputs has {} bytes, more than {}",
                            options_.path.string(), about.size(), kRowFileAboutMost),
                "put the inputs into fewer files");
  }
  if (row_bytes() > 0 || !(fingerprint.empty() || is_fingerprint(fingerprint))) {
    return fail(ErrorCode::kInvalidArgument,
                options_.path.string() +
                    ": a set ends with every row ended, and a fingerprint of 64 bytes");
  }
  constexpr std::array<std::byte, kEntryBytes> kPadding{};
  const auto padding = static_cast<std::size_t>((16 - rows_.bytes() % 16) % 16);
  PLIMSOLL_TRY_VOID(rows_.put(std::span(kPadding).first(padding)));
  const RowFileHeader header{
      .unit = options_.unit,
      .counts = counts_,
      .index_at = rows_.bytes(),
      .about_at = rows_.bytes() + rows() * kEntryBytes,
      .about_bytes = static_cast<std::int64_t>(about.size()),
      .about_crc = crc32c(std::as_bytes(std::span(about))),
      .fingerprint = fingerprint.empty() ? options_.fingerprint : fingerprint};
  PLIMSOLL_TRY_VOID(copy_index());
  PLIMSOLL_TRY_VOID(rows_.put(std::as_bytes(std::span(about))));
  PLIMSOLL_TRY_VOID(rows_.flush());
  PLIMSOLL_TRY_VOID(rows_.file->truncate(rows_.bytes()));  // A long row that was dropped is beyond.
  PLIMSOLL_TRY_VOID(rows_.file->write_at(0, row_file_header(*options_.kind, header)));
  PLIMSOLL_TRY_VOID(rows_.file->sync());
  PLIMSOLL_TRY_VOID(rename_durable(folder_ / kRowsFile, options_.path));
  return clear();
}

}  // namespace plimsoll
