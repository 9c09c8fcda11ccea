// SPDX-License-Identifier: Apache-2.0
//
// Opening and creating a table.
//
// A table exists once table.json does: it is written last, durably. A directory that a crash left
// without it is created again from the start.
//
// Threads: see embedding_store.h.   Memory: one slab, taken here and divided once.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <exception>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "os/background_thread.h"
#include "os/blocked_signals.h"
#include "store/embedding_store_impl.h"
#include "store/id_source.h"
#include "store/timeline.h"

namespace plimsoll {
namespace {

// The ids the caller names: an array, a file, or a range to create a table with.
Result<std::optional<IdSource>> ids_given(const EmbeddingStoreOptions& options) {
  if (!options.ids.empty() && !options.ids_file.empty()) {
    return fail(ErrorCode::kInvalidArgument, "both ids and ids_file are given");
  }
  std::optional<IdSource> source;
  if (!options.ids.empty()) {
    source = IdSource::borrowed(options.ids);
  } else if (!options.ids_file.empty()) {
    PLIMSOLL_TRY(source, IdSource::npy(options.ids_file));
  }
  return source;
}

Result<void> check_numbers(const EmbeddingStoreOptions& options) {
  constexpr std::int64_t kAny = INT64_MAX;
  for (const auto& [option, value, least, most] :
       {std::tuple{"batch_rows", options.batch_rows, std::int64_t{1}, kIdRowsMax / 4},
        std::tuple{"compute_threads", std::int64_t{options.compute_threads}, std::int64_t{1},
                   std::int64_t{256}},
        std::tuple{"io_threads", std::int64_t{options.io_threads}, std::int64_t{0},
                   std::int64_t{256}},
        std::tuple{"dirty_bytes", options.dirty_bytes, std::int64_t{0}, kAny},
        std::tuple{"store_bytes", options.store_bytes, std::int64_t{0}, kAny},
        std::tuple{"dim", options.dim, std::int64_t{0}, std::int64_t{1 << 24}},
        std::tuple{"rows", options.rows, std::int64_t{0}, kIdRowsMax},
        std::tuple{"rows_max", options.rows_max, std::int64_t{0}, kIdRowsMax}}) {
    if (value < least || value > most) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("{} = {} makes no sense", option, value));
    }
  }
  return check_optimizer(options.optimizer);
}

// What a new table would be.
Result<TableDescription> describe_new(const EmbeddingStoreOptions& options,
                                      const std::optional<IdSource>& given) {
  if (options.dim < 1) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: there is no table yet, and dim does not say how wide its rows are",
                            options.directory.string()),
                "set dim");
  }
  if (!given && options.rows < 1 && options.rows_max < 1) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: there is no table yet, and no ids to make one of",
                            options.directory.string()),
                "set rows, ids or ids_file; or rows_max, to insert them later");
  }
  TableDescription table{.dim = options.dim,
                         .dtype = options.dtype,
                         .optimizer = options.optimizer.kind,
                         .init = options.init};
  const IdSource source = given ? *given : IdSource::range(options.rows);
  PLIMSOLL_TRY(table.ids, source.info());
  if ((table.ids.rows < 1 && options.rows_max < 1) || table.ids.rows > kIdRowsMax) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("a table of {} rows", table.ids.rows));
  }
  if (options.rows_max > 0 && options.rows_max < table.ids.rows) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("rows_max is {}, but there are {} ids to begin with", options.rows_max,
                            table.ids.rows),
                "raise rows_max");
  }
  table.rows_max = options.rows_max;
  if (options.rows != 0 && options.rows != table.ids.rows) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("rows is {}, but there are {} ids", options.rows, table.ids.rows));
  }
  table.layout = options.layout;
  if (table.layout == RowLayout::kSampleOrder) {
    table.order_seed = options.order_seed;
    choose_buckets(table, options);
  }
  return table;
}

}  // namespace

struct EmbeddingStore::Impl::Described {
  TableDescription table;
  bool exists;
  std::optional<IdSource> given;

  [[nodiscard]] IdSource source() const { return given ? *given : IdSource::range(table.ids.rows); }
};

