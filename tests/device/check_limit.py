# SPDX-License-Identifier: Apache-2.0
"""The limit of a device's memory: imposed, admitted before the first step, and named where a step does not fit."""
import gc
import json
import os
import pathlib
import random
import subprocess
import sys
import types

import pytest
import torch

import plimsoll

plimsoll.Governor("3GiB", foreign_bytes="1GiB").close()  # Before the first tensor of the device.

from tests import device
from tests.support.quick_collections import collections_are_quick, collections_are_whole_again  # noqa: F401  Fixtures.

MIB = 1 << 20
PROGRAM = os.environ.get("PLIMSOLL_PROGRAM", "plimsoll")
CONTEXT = 96 * MIB


@pytest.fixture(autouse=True)
def card():
    """A device of 1 GiB with a context, and nothing on it."""
    gc.collect()
    torch.accelerator.empty_cache()
    device.configure(capacity=1 << 30, context=CONTEXT, fraction=1.0)
    yield
    gc.collect()
    assert plimsoll.Governor.current() is None and torch.accelerator.memory_allocated() == 0


def governor(limit, **options):
    return plimsoll.Governor("3GiB", foreign_bytes="1GiB", devices={"sim": limit}, **options)


def nothing_more_fits(size):
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(size, dtype=torch.uint8, device="sim")
    return True


@pytest.mark.parametrize("limit, size", [("512MiB", 512 * MIB), (300 * MIB, 300 * MIB), ("50%", 512 * MIB)])
def test_the_limit_covers_context_and_cache_and_ends_with_the_governor(limit, size):
    with governor(limit) as held:
        line = held.devices["sim"]
        assert (line.limit_bytes, line.context_bytes, line.total_bytes) == (size, CONTEXT, 1 << 30)
        kept = torch.empty(line.free_bytes - 20 * MIB, dtype=torch.uint8, device="sim")
        assert line.allocated_bytes >= kept.nbytes and line.context_bytes + line.reserved_bytes <= size
        assert nothing_more_fits(32 * MIB) and "of the" in line.explain()
        del kept
        assert line.reserved_bytes > line.allocated_bytes  # It stays in torch's cache, which gives way:
        torch.empty(line.room_bytes - 40 * MIB, dtype=torch.uint8, device="sim")
    assert held.devices == {}
    torch.empty(800 * MIB, dtype=torch.uint8, device="sim")


def test_what_only_a_cycle_holds_takes_nothing_of_it():
    kept = [torch.empty(200 * MIB, dtype=torch.uint8, device="sim")]
    kept.append(kept)
    del kept
    with governor(CONTEXT + 60 * MIB) as held:
        assert held.devices["sim"].allocated_bytes < 40 * MIB


def test_without_a_size_it_is_most_of_what_is_free():
    with governor("") as held:
        line = held.devices["sim"]
        assert 0.93 * (1 << 30) < line.limit_bytes < 0.97 * (1 << 30)


def test_random_requests_never_pass_it():
    dice = random.Random(46)
    with governor("160MiB") as held:
        line, kept, refused = held.devices["sim"], [], 0
        for _ in range(2000):
            if kept and dice.random() < 0.45:
                kept.pop(dice.randrange(len(kept)))
                continue
            try:
                kept.append(torch.empty(int(2 ** dice.uniform(3, 24.5)), dtype=torch.uint8, device="sim"))
            except torch.OutOfMemoryError:
                refused += 1
                kept.clear()
            assert line.context_bytes + line.reserved_bytes <= line.limit_bytes
        assert refused > 3


@pytest.mark.parametrize("devices, text", [
    ({"tpu": "1GiB"}, "devices: 'tpu' is no device of torch's"), ({"cpu": "1GiB"}, "no limit of 'cpu'"), ({"sim:3": "1GiB"}, "'sim:3' is not there"),
    ({"sim": "much"}, "devices: sim: "), ({"sim": -1}, "devices: sim: ")])
def test_what_cannot_be_limited_is_refused_and_leaves_no_governor(devices, text):
    with pytest.raises(ValueError, match=text):
        plimsoll.Governor("3GiB", devices=devices)


