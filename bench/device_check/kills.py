# SPDX-License-Identifier: Apache-2.0
"""Check 5, its second half: a plimsoll.Run on the device, killed three times and resumed, ends in the bits of an undisturbed run.

Threads: none.   Memory: of processes that it starts.
"""
from __future__ import annotations

import contextlib
import io
import json
import pathlib
import tempfile

from bench.device_check.device import HOST_LIMIT, Device
from bench.device_check.result import Result

KILLS, SEED = 3, 7
PROGRAMS = pathlib.Path(__file__).resolve().parents[2] / "tests/support/run_programs.py"


def check(device: Device) -> Result:
    """Runs tests/support/lives.py, whose lives are killed by SIGKILL at random moments. They are forked from this process."""
    from tests.support import lives

    said = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="plimsoll-") as folder, contextlib.redirect_stdout(said):
        lives.main(PROGRAMS, folder, KILLS, SEED, device.pick("on_device", "on_simulated_device"), "0", HOST_LIMIT[device.name])
    seen = json.loads(said.getvalue().splitlines()[-1])
    killed, same = len(seen["killed_at"]), seen["digest"] == seen["undisturbed"]
    result = Result(int(not same), "runs of other bits", 0)
    result.add("kills", f"{KILLS}", f"{killed}, at the commits of steps {', '.join(map(str, seen['killed_at']))}", killed == KILLS)
    result.add("the resumed run's digest", seen["undisturbed"][:12], str(seen["digest"])[:12], same)
    result.peers = {"kills": killed}
    return result
