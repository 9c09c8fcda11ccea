// SPDX-License-Identifier: Apache-2.0
//
// FeatureWriter: streams records into DIRECTORY.partial and renames it into place; what extends a
// store goes into its next part in the same way, so the rename is what adds the records.
//
// Reading order: include/plimsoll/feature_store.h, feature_format.h, feature_table.h, this file.
//
// Threads: single-owner.
// Memory:  one leased buffer (Tag::kOther), divided at create(): blocks on their way to the disk,
//          table pages, and the sort of the ids. With compression one block is being filled; what
//          waits for the disk is the PackedBlockWriter's.
#include <algorithm>
#include <array>
#include <optional>

#include <fmt/core.h>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/round.h"
#include "memory/slab.h"
#include "os/crash_point.h"
#include "os/directories.h"
#include "os/file.h"
#include "os/fork.h"
#include "plimsoll/feature_store.h"
#include "store/feature_block_writer.h"
#include "store/feature_format.h"
#include "store/feature_parts.h"
#include "store/feature_table.h"
#include "store/id_index.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

constexpr const char* kGroupCheckName = "group_check";
constexpr std::int64_t kLookUpBytes = 1 << 20;  // For ids of the store that is extended.
constexpr int kLookUpThreads = 2;

}  // namespace

class FeatureWriter::Impl {
 public:
  using Columns = std::span<const std::span<const std::byte>>;
  using Lengths = std::span<const std::span<const std::int64_t>>;
  Impl(FeatureWriterOptions options, FeatureLayout layout, PartialDirectory partial)
      : options_(std::move(options)), layout_(std::move(layout)), partial_(std::move(partial)) {}

  Result<void> start(Governor& governor);
  /// Its records are to follow those of a store.
  void follow(FeatureStore before) { before_ = std::move(before); }
  [[nodiscard]] const FeatureWriterOptions& options() const noexcept { return options_; }
  Result<void> append(std::span<const std::int64_t> ids, const Columns& columns,
                      std::span<const std::int64_t> groups, const Lengths& lengths);
  Result<void> finish();
  [[nodiscard]] std::int64_t rows() const noexcept { return rows_; }

 private:
  Result<void> check_request(std::span<const std::int64_t> ids, const Columns& columns,
                             std::span<const std::int64_t> groups, const Lengths& lengths) const;
  Result<std::int64_t> check_lengths(std::span<const std::int64_t> ids,
                                     std::span<const std::int64_t> lengths,
                                     const ColumnSpec& column) const;
  Result<void> expect_new(std::span<const std::int64_t> ids);
  Result<void> append_ids(std::span<const std::int64_t> ids);
  Result<void> append_groups(std::span<const std::int64_t> groups);
  Result<void> append_records(std::size_t count, const Columns& columns);
  Result<void> append_ragged(std::size_t count, const Columns& columns, const Lengths& lengths);
  Result<void> put(std::span<const std::byte> bytes);
  Result<void> seal_block();
  Result<void> write_blocks();
  void clear_padding(std::span<std::byte> blocks) const noexcept;
  Result<void> finish_groups(FeatureHeader& header);

  FeatureWriterOptions options_;
  FeatureLayout layout_;
  PartialDirectory partial_;
  std::optional<FeatureStore> before_;  // What it extends.
  Slab slab_;
  std::span<std::byte> blocks_{};  // Blocks being filled; whole blocks are written at once.
  std::span<std::byte> id_table_buffer_{};
  File records_;                             // Without compression,
  std::optional<PackedBlockWriter> packed_;  // or with it.
  std::optional<FeatureTableWriter> checksums_;
  std::optional<FeatureTableWriter> id_table_;  // Only once ids are not 0, 1, 2, …
  std::optional<FeatureTableWriter> group_table_;
  std::optional<FeatureTableWriter> places_;  // Of ragged records.
  std::optional<FeatureTableWriter> lengths_;
  std::optional<IdIndexWriter> id_index_;
  std::optional<IdIndexWriter> group_check_;

