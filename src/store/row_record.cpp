// SPDX-License-Identifier: Apache-2.0
#include "store/row_record.h"

#include <cstring>
#include <type_traits>

#include "store/row_bfloat16.h"

namespace plimsoll {
namespace {

// Slots begin at a multiple of 4 bytes, and weights too, so neither is read unaligned.
template <class T, class Byte>
auto* body_of(Byte* record, std::int64_t at = 0) noexcept {
  using To = std::conditional_t<std::is_const_v<Byte>, const T, T>;
  return reinterpret_cast<To*>(record + kRowHeaderBytes + at);
}

}  // namespace

void read_weights(const TableShape& shape, const std::byte* record, float* weights) noexcept {
  if (shape.dtype == RowDType::kFloat32) {
    std::memcpy(weights, body_of<float>(record), static_cast<std::size_t>(shape.dim) * 4);
  } else {
    widen_row(body_of<std::uint16_t>(record), shape.dim, weights);
  }
}

void read_values(const TableShape& shape, const std::byte* record, float* values) noexcept {
  read_weights(shape, record, values);
  std::memcpy(values + shape.dim, body_of<float>(record, shape.weight_bytes()),
              static_cast<std::size_t>(shape.state_floats()) * 4);
}

void write_values(const TableShape& shape, std::uint32_t sequence, const float* values,
                  std::int64_t width, std::byte* record) noexcept {
  RowHeader header;
  std::memcpy(&header, record, sizeof header);
  header.sequence = sequence;
  std::memcpy(record, &header, sizeof header);
  if (shape.dtype == RowDType::kFloat32) {
    std::memcpy(body_of<float>(record), values, static_cast<std::size_t>(shape.dim) * 4);
  } else {
    round_row(values, shape.dim, body_of<std::uint16_t>(record));
  }
  const auto given = static_cast<std::size_t>(width - shape.dim) * 4;
  std::byte* const slots = body_of<std::byte>(record, shape.weight_bytes());
  std::memcpy(slots, values + shape.dim, given);
  std::memset(slots + given, 0, static_cast<std::size_t>(shape.state_floats()) * 4 - given);
}

RecordStep::RecordStep(const TableShape& shape, const RowInit& init,
                       const RowOptimizerOptions& optimizer,
                       std::span<AdamCorrection> corrections) noexcept
    : shape_(shape), seed_(rounding_seed(init.seed)), step_(optimizer, corrections, shape.dim) {}

void RecordStep::step(std::byte* record, std::int64_t id, const float* grad, double rate_scale,
                      float* scratch) const noexcept {
  RowHeader header;
  std::memcpy(&header, record, sizeof header);
  auto* const slots = body_of<float>(record, shape_.weight_bytes());
  if (shape_.dtype == RowDType::kFloat32) {
    step_.step(body_of<float>(record), slots, grad, header.sequence, rate_scale);
  } else {
    auto* const stored = body_of<std::uint16_t>(record);
    widen_row(stored, shape_.dim, scratch);
    step_.step(scratch, slots, grad, header.sequence, rate_scale);
    round_row_stochastic({seed_, id, header.sequence}, scratch, shape_.dim, stored);
  }
  ++header.sequence;
  std::memcpy(record, &header, sizeof header);
}

}  // namespace plimsoll
