# SPDX-License-Identifier: Apache-2.0
"""Watch: loops that leak and loops that do not, each in a process of its own."""
import json
import os
import subprocess
import sys
import textwrap
import time

import pytest

import plimsoll

# Steps until there is a verdict, however slow the machine is: looks keep to 1 % of a core. Where it stood still, a few looks
# may have seen a rise and not yet that it goes on.
LOOP = """
import json, time
import plimsoll

{setup}

def look_back(watch):
    verdict = watch.verdict()
    return dict(kind=verdict.kind, owner=verdict.owner, bytes_per_step=verdict.bytes_per_step,
                phase=verdict.phase, process=verdict.process, advice=verdict.advice, text=str(verdict),
                steps=watch.steps, owners=watch.owners, held_bytes=watch.held_bytes)

with plimsoll.Watch() as watch:
    while watch.steps < 250 or watch.verdict().kind in ("too short", "step")[:1 + (watch.steps < 1000)]:
{step}
        time.sleep(0.004)
        watch.step()
print(json.dumps(look_back(watch)))
"""


def watched(setup: str, step: str) -> dict:
    program = LOOP.format(setup=setup, step=textwrap.indent(textwrap.dedent(step).strip("\n"), " " * 8))
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_m3_a_leak_has_its_slope_and_its_owner():
    told = watched("kept = []", "kept.append(bytearray(200_000))")
    assert told["kind"] == "leak" and told["owner"] == "native", told["text"]
    assert told["bytes_per_step"] == pytest.approx(200_000, rel=0.1)
    assert "KiB a step" in told["text"] and len(told["advice"]) == 2
    assert told["held_bytes"] > 250 * 200_000


def test_small_python_objects_are_pythons():
    told = watched("kept = []", "kept.append([float(k + watch.steps) for k in range(3000)])")
    assert told["kind"] == "leak" and told["owner"] == "python", told["text"]
    assert "lru_cache" in told["advice"][-1]


def test_what_is_let_go_of_is_no_leak():
    told = watched("", "one = bytearray(2_000_000); del one")
    assert told["kind"] != "leak", told["text"]
    assert told["advice"] == []


def test_m2_a_cache_that_fills_in_the_first_steps_is_no_leak():
    told = watched("cache = {}", "cache.setdefault(watch.steps % 40, bytearray(500_000))")
    assert told["kind"] != "leak", told["text"]
    assert told["owners"]["native"] > 40 * 500_000


def test_the_phase_that_leaks_is_named():
    told = watched("kept = []", """
        if watch.steps % 5 == 4:
            with watch.phase("eval"):
                time.sleep(0.05)
                kept.append(bytearray(2_000_000))
                time.sleep(0.05)
    """)
    assert told["kind"] == "leak" and told["phase"] == "eval", told["text"]
    assert ", in phase eval, allocated at " in told["text"]


def test_a_phase_that_only_lasts_is_not_named():
    """Most looks are due in `save`; what grew since the last one came in `eval`."""
    told = watched("kept = []", """
        with watch.phase("eval"):
            kept.append(bytearray(400_000))
        with watch.phase("save"):
            time.sleep(0.02)
    """)
    assert told["kind"] == "leak" and told["phase"] == "eval", told["text"]


def test_m4_a_child_that_leaks_is_named():
    child = "import sys\nkept = []\nwhile sys.stdin.readline(): kept.append(bytearray(300_000)); print(flush=True)"
    told = watched(f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
""", """
        child.stdin.write("more\\n"); child.stdin.flush(); child.stdout.readline()
    """)
    assert told["kind"] == "leak" and told["owner"] == "children", told["text"]
    assert told["bytes_per_step"] == pytest.approx(300_000, rel=0.2)
    assert told["process"].split()[-1].isdigit()


def test_a_childs_name_may_be_cut_within_a_character():
    """The kernel keeps 15 bytes of it."""
    child = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, "обучение-модели".encode(), 0, 0, 0)
kept = []
while sys.stdin.readline(): kept.append(bytearray(300_000)); print(flush=True)
"""
    told = watched(f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
""", """
        child.stdin.write("more\\n"); child.stdin.flush(); child.stdout.readline()
    """)
    assert told["process"].startswith("обучени\\xd0 ") and told["process"] in told["text"], told["text"]


def test_leases_are_told_from_what_is_native():
    with plimsoll.Governor("4GiB") as governor, governor.reserve("64MiB"):
        watch = plimsoll.Watch()
        assert watch.owners["leased"] == 64 << 20
        assert watch.owners["tensors"] == 0
    assert "leased" not in plimsoll.Watch().owners


def test_window_steps_are_what_a_window_has():
    """With windows of 5 steps there is a verdict after 40; with the usual ones it is too early."""
    short, usual = plimsoll.Watch(window_steps=5), plimsoll.Watch()
    kept = []
    for watch in (short, usual):
        while watch.steps < 45:
            kept.append(bytearray(1 << 20))
            native = watch.owners.get("native")  # None while malloc() has a rest.
            # Each step has its look, and each short window one that asks malloc(), however long that takes.
            asks = watch is short and watch.steps % 5 == 0
            while not watch._core.look(float(watch.steps), "") or (asks and None is not native == watch.owners.get("native")):
                time.sleep(0.001)
            watch.step()
    assert short.verdict().kind != "too short"
    assert usual.verdict().kind == "too short"
    with pytest.raises(ValueError, match="window_steps"):
        plimsoll.Watch(window_steps=0)


def test_in_a_forked_child_a_watch_is_refused():
    watch = plimsoll.Watch()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            watch.step()
            os.write(write, b"looked")
        except ValueError as error:
            os.write(write, b"refused" if "forked" in str(error) else str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"refused"
    watch.step()
