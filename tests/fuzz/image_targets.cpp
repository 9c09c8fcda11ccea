// SPDX-License-Identifier: Apache-2.0
//
// Targets for encoded images, for the file of an image set, and for resizing.
#include <cstring>
#include <filesystem>

#include <fmt/format.h>

#include "base/crc32c.h"
#include "data/image_set_format.h"
#include "plimsoll/image.h"
#include "plimsoll/image_set.h"
#include "tests/fuzz/target.h"
#include "tests/support/array_files.h"
#include "tests/support/feature_set.h"
#include "tests/support/png.h"

namespace plimsoll::fuzz {
namespace {

namespace fs = std::filesystem;
constexpr std::int64_t kPixelsMost = 1 << 14;
constexpr std::int64_t kRows = 6;

// Small images of each kind, made by Pillow, in base64.
constexpr std::array kImages{
    // Baseline, halved colors, turned by EXIF.
    "/9j/4AAQSkZJRgABAQAAAQABAAD/4QAiRXhpZgAATU0AKgAAAAgAAQESAAMAAAABAAYAAAAAAAD/2wBDABQODxIP"
    "DRQSEBIXFRQYHjIhHhwcHj0sLiQySUBMS0dARkVQWnNiUFVtVkVGZIhlbXd7gYKBTmCNl4x9lnN+gXz/2wBDARUX"
    "Fx4aHjshITt8U0ZTfHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHz/wAAR"
    "CAAJABEDASIAAhEBAxEB/8QAFwAAAwEAAAAAAAAAAAAAAAAAAAMEBf/EAB8QAAEDAwUAAAAAAAAAAAAAAAABAgQD"
    "ETISIiRTYf/EABUBAQEAAAAAAAAAAAAAAAAAAAME/8QAHREAAQQDAQEAAAAAAAAAAAAAAQACAxMEEVIhIv/aAAwD"
    "AQACEQMRAD8Ac+jFRNz1JKrX34iak9CRgOgYKHjxiq53pVX3HkCMPOlHaf1oBsAJeOQrtO6K/9k=",
    // Progressive.
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABQODxIPDRQSEBIXFRQYHjIhHhwcHj0sLiQySUBMS0dARkVQWnNiUFVt"
    "VkVGZIhlbXd7gYKBTmCNl4x9lnN+gXz/2wBDARUXFx4aHjshITt8U0ZTfHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8"
    "fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHz/wgARCAAMAAoDASIAAhEBAxEB/8QAFgABAQEAAAAAAAAAAAAAAAAA"
    "AwEE/8QAFQEBAQAAAAAAAAAAAAAAAAAAAQP/2gAMAwEAAhADEAAAAbmZy/8A/8QAGRAAAgMBAAAAAAAAAAAAAAAA"
    "AAECERJC/9oACAEBAAEFApRpbZ1SP//EABkRAAEFAAAAAAAAAAAAAAAAAAABAhESIf/aAAgBAwEBPwFltST/xAAY"
    "EQADAQEAAAAAAAAAAAAAAAABAhEAQf/aAAgBAgEBPwFIop7v/8QAFxAAAwEAAAAAAAAAAAAAAAAAABARMf/aAAgB"
    "AQAGPwKmP//EABgQAQEAAwAAAAAAAAAAAAAAAAEAECFh/9oACAEBAAE/IR2MRVBcL//aAAwDAQACAAMAAAAQ5//E"
    "ABcRAQADAAAAAAAAAAAAAAAAAAEAETH/2gAIAQMBAT8Qd0wz/8QAFxEAAwEAAAAAAAAAAAAAAAAAAAERIf/aAAgB"
    "AgEBPxCCmvR//8QAGRABAQADAQAAAAAAAAAAAAAAAQARQWGR/9oACAEBAAE/EEQCmro8lM5HVyX/2Q==",
    // CMYK, with restarts.
    "/9j/7gAOQWRvYmUAZAAAAAAA/9sAQwAUDg8SDw0UEhASFxUUGB4yIR4cHB49LC4kMklATEtHQEZFUFpzYlBVbVZF"
    "RmSIZW13e4GCgU5gjZeMfZZzfoF8/8AAFAgAFAAJBEMRAE0RAFkRAEsRAP/EABgAAAMBAQAAAAAAAAAAAAAAAAIE"
    "BgUD/8QAJRAAAQQABQMFAAAAAAAAAAAAAQACAwQFERIhURQVYQYlJlJi/90ABAAB/9oADgRDAE0AWQBLAAA/ANuv"
    "iEce5OySt4fJWjMrxkAsdzDZxNj2bgBWa//Qo+7V/ssHqW8oOlfwrNf/0edmvI2+ymCdThmnsbtxXMPfFGBqKV9P"
    "w5wGd2+kqzX/0i7HY5Kne3SeU/1DOArNf//Tetj5lVH4SkJJORQ4CPY5T5Vmv//Us1z0jhBmVZr/2Q==",
    // Grey.
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABQODxIPDRQSEBIXFRQYHjIhHhwcHj0sLiQySUBMS0dARkVQWnNiUFVt"
    "VkVGZIhlbXd7gYKBTmCNl4x9lnN+gXz/wAALCAAIAAgBAREA/8QAFAABAAAAAAAAAAAAAAAAAAAAAP/EABwQAAED"
    "BQAAAAAAAAAAAAAAAAIAAQQRIjEzYf/aAAgBAQAAPwBIEHti7e4ov//Z",
    // Lossy WebP.
    "UklGRnwAAABXRUJQVlA4IHAAAAAwBACdASoUAAsAPu1iqk4ppaQiMAgBMB2JbACdMoRwGQAAY4oLAAoTb5AAyqPg"
    "MK3DHUZ9QNHf6/Ll/jlwu58oisu/Pv9HNAmba+2meQG2ev88nleROKv+wdFr3UUUqriinmMl9uKixtf6MWHUYAAA",
    // Lossy WebP with alpha.
    "UklGRvYAAABXRUJQVlA4WAoAAAAQAAAACwAACwAAQUxQSJEAAAAAwFdq1UcC+EFjcPoaYuloSx2w7mgeGHDP/G6F"
    "cpzMhhbU47lUJC+fmGgrLM9S8IG5EPoq/eNHGS+enVXg3xUdDWzj5o15Y2NFysiKMrGGTKe4jUFNeKPvjoHUmEEA"
    "emklFSzJvjjjv23TEr+sVxBWqkyJ+vDHnDprfKY/N25eF6EX81fu7+Co9l0uLd0PVdytAFZQOCA+AAAAEAIAnQEq"
    "DAAMAAVAfCWwAnR/ABfFI3Q8AADxxB8lDeIZQfBzHoF32I8JKxaN3itXb2bDSvPAXuErYX3JQAA=",
    // Lossless WebP.
    "UklGRlQBAABXRUJQVlA4WAoAAAAIAAAACAAABgAAVlA4TBMBAAAvCIABAPfh1LZtpcLdXRvRE5lK4v+HN3ju/g6/"
    "wTaybSW4u0PEEBJDP1RKShtk7u6PbQCAZZLaHt3+/0p3a7St+Y8yBwlZghYUDThq/3gxNSz6oY8mLH6r0jn4Plds"
    "vaPTHVj3K3CnH2JAaL3XFYEef+eKMgoiBjEF8NmPjKAa8KZNf4LBm6MV2fwgF6Ws18YTKAEGDLkvkDMuJkry+8Bu"
    "EvoQsB9irxf4EYSZlBkDgIJ9KvQx7G7TtNBaUnNcPDPWqBpKLetM7NAkI8L83cMKYCdN/2DIBgwDACyaXbZt23YR"
    "/Q/dMGEA+Z4bRwGKIZbtVGWRZ6mmqF0/jNMinEfb1PO+ipJMkcnGsNfz4kTI09z9/QBFWElGGgAAAE1NACoAAAAI"
    "AAEBEgADAAAAAQADAAAAAAAA",
    // Moving WebP.
    "UklGRgQBAABXRUJQVlA4WAoAAAACAAAABwAABwAAQU5JTQYAAAAAAAAAAABBTk1GagAAAAAAAAAAAAcAAAcAAAkA"
    "AAJWUDggUgAAADABAJ0BKggACAAFQHwlsAADcADM+HBM5hdf5rdzaUr0nSpbgNz9d8s5Vh90r+3kMEob3PrIXNVq"
    "Ged8jjSvnSD9wC954X15v9tziyt8dvgAAABBTk1GZgAAAAAAAAAAAAcAAAcAAAkAAABWUDggTgAAAFQBAJ0BKggA"
    "CAAAAHwlsAAFjAAAzOFW2f/u7xzhNUzBzK0GS+xafJEU/9I70X+GHs3MsKxfwH50lEdNP4/zHHp09ZJ/0N438/jv"
    "DAAAAA==",
    // Interlaced PNG of 16 bits.
    "iVBORw0KGgoAAAANSUhEUgAAAAMAAAADEAYAAAFxv1lqAAAAWUlEQVR4AQFOALH/APWxZSJKWLeRAN9q8dgwPmHN"
    "AMS7hsPRxCcQPDRMQYnrLx4Ae9XUfkRvzsIBo9gRc2EQ5XgAG8zOppZ2LmEWxunJLZm/NYwuBxiCLOR8oaUj8HpZ"
    "rtgAAAAASUVORK5CYII="};

std::string unpacked(std::string_view text) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  std::uint32_t bits = 0;
  int held = 0;
  for (const char c : text.substr(0, text.find('='))) {
    bits = bits << 6 | static_cast<std::uint32_t>(kDigits.find(c));
    held += 6;
    if (held >= 8) {
      held -= 8;
      out += static_cast<char>(bits >> held & 0xFFU);
    }
  }
  return out;
}

std::vector<std::string> image_seeds() {
  std::vector<std::string> seeds{
      test::Png{.rows = "abcdefghi123456789", .extra = test::chunk("eXIf", test::exif(8))}.text()};
  for (const char* image : kImages) {
    seeds.push_back(unpacked(image));
  }
  return seeds;
}

// Decodes whatever has a header, twice, into pixels of another color: each is written, and the
// same.
void decode(std::span<const std::byte> encoded) {
  const auto info = read_image_info(encoded, kPixelsMost);
  if (!info) {
    return;
  }
  if (info->width * info->height > kPixelsMost || info->scratch_bytes < 0) {
    contradiction("image", "more pixels than allowed");
  }
  std::array<std::vector<std::uint8_t>, 2> pixels;
  std::array<bool, 2> decoded{};
  for (std::size_t i = 0; i < 2; ++i) {
    pixels[i].resize(static_cast<std::size_t>(info->pixel_bytes()), i == 0 ? 0 : 255);
    const auto done = decode_image(encoded, *info, pixels[i]);
    decoded[i] = static_cast<bool>(done);
    if (!done && done.error().code != ErrorCode::kCorrupt) {
      contradiction("image", done.error().to_string());
    }
  }
  if (decoded[0] != decoded[1] || (decoded[0] && pixels[0] != pixels[1])) {
    contradiction("image", "pixels that were not written");
  }
}

// The bytes, and their checksums of chunks made sound where it is a PNG.
void image(std::span<const std::byte> bytes) {
  decode(bytes);
  std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (!text.starts_with("\x89PNG")) {
    return;
  }
  for (std::size_t at = 8; at + 12 <= text.size();) {
    std::uint32_t size = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      size = size << 8 | static_cast<unsigned char>(text[at + i]);
    }
    if (size > text.size() - at - 12) {
      break;
    }
    text.replace(at + 8 + size, 4, test::big(test::crc32(text.substr(at + 4, size + 4))));
    at += size + 12;
  }
  decode(std::as_bytes(std::span(text)));
}

