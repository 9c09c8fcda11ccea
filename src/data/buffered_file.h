// SPDX-License-Identifier: Apache-2.0
//
// BufferedFile: bytes written one behind the other from a place in a file on, through a buffer.
//
// Threads: single-owner.   Memory: the buffer, which is the caller's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>

#include "base/check.h"
#include "os/file.h"

namespace plimsoll {

struct BufferedFile {
  File* file{nullptr};  // Borrowed; several may write to places of one file.
  std::span<std::byte> buffer{};
  std::size_t held{0};      // Bytes of the buffer that are not written yet.
  std::int64_t written{0};  // Where in the file they go.

  [[nodiscard]] std::int64_t bytes() const noexcept {
    return written + static_cast<std::int64_t>(held);
  }
  /// Errors: kIo.
  Result<void> flush() {
    PLIMSOLL_TRY_VOID(file->write_at(written, buffer.first(held)));
    written += static_cast<std::int64_t>(std::exchange(held, 0));
    return {};
  }
  /// Errors: kIo.
  Result<void> put(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const std::size_t part = std::min(bytes.size(), buffer.size() - held);
      std::memcpy(buffer.data() + held, bytes.data(), part);
      held += part;
      bytes = bytes.subspan(part);
      if (held == buffer.size()) {
        PLIMSOLL_TRY_VOID(flush());
      }
    }
    return {};
  }
  /// Forgets what is beyond `bytes`.
  void rewind(std::int64_t bytes) noexcept {
    held = bytes > written ? static_cast<std::size_t>(bytes - written) : 0;
    written = std::min(written, bytes);
  }
};

}  // namespace plimsoll
