// SPDX-License-Identifier: Apache-2.0
//
// FeatureStore: opening, ids and groups, and the public face. See feature_store_impl.h.
#include "plimsoll/feature_store.h"

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include <fmt/core.h>

#include "base/check.h"
#include "base/round.h"
#include "store/feature_block.h"
#include "store/feature_format.h"
#include "store/feature_store_impl.h"

namespace plimsoll {

// ---- opening ----

Result<void> FeatureStore::Impl::start(const FeatureStoreOptions& options) {
  PLIMSOLL_TRY(shares_, plan_feature_slab(parts_, options));
  const std::int64_t slab_bytes = round_up(shares_.plan.total_bytes, kFeaturePage);
  PLIMSOLL_TRY_VOID(admission_.take(governor_, Tag::kFeature, slab_bytes, "cache_bytes"));
  PLIMSOLL_TRY(slab_, Slab::create(governor_, Tag::kFeature, slab_bytes));
  admission_.make_elastic();
  PLIMSOLL_TRY_VOID(open_files());
  PLIMSOLL_TRY(reclaimer_, governor_.add_reclaimer(this));
  return {};
}

Result<void> FeatureStore::Impl::open_files() {
  open_.resize(parts_.parts.size());
  std::vector<BlockSource> sources(open_.size() * kFeatureSources);
  for (std::size_t p = 0; p < open_.size(); ++p) {
    PLIMSOLL_TRY_VOID(open_part(parts_.parts[p], open_[p],
                                std::span(sources).subspan(p * kFeatureSources, kFeatureSources)));
  }
  for (std::size_t p = 0; p < open_.size(); ++p) {
    const FeaturePart& part = parts_.parts[p];
    PLIMSOLL_TRY(open_[p].ids, IdIndex::open(part.directory, kFeatureIndexName, part.header.ids,
                                             slab_, shares_.id_pages[p], pool_));
  }
  reader_ = std::make_unique<BlockReader>(slab_, pool_, shares_.lanes);
  cache_ = std::make_unique<BlockCache>(slab_, *reader_, std::move(sources), shares_.frames,
                                        header_.layout.block_bytes);
  return {};
}

Result<void> FeatureStore::Impl::open_part(const FeaturePart& part, OpenPart& open,
                                           std::span<BlockSource> sources) {
  for (const auto& [source, name] :
       {std::pair{kRecords, kFeatureRecordsFile}, std::pair{kChecksums, kFeatureChecksumsFile},
        std::pair{kBlocks, kFeatureBlocksFile}, std::pair{kIds, kFeatureIdsFile},
        std::pair{kGroups, kFeatureGroupsFile}, std::pair{kPlaces, kFeaturePlacesFile},
        std::pair{kLengths, kFeatureLengthsFile}}) {
    const std::int64_t bytes = source == kRecords ? part.header.records_file_bytes()
                                                  : side_file(part.header, source).bytes;
    if (bytes == 0) {
      continue;
    }
    File& file = open.files[source];
    PLIMSOLL_TRY(file, File::open(part.directory / name, FileMode::kRead, true));
    sources[source] = {.file = &file, .bytes = bytes};
    if (source != kRecords && shares_.resident[source]) {
      PLIMSOLL_TRY(open.tables[source], load_table(file, side_file(part.header, source)));
    }
  }
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

// ---- ids and groups ----

Result<void> FeatureStore::Impl::find(std::span<const std::int64_t> ids,
                                      std::span<std::int64_t> ordinals) {
  if (ids.size() != ordinals.size()) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{} ids, room for {} ordinals", ids.size(), ordinals.size()));
  }
  PLIMSOLL_TRY_VOID(open_.front().ids.find(ids, ordinals));
  std::array<std::int64_t, kSweep> found;  // By the parts before.
  for (std::size_t p = 1; p < open_.size(); ++p) {
    for (std::size_t begin = 0; begin < ids.size(); begin += kSweep) {
      const std::size_t size = std::min(kSweep, ids.size() - begin);
      const auto out = ordinals.subspan(begin, size);
      std::copy(out.begin(), out.end(), found.begin());
      PLIMSOLL_TRY_VOID(open_[p].ids.find_rest(ids.subspan(begin, size), out));
      for (std::size_t i = 0; i < size; ++i) {
        out[i] += found[i] < 0 && out[i] >= 0 ? parts_.parts[p].first_row : 0;
      }
    }
  }
  return {};
}

Result<void> FeatureStore::Impl::ordinals_of(std::span<const std::int64_t> ids,
                                             std::span<std::int64_t> out) {
  PLIMSOLL_TRY_VOID(find(ids, out));
  const auto missing = std::find(out.begin(), out.end(), -1);
  if (missing != out.end()) {
    return fail(ErrorCode::kNotFound,
                fmt::format("{}: there is no record with id {} (it holds {})", directory_.string(),
                            ids[static_cast<std::size_t>(missing - out.begin())], info_.rows));
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
  const auto dense = [&](const Place& place) { return parts_.parts[place.part].header.ids.dense; };
  for (std::size_t i = 0; i < ordinals.size(); ++i) {
    out[i] = place_of(ordinals[i]).index;  // The id itself where ids are dense.
  }
  return read_table(
      kIds, ordinals.size(),
      [&](std::size_t i) {
        const Place place = place_of(ordinals[i]);
        return dense(place) ? Place{kNowhere, 0} : place;
      },
      [&](std::size_t i, std::uint64_t id) { out[i] = static_cast<std::int64_t>(id); });
}

Result<std::pair<std::int64_t, std::int64_t>> FeatureStore::Impl::group(std::int64_t group) {
  if (group < 0 || group >= info_.groups) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("{}: there is no group {}; it has {}",
                                                         directory_.string(), group, info_.groups));
  }
  std::size_t p = open_.size() - 1;
  while (parts_.parts[p].first_group > group) {
    --p;
  }
  const FeaturePart& part = parts_.parts[p];
  const std::int64_t local = group - part.first_group;
  if (const std::int64_t size = part.header.uniform_group; size > 0) {
    return std::pair{part.first_row + local * size, size};
  }
  std::array<std::int64_t, 2> bounds{};
  PLIMSOLL_TRY_VOID(read_table(
      kGroups, 2,
      [&](std::size_t i) {
        return Place{p, local + static_cast<std::int64_t>(i)};
      },
      [&](std::size_t i, std::uint64_t at) { bounds[i] = static_cast<std::int64_t>(at); }));
  return std::pair{part.first_row + bounds[0], bounds[1] - bounds[0]};
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
      options.join_gap_bytes < 0 || options.parts < 0) {
    return fail(
        ErrorCode::kInvalidArgument,
        fmt::format("io_threads = {} must be 0 to 64, cache_bytes = {}, join_gap_bytes = {} and "
                    "parts = {} at least 0",
                    options.io_threads, options.cache_bytes, options.join_gap_bytes,
                    options.parts));
  }
  for (;;) {  // Again only after a join, which takes as long as copying the store.
    PLIMSOLL_TRY(FeatureParts parts, read_feature_parts(options.directory, options.parts));
    if (parts.first().compressed()) {
      PLIMSOLL_TRY_VOID(require_lz4(options.directory));
    }
    const std::string read = parts.first().fingerprint();
    auto impl = std::make_unique<Impl>(governor, std::move(parts), options.io_threads);
    auto started = impl->start(options);
    PLIMSOLL_TRY(const FeatureHeader now, read_feature_header(options.directory));
    if (now.fingerprint() == read) {
      PLIMSOLL_TRY_VOID(std::move(started));
      return FeatureStore(std::move(impl));
    }
  }
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

Result<void> FeatureStore::lengths(std::span<const std::int64_t> ordinals, int column,
                                   std::span<std::int64_t> out) {
  PLIMSOLL_TRY_VOID(impl_->check_process("lengths"));
  return impl_->lengths(ordinals, column, out);
}

Result<void> FeatureStore::prefetch_ordinals(std::span<const std::int64_t> ordinals) {
  PLIMSOLL_TRY_VOID(impl_->check_process("prefetch_ordinals"));
  return impl_->prefetch_ordinals(ordinals);
}

Result<void> FeatureStore::find(std::span<const std::int64_t> ids,
                                std::span<std::int64_t> ordinals) {
  PLIMSOLL_TRY_VOID(impl_->check_process("find"));
  return impl_->find(ids, ordinals);
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
