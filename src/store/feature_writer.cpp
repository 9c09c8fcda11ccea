// SPDX-License-Identifier: Apache-2.0
//
// FeatureWriter: streams records into DIRECTORY.partial and renames it into place.
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
#include "store/feature_table.h"
#include "store/id_index.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

constexpr const char* kGroupCheckName = "group_check";

// Every file a writer may leave in DIRECTORY.partial.
constexpr std::array<const char*, 17> kPartialFiles{
    kFeatureRecordsFile, kFeatureChecksumsFile, kFeatureIdsFile,     kFeatureGroupsFile,
    kFeatureHeaderFile,  "features.json.new",   kFeatureBlocksFile,  "index.ids",
    "index.order",       "index.spans",         "index.runs.0",      "index.runs.1",
    "group_check.ids",   "group_check.order",   "group_check.spans", "group_check.runs.0",
    "group_check.runs.1"};

}  // namespace

class FeatureWriter::Impl {
 public:
  Impl(FeatureWriterOptions options, FeatureLayout layout, PartialDirectory partial)
      : options_(std::move(options)), layout_(std::move(layout)), partial_(std::move(partial)) {}

  Result<void> start(Governor& governor);
  Result<void> append(std::span<const std::int64_t> ids,
                      std::span<const std::span<const std::byte>> columns,
                      std::span<const std::int64_t> groups);
  Result<void> finish();
  [[nodiscard]] std::int64_t rows() const noexcept { return rows_; }

 private:
  Result<void> check_request(std::span<const std::int64_t> ids,
                             std::span<const std::span<const std::byte>> columns,
                             std::span<const std::int64_t> groups) const;
  Result<void> append_ids(std::span<const std::int64_t> ids);
  Result<void> append_groups(std::span<const std::int64_t> groups);
  Result<void> append_records(std::size_t count,
                              std::span<const std::span<const std::byte>> columns);
  Result<void> seal_block();
  Result<void> write_blocks();
  void clear_padding(std::span<std::byte> blocks) const noexcept;
  Result<void> finish_groups(FeatureHeader& header);

  FeatureWriterOptions options_;
  FeatureLayout layout_;
  PartialDirectory partial_;
  Slab slab_;
  std::span<std::byte> blocks_{};  // Blocks being filled; whole blocks are written at once.
  std::span<std::byte> id_table_buffer_{};
  File records_;                             // Without compression,
  std::optional<PackedBlockWriter> packed_;  // or with it.
  std::optional<FeatureTableWriter> checksums_;
  std::optional<FeatureTableWriter> id_table_;  // Only once ids are not 0, 1, 2, …
  std::optional<FeatureTableWriter> group_table_;
  std::optional<IdIndexWriter> id_index_;
  std::optional<IdIndexWriter> group_check_;

  std::int64_t rows_{0};
  std::int64_t in_block_{0};     // Records in the block being filled.
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
  const std::int64_t fixed = index_bytes + group_bytes + 3 * kTableBuffer;
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

Result<void> FeatureWriter::Impl::check_request(std::span<const std::int64_t> ids,
                                                std::span<const std::span<const std::byte>> columns,
                                                std::span<const std::int64_t> groups) const {
  if (columns.size() != layout_.columns.size()) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("{} columns were given, {} are declared",
                                                         columns.size(), layout_.columns.size()));
  }
  if (groups.size() != (options_.grouped ? ids.size() : 0)) {
    return fail(
        ErrorCode::kInvalidArgument,
        fmt::format("{} group ids were given for {} records of a store that is {}", groups.size(),
                    ids.size(), options_.grouped ? "grouped" : "not grouped"));
  }
  for (std::size_t k = 0; k < columns.size(); ++k) {
    const ColumnSpec& column = layout_.columns[k];
    const auto expected = static_cast<std::size_t>(column.bytes()) * ids.size();
    if (columns[k].size() != expected) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("column \"{}\": {} bytes were given for {} records of {} bytes",
                              column.name, columns[k].size(), ids.size(), column.bytes()));
    }
    const std::int64_t bad =
        options_.allow_non_finite ? -1 : first_non_finite(columns[k], column.dtype);
    if (bad >= 0) {
      const std::int64_t record = bad * dtype_bytes(column.dtype) / column.bytes();
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("record {} (id {}), column \"{}\": holds a NaN or an infinity",
                              rows_ + record, ids[static_cast<std::size_t>(record)], column.name),
                  "clean the features first, or set allow_non_finite");
    }
  }
  return {};
}

Result<void> FeatureWriter::Impl::append(std::span<const std::int64_t> ids,
                                         std::span<const std::span<const std::byte>> columns,
                                         std::span<const std::int64_t> groups) {
  if (failed_) {
    return tl::unexpected(*failed_);
  }
  auto done = check_request(ids, columns, groups);
  if (done) {
    done = append_ids(ids);
  }
  if (done && options_.grouped) {
    done = append_groups(groups);
  }
  if (done) {
    done = append_records(ids.size(), columns);
  }
  if (!done) {
    failed_ = done.error();
  }
  return done;
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

Result<void> FeatureWriter::Impl::append_records(
    std::size_t count, std::span<const std::span<const std::byte>> columns) {
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

// Padding must stay zero; where blocks have none, every byte is written again.
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
  if (in_block_ > 0) {
    const std::int64_t used = in_block_ * layout_.stride;
    const auto tail =
        blocks_.subspan(static_cast<std::size_t>(buffered_ * layout_.block_bytes + used),
                        static_cast<std::size_t>(layout_.block_bytes - used));
    std::fill(tail.begin(), tail.end(), std::byte{0});
    PLIMSOLL_TRY_VOID(seal_block());
  }
  FeatureHeader header;
  header.layout = layout_;
  header.rows = rows_;
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
  PLIMSOLL_TRY(auto partial,
               PartialDirectory::create(options.directory, PartialDirectory::Target::kNew,
                                        ".partial", kPartialFiles));
  FeatureWriterOptions chosen = options;
  chosen.directory = partial.target();
  auto impl = std::make_unique<Impl>(std::move(chosen), std::move(layout), std::move(partial));
  PLIMSOLL_TRY_VOID(impl->start(governor));
  return FeatureWriter(std::move(impl));
}

Result<void> FeatureWriter::append(std::span<const std::int64_t> ids,
                                   std::span<const std::span<const std::byte>> columns,
                                   std::span<const std::int64_t> groups) {
  return impl_->append(ids, columns, groups);
}

Result<void> FeatureWriter::finish() {
  return impl_->finish();
}

std::int64_t FeatureWriter::rows() const noexcept {
  return impl_->rows();
}

}  // namespace plimsoll