// ---- The file of a set ----

class Images {
 public:
  static Images& get() {
    static Images images;
    return images;
  }
  test::ScratchDirectory scratch{};
  std::string good{};

 private:
  Images() {
    const auto seeds = image_seeds();
    auto writer =
        ImageWriter::open(process_governor(), {.path = scratch / "good", .fingerprint = "fuzz"})
            .or_throw();
    for (std::int64_t row = 0; row < kRows; ++row) {
      std::vector<std::span<const std::byte>> some;
      for (std::size_t i = 0; i < static_cast<std::size_t>(row % 3); ++i) {
        some.push_back(std::as_bytes(std::span(seeds[(static_cast<std::size_t>(row) + i) % 4])));
      }
      writer.append(fmt::format("[{}]", row), some).or_throw();
    }
    writer.finish("{}").or_throw();
    good = test::slurp(scratch / "good");
  }
};

void read_set(const fs::path& path) {
  const auto corrupt = [](const Error& error) {
    if (error.code != ErrorCode::kCorrupt) {
      contradiction("image_set", error.to_string());
    }
  };
  const auto set = ImageSet::open(path);
  if (!set) {
    corrupt(set.error());
    return;
  }
  for (std::int64_t row = 0; row < std::min<std::int64_t>(set->rows(), 100); ++row) {
    const auto found = set->row(row);
    if (!found) {
      corrupt(found.error());
      continue;
    }
    for (const ImagePlace& place : found->images) {
      std::vector<std::byte> bytes(static_cast<std::size_t>(place.bytes));
      if (const auto read = set->read(place, bytes); !read) {
        corrupt(read.error());
      } else {
        decode(bytes);
      }
    }
  }
}

