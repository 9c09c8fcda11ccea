// SPDX-License-Identifier: Apache-2.0
//
// FeatureStore: reads records by ordinal or id through a block cache inside one slab.
//
// A request is taken in sweeps of at most 4096 records, sorted by block: one pass over the file. Of
// at most 256 blocks at a time the missing ones are read together, neighbours at once, and the rows
// copied to their places in the request. Block checksums, ids, group offsets and the places of
// compressed blocks are tables (feature_table.h): in the slab as a whole while that takes at most
// an eighth of it each, else read through the same frames as the records.
//
// Reading order: include/plimsoll/feature_store.h, feature_format.h, feature_plan.h,
//                feature_cache.h, this file.
//
// Threads: reads are thread-safe; no lock is held across I/O or a copy of rows.
// Memory:  one slab, divided by plan_feature_slab(). A sweep lives on the reader's stack: about
//          120 KiB, 200 KiB when a table is paged.
#include "plimsoll/feature_store.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <utility>

#include <fmt/core.h>

#include "base/check.h"
#include "base/round.h"
#include "memory/admission.h"
#include "memory/slab.h"
#include "os/file.h"
#include "os/fork.h"
#include "os/io_pool.h"
#include "store/feature_block_reader.h"
#include "store/feature_cache.h"
#include "store/feature_format.h"
#include "store/feature_plan.h"
#include "store/feature_table.h"
#include "store/id_index.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kChunk = static_cast<std::size_t>(BlockCache::kPinsMax);
constexpr std::size_t kSweep = 4096;  // Records put in the order of the file at once.

// One table of the store: absent (0 entries), in the slab, or behind the cache.
struct Table {
  int source{0};
  std::int64_t width{8};
  std::int64_t entries{0};
  std::span<const std::byte> resident{};
};

}  // namespace

