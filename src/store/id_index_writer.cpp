// SPDX-License-Identifier: Apache-2.0
//
// Builds an id index by external merge sort in the caller's buffer.
//
// The buffer is one page for the order file and the rest for a run of (id, ordinal). A full run is
// sorted and written to NAME.runs.0; finish() merges runs, several at a time, back and forth
// between NAME.runs.0 and NAME.runs.1, and the last merge writes the sorted pages. All runs but the
// last have one length, so no list of runs is kept. While the ids ascend only their spans are
// written; at the first that does not, or if in the end the spans are too short, the ids are
// produced again from these.
//
// Threads: single-owner.   Memory: the caller's buffer and a heap of kFanInMax cursors.
#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "os/directories.h"
#include "store/id_index.h"
#include "store/id_page.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kFanInMax = 64;

struct Entry {
  std::int64_t id;
  std::int64_t ordinal;
  friend bool operator<(const Entry& a, const Entry& b) {
    return a.id != b.id ? a.id < b.id : a.ordinal < b.ordinal;
  }
};
static_assert(sizeof(Entry) == 16);

tl::unexpected<Error> duplicate(std::int64_t id, std::int64_t first, std::int64_t second) {
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("id {} appears twice, at positions {} and {}", id, first, second),
              "ids must be distinct");
}

// Collects sorted entries into pages of the sorted file.
class SortedOut {
 public:
  SortedOut(File file, std::span<std::byte> page) : file_(std::move(file)), page_(page) {}

  Result<void> put(const Entry& entry) {
    if (last_ && last_->id == entry.id) {
      return duplicate(entry.id, last_->ordinal, entry.ordinal);
    }
    last_ = entry;
    const auto ordinal = static_cast<std::uint32_t>(entry.ordinal);
    std::memcpy(page_.data() + kIdPageHeaderBytes + count_ * 8, &entry.id, 8);
    std::memcpy(page_.data() + kOrdinalsAt + count_ * 4, &ordinal, 4);
    return ++count_ == kIdsPerSortedPage ? flush() : Result<void>{};
  }
  Result<void> finish() {
    if (count_ > 0) {
      PLIMSOLL_TRY_VOID(flush());
    }
    return file_.sync();
  }

 private:
  Result<void> flush() {
    seal_id_page(page_, IdPageKind::kSorted, number_, count_);
    PLIMSOLL_TRY_VOID(file_.write_at(number_ * kIdPageBytes, page_));
    std::fill(page_.begin(), page_.end(), std::byte{0});
    ++number_;
    count_ = 0;
    return {};
  }
  File file_;
  std::span<std::byte> page_;
  std::int64_t count_{0};
  std::int64_t number_{0};
  std::optional<Entry> last_;
};

// Collects sorted entries into one run of a runs file.
class RunOut {
 public:
  RunOut(File& file, std::int64_t at, std::span<Entry> buffer)
      : file_(&file), at_(at), buffer_(buffer) {}
  Result<void> put(const Entry& entry) {
    buffer_[count_++] = entry;
    return count_ == buffer_.size() ? finish() : Result<void>{};
  }
  Result<void> finish() {
    const auto bytes = std::as_bytes(buffer_.first(count_));
    PLIMSOLL_TRY_VOID(file_->write_at(at_ * static_cast<std::int64_t>(sizeof(Entry)), bytes));
    at_ += static_cast<std::int64_t>(count_);
    count_ = 0;
    return {};
  }

 private:
  File* file_;
  std::int64_t at_;  // In entries.
  std::span<Entry> buffer_;
  std::size_t count_{0};
};

// Reads one run from front to back through a part of the buffer.
struct RunCursor {
  const File* file{nullptr};
  std::int64_t next{0};  // In entries: the next to be read from the file.
  std::int64_t end{0};
  std::span<Entry> buffer{};
  std::size_t at{0};
  std::size_t filled{0};

  [[nodiscard]] bool empty() const { return at == filled && next == end; }
  [[nodiscard]] const Entry& front() const { return buffer[at]; }
  Result<void> refill() {
    if (at < filled || next == end) {
      return {};
    }
    filled = std::min(buffer.size(), static_cast<std::size_t>(end - next));
    at = 0;
    PLIMSOLL_TRY_VOID(file->read_at(next * static_cast<std::int64_t>(sizeof(Entry)),
                                    std::as_writable_bytes(buffer.first(filled))));
    next += static_cast<std::int64_t>(filled);
    return {};
  }
};

