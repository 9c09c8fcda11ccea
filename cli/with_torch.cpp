// SPDX-License-Identifier: Apache-2.0
//
// train, resume, eval and plan, where there is LibTorch.
#include "cli/commands.h"
#include "cli/training.h"
#include "recipes/can_kd/can_kd.h"
#include "recipes/cosir.h"
#include "recipes/cosir_plan.h"
#include "recipes/summary.h"

namespace plimsoll {
namespace {

template <class Summary>
int report_summary(const Result<Summary>& summary, const Typed& typed) {
  if (!summary) {
    return report(summary.error());
  }
  print(typed.json ? summary->to_json() : summary->to_text());
  return 0;
}

TrainOptions how(const Typed& typed, bool resume) {
  return {.resume = resume,
          .accept_other_processor = typed.accept_other_processor,
          .progress = {.quiet = typed.quiet}};
}
template <class Summary>
int report_run(const Result<Summary>& summary, const Typed& typed) {
  const int status = report_summary(summary, typed);
  const bool by_memory = summary && summary->stop && summary->stop->cause == Stop::Cause::kMemory;
  return by_memory ? kMemoryStatus : status;
}

DeviceChoice device_of(const Typed& typed) {
  return {.device = typed.device, .memory_limit = typed.device_memory_limit};
}
auto planned(const CosirSettings& settings, const Typed& typed) {
  return plan_cosir(settings, typed.choices, device_of(typed));
}
auto planned(const CanKdSettings& settings, const Typed& typed) {
  return plan_can_kd(settings, typed.choices, device_of(typed), typed.effective_batch);
}
template <class AnyRecipe>
int plan_and_report(const AnyRecipe& settings, const Typed& typed) {
  const auto known = check_device(device_of(typed));
  return known ? report_summary(planned(settings, typed), typed)
               : report(known.error(), kUsageStatus);
}

}  // namespace

int run_training(const CosirSettings& settings, const Typed& typed, bool resume) {
  return report_run(train_cosir(settings, how(typed, resume)), typed);
}

int run_training(const CanKdSettings& settings, const Typed& typed, bool resume) {
  return report_run(train_can_kd(settings, how(typed, resume)), typed);
}

int run_evaluation(const CosirSettings& settings, const Typed& typed) {
  return report_summary(eval_cosir(settings), typed);
}

int run_evaluation(const CanKdSettings& settings, const Typed& typed) {
  return report_summary(eval_can_kd(settings), typed);
}

int run_planning(const CosirSettings& settings, const Typed& typed) {
  return plan_and_report(settings, typed);
}

int run_planning(const CanKdSettings& settings, const Typed& typed) {
  return plan_and_report(settings, typed);
}

}  // namespace plimsoll