def test_a_limit_below_the_context_names_one_that_would_do():
    with pytest.raises(plimsoll.BudgetExceeded, match="less than its context") as refused:
        governor("64MiB")
    assert refused.value.tag == "sim"
    governor(refused.value.smallest_limit_bytes).close()


def test_a_host_limit_that_is_too_small_lifts_that_of_the_device():
    with pytest.raises(plimsoll.BudgetExceeded):
        plimsoll.Governor("1MiB", devices={"sim": "200MiB"})
    torch.empty(800 * MIB, dtype=torch.uint8, device="sim")


def test_the_newest_limit_stays_when_an_older_governor_closes():
    old = governor("512MiB")
    new = governor("256MiB")
    old.close()
    assert nothing_more_fits(300 * MIB)
    new.close()


class Training:
    """A model whose step takes some MiB on the device."""

    def __init__(self, rows, width=512, **options):
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(4)]).to("sim")
        self.step = plimsoll.TrainingStep(self.model, torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True), **options)
        self.batch = torch.randn(rows, width).to("sim")

    def loss(self, x):
        return self.model(x).square().mean()

    def admit(self):
        return self.step.admit(self.batch, self.loss)

    def steps(self, count=3):
        for _ in range(count):
            self.step(self.batch, self.loss)
        return [one.detach().cpu().clone() for one in self.model.state_dict().values()]


def test_the_margin_of_a_step_is_a_sixteenth_and_at_least_a_segment():
    with governor("900MiB") as held:
        line = held.devices["sim"]
        small = torch.empty(MIB, dtype=torch.uint8, device="sim")
        assert [line.margin_bytes(one * MIB) for one in (0, 32, 64)] == [2 * MIB, 2 * MIB, 4 * MIB]
        assert line.peak_bytes() == 4 * MIB
        large = torch.empty(2 * MIB, dtype=torch.uint8, device="sim")
        assert [line.margin_bytes(one * MIB) for one in (22, 320, 640)] == [20 * MIB, 20 * MIB, 40 * MIB]
        del small, large
        line.begin_peak()
        assert line.peak_bytes() == 2 * MIB  # Of what is there no more nothing is told.


@pytest.mark.parametrize("rows", [64, 2048, 8192])
def test_what_is_refused_before_the_first_step_fits_the_limit_that_is_named(rows):
    limit, refusals, bits = CONTEXT + 4 * MIB, [], None
    while len(refusals) < 12:
        try:
            with governor(limit) as held:
                training = Training(rows)
                training.admit()
                bits = training.steps()
                line = held.devices["sim"]
                assert training.step.refusals == 0 and line.context_bytes + line.peak_bytes() >= line.limit_bytes * 0.4
                assert line.context_bytes + torch.accelerator.max_memory_reserved() <= limit
                break
        except (plimsoll.BudgetExceeded, torch.OutOfMemoryError) as error:
            refusals.append(error.with_traceback(None))  # Its frames hold the model.
            limit = error.smallest_limit_bytes if isinstance(error, plimsoll.BudgetExceeded) else limit + 8 * MIB  # The model itself.
        finally:
            training = line = None
            gc.collect()
            torch.accelerator.empty_cache()
    assert bits is not None, refusals
    told = [one for one in refusals if isinstance(one, plimsoll.BudgetExceeded)]
    assert told and all(one.tag == "sim" and "for sim" in str(one) for one in told) and "is not admitted" in str(told[-1]), refusals
    with governor("900MiB"):
        assert all(map(torch.equal, bits, Training(rows).steps()))
        gc.collect()


def test_a_step_that_nothing_helps_names_the_device_and_a_limit_to_try():
    with governor(CONTEXT + 60 * MIB) as held:
        training = Training(8192)
        with pytest.raises(plimsoll.BudgetExceeded, match="step 1 of 8192 rows does not fit and was not made: .* for sim") as refused:
            training.steps(1)
        assert refused.value.tag == "sim" and refused.value.smallest_limit_bytes > held.devices["sim"].limit_bytes
        assert "What would help" in str(refused.value)
        del training
        gc.collect()