  std::int64_t rows_{0};
  std::int64_t in_block_{0};     // Records in the block being filled; bytes, when ragged.
  RaggedPlaces stream_;          // Of ragged records.
  std::int64_t buffered_{0};     // Whole blocks in blocks_.
  std::int64_t written_{0};      // Blocks on disk.
  std::int64_t group_{0};        // Id of the group being filled.
  std::int64_t group_begin_{0};  // Its first record.
  std::int64_t groups_closed_{0};
  std::int64_t uniform_group_{-1};  // Size of every closed group; 0 once two differ; −1: none yet.
  std::optional<Error> failed_;     // First error; every later call returns it.
};

Result<void> FeatureWriter::Impl::start(Governor& governor) {
  const std::int64_t index_min = IdIndexWriter::kBufferBytesMin;
  const std::int64_t index_bytes = std::max(index_min, round_up(options_.buffer_bytes / 4, 4096));
  const std::int64_t group_bytes =
      options_.grouped ? std::max(index_min, round_up(options_.buffer_bytes / 8, 4096)) : 0;
  const int tables = layout_.is_ragged() ? 5 : 3;
  const std::int64_t fixed = index_bytes + group_bytes + tables * kTableBuffer;
  const std::int64_t room = std::max<std::int64_t>(options_.buffer_bytes - fixed, 0);
  const std::int64_t block = layout_.block_bytes;
  const bool packed = options_.compression != BlockCompression::kNone;
  const std::int64_t blocks = packed
                                  ? block + PackedBlockWriter::memory_bytes(block, room - 2 * block)
                                  : std::max<std::int64_t>(room / block, 1) * block;
  PLIMSOLL_TRY(slab_, Slab::create(governor, Tag::kOther, fixed + blocks));
  const auto checksum_buffer = slab_.take<std::byte>(kTableBuffer, kFeaturePage);
  id_table_buffer_ = slab_.take<std::byte>(kTableBuffer, kFeaturePage);
  const auto group_buffer = slab_.take<std::byte>(kTableBuffer, kFeaturePage);

  const fs::path& directory = partial_.path();
  PLIMSOLL_TRY(checksums_,
               FeatureTableWriter::create(directory / kFeatureChecksumsFile, 4, checksum_buffer));
  if (packed) {
    blocks_ = slab_.take<std::byte>(block, kFeaturePage);
    PLIMSOLL_TRY(packed_,
                 PackedBlockWriter::create(directory, block, room - 2 * block, slab_, *checksums_));
  } else {
    blocks_ = slab_.take<std::byte>(blocks, kFeaturePage);
    PLIMSOLL_TRY(records_, File::open(directory / kFeatureRecordsFile, FileMode::kCreate, true));
  }
  if (layout_.is_ragged()) {
    PLIMSOLL_TRY(places_,
                 FeatureTableWriter::create(directory / kFeaturePlacesFile, 8,
                                            slab_.take<std::byte>(kTableBuffer, kFeaturePage)));
    PLIMSOLL_TRY(lengths_,
                 FeatureTableWriter::create(directory / kFeatureLengthsFile, 4,
                                            slab_.take<std::byte>(kTableBuffer, kFeaturePage)));
  }
  PLIMSOLL_TRY(id_index_, IdIndexWriter::create(directory, kFeatureIndexName,
                                                slab_.take<std::byte>(index_bytes, kFeaturePage)));
  if (options_.grouped) {
    PLIMSOLL_TRY(group_table_,
                 FeatureTableWriter::create(directory / kFeatureGroupsFile, 8, group_buffer));
    PLIMSOLL_TRY(group_check_,
                 IdIndexWriter::create(directory, kGroupCheckName,
                                       slab_.take<std::byte>(group_bytes, kFeaturePage)));
  }
  return {};
}

// The number of elements of a ragged column.
Result<std::int64_t> FeatureWriter::Impl::check_lengths(std::span<const std::int64_t> ids,
                                                        std::span<const std::int64_t> lengths,
                                                        const ColumnSpec& column) const {
  if (lengths.size() != ids.size()) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("column \"{}\": {} lengths were given for {} records", column.name,
                            lengths.size(), ids.size()));
  }
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (lengths[i] < 0 || lengths[i] > column.length_max) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("record {} (id {}), column \"{}\": {} elements; it takes 0 to {}",
                              rows_ + static_cast<std::int64_t>(i), ids[i], column.name, lengths[i],
                              column.length_max),
                  "shorten the record, or make the store with a larger length_max");
    }
    sum += lengths[i];
  }
  return sum;
}

