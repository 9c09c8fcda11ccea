// SPDX-License-Identifier: Apache-2.0
#include "plimsoll/token_batches.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include <fmt/core.h>

#include "base/check.h"
#include "plimsoll/sample_order.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kIgnored = -100;  // As torch's cross-entropy has it.
constexpr std::int64_t kPackedRowsMost = 1 << 20;
constexpr std::uint64_t kSequenceSeed = 0x7061636BULL;  // Another order than that of the rows.
constexpr std::uint64_t kHeldOutSeed = 0x68656C64ULL;   // And that by which rows are held out.

// Rows by bin: places among `lengths`, each bin in the order in which it was filled.
std::vector<std::vector<std::size_t>> best_fit_decreasing(const std::vector<std::int64_t>& lengths,
                                                          std::int64_t capacity) {
  std::vector<std::size_t> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return lengths[a] > lengths[b]; });
  std::vector<std::vector<std::size_t>> bins;
  std::set<std::pair<std::int64_t, std::size_t>> rooms;  // Room left, and whose.
  for (const std::size_t row : order) {
    const auto best = rooms.lower_bound({lengths[row], 0});
    std::size_t bin = bins.size();
    std::int64_t room = capacity;
    if (best == rooms.end()) {
      bins.emplace_back();
    } else {
      std::tie(room, bin) = *best;
      rooms.erase(best);
    }
    bins[bin].push_back(row);
    rooms.emplace(room - lengths[row], bin);
  }
  return bins;
}

}  // namespace

TokenBatches::TokenBatches(const TokenSet* set, const TokenBatchesOptions& options)
    : set_(set), options_(options) {}

Result<TokenBatches> TokenBatches::open(const TokenSet* set, const TokenBatchesOptions& options) {
  const auto wrong = [](const char* option, std::int64_t value, const char* why) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("{}: {} {}", option, value, why));
  };
  if (set->rows() == 0) {
    return fail(ErrorCode::kInvalidArgument, "the token set has no rows");
  }
  if (options.batch_size < 1) {
    return wrong("batch_size", options.batch_size, "is below 1");
  }
  if (options.sequence_length < 2 || options.sequence_length > kRowTokensMost) {
    return wrong("sequence_length", options.sequence_length, "is below 2, or above 2^27");
  }
  if (options.window < 1 || options.window > kPackedRowsMost) {
    return wrong("window", options.window, "is not 1 to 2^20 rows");
  }
  if (options.pad_id < 0 || options.pad_id >= set->info().vocabulary) {
    return wrong("pad_id", options.pad_id, "is no id of the vocabulary");
  }
  if (options.held_out < 0 || options.held_out >= set->rows() ||
      (options.only_held_out && options.held_out == 0)) {
    return wrong("held_out", options.held_out, "rows leave none, or none to hold out");
  }
  TokenBatches batches(set, options);
  PLIMSOLL_TRY_VOID(batches.seek(options.place));
  return batches;
}

std::int64_t TokenBatches::row(std::int64_t i) const {
  if (options_.held_out == 0) {
    return i;
  }
  const SampleOrder order(set_->rows(), kHeldOutSeed, 0);  // The last of it are held out.
  return order.at(options_.only_held_out ? set_->rows() - options_.held_out + i : i);
}

Result<void> TokenBatches::plan(const TokenPlace& place) {
  if (planned_epoch_ == place.epoch && planned_position_ == place.position) {
    return {};
  }
  planned_epoch_ = -1;
  const SampleOrder order(this->rows(), options_.seed, place.epoch);
  const std::int64_t count = std::min(options_.window, this->rows() - place.position);
  std::vector<std::int64_t> rows;
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t at = place.position + i;
    rows.push_back(row(options_.shuffle ? order.at(at) : at));
    PLIMSOLL_TRY(const std::int64_t length, set_->length(rows.back()));
    lengths.push_back(std::min(length, options_.sequence_length));
  }
  rows_.clear();
  ends_.clear();
  if (!options_.packing) {
    rows_ = std::move(rows);
    ends_.resize(rows_.size());
    std::iota(ends_.begin(), ends_.end(), 1);
  } else {
    const auto bins = best_fit_decreasing(lengths, options_.sequence_length);
    // Bins come long rows first: they are shuffled too, in an order of the window's own.
    const SampleOrder mixed(static_cast<std::int64_t>(bins.size()), options_.seed ^ kSequenceSeed,
                            place.epoch * ((this->rows() + options_.window - 1) / options_.window) +
                                place.position / options_.window);
    for (std::int64_t i = 0; i < mixed.samples(); ++i) {
      for (const std::size_t row :
           bins[static_cast<std::size_t>(options_.shuffle ? mixed.at(i) : i)]) {
        rows_.push_back(rows[row]);
      }
      ends_.push_back(rows_.size());
    }
  }
  planned_epoch_ = place.epoch;
  planned_position_ = place.position;
  return {};
}

