// SPDX-License-Identifier: Apache-2.0
//
// Threads: see torch_archive.h.   Memory: see torch_archive.h.
#include "data/torch_archive.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"

namespace plimsoll {
namespace {

constexpr std::uint32_t kLocalMagic = 0x04034B50;
constexpr std::uint32_t kDirectoryMagic = 0x02014B50;
constexpr std::uint32_t kEndMagic = 0x06054B50;
constexpr std::uint32_t kEnd64Magic = 0x06064B50;
constexpr std::uint32_t kLocator64Magic = 0x07064B50;
constexpr std::int64_t kLocalBytes = 30;
constexpr std::int64_t kDirectoryBytes = 46;
constexpr std::int64_t kEndBytes = 22;
constexpr std::int64_t kEnd64Bytes = 56;
constexpr std::int64_t kLocator64Bytes = 20;
constexpr std::int64_t kCommentMost = 65'535;
constexpr std::uint64_t kIn64 = 0xFFFFFFFF;  // The number stands in the zip64 field instead.
constexpr std::uint16_t kZip64Field = 1;
constexpr std::int64_t kMembersAtOnce = 4096;  // For which room is leased.

constexpr std::array<std::uint32_t, 256> crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) {
      value = (value >> 1) ^ ((value & 1U) != 0 ? 0xEDB88320U : 0U);
    }
    table[i] = value;
  }
  return table;
}

template <class T>
T number_at(std::span<const std::byte> bytes, std::size_t at) {
  T value{};
  std::memcpy(&value, bytes.data() + at, sizeof(value));
  return value;
}

/// What is 64 bits wide stands in an extra field, in this order, those that did not fit only.
bool read_zip64(std::span<const std::byte> extra, std::array<std::uint64_t*, 3> values) {
  const bool needed = std::any_of(values.begin(), values.end(),
                                  [](const std::uint64_t* value) { return *value == kIn64; });
  while (needed && extra.size() >= 4) {
    const auto size = std::size_t{number_at<std::uint16_t>(extra, 2)};
    if (size > extra.size() - 4) {
      return false;
    }
    if (number_at<std::uint16_t>(extra, 0) == kZip64Field) {
      auto field = extra.subspan(4, size);
      for (std::uint64_t* value : values) {
        if (*value != kIn64) {
          continue;
        }
        if (field.size() < 8) {
          return false;
        }
        *value = number_at<std::uint64_t>(field, 0);
        field = field.subspan(8);
      }
      return true;
    }
    extra = extra.subspan(4 + size);
  }
  return !needed;
}

}  // namespace

std::uint32_t zip_crc32(std::span<const std::byte> bytes, std::uint32_t seed) noexcept {
  static constexpr auto kTable = crc_table();
  std::uint32_t crc = ~seed;
  for (const std::byte byte : bytes) {
    crc = (crc >> 8) ^ kTable[(crc ^ static_cast<std::uint32_t>(byte)) & 0xFFU];
  }
  return ~crc;
}

tl::unexpected<Error> TorchArchive::bad(std::string_view what) const {
  return fail(ErrorCode::kCorrupt, fmt::format("{}: {}", name_, what), advice_);
}

Result<TorchArchive> TorchArchive::open(Governor governor, const std::filesystem::path& path,
                                        const char* advice) {
  TorchArchive archive;
  archive.name_ = path.string();
  archive.advice_ = advice;
  PLIMSOLL_TRY(archive.file_, File::open(path, FileMode::kRead));
  PLIMSOLL_TRY(archive.file_bytes_, archive.file_.size());
  PLIMSOLL_TRY(archive.lease_, governor.reserve(Tag::kOther, 2 * kWindowBytes));
  archive.window_.resize(static_cast<std::size_t>(kWindowBytes));
  PLIMSOLL_TRY_VOID(archive.read_directory());
  if (archive.pickle_.bytes == 0) {
    return archive.bad("a zip without data.pkl, so not what torch.save writes");
  }
  std::sort(archive.storages_.begin(), archive.storages_.end(),
            [](const Member& a, const Member& b) { return a.number < b.number; });
  const auto twice =
      std::adjacent_find(archive.storages_.begin(), archive.storages_.end(),
                         [](const Member& a, const Member& b) { return a.number == b.number; });
  if (twice != archive.storages_.end()) {
    return archive.bad(fmt::format("two storages {}", twice->number));
  }
  return archive;
}

