// SPDX-License-Identifier: Apache-2.0
//
// FeatureStore: records of fixed size and ragged ones, from blocks to where the caller wants them.
// See feature_store_impl.h.
#include <algorithm>
#include <array>
#include <cstring>

#include <fmt/core.h>

#include "base/check.h"
#include "store/feature_block.h"
#include "store/feature_store_impl.h"

namespace plimsoll {

// Where blocks of records stand and what their checksums are.
Result<void> FeatureStore::Impl::locate_blocks(std::span<const std::int64_t> keys,
                                               std::span<StoredBlock> stored) {
  const std::int64_t block_bytes = header_.layout.block_bytes;
  const auto place = [&](std::size_t i) {
    return Place{BlockCache::source_of(keys[i]) / kFeatureSources, BlockCache::block_of(keys[i])};
  };
  if (header_.compressed()) {
    std::array<std::uint64_t, 2 * kChunk> entries;  // Of a block and of the one after it.
    PLIMSOLL_TRY_VOID(read_table(
        kBlocks, 2 * keys.size(),
        [&](std::size_t i) {
          const Place block = place(i / 2);
          return Place{block.part, block.index + static_cast<std::int64_t>(i % 2)};
        },
        [&](std::size_t i, std::uint64_t entry) { entries[i] = entry; }));
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const auto [part, number] = place(i);
      PLIMSOLL_TRY(stored[i], parse_block_entries(entries[2 * i], entries[2 * i + 1], block_bytes,
                                                  parts_.parts[part].header.stored.records_bytes,
                                                  number, open_[part].files[kBlocks].path()));
    }
  } else {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      stored[i] = {.offset = place(i).index * block_bytes, .bytes = block_bytes};
    }
  }
  return read_table(kChecksums, keys.size(), place, [&](std::size_t i, std::uint64_t crc) {
    stored[i].crc = static_cast<std::uint32_t>(crc);
  });
}

Result<void> FeatureStore::Impl::check_ordinals(std::span<const std::int64_t> ordinals) const {
  for (const std::int64_t ordinal : ordinals) {
    if (ordinal < 0 || ordinal >= info_.rows) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("{}: there is no record {}; ordinals are 0 to {}",
                              directory_.string(), ordinal, info_.rows - 1));
    }
  }
  return {};
}

Result<void> FeatureStore::Impl::check_request(std::size_t records, std::span<const int> columns,
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
    if (!column.ragged() && out[k].size() != records * static_cast<std::size_t>(column.bytes())) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("column \"{}\": the output has {} bytes, {} records need {} each",
                              column.name, out[k].size(), records, column.bytes()));
    }
  }
  return {};
}

Result<void> FeatureStore::Impl::read_ordinals(std::span<const std::int64_t> ordinals,
                                               std::span<const int> columns,
                                               std::span<const std::span<std::byte>> out) {
  PLIMSOLL_TRY_VOID(check_request(ordinals.size(), columns, out));
  PLIMSOLL_TRY_VOID(check_ordinals(ordinals));
  std::array<std::span<std::byte>, kFeatureColumnsMax> outputs;
  std::copy(out.begin(), out.end(), outputs.begin());
  const auto rest = std::span(outputs).first(columns.size());
  PLIMSOLL_TRY_VOID(header_.layout.is_ragged() ? read_ragged(ordinals, columns, rest)
                                               : read_fixed(ordinals, columns, rest));
  return expect_filled(columns, rest);
}

