// SPDX-License-Identifier: Apache-2.0
//
// FeatureStore::Impl: what a FeatureStore is made of.
//
// A request is taken in sweeps of at most 4096 records, sorted by block: one pass over the file. Of
// at most 256 blocks at a time the missing ones are read together, neighbours at once, and the rows
// copied to their places in the request. Block checksums, ids, group offsets and the places of
// compressed blocks are tables (feature_table.h): in the slab as a whole while those of a kind take
// at most an eighth of it, else read through the same frames as the records.
//
// Ragged records have tables of where they begin and how long their columns are. A sweep takes as
// many as have 4096 lengths, and their pieces, one for each block that a record touches, go the
// same way as whole records of fixed size.
//
// Reading order: include/plimsoll/feature_store.h, feature_format.h, feature_parts.h,
//                feature_plan.h, feature_cache.h, this file, feature_store.cpp, feature_reads.cpp.
//
// Threads: reads are thread-safe; no lock is held across I/O or a copy of rows.
// Memory:  one slab, divided by plan_feature_slab(). A sweep lives on the reader's stack: about
//          120 KiB, 200 KiB when a table is paged; 160 KiB more of ragged records.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <filesystem>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/check.h"
#include "memory/admission.h"
#include "memory/slab.h"
#include "os/file.h"
#include "os/fork.h"
#include "os/io_pool.h"
#include "plimsoll/feature_store.h"
#include "store/feature_block_reader.h"
#include "store/feature_cache.h"
#include "store/feature_parts.h"
#include "store/feature_plan.h"
#include "store/feature_table.h"
#include "store/id_index.h"