Result<std::span<const std::byte>> TorchArchive::view(std::int64_t offset, std::int64_t bytes) {
  if (offset < 0 || bytes < 0 || bytes > file_bytes_ || offset > file_bytes_ - bytes) {
    return bad("a part of it would lie behind its end");
  }
  if (bytes > kWindowBytes) {
    return fail(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: {} bytes in one piece, where {} are the most", name_, bytes, kWindowBytes),
        advice_);
  }
  if (offset < window_at_ || offset + bytes > window_at_ + window_held_) {
    window_held_ = 0;
    const std::int64_t count = std::min(kWindowBytes, file_bytes_ - offset);
    PLIMSOLL_TRY_VOID(file_.read_at(
        offset, std::span<std::byte>(window_).first(static_cast<std::size_t>(count))));
    window_at_ = offset;
    window_held_ = count;
  }
  return std::span<const std::byte>(window_).subspan(static_cast<std::size_t>(offset - window_at_),
                                                     static_cast<std::size_t>(bytes));
}

Result<void> TorchArchive::read_directory() {
  // The end record is the last thing but for a comment.
  const std::int64_t tail = std::min(file_bytes_, kEndBytes + kCommentMost);
  PLIMSOLL_TRY(const auto end, view(file_bytes_ - tail, tail));
  std::optional<std::size_t> found;
  for (std::int64_t at = tail - kEndBytes; at >= 0 && !found; --at) {
    if (number_at<std::uint32_t>(end, static_cast<std::size_t>(at)) == kEndMagic) {
      found = static_cast<std::size_t>(at);
    }
  }
  if (!found) {
    return bad("no zip, so cut short, or not saved by torch 1.6 or later");
  }
  std::uint64_t members = number_at<std::uint16_t>(end, *found + 10);
  std::uint64_t begin = number_at<std::uint32_t>(end, *found + 16);
  const std::int64_t end_at = file_bytes_ - tail + static_cast<std::int64_t>(*found);
  if (end_at >= kLocator64Bytes) {
    PLIMSOLL_TRY(const auto locator, view(end_at - kLocator64Bytes, kLocator64Bytes));
    if (number_at<std::uint32_t>(locator, 0) == kLocator64Magic) {
      const auto at = number_at<std::int64_t>(locator, 8);
      PLIMSOLL_TRY(const auto end64, view(at, kEnd64Bytes));
      if (number_at<std::uint32_t>(end64, 0) != kEnd64Magic) {
        return bad("its zip64 record is damaged");
      }
      members = number_at<std::uint64_t>(end64, 32);
      begin = number_at<std::uint64_t>(end64, 48);
    }
  }
  auto at = static_cast<std::int64_t>(begin);
  for (std::uint64_t i = 0; i < members; ++i) {
    PLIMSOLL_TRY(const auto head, view(at, kDirectoryBytes));
    if (number_at<std::uint32_t>(head, 0) != kDirectoryMagic) {
      return bad(fmt::format("its directory is damaged at byte {}", at));
    }
    const auto method = number_at<std::uint16_t>(head, 10);
    const auto crc = number_at<std::uint32_t>(head, 16);
    std::uint64_t packed = number_at<std::uint32_t>(head, 20);
    std::uint64_t bytes = number_at<std::uint32_t>(head, 24);
    const std::int64_t name_bytes = number_at<std::uint16_t>(head, 28);
    const std::int64_t extra_bytes = number_at<std::uint16_t>(head, 30);
    const std::int64_t comment_bytes = number_at<std::uint16_t>(head, 32);
    std::uint64_t header = number_at<std::uint32_t>(head, 42);
    PLIMSOLL_TRY(const auto rest, view(at + kDirectoryBytes, name_bytes + extra_bytes));
    const auto extra = rest.subspan(static_cast<std::size_t>(name_bytes));
    const std::string name(reinterpret_cast<const char*>(rest.data()),
                           static_cast<std::size_t>(name_bytes));
    if (!read_zip64(extra, {&bytes, &packed, &header}) || method != 0 || packed != bytes ||
        bytes > static_cast<std::uint64_t>(file_bytes_) ||
        header > static_cast<std::uint64_t>(file_bytes_)) {
      return bad(fmt::format("its part {} is compressed, or outside of it", name));
    }
    PLIMSOLL_TRY_VOID(add_member(name, {.header = static_cast<std::int64_t>(header),
                                        .bytes = static_cast<std::int64_t>(bytes),
                                        .crc = crc}));
    at += kDirectoryBytes + name_bytes + extra_bytes + comment_bytes;
  }
  return {};
}