// Makes the checksums sound again: of the header, and of every row that can be found.
void repair(std::string& text) {
  constexpr std::size_t kCrcAt = 84;
  if (text.size() < static_cast<std::size_t>(kRowFileHeaderBytes)) {
    return;
  }
  const auto bytes = std::as_writable_bytes(std::span(text));
  const auto put = [&](std::size_t at, std::uint32_t crc) {
    std::memcpy(text.data() + at, &crc, sizeof(crc));
  };
  put(kCrcAt, 0);
  put(kCrcAt, crc32c(bytes.first(static_cast<std::size_t>(kRowFileHeaderBytes))));
  std::int64_t index_at = 0;
  std::memcpy(&index_at, text.data() + 56, sizeof(index_at));
  const auto size = static_cast<std::int64_t>(text.size());
  for (std::int64_t row = 0; index_at >= 0 && row < kRows && index_at + row * 16 + 16 <= size;
       ++row) {
    RowEntry entry;
    char* const at = text.data() + index_at + row * 16;
    std::memcpy(&entry, at, sizeof(entry));
    if (entry.offset >= 0 && entry.offset <= size && entry.length <= size - entry.offset) {
      entry.crc = row_crc(
          row, entry, crc32c(bytes.subspan(static_cast<std::size_t>(entry.offset), entry.length)));
      std::memcpy(at, &entry, sizeof(entry));
    }
  }
}

void image_set(std::span<const std::byte> bytes) {
  const fs::path path = Images::get().scratch / "fuzz";
  std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  test::spill(path, text);
  read_set(path);
  repair(text);
  test::spill(path, text);
  read_set(path);
}

std::vector<std::string> set_seeds() {
  return {Images::get().good};
}

}  // namespace

std::vector<Target> image_targets() {
  return {{"image", image_seeds, image}, {"image_set", set_seeds, image_set}};
}

}  // namespace plimsoll::fuzz