def test_a_step_in_parts_stays_within_the_limit_of_the_device():
    with governor("900MiB"):
        whole = Training(8192, loss="mean")
        whole.steps()
        del whole
        gc.collect()
    with governor(CONTEXT + 60 * MIB) as held:
        training = Training(8192, loss="mean")
        training.steps()
        assert training.step.refusals > 0
        line = held.devices["sim"]
        assert line.context_bytes + torch.accelerator.max_memory_reserved() <= line.limit_bytes
        del training
        gc.collect()


# ---- A run ----

def run(path, limit="400MiB", where="sim", epochs=1, within=lambda made: False, **options):
    """A run of two steps an epoch, from its last commit. Returns (its lines of status.json while it trained, bits)."""
    told = []
    with plimsoll.Run(path, memory_limit="3GiB", foreign_bytes="1GiB", device_memory_limit=limit, **options) as made:
        model = torch.nn.Linear(64, 64).to(where)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made.track(model=model, optimizer=optimizer)
        for x in made.steps([torch.ones(8, 64), torch.zeros(8, 64)], epochs=epochs, progress=False, commit_every_minutes=0):
            made.step(lambda x: model(x.to(where)).square().mean(), x)
            told.append(json.loads((pathlib.Path(path) / "status.json").read_text())["devices"])
            if within(made):
                break
        return told, [one.detach().cpu() for one in model.parameters()]


def events(path, name):
    return [one for one in map(json.loads, (path / "events.jsonl").read_text().splitlines()) if one["event"] == name]


def status_of(path, *options):
    return subprocess.run([PROGRAM, "status", path, *options], text=True, capture_output=True, check=True).stdout


@pytest.mark.parametrize("limit", ["400MiB", {"sim": 400 * MIB}])
def test_a_run_keeps_the_limit_and_says_what_is_held_of_it(limit, tmp_path):
    told, _ = run(tmp_path / "run", limit)
    assert all([one["name"] for one in line] == ["sim"] for line in told)
    line = json.loads((tmp_path / "run/status.json").read_text())["devices"][0]
    assert (line["kind"], line["limit_bytes"], line["context_bytes"]) == ("sim (simulated)", 400 * MIB, CONTEXT)
    assert 0 < line["allocated_bytes"] <= line["reserved_bytes"] <= line["peak_bytes"] - CONTEXT < 400 * MIB
    shown = status_of(tmp_path / "run")
    assert "device    " in shown and "context 96.0 MiB; limit 400.0 MiB\n            sim (simulated)\n" in shown
    at_commits = events(tmp_path / "run", "device")
    assert at_commits[-1]["step"] == 2 and (at_commits[-1]["sim/limit_bytes"], at_commits[-1]["sim/context_bytes"]) == (400 * MIB, CONTEXT)
    assert json.loads(status_of(tmp_path / "run", "--json"))["devices"] == [line]


def told_by(command, path, *options):
    return subprocess.run([PROGRAM, command, path, *options], text=True, capture_output=True, check=True).stdout


def test_watch_why_and_the_report_have_the_device(tmp_path):
    path, looks = tmp_path / "run", []

    def within(made):
        if made.steps_made == 1:
            looks.extend(told_by("watch", path, "--once", *options) for options in ((), ("--json",)))
        return False

    run(path, within=within)
    held = "context 96.0 MiB; limit 400.0 MiB"
    assert "\n  sim           " in looks[0] and held in looks[0]
    assert json.loads(looks[1])["devices"][0]["context_bytes"] == CONTEXT
    assert "\n  sim (simulated): 98.0 MiB held" in told_by("why", path) and held in told_by("why", path)
    line = json.loads((path / "status.json").read_text())["devices"]
    assert json.loads(told_by("why", path, "--json"))["devices"] == line and line[0]["others_bytes"] is None and line[0]["others"] == ""
    told_by("report", path)
    page = (path / "report.html").read_text()
    assert "<h2>Device memory</h2>" in page and "<td>sim, sim (simulated)</td>" in page and "GiB held of sim, at commits" in page


