// SPDX-License-Identifier: Apache-2.0
//
// Threads, Memory: see id_spans.h.
#include "store/id_spans.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "os/directories.h"
#include "store/id_page.h"

namespace plimsoll {
namespace {

IdSpan span_at(std::span<const std::byte> page, std::int64_t i) noexcept {
  IdSpan span;
  std::memcpy(&span, page.data() + kIdPageHeaderBytes + i * std::int64_t{sizeof span}, sizeof span);
  return span;
}

constexpr std::int64_t kIdLeast = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kIdMost = std::numeric_limits<std::int64_t>::max();

// From a to b, which is not below it: ids may lie further apart than a signed number can say.
std::uint64_t distance(std::int64_t a, std::int64_t b) noexcept {
  return static_cast<std::uint64_t>(b) - static_cast<std::uint64_t>(a);
}

std::int64_t end_of(std::span<const IdSpan> spans, std::size_t i, std::int64_t rows) noexcept {
  return i + 1 < spans.size() ? spans[i + 1].first_ordinal : rows;
}

}  // namespace

IdSpanWriter::IdSpanWriter(std::filesystem::path path, std::span<std::byte> page) noexcept
    : path_(std::move(path)), page_(page) {}

Result<bool> IdSpanWriter::add(std::int64_t id) {
  if (rows_ > 0 && id <= last_) {
    return false;
  }
  if (rows_ == 0 || id != last_ + 1) {
    if (in_page_ == kIdSpansPerPage) {
      PLIMSOLL_TRY_VOID(flush());
    }
    const IdSpan span{.first_id = id, .first_ordinal = rows_};
    std::memcpy(page_.data() + kIdPageHeaderBytes + in_page_ * std::int64_t{sizeof span}, &span,
                sizeof span);
    ++in_page_;
  }
  last_ = id;
  ++rows_;
  return true;
}

Result<void> IdSpanWriter::flush() {
  if (!file_.valid()) {
    PLIMSOLL_TRY(file_, File::open(path_, FileMode::kCreate));
  }
  const std::int64_t used = kIdPageHeaderBytes + in_page_ * std::int64_t{sizeof(IdSpan)};
  std::fill(page_.begin() + used, page_.end(), std::byte{0});
  seal_id_page(page_, IdPageKind::kSpans, pages_, in_page_);
  PLIMSOLL_TRY_VOID(file_.write_at(pages_ * kIdPageBytes, page_));
  ++pages_;
  in_page_ = 0;
  return {};
}

Result<void> IdSpanWriter::finish() {
  if (in_page_ > 0) {
    PLIMSOLL_TRY_VOID(flush());
  }
  PLIMSOLL_TRY_VOID(file_.sync());
  file_ = File{};
  return {};
}

Result<void> IdSpanWriter::replay(const std::function<Result<void>(std::int64_t)>& visit) {
  if (in_page_ > 0) {
    PLIMSOLL_TRY_VOID(flush());
  }
  std::fill(page_.begin(), page_.end(), std::byte{0});
  alignas(64) std::array<std::byte, kIdPageBytes> page;
  IdSpan span{};
  const auto up_to = [&](std::int64_t end) -> Result<void> {
    for (std::int64_t i = span.first_ordinal; i < end; ++i) {
      PLIMSOLL_TRY_VOID(visit(span.first_id + (i - span.first_ordinal)));
    }
    return {};
  };
  for (std::int64_t number = 0; number < pages_; ++number) {
    PLIMSOLL_TRY_VOID(file_.read_at(number * kIdPageBytes, page));
    for (std::int64_t i = 0; i < id_page_count(page); ++i) {
      const IdSpan next = span_at(page, i);
      PLIMSOLL_TRY_VOID(up_to(next.first_ordinal));
      span = next;
    }
  }
  PLIMSOLL_TRY_VOID(up_to(rows_));
  file_ = File{};
  return remove_file(path_);
}

Result<void> each_span(const std::filesystem::path& path, std::int64_t rows, std::int64_t count,
                       const std::function<void(const IdSpan&, std::int64_t)>& visit) {
  const auto not_ascending = [&] {
    return fail(ErrorCode::kCorrupt,
                fmt::format("{}: its spans are not {} ascending ids", path.string(), rows));
  };
  const std::int64_t pages = id_pages(IdPageKind::kSpans, count);
  PLIMSOLL_TRY(const auto file, open_id_pages(path, pages));
  alignas(64) std::array<std::byte, kIdPageBytes> page;
  IdSpan open{.first_id = 0, .first_ordinal = 0};
  std::int64_t seen = 0;
  // Ends the open span at `ordinal`. False: it is empty, or reaches beyond `last_id`.
  const auto close = [&](std::int64_t ordinal, std::int64_t last_id) {
    const std::int64_t ids = ordinal - open.first_ordinal;
    if (ids < 1 || ordinal > rows || open.first_id > last_id ||
        distance(open.first_id, last_id) < static_cast<std::uint64_t>(ids - 1)) {
      return false;
    }
    visit(open, ids);
    return true;
  };
  for (std::int64_t number = 0; number < pages; ++number) {
    PLIMSOLL_TRY_VOID(file.read_at(number * kIdPageBytes, page));
    PLIMSOLL_TRY_VOID(check_id_page(page, IdPageKind::kSpans, number, path));
    const std::int64_t here = id_page_count(page);
    if (here != std::min(kIdSpansPerPage, count - number * kIdSpansPerPage)) {
      return fail(ErrorCode::kCorrupt,
                  fmt::format("{}: page {} holds {} spans", path.string(), number, here));
    }
    for (std::int64_t i = 0; i < here; ++i) {
      const IdSpan next = span_at(page, i);
      const bool first = seen++ == 0;
      if (first ? next.first_ordinal != 0
                : next.first_id == kIdLeast || !close(next.first_ordinal, next.first_id - 1)) {
        return not_ascending();
      }
      open = next;
    }
  }
  if (seen == 0 || !close(rows, kIdMost)) {
    return not_ascending();
  }
  return {};
}

Result<void> read_spans(const std::filesystem::path& path, std::int64_t rows,
                        std::span<IdSpan> spans) {
  std::size_t done = 0;
  return each_span(path, rows, static_cast<std::int64_t>(spans.size()),
                   [&](const IdSpan& span, std::int64_t) { spans[done++] = span; });
}

std::int64_t ordinal_in(std::span<const IdSpan> spans, std::int64_t rows,
                        std::int64_t id) noexcept {
  const auto after =
      std::upper_bound(spans.begin(), spans.end(), id,
                       [](std::int64_t value, const IdSpan& s) { return value < s.first_id; });
  if (after == spans.begin()) {
    return -1;
  }
  const auto i = static_cast<std::size_t>(after - spans.begin()) - 1;
  const std::uint64_t into = distance(spans[i].first_id, id);
  const std::int64_t count = end_of(spans, i, rows) - spans[i].first_ordinal;
  return into < static_cast<std::uint64_t>(count)
             ? spans[i].first_ordinal + static_cast<std::int64_t>(into)
             : -1;
}

void ids_in(std::span<const IdSpan> spans, std::int64_t rows, std::int64_t first,
            std::span<std::int64_t> ids) noexcept {
  const auto after =
      std::upper_bound(spans.begin(), spans.end(), first,
                       [](std::int64_t value, const IdSpan& s) { return value < s.first_ordinal; });
  auto i = static_cast<std::size_t>(after - spans.begin()) - 1;
  for (std::size_t k = 0; k < ids.size(); ++k) {
    const std::int64_t ordinal = first + static_cast<std::int64_t>(k);
    i += ordinal == end_of(spans, i, rows) ? 1 : 0;
    ids[k] = spans[i].first_id + (ordinal - spans[i].first_ordinal);
  }
}

}  // namespace plimsoll
