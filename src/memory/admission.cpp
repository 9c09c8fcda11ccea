// SPDX-License-Identifier: Apache-2.0
#include "memory/admission.h"

#include "base/check.h"

namespace plimsoll {

Admission::~Admission() {
  if (governor_.valid()) {
    governor_.release_admission(spec_);
  }
}

Result<void> Admission::take(const Governor& governor, Tag tag, std::int64_t bytes,
                             const char* option) {
  const PoolSpec spec{.tag = tag, .floor_bytes = bytes, .cap_bytes = bytes, .option = option};
  Governor asked = governor;
  PLIMSOLL_TRY_VOID(asked.admit(spec));
  governor_ = asked;
  spec_ = spec;
  return {};
}

}  // namespace plimsoll
