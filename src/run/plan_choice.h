// SPDX-License-Identifier: Apache-2.0
//
// PlanChoice: one way to train that `plimsoll plan --choices` has weighed.
//
// Reading order: plan/batch_plan.h, this file.
//
// Threads: a value.   Memory: the value.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "plan/batch_plan.h"

namespace plimsoll {

/// Options that move memory and time, and what a step comes to with them.
struct PlanChoice {
  std::string options{};  ///< "gradient_checkpointing = true, precision = 32, …"
  BatchPlan batch{};
  double rows_per_second{0.0};  ///< Of steps alone, measured.
  bool configured{false};       ///< The one that the settings ask for.
};

inline void fastest_first(std::vector<PlanChoice>& choices) {
  std::stable_sort(choices.begin(), choices.end(), [](const auto& one, const auto& other) {
    return one.rows_per_second > other.rows_per_second;
  });
}

}  // namespace plimsoll
