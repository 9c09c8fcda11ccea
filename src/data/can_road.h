// SPDX-License-Identifier: Apache-2.0
//
// RoadLabels: which frames of a capture of the data set ROAD were injected.
//
// Its folders have logs of candump's and one capture_metadata.json, which says of each capture from
// which second to which one frames of an id, and of a payload with X for any digit, were injected.
//
// Threads: values.   Memory: none of its own.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "data/can_fields.h"
#include "plimsoll/result.h"

namespace plimsoll {

inline constexpr const char* kRoadMetadata = "capture_metadata.json";
inline constexpr std::size_t kRoadMetadataMost = 16 << 20;

struct RoadLabels {
  bool known{false};  ///< An interval is given; else nothing is known of the frames.
  double begin{0};    ///< Seconds from the first frame on.
  double end{0};
  std::optional<std::uint32_t> id{};  ///< Nothing: of any id.
  std::string payload{};              ///< Hexadecimal digits and X; empty: any payload.

  [[nodiscard]] bool injected(const CanFrame& frame, const CanTime& first,
                              const CanTime& now) const noexcept;
};

/// Of a capture; nothing where no metadata lie beside it, or they do not know it.
/// Errors: kCorrupt naming the metadata; kIo.
Result<std::optional<RoadLabels>> road_labels(const std::filesystem::path& capture);

}  // namespace plimsoll
