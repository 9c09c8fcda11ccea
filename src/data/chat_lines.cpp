// SPDX-License-Identifier: Apache-2.0
#include "data/chat_lines.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/core.h>

#include "base/check.h"
#include "base/crc32c.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kPackedBufferBytes = 64 << 10;
constexpr std::size_t kLineBufferBytes = 256 << 10;
constexpr std::size_t kDoubledBytes = 8 << 20;  // Beyond, it grows by a quarter at a time.
constexpr std::string_view kUtf8Mark = "\xEF\xBB\xBF";

bool is_json_white(char c) noexcept {
  return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

// Bytes of white space and a byte order mark before what a file holds.
std::size_t before_content(std::string_view text) noexcept {
  const std::size_t mark = text.starts_with(kUtf8Mark) ? kUtf8Mark.size() : 0;
  const auto* const found = std::find_if_not(text.begin() + mark, text.end(), is_json_white);
  return static_cast<std::size_t>(found - text.begin());
}

}  // namespace

Result<ChatLines> ChatLines::open(Governor governor, std::vector<std::filesystem::path> files,
                                  std::int64_t line_bytes_max, ChatFeed feed,
                                  std::function<void()> between) {
  ChatLines lines;
  PLIMSOLL_CHECK(!feed || files.size() == 1, "a feed has one name");
  lines.files_ = std::move(files);
  lines.numbered_.resize(lines.files_.size(), static_cast<bool>(feed));
  lines.feed_ = std::move(feed);
  lines.between_ = std::move(between);
  lines.line_bytes_max_ = line_bytes_max;
  PLIMSOLL_TRY(lines.slab_, Slab::create(governor, Tag::kOther, kPackedBufferBytes));
  lines.packed_ = lines.slab_.take<std::byte>(kPackedBufferBytes);
  PLIMSOLL_TRY(lines.line_lease_,
               governor.reserve(Tag::kOther, static_cast<std::int64_t>(kLineBufferBytes)));
  PLIMSOLL_TRY(lines.unpack_lease_, governor.reserve(Tag::kOther, kUnpackBytes));
  lines.text_.resize(kLineBufferBytes);
  return lines;
}

tl::unexpected<Error> ChatLines::corrupt(const std::string& what) const {
  return fail(ErrorCode::kCorrupt,
              fmt::format("{}: {}", files_[static_cast<std::size_t>(place_.file)].string(), what),
              "get the file again");
}

std::string ChatLines::name_of(std::int64_t file, std::int64_t line, bool brief) const {
  const auto which = static_cast<std::size_t>(file);
  const std::string name = brief ? files_[which].filename().string() : files_[which].string();
  return numbered_[which] ? fmt::format("{}[{}]", name, line - 1)
                          : fmt::format("{}:{}", name, line);
}

std::vector<ChatSum> ChatLines::sums() const {
  std::vector<ChatSum> sums = sums_;
  if (place_.file < static_cast<std::int64_t>(files_.size())) {
    sums.push_back(sum_);
  }
  return sums;
}

std::int64_t ChatLines::done() const noexcept {
  return bytes_before_ + (feed_ ? place_.line : bytes_ ? bytes_->position() : 0);
}

Result<std::int64_t> ChatLines::read_bytes(std::span<std::byte> out) {
  if (between_) {
    between_();
  }
  if (feed_) {
    return feed_(out);
  }
  auto got = bytes_->read(out);
  if (!got) {
    const Error& error = got.error();
    return fail(error.code,
                fmt::format("{}: {}", name_of(place_.file, place_.line + 1, false),
                            error.detail ? *error.detail : std::string()),
                error.code == ErrorCode::kInvalidArgument ? error.advice : "get the file again");
  }
  return got;
}

