// SPDX-License-Identifier: Apache-2.0
//
// A BudgetExceeded that a function of Python raised, and that goes through an Error back to Python:
// its tag may be a device's name, its holders those of a device, and its advice any text, for which
// an Error has no place.
//
// Threads: with Python's lock.   Memory: the last one's texts.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include <nanobind/nanobind.h>

#include "plimsoll/result.h"

namespace plimsoll::python {

struct OverBudget {
  std::string tag{};
  std::map<std::string, std::int64_t> held_bytes{};
  std::string advice{};
};

/// Keeps what `error` was made of, until the next one.
void keep_over_budget(const Error& error, OverBudget raised);
/// What was kept for this error, or a copy of it.
[[nodiscard]] std::optional<OverBudget> kept_over_budget(const Error& error);

/// What a reader of files raised, if it is an expected failure; Ctrl-C and anything else goes on as
/// it is. Requires: called where it was caught.
[[nodiscard]] Error reader_error(nanobind::python_error& raised);

}  // namespace plimsoll::python