Result<void> TorchArchive::add_member(std::string_view name, const Member& member) {
  const std::size_t slash = name.find('/');
  const std::string_view inside =
      slash == std::string_view::npos ? std::string_view{} : name.substr(slash + 1);
  if (inside == "data.pkl") {
    pickle_ = member;
    return {};
  }
  if (inside == "byteorder") {
    PLIMSOLL_TRY(const std::int64_t at, data_of(member));
    PLIMSOLL_TRY(const auto order, view(at, std::min<std::int64_t>(member.bytes, 3)));
    if (std::string_view(reinterpret_cast<const char*>(order.data()), order.size()) == "big") {
      return bad("its numbers are big-endian; save it anew on a little-endian machine");
    }
    return {};
  }
  constexpr std::string_view kData = "data/";
  if (!inside.starts_with(kData)) {
    return {};  // Versions, alignment and the like.
  }
  Member storage = member;
  const std::string_view key = inside.substr(kData.size());
  const auto parsed = std::from_chars(key.data(), key.data() + key.size(), storage.number);
  if (parsed.ec != std::errc{} || parsed.ptr != key.data() + key.size()) {
    return bad(fmt::format("a storage named {}", key));
  }
  if (storages_.size() == storages_.capacity()) {  // Grown by a half; both are there meanwhile.
    const auto room = static_cast<std::int64_t>(
        std::max(storages_.size() + storages_.size() / 2, std::size_t{kMembersAtOnce}));
    const auto held = static_cast<std::int64_t>(storages_.size());
    PLIMSOLL_TRY_VOID(
        lease_.grow(2 * kWindowBytes + (room + held) * static_cast<std::int64_t>(sizeof(Member))));
    storages_.reserve(static_cast<std::size_t>(room));
  }

  storages_.push_back(storage);
  return {};
}

// Behind the local header and its own copy of the name.
Result<std::int64_t> TorchArchive::data_of(const Member& member) {
  PLIMSOLL_TRY(const auto head, view(member.header, kLocalBytes));
  if (number_at<std::uint32_t>(head, 0) != kLocalMagic) {
    return bad(fmt::format("a part is damaged at byte {}", member.header));
  }
  return member.header + kLocalBytes + number_at<std::uint16_t>(head, 26) +
         number_at<std::uint16_t>(head, 28);
}

Result<Pickle> TorchArchive::pickle(Governor governor, PickleOptions options) {
  PLIMSOLL_TRY(const std::int64_t at, data_of(pickle_));
  if (at > file_bytes_ - pickle_.bytes) {
    return bad("its pickle would lie behind its end");
  }
  std::uint32_t crc = 0;
  for (std::int64_t done = 0; done < pickle_.bytes;) {
    const std::int64_t count = std::min(kWindowBytes, pickle_.bytes - done);
    PLIMSOLL_TRY(const auto bytes, view(at + done, count));
    crc = zip_crc32(bytes, crc);
    done += count;
  }
  if (crc != pickle_.crc) {
    return bad("data.pkl: another checksum");
  }
  options.name = name_;
  options.advice = advice_;
  return Pickle::read(std::move(governor), file_, at, pickle_.bytes, options);
}

Result<const TorchArchive::Member*> TorchArchive::member_of(const TorchTensor& tensor) const {
  const auto found =
      std::lower_bound(storages_.begin(), storages_.end(), tensor.storage,
                       [](const Member& m, std::uint64_t number) { return m.number < number; });
  if (found == storages_.end() || found->number != tensor.storage) {
    return bad(fmt::format("storage {} is missing", tensor.storage));
  }
  return &*found;
}