class FeatureStore::Impl : public Reclaimer {
 public:
  Impl(Governor governor, fs::path directory, FeatureHeader header, int io_threads)
      : governor_(std::move(governor)),
        directory_(std::move(directory)),
        header_(std::move(header)),
        info_(header_.info(directory_)),
        pool_(io_threads) {}
  [[nodiscard]] const ForkMark& mark() const noexcept { return mark_; }
  [[nodiscard]] Result<void> check_process(const char* call) const {
    return mark_.check(directory_, call);
  }
  ~Impl() override {
    reclaimer_ = {};
    cache_.reset();
    reader_.reset();
    ids_ = IdIndex();
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Result<void> start(const FeatureStoreOptions& options);
  Result<void> read_ordinals(std::span<const std::int64_t> ordinals, std::span<const int> columns,
                             std::span<const std::span<std::byte>> out);
  Result<void> read(std::span<const std::int64_t> ids, std::span<const int> columns,
                    std::span<const std::span<std::byte>> out);
  Result<void> prefetch_ordinals(std::span<const std::int64_t> ordinals);
  Result<void> ordinals_of(std::span<const std::int64_t> ids, std::span<std::int64_t> out);
  Result<void> ids_of(std::span<const std::int64_t> ordinals, std::span<std::int64_t> out);
  Result<std::pair<std::int64_t, std::int64_t>> group(std::int64_t group);

  [[nodiscard]] const FeatureInfo& info() const noexcept { return info_; }
  [[nodiscard]] FeatureStats stats() const;
  [[nodiscard]] const FeaturePlan& plan() const noexcept { return shares_.plan; }
  std::int64_t shrink(std::int64_t wanted_bytes) noexcept { return cache_->shrink(wanted_bytes); }
  std::int64_t grow_back(std::int64_t room_bytes) noexcept override {
    return cache_->grow_back(room_bytes);
  }

  std::int64_t reclaim(PressureMove move, std::int64_t wanted_bytes) noexcept override {
    return move == PressureMove::kShrink ? shrink(wanted_bytes) : 0;
  }
  [[nodiscard]] const char* name() const noexcept override { return "features"; }

 private:
  Result<void> open_files();
  Result<std::span<const std::byte>> load_table(File& file, const SideFile& side);
  Result<void> check_request(std::span<const std::int64_t> ordinals, std::span<const int> columns,
                             std::span<const std::span<std::byte>> out) const;
  Result<void> check_ordinals(std::span<const std::int64_t> ordinals) const;
  Result<void> locate_blocks(std::span<const std::int64_t> blocks, std::span<StoredBlock> stored);
  template <class BlockOf, class Visit>
  Result<void> visit_blocks(int source, std::size_t count, BlockOf block_of, Visit visit,
                            bool ahead = false);
  template <class Visit>
  Result<void> visit_records(std::span<const std::int64_t> ordinals, Visit visit,
                             bool ahead = false);
  template <class IndexOf, class Sink>
  Result<void> read_table(const Table& table, std::size_t count, IndexOf index_of, Sink sink);

  const ForkMark mark_;
  Governor governor_;
  fs::path directory_;
  FeatureHeader header_;
  FeatureInfo info_;
  FeatureShares shares_{};
  Admission admission_;
  IoPool pool_;
  Slab slab_;
  std::array<File, BlockCache::kSources> files_{};
  Table checksums_{};
  Table id_table_{};
  Table group_table_{};
  Table block_table_{};
  IdIndex ids_;
  std::unique_ptr<BlockReader> reader_;
  std::unique_ptr<BlockCache> cache_;
  std::atomic<std::int64_t> requests_{0};   // Written by readers, read by stats(); order is free.
  std::atomic<std::int64_t> hits_{0};       // As requests_.
  std::atomic<std::int64_t> delivered_{0};  // As requests_: bytes.
  ReclaimerHandle reclaimer_;
};

// ---- opening ----

Result<void> FeatureStore::Impl::start(const FeatureStoreOptions& options) {
  PLIMSOLL_TRY(shares_, plan_feature_slab(header_, options));
  const std::int64_t slab_bytes = round_up(shares_.plan.total_bytes, kFeaturePage);
  PLIMSOLL_TRY_VOID(admission_.take(governor_, Tag::kFeature, slab_bytes, "cache_bytes"));
  PLIMSOLL_TRY(slab_, Slab::create(governor_, Tag::kFeature, slab_bytes));
  admission_.make_elastic();
  PLIMSOLL_TRY_VOID(open_files());
  PLIMSOLL_TRY(reclaimer_, governor_.add_reclaimer(this));
  return {};
}

Result<void> FeatureStore::Impl::open_files() {
  std::array<BlockSource, BlockCache::kSources> sources{};
  const auto open = [&](FeatureSource source, const char* name,
                        std::int64_t bytes) -> Result<void> {
    if (bytes > 0) {
      File& file = files_[source];
      PLIMSOLL_TRY(file, File::open(directory_ / name, FileMode::kRead, true));
      sources[source] = {.file = &file, .bytes = bytes, .self_checked = source != kRecords};
    }
    return {};
  };
  PLIMSOLL_TRY_VOID(open(kRecords, kFeatureRecordsFile, header_.records_file_bytes()));
  PLIMSOLL_TRY_VOID(open(kChecksums, kFeatureChecksumsFile, header_.checksums.bytes));
  PLIMSOLL_TRY_VOID(open(kIds, kFeatureIdsFile, header_.id_table.bytes));
  PLIMSOLL_TRY_VOID(open(kGroups, kFeatureGroupsFile, header_.group_table.bytes));
  PLIMSOLL_TRY_VOID(open(kBlocks, kFeatureBlocksFile, header_.stored.blocks.bytes));
  checksums_ = {.source = kChecksums, .width = 4, .entries = header_.blocks()};
  id_table_ = {.source = kIds, .entries = header_.ids.dense ? 0 : header_.rows};
  group_table_ = {.source = kGroups,
                  .entries = header_.group_table.bytes > 0 ? header_.groups + 1 : 0};
  block_table_ = {.source = kBlocks, .entries = header_.compressed() ? header_.blocks() + 1 : 0};
  for (const auto& [table, side] :
       {std::pair{&checksums_, &header_.checksums}, std::pair{&id_table_, &header_.id_table},
        std::pair{&group_table_, &header_.group_table},
        std::pair{&block_table_, &header_.stored.blocks}}) {
    const auto source = static_cast<std::size_t>(table->source);
    if (shares_.resident[source]) {
      PLIMSOLL_TRY(table->resident, load_table(files_[source], *side));
    }
  }
  PLIMSOLL_TRY(ids_, IdIndex::open(directory_, kFeatureIndexName, header_.ids, slab_,
                                   shares_.id_pages, pool_));
  reader_ = std::make_unique<BlockReader>(slab_, pool_, shares_.lanes);
  cache_ = std::make_unique<BlockCache>(slab_, *reader_, sources, shares_.frames,
                                        header_.layout.block_bytes);
  return {};
}

Result<std::span<const std::byte>> FeatureStore::Impl::load_table(File& file,
                                                                  const SideFile& side) {
  const auto pages = slab_.take<std::byte>(side.bytes, kFeaturePage);
  PLIMSOLL_TRY_VOID(file.read_at(0, pages));
  PLIMSOLL_TRY_VOID(check_table_pages(pages, 0, file.path()));
  if (fold_table_crc(pages, 0) != side.crc) {
    return fail(ErrorCode::kCorrupt,
                fmt::format("{}: not the file that {} names (its checksum differs)",
                            file.path().string(), kFeatureHeaderFile));
  }
  return std::span<const std::byte>(pages);
}

// ---- reading ----

// Calls visit(i, bytes of block block_of(i), whether it was there) for i in [0, count), in the
// order of the file. The block stays pinned during the call.
template <class BlockOf, class Visit>
Result<void> FeatureStore::Impl::visit_blocks(int source, std::size_t count, BlockOf block_of,
                                              Visit visit, bool ahead) {
  struct Entry {
    std::int64_t block;
    std::size_t index;
  };
  std::array<Entry, kSweep> entries;
  std::array<std::int64_t, kChunk> blocks;
  std::array<StoredBlock, kChunk> stored;
  std::array<std::uint32_t, kChunk> frames;
  std::array<bool, kChunk> hits;
  for (std::size_t begin = 0; begin < count; begin += kSweep) {
    const std::size_t size = std::min(kSweep, count - begin);
    for (std::size_t i = 0; i < size; ++i) {
      entries[i] = {block_of(begin + i), begin + i};
    }
    std::sort(entries.begin(), entries.begin() + static_cast<std::ptrdiff_t>(size),
              [](const Entry& a, const Entry& b) {
                return a.block != b.block ? a.block < b.block : a.index < b.index;
              });
    std::size_t entry = 0;
    while (entry < size) {
      std::size_t distinct = 0;
      for (std::size_t i = entry; i < size && distinct < kChunk; ++i) {
        if (distinct == 0 || blocks[distinct - 1] != entries[i].block) {
          blocks[distinct++] = entries[i].block;
        }
      }
      const bool located = source == kRecords;
      if (located) {
        PLIMSOLL_TRY_VOID(locate_blocks(std::span(blocks).first(distinct), stored));
      }
      for (std::size_t done = 0; done < distinct;) {
        const std::int64_t reserved = cache_->reserve(static_cast<std::int64_t>(distinct - done));
        const auto part = static_cast<std::size_t>(reserved);
        auto pinned = cache_->pin(source, std::span(blocks).subspan(done, part),
                                  located ? std::span<const StoredBlock>(stored).subspan(done, part)
                                          : std::span<const StoredBlock>{},
                                  frames, hits, ahead);
        if (!pinned) {
          cache_->release(reserved);
          return pinned;
        }
        for (std::size_t b = 0; b < part; ++b) {
          const std::byte* bytes = cache_->bytes(frames[b]);
          for (; entry < size && entries[entry].block == blocks[done + b]; ++entry) {
            visit(entries[entry].index, bytes, hits[b]);
          }
        }
        cache_->unpin(std::span(frames).first(part));
        cache_->release(reserved);
        done += part;
      }
    }
  }
  return {};
}

// Calls sink(i, entry index_of(i) of the table).
template <class IndexOf, class Sink>
Result<void> FeatureStore::Impl::read_table(const Table& table, std::size_t count, IndexOf index_of,
                                            Sink sink) {
  if (!table.resident.empty()) {
    for (std::size_t i = 0; i < count; ++i) {
      sink(i,
           load_table_entry(table.resident.data() + feature_table_offset(index_of(i), table.width),
                            table.width));
    }
    return {};
  }
  const std::int64_t block_bytes = cache_->block_bytes();
  return visit_blocks(
      table.source, count,
      [&](std::size_t i) { return feature_table_offset(index_of(i), table.width) / block_bytes; },
      [&](std::size_t i, const std::byte* block, bool) {
        const std::int64_t offset = feature_table_offset(index_of(i), table.width);
        sink(i, load_table_entry(block + offset % block_bytes, table.width));
      });
}

// Where blocks stand and what their checksums are.
Result<void> FeatureStore::Impl::locate_blocks(std::span<const std::int64_t> blocks,
                                               std::span<StoredBlock> stored) {
  const std::int64_t block_bytes = header_.layout.block_bytes;
  if (header_.compressed()) {
    std::array<std::uint64_t, 2 * kChunk> entries;  // Of a block and of the one after it.
    PLIMSOLL_TRY_VOID(read_table(
        block_table_, 2 * blocks.size(),
        [&](std::size_t i) { return blocks[i / 2] + static_cast<std::int64_t>(i % 2); },
        [&](std::size_t i, std::uint64_t entry) { entries[i] = entry; }));
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      PLIMSOLL_TRY(stored[i], parse_block_entries(entries[2 * i], entries[2 * i + 1], block_bytes,
                                                  header_.stored.records_bytes, blocks[i],
                                                  files_[kBlocks].path()));
    }
  } else {
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      stored[i] = {.offset = blocks[i] * block_bytes, .bytes = block_bytes};
    }
  }
  return read_table(
      checksums_, blocks.size(), [&](std::size_t i) { return blocks[i]; },
      [&](std::size_t i, std::uint64_t crc) { stored[i].crc = static_cast<std::uint32_t>(crc); });
}

