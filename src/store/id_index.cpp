// SPDX-License-Identifier: Apache-2.0
//
// The reader of the id index and the fingerprint; the writer is id_index_writer.cpp.
//
// Threads: see id_index.h.   Memory: see id_index.h; a miss uses one page of stack.
#include "store/id_index.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/mutex.h"
#include "base/philox.h"
#include "base/round.h"
#include "store/id_page.h"

namespace plimsoll {

bool spans_in_range(const IdIndexInfo& info) noexcept {
  return info.spans == 0 ||
         (info.spans > 0 && !info.dense && info.spans <= info.rows / IdFingerprint::kSpanRowsLeast);
}

// ---- IdFingerprint ----------------------------------------------------------------------------

void IdFingerprint::add(std::span<const std::int64_t> ids) noexcept {
  std::size_t i = 0;
  if (dense_) {
    while (i < ids.size() && ids[i] == rows_) {
      ++rows_;
      ++i;
    }
    if (i == ids.size()) {
      return;
    }
    dense_ = false;
    spans_ = rows_ > 0 ? 1 : 0;
    last_ = rows_ - 1;
    for (std::int64_t id = 0; id < rows_; ++id) {
      chain_ = mix64(chain_ ^ static_cast<std::uint64_t>(id));
    }
  }
  for (; i < ids.size(); ++i) {
    chain_ = mix64(chain_ ^ static_cast<std::uint64_t>(ids[i]));
    ascending_ = ascending_ && (rows_ == 0 || ids[i] > last_);
    spans_ += ascending_ && (rows_ == 0 || ids[i] != last_ + 1) ? 1 : 0;
    last_ = ids[i];
    ++rows_;
  }
}

IdIndexInfo IdFingerprint::info() const noexcept {
  if (dense_) {
    return dense(rows_);
  }
  return {.rows = rows_,
          .dense = false,
          .fingerprint = mix64(chain_ ^ mix64(static_cast<std::uint64_t>(rows_))),
          .spans = ascending_ && rows_ >= kSpanRowsLeast * spans_ ? spans_ : 0};
}

IdIndexInfo IdFingerprint::dense(std::int64_t rows) noexcept {
  constexpr std::uint64_t kDense = 0x64656E7365ULL;  // "dense"
  return {.rows = rows,
          .dense = true,
          .fingerprint = mix64(kDense ^ mix64(static_cast<std::uint64_t>(rows))),
          .spans = 0};
}

// ---- IdIndex::OrderPages ----------------------------------------------------------------------

// The pages of ids by ordinal, some of them cached: page p can only be in slot p mod slots.
class IdIndex::OrderPages {
 public:
  OrderPages(File file, File direct, std::int64_t slots, Slab& slab)
      : file_(std::move(file)),
        direct_(std::move(direct)),
        frames_(slab.take<std::byte>(slots * kIdPageBytes)),
        tags_(slab.take<std::int64_t>(slots)) {
    std::fill(tags_.begin(), tags_.end(), -1);
  }

  // Calls `use(page bytes)` on page `number`, from the cache or read for the purpose. The mutex is
  // held while a cached page is used, never across the disk.
  template <class Use>
  Result<void> with_page(std::int64_t number, const Use& use) {
    {
      const MutexLock lock(mutex_);
      if (const std::int64_t slot = number % slots(); tags_[slot] == number) {
        use(frame(slot));
        return {};
      }
    }
    alignas(64) std::array<std::byte, kIdPageBytes> page;
    PLIMSOLL_TRY_VOID(file_.read_at(number * kIdPageBytes, page));
    PLIMSOLL_TRY_VOID(put(number, page));
    use(std::span<const std::byte>(page));
    return {};
  }

  std::optional<IoRequest> read_of(std::int64_t number, std::span<std::byte> page) {
    const MutexLock lock(mutex_);
    if (tags_[number % slots()] == number) {
      return std::nullopt;
    }
    return IoRequest{
        .file = &direct_, .offset = number * kIdPageBytes, .bytes = page, .kind = IoKind::kRead};
  }

  // Errors: kCorrupt.
  Result<void> put(std::int64_t number, std::span<const std::byte> page) {
    PLIMSOLL_TRY_VOID(check_id_page(page, IdPageKind::kOrder, number, file_.path()));
    const MutexLock lock(mutex_);
    const std::int64_t slot = number % slots();
    std::memcpy(frames_.data() + slot * kIdPageBytes, page.data(), page.size());
    tags_[slot] = number;
    return {};
  }