// The file of place_, and its first bytes; false behind the last.
Result<bool> ChatLines::open_file() {
  if (open_) {
    return true;
  }
  if (place_.file == static_cast<std::int64_t>(files_.size())) {
    return false;
  }
  const auto which = static_cast<std::size_t>(place_.file);
  if (!feed_) {
    if (files_[which].extension() == ".xz") {
      return fail(ErrorCode::kInvalidArgument, files_[which].string() + ": packed by xz",
                  "unpack it first (xz -d)");
    }
    PLIMSOLL_TRY(bytes_, CanBytes::open(files_[which], packed_, true));
    const std::int64_t needed = bytes_->unpack_bytes();
    if (needed > unpack_lease_.bytes()) {
      PLIMSOLL_TRY_VOID(unpack_lease_.grow(needed));
    }
  }
  begin_ = end_ = 0;
  sum_ = {};
  open_ = true;
  array_ = false;
  if (!feed_) {
    std::size_t content = 0;
    do {
      PLIMSOLL_TRY(const bool more, fill());
      if (!more) {
        break;
      }
      content = before_content({text_.data(), end_});
    } while (content == end_ && end_ < text_.size());
    array_ = content < end_ && text_[content] == '[';
    numbered_[which] = array_;
  }
  return true;
}

void ChatLines::end_file() {
  bytes_before_ += feed_ ? place_.line : bytes_ ? bytes_->file_bytes() : 0;
  bytes_.reset();
  unpack_lease_.shrink(kUnpackBytes);
  sums_.push_back(sum_);
  sum_ = {};
  open_ = false;
  place_ = {.file = place_.file + 1};
}

// The line is longer than what there is room for.
Result<void> ChatLines::more_room() {
  const std::size_t size = text_.size();
  const std::size_t larger = size < kDoubledBytes ? 2 * size : size + size / 4;
  PLIMSOLL_TRY_VOID(
      line_lease_.grow(static_cast<std::int64_t>(size + larger)));  // Both, while it is copied.
  std::vector<char> grown(larger);
  std::memcpy(grown.data(), text_.data(), end_);
  text_ = std::move(grown);
  line_lease_.shrink(static_cast<std::int64_t>(larger));
  return {};
}

Result<bool> ChatLines::fill() {
  if (begin_ > 0) {
    std::memmove(text_.data(), text_.data() + begin_, end_ - begin_);
    end_ -= std::exchange(begin_, 0);
  }
  if (end_ == text_.size()) {
    PLIMSOLL_TRY_VOID(more_room());
  }
  PLIMSOLL_TRY(const std::int64_t got,
               read_bytes(std::as_writable_bytes(std::span(text_)).subspan(end_)));
  end_ += static_cast<std::size_t>(got);
  return got > 0;
}

void ChatLines::take(std::size_t bytes) noexcept {
  sum_.crc = crc32c(std::as_bytes(std::span(text_).subspan(begin_, bytes)), sum_.crc);
  sum_.bytes += static_cast<std::int64_t>(bytes);
  place_.at += static_cast<std::int64_t>(bytes);
  begin_ += bytes;
}

// Of the element under way, from text_[from] on: the , or ] behind it, or end_.
std::size_t ChatLines::find_end(std::size_t from) {
  for (std::size_t i = from; i < end_; ++i) {
    const char c = text_[i];
    if (quoted_) {
      if (escaped_) {
        escaped_ = false;
      } else if (c == '\\') {
        escaped_ = true;
      } else if (c == '"') {
        quoted_ = false;
      }
    } else if (c == '"') {
      quoted_ = true;
    } else if (c == '{' || c == '[') {
      ++depth_;
    } else if ((c == ',' || c == ']') && depth_ == 0) {
      return i;
    } else if (c == '}' || c == ']') {
      depth_ = std::max(0, depth_ - 1);  // One too many: the element is no JSON.
    }
  }
  return end_;
}

// Goes to the first character of the next element; false at the end of the array and file.
Result<bool> ChatLines::begin_element() {
  depth_ = 0;
  quoted_ = escaped_ = false;
  bool first = place_.at == 0;
  bool ended = false;
  for (;;) {
    if (first) {
      take(before_content({text_.data() + begin_, end_ - begin_}) + 1);  // And the [.
      first = false;
    }
    const char* const from = text_.data() + begin_;
    const char* const end = text_.data() + end_;
    const char* const found = std::find_if_not(from, end, is_json_white);
    take(static_cast<std::size_t>(found - from));
    if (begin_ < end_) {
      if (ended) {
        return corrupt("there is more behind the end of its array");
      }
      if (text_[begin_] != ']') {
        return true;
      }
      take(1);
      ended = true;
      continue;
    }
    PLIMSOLL_TRY(const bool more, fill());
    if (!more) {
      return ended ? Result<bool>(false) : corrupt("it ends within its array");
    }
  }
}

