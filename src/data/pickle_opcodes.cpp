// SPDX-License-Identifier: Apache-2.0
//
// Source: Python's Lib/pickletools.py, which lists every opcode with its argument.
//
// Threads: see pickle_opcodes.h.   Memory: see pickle_opcodes.h.
#include "data/pickle_opcodes.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"

namespace plimsoll {
namespace {

std::string_view text_in(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Opcodes without an argument; kStop's own place says there is none.
PickleInstruction plain(unsigned char code) {
  switch (code) {
    case '(':
      return {.op = PickleOp::kMark};
    case '0':
      return {.op = PickleOp::kPop};
    case '1':
      return {.op = PickleOp::kPopMark};
    case 'N':
      return {.op = PickleOp::kNone};
    case 0x88:
      return {.op = PickleOp::kNumber, .number = 1};
    case 0x89:
      return {.op = PickleOp::kNumber, .number = 0};
    case ')':
      return {.op = PickleOp::kTuple, .number = 0};
    case 0x85:
    case 0x86:
    case 0x87:
      return {.op = PickleOp::kTuple, .number = code - 0x84};
    case 't':
      return {.op = PickleOp::kTuple, .number = -1};
    case ']':
    case 0x8F:  // A set.
      return {.op = PickleOp::kEmptyList};
    case 'a':
      return {.op = PickleOp::kAppend};
    case 'e':
    case 0x90:  // Items of a set.
      return {.op = PickleOp::kAppends};
    case '}':
      return {.op = PickleOp::kEmptyDict};
    case 's':
      return {.op = PickleOp::kSetItem};
    case 'u':
      return {.op = PickleOp::kSetItems};
    case 'R':
      return {.op = PickleOp::kReduce};
    case 0x81:
      return {.op = PickleOp::kNewObject};
    case 'b':
      return {.op = PickleOp::kBuild};
    case 'Q':
      return {.op = PickleOp::kPersistent};
    case 0x93:
      return {.op = PickleOp::kStackGlobal};
    case 0x94:
      return {.op = PickleOp::kMemoize};
    default:
      return {.op = PickleOp::kStop};
  }
}

}  // namespace

PickleBytes::PickleBytes(const File& file, std::int64_t begin, std::int64_t bytes, std::string name)
    : file_(&file),
      begin_(begin),
      bytes_(bytes),
      name_(std::move(name)),
      buffer_(static_cast<std::size_t>(kBufferBytes)) {}

tl::unexpected<Error> PickleBytes::bad(std::string_view what) const {
  return fail(ErrorCode::kCorrupt,
              fmt::format("{}: {}, at byte {} of the pickle", name_, what, position()),
              "restore the file");
}

void PickleBytes::rewind() noexcept {
  from_ = 0;
  held_ = 0;
  at_ = 0;
}

// Makes `bytes` bytes available at at_, if there are so many; says how many there are.
Result<std::size_t> PickleBytes::fill(std::size_t bytes) {
  if (bytes > held_ - at_) {
    std::copy(buffer_.begin() + static_cast<std::ptrdiff_t>(at_),
              buffer_.begin() + static_cast<std::ptrdiff_t>(held_), buffer_.begin());
    held_ -= at_;
    from_ += static_cast<std::int64_t>(std::exchange(at_, 0));
    const std::int64_t filled = from_ + static_cast<std::int64_t>(held_);
    const auto more = static_cast<std::size_t>(
        std::min(bytes_ - filled, static_cast<std::int64_t>(buffer_.size() - held_)));
    PLIMSOLL_TRY_VOID(
        file_->read_at(begin_ + filled, std::span<std::byte>(buffer_).subspan(held_, more)));
    held_ += more;
  }
  return held_ - at_;
}

Result<std::span<const std::byte>> PickleBytes::take(std::uint64_t bytes) {
  if (bytes > static_cast<std::uint64_t>(bytes_ - position())) {
    return bad("the pickle is cut short");
  }
  if (bytes > static_cast<std::uint64_t>(kTextMost)) {
    return bad(fmt::format("a text of {} bytes", bytes));
  }
  const auto count = static_cast<std::size_t>(bytes);
  PLIMSOLL_TRY_VOID(fill(count));
  return std::span<const std::byte>(buffer_).subspan(std::exchange(at_, at_ + count), count);
}

Result<std::uint64_t> PickleBytes::unsigned_of(std::uint64_t bytes) {
  PLIMSOLL_TRY(const auto raw, take(bytes));
  std::uint64_t value = 0;
  std::memcpy(&value, raw.data(), raw.size());
  return value;
}

Result<std::string_view> PickleBytes::line() {
  constexpr std::size_t kLineMost = 256;  // A module's or a class's name.
  PLIMSOLL_TRY(const std::size_t available, fill(2 * kLineMost));
  const auto text =
      text_in(std::span<const std::byte>(buffer_).subspan(at_, std::min(available, kLineMost)));
  const std::size_t end = text.find('\n');
  if (end == std::string_view::npos) {
    return bad("a name that does not end");
  }
  at_ += end + 1;
  return text.substr(0, end);
}

Result<PickleInstruction> PickleBytes::global() {
  PLIMSOLL_TRY(const std::string_view module, line());
  words_[0] = module;
  PLIMSOLL_TRY(const std::string_view name, line());
  words_[1] = name;
  return PickleInstruction{.op = PickleOp::kGlobal, .text = words_[0], .more = words_[1]};
}

Result<PickleInstruction> PickleBytes::with_text(PickleOp op, std::uint64_t length_bytes) {
  PLIMSOLL_TRY(const std::uint64_t length, unsigned_of(length_bytes));
  PLIMSOLL_TRY(const auto text, take(length));
  return PickleInstruction{.op = op, .text = text_in(text)};
}

Result<PickleInstruction> PickleBytes::with_number(PickleOp op, std::uint64_t bytes) {
  PLIMSOLL_TRY(const std::uint64_t value, unsigned_of(bytes));
  return PickleInstruction{.op = op, .number = static_cast<std::int64_t>(value)};
}

// LONG1, LONG4: little-endian two's complement of as many bytes as it takes.
Result<PickleInstruction> PickleBytes::long_number(std::uint64_t length_bytes) {
  PLIMSOLL_TRY(const std::uint64_t length, unsigned_of(length_bytes));
  if (length > 8) {
    return bad("an integer beyond 64 bits");
  }
  PLIMSOLL_TRY(const std::uint64_t bits, unsigned_of(length));
  if (length == 0) {
    return PickleInstruction{.op = PickleOp::kNumber};
  }
  const auto unused = static_cast<int>(64 - 8 * length);
  return PickleInstruction{.op = PickleOp::kNumber,
                           .number = static_cast<std::int64_t>(bits << unused) >> unused};
}

Result<PickleInstruction> PickleBytes::real() {
  PLIMSOLL_TRY(const std::uint64_t bits, unsigned_of(8));
  return PickleInstruction{.op = PickleOp::kFloat,
                           .real = std::bit_cast<double>(__builtin_bswap64(bits))};  // Big-endian.
}

Result<PickleInstruction> PickleBytes::next() {
  PLIMSOLL_TRY(const std::uint64_t byte, unsigned_of(1));
  const auto code = static_cast<unsigned char>(byte);
  switch (code) {
    case '.':
      return PickleInstruction{.op = PickleOp::kStop};
    case 0x80:  // The protocol's number.
      return with_number(PickleOp::kNothing, 1);
    case 0x95:  // A frame's length.
      return with_number(PickleOp::kNothing, 8);
    case 'J': {
      PLIMSOLL_TRY(PickleInstruction op, with_number(PickleOp::kNumber, 4));
      op.number = static_cast<std::int32_t>(static_cast<std::uint32_t>(op.number));
      return op;
    }
    case 'K':
      return with_number(PickleOp::kNumber, 1);
    case 'M':
      return with_number(PickleOp::kNumber, 2);
    case 0x8A:
      return long_number(1);
    case 0x8B:
      return long_number(4);
    case 'G':
      return real();
    case 'X':
      return with_text(PickleOp::kText, 4);
    case 0x8C:
      return with_text(PickleOp::kText, 1);
    case 0x8D:
      return with_text(PickleOp::kText, 8);
    case 'B':
      return with_text(PickleOp::kBytes, 4);
    case 'C':
      return with_text(PickleOp::kBytes, 1);
    case 0x8E:
      return with_text(PickleOp::kBytes, 8);
    case 'c':
      return global();
    case 'q':
      return with_number(PickleOp::kPut, 1);
    case 'r':
      return with_number(PickleOp::kPut, 4);
    case 'h':
      return with_number(PickleOp::kGet, 1);
    case 'j':
      return with_number(PickleOp::kGet, 4);
    default:
      break;
  }
  const PickleInstruction op = plain(code);
  if (op.op == PickleOp::kStop) {
    return bad(fmt::format("an opcode {:#04x} that torch.save does not write", code));
  }
  return op;
}

}  // namespace plimsoll