Result<EmbeddingStore::Impl::Described> EmbeddingStore::Impl::describe(
    const EmbeddingStoreOptions& options) {
  PLIMSOLL_TRY_VOID(check_numbers(options));
  PLIMSOLL_TRY(auto given, ids_given(options));
  auto existing = read_description(options.directory);
  if (!existing && existing.error().code != ErrorCode::kNotFound) {
    return tl::unexpected(std::move(existing).error());
  }
  if (!existing && options.pinned) {
    return tl::unexpected(std::move(existing).error());
  }
  if (!existing) {
    PLIMSOLL_TRY(const auto table, describe_new(options, given));
    return Described{table, false, given};
  }
  std::optional<IdIndexInfo> info;
  if (given && existing->rows_max == 0) {
    PLIMSOLL_TRY(info, given->info());
  }
  PLIMSOLL_TRY_VOID(
      compare_description(options.directory, *existing, options, info ? &*info : nullptr));
  return Described{*existing, true, given};
}

// Whether the table in `directory` is another than `described`, or has come or gone.
Result<bool> EmbeddingStore::Impl::has_changed(const std::filesystem::path& directory,
                                               const Described& described) {
  const auto now = read_description(directory);
  if (!now) {
    return now.error().code == ErrorCode::kNotFound ? Result<bool>(described.exists)
                                                    : Result<bool>(tl::unexpected(now.error()));
  }
  return !described.exists || now->fingerprint() != described.table.fingerprint();
}

namespace {

// Errors: kInvalidArgument for rows that cannot be pinned while somebody trains.
Result<void> check_pinned(const EmbeddingStoreOptions& options, RowLayout layout) {
  if (layout == RowLayout::kSampleOrder && FolderLock::held(options.directory)) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: somebody trains in it, and rows in sample order move too fast to "
                            "be read meanwhile",
                            options.directory.string()),
                "wait until the run is at rest, or stop it (`plimsoll stop RUN`)");
  }
  return {};
}

}  // namespace

EmbeddingStore::Impl::Impl(const EmbeddingStoreOptions& options, const TableDescription& table,
                           const EmbeddingLayout& layout)
    : Engine(options, table, layout.plan, options.io_threads), layout_(layout) {}

Result<std::unique_ptr<EmbeddingStore::Engine>> EmbeddingStore::Impl::open(
    const Governor& governor, const EmbeddingStoreOptions& options) {
  if (!governor.valid()) {
    return fail(ErrorCode::kInvalidArgument, "an embedding store needs a governor");
  }
  PLIMSOLL_TRY(Described described, describe(options));
  if (options.pinned) {
    PLIMSOLL_TRY_VOID(check_pinned(options, described.table.layout));
    return open_described(governor, options, described);
  }
  PLIMSOLL_TRY(FolderLock lock, lock_table(options.directory));
  PLIMSOLL_TRY(const bool changed, has_changed(options.directory, described));
  if (changed) {  // Another process made or replaced it meanwhile; from here on none can.
    PLIMSOLL_TRY(described, describe(options));
  }
  auto engine = open_described(governor, options, described);
  if (engine) {
    (*engine)->hold(std::move(lock));
  } else if (!read_description(options.directory)) {
    lock.abandon();
  }
  return engine;
}

Result<std::unique_ptr<EmbeddingStore::Engine>> EmbeddingStore::Impl::open_described(
    const Governor& governor, const EmbeddingStoreOptions& options, const Described& described) {
  if (described.table.layout == RowLayout::kSampleOrder) {
    const IdSource source = described.source();
    return Timeline::open(governor, options, described.table, described.exists ? nullptr : &source);
  }
  PLIMSOLL_TRY(const EmbeddingLayout layout, plan_layout(described.table, options));
  auto impl = std::make_unique<Impl>(options, described.table, layout);
  PLIMSOLL_TRY_VOID(impl->take_memory(governor));
  if (!described.exists) {
    PLIMSOLL_TRY_VOID(create_table_files(options.directory, described.table, described.source(),
                                         impl->cache_->frame_memory()));
    if (impl->growing_) {
      impl->map_->files_are_zeros();
    }
  }
  PLIMSOLL_TRY_VOID(impl->open_table(options));
  PLIMSOLL_TRY_VOID(options.pinned ? impl->open_pinned(options.at_step)
                                   : impl->open_commit(options.at_step));
  Governor handle = governor;
  PLIMSOLL_TRY(impl->reclaimer_, handle.add_reclaimer(impl.get()));
  return std::unique_ptr<Engine>(std::move(impl));
}