// Fills outputs from their beginnings and leaves what is behind the records in `rest`.
Result<void> FeatureStore::Impl::read_fixed(std::span<const std::int64_t> ordinals,
                                            std::span<const int> columns,
                                            std::span<std::span<std::byte>> rest) {
  struct Piece {
    std::size_t offset;
    std::size_t bytes;
    std::byte* out;
  };
  std::array<Piece, kFeatureColumnsMax> pieces;
  std::int64_t row_bytes = 0;
  for (std::size_t k = 0; k < columns.size(); ++k) {
    const auto column = static_cast<std::size_t>(columns[k]);
    pieces[k] = {static_cast<std::size_t>(header_.layout.offsets[column]),
                 static_cast<std::size_t>(info_.columns[column].bytes()), rest[k].data()};
    rest[k] = rest[k].subspan(ordinals.size() * pieces[k].bytes);
    row_bytes += static_cast<std::int64_t>(pieces[k].bytes);
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
  count(ordinals.size(), hits, static_cast<std::int64_t>(ordinals.size()) * row_bytes);
  return {};
}

// Where ragged records are, compared with what the header says. Requires: as many as a sweep has
// lengths for.
Result<void> FeatureStore::Impl::locate_records(std::span<const std::int64_t> ordinals,
                                                RaggedSweep& sweep) {
  const FeatureLayout& layout = header_.layout;
  const std::size_t ragged = layout.ragged.size();
  PLIMSOLL_TRY_VOID(read_table(
      kPlaces, ordinals.size(), [&](std::size_t i) { return place_of(ordinals[i]); },
      [&](std::size_t i, std::uint64_t at) { sweep.places[i] = static_cast<std::int64_t>(at); }));
  PLIMSOLL_TRY_VOID(read_table(
      kLengths, ordinals.size() * ragged,
      [&](std::size_t i) {
        const Place record = place_of(ordinals[i / ragged]);
        return Place{record.part, record.index * static_cast<std::int64_t>(ragged) +
                                      static_cast<std::int64_t>(i % ragged)};
      },
      [&](std::size_t i, std::uint64_t length) {
        sweep.lengths[i] = static_cast<std::int64_t>(length);
      }));
  sweep.first[0] = 0;
  for (std::size_t i = 0; i < ordinals.size(); ++i) {
    std::int64_t bytes = layout.record_bytes;
    bool sound = true;
    for (std::size_t r = 0; r < ragged; ++r) {
      const ColumnSpec& column = layout.columns[layout.ragged[r]];
      const std::int64_t length = sweep.lengths[i * ragged + r];
      sound = sound && length <= column.length_max;
      bytes += length * column.bytes();
    }
    const std::size_t part = parts_.part_of(ordinals[i]);
    const std::int64_t at = sweep.places[i];
    if (!sound || at < 0 || at > parts_.parts[part].header.ragged.stream_bytes - bytes) {
      return fail(
          ErrorCode::kCorrupt,
          fmt::format("{}: record {} is outside of {}", open_[part].files[kPlaces].path().string(),
                      place_of(ordinals[i]).index, kFeatureRecordsFile));
    }
    const std::int64_t pieces =
        bytes == 0 ? 0 : (at + bytes - 1) / kFeaturePage - at / kFeaturePage + 1;
    sweep.bytes[i] = bytes;
    sweep.first[i + 1] = sweep.first[i] + static_cast<std::size_t>(pieces);
  }
  return {};
}

// Calls visit(i, where in record i, those bytes of it, whether they were there) for every piece.
template <class Visit>
Result<void> FeatureStore::Impl::visit_pieces(std::span<const std::int64_t> ordinals,
                                              const RaggedSweep& sweep, Visit visit, bool ahead) {
  const auto first = std::span(sweep.first).first(ordinals.size() + 1);
  const auto record_of = [&](std::size_t piece) {
    return static_cast<std::size_t>(std::upper_bound(first.begin(), first.end(), piece) -
                                    first.begin()) -
           1;
  };
  const auto block_of = [&](std::size_t piece, std::size_t record) {
    return sweep.places[record] / kFeaturePage + static_cast<std::int64_t>(piece - first[record]);
  };
  return visit_blocks(
      kRecords, first.back(),
      [&](std::size_t piece) {
        const std::size_t record = record_of(piece);
        return key_of(parts_.part_of(ordinals[record]), kRecords, block_of(piece, record));
      },
      [&](std::size_t piece, const std::byte* block, bool was_there) {
        const std::size_t record = record_of(piece);
        const std::int64_t place = sweep.places[record];
        const std::int64_t block_at = block_of(piece, record) * kFeaturePage;
        const std::int64_t begin = std::max(place, block_at);
        const std::int64_t end = std::min(place + sweep.bytes[record], block_at + kFeaturePage);
        visit(record, begin - place,
              std::span(block + (begin - block_at), static_cast<std::size_t>(end - begin)),
              was_there);
      },
      ahead);
}

// As read_fixed().
Result<void> FeatureStore::Impl::read_ragged(std::span<const std::int64_t> ordinals,
                                             std::span<const int> columns,
                                             std::span<std::span<std::byte>> rest) {
  const FeatureLayout& layout = header_.layout;
  const std::size_t ragged = layout.ragged.size();
  const std::size_t step = kSweep / ragged;
  RaggedSweep sweep;
  std::array<std::int64_t, kSweep> before;  // Elements of a column in the records before.
  for (std::size_t begin = 0; begin < ordinals.size(); begin += step) {
    const auto some = ordinals.subspan(begin, std::min(step, ordinals.size() - begin));
    PLIMSOLL_TRY_VOID(locate_records(some, sweep));
    std::array<std::int64_t, kFeatureColumnsMax> elements{};  // By ragged column.
    for (std::size_t i = 0; i < some.size(); ++i) {
      for (std::size_t r = 0; r < ragged; ++r) {
        before[i * ragged + r] = elements[r];
        elements[r] += sweep.lengths[i * ragged + r];
      }
    }
    std::int64_t delivered = 0;
    std::array<std::size_t, kFeatureColumnsMax> sizes;  // Of these records, by column asked for.
    for (std::size_t k = 0; k < columns.size(); ++k) {
      const auto column = static_cast<std::size_t>(columns[k]);
      const auto r = std::find(layout.ragged.begin(), layout.ragged.end(), column);
      const std::int64_t count =
          r == layout.ragged.end() ? static_cast<std::int64_t>(some.size())
                                   : elements[static_cast<std::size_t>(r - layout.ragged.begin())];
      sizes[k] = static_cast<std::size_t>(count * layout.columns[column].bytes());
      delivered += static_cast<std::int64_t>(sizes[k]);
      if (sizes[k] > rest[k].size()) {
        return fail(ErrorCode::kInvalidArgument,
                    fmt::format("column \"{}\": the output is smaller than the elements of the "
                                "records; lengths() counts them",
                                layout.columns[column].name));
      }
    }
    std::int64_t hits = 0;
    PLIMSOLL_TRY_VOID(visit_pieces(
        some, sweep,
        [&](std::size_t i, std::int64_t at, std::span<const std::byte> bytes, bool was_there) {
          hits += at == 0 && was_there ? 1 : 0;
          const auto end = at + static_cast<std::int64_t>(bytes.size());
          for (std::size_t k = 0; k < columns.size(); ++k) {
            const auto column = static_cast<std::size_t>(columns[k]);
            std::int64_t from = layout.offsets[column];  // In the record.
            std::int64_t size = layout.columns[column].bytes();
            std::int64_t to = static_cast<std::int64_t>(i) * size;  // In the output.
            if (layout.columns[column].ragged()) {
              std::size_t r = 0;
              from = layout.record_bytes;
              for (; layout.ragged[r] != column; ++r) {
                from += sweep.lengths[i * ragged + r] * layout.columns[layout.ragged[r]].bytes();
              }
              to = before[i * ragged + r] * size;
              size *= sweep.lengths[i * ragged + r];
            }
            const std::int64_t first = std::max(from, at);
            const std::int64_t last = std::min(from + size, end);
            if (first < last) {
              std::memcpy(rest[k].data() + to + (first - from), bytes.data() + (first - at),
                          static_cast<std::size_t>(last - first));
            }
          }
        }));
    for (std::size_t k = 0; k < columns.size(); ++k) {
      rest[k] = rest[k].subspan(sizes[k]);
    }
    count(some.size(), hits, delivered);
  }
  return {};
}

Result<void> FeatureStore::Impl::expect_filled(std::span<const int> columns,
                                               std::span<const std::span<std::byte>> rest) const {
  for (std::size_t k = 0; k < columns.size(); ++k) {
    if (!rest[k].empty()) {
      const ColumnSpec& column = info_.columns[static_cast<std::size_t>(columns[k])];
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("column \"{}\": the output has {} bytes more than the records",
                              column.name, rest[k].size()));
    }
  }
  return {};
}