// The next line or element of the open file, taken from text_ with its end.
Result<std::string_view> ChatLines::find_line(bool& found) {
  if (array_) {
    PLIMSOLL_TRY(found, begin_element());
    if (!found) {
      return std::string_view();
    }
  }
  bool dropped = false;      // A part of a line that is too long.
  std::size_t searched = 0;  // Behind begin_.
  std::size_t size = 0;
  std::size_t ending = 1;
  for (;;) {
    std::size_t at = end_;
    if (array_) {
      at = find_end(begin_ + searched);
    } else if (const void* const line_end =
                   std::memchr(text_.data() + begin_ + searched, '\n', end_ - begin_ - searched);
               line_end != nullptr) {
      at = static_cast<std::size_t>(static_cast<const char*>(line_end) - text_.data());
    }
    size = at - begin_;
    if (at < end_) {
      break;
    }
    searched = size;
    if (static_cast<std::int64_t>(searched) > line_bytes_max_) {
      too_long_ = dropped = true;
      take(std::exchange(searched, 0));
    }
    PLIMSOLL_TRY(const bool more, fill());
    if (!more) {
      if (array_) {
        return corrupt("it ends within its array");
      }
      size = end_ - begin_;
      ending = 0;
      found = size > 0 || dropped;
      break;
    }
  }
  too_long_ = too_long_ || static_cast<std::int64_t>(size) > line_bytes_max_;
  std::string_view line(text_.data() + begin_, size);
  if (array_) {  // The ] is for begin_element(). Nothing between commas is no JSON.
    ending = text_[begin_ + size] == ',' ? 1 : 0;
    line = size == 0 && !dropped ? std::string_view(text_.data() + begin_, 1) : line;
  } else if (place_.at == 0 && line.starts_with(kUtf8Mark)) {
    line.remove_prefix(kUtf8Mark.size());
  }
  take(size + ending);
  return too_long_ ? std::string_view() : line;
}

Result<std::optional<std::string_view>> ChatLines::next() {
  for (;;) {
    PLIMSOLL_TRY(const bool more, open_file());
    if (!more) {
      return std::optional<std::string_view>();
    }
    too_long_ = false;
    bool found = true;
    PLIMSOLL_TRY(const std::string_view line, find_line(found));
    if (found) {
      ++place_.line;
      return std::optional(line);
    }
    end_file();
  }
}

Result<bool> ChatLines::skip(std::int64_t bytes) {
  while (bytes > 0) {
    if (begin_ == end_) {
      PLIMSOLL_TRY(const bool more, fill());
      if (!more) {
        return false;
      }
    }
    const auto part = std::min(bytes, static_cast<std::int64_t>(end_ - begin_));
    take(static_cast<std::size_t>(part));
    bytes -= part;
  }
  return true;
}

Result<void> ChatLines::skip_rest() {
  for (;;) {
    PLIMSOLL_TRY(const bool more, open_file());
    if (!more) {
      return {};
    }
    constexpr std::int64_t kAll = std::int64_t{1} << 62;
    PLIMSOLL_TRY_VOID(skip(kAll));
    end_file();
  }
}

Result<bool> ChatLines::go_to(const ChatPlace& place, const std::vector<ChatSum>& sums) {
  const auto count = static_cast<std::int64_t>(files_.size());
  if (place.file < 0 || place.line < 0 || place.at < 0 || place.file > count ||
      static_cast<std::int64_t>(sums.size()) != std::min(place.file + 1, count)) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("there is no file {} of {}", place.file, files_.size()));
  }
  bytes_.reset();
  open_ = false;
  place_ = {};
  sums_.clear();
  bytes_before_ = 0;
  for (const ChatSum& sum : sums) {
    PLIMSOLL_TRY_VOID(open_file());
    PLIMSOLL_TRY(const bool whole, skip(sum.bytes));
    if (!whole || !(sum_ == sum)) {
      return false;
    }
    if (place_.file < place.file) {
      if (begin_ == end_) {
        PLIMSOLL_TRY_VOID(fill());
      }
      if (begin_ < end_) {
        return false;  // It has become longer.
      }
      end_file();
    }
  }
  if (place.at != sum_.bytes) {
    return fail(ErrorCode::kInvalidArgument, "the place of an import is not one of ours");
  }
  place_.line = place.line;
  return true;
}

}  // namespace plimsoll
