# SPDX-License-Identifier: Apache-2.0
"""Settings that determine a run's bits beside its program: settings of torch, the identity, and run.toml.

Threads: settings belong to the process; one run at a time.   Memory: none.
"""
from __future__ import annotations

import json
import os
import pathlib
import random
import shlex
import sys
from typing import Any

import numpy as np
import torch

from .. import _core
from ..core import _torch_gate

# These choose kernels, and the libraries do not report their choice.
_ASKED_OF_LIBRARIES = ("MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA",
                       "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE",
                       "OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS")
OF_PROCESSOR = ("instruction_set", "ATEN_CPU_CAPABILITY", "MKL_CBWR")  # What `plimsoll resume --accept-other-processor` accepts.
_FIRST_LINE = 'recipe = "python"\n'  # Marks a run of a Python program, not of a recipe.


def settle(seed: int, threads: int, deterministic: bool) -> None:
    """Sets torch's threads and determinism, and the seeds of Python, NumPy and torch.

    Called before the governor measures its baseline: the first matrix product, backward and optimizer
    load libraries and modules, which belong to that.
    """
    if deterministic:
        _torch_gate.load().make_deterministic(threads)
    else:
        torch.set_num_threads(threads)
    weight = torch.ones(64, 64, requires_grad=True)
    (weight @ weight).sum().backward()
    torch.optim.AdamW([weight]).step()
    seed_all(seed)


def seed_all(seed: int) -> None:
    """Seeds the main generators of Python, NumPy and torch, and those of devices."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


def identity_of(seed: int, threads: int, deterministic: bool, options: dict[str, Any], workers: int = 1) -> dict[str, str]:
    """Returns the identity. Runs of the same program with equal identities end in equal bits."""
    identity = {"seed": str(seed), "compute_threads": str(threads), "deterministic": str(deterministic).lower(),
                "torch": str(torch.__version__), "numpy": np.__version__,
                "instruction_set": _core.instruction_set(),
                "ATEN_CPU_CAPABILITY": torch.backends.cpu.get_cpu_capability()}
    identity |= {"virtual_workers": str(workers)} if workers > 1 else {}
    identity |= {name: os.environ[name] for name in _ASKED_OF_LIBRARIES if os.environ.get(name)}
    return identity | {f"options.{name}": str(value) for name, value in options.items()}


def threads_of(path: str) -> int:
    """Returns the number of threads that a run began with; for a new run, torch's."""
    try:
        identity = json.loads((pathlib.Path(path) / "identity.json").read_text())
        return int(identity.get("compute_threads") or identity["threads"])  # The name in runs before 0.2.
    except (OSError, ValueError, KeyError):
        return torch.get_num_threads()  # A new run, or a damaged one, which the check of the identity reports.


def is_ours(path: str) -> bool:
    """Whether to_toml() wrote the run.toml in this folder."""
    with open(os.path.join(path, "run.toml"), encoding="utf-8", errors="replace") as file:
        return file.readline() == _FIRST_LINE


def to_toml(values: dict[str, Any], options: dict[str, Any], ranks: int = 1) -> str:
    """Returns the text of run.toml; its first line marks a run of a Python program."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    rest = [word for word in sys.orig_argv[1:] if word != "-u" or not launcher]  # The launcher passes -u itself.
    known = {"command": shlex.join([sys.executable, *launcher, *rest]),
             "directory": os.getcwd(), **values}
    lines = [f"{name} = {_toml(value)}" for name, value in known.items()]
    if options:
        lines += ["", "[options]", *(f"{_toml(name)} = {_toml(value)}" for name, value in options.items())]
    return _FIRST_LINE + "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    text = str(value).encode(errors="replace").decode()
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
