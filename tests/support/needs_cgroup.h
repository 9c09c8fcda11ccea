// SPDX-License-Identifier: Apache-2.0
//
// PLIMSOLL_SKIP_WITHOUT_CGROUP: for a test that needs a memory cgroup which could not be made.
//
// With PLIMSOLL_REQUIRE_CGROUP=1 that is a failure. Else the test is skipped, and noted in the file
// $PLIMSOLL_CGROUP_SKIPS, so that tools/check.sh can say so last; as tests/support/cgroup.py does.
//
// Threads: any.   Memory: none.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>

#include <gtest/gtest.h>

namespace plimsoll::testing_support {

inline bool cgroups_are_required() {
  const char* const required = std::getenv("PLIMSOLL_REQUIRE_CGROUP");
  return required != nullptr && std::string_view(required) == "1";
}

inline void note_skip(std::string reason) {
  if (const char* const notes = std::getenv("PLIMSOLL_CGROUP_SKIPS"); notes != nullptr) {
    std::ranges::replace(reason, '\n', ' ');
    std::ofstream(notes, std::ios::app) << reason + "\n";
  }
}

}  // namespace plimsoll::testing_support

#define PLIMSOLL_SKIP_WITHOUT_CGROUP(reason)                         \
  do {                                                               \
    if (plimsoll::testing_support::cgroups_are_required()) {         \
      GTEST_FAIL() << "PLIMSOLL_REQUIRE_CGROUP=1, and " << (reason); \
    }                                                                \
    plimsoll::testing_support::note_skip(reason);                    \
    GTEST_SKIP() << (reason);                                        \
  } while (false)
