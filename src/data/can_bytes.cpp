// SPDX-License-Identifier: Apache-2.0
#include "data/can_bytes.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/core.h>

#include "base/check.h"
#include "base/crc32c.h"

#ifdef PLIMSOLL_HAVE_ZLIB
#include <zlib.h>
#endif
#ifdef PLIMSOLL_HAVE_ZSTD
#include <zstd.h>
#endif

namespace plimsoll {

#ifdef PLIMSOLL_HAVE_ZLIB
struct CanBytes::Unpacker {
  Unpacker() {
    constexpr int kGzipOnly = 15 + 16;  // zlib.h: the largest window, and a gzip header expected.
    PLIMSOLL_CHECK(inflateInit2(&stream, kGzipOnly) == Z_OK, "zlib refused to begin");
  }
  ~Unpacker() { inflateEnd(&stream); }
  Unpacker(const Unpacker&) = delete;
  Unpacker& operator=(const Unpacker&) = delete;

  z_stream stream{};
  bool ended{false};  // The last member is whole.
};
#else
struct CanBytes::Unpacker {};
#endif

#ifdef PLIMSOLL_HAVE_ZSTD
struct CanBytes::ZstdUnpacker {
  ZstdUnpacker() : stream(ZSTD_createDStream()) {
    PLIMSOLL_CHECK(stream != nullptr, "zstd refused to begin");
    PLIMSOLL_CHECK(
        ZSTD_isError(ZSTD_DCtx_setParameter(stream, ZSTD_d_windowLogMax, kZstdWindowLog)) == 0,
        "zstd takes no bound on its window");
  }
  ~ZstdUnpacker() { ZSTD_freeDStream(stream); }
  ZstdUnpacker(const ZstdUnpacker&) = delete;
  ZstdUnpacker& operator=(const ZstdUnpacker&) = delete;

  ZSTD_DStream* stream;
  ZSTD_inBuffer in{};
  bool whole{true};  // The last frame is.
};
#else
struct CanBytes::ZstdUnpacker {};
#endif

CanBytes::CanBytes() noexcept = default;
CanBytes::CanBytes(CanBytes&&) noexcept = default;
CanBytes& CanBytes::operator=(CanBytes&&) noexcept = default;
CanBytes::~CanBytes() = default;

Result<CanBytes> CanBytes::open(const std::filesystem::path& path, std::span<std::byte> packed,
                                bool zstd) {
  CanBytes bytes;
  PLIMSOLL_TRY(bytes.file_, File::open(path, FileMode::kRead));
  PLIMSOLL_TRY(bytes.file_bytes_, bytes.file_.size());
  bytes.packed_ = packed;
  std::array<std::byte, kFileHead> first{};
  const auto head = std::span(first).first(std::min(
      first.size(), static_cast<std::size_t>(std::max<std::int64_t>(0, bytes.file_bytes_))));
  PLIMSOLL_TRY_VOID(bytes.file_.read_at(0, head));
  const FileSort sort = file_sort(head);
  if (sort.kind == FileKind::kZstd) {
    if (!zstd) {
      return not_text(path.string(), sort);
    }
#ifdef PLIMSOLL_HAVE_ZSTD
    bytes.zstd_ = std::make_unique<ZstdUnpacker>();
#else
    return fail(ErrorCode::kInvalidArgument,
                path.string() + ": packed by zstd, which this build has not",
                "unpack it first (zstd -d), or build with zstd (libzstd-dev)");
#endif
  }
  if (sort.kind == FileKind::kGzip) {
#ifdef PLIMSOLL_HAVE_ZLIB
    bytes.unpacker_ = std::make_unique<Unpacker>();
#else
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: gzipped, and this build has no zlib", path.string()),
                "unpack it first, or build with zlib (zlib1g-dev)");
#endif
  }
  return bytes;
}

Result<std::int64_t> CanBytes::read_file(std::span<std::byte> out) {
  const auto size =
      std::min(static_cast<std::int64_t>(out.size()), std::max<std::int64_t>(0, file_bytes_ - at_));
  const auto part = out.first(static_cast<std::size_t>(size));
  PLIMSOLL_TRY_VOID(file_.read_at(at_, part));
  crc_ = plimsoll::crc32c(part, crc_);
  at_ += size;
  return size;
}

Result<FileSort> CanBytes::sort() {
  auto got = read_on(head_);
  if (!got && damage_.empty()) {
    return tl::unexpected(std::move(got).error());
  }
  head_size_ = got ? static_cast<std::size_t>(*got) : 0;
  return got ? file_sort(std::span(head_).first(head_size_)) : FileSort{};
}

Result<std::int64_t> CanBytes::read(std::span<std::byte> out) {
  if (head_at_ == head_size_) {
    return read_on(out);
  }
  const std::size_t size = std::min(out.size(), head_size_ - head_at_);
  std::copy_n(head_.begin() + static_cast<std::ptrdiff_t>(head_at_), size, out.begin());
  head_at_ += size;
  return static_cast<std::int64_t>(size);
}