def test_a_run_takes_the_limit_of_plimsoll_run_around_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PLIMSOLL_DEVICE_MEMORY_LIMIT", "30%")
    told, _ = run(tmp_path / "a", None)
    assert told[0][0]["limit_bytes"] == int(0.3 * (1 << 30))
    told, _ = run(tmp_path / "b", "400MiB")  # Its own goes before.
    assert told[0][0]["limit_bytes"] == 400 * MIB
    monkeypatch.setenv("PLIMSOLL_DEVICE_MEMORY_LIMIT", "much")
    with pytest.raises(ValueError, match="^device_memory_limit: sim: "):
        run(tmp_path / "c", None)


# ---- Other processes on the card, by nvidia-ml-py ----

class NVMLError(Exception):
    pass


class Driver:
    """The module pynvml: those of its functions that are used, with their signatures. Processes: (PID, bytes or None, name)."""

    NVMLError = NVMLError

    def __init__(self, compute, graphics=(), fails=""):
        self.compute, self.graphics, self.fails, self.open = compute, graphics, fails, 0

    def nvmlInit(self):
        self._may_fail("nvmlInit")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def _may_fail(self, name):
        if self.fails == name:
            raise NVMLError(name)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-1234" and self.open == 1
        return "handle"

    def _those(self, handle, some):
        assert handle == "handle" and self.open == 1
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=size, gpuInstanceId=None, computeInstanceId=None) for pid, size, _ in some]

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        self._may_fail("nvmlDeviceGetComputeRunningProcesses")
        return self._those(handle, self.compute)

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle):
        return self._those(handle, self.graphics)

    def nvmlSystemGetProcessName(self, pid):
        found = next(name for one, _, name in [*self.compute, *self.graphics] if one == pid)
        if found is None:
            raise NVMLError("ended")
        return found


ME = (os.getpid(), 500 * MIB, "python")


@pytest.mark.parametrize("compute, graphics, size, text", [
    ([ME], [], 0, ""),
    ([ME, (4711, 4 << 30, "/usr/bin/python3")], [], 4 << 30, "1 other process holds 4.0 GiB: python3 (PID 4711) 4.0 GiB"),
    ([ME, (7, 1 << 30, b"/opt/serve")], [(7, 2 << 30, b"/opt/serve"), (9, None, None)], 2 << 30,
     "2 other processes hold 2.0 GiB: serve (PID 7) 2.0 GiB, a process (PID 9) 0 B"),
    ([ME, *((pid, pid * MIB, "x") for pid in (1, 2, 3, 4))], [], 10 * MIB,
     "4 other processes hold 10.0 MiB: x (PID 4) 4.0 MiB, x (PID 3) 3.0 MiB, x (PID 2) 2.0 MiB and others"),
    ([(4711, 4 << 30, "python")], [], None, "")])  # This process has another number there.
def test_other_processes_on_the_card_are_told(compute, graphics, size, text, tmp_path, monkeypatch):
    driver = Driver(compute, graphics)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(device, "get_device_properties", lambda index: types.SimpleNamespace(uuid="1234"), raising=False)
    told, _ = run(tmp_path / "run")
    assert (told[0][0]["others_bytes"], told[0][0]["others"]) == (size, text) and driver.open == 0
    assert (text in status_of(tmp_path / "run") and text in told_by("why", tmp_path / "run")) if text else "other process" not in status_of(tmp_path / "run")
    with governor("400MiB") as held:
        assert held.devices["sim"].explain().endswith(text or "context 96.0 MiB")


@pytest.mark.parametrize("fails", ["nvmlInit", "nvmlDeviceGetComputeRunningProcesses", "no package", "no uuid"])
def test_where_the_driver_tells_nothing_nothing_is_said(fails, tmp_path, monkeypatch):
    driver = Driver([ME, (1, 1, "x")], fails=fails)
    monkeypatch.setitem(sys.modules, "pynvml", None if fails == "no package" else driver)
    if fails != "no uuid":
        monkeypatch.setattr(device, "get_device_properties", lambda index: types.SimpleNamespace(uuid="1234"), raising=False)
    told, _ = run(tmp_path / "run")
    assert (told[0][0]["others_bytes"], told[0][0]["others"]) == (None, "") and driver.open == 0


