// SPDX-License-Identifier: Apache-2.0
//
// Spans of consecutive ids, in ascending order of both id and ordinal: the ids of a table that
// holds nearly all of 0 … N−1, in 16 bytes a span.
//
// Reading order: id_index.h, this file, id_spans.cpp.
//
// Threads: a writer is single-owner; the functions are pure.
// Memory:  the writer one page given to it, and one page of stack.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>

#include "os/file.h"
#include "plimsoll/result.h"

namespace plimsoll {

struct IdSpan {
  std::int64_t first_id;
  std::int64_t first_ordinal;  // It ends where the next begins, the last with the table.
};
static_assert(sizeof(IdSpan) == 16);

/// Writes ids into NAME.spans while they ascend.
class IdSpanWriter {
 public:
  /// `page`: kIdPageBytes, the caller's until finish() or replay().
  IdSpanWriter(std::filesystem::path path, std::span<std::byte> page) noexcept;

  /// The next ordinal's id; false when it is not above the last one, and nothing has changed.
  Result<bool> add(std::int64_t id);

  /// Writes and fsyncs what is left.
  Result<void> finish();

  /// Calls visit(id) with every id added, in order, and removes the file. The page is free, and
  /// zeros, from the first call on.
  Result<void> replay(const std::function<Result<void>(std::int64_t)>& visit);

 private:
  Result<void> flush();

  std::filesystem::path path_;
  File file_;
  std::span<std::byte> page_;
  std::int64_t in_page_{0};
  std::int64_t pages_{0};
  std::int64_t rows_{0};
  std::int64_t last_{0};
};

/// Calls visit(span, how many ids) for each of the `count` spans of NAME.spans.
/// Errors: kNotFound, kIo, kCorrupt (checksums, order, ids beyond 64 bits), naming the file.
Result<void> each_span(const std::filesystem::path& path, std::int64_t rows, std::int64_t count,
                       const std::function<void(const IdSpan&, std::int64_t)>& visit);

/// Reads NAME.spans, which must hold as many as `spans` has places. Errors: as each_span().
Result<void> read_spans(const std::filesystem::path& path, std::int64_t rows,
                        std::span<IdSpan> spans);

/// The ordinal of `id`, or −1.
[[nodiscard]] std::int64_t ordinal_in(std::span<const IdSpan> spans, std::int64_t rows,
                                      std::int64_t id) noexcept;

/// The ids of ordinals first, first + 1, … Requires: they are in the table.
void ids_in(std::span<const IdSpan> spans, std::int64_t rows, std::int64_t first,
            std::span<std::int64_t> ids) noexcept;

}  // namespace plimsoll
