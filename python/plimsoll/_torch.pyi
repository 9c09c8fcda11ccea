# SPDX-License-Identifier: Apache-2.0
"""The tensor arena and the recipes, linked to the installed torch. Importing it installs the arena.

Private: plimsoll.Governor attaches the arena; plimsoll.train(), resume() and evaluate() wrap the
recipes. Where plimsoll was built without torch, importing this raises ImportError saying how.
"""
from collections.abc import Callable
from typing import Any

from ._core import Governor

def attach(governor: Governor) -> None:
    """From now on new tensors are leased from `governor`.

    Requires: no torch operator is running.
    Errors:   ValueError in a forked child.
    """
def detach() -> None:
    """New tensors pass through to torch's own allocator; those alive keep their leases."""
def installed() -> bool:
    """Whether the arena is torch's CPU allocator."""
def owns(address: int) -> bool:
    """Whether the byte at this address (tensor.data_ptr()) lies in the arena."""
def arena_stats() -> dict[str, int]:
    """live_bytes, live_peak_bytes, cached_bytes, leased_bytes, allocations, foreign_frees, …"""
def reset_peak() -> None:
    """Starts the peaks again from what is live."""
def clean_up() -> dict[str, Any]:
    """Governor.clean_up(). Errors: OSError."""
def refuse(first: int, count: int) -> None:
    """For tests: the `first`-th allocation from now and the `count - 1` after it are refused."""
def purge() -> int:
    """Gives free pages back to the system; returns the bytes."""
def make_deterministic(compute_threads: int) -> None:
    """Fixes what makes torch's results depend on the run. Errors: ValueError without MKL_CBWR."""
def train(recipe: str, config: str, options: list[tuple[str, str]], quiet: bool) -> str:
    """Returns the summary as JSON. Errors: ValueError, BudgetExceeded, OSError."""
def plan(recipe: str, config: str, options: list[tuple[str, str]], device: str,
         device_memory_limit: str, choices: bool, effective_batch: int) -> str:
    """Returns the plan as JSON. Errors: ValueError, BudgetExceeded, OSError."""
def resume(run: str, options: list[tuple[str, str]], quiet: bool,
           accept_other_processor: bool) -> str:
    """Returns the summary as JSON. Errors: NotFoundError, ValueError, CorruptError."""
def evaluate(run: str) -> str:
    """Returns {"step", "epoch", "recall", …} as JSON. Errors: NotFoundError, ValueError,
    CorruptError."""
def export_model(run: str, out: str, merge: bool) -> str:
    """Returns what was written as JSON. Errors: NotFoundError, ValueError, CorruptError, OSError."""
def run_program(arguments: list[bytes]) -> int:
    """The program `plimsoll`; returns its exit status."""
def plan_batch(governor: Governor, step: Callable[[int], object | None],
               extent: Callable[[int], tuple[int, int, int]] | None, least_rows: int,
               most_rows: int, multiple: int, available_bytes: int, device: str,
               device_memory_limit: str, staying: list[tuple[int, int]]) -> dict[str, Any]:
    """plimsoll.plan_batch() without its Python side. `step` returns "" or a refusal's text.

    available_bytes: 0 for what the governor leaves; staying: address and bytes of the storages that
    stay from step to step. Errors: BudgetExceeded, ValueError.
    """
def check_device(device: str, device_memory_limit: str) -> None:
    """Whether plans can be made for the device. Errors: ValueError naming the option."""
def block_bytes(bytes: int) -> int:
    """Returns the bytes that the arena takes for a block of so many bytes: its class, or whole pages."""

def with_margin(peak_bytes: int) -> int:
    """Returns the bytes to ask the governor for where a step took `peak_bytes`."""
def with_cache_and_margin(peak_bytes: int) -> int:
    """The same under another limit: where there is more room the arena caches more."""

class StepTraces:
    """Real steps traced at several sizes, and what they say of others. Sizes are (rows, nodes, edges)."""

    def __init__(self) -> None: ...
    def add(self, extent: tuple[int, int, int], step: Callable[[int], object | None]) -> dict[str, Any]:
        """Runs the step twice and keeps the trace: {"live_peak_bytes", "events", "regions", …}."""
    def predict(self, extent: tuple[int, int, int]) -> dict[str, Any]:
        """{"peak_bytes", "bound_bytes", "admit_bytes", "operator", "phase", "parts"}."""
    def verify(self, extent: tuple[int, int, int], step: Callable[[int], object | None]) -> dict[str, Any]:
        """Runs the step twice; "exact": every block was as predicted. The trace is not kept."""
