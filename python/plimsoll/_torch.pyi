# SPDX-License-Identifier: Apache-2.0
"""The tensor arena and the recipes, linked to the installed torch. Importing it installs the arena.

Private: plimsoll.Governor attaches the arena; plimsoll.train(), resume() and evaluate() wrap the
recipes. Where plimsoll was built without torch, importing this raises ImportError saying how.
"""
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
def purge() -> int:
    """Gives free pages back to the system; returns the bytes."""
def make_deterministic(compute_threads: int) -> None:
    """Fixes what makes torch's results depend on the run. Errors: ValueError without MKL_CBWR."""
def train(recipe: str, config: str, options: list[tuple[str, str]], quiet: bool) -> str:
    """Returns the summary as JSON. Errors: ValueError, BudgetExceeded, OSError."""
def resume(run: str, options: list[tuple[str, str]], quiet: bool) -> str:
    """Returns the summary as JSON. Errors: NotFoundError, ValueError."""
def evaluate(run: str) -> str:
    """Returns {"step", "epoch", "recall", …} as JSON. Errors: NotFoundError."""
def run_program(arguments: list[str]) -> int:
    """The program `plimsoll`; returns its exit status."""
