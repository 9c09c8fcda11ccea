// SPDX-License-Identifier: Apache-2.0
#include "memory/slab.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <sys/mman.h>

#include <fmt/core.h>

#include "base/check.h"
#include "base/round.h"
#include "plimsoll/bytes.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older C libraries do not name it.
#endif

namespace plimsoll {

namespace {

constexpr std::int64_t kPageBytes = 4096;

// Makes every page of the range resident and writable.
Result<void> touch(std::byte* data, std::int64_t bytes) {
  if (::madvise(data, static_cast<std::size_t>(bytes), MADV_POPULATE_WRITE) == 0) {
    return {};
  }
  if (errno == ENOMEM || errno == EFAULT || errno == EHWPOISON) {
    return fail_io(errno, fmt::format("touching a slab of {}", format_bytes(bytes)),
                   "the machine has less free memory than the limit says: lower memory_limit");
  }
  for (std::int64_t at = 0; at < bytes; at += kPageBytes) {
    // A volatile write of what is there: fresh pages hold zeros.
    *reinterpret_cast<volatile std::byte*>(data + at) = std::byte{0};
  }
  return {};
}

}  // namespace

Result<Slab> Slab::create(Governor governor, Tag tag, std::int64_t bytes, bool huge_pages) {
  if (bytes < 0) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("a slab of {} bytes", bytes));
  }
  Slab slab;
  const std::int64_t rounded = round_up(bytes, kPageBytes);
  PLIMSOLL_TRY(slab.lease_, governor.reserve(tag, rounded));
  if (rounded == 0) {
    return slab;
  }
  void* const data = ::mmap(nullptr, static_cast<std::size_t>(rounded), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return fail_io(errno, fmt::format("mapping a slab of {}", format_bytes(rounded)));
  }
  slab.data_ = static_cast<std::byte*>(data);
  slab.bytes_ = rounded;
  slab.released_.resize(static_cast<std::size_t>(rounded / kPageBytes), false);
  // Without huge pages, explicitly so: a system-wide "always" would make pages come back in twos
  // of a megabyte after release_pages(), unleased. Advice: its failure changes nothing but speed.
  ::madvise(data, static_cast<std::size_t>(rounded), huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  // What a forked child had too, whoever writes to it would have twice. Handles refuse there.
  if (::madvise(data, static_cast<std::size_t>(rounded), MADV_DONTFORK) != 0) {
    return fail_io(errno, fmt::format("keeping a slab of {} from children", format_bytes(rounded)));
  }
  PLIMSOLL_TRY_VOID(touch(slab.data_, rounded));
  return slab;
}

Slab::Slab(Slab&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      taken_(std::exchange(other.taken_, 0)),
      released_(std::move(other.released_)),
      lease_(std::move(other.lease_)) {}

Slab& Slab::operator=(Slab&& other) noexcept {
  if (this != &other) {
    unmap();
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    taken_ = std::exchange(other.taken_, 0);
    released_ = std::move(other.released_);
    lease_ = std::move(other.lease_);
  }
  return *this;
}

Slab::~Slab() {
  unmap();
}

void Slab::unmap() noexcept {
  if (data_ != nullptr) {
    ::munmap(data_, static_cast<std::size_t>(bytes_));
  }
}

std::byte* Slab::take_bytes(std::int64_t size, std::int64_t alignment) {
  const std::int64_t begin = round_up(taken_, alignment);
  PLIMSOLL_CHECK(size >= 0 && size <= bytes_ - begin, "a slab was asked for more than was planned");
  taken_ = begin + size;
  return data_ + begin;
}

std::int64_t Slab::release_pages(std::int64_t offset, std::int64_t size) noexcept {
  const std::int64_t first = round_up(std::max<std::int64_t>(0, offset), kPageBytes) / kPageBytes;
  const std::int64_t end = std::min(bytes_, offset + size) / kPageBytes;
  std::int64_t given = 0;
  for (std::int64_t page = first; page < end; ++page) {
    given += released_[static_cast<std::size_t>(page)] ? 0 : kPageBytes;
  }
  if (given == 0 ||
      ::madvise(data_ + first * kPageBytes, static_cast<std::size_t>((end - first) * kPageBytes),
                MADV_DONTNEED) != 0) {
    return 0;
  }
  for (std::int64_t page = first; page < end; ++page) {
    released_[static_cast<std::size_t>(page)] = true;
  }
  lease_.shrink(lease_.bytes() - given);
  return given;
}

Result<void> Slab::reacquire_pages(std::int64_t offset, std::int64_t size) {
  const std::int64_t first = std::max<std::int64_t>(0, offset) / kPageBytes;
  const std::int64_t end = round_up(std::min(bytes_, offset + size), kPageBytes) / kPageBytes;
  std::int64_t taken = 0;
  for (std::int64_t page = first; page < end; ++page) {
    taken += released_[static_cast<std::size_t>(page)] ? kPageBytes : 0;
  }
  PLIMSOLL_TRY_VOID(lease_.grow(lease_.bytes() + taken));
  for (std::int64_t page = first; page < end; ++page) {
    std::int64_t run = page;  // Pages side by side are touched together.
    while (run < end && released_[static_cast<std::size_t>(run)]) {
      ++run;
    }
    if (run > page) {
      if (auto touched = touch(data_ + page * kPageBytes, (run - page) * kPageBytes); !touched) {
        ::madvise(data_ + page * kPageBytes, static_cast<std::size_t>((run - page) * kPageBytes),
                  MADV_DONTNEED);
        lease_.shrink(lease_.bytes() - taken);
        return touched;
      }
      taken -= (run - page) * kPageBytes;
    }
    for (; page < run; ++page) {
      released_[static_cast<std::size_t>(page)] = false;
    }
  }
  return {};
}

}  // namespace plimsoll