Result<void> FeatureStore::Impl::check_ordinals(std::span<const std::int64_t> ordinals) const {
  for (const std::int64_t ordinal : ordinals) {
    if (ordinal < 0 || ordinal >= header_.rows) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("{}: there is no record {}; ordinals are 0 to {}",
                              directory_.string(), ordinal, header_.rows - 1));
    }
  }
  return {};
}

Result<void> FeatureStore::Impl::check_request(std::span<const std::int64_t> ordinals,
                                               std::span<const int> columns,
                                               std::span<const std::span<std::byte>> out) const {
  if (columns.size() != out.size() || columns.size() > kFeatureColumnsMax) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{} columns were asked for, {} outputs given (at most {})",
                            columns.size(), out.size(), kFeatureColumnsMax));
  }
  for (std::size_t k = 0; k < columns.size(); ++k) {
    const auto all = static_cast<int>(info_.columns.size());
    if (columns[k] < 0 || columns[k] >= all) {
      return fail(ErrorCode::kInvalidArgument, fmt::format("{}: there is no column {}; it has {}",
                                                           directory_.string(), columns[k], all));
    }
    const ColumnSpec& column = info_.columns[static_cast<std::size_t>(columns[k])];
    if (out[k].size() != ordinals.size() * static_cast<std::size_t>(column.bytes())) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("column \"{}\": the output has {} bytes, {} records need {} each",
                              column.name, out[k].size(), ordinals.size(), column.bytes()));
    }
  }
  return check_ordinals(ordinals);
}

