# SPDX-License-Identifier: Apache-2.0
"""`plimsoll plan --choices`: a plan for each value of the options that move memory, those that fit, the fastest first.

Threads: the calling one.   Memory: that of one plan at a time.
"""
from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from .._core import format_bytes
from ..errors import BudgetExceeded


Plan = Callable[[Any], dict[str, Any]]


def weigh(plan: Plan, options: Any, choices: dict[str, tuple[Any, ...]], effective: int, accumulates: str, unit: str) -> list[dict[str, Any]]:
    """Plans every combination of choices, the options' own values among them, and leaves out those that do not fit.

    effective:   number of units of an optimizer step in every choice; 0: none. Where a batch holds fewer, `accumulates` is the option
                 that says how many batches make a step.
    """
    found = []
    asked = {name: getattr(options, name) for name in choices}
    for values in itertools.product(*(dict.fromkeys([*values, asked[name]]) for name, values in choices.items())):
        chosen = dict(zip(choices, values))
        try:
            said = _planned(plan, dataclasses.replace(options, **chosen), effective, accumulates)
        except BudgetExceeded:
            continue
        size, shown = said["batch_size"], chosen
        if effective:  # The fewest batches, and those as even as can be: their peak is at most the planned one.
            count = -(-effective // size)
            size = -(-effective // count)
            shown = {**chosen, "batch_size": size, accumulates: count}
        found.append({"options": ", ".join(f"{name} = {_text(value)}" for name, value in shown.items()), "batch_size": size,
                      "peak_bytes": said["peak_bytes"], f"bytes_per_{_one(unit)}": said["bytes_per_row"],
                      f"{unit}_per_second": said["batch_size"] / said["step_seconds"], "configured": chosen == asked})
    return sorted(found, key=lambda one: -one[f"{unit}_per_second"])


def _planned(plan: Plan, options: Any, effective: int, accumulates: str) -> dict[str, Any]:
    """Plans a step of so many units: at once where they fit, else in batches. Errors: BudgetExceeded."""
    if not effective:
        return plan(options)
    with contextlib.suppress(BudgetExceeded):
        said = plan(dataclasses.replace(options, **{accumulates: 1}))
        if said["batch_size"] >= effective:
            return said
    return plan(dataclasses.replace(options, **{accumulates: 2}))  # As much memory as any larger number.


def table_of(choices: list[dict[str, Any]], of: str, unit: str) -> str:
    """Returns the choices as a table below a plan's text."""
    row = _one(unit)
    lines = ["", f"choices for {of}", f"  {unit:>6}{'peak':>12}{f'per {row}':>12}{f'{unit}/s':>11}"]
    lines += [f"  {one['batch_size']:>6}{format_bytes(one['peak_bytes']):>12}{format_bytes(one[f'bytes_per_{row}']):>12}"
              f"{one[f'{unit}_per_second']:>11.0f}   {one['options']}{'  (as configured)' if one['configured'] else ''}" for one in choices]
    return "\n".join(lines)


def _one(unit: str) -> str:
    return unit.removesuffix("s")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
