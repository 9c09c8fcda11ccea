// SPDX-License-Identifier: Apache-2.0
#include "store/embedding_format.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "base/check.h"
#include "base/crc32c.h"

namespace plimsoll {
namespace {

constexpr std::uint32_t kPageMagic = 0x47504C50U;             // "PLPG"
constexpr std::uint64_t kSuperMagic = 0x5250555353544C50ULL;  // "PLTSSUPR"
constexpr std::int64_t kPageBytesMost = 64 << 10;
constexpr std::uint32_t kSuperVersion = 3;
constexpr std::uint32_t kSuperVersionOfTwoMaps = 2;  // Slot N has its page table in map.N.

// One copy of a superblock: less than a disk's smallest sector.
struct SuperRecord {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t crc;  // Of the record with this field zero.
  std::int64_t step;
  std::uint64_t fingerprint;
  std::int64_t pages;
  std::int64_t blocks_used;
  std::uint32_t map_crc;
  std::uint32_t map;
};
static_assert(sizeof(SuperRecord) == 56);
constexpr std::array<std::int64_t, 2> kCopiesAt{0, 7 * 512};

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

std::uint32_t row_crc(std::span<const std::byte> record) {
  const std::uint32_t head = crc32c(record.first(offsetof(RowHeader, crc)));
  return crc32c(record.subspan(sizeof(RowHeader)), head);
}

std::uint32_t page_crc(const PageHeader& header, const TableShape& shape,
                       std::span<const std::byte> bytes) {
  std::uint32_t crc = crc32c(bytes_of(header).subspan(offsetof(PageHeader, page)));
  for (std::uint32_t row = 0; row < header.rows; ++row) {
    const auto at = static_cast<std::size_t>(kPageHeaderBytes + row * shape.record_bytes);
    crc = crc32c(bytes.subspan(at + offsetof(RowHeader, crc), sizeof(RowHeader::crc)), crc);
  }
  return crc;
}

std::uint32_t super_crc(SuperRecord record) {
  record.crc = 0;
  return crc32c(bytes_of(record));
}

SuperFile::Slot read_slot(std::span<const std::byte> bytes, int number) {
  SuperFile::Slot slot;
  bool any_bytes =
      std::any_of(bytes.begin(), bytes.end(), [](std::byte b) { return b != std::byte{0}; });
  slot.state = any_bytes ? SuperFile::SlotState::kDamaged : SuperFile::SlotState::kEmpty;
  for (const std::int64_t at : kCopiesAt) {
    SuperRecord record;
    std::memcpy(&record, bytes.data() + at, sizeof record);
    if (record.version == kSuperVersionOfTwoMaps && record.map == 0 &&
        record.crc == super_crc(record)) {
      record.version = kSuperVersion;
      record.map = static_cast<std::uint32_t>(number);
      record.crc = super_crc(record);
    }
    if (record.magic != kSuperMagic || record.version != kSuperVersion || record.map >= kMaps ||
        record.crc != super_crc(record)) {
      continue;
    }
    // A crash between the two sectors leaves two whole copies: the first sector was first.
    if (slot.state != SuperFile::SlotState::kValid) {
      slot.state = SuperFile::SlotState::kValid;
      slot.superblock = {record.step,        record.fingerprint, record.pages,
                         record.blocks_used, record.map_crc,     static_cast<int>(record.map)};
    }
  }
  return slot;
}

}  // namespace

TableShape table_shape(std::int64_t rows, std::int64_t dim, std::int64_t slots,
                       std::int64_t row_slots, RowDType dtype) noexcept {
  TableShape shape{
      .rows = rows, .dim = dim, .slots = slots, .row_slots = row_slots, .dtype = dtype};
  shape.record_bytes =
      round_up(kRowHeaderBytes + shape.weight_bytes() + 4 * shape.state_floats(), std::int64_t{8});
  for (shape.page_bytes = kBlockUnit;; shape.page_bytes += kBlockUnit) {
    const std::int64_t body = shape.page_bytes - kPageHeaderBytes;
    shape.rows_per_page = body / shape.record_bytes;
    const std::int64_t tail = body - shape.rows_per_page * shape.record_bytes;
    if (shape.rows_per_page > 0 &&
        (4 * tail <= shape.page_bytes || shape.page_bytes >= kPageBytesMost)) {
      break;
    }
  }
  shape.pages = (rows + shape.rows_per_page - 1) / shape.rows_per_page;
  return shape;
}

std::uint32_t seal_page(const TableShape& shape, std::uint64_t fingerprint, std::int64_t page,
                        std::span<std::byte> bytes) noexcept {
  PageHeader header{.magic = kPageMagic,
                    .crc = 0,
                    .page = static_cast<std::uint64_t>(page),
                    .fingerprint = fingerprint,
                    .rows = static_cast<std::uint32_t>(shape.rows_in_page(page)),
                    .reserved = 0};
  for (std::uint32_t row = 0; row < header.rows; ++row) {
    const auto record =
        bytes.subspan(static_cast<std::size_t>(kPageHeaderBytes + row * shape.record_bytes),
                      static_cast<std::size_t>(shape.record_bytes));
    const std::uint32_t crc = row_crc(record);
    std::memcpy(record.data() + offsetof(RowHeader, crc), &crc, sizeof crc);
  }
  header.crc = page_crc(header, shape, bytes);
  std::memcpy(bytes.data(), &header, sizeof header);
  return header.crc;
}

bool page_is_sound(const TableShape& shape, std::uint64_t fingerprint, std::int64_t page,
                   std::uint32_t crc, std::span<const std::byte> bytes) noexcept {
  PageHeader header;
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.magic != kPageMagic || header.page != static_cast<std::uint64_t>(page) ||
      header.fingerprint != fingerprint || header.rows != shape.rows_in_page(page) ||
      header.crc != crc || header.crc != page_crc(header, shape, bytes)) {
    return false;
  }
  for (std::uint32_t row = 0; row < header.rows; ++row) {
    const auto record =
        bytes.subspan(static_cast<std::size_t>(kPageHeaderBytes + row * shape.record_bytes),
                      static_cast<std::size_t>(shape.record_bytes));
    RowHeader row_header;
    std::memcpy(&row_header, record.data(), sizeof row_header);
    if (row_header.crc != row_crc(record)) {
      return false;
    }
  }
  return true;
}