Result<void> FeatureWriter::Impl::check_request(std::span<const std::int64_t> ids,
                                                const Columns& columns,
                                                std::span<const std::int64_t> groups,
                                                const Lengths& lengths) const {
  if (columns.size() != layout_.columns.size() || lengths.size() != layout_.ragged.size()) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{} columns were given, {} are declared{}", columns.size(),
                            layout_.columns.size(),
                            layout_.is_ragged() || !lengths.empty()
                                ? fmt::format("; lengths of {} where {} are ragged", lengths.size(),
                                              layout_.ragged.size())
                                : std::string()));
  }
  if (groups.size() != (options_.grouped ? ids.size() : 0)) {
    return fail(
        ErrorCode::kInvalidArgument,
        fmt::format("{} group ids were given for {} records of a store that is {}", groups.size(),
                    ids.size(), options_.grouped ? "grouped" : "not grouped"));
  }
  std::size_t ragged = 0;
  for (std::size_t k = 0; k < columns.size(); ++k) {
    const ColumnSpec& column = layout_.columns[k];
    auto elements = static_cast<std::int64_t>(ids.size());
    std::span<const std::int64_t> of_records;
    if (column.ragged()) {
      of_records = lengths[ragged++];
      PLIMSOLL_TRY(elements, check_lengths(ids, of_records, column));
    }
    const auto expected = static_cast<std::size_t>(column.bytes() * elements);
    if (columns[k].size() != expected) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("column \"{}\": {} bytes were given for {} {} of {} bytes",
                              column.name, columns[k].size(), elements,
                              column.ragged() ? "elements" : "records", column.bytes()));
    }
    const std::int64_t bad =
        options_.allow_non_finite ? -1 : first_non_finite(columns[k], column.dtype);
    if (bad >= 0) {
      std::int64_t record = bad * dtype_bytes(column.dtype) / column.bytes();
      if (column.ragged()) {  // So far the element: the record that has it.
        std::int64_t end = 0;
        std::size_t at = 0;
        while ((end += of_records[at]) <= record) {
          ++at;
        }
        record = static_cast<std::int64_t>(at);
      }
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("record {} (id {}), column \"{}\": holds a NaN or an infinity",
                              rows_ + record, ids[static_cast<std::size_t>(record)], column.name),
                  "clean the features first, or set allow_non_finite");
    }
  }
  return {};
}

Result<void> FeatureWriter::Impl::append(std::span<const std::int64_t> ids, const Columns& columns,
                                         std::span<const std::int64_t> groups,
                                         const Lengths& lengths) {
  if (failed_) {
    return tl::unexpected(*failed_);
  }
  auto done = check_request(ids, columns, groups, lengths);
  if (done && before_) {
    done = expect_new(ids);
  }
  if (done) {
    done = append_ids(ids);
  }
  if (done && options_.grouped) {
    done = append_groups(groups);
  }
  if (done) {
    done = layout_.is_ragged() ? append_ragged(ids.size(), columns, lengths)
                               : append_records(ids.size(), columns);
  }
  if (!done) {
    failed_ = done.error();
  }
  return done;
}

Result<void> FeatureWriter::Impl::expect_new(std::span<const std::int64_t> ids) {
  std::array<std::int64_t, 1024> found;
  for (std::size_t begin = 0; begin < ids.size(); begin += found.size()) {
    const auto part = ids.subspan(begin, std::min(found.size(), ids.size() - begin));
    PLIMSOLL_TRY_VOID(before_->find(part, std::span(found).first(part.size())));
    for (std::size_t i = 0; i < part.size(); ++i) {
      if (found[i] >= 0) {
        return fail(ErrorCode::kInvalidArgument,
                    fmt::format("record {} of this part: the store has id {} already, as record {}",
                                rows_ + static_cast<std::int64_t>(begin + i), part[i], found[i]),
                    "ids are distinct in a store; leave out the records that it has");
      }
    }
  }
  return {};
}

