# SPDX-License-Identifier: Apache-2.0
"""A run's commits that a thread writes while the loop goes on."""
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

import plimsoll
from plimsoll.run import _run_commit
from plimsoll.run._run_writer import Image

torch = pytest.importorskip("torch")

BATCHES = [torch.full((2, 3), float(k)) for k in range(6)]


class Held:
    """Files of commits are written when they are let, and fail where that is asked for."""

    def __init__(self, monkeypatch):
        self._real = _run_commit.write
        self.begun, self.let, self.fails = threading.Event(), threading.Event(), False
        monkeypatch.setattr(_run_commit, "write", self._write)

    def _write(self, content, path, step):
        self.begun.set()
        assert self.let.wait(30)
        if self.fails:
            raise OSError(28, "No space left on device", str(path))
        return self._real(content, path, step)


@pytest.fixture
def held(monkeypatch):
    return Held(monkeypatch)


def live(path, body=lambda run, model: None, width=3, memory_limit="4GiB", table=False):
    """Twelve steps, committed every four."""
    with plimsoll.Run(path, memory_limit=memory_limit) as run:
        model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 1))
        run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
        rows = run.embedding("rows", rows=10, dim=4) if table else None
        for batch in run.steps(BATCHES, epochs=2, progress=False, commit_every_steps=4):
            def loss(x):
                more = 0 if rows is None else rows(x[:, 0].long()).sum()
                return model(x).square().mean() + more
            run.step(loss, batch)
            body(run, model)
    return model