// Divides the slab. What this takes is what plan_layout() counted.
Result<void> EmbeddingStore::Impl::take_memory(const Governor& governor) {
  PLIMSOLL_TRY_VOID(take_slab(governor));
  admission_.make_elastic();
  const GrowthShape growth = table_.growth();
  map_.emplace(shape_.pages, spare_blocks(shape_), slab_, growth.bytes());
  if (table_.rows_max > 0) {
    growing_.emplace(growth, ids_, map_->behind(), slab_);
  }
  cache_ = std::make_unique<PageCache>(PageCache::Table{.shape = shape_,
                                                        .fingerprint = table_.fingerprint(),
                                                        .init = table_.init,
                                                        .ids = &ids_,
                                                        .file = &rows_file_,
                                                        .pool = &pool_},
                                       layout_.sizes, *map_, slab_);
  take_scratch();
  records_ = slab_.take<std::byte*>(layout_.batch_rows);
  last_ = slab_.take<std::uint32_t>(layout_.batch_rows);
  hash_ = slab_.take<std::uint32_t>(layout_.hash_places);
  return {};
}

Result<void> EmbeddingStore::Impl::open_table(const EmbeddingStoreOptions& options) {
  PLIMSOLL_TRY_VOID(open_files(options, layout_.id_pages));
  PLIMSOLL_TRY(const std::int64_t rows_bytes, rows_file_.size());
  cache_->found_file(rows_bytes);
  PLIMSOLL_TRY(pins_, CommitPins::open(directory_ / table_files::kSuper, !pinned_));
  look_ahead_ = std::make_unique<LookAhead>(*cache_, ids_, growing_ ? &*growing_ : nullptr,
                                            shape_.rows_per_page, layout_.queue_ids, slab_);
  const BlockedSignals blocked;
  write_back_ = std::jthread([this] { write_back(); });
  return {};
}

// Until the cache is stopped.
void EmbeddingStore::Impl::write_back() noexcept {
  enter_background("pl-back");
  try {
    while (cache_->write_back()) {
    }
  } catch (const std::exception& problem) {
    // A broken invariant, or no memory for an error's text: the owner is told at its next call.
    cache_->poison(make_error(ErrorCode::kInternal, problem.what()));
  }
}

Result<void> EmbeddingStore::Impl::open_commit(std::int64_t at_step) {
  PLIMSOLL_TRY(const int slot, choose_commit(shape_.pages, at_step));
  if (slot < 0) {
    return {};
  }
  PLIMSOLL_TRY_VOID(read_map(slot));
  PLIMSOLL_TRY_VOID(super_.settle(slot));
  opened(slot);
  const int other = other_slot();
  if (!holds_commit(other)) {
    return {};
  }
  auto kept = keep_other_commit(other);
  if (!kept && kept.error().code == ErrorCode::kCorrupt) {  // Damaged: it is gone.
    map_->forget(other);
    map_->mark_unknown(superblock(other).map);
    return {};
  }
  return kept;
}

Result<void> EmbeddingStore::Impl::read_map(int slot) {
  const int number = superblock(slot).map;
  const auto bytes = map_->bytes();
  if (!map_file(number).valid()) {
    return bad_map(slot, "is not there");
  }
  PLIMSOLL_TRY_VOID(map_file(number).read_at(0, bytes));
  if (chain_root(0, bytes) != superblock(slot).map_crc) {
    return bad_map(slot, "fails its checksum");
  }
  auto adopted = map_->adopt(slot);
  if (adopted) {
    map_->mark_same(number);
    adopted = growing_ ? growing_->adopt() : adopted;
  }
  return adopted ? adopted : bad_map(slot, *adopted.error().detail);
}