Result<void> FeatureWriter::Impl::append_ids(std::span<const std::int64_t> ids) {
  PLIMSOLL_TRY_VOID(id_index_->append(ids));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::int64_t ordinal = rows_ + static_cast<std::int64_t>(i);
    if (!id_table_) {
      if (ids[i] == ordinal) {
        continue;
      }
      PLIMSOLL_TRY(id_table_, FeatureTableWriter::create(partial_.path() / kFeatureIdsFile, 8,
                                                         id_table_buffer_));
      for (std::int64_t dense = 0; dense < ordinal; ++dense) {
        PLIMSOLL_TRY_VOID(id_table_->append(static_cast<std::uint64_t>(dense)));
      }
    }
    PLIMSOLL_TRY_VOID(id_table_->append(static_cast<std::uint64_t>(ids[i])));
  }
  return {};
}

Result<void> FeatureWriter::Impl::append_groups(std::span<const std::int64_t> groups) {
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const std::int64_t ordinal = rows_ + static_cast<std::int64_t>(i);
    if (ordinal > 0 && groups[i] == group_) {
      continue;
    }
    if (ordinal > 0) {
      const std::int64_t size = ordinal - group_begin_;
      uniform_group_ = uniform_group_ < 0 || uniform_group_ == size ? size : 0;
      ++groups_closed_;
    }
    group_ = groups[i];
    group_begin_ = ordinal;
    PLIMSOLL_TRY_VOID(group_table_->append(static_cast<std::uint64_t>(ordinal)));
    PLIMSOLL_TRY_VOID(group_check_->append({&group_, 1}));
  }
  return {};
}

Result<void> FeatureWriter::Impl::append_records(std::size_t count, const Columns& columns) {
  for (std::size_t i = 0; i < count; ++i) {
    std::byte* record =
        blocks_.data() + buffered_ * layout_.block_bytes + in_block_ * layout_.stride;
    for (std::size_t k = 0; k < columns.size(); ++k) {
      const std::size_t bytes = columns[k].size() / count;
      std::memcpy(record + layout_.offsets[k], columns[k].data() + i * bytes, bytes);
    }
    ++rows_;
    if (++in_block_ == layout_.records_per_block) {
      PLIMSOLL_TRY_VOID(seal_block());
    }
  }
  return {};
}

Result<void> FeatureWriter::Impl::append_ragged(std::size_t count, const Columns& columns,
                                                const Lengths& lengths) {
  std::array<std::size_t, kFeatureColumnsMax> taken{};  // Bytes of each ragged column.
  for (std::size_t i = 0; i < count; ++i) {
    std::int64_t bytes = layout_.record_bytes;
    for (std::size_t r = 0; r < lengths.size(); ++r) {
      bytes += lengths[r][i] * layout_.columns[layout_.ragged[r]].bytes();
      PLIMSOLL_TRY_VOID(lengths_->append(static_cast<std::uint64_t>(lengths[r][i])));
    }
    const std::int64_t end = stream_.end();
    const std::int64_t place = stream_.next(bytes);
    PLIMSOLL_TRY_VOID(places_->append(static_cast<std::uint64_t>(place)));
    if (place > end) {  // The rest of the block is zero.
      in_block_ = 0;
      PLIMSOLL_TRY_VOID(seal_block());
    }
    for (const std::size_t k : layout_.order) {
      const std::size_t each = columns[k].size() / count;
      PLIMSOLL_TRY_VOID(put(columns[k].subspan(i * each, each)));
    }
    for (std::size_t r = 0; r < lengths.size(); ++r) {
      const std::size_t k = layout_.ragged[r];
      const auto part = static_cast<std::size_t>(lengths[r][i] * layout_.columns[k].bytes());
      PLIMSOLL_TRY_VOID(put(columns[k].subspan(taken[r], part)));
      taken[r] += part;
    }
    ++rows_;
  }
  return {};
}

// The next bytes of the stream of ragged records.
Result<void> FeatureWriter::Impl::put(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const std::int64_t room = layout_.block_bytes - in_block_;
    const auto part = bytes.first(std::min(bytes.size(), static_cast<std::size_t>(room)));
    std::memcpy(blocks_.data() + buffered_ * layout_.block_bytes + in_block_, part.data(),
                part.size());
    in_block_ += static_cast<std::int64_t>(part.size());
    bytes = bytes.subspan(part.size());
    if (in_block_ == layout_.block_bytes) {
      PLIMSOLL_TRY_VOID(seal_block());
    }
  }
  return {};
}