// Merges runs into `out`. Ties cannot reach the heap's order: equal ids compare by ordinal.
template <class Out>
Result<void> merge(std::span<RunCursor> runs, Out& out) {
  std::array<RunCursor*, kFanInMax> heap{};
  std::size_t size = 0;
  const auto later = [](const RunCursor* a, const RunCursor* b) { return b->front() < a->front(); };
  for (RunCursor& run : runs) {
    PLIMSOLL_TRY_VOID(run.refill());
    if (!run.empty()) {
      heap[size++] = &run;
    }
  }
  std::make_heap(heap.begin(), heap.begin() + size, later);
  while (size > 0) {
    std::pop_heap(heap.begin(), heap.begin() + size, later);
    RunCursor& run = *heap[size - 1];
    PLIMSOLL_TRY_VOID(out.put(run.front()));
    ++run.at;
    PLIMSOLL_TRY_VOID(run.refill());
    if (run.empty()) {
      --size;
    } else {
      std::push_heap(heap.begin(), heap.begin() + size, later);
    }
  }
  return out.finish();
}

}  // namespace

class IdIndexWriter::Impl {
 public:
  Impl(const std::filesystem::path& directory, const std::string& name, std::span<std::byte> buffer)
      : ids_path_(directory / (name + ".ids")),
        order_path_(directory / (name + ".order")),
        run_paths_{directory / (name + ".runs.0"), directory / (name + ".runs.1")},
        page_(buffer.first(kIdPageBytes)),
        spans_path_(directory / (name + ".spans")) {
    auto rest = buffer.subspan(kIdPageBytes);
    entries_ = {reinterpret_cast<Entry*>(rest.data()), rest.size() / sizeof(Entry)};
    remove_files(true);
    spans_.emplace(spans_path_, page_);
  }
  ~Impl() { remove_files(!finished_); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Result<void> append(std::span<const std::int64_t> ids) {
    if (rows() + static_cast<std::int64_t>(ids.size()) > kIdRowsMax) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("more than {} ids in one table", kIdRowsMax));
    }
    fingerprint_.add(ids);
    std::size_t spanned = 0;
    while (spans_ && spanned < ids.size()) {
      PLIMSOLL_TRY(const bool ascends, spans_->add(ids[spanned]));
      if (!ascends) {
        PLIMSOLL_TRY_VOID(sort_after_all());
        break;
      }
      ++spanned;
    }
    for (const std::int64_t id : ids.subspan(spanned)) {
      PLIMSOLL_TRY_VOID(put(id));
    }
    return {};
  }

  Result<IdIndexInfo> finish() {
    const IdIndexInfo info = fingerprint_.info();
    if (info.spans > 0) {
      PLIMSOLL_TRY_VOID(spans_->finish());
    } else if (!info.dense) {
      PLIMSOLL_TRY_VOID(sort_after_all());
      PLIMSOLL_TRY_VOID(finish_order());
      PLIMSOLL_TRY_VOID(finish_sorted());
    }
    finished_ = true;
    return info;
  }

  [[nodiscard]] std::int64_t rows() const { return fingerprint_.info().rows; }

 private:
  // No spans from here on: puts what they were to hold.
  Result<void> sort_after_all() {
    if (!spans_) {
      return {};
    }
    PLIMSOLL_TRY(order_, File::open(order_path_, FileMode::kCreate));
    const auto done = spans_->replay([this](std::int64_t id) { return put(id); });
    spans_.reset();
    return done;
  }

  Result<void> put(std::int64_t id) {
    std::memcpy(page_.data() + kIdPageHeaderBytes + in_page_ * 8, &id, 8);
    if (++in_page_ == kIdsPerOrderPage) {
      PLIMSOLL_TRY_VOID(flush_order());
    }
    entries_[in_run_++] = {id, put_++};
    return in_run_ == entries_.size() ? flush_run() : Result<void>{};
  }

  Result<void> flush_order() {
    seal_id_page(page_, IdPageKind::kOrder, order_pages_, in_page_);
    PLIMSOLL_TRY_VOID(order_.write_at(order_pages_ * kIdPageBytes, page_));
    std::fill(page_.begin(), page_.end(), std::byte{0});
    ++order_pages_;
    in_page_ = 0;
    return {};
  }

  Result<void> finish_order() {
    if (in_page_ > 0) {
      PLIMSOLL_TRY_VOID(flush_order());
    }
    PLIMSOLL_TRY_VOID(order_.sync());
    order_ = File{};
    return {};
  }

  Result<void> flush_run() {
    std::sort(entries_.begin(), entries_.begin() + static_cast<std::ptrdiff_t>(in_run_));
    if (!runs_[0].valid()) {
      PLIMSOLL_TRY(runs_[0], File::open(run_paths_[0], FileMode::kCreate));
    }
    PLIMSOLL_TRY_VOID(runs_[0].write_at((put_ - static_cast<std::int64_t>(in_run_)) * 16,
                                        std::as_bytes(std::span(entries_).first(in_run_))));
    in_run_ = 0;
    return {};
  }

  Result<void> finish_sorted() {
    PLIMSOLL_TRY(auto file, File::open(ids_path_, FileMode::kCreate));
    SortedOut out(std::move(file), page_);
    if (!runs_[0].valid()) {  // Everything is still in the buffer.
      std::sort(entries_.begin(), entries_.begin() + static_cast<std::ptrdiff_t>(in_run_));
      for (std::size_t i = 0; i < in_run_; ++i) {
        PLIMSOLL_TRY_VOID(out.put(entries_[i]));
      }
      return out.finish();
    }
    if (in_run_ > 0) {
      PLIMSOLL_TRY_VOID(flush_run());
    }
    return merge_all(out);
  }

  Result<void> merge_all(SortedOut& out) {
    const auto block = [&](std::int64_t ways) {  // Entries per cursor; one more for the output.
      return static_cast<std::int64_t>(entries_.size()) / (ways + 1);
    };
    const std::int64_t most = std::clamp<std::int64_t>(
        static_cast<std::int64_t>(entries_.size()) * 16 / 4096 - 1, 2, kFanInMax);
    auto run_entries = static_cast<std::int64_t>(entries_.size());
    int from = 0;
    while ((put_ + run_entries - 1) / run_entries > most) {
      PLIMSOLL_TRY(runs_[1 - from], File::open(run_paths_[1 - from], FileMode::kCreate));
      for (std::int64_t first = 0; first < put_; first += run_entries * most) {
        auto cursors = cursors_at(from, first, run_entries, most, block(most));
        RunOut merged(runs_[1 - from], first,
                      std::span(entries_).last(static_cast<std::size_t>(block(most))));
        PLIMSOLL_TRY_VOID(merge(cursors, merged));
      }
      run_entries *= most;
      from = 1 - from;
    }
    return merge(cursors_at(from, 0, run_entries, most, block(most)), out);
  }

  // Cursors over up to `ways` runs that begin at entry `first` of runs file `from`.
  std::span<RunCursor> cursors_at(int from, std::int64_t first, std::int64_t run_entries,
                                  std::int64_t ways, std::int64_t block) {
    std::size_t count = 0;
    for (std::int64_t way = 0; way < ways && first < put_; ++way, first += run_entries) {
      cursors_[count++] = {
          .file = &runs_[from],
          .next = first,
          .end = std::min(first + run_entries, put_),
          .buffer = std::span(entries_).subspan(static_cast<std::size_t>(way * block),
                                                static_cast<std::size_t>(block))};
    }
    return std::span(cursors_).first(count);
  }

  void remove_files(bool all) noexcept {
    for (const auto& path : run_paths_) {
      static_cast<void>(remove_file(path));
    }
    if (all) {
      static_cast<void>(remove_file(ids_path_));
      static_cast<void>(remove_file(order_path_));
      static_cast<void>(remove_file(spans_path_));
    }
  }

  std::filesystem::path ids_path_;
  std::filesystem::path order_path_;
  std::array<std::filesystem::path, 2> run_paths_;
  std::span<std::byte> page_;
  std::filesystem::path spans_path_;
  std::optional<IdSpanWriter> spans_;  // While the ids ascend. It has the page.
  std::span<Entry> entries_;
  std::array<RunCursor, kFanInMax> cursors_{};
  IdFingerprint fingerprint_;
  File order_;
  std::array<File, 2> runs_;
  std::int64_t put_{0};  // Ids put into the files to be sorted.
  std::int64_t order_pages_{0};
  std::int64_t in_page_{0};
  std::size_t in_run_{0};
  bool finished_{false};
};

IdIndexWriter::IdIndexWriter(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
IdIndexWriter::IdIndexWriter(IdIndexWriter&&) noexcept = default;
IdIndexWriter& IdIndexWriter::operator=(IdIndexWriter&&) noexcept = default;
IdIndexWriter::~IdIndexWriter() = default;

Result<IdIndexWriter> IdIndexWriter::create(const std::filesystem::path& directory,
                                            const std::string& name, std::span<std::byte> buffer) {
  PLIMSOLL_CHECK(static_cast<std::int64_t>(buffer.size()) >= kBufferBytesMin, "buffer too small");
  PLIMSOLL_CHECK(reinterpret_cast<std::uintptr_t>(buffer.data()) % 64 == 0, "buffer misaligned");
  return IdIndexWriter(std::make_unique<Impl>(directory, name, buffer));
}

Result<void> IdIndexWriter::append(std::span<const std::int64_t> ids) {
  return impl_->append(ids);
}
Result<IdIndexInfo> IdIndexWriter::finish() {
  return impl_->finish();
}
std::int64_t IdIndexWriter::rows() const noexcept {
  return impl_->rows();
}

}  // namespace plimsoll
