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
  lines.files_ = std::move(files);
  lines.numbered_.resize(lines.files_.size(), false);
  lines.rows_.resize(lines.files_.size(), false);
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
  const std::string row = rows_[which] && feed_.name ? feed_.name(file, line) : std::string();
  return !row.empty()       ? fmt::format("{}: {}", name, row)
         : numbered_[which] ? fmt::format("{}[{}]", name, line - 1)
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
  return bytes_before_ + (bytes_ ? bytes_->position() : open_ ? feed_.done() : 0);
}

Result<std::int64_t> ChatLines::read_bytes(std::span<std::byte> out) {
  if (between_) {
    between_();
  }
  if (fed_ != ChatFeed::Kind::kNone) {
    return feed_.read(out);
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
  fed_ = feed_ ? feed_.begin(place_.file) : ChatFeed::Kind::kNone;
  if (fed_ == ChatFeed::Kind::kNone) {
    PLIMSOLL_TRY_VOID(open_bytes(files_[which]));
  }
  begin_ = end_ = 0;
  sum_ = {};
  open_ = true;
  array_ = objects_ = false;
  rows_[which] = fed_ == ChatFeed::Kind::kRows;
  if (!rows_[which]) {
    PLIMSOLL_TRY_VOID(find_elements());
  }
  numbered_[which] = rows_[which] || array_ || objects_;
  return true;
}

Result<void> ChatLines::open_bytes(const std::filesystem::path& file) {
  PLIMSOLL_TRY(bytes_, CanBytes::open(file, packed_, true));
  const std::int64_t needed = bytes_->unpack_bytes();
  if (needed > unpack_lease_.bytes()) {
    PLIMSOLL_TRY_VOID(unpack_lease_.grow(needed));
  }
  PLIMSOLL_TRY(const FileSort sort, bytes_->sort());
  return sort.kind == FileKind::kText || sort.kind == FileKind::kEmpty
             ? Result<void>()
             : not_text(file.string(), sort);
}

// Whether the file is an array, or objects that go over several lines: a name in the line behind
// the one in which the first object begins.
Result<void> ChatLines::find_elements() {
  const auto content = [&](std::size_t from) {
    const auto* const found =
        std::find_if_not(text_.data() + from, text_.data() + end_, is_json_white);
    return static_cast<std::size_t>(found - text_.data());
  };
  std::size_t first = 0;
  do {
    PLIMSOLL_TRY(const bool more, fill());
    first = before_content({text_.data(), end_});
    if (!more) {
      break;
    }
  } while (first == end_ && end_ < text_.size());
  array_ = first < end_ && text_[first] == '[';
  if (first == end_ || text_[first] != '{') {
    return {};
  }
  const std::size_t behind = content(first + 1);
  const auto* const line_end = std::find(text_.data() + first, text_.data() + behind, '\n');
  if (behind < end_ && text_[behind] == '"' && line_end != text_.data() + behind) {
    objects_ = true;
  }
  return {};
}

void ChatLines::end_file() {
  bytes_before_ += bytes_ ? bytes_->file_bytes() : feed_.done();
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

// Of the element under way, from text_[from] on: the , or ] behind it, or end_. Of an object over
// several lines: what is behind its end.
std::size_t ChatLines::find_end(std::size_t from) {
  if (ended_) {
    return from;
  }
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
    } else if (array_ && (c == ',' || c == ']') && depth_ == 0) {
      return i;
    } else if (c == '}' || c == ']') {
      depth_ = std::max(0, depth_ - 1);  // One too many: the element is no JSON.
      ended_ = objects_ && depth_ == 0;
      if (ended_) {
        return i + 1;
      }
    }
  }
  return end_;
}

// Goes to the first character of the next element; false at the end of the array and file.
Result<bool> ChatLines::begin_element() {
  depth_ = 0;
  quoted_ = escaped_ = ended_ = false;
  bool ended = false;
  if (place_.at == 0) {
    take(before_content({text_.data() + begin_, end_ - begin_}) + (array_ ? 1 : 0));  // And the [.
  }
  for (;;) {
    const char* const from = text_.data() + begin_;
    const char* const end = text_.data() + end_;
    const char* const found = std::find_if_not(from, end, is_json_white);
    take(static_cast<std::size_t>(found - from));
    if (begin_ < end_) {
      if (objects_) {
        return true;
      }
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
      return ended || objects_ ? Result<bool>(false) : corrupt("it ends within its array");
    }
  }
}

// The next line or element of the open file, taken from text_ with its end.
Result<std::string_view> ChatLines::find_line(bool& found) {
  const bool elements = array_ || objects_;
  if (elements) {
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
    if (elements) {
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
      if (elements && !ended_) {
        return corrupt(array_ ? "it ends within its array" : "it ends within an object");
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
  } else if (objects_) {
    ending = 0;
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
