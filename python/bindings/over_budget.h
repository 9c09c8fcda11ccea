// SPDX-License-Identifier: Apache-2.0
//
// What a function of Python raised, as an Error that may go back to Python. The tag of a
// BudgetExceeded may be a device's name, and its holders those of a device, for which an Error has
// no place.
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
};

/// What was raised, if it is an expected failure; otherwise it goes on as it is. Requires: called
/// where it was caught.
Error error_of(nanobind::python_error& raised);

/// Keeps what `error` was made of, until the next one.
void keep_over_budget(const Error& error, OverBudget raised);
/// What was kept for this error, or a copy of it.
[[nodiscard]] std::optional<OverBudget> kept_over_budget(const Error& error);

}  // namespace plimsoll::python
