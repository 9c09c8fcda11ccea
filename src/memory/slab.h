// SPDX-License-Identifier: Apache-2.0
//
// Slab: one page-aligned mapping of fixed size, leased and touched before it is used.
//
// Touched (pre-faulted) means that resident is what was leased from the first moment on.
// Parts of it are handed out once, at open, by take(); nothing is ever given back but the whole.
//
// Threads: take() single-owner; the memory is the caller's.   Memory: exactly `bytes`,
//          and one bit per page on the heap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "plimsoll/governor.h"

namespace plimsoll {

class Slab {
 public:
  /// Leases `bytes` (rounded up to 4096) for `tag` and maps them, touched. With `huge_pages`
  /// asks for transparent huge pages (only for slabs that stay fully leased).
  /// Errors: kOverBudget, kIo.
  static Result<Slab> create(Governor governor, Tag tag, std::int64_t bytes,
                             bool huge_pages = false);

  Slab() noexcept = default;
  Slab(Slab&& other) noexcept;
  Slab& operator=(Slab&& other) noexcept;
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;
  ~Slab();

  /// The next `count` objects of T, aligned to `alignment`, zero-filled.
  /// Requires: they fit (PLIMSOLL_CHECK): plan before you take.
  template <class T>
  std::span<T> take(std::int64_t count, std::int64_t alignment = 64) {
    auto* bytes = take_bytes(count * static_cast<std::int64_t>(sizeof(T)), alignment);
    return {reinterpret_cast<T*>(bytes), static_cast<std::size_t>(count)};
  }

  [[nodiscard]] std::int64_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::int64_t taken_bytes() const noexcept { return taken_; }
  [[nodiscard]] std::int64_t leased_bytes() const noexcept { return lease_.bytes(); }
  /// How many bytes reacquire_pages() could lease now.
  [[nodiscard]] std::int64_t room_bytes() const noexcept { return lease_.room(); }
  [[nodiscard]] std::byte* data() const noexcept { return data_; }

  /// Gives back / takes again whole pages inside [offset, offset+size): the lease follows.
  /// release returns the bytes given back; reacquire fails with kOverBudget.
  std::int64_t release_pages(std::int64_t offset, std::int64_t size) noexcept;
  Result<void> reacquire_pages(std::int64_t offset, std::int64_t size);

 private:
  std::byte* take_bytes(std::int64_t size, std::int64_t alignment);
  void unmap() noexcept;

  std::byte* data_{nullptr};
  std::int64_t bytes_{0};
  std::int64_t taken_{0};
  std::vector<bool> released_;  // By page: given back and not taken again. Sized at create().
  Lease lease_;                 // Last: its bytes return after the pages are unmapped.
};

}  // namespace plimsoll
