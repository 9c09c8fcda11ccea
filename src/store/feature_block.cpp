// SPDX-License-Identifier: Apache-2.0
//
// Stored blocks: see feature_block.h.
//
// Threads, Memory: as the header says.
#include "store/feature_block.h"

#include <algorithm>
#include <cstring>

#include <fmt/core.h>

#include "base/round.h"
#include "store/feature_format.h"

#ifdef PLIMSOLL_HAVE_LZ4
#include <lz4.h>
#endif

namespace plimsoll {
namespace {

constexpr int kCodingShift = 56;
constexpr std::uint64_t kOffsetMask = (1ULL << kCodingShift) - 1;
constexpr std::size_t kSizeBytes = 4;

}  // namespace

bool lz4_available() noexcept {
#ifdef PLIMSOLL_HAVE_LZ4
  return true;
#else
  return false;
#endif
}

Result<void> require_lz4(const std::filesystem::path& directory) {
  if (lz4_available()) {
    return {};
  }
  return fail(
      ErrorCode::kInvalidArgument,
      fmt::format("{}: compression = lz4, but this build has no LZ4", directory.string()),
      "install liblz4-dev (tools/setup.sh does) and build again, or use compression = none");
}

std::uint64_t block_entry(std::int64_t offset, BlockCoding coding) noexcept {
  return static_cast<std::uint64_t>(offset) | (static_cast<std::uint64_t>(coding) << kCodingShift);
}

Result<StoredBlock> parse_block_entries(std::uint64_t entry, std::uint64_t next,
                                        std::int64_t block_bytes, std::int64_t file_bytes,
                                        std::int64_t number, const std::filesystem::path& path) {
  const std::uint64_t coding = entry >> kCodingShift;
  StoredBlock block{.offset = static_cast<std::int64_t>(entry & kOffsetMask),
                    .coding = static_cast<BlockCoding>(coding)};
  const auto end = static_cast<std::int64_t>(next & kOffsetMask);
  block.bytes = end - block.offset;
  const std::int64_t pages =
      divide_up(block.offset + std::max<std::int64_t>(block.bytes, 0), kFeaturePage) -
      block.offset / kFeaturePage;
  const bool plain = coding == 0 && block.bytes == block_bytes && block.offset % kFeaturePage == 0;
  const bool packed = coding == 1 && block.bytes > static_cast<std::int64_t>(kSizeBytes) &&
                      pages * kFeaturePage <= stored_bytes_max(block_bytes);
  if (end > file_bytes || (!plain && !packed)) {
    return damaged_block(path, number, "cannot stand where it says");
  }
  return block;
}

tl::unexpected<Error> damaged_block(const std::filesystem::path& path, std::int64_t number,
                                    const char* what) {
  return fail(ErrorCode::kCorrupt, fmt::format("{}: block {} {}", path.string(), number, what));
}

#ifdef PLIMSOLL_HAVE_LZ4

std::int64_t encoder_state_bytes() noexcept {
  return LZ4_sizeofState();
}

std::int64_t encode_block(std::span<const std::byte> block, std::span<std::byte> out,
                          std::span<std::byte> state) noexcept {
  constexpr int kAcceleration = 1;
  const std::size_t room = block.size() - block.size() / 8 - kSizeBytes;
  const int size = LZ4_compress_fast_extState(
      state.data(), reinterpret_cast<const char*>(block.data()),
      reinterpret_cast<char*>(out.data()) + kSizeBytes, static_cast<int>(block.size()),
      static_cast<int>(room), kAcceleration);
  if (size <= 0) {
    return 0;
  }
  const auto narrow = static_cast<std::uint32_t>(size);
  std::memcpy(out.data(), &narrow, kSizeBytes);
  return static_cast<std::int64_t>(kSizeBytes) + size;
}

bool decode_block(std::span<const std::byte> stored, std::span<std::byte> out) noexcept {
  std::uint32_t size = 0;
  if (stored.size() <= kSizeBytes || out.size() > static_cast<std::size_t>(LZ4_MAX_INPUT_SIZE)) {
    return false;
  }
  std::memcpy(&size, stored.data(), kSizeBytes);
  const auto packed = stored.subspan(kSizeBytes);
  if (size == 0 || size > packed.size()) {
    return false;
  }
  const auto rest = packed.subspan(size);
  return std::all_of(rest.begin(), rest.end(), [](std::byte b) { return b == std::byte{0}; }) &&
         LZ4_decompress_safe(reinterpret_cast<const char*>(packed.data()),
                             reinterpret_cast<char*>(out.data()), static_cast<int>(size),
                             static_cast<int>(out.size())) == static_cast<int>(out.size());
}

#else  // Callers ask require_lz4() first.

std::int64_t encoder_state_bytes() noexcept {
  return 0;
}

std::int64_t encode_block(std::span<const std::byte>, std::span<std::byte>,
                          std::span<std::byte>) noexcept {
  return 0;
}

bool decode_block(std::span<const std::byte>, std::span<std::byte>) noexcept {
  return false;
}

#endif

}  // namespace plimsoll