 private:
  [[nodiscard]] std::int64_t slots() const { return static_cast<std::int64_t>(tags_.size()); }
  [[nodiscard]] std::span<const std::byte> frame(std::int64_t slot) const {
    return frames_.subspan(static_cast<std::size_t>(slot * kIdPageBytes), kIdPageBytes);
  }

  File file_;                     // For one page after another: the kernel reads ahead.
  File direct_;                   // For many at once.
  Mutex mutex_;                   // Guards what frames_ and tags_ hold; the files need none.
  std::span<std::byte> frames_;   // In the slab.
  std::span<std::int64_t> tags_;  // In the slab: the page in each slot, or −1.
};

// ---- IdIndex ----------------------------------------------------------------------------------

namespace {

struct IndexShape {
  std::int64_t sorted_pages;
  std::int64_t order_pages;
};

std::filesystem::path spans_path(const std::filesystem::path& directory, const std::string& name) {
  return directory / (name + ".spans");
}

IndexShape shape_of(const IdIndexInfo& info) {
  if (info.dense || info.spans > 0) {
    return {0, 0};
  }
  return {id_pages(IdPageKind::kSorted, info.rows), id_pages(IdPageKind::kOrder, info.rows)};
}

// Of the file by ordinal, which only rows that were never written ask for.
std::int64_t order_slots(std::int64_t cached, std::int64_t pages) {
  return std::clamp<std::int64_t>(cached / 16, 2, std::max<std::int64_t>(pages, 2));
}

std::uint64_t pair_hash(std::int64_t id, std::int64_t ordinal) {
  return mix64(mix64(static_cast<std::uint64_t>(id)) + static_cast<std::uint64_t>(ordinal));
}

Result<void> same_ids(const IdFingerprint& seen, const IdIndexInfo& info,
                      const std::filesystem::path& path) {
  if (seen.info() != info) {
    return fail(ErrorCode::kCorrupt,
                fmt::format("{}: not the ids this table was made with", path.string()));
  }
  return {};
}

}  // namespace

IdIndex::IdIndex() noexcept = default;
IdIndex::IdIndex(IdIndex&&) noexcept = default;
IdIndex& IdIndex::operator=(IdIndex&&) noexcept = default;
IdIndex::~IdIndex() = default;

std::int64_t IdIndex::disk_bytes(const IdIndexInfo& info) noexcept {
  const auto [sorted, order] = shape_of(info);
  return (sorted + order + id_pages(IdPageKind::kSpans, info.spans)) * kIdPageBytes;
}

std::int64_t IdIndex::memory_bytes(const IdIndexInfo& info, std::int64_t cached_pages) noexcept {
  if (info.dense) {
    return 0;
  }
  if (info.spans > 0) {
    return round_up(info.spans * std::int64_t{sizeof(IdSpan)}, 64) + 64;
  }
  const std::int64_t slots = order_slots(cached_pages, shape_of(info).order_pages);
  return SortedIds::memory_bytes(info.rows, cached_pages) + slots * kIdPageBytes +
         round_up(slots * 8, 64) + 2 * 64;
}

std::int64_t IdIndex::pages_within(const IdIndexInfo& info, std::int64_t bytes,
                                   std::int64_t least) noexcept {
  std::int64_t over = shape_of(info).sorted_pages;
  if (over <= least || memory_bytes(info, over) <= bytes) {
    return std::max(over, least);
  }
  while (least + 1 < over) {
    const std::int64_t middle = least + (over - least) / 2;
    (memory_bytes(info, middle) <= bytes ? least : over) = middle;
  }
  return least;
}

Result<IdIndex> IdIndex::open(const std::filesystem::path& directory, const std::string& name,
                              const IdIndexInfo& info, Slab& slab, std::int64_t cached_pages,
                              IoPool& pool) {
  IdIndex index;
  index.info_ = info;
  if (info.dense) {
    return index;
  }
  if (info.spans > 0) {
    index.spans_ = slab.take<IdSpan>(info.spans);
    PLIMSOLL_TRY_VOID(read_spans(spans_path(directory, name), info.rows, index.spans_));
    return index;
  }
  const std::int64_t order_pages = shape_of(info).order_pages;
  PLIMSOLL_TRY(auto order, open_id_pages(directory / (name + ".order"), order_pages));
  PLIMSOLL_TRY(auto direct, File::open(directory / (name + ".order"), FileMode::kRead, true));
  PLIMSOLL_TRY(index.sorted_,
               SortedIds::open(directory / (name + ".ids"), info.rows, slab, cached_pages, pool));
  index.order_ = std::make_unique<OrderPages>(std::move(order), std::move(direct),
                                              order_slots(cached_pages, order_pages), slab);
  return index;
}

Result<void> IdIndex::find(std::span<const std::int64_t> ids,
                           std::span<std::int64_t> ordinals) const {
  std::fill(ordinals.begin(), ordinals.end(), -1);
  return find_rest(ids, ordinals);
}

Result<void> IdIndex::find_rest(std::span<const std::int64_t> ids,
                                std::span<std::int64_t> ordinals) const {
  PLIMSOLL_CHECK(ids.size() == ordinals.size(), "one ordinal per id");
  if (sorted_ != nullptr) {
    return sorted_->find_rest(ids, ordinals);
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ordinals[i] >= 0) {
      continue;
    }
    if (!info_.dense) {
      ordinals[i] = ordinal_in(spans_, info_.rows, ids[i]);
    } else if (ids[i] >= 0 && ids[i] < info_.rows) {
      ordinals[i] = ids[i];
    }
  }
  return {};
}

