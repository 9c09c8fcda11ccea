// SPDX-License-Identifier: Apache-2.0
//
// IoPool: a few threads that read, write and sync files at once; a batch of direct reads and writes
// needs none.
//
// A batch is an array of requests owned by the caller; run() returns when all are done. The pool
// holds no queue of its own beyond a pointer to each batch in progress.
//
// Threads: thread-safe; several batches may be in progress.
// Memory:  threads × (stack + nothing); at most kMaxBatches batches, callers beyond that wait; see
//          aio_transfers.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include <sys/uio.h>

#include "os/file.h"
#include "plimsoll/result.h"

namespace plimsoll {

enum class IoKind : std::uint8_t {
  kRead,
  kReadParts,  // Neighbours in the file, each to memory of its own.
  kWrite,
  kSync,
  kWriteAndSync  // One after the other.
};

struct IoRequest {
  File* file{nullptr};
  std::int64_t offset{0};
  std::span<std::byte> bytes{};  // Read into or written; a sync has none; of parts, their iovecs.
  IoKind kind{IoKind::kRead};

  /// Reads what follows `offset` into these parts, one after another. Borrowed until it is done.
  static IoRequest read_parts(File& file, std::int64_t offset, std::span<iovec> parts) noexcept {
    return {.file = &file,
            .offset = offset,
            .bytes = std::as_writable_bytes(parts),
            .kind = IoKind::kReadParts};
  }
  /// Requires: kReadParts.
  [[nodiscard]] std::span<const iovec> parts() const noexcept {
    return {reinterpret_cast<const iovec*>(bytes.data()), bytes.size() / sizeof(iovec)};
  }
};

class IoPool {
 public:
  explicit IoPool(int threads);
  ~IoPool();
  IoPool(const IoPool&) = delete;
  IoPool& operator=(const IoPool&) = delete;

  /// Carries out every request, in parallel, in any order. Returns the first error, if any, after
  /// all have ended. With one request or no threads it runs on the calling thread. Reads and writes
  /// of direct files, with no syncs among them, are under way all at once, up to
  /// AioTransfers::kUnderWay, whatever the threads.
  /// `ended(i)` is called on this thread for each request that was carried out, where they can be
  /// with others still under way; where one fails, not for all. It must not throw.
  Result<void> run(std::span<IoRequest> requests,
                   const std::function<void(std::size_t)>& ended = nullptr);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace plimsoll