Result<void> FeatureStore::Impl::read_ordinals(std::span<const std::int64_t> ordinals,
                                               std::span<const int> columns,
                                               std::span<const std::span<std::byte>> out) {
  PLIMSOLL_TRY_VOID(check_request(ordinals, columns, out));
  struct Piece {
    std::size_t offset;
    std::size_t bytes;
    std::byte* out;
  };
  std::array<Piece, kFeatureColumnsMax> pieces;
  for (std::size_t k = 0; k < columns.size(); ++k) {
    const auto column = static_cast<std::size_t>(columns[k]);
    pieces[k] = {static_cast<std::size_t>(header_.layout.offsets[column]),
                 static_cast<std::size_t>(info_.columns[column].bytes()), out[k].data()};
  }
  std::int64_t hits = 0;
  PLIMSOLL_TRY_VOID(
      visit_records(ordinals, [&](std::size_t i, const std::byte* record, bool was_there) {
        hits += was_there ? 1 : 0;
        for (std::size_t k = 0; k < columns.size(); ++k) {
          const Piece& piece = pieces[k];
          std::memcpy(piece.out + i * piece.bytes, record + piece.offset, piece.bytes);
        }
      }));
  const auto rows = static_cast<std::int64_t>(ordinals.size());
  std::int64_t row_bytes = 0;
  for (std::size_t k = 0; k < columns.size(); ++k) {
    row_bytes += static_cast<std::int64_t>(pieces[k].bytes);
  }
  requests_.fetch_add(rows, std::memory_order_relaxed);
  hits_.fetch_add(hits, std::memory_order_relaxed);
  delivered_.fetch_add(rows * row_bytes, std::memory_order_relaxed);
  return {};
}

// As visit_blocks(), with the bytes of record ordinals[i].
template <class Visit>
Result<void> FeatureStore::Impl::visit_records(std::span<const std::int64_t> ordinals, Visit visit,
                                               bool ahead) {
  const std::int64_t per_block = header_.layout.records_per_block;
  const std::int64_t stride = header_.layout.stride;
  return visit_blocks(
      kRecords, ordinals.size(), [&](std::size_t i) { return ordinals[i] / per_block; },
      [&](std::size_t i, const std::byte* block, bool was_there) {
        visit(i, block + ordinals[i] % per_block * stride, was_there);
      },
      ahead);
}

