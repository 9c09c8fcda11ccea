// SPDX-License-Identifier: Apache-2.0
//
// PackedBlockWriter: see feature_block_writer.h.
//
// Threads, Memory: as the header says.
#include "store/feature_block_writer.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/round.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kPaddingShare = 8;  // Of a block's bytes, that many may go to a page saved.

// Room for a block behind up to a page of rest, whatever was asked for.
std::int64_t room_for(std::int64_t block_bytes, std::int64_t buffer_bytes) noexcept {
  return round_up(std::max(buffer_bytes, block_bytes + 2 * kFeaturePage), kFeaturePage);
}

}  // namespace

std::int64_t PackedBlockWriter::memory_bytes(std::int64_t block_bytes,
                                             std::int64_t buffer_bytes) noexcept {
  return room_for(block_bytes, buffer_bytes) + block_bytes + kTableBuffer + kFeaturePage +
         round_up(encoder_state_bytes(), kFeaturePage);
}

Result<PackedBlockWriter> PackedBlockWriter::create(const std::filesystem::path& directory,
                                                    std::int64_t block_bytes,
                                                    std::int64_t buffer_bytes, Slab& slab,
                                                    FeatureTableWriter& checksums) {
  PackedBlockWriter writer;
  writer.block_bytes_ = block_bytes;
  writer.checksums_ = &checksums;
  writer.form_.compression = BlockCompression::kLz4;
  writer.buffer_ = slab.take<std::byte>(room_for(block_bytes, buffer_bytes), kFeaturePage);
  writer.packed_ = slab.take<std::byte>(block_bytes, kFeaturePage);
  writer.state_ = slab.take<std::byte>(round_up(encoder_state_bytes(), kFeaturePage), kFeaturePage);
  PLIMSOLL_TRY(writer.records_,
               File::open(directory / kFeatureRecordsFile, FileMode::kCreate, true));
  PLIMSOLL_TRY(writer.blocks_,
               FeatureTableWriter::create(directory / kFeatureBlocksFile, 8,
                                          slab.take<std::byte>(kTableBuffer, kFeaturePage)));
  writer.content_ =
      FeatureTableWriter::counting(4, slab.take<std::byte>(kFeaturePage, kFeaturePage));
  return writer;
}

Result<void> PackedBlockWriter::append(std::span<const std::byte> block) {
  PLIMSOLL_TRY_VOID(content_->append(crc32c(block)));
  const std::int64_t size = encode_block(block, packed_, state_);
  const bool plain = size == 0;
  const auto stored =
      plain ? block : std::span<const std::byte>(packed_).first(static_cast<std::size_t>(size));
  const auto bytes = static_cast<std::int64_t>(stored.size());
  const std::int64_t in_page = end_ % kFeaturePage;
  const std::int64_t to_next = kFeaturePage - in_page;
  const bool one_page_more =
      divide_up(in_page + bytes, kFeaturePage) > divide_up(bytes, kFeaturePage);
  const bool moves = one_page_more && (plain || to_next <= bytes / kPaddingShare);
  PLIMSOLL_TRY_VOID(end_block(moves ? to_next : 0));
  if (end_ - begin_ + bytes > static_cast<std::int64_t>(buffer_.size())) {
    PLIMSOLL_TRY_VOID(write_whole_pages());
  }
  PLIMSOLL_TRY_VOID(
      blocks_->append(block_entry(end_, plain ? BlockCoding::kPlain : BlockCoding::kLz4)));
  std::memcpy(buffer_.data() + (end_ - begin_), stored.data(), stored.size());
  end_ += bytes;
  crc_ = crc32c(stored);
  any_ = true;
  form_.plain_blocks += plain ? 1 : 0;
  return {};
}

// The zeros between a block and the next belong to the first of the two.
Result<void> PackedBlockWriter::end_block(std::int64_t padding) {
  static constexpr std::array<std::byte, kFeaturePage> kZeros{};
  if (!any_) {
    return {};
  }
  end_ += padding;
  return checksums_->append(
      crc32c(std::span(kZeros).first(static_cast<std::size_t>(padding)), crc_));
}

Result<void> PackedBlockWriter::write_whole_pages() {
  const std::int64_t whole = (end_ - begin_) / kFeaturePage * kFeaturePage;
  const std::int64_t rest = end_ - begin_ - whole;
  const auto bytes = buffer_.first(static_cast<std::size_t>(whole));
  PLIMSOLL_TRY_VOID(records_.write_at(begin_, bytes));
  std::memmove(buffer_.data(), buffer_.data() + whole, static_cast<std::size_t>(rest));
  std::fill(buffer_.begin() + rest, buffer_.begin() + rest + whole, std::byte{0});
  begin_ += whole;
  return {};
}

Result<StoredForm> PackedBlockWriter::finish() {
  PLIMSOLL_TRY_VOID(end_block(round_up(end_, kFeaturePage) - end_));
  PLIMSOLL_TRY_VOID(write_whole_pages());
  PLIMSOLL_TRY_VOID(records_.sync());
  form_.records_bytes = end_;
  PLIMSOLL_TRY_VOID(blocks_->append(block_entry(end_, BlockCoding::kPlain)));
  PLIMSOLL_TRY(form_.blocks, blocks_->finish());
  PLIMSOLL_TRY(const SideFile content, content_->finish());
  form_.content_crc = content.crc;
  return form_;
}

}  // namespace plimsoll
