// SPDX-License-Identifier: Apache-2.0
#include "data/token_set_format.h"

#include <algorithm>
#include <cstring>
#include <system_error>
#include <utility>

#include <fmt/core.h>

#include "base/crc32c.h"
#include "os/file.h"

namespace plimsoll {
namespace {

constexpr std::array<char, 8> kTokenMagic{'P', 'L', 'T', 'O', 'K', 'E', 'N', 'S'};
constexpr std::uint32_t kVersion = 1;

// As it lies in the file, little-endian; the rest of the header is zeros.
struct Stored {
  std::array<char, 8> magic{};
  std::uint32_t version{0};
  std::uint32_t id_bytes{0};
  std::int64_t vocabulary{0};
  std::int64_t rows{0};
  std::int64_t tokens{0};
  std::int64_t trained_tokens{0};
  std::int64_t longest_row{0};
  std::int64_t index_at{0};
  std::int64_t about_at{0};
  std::int64_t about_bytes{0};
  std::uint32_t about_crc{0};
  std::uint32_t crc{0};  // Of the whole header, itself as 0.
  std::array<char, kTokenFingerprintBytes> fingerprint{};
};
static_assert(sizeof(Stored) == 152);

bool sensible(const Stored& s, std::int64_t file_bytes) noexcept {
  constexpr std::int64_t kMost = std::int64_t{1} << 56;
  for (const std::int64_t value : {s.vocabulary, s.rows, s.tokens, s.trained_tokens, s.longest_row,
                                   s.index_at, s.about_at, s.about_bytes}) {
    if (value < 0 || value > kMost) {
      return false;
    }
  }
  return (s.id_bytes == 2 || s.id_bytes == 4) && s.vocabulary > 0 &&
         s.vocabulary <= (s.id_bytes == 2 ? 65536 : std::int64_t{1} << 31) &&
         s.trained_tokens <= s.tokens && s.longest_row <= std::min(s.tokens, kRowTokensMost) &&
         s.index_at >= kTokenHeaderBytes && s.index_at % 16 == 0 &&
         s.about_at == s.index_at + s.rows * 16 && s.about_bytes <= kTokenAboutMost &&
         s.about_at + s.about_bytes == file_bytes;
}

}  // namespace

std::uint32_t token_row_crc(std::int64_t row, const TokenIndexEntry& entry,
                            std::uint32_t crc_of_bytes) noexcept {
  const std::array<std::int64_t, 3> numbers{row, entry.offset,
                                            static_cast<std::int64_t>(entry.tokens)};
  return crc32c(std::as_bytes(std::span(numbers)), crc_of_bytes);
}

bool is_token_set(const std::filesystem::path& path) {
  std::error_code status;
  if (!std::filesystem::is_regular_file(path, status)) {
    return false;
  }
  std::array<char, 8> magic{};
  const auto file = File::open(path, FileMode::kRead);
  return file && file->read_at(0, std::as_writable_bytes(std::span(magic))) && magic == kTokenMagic;
}

TokenHeader token_header(const TokenSetPlaces& places) noexcept {
  Stored stored{.magic = kTokenMagic,
                .version = kVersion,
                .id_bytes = static_cast<std::uint32_t>(places.info.id_bytes),
                .vocabulary = places.info.vocabulary,
                .rows = places.info.rows,
                .tokens = places.info.tokens,
                .trained_tokens = places.info.trained_tokens,
                .longest_row = places.info.longest_row,
                .index_at = places.index_at,
                .about_at = places.about_at,
                .about_bytes = places.about_bytes,
                .about_crc = places.about_crc};
  std::copy_n(places.info.fingerprint.begin(),
              std::min(places.info.fingerprint.size(), stored.fingerprint.size()),
              stored.fingerprint.begin());
  TokenHeader header{};
  std::memcpy(header.data(), &stored, sizeof(stored));
  stored.crc = crc32c(header);
  std::memcpy(header.data(), &stored, sizeof(stored));
  return header;
}

Result<TokenSetPlaces> parse_token_header(std::span<const std::byte, kTokenHeaderBytes> bytes,
                                          std::int64_t file_bytes, const std::string& name) {
  Stored stored;
  std::memcpy(&stored, bytes.data(), sizeof(stored));
  if (stored.magic != kTokenMagic) {
    return fail(ErrorCode::kCorrupt, name + ": not a token set", "import the files again");
  }
  if (stored.version != kVersion) {
    return fail(ErrorCode::kCorrupt,
                fmt::format("{}: a token set of version {}; this Plimsoll reads version {}", name,
                            stored.version, kVersion),
                "import the files again");
  }
  TokenHeader whole{};
  std::copy(bytes.begin(), bytes.end(), whole.begin());
  const std::uint32_t crc = std::exchange(stored.crc, 0);
  std::memcpy(whole.data(), &stored, sizeof(stored));
  if (crc32c(whole) != crc || !sensible(stored, file_bytes)) {
    return fail(ErrorCode::kCorrupt, name + ": the header's checksum or sizes do not match",
                "import the files again");
  }
  const auto end = std::find(stored.fingerprint.begin(), stored.fingerprint.end(), '\0');
  return TokenSetPlaces{.info = {.rows = stored.rows,
                                 .tokens = stored.tokens,
                                 .trained_tokens = stored.trained_tokens,
                                 .longest_row = stored.longest_row,
                                 .vocabulary = stored.vocabulary,
                                 .id_bytes = static_cast<int>(stored.id_bytes),
                                 .fingerprint = std::string(stored.fingerprint.begin(), end),
                                 .disk_bytes = file_bytes},
                        .index_at = stored.index_at,
                        .about_at = stored.about_at,
                        .about_bytes = stored.about_bytes,
                        .about_crc = stored.about_crc};
}

}  // namespace plimsoll