Result<std::int64_t> CanBytes::read_on(std::span<std::byte> out) {
  if (too_wide_) {
    return fail(ErrorCode::kInvalidArgument, damage_,
                "pack it again without --ultra and --long, or unpack it first (zstd -d --long=31)");
  }
  if (!damage_.empty()) {
    return fail(ErrorCode::kCorrupt, damage_,
                "get the file again, or pass --skip-bad (skip_bad) to use what came before");
  }
  return unpacker_ ? unpack(out) : zstd_ ? unpack_zstd(out) : read_file(out);
}

std::int64_t CanBytes::skip(std::int64_t bytes) noexcept {
  const std::int64_t skipped =
      unpacker_ || zstd_
          ? 0
          : std::clamp<std::int64_t>(bytes, 0, std::max<std::int64_t>(0, file_bytes_ - at_));
  at_ += skipped;
  return skipped;
}

Result<void> CanBytes::skip_rest() {
  while (at_ < file_bytes_) {
    PLIMSOLL_TRY(const std::int64_t size, read_file(packed_));
    PLIMSOLL_CHECK(size > 0, "a buffer of no bytes");
  }
  return {};
}

#ifdef PLIMSOLL_HAVE_ZLIB

Result<void> CanBytes::refill() {
  PLIMSOLL_TRY(const std::int64_t size, read_file(packed_));
  unpacker_->stream.next_in = reinterpret_cast<Bytef*>(packed_.data());
  unpacker_->stream.avail_in = static_cast<uInt>(size);
  return {};
}

// After the end of a member: another one, padding, or the end.
Result<void> CanBytes::next_member() {
  z_stream& stream = unpacker_->stream;
  for (;;) {
    if (stream.avail_in == 0) {
      PLIMSOLL_TRY_VOID(refill());
      if (stream.avail_in == 0) {
        unpacker_->ended = true;
        return {};
      }
    }
    if (*stream.next_in != 0) {
      break;
    }
    ++stream.next_in;
    --stream.avail_in;
  }
  if (inflateReset(&stream) != Z_OK) {
    damage_ = "zlib refused another gzip member";
  }
  return {};
}

Result<std::int64_t> CanBytes::unpack(std::span<std::byte> out) {
  z_stream& stream = unpacker_->stream;
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  while (stream.avail_out > 0 && damage_.empty() && !unpacker_->ended) {
    if (stream.avail_in == 0) {
      PLIMSOLL_TRY_VOID(refill());
    }
    // Without more input, too: it may hold output that the last call had no room for.
    const bool more = stream.avail_in > 0;
    const uInt room = stream.avail_out;
    const int status = inflate(&stream, Z_NO_FLUSH);
    if (status == Z_STREAM_END) {
      PLIMSOLL_TRY_VOID(next_member());
    } else if (status != Z_OK && status != Z_BUF_ERROR) {
      damage_ = fmt::format("damaged gzip ({})", stream.msg != nullptr ? stream.msg : "no reason");
    } else if (!more && stream.avail_out == room) {
      damage_ = "truncated gzip";
    }
  }
  const auto size = static_cast<std::int64_t>(out.size() - stream.avail_out);
  if (size == 0 && !damage_.empty()) {
    return read_on(out);
  }
  return size;
}

#else

Result<void> CanBytes::refill() {
  return {};
}
Result<void> CanBytes::next_member() {
  return {};
}
Result<std::int64_t> CanBytes::unpack(std::span<std::byte>) {
  return 0;
}

#endif

#ifdef PLIMSOLL_HAVE_ZSTD

Result<std::int64_t> CanBytes::unpack_zstd(std::span<std::byte> out) {
  ZSTD_outBuffer into{out.data(), out.size(), 0};
  ZSTD_inBuffer& in = zstd_->in;
  while (into.pos < into.size && damage_.empty()) {
    if (in.pos == in.size) {
      PLIMSOLL_TRY(const std::int64_t size, read_file(packed_));
      in = {packed_.data(), static_cast<std::size_t>(size), 0};
    }
    // Without more input, too: it may hold output that the last call had no room for.
    const bool more = in.pos < in.size;
    if (!more && zstd_->whole) {
      break;
    }
    const std::size_t before = into.pos;
    const std::size_t left = ZSTD_decompressStream(zstd_->stream, &into, &in);
    if (ZSTD_isError(left) != 0) {
      damage_ = fmt::format("damaged zstd ({})", ZSTD_getErrorName(left));
      // zstd_errors.h, which says so too, is not there in every version of the package.
      too_wide_ = damage_.find("too much memory") != std::string::npos;
      if (too_wide_) {
        damage_ = fmt::format("packed with a window above {} MiB", (1 << kZstdWindowLog) >> 20);
      }
    } else if (!more && into.pos == before) {
      damage_ = "truncated zstd";
    } else {
      zstd_->whole = left == 0;
    }
  }
  if (into.pos == 0 && !damage_.empty()) {
    return read_on(out);
  }
  return static_cast<std::int64_t>(into.pos);
}

#else

Result<std::int64_t> CanBytes::unpack_zstd(std::span<std::byte>) {
  return 0;
}

#endif

}  // namespace plimsoll