// Marks the blocks of the commit that was not opened, reading its page table a piece at a time.
Result<void> EmbeddingStore::Impl::keep_other_commit(int slot) {
  const auto total = static_cast<std::int64_t>(map_->bytes().size());
  const std::int64_t pages_end = map_bytes(shape_.pages);  // What is behind them names no blocks.
  constexpr auto kUnit = static_cast<std::size_t>(kBlockUnit);
  const auto scratch = cache_->scratch();  // Whole pages, and pages are whole units.
  const int number = superblock(slot).map;
  const File& file = map_file(number);
  map_->mark_same(number);
  std::uint32_t crc = 0;
  for (std::int64_t done = 0; done < total;) {
    const auto size = std::min(total - done, static_cast<std::int64_t>(scratch.size()));
    const auto piece = scratch.first(static_cast<std::size_t>(size));
    PLIMSOLL_TRY_VOID(file.read_at(done, piece));
    crc = chain_root(crc, piece);
    for (std::int64_t unit = 0; unit < size; unit += kBlockUnit) {
      const auto one = piece.subspan(static_cast<std::size_t>(unit), kUnit);
      if (std::memcmp(one.data(), map_->bytes().data() + done + unit, kUnit) != 0) {
        map_->mark_stale(number, (done + unit) / kBlockUnit);
      }
    }
    const auto entries = static_cast<std::size_t>(
        std::clamp<std::int64_t>((pages_end - done) / static_cast<std::int64_t>(sizeof(BlockEntry)),
                                 0, size / static_cast<std::int64_t>(sizeof(BlockEntry))));
    PLIMSOLL_TRY_VOID(
        map_->keep(slot, {reinterpret_cast<const BlockEntry*>(piece.data()), entries}));
    done += size;
  }
  if (crc != superblock(slot).map_crc) {
    return fail(ErrorCode::kCorrupt, file.path().string());
  }
  return {};
}

// Opens a commit to read it, while another process may train.
//
// The commit is pinned first, and only then looked for: from then on whoever trains either sees the
// pin, or has replaced the commit already and is seen to have. What it refers to is then neither
// written nor freed, but for want of room on disk; a page that was written all the same fails its
// checksum, which is by page and by block, and never passes for the commit's.
Result<void> EmbeddingStore::Impl::open_pinned(std::int64_t at_step) {
  constexpr int kTriesMost = 16;  // Each is in vain only if what it chose was replaced just then.
  for (int left = kTriesMost;; --left) {
    auto done = pin_commit(at_step);
    if (done && *done) {
      return {};
    }
    if (left == 1 || (!done && done.error().code != ErrorCode::kCorrupt)) {
      return done ? fail(ErrorCode::kNotFound,
                         fmt::format("{}: its commits are replaced faster than they can be opened",
                                     directory_.string()),
                         "try again")
                  : Result<void>(tl::unexpected(std::move(done).error()));
    }
    // A superblock or a page table half written is no damage yet: its commit may be under way.
    pins_.await(0);
    pins_.await(1);
  }
}

// False: the commit was replaced meanwhile.
Result<bool> EmbeddingStore::Impl::pin_commit(std::int64_t at_step) {
  const auto path = directory_ / table_files::kSuper;
  PLIMSOLL_TRY(super_, SuperFile::open(path, false));
  PLIMSOLL_TRY(const int slot, choose_commit(shape_.pages, at_step));
  if (slot < 0) {
    return true;  // Every row is as it began.
  }
  const std::int64_t step = superblock(slot).step;
  pins_.pin(step);
  pins_.await(slot);
  PLIMSOLL_TRY(super_, SuperFile::open(path, false));
  if (!holds_commit(slot) || superblock(slot).step != step) {
    return false;
  }
  PLIMSOLL_TRY_VOID(read_map(slot));
  opened(slot);
  return true;
}

Result<SlabPlan> EmbeddingStore::plan(const EmbeddingStoreOptions& options) {
  PLIMSOLL_TRY(const Impl::Described described, Impl::describe(options));
  if (described.table.layout == RowLayout::kSampleOrder) {
    PLIMSOLL_TRY(const TimelineLayout layout,
                 plan_timeline(described.table, described.exists, options));
    return layout.plan;
  }
  PLIMSOLL_TRY(const EmbeddingLayout layout, plan_layout(described.table, options));
  return layout.plan;
}

}  // namespace plimsoll