// Requires: the tensor has elements.
Result<TorchArchive::Extent> TorchArchive::extent_of(const TorchTensor& tensor) {
  Extent extent;
  PLIMSOLL_TRY(extent.member, member_of(tensor));
  const std::int64_t size = torch_type_bytes(tensor.type);
  // The last element's place; each product is bounded by the check before it.
  std::int64_t last = tensor.offset;
  std::int64_t dense = 1;
  for (std::size_t i = tensor.dims; i-- > 0;) {
    const std::int64_t steps = tensor.shape[i] - 1;
    if (steps > 0 && tensor.strides[i] > extent.member->bytes / steps) {
      return bad(fmt::format("a tensor reaches behind the end of storage {}", tensor.storage));
    }
    last += steps * tensor.strides[i];
    extent.contiguous = extent.contiguous && (steps == 0 || tensor.strides[i] == dense);
    dense *= tensor.shape[i];
  }
  if (last >= extent.member->bytes / size) {
    return bad(fmt::format("a tensor reaches behind the end of storage {}", tensor.storage));
  }
  PLIMSOLL_TRY(const std::int64_t data, data_of(*extent.member));
  extent.begin = data + tensor.offset * size;
  extent.bytes = (last - tensor.offset + 1) * size;
  return extent;
}

Result<void> TorchArchive::read(const TorchTensor& tensor, std::span<std::byte> out) {
  const std::int64_t size = torch_type_bytes(tensor.type);
  PLIMSOLL_CHECK(static_cast<std::int64_t>(out.size()) == tensor.elements() * size,
                 "room for the elements and no more");
  if (out.empty()) {
    return {};
  }
  PLIMSOLL_TRY(const Extent extent, extent_of(tensor));
  if (!extent.contiguous) {
    PLIMSOLL_TRY(const auto gathered, elements(tensor));
    std::copy(gathered.begin(), gathered.end(), out.begin());
    return {};
  }
  std::uint32_t crc = 0;
  for (std::int64_t done = 0; done < extent.bytes;) {
    const std::int64_t count = std::min(kWindowBytes, extent.bytes - done);
    PLIMSOLL_TRY(const auto bytes, view(extent.begin + done, count));
    std::copy(bytes.begin(), bytes.end(), out.begin() + done);
    crc = zip_crc32(bytes, crc);
    done += count;
  }
  if (extent.whole() && crc != extent.member->crc) {
    return bad(fmt::format("storage {}: another checksum", tensor.storage));
  }
  return {};
}

Result<std::span<const std::byte>> TorchArchive::elements(const TorchTensor& tensor) {
  const std::int64_t size = torch_type_bytes(tensor.type);
  const std::int64_t count = tensor.elements();
  if (count == 0) {
    return std::span<const std::byte>{};
  }
  PLIMSOLL_TRY(const Extent extent, extent_of(tensor));
  PLIMSOLL_TRY(const auto bytes, view(extent.begin, extent.bytes));
  if (extent.whole() && zip_crc32(bytes) != extent.member->crc) {
    return bad(fmt::format("storage {}: another checksum", tensor.storage));
  }
  if (extent.contiguous) {
    return bytes;
  }
  if (count * size > kWindowBytes) {
    return fail(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: a tensor of {} elements, more than {} bytes", name_, count, kWindowBytes),
        advice_);
  }
  gathered_.resize(static_cast<std::size_t>(count * size));
  std::array<std::int64_t, TorchTensor::kDimsMost> place{};
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t from = 0;
    for (std::size_t d = 0; d < tensor.dims; ++d) {
      from += place[d] * tensor.strides[d];
    }
    std::copy_n(bytes.begin() + from * size, size, gathered_.begin() + i * size);
    for (std::size_t d = tensor.dims; d-- > 0 && ++place[d] == tensor.shape[d];) {
      place[d] = 0;
    }
  }
  return std::span<const std::byte>(gathered_);
}

}  // namespace plimsoll