Result<void> FeatureWriter::Impl::seal_block() {
  const std::int64_t size = layout_.block_bytes;
  const auto block =
      blocks_.subspan(static_cast<std::size_t>(buffered_ * size), static_cast<std::size_t>(size));
  in_block_ = 0;
  if (packed_) {
    PLIMSOLL_TRY_VOID(packed_->append(block));
    clear_padding(block);
    return {};
  }
  PLIMSOLL_TRY_VOID(checksums_->append(crc32c(block)));
  ++buffered_;
  if ((buffered_ + 1) * size > static_cast<std::int64_t>(blocks_.size())) {
    return write_blocks();
  }
  return {};
}

Result<void> FeatureWriter::Impl::write_blocks() {
  const auto bytes = blocks_.first(static_cast<std::size_t>(buffered_ * layout_.block_bytes));
  PLIMSOLL_TRY_VOID(records_.write_at(written_ * layout_.block_bytes, bytes));
  clear_padding(bytes);
  written_ += buffered_;
  buffered_ = 0;
  return {};
}

// Padding must stay zero, and what a ragged record leaves of its last page; where blocks have none,
// every byte is written again.
void FeatureWriter::Impl::clear_padding(std::span<std::byte> blocks) const noexcept {
  if (layout_.stride * layout_.records_per_block != layout_.block_bytes ||
      layout_.stride != layout_.record_bytes) {
    std::fill(blocks.begin(), blocks.end(), std::byte{0});
  }
}

Result<void> FeatureWriter::Impl::finish_groups(FeatureHeader& header) {
  if (rows_ > 0) {
    const std::int64_t size = rows_ - group_begin_;
    uniform_group_ = uniform_group_ < 0 || uniform_group_ == size ? size : 0;
    ++groups_closed_;
  }
  auto checked = group_check_->finish();
  if (!checked) {
    if (checked.error().code != ErrorCode::kInvalidArgument) {
      return tl::unexpected(checked.error());
    }
    return fail(ErrorCode::kInvalidArgument,
                "a group returns after another began: " + checked.error().to_string(),
                "sort the records so that those of one group are consecutive");
  }
  group_check_.reset();
  for (const char* suffix : {".ids", ".order", ".spans"}) {
    PLIMSOLL_TRY_VOID(remove_file(partial_.path() / (std::string(kGroupCheckName) + suffix)));
  }
  header.groups = groups_closed_;
  header.uniform_group = std::max<std::int64_t>(uniform_group_, 0);
  PLIMSOLL_TRY_VOID(group_table_->append(static_cast<std::uint64_t>(rows_)));
  PLIMSOLL_TRY(const SideFile side, group_table_->finish());
  group_table_.reset();
  if (header.groups == 0 || header.uniform_group > 0) {
    PLIMSOLL_TRY_VOID(remove_file(partial_.path() / kFeatureGroupsFile));
  } else {
    header.group_table = side;
  }
  return {};
}

