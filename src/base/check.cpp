// SPDX-License-Identifier: Apache-2.0
#include "base/check.h"

#include <fmt/core.h>

namespace plimsoll {

void check_failed(const char* file, int line, const char* condition, const char* message) {
  throw Exception(make_error(ErrorCode::kInternal,
                             fmt::format("{}:{}: {} ({})", file, line, message, condition),
                             "this is a bug in Plimsoll; please report it"));
}

}  // namespace plimsoll