Result<void> SuperFile::create(const std::filesystem::path& path) {
  PLIMSOLL_TRY(auto file, File::open(path, FileMode::kCreate));
  const std::array<std::byte, 2 * kSlotBytes> zeros{};
  PLIMSOLL_TRY_VOID(file.write_at(0, zeros));
  return file.sync();
}

Result<SuperFile> SuperFile::open(const std::filesystem::path& path, bool writable) {
  SuperFile super;
  PLIMSOLL_TRY(super.file_, File::open(path, writable ? FileMode::kReadWrite : FileMode::kRead));
  PLIMSOLL_TRY(const std::int64_t size, super.file_.size());
  if (size != 2 * kSlotBytes) {
    return fail(ErrorCode::kCorrupt,
                fmt::format("{}: {} bytes, expected {}", path.string(), size, 2 * kSlotBytes));
  }
  std::array<std::byte, kSlotBytes> bytes;
  for (int slot = 0; slot < 2; ++slot) {
    PLIMSOLL_TRY_VOID(super.file_.read_at(slot * kSlotBytes, bytes));
    super.slots_[static_cast<std::size_t>(slot)] = read_slot(bytes, slot);
  }
  return super;
}

Result<bool> SuperFile::still_holds(int slot) const {
  std::array<std::byte, kSlotBytes> bytes;
  PLIMSOLL_TRY_VOID(file_.read_at(slot * kSlotBytes, bytes));
  return read_slot(bytes, slot) == slots_[static_cast<std::size_t>(slot)];
}

int SuperFile::free_map() const noexcept {
  int map = 0;
  while (std::any_of(slots_.begin(), slots_.end(), [&](const Slot& slot) {
    return slot.state == SlotState::kValid && slot.superblock.map == map;
  })) {
    ++map;
  }
  return map;
}

Result<void> SuperFile::write(int slot, const Superblock& superblock) {
  SuperRecord record{.magic = kSuperMagic,
                     .version = kSuperVersion,
                     .crc = 0,
                     .step = superblock.step,
                     .fingerprint = superblock.fingerprint,
                     .pages = superblock.pages,
                     .blocks_used = superblock.blocks_used,
                     .map_crc = superblock.map_crc,
                     .map = static_cast<std::uint32_t>(superblock.map)};
  record.crc = super_crc(record);
  std::array<std::byte, kSlotBytes> bytes{};
  for (const std::int64_t at : kCopiesAt) {
    std::memcpy(bytes.data() + at, &record, sizeof record);
  }
  PLIMSOLL_TRY_VOID(file_.write_at(slot * kSlotBytes, bytes));
  PLIMSOLL_TRY_VOID(file_.sync());
  slots_[static_cast<std::size_t>(slot)] = {SlotState::kValid, superblock};
  return {};
}

Result<void> SuperFile::clear(int slot) {
  const std::array<std::byte, kSlotBytes> zeros{};
  PLIMSOLL_TRY_VOID(file_.write_at(slot * kSlotBytes, zeros));
  PLIMSOLL_TRY_VOID(file_.sync());
  slots_[static_cast<std::size_t>(slot)] = {};
  return {};
}

}  // namespace plimsoll