Result<void> FeatureWriter::Impl::finish() {
  if (failed_) {
    return tl::unexpected(*failed_);
  }
  // Until the rename succeeds every way out leaves a writer that can only be destroyed.
  failed_ = make_error(ErrorCode::kInvalidArgument,
                       options_.directory.string() + ": this writer is already finished");
  if (before_ && rows_ == 0) {
    return {};  // A part of no records would be one of few for nothing.
  }
  if (in_block_ > 0) {
    const std::int64_t used = layout_.is_ragged() ? in_block_ : in_block_ * layout_.stride;
    const auto tail =
        blocks_.subspan(static_cast<std::size_t>(buffered_ * layout_.block_bytes + used),
                        static_cast<std::size_t>(layout_.block_bytes - used));
    std::fill(tail.begin(), tail.end(), std::byte{0});
    PLIMSOLL_TRY_VOID(seal_block());
  }
  FeatureHeader header;
  header.layout = layout_;
  header.rows = rows_;
  header.after = before_ ? before_->info().fingerprint : std::string();
  if (packed_) {
    PLIMSOLL_TRY(header.stored, packed_->finish());
  } else {
    PLIMSOLL_TRY_VOID(write_blocks());
    PLIMSOLL_TRY_VOID(records_.sync());
  }
  PLIMSOLL_TRY(header.checksums, checksums_->finish());
  PLIMSOLL_TRY(header.ids, id_index_->finish());
  if (id_table_) {
    PLIMSOLL_TRY(header.id_table, id_table_->finish());
  }
  if (options_.grouped) {
    PLIMSOLL_TRY_VOID(finish_groups(header));
  }
  if (layout_.is_ragged()) {
    header.ragged.stream_bytes = stream_.end();
    PLIMSOLL_TRY(header.ragged.places, places_->finish());
    PLIMSOLL_TRY(header.ragged.lengths, lengths_->finish());
  }
  crash_point("features.header.before");
  PLIMSOLL_TRY_VOID(replace_file(partial_.path() / kFeatureHeaderFile, header.to_json()));
  return partial_.finish();
}

FeatureWriter::FeatureWriter(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
FeatureWriter::FeatureWriter(FeatureWriter&&) noexcept = default;
FeatureWriter& FeatureWriter::operator=(FeatureWriter&&) noexcept = default;
FeatureWriter::~FeatureWriter() = default;

Result<FeatureWriter> FeatureWriter::create(Governor governor,
                                            const FeatureWriterOptions& options) {
  PLIMSOLL_TRY(FeatureLayout layout, plan_feature_layout(options.columns));
  if (options.compression != BlockCompression::kNone) {
    PLIMSOLL_TRY_VOID(require_lz4(options.directory));
  }
  PLIMSOLL_TRY(auto partial, start_partial(options.directory));
  FeatureWriterOptions chosen = options;
  chosen.directory = partial.target();
  auto impl = std::make_unique<Impl>(std::move(chosen), std::move(layout), std::move(partial));
  PLIMSOLL_TRY_VOID(impl->start(governor));
  return FeatureWriter(std::move(impl));
}

Result<FeatureWriter> FeatureWriter::extend(Governor governor,
                                            const FeatureExtendOptions& options) {
  PLIMSOLL_TRY(const FeatureInfo info, FeatureStore::inspect(options.directory));
  if (info.parts >= kFeaturePartsMax) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: it has {} parts, as many as a store can",
                            options.directory.string(), info.parts),
                "join them: plimsoll store compact DIR");
  }
  PLIMSOLL_TRY(auto partial, start_partial(feature_part_path(options.directory, info.parts)));
  // Who holds the directory's lock is the only one to add to these parts.
  PLIMSOLL_TRY(FeatureStore before,
               FeatureStore::open(governor, {.directory = options.directory,
                                             .cache_bytes = info.floor_bytes + kLookUpBytes,
                                             .io_threads = kLookUpThreads,
                                             .parts = info.parts}));
  PLIMSOLL_TRY(FeatureLayout layout, plan_feature_layout(info.columns));
  auto impl =
      std::make_unique<Impl>(FeatureWriterOptions{.directory = options.directory,
                                                  .columns = info.columns,
                                                  .grouped = info.groups > 0,
                                                  .allow_non_finite = options.allow_non_finite,
                                                  .compression = info.compression,
                                                  .buffer_bytes = options.buffer_bytes},
                             std::move(layout), std::move(partial));
  impl->follow(std::move(before));
  PLIMSOLL_TRY_VOID(impl->start(governor));
  return FeatureWriter(std::move(impl));
}

Result<void> FeatureWriter::append(std::span<const std::int64_t> ids,
                                   std::span<const std::span<const std::byte>> columns,
                                   std::span<const std::int64_t> groups,
                                   std::span<const std::span<const std::int64_t>> lengths) {
  return impl_->append(ids, columns, groups, lengths);
}

Result<void> FeatureWriter::finish() {
  return impl_->finish();
}

std::int64_t FeatureWriter::rows() const noexcept {
  return impl_->rows();
}

const FeatureWriterOptions& FeatureWriter::options() const noexcept {
  return impl_->options();
}

}  // namespace plimsoll
