# SPDX-License-Identifier: Apache-2.0
"""bitsandbytes, which tools/setup.sh installs beside the other packages: peft imports it wherever it is found."""
import contextlib
import os
import pathlib
import sys

import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[2] / ".venv" / "quantised"


def needed():
    """Skips where bitsandbytes is not installed."""
    if not (FOLDER / "bitsandbytes").is_dir():
        pytest.skip("bitsandbytes is not installed (tools/setup.sh does it)", allow_module_level=True)


@contextlib.contextmanager
def importable():
    """Lets this process and those that it starts import bitsandbytes."""
    before = os.environ.get("PYTHONPATH")
    sys.path.append(str(FOLDER))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (before, str(FOLDER))))
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