Result<void> FeatureStore::Impl::lengths(std::span<const std::int64_t> ordinals, int column,
                                         std::span<std::int64_t> out) {
  PLIMSOLL_TRY_VOID(check_ordinals(ordinals));
  const auto& ragged = header_.layout.ragged;
  const auto found = std::find(ragged.begin(), ragged.end(), static_cast<std::size_t>(column));
  if (found == ragged.end() || out.size() != ordinals.size()) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: lengths of column {} of {} records into room for {}; ragged "
                            "columns have lengths",
                            directory_.string(), column, ordinals.size(), out.size()));
  }
  const std::int64_t r = found - ragged.begin();
  const ColumnSpec& spec = info_.columns[static_cast<std::size_t>(column)];
  bool sound = true;
  PLIMSOLL_TRY_VOID(read_table(
      kLengths, ordinals.size(),
      [&](std::size_t i) {
        const Place record = place_of(ordinals[i]);
        return Place{record.part, record.index * std::ssize(ragged) + r};
      },
      [&](std::size_t i, std::uint64_t length) {
        out[i] = static_cast<std::int64_t>(length);
        sound = sound && out[i] <= spec.length_max;
      }));
  if (!sound) {
    return fail(ErrorCode::kCorrupt,
                fmt::format("{}: {} has a length above the {} of column \"{}\"",
                            directory_.string(), kFeatureLengthsFile, spec.length_max, spec.name));
  }
  return {};
}

