// SPDX-License-Identifier: Apache-2.0
//
// What train, resume, eval and plan call once the options are in order.
//
// Two files hold these functions, and a program links one of them: with_torch.cpp runs the recipes,
// without_torch.cpp says that this program cannot. So everything else that the program does needs
// no torch, in Python's package too.
//
// Threads: single-owner.   Memory: a few strings.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "recipes/can_kd/config.h"
#include "recipes/cosir_config.h"

namespace plimsoll {

/// What the user typed for train, plan, resume or eval.
struct Typed {
  std::string config{};
  std::string run{};
  std::vector<GivenKey> flags{};     // In order.
  std::vector<std::string> pairs{};  // --set key=value
  bool json{false};
  bool quiet{false};
  bool accept_other_processor{false};  // Of resume.
  bool choices{false};                 // Of plan: also those that were not asked for.
  std::int64_t effective_batch{0};     // Of plan can-kd: graphs an optimizer step; 0: not given.
  std::string device{"cpu"};           // Of plan.
  std::string device_memory_limit{};
};

/// Each prints its result, or the error, and returns the exit status.
int run_training(const CosirSettings& settings, const Typed& typed, bool resume);
int run_training(const CanKdSettings& settings, const Typed& typed, bool resume);
int run_evaluation(const CosirSettings& settings, const Typed& typed);
int run_evaluation(const CanKdSettings& settings, const Typed& typed);
int run_planning(const CosirSettings& settings, const Typed& typed);
int run_planning(const CanKdSettings& settings, const Typed& typed);

}  // namespace plimsoll
