// SPDX-License-Identifier: Apache-2.0
//
// PickleBytes: a pickle's bytes as instructions, one after another.
//
// Reading order: pickle_reader.h, this file.
//
// Threads: single-owner.   Memory: a buffer of 256 KiB; no text is longer than a quarter of it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "os/file.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// What to do; opcodes that differ in the length of their argument are one.
enum class PickleOp : std::uint8_t {
  kNothing /* protocol and frames */,
  kStop,
  kMark,
  kPop,
  kPopMark,
  kNone,
  kNumber,
  kFloat,
  kText,
  kBytes,
  kTuple,
  kEmptyList /* and sets */,
  kAppend,
  kAppends,
  kEmptyDict,
  kSetItem,
  kSetItems,
  kGlobal,
  kStackGlobal,
  kReduce,
  kNewObject,
  kBuild,
  kPersistent,
  kPut,
  kMemoize,
  kGet
};

struct PickleInstruction {
  PickleOp op{PickleOp::kNothing};
  std::int64_t number{0};  ///< A value, a place in the memo, a tuple's size (−1: since the mark).
  double real{0};
  std::string_view text{};  ///< Until the next instruction.
  std::string_view more{};  ///< kGlobal: the name, `text` being the module.
};

class PickleBytes {
 public:
  static constexpr std::int64_t kBufferBytes = 256 << 10;
  static constexpr std::int64_t kTextMost = 64 << 10;

  PickleBytes(const File& file, std::int64_t begin, std::int64_t bytes, std::string name);

  /// Errors: kCorrupt naming the opcode, or the place where it ends too soon; kIo.
  Result<PickleInstruction> next();
  /// Back to the first.
  void rewind() noexcept;
  [[nodiscard]] std::int64_t position() const noexcept {
    return from_ + static_cast<std::int64_t>(at_);
  }

 private:
  Result<std::size_t> fill(std::size_t bytes);
  Result<std::span<const std::byte>> take(std::uint64_t bytes);
  Result<std::uint64_t> unsigned_of(std::uint64_t bytes);
  Result<std::string_view> line();
  Result<PickleInstruction> global();
  Result<PickleInstruction> with_text(PickleOp op, std::uint64_t length_bytes);
  Result<PickleInstruction> with_number(PickleOp op, std::uint64_t bytes);
  Result<PickleInstruction> long_number(std::uint64_t length_bytes);
  Result<PickleInstruction> real();
  [[nodiscard]] tl::unexpected<Error> bad(std::string_view what) const;

  const File* file_;
  std::int64_t begin_;
  std::int64_t bytes_;
  std::string name_;
  std::vector<std::byte> buffer_;
  std::array<std::string, 2> words_{};  // Of the last kGlobal.
  std::int64_t from_{0};                // Of the pickle's bytes, where the buffer begins.
  std::size_t held_{0};
  std::size_t at_{0};
};

}  // namespace plimsoll
