// SPDX-License-Identifier: Apache-2.0
#include "data/file_kind.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string_view>

#include <fmt/core.h>

#include "base/check.h"
#include "base/crc32c.h"
#include "os/file.h"

namespace plimsoll {
namespace {

using namespace std::string_view_literals;

constexpr const char* kConvert = "write its rows as JSON lines, or as CSV for import can";
constexpr const char* kUnpack = "unpack it first";
constexpr const char* kWrongFile = "name a file of rows";

struct Magic {
  std::size_t at;
  std::string_view bytes;
  FileSort sort;
};
constexpr std::array kMagics{
    Magic{0, "\x1F\x8B"sv, {FileKind::kGzip, "packed by gzip", "unpack it first (gzip -d)"}},
    Magic{
        0, "\x28\xB5\x2F\xFD"sv, {FileKind::kZstd, "packed by zstd", "unpack it first (zstd -d)"}},
    Magic{0, "BZh"sv, {FileKind::kBzip2, "packed by bzip2", "unpack it first (bzip2 -d)"}},
    Magic{0, "\xFD\x37zXZ"sv, {FileKind::kXz, "packed by xz", "unpack it first (xz -d)"}},
    Magic{257, "ustar"sv, {FileKind::kTar, "a tar archive", "unpack it first (tar -xf)"}},
    Magic{0, "PAR1"sv, {FileKind::kParquet, "a Parquet file", kConvert}},
    Magic{0, "ARROW1\0"sv, {FileKind::kArrowFile, "an Arrow file", kConvert}},
    Magic{0,
          "\xFF\xFE\0\0"sv,
          {FileKind::kUtf32, "text in UTF-32", "convert it (iconv -f UTF-32 -t UTF-8)"}},
    Magic{0,
          "\0\0\xFE\xFF"sv,
          {FileKind::kUtf32, "text in UTF-32", "convert it (iconv -f UTF-32 -t UTF-8)"}},
    Magic{0,
          "\xFF\xFE"sv,
          {FileKind::kUtf16, "text in UTF-16", "convert it (iconv -f UTF-16 -t UTF-8)"}},
    Magic{0,
          "\xFE\xFF"sv,
          {FileKind::kUtf16, "text in UTF-16", "convert it (iconv -f UTF-16 -t UTF-8)"}},
    Magic{0, "PK\5\6"sv, {FileKind::kOther, "an empty zip archive", kWrongFile}},
    Magic{0, "7z\xBC\xAF\x27\x1C"sv, {FileKind::kOther, "a 7z archive", kUnpack}},
    Magic{0, "Rar!\x1A\x07"sv, {FileKind::kOther, "a rar archive", kUnpack}},
    Magic{0, "\x04\x22\x4D\x18"sv, {FileKind::kOther, "packed by lz4", "unpack it first (lz4 -d)"}},
    Magic{0, "LZIP"sv, {FileKind::kOther, "packed by lzip", "unpack it first (lzip -d)"}},
    Magic{0, "\x1F\x9D"sv, {FileKind::kOther, "packed by compress", "unpack it first (gzip -d)"}},
    Magic{0, "\xFF\x06\0\0sNaPpY"sv, {FileKind::kOther, "packed by snappy", kUnpack}},
    Magic{0, "FEA1"sv, {FileKind::kOther, "a Feather file of version 1", kConvert}},
    Magic{0, "Obj\1"sv, {FileKind::kOther, "an Avro file", kConvert}},
    Magic{0, "SQLite format 3\0"sv, {FileKind::kOther, "an SQLite database", kConvert}},
    Magic{0, "\x89HDF\r\n\x1A\n"sv, {FileKind::kOther, "an HDF5 file", kConvert}},
    Magic{0,
          "\x93NUMPY"sv,
          {FileKind::kNpy, "a NumPy array",
           "import cosir takes arrays; rows of text are JSON lines"}},
    Magic{0, "\x80\2"sv, {FileKind::kOther, "a Python pickle", kConvert}},
    Magic{0, "\x80\3"sv, {FileKind::kOther, "a Python pickle", kConvert}},
    Magic{0, "\x80\4"sv, {FileKind::kOther, "a Python pickle", kConvert}},
    Magic{0, "\x80\5"sv, {FileKind::kOther, "a Python pickle", kConvert}},
    Magic{
        0, "%PDF-"sv, {FileKind::kOther, "a PDF document", "write its text as rows of JSON lines"}},
    Magic{0,
          "\xD0\xCF\x11\xE0\xA1\xB1\x1A\xE1"sv,
          {FileKind::kOther, "a document of Microsoft Office", kConvert}},
    Magic{0,
          "\x89PNG\r\n\x1A\n"sv,
          {FileKind::kOther, "a PNG image", "name a file of rows, which name their images"}},
    Magic{0,
          "\xFF\xD8\xFF"sv,
          {FileKind::kOther, "a JPEG image", "name a file of rows, which name their images"}},
    Magic{0,
          "GIF8"sv,
          {FileKind::kOther, "a GIF image", "name a file of rows, which name their images"}},
    Magic{8,
          "WEBPVP8"sv,
          {FileKind::kOther, "a WebP image", "name a file of rows, which name their images"}},
    Magic{0,
          "\x7F"
          "ELF"sv,
          {FileKind::kOther, "a program", kWrongFile}},
    Magic{0,
          "MDF     "sv,
          {FileKind::kOther, "a measurement file of ASAM's (MDF)",
           "convert it to a log of candump's (python -m can.logconvert FILE FILE.log)"}},
    Magic{0,
          "version https://git-lfs.github.com/spec/"sv,
          {FileKind::kOther, "a pointer of Git LFS, in place of the file",
           "get the file (git lfs pull)"}},
    Magic{0,
          "<!DOCTYPE"sv,
          {FileKind::kOther, "a web page, in place of the file", "download it again"}},
    Magic{0,
          "<!doctype"sv,
          {FileKind::kOther, "a web page, in place of the file", "download it again"}},
    Magic{
        0, "<html"sv, {FileKind::kOther, "a web page, in place of the file", "download it again"}},
    Magic{0, "<?xml"sv, {FileKind::kOther, "an XML document", kConvert}},
};

std::uint64_t little_endian(std::string_view bytes) noexcept {
  std::uint64_t value = 0;
  for (std::size_t i = bytes.size(); i-- > 0;) {
    value = value << 8 | static_cast<unsigned char>(bytes[i]);
  }
  return value;
}

// A header without a magic, as tar of 1979 wrote it: its checksum is that of its bytes.
bool is_old_tar(std::string_view head) noexcept {
  constexpr std::size_t kBlock = 512;
  constexpr std::size_t kSumAt = 148;
  constexpr std::size_t kSumBytes = 8;
  if (head.size() < kBlock || head[0] == '\0') {
    return false;
  }
  std::uint32_t sum = 0;
  std::uint32_t said = 0;
  bool digits = false;
  for (std::size_t i = 0; i < kBlock; ++i) {
    const bool within = i >= kSumAt && i < kSumAt + kSumBytes;
    sum += within ? static_cast<unsigned char>(' ') : static_cast<unsigned char>(head[i]);
    if (within && head[i] >= '0' && head[i] <= '7') {
      said = said * 8 + static_cast<std::uint32_t>(head[i] - '0');
      digits = true;
    } else if (within && head[i] != ' ' && head[i] != '\0') {
      return false;
    }
  }
  return digits && sum == said;
}

// Its metadata follow a length, behind a mark that the earliest versions had not.
bool is_arrow_stream(std::string_view head) noexcept {
  constexpr std::uint64_t kMetadataMost = 1 << 28;
  if (head.size() < 16 || !head.starts_with("\xFF\xFF\xFF\xFF"sv)) {
    return false;
  }
  const std::uint64_t size = little_endian(head.substr(4, 4));
  return size % 8 == 0 && size > 0 && size < kMetadataMost &&
         little_endian(head.substr(8, 4)) < size;
}

std::optional<FileSort> sort_by_length(std::string_view head) {
  constexpr std::uint64_t kHeaderMost = 100 << 20;
  if (head.size() < 12) {
    return std::nullopt;
  }
  const std::uint64_t size = little_endian(head.substr(0, 8));
  if (size > 1 && size < kHeaderMost && head[8] == '{') {
    return FileSort{FileKind::kSafetensors, "a safetensors file",
                    "import cosir takes tensors; rows of text are JSON lines"};
  }
  const std::uint32_t crc = crc32c(std::as_bytes(std::span(head.substr(0, 8))));
  constexpr std::uint32_t kMask = 0xA282EAD8;  // Of TFRecord's checksums.
  if (size > 0 && (crc >> 15 | crc << 17) + kMask == little_endian(head.substr(8, 4))) {
    return FileSort{FileKind::kOther, "a TFRecord file", kConvert};
  }
  return std::nullopt;
}

FileSort sort_of_zip(std::string_view head) noexcept {
  constexpr std::size_t kNameAt = 30;
  const std::string_view name =
      head.size() < kNameAt ? ""sv : head.substr(kNameAt, little_endian(head.substr(26, 2)));
  if (name.ends_with(".npy")) {
    return {FileKind::kOther, "NumPy arrays (npz)",
            "import cosir takes single arrays; rows of text are JSON lines"};
  }
  if (name.find("data.pkl") != std::string_view::npos) {
    return {FileKind::kOther, "an archive of torch.save()", kConvert};
  }
  if (name == "[Content_Types].xml" || name.starts_with("_rels/") || name.starts_with("xl/")) {
    return {FileKind::kOther, "a document of Microsoft Office", kConvert};
  }
  return {FileKind::kOther, "a zip archive", "unpack it first (unzip)"};
}

// Text of two or four bytes a character, without a mark.
std::optional<FileSort> sort_by_zeros(std::string_view head) noexcept {
  if (head.size() < 4) {
    return std::nullopt;
  }
  const auto ascii = [&](std::size_t i) { return head[i] > '\0' && head[i] < '\x7F'; };
  const bool low = ascii(0) && head[1] == 0;
  const bool high = head[0] == 0 && ascii(1);
  if ((low && ascii(2) && head[3] == 0) || (high && head[2] == 0 && ascii(3))) {
    return FileSort{FileKind::kOther, "text in UTF-16 without a byte order mark",
                    "convert it (iconv -f UTF-16LE -t UTF-8)"};
  }
  if (low && head[2] == 0 && head[3] == 0) {
    return FileSort{FileKind::kOther, "text in UTF-32 without a byte order mark",
                    "convert it (iconv -f UTF-32LE -t UTF-8)"};
  }
  return std::nullopt;
}

}  // namespace

FileSort file_sort(std::span<const std::byte> bytes) {
  const std::string_view head(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (head.empty()) {
    return {FileKind::kEmpty, "an empty file", "leave it out, or get it again"};
  }
  for (const Magic& magic : kMagics) {
    if (head.size() >= magic.at && head.substr(magic.at).starts_with(magic.bytes)) {
      return magic.sort;
    }
  }
  if (head.starts_with("PK\3\4"sv)) {
    return sort_of_zip(head);
  }
  if (head.size() > 4 && head.substr(1).starts_with("\x2A\x4D\x18"sv) &&
      (head[0] & '\xF0') == '\x50') {  // A frame that is skipped, with which pzstd begins.
    return {FileKind::kZstd, "packed by zstd", "unpack it first (zstd -d)"};
  }
  if (is_arrow_stream(head)) {
    return {FileKind::kArrowStream, "an Arrow stream", kConvert};
  }
  if (is_old_tar(head)) {
    return {FileKind::kTar, "a tar archive", "unpack it first (tar -xf)"};
  }
  if (head.starts_with("ORC"sv) && head.size() > 3 && (head[3] < ' ' || head[3] == '\x7F')) {
    return {FileKind::kOther, "an ORC file", kConvert};
  }
  if (head.starts_with("LOGG"sv) && head.size() > 7 && head[7] == '\0') {
    return {FileKind::kOther, "a log of Vector's (BLF)",
            "convert it to a log of candump's (python -m can.logconvert FILE FILE.log)"};
  }
  if (const auto sort = sort_by_length(head)) {
    return *sort;
  }
  return sort_by_zeros(head).value_or(FileSort{});
}

Result<FileSort> file_sort_of(const std::filesystem::path& path) {
  std::array<std::byte, kFileHead> first{};
  PLIMSOLL_TRY(const File file, File::open(path, FileMode::kRead));
  PLIMSOLL_TRY(const std::int64_t size, file.size());
  const auto head = std::span(first).first(
      static_cast<std::size_t>(std::clamp<std::int64_t>(size, 0, kFileHead)));
  PLIMSOLL_TRY_VOID(file.read_at(0, head));
  return file_sort(head);
}

tl::unexpected<Error> not_text(const std::string& file, const FileSort& sort) {
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("{}: {}, where rows of text are read", file, sort.name), sort.advice);
}

}  // namespace plimsoll
