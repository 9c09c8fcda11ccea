# SPDX-License-Identifier: Apache-2.0
"""What grows where no lease is: watched, warned of, and ended; and texts and reprs of memory."""
import pathlib
import pickle
import subprocess
import sys
import tempfile
import types

import pytest

import plimsoll
from plimsoll import _core
from plimsoll.memory import _memory, _scratch

MIB = 1 << 20


def run_python(code: str, *words: str) -> str:
    """What a process of its own prints: its baseline is its own."""
    done = subprocess.run([sys.executable, "-c", code, *words], text=True, capture_output=True,
                          timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


GROW = """
import time, warnings
import numpy as np
import plimsoll
warnings.simplefilter("ignore", plimsoll.PressureWarning)
kept = []
def grow(until):
    deadline = time.monotonic() + 60
    while not until() and time.monotonic() < deadline:
        if plimsoll._core.resident().total < governor.limit_bytes:
            kept.append(np.ones(1 << 20, np.uint8))
        time.sleep(0.001)
"""


def test_r12_a_function_is_called_in_the_main_thread():
    out = run_python(GROW + """
import threading
seen = []
def pressed(report):
    assert threading.current_thread() is threading.main_thread()
    seen.append(report.stop)
with plimsoll.Governor("200MiB", on_pressure=pressed) as governor:
    grow(lambda: any(seen))
    print(seen[-1], governor.ledger().measured.unexplained_bytes > 64 << 20)
""")
    assert out.split() == ["True", "True"]


# The main thread waits as in next() of a DataLoader, and another thread grows what has no lease.
WAIT = GROW + """
import os, select, threading
done = False
def grow_and_end():
    grow(lambda: done)
    os.write(end, b"x")
with plimsoll.Governor("200MiB") as governor:
    begin, end = os.pipe()
    governor.step_boundary()
    growing = threading.Thread(target=grow_and_end)
    growing.start()
    try:
        {wait}
        print("was not stopped")
    except plimsoll.MemoryPressure:
        print("was stopped")
    done = True
    growing.join()
"""


@pytest.mark.parametrize("wait", ["select.select([begin], [], [])", "os.read(begin, 1)",
                                  "threading.Event().wait(80)", "time.sleep(80)"])
def test_r13_a_stop_wakes_a_main_thread_that_waits(wait):
    assert run_python(WAIT.replace("{wait}", wait)) == "was stopped\n"


def test_a_program_keeps_its_own_handler_of_the_signal_that_wakes():
    out = run_python(GROW + """
import signal
came = []
def own(*_):
    came.append(1)
signal.signal(signal.SIGURG, own)
try:
    with plimsoll.Governor("200MiB") as governor:
        grow(lambda: False)
except plimsoll.MemoryPressure:
    print(signal.getsignal(signal.SIGURG) is own, came)
""")
    assert out.split("\n")[0] == "True []"


def test_a_stop_does_not_end_a_program_that_took_the_signal_back():
    out = run_python(GROW + """
import signal
try:
    with plimsoll.Governor("200MiB") as governor:
        signal.signal(signal.SIGURG, signal.SIG_DFL)
        grow(lambda: False)
except plimsoll.MemoryPressure:
    print("heard")
""")
    assert out.split() == ["heard"]


def test_r12_warn_is_all_that_comes_where_that_was_asked_for():
    out = run_python(GROW + """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with plimsoll.Governor("200MiB", on_pressure="warn") as governor:
        grow(lambda: len(caught) > 1)
print(len(caught), caught[0].category.__name__)
print(caught[0].message)
""")
    count, text = out.split("\n", 1)
    assert count.split() == ["2", "PressureWarning"]
    assert text.startswith("memory is short: ") and "in arrays and objects of this process" in text


def test_a_stop_tells_of_workers_before_it_ends_them(monkeypatch):
    """The watcher looks on: what it sees once they are gone is no reason."""
    with plimsoll.Governor("3GiB") as governor:
        happened = []
        report = governor.step_boundary()
        monkeypatch.setattr(governor, "_watcher", types.SimpleNamespace(take=lambda: (True, True, report)))
        monkeypatch.setattr(governor, "_still_asks", lambda report: report)
        monkeypatch.setattr(governor, "_pressure", lambda _: happened.append("told") or plimsoll.MemoryPressure("short"))
        monkeypatch.setattr(_memory._workers, "end_workers_waited_for", lambda: happened.append("ended"))
        with pytest.raises(plimsoll.MemoryPressure, match="short"):
            governor._hear()
        monkeypatch.undo()
    assert happened == ["told", "ended"]


def test_a_bad_on_pressure_is_a_value_error():
    with pytest.raises(ValueError, match="on_pressure: 'kill' is neither"):
        plimsoll.Governor("4GiB", on_pressure="kill")


def test_memory_pressure_keeps_its_figures_when_pickled():
    error = pickle.loads(pickle.dumps(plimsoll.MemoryPressure("short", 3, 2, 4)))
    assert (str(error), error.held_bytes, error.limit_bytes, error.smallest_limit_bytes) == (
        "short", 3, 2, 4)
    assert isinstance(error, MemoryError) and not isinstance(error, plimsoll.BudgetExceeded)


def test_r51_weights_mapped_from_a_file_have_a_line_in_the_ledger(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "weights.bin"
    path.write_bytes(b"w" * (24 * MIB))
    out = run_python("""
import sys, time
import torch
import plimsoll
size = 24 << 20
with plimsoll.Governor("4GiB") as governor:
    # As safetensors has torch map a file.
    storage = torch.UntypedStorage.from_file(sys.argv[1], False, size)
    assert torch.tensor([], dtype=torch.uint8).set_(storage).sum() > 0
    deadline = time.monotonic() + 60
    while governor.ledger().measured.tree.mapped_bytes < size and time.monotonic() < deadline:
        governor.step_boundary()
        time.sleep(0.01)
    ledger = governor.ledger()
    assert ledger.measured.tree.mapped_bytes >= size
    print(next(one for one in str(ledger).splitlines() if one.startswith("mapped")))
""", str(path))
    assert out.split() == ["mapped", "24.0", "MiB"]


def test_r56_a_governor_made_before_torch_leases_its_tensors():
    pytest.importorskip("plimsoll._torch")
    out = run_python("""
import sys
import plimsoll
with plimsoll.Governor("1GiB") as governor:
    assert "torch" not in sys.modules and not governor.arena_attached
    before = governor.ledger().baseline_bytes
    import torch
    assert governor.arena_attached
    assert governor.ledger().baseline_bytes > before + (50 << 20)
    assert type(torch.__spec__.loader).__module__ != "plimsoll.core._torch_gate"
    held = torch.ones(10 << 20)
    assert governor.ledger().pools["tensors"].leased_bytes >= 40 << 20
    try:
        torch.empty(1 << 30)
    except torch.OutOfMemoryError as error:
        print(error)
""")
    assert "tensors wanted 4.0 GiB" in out


def test_r56_where_the_libraries_alone_pass_the_limit_it_is_said():
    pytest.importorskip("plimsoll._torch")
    out = run_python("""
import warnings
import plimsoll
with plimsoll.Governor("110MiB", foreign_bytes="32MiB", on_pressure="warn") as governor:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch
    print(*[one.message for one in caught if "torch" in str(one.message)])
""")
    assert "with torch's libraries the process holds" in out
    assert "MiB is the smallest that would do" in out


def recognised(error: Exception) -> bool:
    """As batch finders decide whether a smaller batch might help."""
    return (isinstance(error, RuntimeError) and len(error.args) == 1
            and "DefaultCPUAllocator: can't allocate memory" in error.args[0])


def test_r59_batch_finders_recognise_a_refusal():
    torch = pytest.importorskip("torch")
    pytest.importorskip("plimsoll._torch")
    size = 1 << 30
    with plimsoll.Governor("4GiB"):  # Of which the tests before may hold one.
        while True:
            try:
                held = torch.empty(size, dtype=torch.float32)
                break
            except RuntimeError as error:
                assert recognised(error)
                assert str(error).startswith("tensors wanted ")
                size //= 2
    assert held.numel() == size < 1 << 30


def test_r60_errors_name_arguments_and_sizes_without_a_unit():
    with pytest.raises(plimsoll.BudgetExceeded) as refused:
        plimsoll.Governor(2)
    text = str(refused.value)
    assert text.startswith("a limit of 2 B (user: ")
    assert "this takes a limit of at least" in text and "write 6GiB" in text
    with plimsoll.Governor("4GiB") as governor:
        with pytest.raises(plimsoll.BudgetExceeded) as refused:
            governor.reserve("4GiB")
    assert "raise memory_limit" in str(refused.value) and "--" not in str(refused.value)


def test_r60_reports_say_what_is_in_them():
    with plimsoll.Governor("4GiB") as governor:
        report = governor.step_boundary()
        ledger = governor.ledger()
        change = governor.set_limit("4GiB")
        for one, text in ((report, "no pressure"), (ledger, "free of 4.0 GiB"),
                          (ledger.pools["foreign"], "floor 64.0 MiB"), (change, "to 4.0 GiB"),
                          (report.resident, "anonymous"), (ledger.measured, "held"),
                          (ledger.measured.tree, "children"),
                          (governor.limit.candidates[0], "4.0 GiB")):
            assert text in repr(one), repr(one)
            assert " object at 0x" not in repr(one)


def test_r16_state_is_kept_on_a_disk_and_never_in_memory(tmp_path, monkeypatch):
    if not _core.in_memory_file_system("/dev/shm"):
        pytest.skip("no file system in memory here")
    with pytest.raises(ValueError, match="directory: /dev/shm is on a tmpfs, which is memory itself"):
        _scratch.scratch_folder("/dev/shm", "directory")
    assert _scratch.scratch_folder(tmp_path / "run", "directory") == str(tmp_path / "run")
    assert (tmp_path / "run").is_dir()
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")  # As with TMPDIR on a tmpfs.
    with plimsoll.Governor("4GiB", directory=str(tmp_path)):
        assert _scratch.scratch_folder(None, "directory") == str(tmp_path)
    with plimsoll.Governor("4GiB", directory="/dev/shm"):
        assert _scratch.scratch_folder(None, "directory") == "/var/tmp"


def test_r16_admit_copies_state_to_the_runs_folder(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("plimsoll._torch")
    with plimsoll.Governor("4GiB"):
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        seen = []

        def loss(x):
            seen.extend(path.name for path in (tmp_path / "run").iterdir())
            return model(x).sum()

        plimsoll.TrainingStep(model, optimizer, loss="sum", directory=tmp_path / "run").admit(
            torch.ones(4, 8), loss)
    assert seen and seen[0].startswith("plimsoll-")
    assert list((tmp_path / "run").iterdir()) == []


def test_r13_admission_leaves_what_workers_hold_beyond_what_was_set_aside():
    pytest.importorskip("plimsoll._torch")
    out = run_python("""
import mmap, os, time
import torch
import plimsoll
with plimsoll.Governor("1GiB", foreign_bytes="32MiB") as governor:
    before = governor.tensor_room()
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        held = mmap.mmap(-1, 200 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for _ in range(200):
            held.write(b"x" * (1 << 20))
        os.write(told, b"x")
        time.sleep(600)
        os._exit(0)
    os.read(ready, 1)
    deadline = time.monotonic() + 60
    while governor.ledger().measured.tree.children_bytes < 190 << 20 and time.monotonic() < deadline:
        governor.step_boundary()
        time.sleep(0.01)
    print(before - governor.tensor_room() >> 20)
    os.kill(child, 9)
    os.waitpid(child, 0)
""")
    assert 140 <= int(out) <= 260


def test_what_was_admitted_is_not_refused_later_for_its_margin(monkeypatch):
    """As where a run's second phase begins, whose steps were admitted before the first. A margin is a sixteenth of the peak."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("plimsoll._torch")
    model = torch.nn.Linear(500, 500)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch = torch.ones(20_000, 500)
    with plimsoll.Governor("8GiB", foreign_bytes="1GiB") as governor:  # Whatever this process of many tests holds already.
        def admitted():
            return plimsoll.TrainingStep(model, optimizer, loss="mean").admit(batch, lambda x: model(x).square().mean())
        promised = admitted()
        monkeypatch.setattr(type(governor), "tensor_room", lambda _: promised - promised // 50)
        assert admitted() == promised
        monkeypatch.setattr(type(governor), "tensor_room", lambda _: promised - promised // 10)
        with pytest.raises(plimsoll.BudgetExceeded, match="a step of 20000 rows is not admitted"):
            admitted()


class Rows:
    """A data set over a tensor that was made in the parent, in the arena."""

    def __init__(self, table):
        self.table = table

    def __len__(self):
        return len(self.table)

    def __getitem__(self, index):
        return self.table[index]


def test_r11_forked_workers_read_what_the_parent_has_in_the_arena():
    torch = pytest.importorskip("torch")
    pytest.importorskip("plimsoll._torch")
    with plimsoll.Governor("4GiB") as governor:
        table = torch.arange(256.0).repeat(64, 1).T.contiguous()
        cache = torch.ones(8 << 20)
        del cache  # In the arena's cache now, which a fork gives back.
        from plimsoll import _torch

        assert _torch.owns(table.data_ptr()) and _torch.arena_stats()["cached_bytes"] >= 32 * MIB
        loader = torch.utils.data.DataLoader(Rows(table), batch_size=64, num_workers=2,
                                             multiprocessing_context="fork")
        batches = iter(loader)
        assert _torch.arena_stats()["cached_bytes"] < 32 * MIB
        table.add_(0)  # Written to beside them.
        assert torch.equal(torch.cat(list(batches))[:, 0], torch.arange(256.0))
        assert governor.arena_attached


def test_r17_what_was_not_checked_is_said_and_may_be_required(tmp_path, monkeypatch):
    from tests.support import cgroup

    notes = tmp_path / "skips"
    monkeypatch.setattr(cgroup.MemoryCgroup, "why_not", classmethod(lambda cls: "not allowed here"))
    monkeypatch.setenv("PLIMSOLL_CGROUP_SKIPS", str(notes))
    monkeypatch.delenv("PLIMSOLL_REQUIRE_CGROUP", raising=False)
    assert cgroup.said_of_skips(notes) == ""
    for _ in range(2):
        with pytest.raises(pytest.skip.Exception, match="not allowed here"):
            cgroup.MemoryCgroup.needed()
    said = cgroup.said_of_skips(notes)
    assert "NOT CHECKED: 2 tests" in said and "2 x not allowed here" in said
    monkeypatch.setenv("PLIMSOLL_REQUIRE_CGROUP", "1")
    with pytest.raises(pytest.fail.Exception, match="PLIMSOLL_REQUIRE_CGROUP=1, and not allowed"):
        cgroup.MemoryCgroup.needed()
    root = pathlib.Path(__file__).resolve().parents[2]
    assert "PLIMSOLL_REQUIRE_CGROUP=1" in (root / ".ci" / "run").read_text()
    check = (root / "tools" / "check.sh").read_text()
    assert check.index("-m pytest") < check.index("--skipped") < check.index("exit $status")