// As visit_blocks(), with the bytes of record ordinals[i].
template <class Visit>
Result<void> FeatureStore::Impl::visit_records(std::span<const std::int64_t> ordinals, Visit visit,
                                               bool ahead) {
  const std::int64_t per_block = header_.layout.records_per_block;
  const std::int64_t stride = header_.layout.stride;
  return visit_blocks(
      kRecords, ordinals.size(),
      [&](std::size_t i) {
        const Place place = place_of(ordinals[i]);
        return key_of(place.part, kRecords, place.index / per_block);
      },
      [&](std::size_t i, const std::byte* block, bool was_there) {
        visit(i, block + place_of(ordinals[i]).index % per_block * stride, was_there);
      },
      ahead);
}

Result<void> FeatureStore::Impl::prefetch_ordinals(std::span<const std::int64_t> ordinals) {
  PLIMSOLL_TRY_VOID(check_ordinals(ordinals));
  if (!header_.layout.is_ragged()) {
    return visit_records(
        ordinals, [](std::size_t, const std::byte*, bool) {}, /*ahead=*/true);
  }
  const std::size_t step = kSweep / header_.layout.ragged.size();
  RaggedSweep sweep;
  for (std::size_t begin = 0; begin < ordinals.size(); begin += step) {
    const auto some = ordinals.subspan(begin, std::min(step, ordinals.size() - begin));
    PLIMSOLL_TRY_VOID(locate_records(some, sweep));
    PLIMSOLL_TRY_VOID(visit_pieces(
        some, sweep, [](std::size_t, std::int64_t, std::span<const std::byte>, bool) {},
        /*ahead=*/true));
  }
  return {};
}

Result<void> FeatureStore::Impl::read(std::span<const std::int64_t> ids,
                                      std::span<const int> columns,
                                      std::span<const std::span<std::byte>> out) {
  PLIMSOLL_TRY_VOID(check_request(ids.size(), columns, out));
  std::array<std::int64_t, kSweep> ordinals;
  std::array<std::span<std::byte>, kFeatureColumnsMax> outputs;
  std::copy(out.begin(), out.end(), outputs.begin());
  const auto rest = std::span(outputs).first(columns.size());
  for (std::size_t begin = 0; begin < ids.size(); begin += ordinals.size()) {
    const auto some = std::span(ordinals).first(std::min(ordinals.size(), ids.size() - begin));
    PLIMSOLL_TRY_VOID(ordinals_of(ids.subspan(begin, some.size()), some));
    PLIMSOLL_TRY_VOID(header_.layout.is_ragged() ? read_ragged(some, columns, rest)
                                                 : read_fixed(some, columns, rest));
  }
  return expect_filled(columns, rest);
}

}  // namespace plimsoll