Result<void> FeatureStore::Impl::prefetch_ordinals(std::span<const std::int64_t> ordinals) {
  PLIMSOLL_TRY_VOID(check_ordinals(ordinals));
  return visit_records(
      ordinals, [](std::size_t, const std::byte*, bool) {}, /*ahead=*/true);
}

Result<void> FeatureStore::Impl::ordinals_of(std::span<const std::int64_t> ids,
                                             std::span<std::int64_t> out) {
  if (ids.size() != out.size()) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{} ids, room for {} ordinals", ids.size(), out.size()));
  }
  PLIMSOLL_TRY_VOID(ids_.find(ids, out));
  const auto missing = std::find(out.begin(), out.end(), -1);
  if (missing != out.end()) {
    return fail(ErrorCode::kNotFound,
                fmt::format("{}: there is no record with id {} (it holds {})", directory_.string(),
                            ids[static_cast<std::size_t>(missing - out.begin())], header_.rows));
  }
  return {};
}

Result<void> FeatureStore::Impl::read(std::span<const std::int64_t> ids,
                                      std::span<const int> columns,
                                      std::span<const std::span<std::byte>> out) {
  std::array<std::int64_t, kSweep> ordinals;
  std::array<std::span<std::byte>, kFeatureColumnsMax> parts;
  // Sizes are checked against the whole request first: the parts below are cut from it.
  if (columns.size() > parts.size() || columns.size() != out.size()) {
    return check_request({}, columns, out);
  }
  for (std::size_t begin = 0; begin < ids.size(); begin += ordinals.size()) {
    const std::size_t size = std::min(ordinals.size(), ids.size() - begin);
    PLIMSOLL_TRY_VOID(ordinals_of(ids.subspan(begin, size), std::span(ordinals).first(size)));
    for (std::size_t k = 0; k < out.size(); ++k) {
      const std::size_t each = out[k].size() / ids.size();
      parts[k] = out[k].size() == each * ids.size() ? out[k].subspan(begin * each, size * each)
                                                    : std::span<std::byte>{};
    }
    PLIMSOLL_TRY_VOID(read_ordinals(std::span(ordinals).first(size), columns,
                                    std::span(parts).first(columns.size())));
  }
  return {};
}

Result<void> FeatureStore::Impl::ids_of(std::span<const std::int64_t> ordinals,
                                        std::span<std::int64_t> out) {
  if (ordinals.size() != out.size()) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{} ordinals, room for {} ids", ordinals.size(), out.size()));
  }
  PLIMSOLL_TRY_VOID(check_ordinals(ordinals));
  if (header_.ids.dense) {
    std::copy(ordinals.begin(), ordinals.end(), out.begin());
    return {};
  }
  return read_table(
      id_table_, ordinals.size(), [&](std::size_t i) { return ordinals[i]; },
      [&](std::size_t i, std::uint64_t id) { out[i] = static_cast<std::int64_t>(id); });
}

Result<std::pair<std::int64_t, std::int64_t>> FeatureStore::Impl::group(std::int64_t group) {
  if (group < 0 || group >= header_.groups) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: there is no group {}; it has {}", directory_.string(), group,
                            header_.groups));
  }
  if (header_.uniform_group > 0) {
    return std::pair{group * header_.uniform_group, header_.uniform_group};
  }
  std::array<std::int64_t, 2> bounds{};
  PLIMSOLL_TRY_VOID(read_table(
      group_table_, 2, [&](std::size_t i) { return group + static_cast<std::int64_t>(i); },
      [&](std::size_t i, std::uint64_t at) { bounds[i] = static_cast<std::int64_t>(at); }));
  return std::pair{bounds[0], bounds[1] - bounds[0]};
}

FeatureStats FeatureStore::Impl::stats() const {
  const BlockCacheStats cache = cache_->stats();
  FeatureStats stats;
  stats.requests = requests_.load(std::memory_order_relaxed);
  stats.hits = hits_.load(std::memory_order_relaxed);
  stats.blocks_read = cache.blocks_read;
  stats.reads = cache.reads;
  stats.bytes_read = cache.bytes_read;
  stats.bytes_delivered = delivered_.load(std::memory_order_relaxed);
  stats.joined = cache.joined;
  stats.stall_ns = cache.stall_ns;
  stats.frames = cache.frames;
  stats.resident_frames = cache.resident_frames;
  return stats;
}