def commits(path):
    lines = map(json.loads, (path / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "commit"]


def published(path):
    manifest = path / "checkpoints" / "manifest.json"
    return json.loads(manifest.read_text())["step"] if manifest.exists() else -1


def other_bytes(run):
    """Of the copy of a commit: not those of the last boundary's."""
    lease = run._life.keeper._bytes._lease
    return run.governor.ledger().pools["other"].leased_bytes - (lease.bytes if lease is not None else 0)


def test_steps_are_made_while_a_commit_is_written_and_it_holds_what_was_before_them(tmp_path, held):
    seen, at_four = [], []

    def body(run, model):
        if run.steps_made == 3:  # The fourth is this one.
            at_four.append(model[0].weight.detach().clone())
        if run.steps_made == 6:
            assert held.begun.wait(30)
            seen.append(published(tmp_path / "run"))
            seen.append(other_bytes(run) > 0)
            held.let.set()
        if run.steps_made == 7:
            run._life.end_writing()
            seen.append(published(tmp_path / "run"))
            seen.append(other_bytes(run) > 0)
            file = torch.load(tmp_path / "run/checkpoints/step-000000004/parts.pt", weights_only=True)
            assert torch.equal(file["parts"]["model"]["0.weight"], at_four[0])
            assert not torch.equal(model[0].weight, at_four[0])

    live(tmp_path / "run", body)
    assert seen == [-1, True, 4, False]
    assert [one["step"] for one in commits(tmp_path / "run")] == [4, 8, 12]
    first = commits(tmp_path / "run")[0]
    assert 0 < first["stall_seconds"] < first["seconds"]


def test_without_room_for_a_copy_the_loop_waits_for_the_file(tmp_path):
    """The copy is of 20 MiB, and somebody else has all but eight."""
    seen, taken = [], []

    def body(run, _):
        if run.steps_made == 3:
            run._life.keeper.give_way()
            taken.append(run.governor.reserve(run.governor.ledger().free_bytes - (8 << 20)))
        if run.steps_made == 4:
            taken[0].close()
            seen.append((published(tmp_path / "run"), run._life._writer))
        if run.steps_made == 8:
            seen.append(run._life._writer is None)

    live(tmp_path / "run", body, width=1 << 20)
    assert seen == [(4, None), False]
    waited = [one["stall_seconds"] == one["seconds"] for one in commits(tmp_path / "run")]
    assert waited == [True, False, False]


def test_a_commit_that_fails_is_the_last_and_the_run_goes_on_from_the_one_before(tmp_path, held):
    def body(run, _):
        held.let.set()
        if run.steps_made == 6:
            run._life.end_writing()
            held.fails = True
            held.begun.clear()
        if run.steps_made == 8:
            assert held.begun.wait(30)
            with pytest.raises(OSError, match="No space left"):
                run._life.end_writing()
            with pytest.raises(OSError, match="No space left"):
                run._life.commit()

    whole = live(tmp_path / "whole", lambda *_: held.let.set(), table=True)
    with pytest.raises(OSError, match="No space left"):
        live(tmp_path / "run", body, table=True)
    status = plimsoll.status(tmp_path / "run")
    assert (status["status"], status["checkpoint_step"]) == ("failed", 4)
    held.fails = False
    assert torch.equal(live(tmp_path / "run", table=True)[0].weight, whole[0].weight)


class Unpublished:
    """A run's folder on a disk that is full when the manifest is written."""

    def __init__(self, folder):
        self._folder = folder

    def __getattr__(self, name):
        return getattr(self._folder, name)

    def publish(self, *_):
        raise OSError(28, "No space left on device", "manifest.json")


def test_after_a_commit_whose_tables_are_ahead_of_the_manifest_no_other_is_made(tmp_path, monkeypatch):
    whole = live(tmp_path / "whole", table=True)[0].weight
    monkeypatch.setattr(Image, "of", lambda *_: None)  # No commit is written beside the loop.

    def body(run, _):
        if run.steps_made == 7:
            run._life.folder = Unpublished(run._life.folder)
            real.append(run._life)

    real = []
    with pytest.raises(OSError, match="No space left"):
        live(tmp_path / "run", body, table=True)
    life, status = real[0], plimsoll.status(tmp_path / "run")
    assert (status["status"], status["checkpoint_step"]) == ("failed", 4)
    with pytest.raises(OSError, match="No space left"):  # A second one would take the place of the one that stands.
        life.commit(moved=True)
    assert torch.equal(live(tmp_path / "run", table=True)[0].weight, whole)


def test_what_ends_a_run_waits_for_the_commit_that_is_written(tmp_path, held):
    def body(run, _):
        if run.steps_made == 5:
            threading.Timer(0.2, held.let.set).start()
            raise RuntimeError("no step 6")

    with pytest.raises(RuntimeError, match="no step 6"):
        live(tmp_path / "run", body)
    status = plimsoll.status(tmp_path / "run")
    assert (status["status"], status["checkpoint_step"], status["message"]) == ("failed", 4, "RuntimeError: no step 6")


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_stop_of_the_watcher_while_the_thread_begins_loses_no_commit(begun, table, tmp_path, held, monkeypatch):
    """It comes between two instructions of the main thread, and Thread.start() has a hundred of them."""
    real, stopped = threading.Thread.start, []

    def start(thread):
        if thread.name != "plimsoll-commit" or stopped:
            return real(thread)
        stopped.append(thread)
        if begun:
            real(thread)
            assert held.begun.wait(30)
        threading.Timer(0.2, held.let.set).start()
        raise plimsoll.MemoryPressure("memory is short", 1, 1, 1)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(plimsoll.MemoryPressure):
        live(tmp_path / "run", table=table)
    status = plimsoll.status(tmp_path / "run")
    assert (status["status"], status["checkpoint_step"]) == ("stopped", 4) == ("stopped", published(tmp_path / "run"))
    whole = live(tmp_path / "whole", table=table)
    assert torch.equal(live(tmp_path / "run", table=table)[0].weight, whole[0].weight)


def test_a_commit_for_which_no_thread_can_be_had_is_written_before_the_run_ends(tmp_path, monkeypatch):
    real = threading.Thread.start

    def start(thread):
        if thread.name == "plimsoll-commit":
            raise RuntimeError("can't start new thread")
        return real(thread)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start new thread"):
        patch.setattr(threading.Thread, "start", start)
        live(tmp_path / "run", table=True)
    assert published(tmp_path / "run") == 4
    assert torch.equal(live(tmp_path / "run", table=True)[0].weight, live(tmp_path / "whole", table=True)[0].weight)


def killed_while_step_eight_is_written(path):
    held = Held(pytest.MonkeyPatch())

    def body(run, _):
        if run.steps_made == 5:
            held.let.set()
            run._life.end_writing()
            held.let.clear()
            held.begun.clear()
        if run.steps_made == 9 and held.begun.wait(30):
            os.kill(os.getpid(), signal.SIGKILL)

    live(path, body, table=True)


def test_killed_while_a_commit_is_written_the_one_before_stands(tmp_path):
    program = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import test_run_writer as t; "
    done = subprocess.run([sys.executable, "-c", program + "t.killed_while_step_eight_is_written(sys.argv[1])",
                           tmp_path / "run"], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert published(tmp_path / "run") == 4
    whole = live(tmp_path / "whole", table=True)
    assert torch.equal(live(tmp_path / "run", table=True)[0].weight, whole[0].weight)


def test_a_refused_step_waits_for_the_commit_and_is_made_again(tmp_path, held):
    refused = []

    def body(run, model):
        if run.steps_made == 5:
            def once(*_):
                if not refused:
                    refused.append(other_bytes(run))
                    threading.Timer(0.2, held.let.set).start()
                    raise torch.OutOfMemoryError("refused once")
                refused.append(other_bytes(run))

            model[0].register_forward_pre_hook(once)

    model = live(tmp_path / "run", body)
    assert refused[0] > 0 and refused[1] == 0
    held.let.set()
    assert torch.equal(model[0].weight, live(tmp_path / "whole")[0].weight)


def test_a_forked_child_has_no_part_of_the_copy():
    with plimsoll.Governor("4GiB") as governor:
        image = Image.of({"tensor": torch.ones(1000)}, governor)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os._exit(int(image._pages[0] == 0))
        assert os.waitpid(child, 0)[1] & 127 == signal.SIGSEGV
        image.close()
        assert governor.ledger().pools["other"].leased_bytes == 0


def test_ctrl_c_while_a_commit_is_waited_for_comes_when_it_is_published(tmp_path, held):
    """threading's own join() takes a thread for ended when a signal interrupts it."""
    def interrupted(*_):
        threading.Timer(0.2, held.let.set).start()
        raise KeyboardInterrupt

    def body(run, _):
        if run.steps_made == 5:
            before = signal.signal(signal.SIGUSR2, interrupted)
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR2)).start()
            try:
                with pytest.raises(KeyboardInterrupt):
                    run._life.end_writing()
            finally:
                signal.signal(signal.SIGUSR2, before)
            assert published(tmp_path / "run") == run._life.saved_step == 4

    live(tmp_path / "run", body)
    assert [one["step"] for one in commits(tmp_path / "run")] == [4, 8, 12]


