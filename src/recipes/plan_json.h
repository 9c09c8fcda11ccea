// SPDX-License-Identifier: Apache-2.0
//
// What every recipe's plan says of a batch, as JSON.
//
// Reading order: plan/batch_plan.h, this file.
//
// Threads: pure functions.   Memory: the value.
#pragma once

#include <nlohmann/json.hpp>

#include "plan/batch_plan.h"

namespace plimsoll {

/// {"batch_size", "label", "peak_bytes", …, "parts": {…}}; `per_row` names the bytes of one row
/// more: "bytes_per_row", "bytes_per_graph".
[[nodiscard]] inline nlohmann::ordered_json batch_json(const BatchPlan& batch,
                                                       const char* per_row) {
  const PeakParts& parts = batch.peak.parts;
  return {{"batch_size", batch.batch_size},
          {"label", label_name(batch.label)},
          {"peak_bytes", batch.peak.bytes},
          {"leased_bytes", batch.leased_bytes},
          {"available_bytes", batch.available_bytes},
          {per_row, batch.bytes_per_row},
          {"operator", batch.peak.op},
          {"phase", phase_name(batch.peak.phase)},
          {"parts",
           {{"static", parts.static_bytes},
            {"gradients", parts.gradient_bytes},
            {"activations", parts.activation_bytes},
            {"temporaries", parts.temporary_bytes}}}};
}

}  // namespace plimsoll
