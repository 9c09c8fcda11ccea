// SPDX-License-Identifier: Apache-2.0
#include "data/chat_lines.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/core.h>

#include "base/check.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kPackedBufferBytes = 64 << 10;
constexpr std::size_t kLineBufferBytes = 256 << 10;
constexpr std::size_t kDoubledBytes = 8 << 20;  // Beyond, it grows by a quarter at a time.
constexpr std::string_view kUtf8Mark = "\xEF\xBB\xBF";

}  // namespace

Result<ChatLines> ChatLines::open(Governor governor, std::vector<std::filesystem::path> files,
                                  std::int64_t line_bytes_max, std::function<void()> between) {
  ChatLines lines;
  lines.between_ = std::move(between);
  lines.files_ = std::move(files);
  lines.line_bytes_max_ = line_bytes_max;
  PLIMSOLL_TRY(lines.slab_, Slab::create(governor, Tag::kOther, kPackedBufferBytes));
  lines.packed_ = lines.slab_.take<std::byte>(kPackedBufferBytes);
  PLIMSOLL_TRY(
      lines.line_lease_,
      governor.reserve(Tag::kOther, static_cast<std::int64_t>(kLineBufferBytes) + kUnpackBytes));
  lines.text_.resize(kLineBufferBytes);
  return lines;
}

Result<bool> ChatLines::open_file() {
  if (bytes_) {
    return true;
  }
  if (place_.file == static_cast<std::int64_t>(files_.size())) {
    return false;
  }
  file_ = static_cast<std::size_t>(place_.file);
  if (const auto extension = files_[file_].extension(); extension == ".zst" || extension == ".xz") {
    return fail(ErrorCode::kInvalidArgument,
                files_[file_].string() + ": packed otherwise than by gzip",
                "unpack it first (zstd -d, xz -d)");
  }
  PLIMSOLL_TRY(bytes_, CanBytes::open(files_[file_], packed_));
  begin_ = end_ = 0;
  return true;
}

Result<std::int64_t> ChatLines::read(std::span<char> out) {
  if (between_) {
    between_();
  }
  return bytes_->read(std::as_writable_bytes(out));
}

Result<bool> ChatLines::fill() {
  if (begin_ > 0) {
    std::memmove(text_.data(), text_.data() + begin_, end_ - begin_);
    end_ -= std::exchange(begin_, 0);
  }
  if (end_ == text_.size()) {  // The line is longer than what there is room for.
    const std::size_t size = text_.size();
    const std::size_t larger = size < kDoubledBytes ? 2 * size : size + size / 4;
    const auto leased = [](std::size_t bytes) {
      return static_cast<std::int64_t>(bytes) + kUnpackBytes;
    };
    PLIMSOLL_TRY_VOID(line_lease_.grow(leased(size + larger)));  // Both, while it is copied.
    std::vector<char> grown(larger);
    std::memcpy(grown.data(), text_.data(), end_);
    text_ = std::move(grown);
    line_lease_.shrink(leased(larger));
  }
  auto got = read(std::span(text_).subspan(end_));
  if (!got) {
    Error error = got.error();
    return fail(error.code, fmt::format("{}:{}: {}", files_[file_].string(), place_.line + 1,
                                        error.detail ? *error.detail : std::string()));
  }
  end_ += static_cast<std::size_t>(*got);
  return *got > 0;
}

Result<std::optional<std::string_view>> ChatLines::next() {
  for (;;) {
    PLIMSOLL_TRY(const bool more, open_file());
    if (!more) {
      return std::optional<std::string_view>();
    }
    too_long_ = false;
    std::int64_t dropped = 0;  // Bytes of a line that is too long.
    std::size_t searched = 0;
    for (;;) {
      const char* const from = text_.data() + begin_;
      const auto* const found =
          static_cast<const char*>(std::memchr(from + searched, '\n', end_ - begin_ - searched));
      bool last = false;
      if (found == nullptr) {
        searched = end_ - begin_;
        if (static_cast<std::int64_t>(searched) > line_bytes_max_) {
          too_long_ = true;
          dropped += static_cast<std::int64_t>(std::exchange(searched, 0));
          begin_ = end_ = 0;
        }
        PLIMSOLL_TRY(const bool some, fill());
        if (some) {
          continue;
        }
        last = true;
        if (begin_ == end_ && dropped == 0) {
          break;  // The end of the file.
        }
      }
      const char* const begin = text_.data() + begin_;
      const std::size_t size = last ? end_ - begin_ : static_cast<std::size_t>(found - begin);
      std::string_view line(begin, size);
      const std::size_t taken = size + (last ? 0 : 1);
      begin_ += taken;
      if (place_.at == 0 && line.starts_with(kUtf8Mark)) {
        line.remove_prefix(kUtf8Mark.size());
      }
      place_.at += dropped + static_cast<std::int64_t>(taken);
      ++place_.line;
      too_long_ = too_long_ || static_cast<std::int64_t>(size) > line_bytes_max_;
      return std::optional(too_long_ ? std::string_view() : line);
    }
    bytes_.reset();
    place_ = {.file = place_.file + 1};
  }
}

Result<void> ChatLines::go_to(const ChatPlace& place) {
  if (place.file < 0 || place.line < 0 || place.at < 0 ||
      place.file > static_cast<std::int64_t>(files_.size())) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("there is no file {} of {}", place.file, files_.size()));
  }
  bytes_.reset();
  place_ = {.file = place.file};
  PLIMSOLL_TRY(const bool more, open_file());
  std::int64_t left = place.at;
  if (more) {
    left -= bytes_->skip(left);
    while (left > 0) {
      const auto size = std::min(left, static_cast<std::int64_t>(text_.size()));
      PLIMSOLL_TRY(const std::int64_t got,
                   read(std::span(text_).first(static_cast<std::size_t>(size))));
      if (got == 0) {
        break;
      }
      left -= got;
    }
  }
  if (left > 0) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: shorter than when its import began", files_[file_].string()),
                "import it anew: rebuild=True (--rebuild)");
  }
  place_ = place;
  return {};
}

}  // namespace plimsoll