def test_a_copy_shares_what_was_shared_and_is_no_view_of_what_trains(tmp_path):
    model = torch.nn.Linear(4, 4)
    rows = torch.arange(12, dtype=torch.float64).reshape(3, 4)
    content = {"model": model.state_dict(), "rows": rows, "turned": rows.T[1:], "none": torch.empty(0, 3),
               "needs": torch.ones(2, requires_grad=True), "half": torch.ones(5, dtype=torch.bfloat16),
               "list": [1, ("two", torch.tensor(True))]}
    with plimsoll.Governor("4GiB") as governor:
        image = Image.of(content, governor)
        file = tmp_path / "file.pt"
        with torch.no_grad():
            model.weight.zero_()
            rows.zero_()
        torch.save(image.content, file)
        image.close()
        assert governor.ledger().pools["other"].leased_bytes == 0
    read = torch.load(file, weights_only=True)
    assert read["model"]._metadata == content["model"]._metadata
    assert read["model"]["weight"].abs().sum() > 0
    assert torch.equal(read["rows"], torch.arange(12, dtype=torch.float64).reshape(3, 4))
    assert torch.equal(read["turned"], read["rows"].T[1:])
    assert read["turned"].stride() == rows.T.stride()
    assert read["turned"].untyped_storage().data_ptr() == read["rows"].untyped_storage().data_ptr()
    assert read["none"].shape == (0, 3)
    assert read["needs"].requires_grad
    assert torch.equal(read["half"], content["half"])
    assert read["list"] == [1, ("two", torch.tensor(True))]


@pytest.mark.parametrize("odd", [torch.ones(2, 2).to_sparse(), torch.ones(2, dtype=torch.complex64).conj()])
def test_a_tensor_that_is_not_plain_bytes_is_written_while_the_loop_waits(odd):
    with plimsoll.Governor("4GiB") as governor:
        assert Image.of({"plain": torch.ones(3), "odd": [odd]}, governor) is None
        assert governor.ledger().pools["other"].leased_bytes == 0