// ---- the public face ----

FeatureStore::FeatureStore(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
FeatureStore::FeatureStore(FeatureStore&&) noexcept = default;
FeatureStore& FeatureStore::operator=(FeatureStore&& other) noexcept {
  std::swap(impl_, other.impl_);
  other.close();
  return *this;
}
FeatureStore::~FeatureStore() {
  close();
}
void FeatureStore::close() noexcept {
  if (impl_ != nullptr) {
    destroy_if_own(impl_, impl_->mark());
  }
}

Result<FeatureStore> FeatureStore::open(Governor governor, const FeatureStoreOptions& options) {
  if (options.io_threads < 0 || options.io_threads > 64 || options.cache_bytes < 0 ||
      options.join_gap_bytes < 0) {
    return fail(
        ErrorCode::kInvalidArgument,
        fmt::format("io_threads = {} must be 0 to 64, cache_bytes = {} and join_gap_bytes = "
                    "{} at least 0",
                    options.io_threads, options.cache_bytes, options.join_gap_bytes));
  }
  PLIMSOLL_TRY(FeatureHeader header, read_feature_header(options.directory));
  if (header.compressed()) {
    PLIMSOLL_TRY_VOID(require_lz4(options.directory));
  }
  auto impl = std::make_unique<Impl>(std::move(governor), options.directory, std::move(header),
                                     options.io_threads);
  PLIMSOLL_TRY_VOID(impl->start(options));
  return FeatureStore(std::move(impl));
}

Result<void> FeatureStore::read_ordinals(std::span<const std::int64_t> ordinals,
                                         std::span<const int> columns,
                                         std::span<const std::span<std::byte>> out) {
  PLIMSOLL_TRY_VOID(impl_->check_process("read_ordinals"));
  return impl_->read_ordinals(ordinals, columns, out);
}

Result<void> FeatureStore::read(std::span<const std::int64_t> ids, std::span<const int> columns,
                                std::span<const std::span<std::byte>> out) {
  PLIMSOLL_TRY_VOID(impl_->check_process("read"));
  return impl_->read(ids, columns, out);
}

Result<void> FeatureStore::prefetch_ordinals(std::span<const std::int64_t> ordinals) {
  PLIMSOLL_TRY_VOID(impl_->check_process("prefetch_ordinals"));
  return impl_->prefetch_ordinals(ordinals);
}

Result<void> FeatureStore::ordinals_of(std::span<const std::int64_t> ids,
                                       std::span<std::int64_t> out) {
  PLIMSOLL_TRY_VOID(impl_->check_process("ordinals_of"));
  return impl_->ordinals_of(ids, out);
}

Result<void> FeatureStore::ids_of(std::span<const std::int64_t> ordinals,
                                  std::span<std::int64_t> out) {
  PLIMSOLL_TRY_VOID(impl_->check_process("ids_of"));
  return impl_->ids_of(ordinals, out);
}

Result<std::pair<std::int64_t, std::int64_t>> FeatureStore::group(std::int64_t group) {
  PLIMSOLL_TRY_VOID(impl_->check_process("group"));
  return impl_->group(group);
}

Result<int> FeatureStore::column(const std::string& name) const {
  PLIMSOLL_TRY_VOID(impl_->check_process("column"));
  std::string known;
  for (std::size_t k = 0; k < info().columns.size(); ++k) {
    if (info().columns[k].name == name) {
      return static_cast<int>(k);
    }
    known += (k == 0 ? "" : ", ") + info().columns[k].name;
  }
  return fail(ErrorCode::kNotFound,
              fmt::format("there is no column \"{}\"; the store has {}", name, known));
}

const FeatureInfo& FeatureStore::info() const noexcept {
  return impl_->info();
}

FeatureStats FeatureStore::stats() const {
  return impl_->mark().forked() ? FeatureStats{} : impl_->stats();
}

FeaturePlan FeatureStore::plan() const noexcept {
  return impl_->plan();
}

std::int64_t FeatureStore::shrink(std::int64_t wanted_bytes) noexcept {
  return impl_->mark().forked() ? 0 : impl_->shrink(wanted_bytes);
}
std::int64_t FeatureStore::grow_back(std::int64_t wanted_bytes) noexcept {
  return impl_->mark().forked() ? 0 : impl_->grow_back(wanted_bytes);
}

}  // namespace plimsoll
