// SPDX-License-Identifier: Apache-2.0
//
// train, resume, eval and plan, where there is no LibTorch.
#include "cli/commands.h"
#include "cli/training.h"

namespace plimsoll {
namespace {

int without_torch() {
  return report(make_error(ErrorCode::kNotFound, "this program was built without LibTorch",
                           "install torch into .venv (tools/setup.sh does) and build again with "
                           "-DPLIMSOLL_WITH_TORCH=ON"));
}

}  // namespace

int run_training(const CosirSettings& /*settings*/, const Typed& /*typed*/, bool /*resume*/) {
  return without_torch();
}
int run_training(const CanKdSettings& /*settings*/, const Typed& /*typed*/, bool /*resume*/) {
  return without_torch();
}
int run_evaluation(const CosirSettings& /*settings*/, const Typed& /*typed*/) {
  return without_torch();
}
int run_evaluation(const CanKdSettings& /*settings*/, const Typed& /*typed*/) {
  return without_torch();
}
int run_planning(const CosirSettings& /*settings*/, const Typed& /*typed*/) {
  return without_torch();
}
int run_planning(const CanKdSettings& /*settings*/, const Typed& /*typed*/) {
  return without_torch();
}

}  // namespace plimsoll
