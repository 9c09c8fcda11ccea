// SPDX-License-Identifier: Apache-2.0
// A lease has one owner: it moves, and can not be copied.
#include <utility>

#include "plimsoll/lease.h"

plimsoll::Lease take(plimsoll::Lease& lease) {
#ifdef PLIMSOLL_MUST_FAIL
  return lease;
#else
  return std::move(lease);
#endif
}
