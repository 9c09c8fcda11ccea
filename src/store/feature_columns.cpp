// SPDX-License-Identifier: Apache-2.0
//
// Element types, columns and compressions of a FeatureStore: sizes, names, and the search for NaN
// and infinity.
//
// Reading order: include/plimsoll/feature_store.h, this file.
//
// Threads: pure functions.   Memory: none.
#include <algorithm>
#include <array>
#include <cstring>

#include <fmt/core.h>

#include "plimsoll/feature_store.h"

namespace plimsoll {
namespace {

struct DTypeRow {
  DType dtype;
  std::int64_t bytes;
  const char* name;
  const char* descriptor;  // NumPy's array interface; bfloat16 has none there.
};

constexpr std::array<DTypeRow, 7> kDTypes{{
    {DType::kFloat32, 4, "float32", "<f4"},
    {DType::kFloat16, 2, "float16", "<f2"},
    {DType::kBFloat16, 2, "bfloat16", "bf16"},
    {DType::kFloat64, 8, "float64", "<f8"},
    {DType::kInt64, 8, "int64", "<i8"},
    {DType::kInt32, 4, "int32", "<i4"},
    {DType::kUint8, 1, "uint8", "|u1"},
}};

// Finds the first word whose exponent bits are all ones. Blocks are summed without a branch, so
// that the compiler can use vectors; only a block with a hit is searched.
template <class Word>
std::int64_t first_with_exponent(std::span<const std::byte> bytes, Word exponent) noexcept {
  constexpr std::int64_t kBlock = 512;
  const auto count = static_cast<std::int64_t>(bytes.size() / sizeof(Word));
  std::array<Word, kBlock> words;
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const std::int64_t size = std::min(kBlock, count - begin);
    std::memcpy(words.data(), bytes.data() + begin * static_cast<std::int64_t>(sizeof(Word)),
                static_cast<std::size_t>(size) * sizeof(Word));
    Word hits = 0;
    for (std::int64_t i = 0; i < size; ++i) {
      const Word word = words[static_cast<std::size_t>(i)];
      hits = static_cast<Word>(hits | ((word & exponent) == exponent ? 1 : 0));
    }
    for (std::int64_t i = 0; hits != 0 && i < size; ++i) {
      if ((words[static_cast<std::size_t>(i)] & exponent) == exponent) {
        return begin + i;
      }
    }
  }
  return -1;
}

}  // namespace

std::int64_t dtype_bytes(DType dtype) noexcept {
  for (const DTypeRow& row : kDTypes) {
    if (row.dtype == dtype) {
      return row.bytes;
    }
  }
  return 0;
}

const char* dtype_name(DType dtype) noexcept {
  for (const DTypeRow& row : kDTypes) {
    if (row.dtype == dtype) {
      return row.name;
    }
  }
  return "unknown";
}

Result<DType> parse_dtype(const std::string& text) {
  for (const DTypeRow& row : kDTypes) {
    if (text == row.name || text == row.descriptor) {
      return row.dtype;
    }
  }
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("\"{}\" is not an element type; known are float32, float16, bfloat16, "
                          "float64, int64, int32 and uint8 (little-endian)",
                          text.substr(0, 40)));
}

const char* compression_name(BlockCompression compression) noexcept {
  return compression == BlockCompression::kLz4 ? "lz4" : "none";
}

Result<BlockCompression> parse_compression(const std::string& text) {
  for (const BlockCompression known : {BlockCompression::kNone, BlockCompression::kLz4}) {
    if (text == compression_name(known)) {
      return known;
    }
  }
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("compression = \"{}\" is neither none nor lz4", text.substr(0, 40)));
}

std::int64_t first_non_finite(std::span<const std::byte> bytes, DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32:
      return first_with_exponent<std::uint32_t>(bytes, 0x7F800000U);
    case DType::kFloat16:
      return first_with_exponent<std::uint16_t>(bytes, 0x7C00U);
    case DType::kBFloat16:
      return first_with_exponent<std::uint16_t>(bytes, 0x7F80U);
    case DType::kFloat64:
      return first_with_exponent<std::uint64_t>(bytes, 0x7FF0000000000000ULL);
    case DType::kInt64:
    case DType::kInt32:
    case DType::kUint8:
      break;
  }
  return -1;
}

std::int64_t ColumnSpec::bytes() const noexcept {
  std::int64_t count = dtype_bytes(dtype);
  for (const std::int64_t extent : shape) {
    if (__builtin_mul_overflow(count, extent, &count)) {
      return -1;
    }
  }
  return count;
}

std::int64_t ColumnSpec::bytes_max() const noexcept {
  std::int64_t most = bytes();
  return most < 0 || (ragged() && __builtin_mul_overflow(most, length_max, &most)) ? -1 : most;
}

}  // namespace plimsoll