Result<void> TokenBatches::seek(const TokenPlace& place) {
  if (place.epoch < 0 || place.position < 0 || place.position >= rows() ||
      place.position % options_.window != 0 || place.sequence < 0) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("place: there is no position {} of {} rows in windows of {}",
                            place.position, rows(), options_.window),
                "give what state said, with the same options");
  }
  PLIMSOLL_TRY_VOID(plan(place));
  if (place.sequence >= sequences()) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("place: there is no sequence {} of the {} of its window",
                            place.sequence, sequences()),
                "give what state said, with the same options");
  }
  options_.place = place;
  return {};
}

// Copies a sequence of the window into a slot of the batch.
Result<void> TokenBatches::put(std::int64_t sequence, std::int64_t slot, const TokenBuffers& out,
                               TokenBatch& batch) {
  const auto length = static_cast<std::size_t>(options_.sequence_length);
  const auto part = [&](std::span<std::int64_t> all) {
    return all.subspan(static_cast<std::size_t>(slot) * length, length);
  };
  const auto ids = part(out.input_ids);
  const auto labels = part(out.labels);
  const auto positions = part(out.position_ids);
  const auto documents = part(out.documents);
  std::size_t at = 0;
  const auto index = static_cast<std::size_t>(sequence);
  const std::size_t first = index == 0 ? 0 : ends_[index - 1];
  for (std::size_t i = first; i < ends_[index]; ++i) {
    PLIMSOLL_TRY(const std::int64_t tokens, set_->length(rows_[i]));
    ids_.resize(static_cast<std::size_t>(tokens));
    trained_.resize(ids_.size());
    PLIMSOLL_TRY_VOID(set_->read(rows_[i], ids_, trained_));
    const std::size_t taken = std::min(ids_.size(), length - at);
    for (std::size_t t = 0; t < taken; ++t, ++at) {
      ids[at] = ids_[t];
      labels[at] = trained_[t] != 0 && t > 0 ? ids_[t] : kIgnored;
      positions[at] = static_cast<std::int64_t>(t);
      documents[at] = static_cast<std::int64_t>(i - first);
    }
  }
  const auto trained =
      std::count_if(labels.begin(), labels.begin() + static_cast<std::ptrdiff_t>(at),
                    [](std::int64_t label) { return label != kIgnored; });
  if (trained == 0) {  // Its loss would be 0 / 0: the next sequence takes the slot.
    ++batch.left_out;
    return {};
  }
  batch.trained += trained;
  batch.tokens += static_cast<std::int64_t>(at);
  batch.rows += static_cast<std::int64_t>(ends_[index] - first);
  ++batch.sequences;
  std::fill(ids.begin() + static_cast<std::ptrdiff_t>(at), ids.end(), options_.pad_id);
  std::fill(labels.begin() + static_cast<std::ptrdiff_t>(at), labels.end(), kIgnored);
  std::fill(positions.begin() + static_cast<std::ptrdiff_t>(at), positions.end(), 0);
  std::fill(documents.begin() + static_cast<std::ptrdiff_t>(at), documents.end(), -1);
  return {};
}

Result<TokenBatch> TokenBatches::next(const TokenBuffers& out) {
  const auto needed = static_cast<std::size_t>(options_.batch_size * options_.sequence_length);
  for (const auto buffer : {out.input_ids, out.labels, out.position_ids, out.documents}) {
    if (buffer.size() != needed) {
      return fail(
          ErrorCode::kInvalidArgument,
          fmt::format("a buffer of {} elements where a batch has {}", buffer.size(), needed));
    }
  }
  TokenBatch batch{.place = options_.place};
  TokenPlace place = options_.place;
  while (batch.sequences < options_.batch_size && !batch.ends_epoch) {
    PLIMSOLL_TRY_VOID(plan(place));
    PLIMSOLL_TRY_VOID(put(place.sequence, batch.sequences, out, batch));
    if (++place.sequence == sequences()) {
      place = {.epoch = place.epoch, .position = place.position + options_.window};
      if (place.position >= rows()) {
        place = {.epoch = place.epoch + 1};
        batch.ends_epoch = true;
      }
    }
  }
  options_.place = place;
  return batch;
}

}  // namespace plimsoll