Result<void> IdIndex::ids_at(std::int64_t first, std::span<std::int64_t> ids) const {
  const auto count = static_cast<std::int64_t>(ids.size());
  PLIMSOLL_CHECK(first >= 0 && first + count <= info_.rows, "ordinals inside the table");
  if (info_.dense) {
    for (std::int64_t i = 0; i < count; ++i) {
      ids[static_cast<std::size_t>(i)] = first + i;
    }
    return {};
  }
  if (!spans_.empty()) {
    ids_in(spans_, info_.rows, first, ids);
    return {};
  }
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t number = (first + done) / kIdsPerOrderPage;
    const std::int64_t from = (first + done) % kIdsPerOrderPage;
    const std::int64_t here = std::min(count - done, kIdsPerOrderPage - from);
    PLIMSOLL_TRY_VOID(order_->with_page(number, [&](std::span<const std::byte> page) {
      std::memcpy(ids.data() + done, page.data() + kIdPageHeaderBytes + from * 8,
                  static_cast<std::size_t>(here) * 8);
    }));
    done += here;
  }
  return {};
}

std::optional<IoRequest> IdIndex::order_read(std::int64_t first, std::span<std::byte> page) const {
  return order_ == nullptr || first >= info_.rows ? std::nullopt
                                                  : order_->read_of(first / kIdsPerOrderPage, page);
}

Result<void> IdIndex::order_was_read(std::int64_t first, std::span<const std::byte> page) const {
  return order_->put(first / kIdsPerOrderPage, page);
}

Result<void> IdIndex::verify(const std::filesystem::path& directory, const std::string& name,
                             const IdIndexInfo& info) {
  if (info.dense) {
    return {};
  }
  IdFingerprint fingerprint;
  if (info.spans > 0) {
    const auto path = spans_path(directory, name);
    PLIMSOLL_TRY_VOID(
        each_span(path, info.rows, info.spans, [&](const IdSpan& span, std::int64_t ids) {
          for (std::int64_t i = 0; i < ids; ++i) {
            const std::int64_t id = span.first_id + i;
            fingerprint.add({&id, 1});
          }
        }));
    return same_ids(fingerprint, info, path);
  }
  const auto [sorted_pages, order_pages] = shape_of(info);
  PLIMSOLL_TRY(const auto sorted, open_id_pages(directory / (name + ".ids"), sorted_pages));
  PLIMSOLL_TRY(const auto order, open_id_pages(directory / (name + ".order"), order_pages));
  std::uint64_t pairs = 0;  // A sum over (id, ordinal), which is the same in either order.
  PLIMSOLL_TRY_VOID(
      check_sorted(sorted, info.rows, [&](std::int64_t, std::span<const std::byte> sound) {
        for (std::int64_t i = 0; i < id_page_count(sound); ++i) {
          pairs += pair_hash(id_page_id(sound, i), id_page_ordinal(sound, i));
        }
      }));
  alignas(64) std::array<std::byte, kIdPageBytes> page;
  for (std::int64_t number = 0; number < order_pages; ++number) {
    PLIMSOLL_TRY_VOID(order.read_at(number * kIdPageBytes, page));
    PLIMSOLL_TRY_VOID(check_id_page(page, IdPageKind::kOrder, number, order.path()));
    for (std::int64_t i = 0; i < id_page_count(page); ++i) {
      const std::int64_t id = id_page_id(page, i);
      fingerprint.add({&id, 1});
      pairs -= pair_hash(id, number * kIdsPerOrderPage + i);
    }
  }
  PLIMSOLL_TRY_VOID(same_ids(fingerprint, info, order.path()));
  if (pairs != 0) {
    return fail(ErrorCode::kCorrupt, fmt::format("{}: not the rows of {}", sorted.path().string(),
                                                 order.path().string()));
  }
  return {};
}

}  // namespace plimsoll
