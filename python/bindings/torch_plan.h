// SPDX-License-Identifier: Apache-2.0
//
// bind_plan() adds the planner to plimsoll._torch.
//
// Threads: as its callers.   Memory: none of its own.
#pragma once

#include <nanobind/nanobind.h>

namespace plimsoll::python {

void bind_plan(nanobind::module_& m);

}  // namespace plimsoll::python