namespace plimsoll {

class FeatureStore::Impl : public Reclaimer {
 public:
  Impl(Governor governor, FeatureParts parts, int io_threads)
      : governor_(std::move(governor)),
        parts_(std::move(parts)),
        header_(parts_.first()),
        directory_(parts_.parts.front().directory),
        info_(parts_.info()),
        pool_(io_threads) {}
  [[nodiscard]] const ForkMark& mark() const noexcept { return mark_; }
  [[nodiscard]] Result<void> check_process(const char* call) const {
    return mark_.check(directory_, call);
  }
  ~Impl() override {
    reclaimer_ = {};
    cache_.reset();
    reader_.reset();
    open_.clear();
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Result<void> start(const FeatureStoreOptions& options);
  Result<void> read_ordinals(std::span<const std::int64_t> ordinals, std::span<const int> columns,
                             std::span<const std::span<std::byte>> out);
  Result<void> read(std::span<const std::int64_t> ids, std::span<const int> columns,
                    std::span<const std::span<std::byte>> out);
  Result<void> prefetch_ordinals(std::span<const std::int64_t> ordinals);
  Result<void> lengths(std::span<const std::int64_t> ordinals, int column,
                       std::span<std::int64_t> out);
  Result<void> find(std::span<const std::int64_t> ids, std::span<std::int64_t> ordinals);
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
  static constexpr std::size_t kChunk = static_cast<std::size_t>(BlockCache::kPinsMax);
  static constexpr std::size_t kSweep = 4096;  // Records put in the order of the file at once.

  // Where an entry of a table, or a record, is: in which part, and its position there.
  struct Place {
    std::size_t part;
    std::int64_t index;
  };
  static constexpr std::size_t kNowhere = SIZE_MAX;  // A part that none has: nothing is to be read.

  // What is open of a part. A table in the slab has bytes; one behind the cache has none.
  struct OpenPart {
    std::array<File, kFeatureSources> files{};
    std::array<std::span<const std::byte>, kFeatureSources> tables{};
    IdIndex ids{};
  };

  static constexpr std::int64_t width_of(FeatureSource table) noexcept {
    return table == kChecksums || table == kLengths ? 4 : 8;
  }

  // Ragged records of one sweep, R ragged columns each.
  struct RaggedSweep {
    std::array<std::int64_t, kSweep> places;    // Of each record.
    std::array<std::int64_t, kSweep> bytes;     // Of each record.
    std::array<std::size_t, kSweep + 1> first;  // Of each record's pieces; their number at the end.
    std::array<std::int64_t, kSweep> lengths;   // Of column r of record i at i × R + r.
  };

  Result<void> open_files();
  Result<void> open_part(const FeaturePart& part, OpenPart& open, std::span<BlockSource> sources);
  Result<std::span<const std::byte>> load_table(File& file, const SideFile& side);
  [[nodiscard]] Place place_of(std::int64_t ordinal) const noexcept {
    const std::size_t part = parts_.part_of(ordinal);
    return {part, ordinal - parts_.parts[part].first_row};
  }
  [[nodiscard]] static std::int64_t key_of(std::size_t part, FeatureSource source,
                                           std::int64_t block) noexcept {
    return BlockCache::key_of(part * kFeatureSources + source, block);
  }
  Result<void> check_request(std::size_t records, std::span<const int> columns,
                             std::span<const std::span<std::byte>> out) const;
  Result<void> check_ordinals(std::span<const std::int64_t> ordinals) const;
  Result<void> locate_blocks(std::span<const std::int64_t> keys, std::span<StoredBlock> stored);
  template <class KeyOf, class Visit>
  Result<void> visit_blocks(FeatureSource source, std::size_t count, KeyOf key_of, Visit visit,
                            bool ahead = false);
  Result<void> locate_records(std::span<const std::int64_t> ordinals, RaggedSweep& sweep);
  template <class Visit>
  Result<void> visit_pieces(std::span<const std::int64_t> ordinals, const RaggedSweep& sweep,
                            Visit visit, bool ahead = false);
  Result<void> read_fixed(std::span<const std::int64_t> ordinals, std::span<const int> columns,
                          std::span<std::span<std::byte>> rest);
  Result<void> read_ragged(std::span<const std::int64_t> ordinals, std::span<const int> columns,
                           std::span<std::span<std::byte>> rest);
  void count(std::size_t records, std::int64_t hits, std::int64_t bytes) noexcept {
    requests_.fetch_add(static_cast<std::int64_t>(records), std::memory_order_relaxed);
    hits_.fetch_add(hits, std::memory_order_relaxed);
    delivered_.fetch_add(bytes, std::memory_order_relaxed);
  }
  Result<void> expect_filled(std::span<const int> columns,
                             std::span<const std::span<std::byte>> rest) const;
  template <class Visit>
  Result<void> visit_records(std::span<const std::int64_t> ordinals, Visit visit,
                             bool ahead = false);
  template <class PlaceOf, class Sink>
  Result<void> read_table(FeatureSource table, std::size_t count, PlaceOf place_of, Sink sink);

  const ForkMark mark_;
  Governor governor_;
  const FeatureParts parts_;
  const FeatureHeader& header_;  // The first part's: layout and compression are the same in all.
  const std::filesystem::path directory_;
  FeatureInfo info_;
  FeatureShares shares_{};
  Admission admission_;
  IoPool pool_;
  Slab slab_;
  std::vector<OpenPart> open_{};
  std::unique_ptr<BlockReader> reader_;
  std::unique_ptr<BlockCache> cache_;
  std::atomic<std::int64_t> requests_{0};   // Written by readers, read by stats(); order is free.
  std::atomic<std::int64_t> hits_{0};       // As requests_.
  std::atomic<std::int64_t> delivered_{0};  // As requests_: bytes.
  ReclaimerHandle reclaimer_;
};

// Calls visit(i, bytes of the block of key_of(i), whether it was there) for i in [0, count), in the
// order of parts and files; not for a negative key. The block stays pinned during the call.
template <class KeyOf, class Visit>
Result<void> FeatureStore::Impl::visit_blocks(FeatureSource source, std::size_t count, KeyOf key_of,
                                              Visit visit, bool ahead) {
  struct Entry {
    std::int64_t key;
    std::size_t index;
  };
  std::array<Entry, kSweep> entries;
  std::array<std::int64_t, kChunk> keys;
  std::array<StoredBlock, kChunk> stored;
  std::array<std::uint32_t, kChunk> frames;
  std::array<bool, kChunk> hits;
  for (std::size_t begin = 0; begin < count; begin += kSweep) {
    const std::size_t end = std::min(begin + kSweep, count);
    std::size_t size = 0;
    for (std::size_t i = begin; i < end; ++i) {
      if (const std::int64_t key = key_of(i); key >= 0) {
        entries[size++] = {key, i};
      }
    }
    std::sort(entries.begin(), entries.begin() + static_cast<std::ptrdiff_t>(size),
              [](const Entry& a, const Entry& b) {
                return a.key != b.key ? a.key < b.key : a.index < b.index;
              });
    std::size_t entry = 0;
    while (entry < size) {
      std::size_t distinct = 0;
      for (std::size_t i = entry; i < size && distinct < kChunk; ++i) {
        if (distinct == 0 || keys[distinct - 1] != entries[i].key) {
          keys[distinct++] = entries[i].key;
        }
      }
      const bool located = source == kRecords;
      if (located) {
        PLIMSOLL_TRY_VOID(locate_blocks(std::span(keys).first(distinct), stored));
      }
      for (std::size_t done = 0; done < distinct;) {
        const std::int64_t reserved = cache_->reserve(static_cast<std::int64_t>(distinct - done));
        const auto part = static_cast<std::size_t>(reserved);
        auto pinned = cache_->pin(std::span(keys).subspan(done, part),
                                  located ? std::span<const StoredBlock>(stored).subspan(done, part)
                                          : std::span<const StoredBlock>{},
                                  frames, hits, ahead);
        if (!pinned) {
          cache_->release(reserved);
          return pinned;
        }
        for (std::size_t b = 0; b < part; ++b) {
          const std::byte* bytes = cache_->bytes(frames[b]);
          for (; entry < size && entries[entry].key == keys[done + b]; ++entry) {
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

// Calls sink(i, the entry at place_of(i)), not for a place that is nowhere.
template <class PlaceOf, class Sink>
Result<void> FeatureStore::Impl::read_table(FeatureSource table, std::size_t count,
                                            PlaceOf place_of, Sink sink) {
  const std::int64_t width = width_of(table);
  if (shares_.resident[table]) {
    for (std::size_t i = 0; i < count; ++i) {
      if (const Place place = place_of(i); place.part != kNowhere) {
        const std::byte* bytes = open_[place.part].tables[table].data();
        sink(i, load_table_entry(bytes + feature_table_offset(place.index, width), width));
      }
    }
    return {};
  }
  const std::int64_t block_bytes = cache_->block_bytes();
  return visit_blocks(
      table, count,
      [&](std::size_t i) {
        const Place place = place_of(i);
        return place.part == kNowhere
                   ? std::int64_t{-1}
                   : key_of(place.part, table,
                            feature_table_offset(place.index, width) / block_bytes);
      },
      [&](std::size_t i, const std::byte* block, bool) {
        const std::int64_t offset = feature_table_offset(place_of(i).index, width);
        sink(i, load_table_entry(block + offset % block_bytes, width));
      });
}

}  // namespace plimsoll