def test_a_run_without_a_limit_of_a_device_says_none(tmp_path):
    told, _ = run(tmp_path / "run", None)
    assert told == [[], []]


def test_a_limit_that_no_run_can_have_leaves_no_run_behind(tmp_path):
    with pytest.raises(plimsoll.BudgetExceeded, match="^device_memory_limit: a limit of 50.0 MiB for sim is less than its context"):
        run(tmp_path / "run", "50MiB")
    for limit, text in (({"tpu": "1GiB"}, "'tpu' is no device of torch's"), ({"sim": "much"}, "sim: "), ({"cpu": "1GiB"}, "no limit of 'cpu'"),
                        ({"sim:3": "1GiB"}, "'sim:3' is not there")):
        with pytest.raises(ValueError, match=f"^device_memory_limit: {text}"):
            run(tmp_path / "run", limit)
    run(tmp_path / "run")


@pytest.mark.parametrize("first, then", [("sim", "cpu"), ("cpu", "sim")])
def test_a_commit_goes_on_with_another_kind_of_device_only_if_told_to(first, then, tmp_path):
    run(tmp_path / "run", where=first)
    with pytest.raises(ValueError, match=f"model is on {then}.* and was on {first}.*accept="):
        run(tmp_path / "run", where=then)
    run(tmp_path / "run", where=then, epochs=2, accept="device")
    told = [(one["was"].split()[0], one["is"].split()[0], one["taken"]) for one in events(tmp_path / "run", "setting")]
    assert told == [(first, then, True)]
    run(tmp_path / "run", where=then, epochs=3)  # From now on it is of that device.


def test_the_limit_of_a_device_changes_while_a_run_trains(tmp_path):
    """A smaller one, one that its tensors pass, and a larger one: each is asked for once the one before it was answered."""
    path, sizes, kept, asked = tmp_path / "run", ["200MiB", "97MiB", "90%"], torch.ones(8 * MIB, device="sim"), []

    def within(made):
        answers = len(events(path, "limit"))
        if answers == len(asked) < len(sizes):
            asked.append(sizes[answers])
            done = subprocess.run([PROGRAM, "limit", path, "--device-memory-limit", asked[-1]], text=True, capture_output=True)
            assert done.returncode == 0 and f"asked to keep within {asked[-1]}" in done.stdout, done
        return answers == len(sizes)

    told, _ = run(path, epochs=100_000, within=within)
    seen = [line[0]["limit_bytes"] // MIB for line in told]
    assert sorted(set(seen), key=seen.index) == [400, 200, 921]
    shrunk, refused, grown = events(path, "limit")
    assert (shrunk["device"], shrunk["before_bytes"], shrunk["limit_bytes"]) == ("sim", 400 * MIB, 200 * MIB)
    assert "a limit of 97.0 MiB for sim is less than its context of 96.0 MiB and tensors" in refused["message"]
    assert grown["limit_bytes"] == int(0.9 * (1 << 30)) and kept.nbytes


def test_a_run_whose_device_has_no_limit_says_so_when_it_is_asked_to_change(tmp_path):
    path = tmp_path / "run"

    def within(made):
        if made.steps_made == 0:
            subprocess.run([PROGRAM, "limit", path, "--device-memory-limit", "1GiB"], check=True)
        return bool(events(path, "limit"))

    run(path, None, epochs=100_000, within=within)
    assert "no device of this process has a limit: device_memory_limit" in events(path, "limit")[0]["message"]


@pytest.mark.parametrize("options", [[], ["6GiB", "--device-memory-limit", "1GiB"], ["--device-memory-limit", "much"]])
def test_a_limit_is_of_the_host_or_of_devices(options, tmp_path):
    done = subprocess.run([PROGRAM, "limit", tmp_path, *options], text=True, capture_output=True)
    assert done.returncode == 2 and done.stderr
