// SPDX-License-Identifier: Apache-2.0
// A Result that nobody looks at is a compiler error: a refusal can not be overlooked.
#include "plimsoll/governor.h"

void reserve(plimsoll::Governor& governor) {
#ifdef PLIMSOLL_MUST_FAIL
  governor.reserve(plimsoll::Tag::kOther, 1);
#else
  auto lease = governor.reserve(plimsoll::Tag::kOther, 1);
  static_cast<void>(lease.has_value());
#endif
}
