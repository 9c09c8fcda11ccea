# SPDX-License-Identifier: Apache-2.0
"""At the limit no work is lost: where a stop of the watcher, or a refusal, finds a run, and what is committed then."""
import json
import pathlib
import types

import numpy as np
import pytest

import plimsoll
from plimsoll.memory import _memory
from plimsoll.run import _run_commit, _run_kept
from plimsoll.run._run_life import Where
from plimsoll.errors import BudgetExceeded, MemoryPressure

torch = pytest.importorskip("torch")
pytest.importorskip("plimsoll._torch")

BATCHES = [torch.full((2, 3), float(k)) for k in range(12)]
REPORT = types.SimpleNamespace(stop=True, pressure=True, evictions=[], needed_bytes=3 << 30, kernel="", unexplained_bytes=1,
                               resident=types.SimpleNamespace(total=1), purged_bytes=0, shrunk_bytes=0)


class Program:
    """A life of a run: `body` is called after each step, `loss` within it; `say` is what the watcher does."""

    def __init__(self, path):
        self.path, self.run = path, None

    def say(self, late=True):
        """The watcher has seen that memory is short; the interpreter calls this between two instructions."""
        self.run.governor._still_asks = lambda report: report
        self.run.governor._watcher = types.SimpleNamespace(take=lambda: (True, late, REPORT), close=lambda: None, defer=lambda: None)
        try:
            self.run.governor._hear()
        finally:
            self.run.governor._watcher = self.watcher

    def life(self, body=lambda: None, loss=lambda: None, before=lambda: None, own=False, data=BATCHES, optimizer=torch.optim.AdamW,
             limit="4GiB", epochs=1):
        with plimsoll.Run(self.path, memory_limit=limit, seed=1) as run:
            self.run, self.watcher = run, run.governor._watcher
            model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
            optimizer = optimizer(model.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            counts = {"n": 0}
            run.track(model=model, optimizer=optimizer, schedule=schedule, counts=counts)

            def made(x):
                value = model(x + torch.rand(())).square().mean()
                loss()
                return value

            for batch in run.steps(data, epochs=epochs, progress=False):
                counts["n"] += 1
                noise = torch.rand(batch.shape)
                before()
                if own:
                    optimizer.zero_grad()
                    made(batch + noise).backward()
                    optimizer.step()
                else:
                    run.step(made, batch + noise)
                body()
                schedule.step()
            end = [one.clone() for one in model.state_dict().values()], torch.get_rng_state(), dict(counts), schedule.state_dict()
        return end

    @property
    def status(self):
        return plimsoll.status(self.path)


def same(one, other):
    return (all(map(torch.equal, one[0], other[0])) and torch.equal(one[1], other[1]) and one[2:] == other[2:])


@pytest.fixture(autouse=True)
def all_costs_little(monkeypatch):
    """What is kept at a boundary is kept at each one, on any machine."""
    monkeypatch.setattr(_run_kept, "_NOTHING_SECONDS", 60.0)


@pytest.fixture
def program(tmp_path):
    return Program(tmp_path / "run")


@pytest.fixture
def undisturbed(tmp_path):
    return lambda **options: Program(tmp_path / "undisturbed").life(**options)


def at(step, program, say):
    return lambda: say() if program.run.steps_made == step - 1 else None


# ---- S1: nothing is raised from a boundary's begin to its commit's end ----

@pytest.mark.parametrize("where", ["the look", "what a commit holds", "the file"])
def test_s01_a_stop_that_comes_within_a_boundary_waits_for_its_commit(where, program, undisturbed, monkeypatch):
    said = []

    def say_and(then):
        def called(*arguments, **options):
            if program.run.steps_made == 5 and len(said) < 3:
                said.append(program.run._life.where)
                program.say()
            return then(*arguments, **options)
        return called

    def body():
        if program.run.steps_made == 4:
            monkeypatch.setattr(program.run.governor, "_look", say_and(lambda: REPORT))
            if where == "what a commit holds":
                monkeypatch.setattr(program.run._parts, "states", say_and(program.run._parts.states))

    if where == "the file":
        monkeypatch.setattr(_run_commit, "write", say_and(_run_commit.write))
    with pytest.raises(MemoryPressure, match="would do just now"):
        program.life(body)
    assert set(said) == {Where.BUSY}
    assert (program.status["step"], program.status["checkpoint_step"], program.status["cause"]) == (5, 5, "memory")
    monkeypatch.undo()
    assert same(program.life(), undisturbed())


def test_s01_what_was_heard_at_a_boundary_ends_the_run_at_the_next_where_it_still_holds(program, monkeypatch):
    looks = []

    def body():
        if program.run.steps_made == 3:
            program.say(late=False)  # In the body, and the next boundary comes in time.
            monkeypatch.setattr(program.run.governor, "_look", lambda: None)  # It was not time for a look.
            monkeypatch.setattr(program.run.governor, "step_boundary", lambda: looks.append(1) or REPORT)

    with pytest.raises(MemoryPressure):
        program.life(body)
    assert looks == [1] and program.status["checkpoint_step"] == program.status["step"] == 4


def test_s01_what_is_over_at_the_boundary_ends_nothing(program, undisturbed):
    """An evaluation may hold much for a moment."""
    assert same(program.life(at(4, program, lambda: program.say(late=False))), undisturbed())


# ---- S2: in a step, and in a body ----

@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True)])
def test_s02_a_stop_in_a_step_puts_it_back_and_commits(optimizer, program, undisturbed):
    def loss():
        if program.run.steps_made == 7:
            program.say()

    with pytest.raises(MemoryPressure):
        program.life(loss=loss, optimizer=optimizer)
    assert (program.status["step"], program.status["checkpoint_step"]) == (8, 7)
    assert same(program.life(optimizer=optimizer), undisturbed(optimizer=optimizer))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("when", ["before", "body"])
def test_s02_a_stop_in_a_body_commits_the_boundary_before_it(when, own, program, undisturbed):
    """The body has drawn, counted and stepped meanwhile."""
    with pytest.raises(MemoryPressure):
        program.life(**{when: at(6, program, program.say)}, own=own)
    assert (program.status["step"], program.status["checkpoint_step"]) == (6, 5)
    assert same(program.life(own=own), undisturbed(own=own))


def test_s02_a_stop_that_the_next_boundary_hears_in_time_loses_nothing(program, undisturbed, monkeypatch):
    def body():
        if program.run.steps_made == 5:
            program.say(late=False)
            monkeypatch.setattr(program.run.governor, "step_boundary", lambda: REPORT)

    with pytest.raises(MemoryPressure):
        program.life(body)
    monkeypatch.undo()
    assert program.status["checkpoint_step"] == 6
    assert same(program.life(), undisturbed())


def test_s02_a_body_that_catches_the_stop_ends_at_its_boundary(program, undisturbed):
    def body():
        if program.run.steps_made == 5:
            with pytest.raises(MemoryPressure):
                program.say()

    with pytest.raises(MemoryPressure):
        program.life(body)
    assert program.status["checkpoint_step"] == 6
    assert same(program.life(), undisturbed())


def test_s02_in_an_accumulation_the_gradients_that_wait_are_those_of_the_boundary(tmp_path):
    def life(path, fails):
        program = Program(path)
        with plimsoll.Run(path, memory_limit="4GiB", seed=1) as run:
            program.run, program.watcher = run, run.governor._watcher
            model = torch.nn.Linear(3, 1)
            run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

            def loss(x):
                if fails and run.steps_made == 4:
                    program.say()
                return model(x).square().mean()

            for batch in run.steps(BATCHES, progress=False):
                run.step(loss, batch, loss="mean", accumulate=3)
            return model.weight.tolist()

    with pytest.raises(MemoryPressure):
        life(tmp_path / "run", True)
    assert plimsoll.status(tmp_path / "run")["checkpoint_step"] == 4
    assert life(tmp_path / "run", False) == life(tmp_path / "other", False)


def test_s02_a_copy_of_a_boundary_gives_way_to_what_memory_refused(program):
    kept = []

    def body():
        keeper = program.run._life.keeper
        if program.run.steps_made == 6:
            kept.append(program.run.governor.ledger().pools["other"].leased_bytes)
            program.run.governor._before_retry()
            kept.append(program.run.governor.ledger().pools["other"].leased_bytes)
            assert keeper.last() is None  # A step was made since the boundary.

    program.life(body)
    assert kept[0] > 0 and kept[1] == 0


@pytest.mark.parametrize("copies", [True, False])
def test_s03_what_grows_slowly_to_the_end_loses_one_step_at_most(copies, program, undisturbed, monkeypatch):
    """A little less is free after each step, at last less than a copy of the boundary may take; then the body is refused."""
    data = [torch.full((4, 3), float(number)) for number in range(40)]
    copy_bytes = 8 << 20
    held = []

    def body():
        free = program.run.governor.ledger().free_bytes
        if program.run.steps_made < 4:
            return
        if free > 2 * copy_bytes:
            held.append(torch.empty(free // 2, dtype=torch.uint8))
        elif len(held) < 30:
            held.append(torch.empty(1 << 30, dtype=torch.uint8))  # Refused.

    monkeypatch.setattr(_run_kept, "room_for", lambda tensors: copy_bytes)
    monkeypatch.setattr(_memory, "_BOUNDARY_EVERY", 0.0)  # These steps take less than a look is worth.
    if not copies:
        monkeypatch.setattr(_run_kept._Bytes, "_has", lambda *_: False)
    with pytest.raises((torch.OutOfMemoryError, plimsoll.BudgetExceeded)):
        program.life(body, data=data)
    status = program.status
    assert status["step"] - 1 <= status["checkpoint_step"] and status["step"] > 4, status
    held.clear()
    assert same(program.life(data=data), undisturbed(data=data))


# ---- S3: a refusal commits before it is raised ----

def refused():
    raise BudgetExceeded("no room", "tensors", 1, 0)


def too_much():
    torch.empty(1 << 40, dtype=torch.uint8)


@pytest.mark.parametrize("raises", [refused, too_much, lambda: np.ones(1 << 46)])
@pytest.mark.parametrize("when, own", [("loss", False), ("body", False), ("before", False), ("body", True), ("loss", True)])
def test_s03_a_refusal_commits_the_last_boundary(when, own, raises, program, undisturbed):
    with pytest.raises((MemoryError, torch.OutOfMemoryError)):
        program.life(**{when: at(9, program, raises)}, own=own)
    assert (program.status["step"], program.status["checkpoint_step"], program.status["cause"]) == (9, 8, "refused")
    assert same(program.life(own=own), undisturbed(own=own))


def test_s03_a_refusal_after_rows_were_written_is_told(tmp_path):
    """No copy of a table is kept: where rows have moved since the boundary, the commit before stands."""
    def life(fails):
        with plimsoll.Run(tmp_path / "run", memory_limit="4GiB", seed=1) as run:
            rows = run.embedding("rows", rows=10, dim=3, optimizer=plimsoll.AdamW(lr=0.1))
            model = torch.nn.Linear(3, 1)
            run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            for step, ids in enumerate(run.steps([torch.arange(4)] * 8, progress=False, commit_every_steps=3), run.steps_made + 1):
                run.step(lambda ids: model(rows(ids)).square().mean() if fails != step else refused(), ids)
            return model.weight.tolist(), rows(torch.arange(10)).tolist()

    with pytest.raises(BudgetExceeded):
        life(6)  # In the step: nothing was written since the boundary.
    assert plimsoll.status(tmp_path / "run")["checkpoint_step"] == 5
    ended = life(0)
    (tmp_path / "run").rename(tmp_path / "first")
    assert life(0) == ended


# ---- S5: both numbers ----

def test_s05_the_step_of_the_end_and_that_of_the_commit(program):
    def crash():
        raise KeyError("label 17")

    with pytest.raises(KeyError):
        program.life(at(9, program, crash))
    assert (program.status["step"], program.status["checkpoint_step"]) == (9, -1)
    end = [json.loads(line) for line in (program.path / "events.jsonl").read_text().splitlines()][-1]
    assert (end["event"], end["step"], end["checkpoint_step"]) == ("end", 9, -1)
    assert plimsoll.why(program.path)["summary"].startswith("failed at step 9 (nothing is committed): ")
    with pytest.raises(BudgetExceeded):
        program.life(at(5, program, refused))
    assert plimsoll.why(program.path)["summary"].startswith("refused memory at step 5 (committed: step 4): ")


# ---- S6, S7 ----

def test_s06_a_limit_that_cannot_be_kept_commits_and_names_one_that_would_do(program):
    """Nothing is refused on the way: the step that hears of it is the last."""
    import time

    def body():
        if program.run.steps_made == 3:
            assert plimsoll.limit(program.path, "50MiB")
        time.sleep(0.002)

    with pytest.raises(MemoryPressure, match="A limit of [0-9]+ MiB would do"):
        program.life(body, data=BATCHES * 4000)
    status = program.status
    assert status["checkpoint_step"] == status["step"] > 3 and "50.0 MiB is asked for" in status["message"]


def test_s07_page_and_docstring_tell_one_truth():
    page = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "guide" / "resume.md").read_text()
    promise = "at most the step that was being made"
    for ends in ("MemoryPressure", "BudgetExceeded"):
        row = next(line for line in page.splitlines() if line.startswith("|") and ends in line)
        assert promise in row or "the same" in row
    assert promise in plimsoll.Run.__doc__ and "without one where it comes" not in plimsoll.Run.__doc__


# ---- What is kept ----

def test_s02_nearness_is_by_the_steps_that_are_left(program):
    course = _run_kept.Course()
    pools = {"tensors": types.SimpleNamespace(peak_bytes=0, leased_bytes=0, floor_bytes=0)}
    governor = types.SimpleNamespace(ledger=lambda: types.SimpleNamespace(limit_bytes=1000 << 20, free_bytes=1 << 40, pools=pools))

    def near(step, held_mib, pressure=False):
        seen = types.SimpleNamespace(pressure=pressure, resident=types.SimpleNamespace(total=held_mib << 20))
        return course.near(step, seen, governor)

    assert near(1, 500) is _run_kept.Near.CALM
    assert near(2, 501) is _run_kept.Near.CALM
    assert near(3, 530) is _run_kept.Near.END  # 15 MiB a step, and 440 are left.
    for step in range(4, 40):
        last = near(step, 530)
    assert last is _run_kept.Near.CALM
    assert near(40, 530, pressure=True) is _run_kept.Near.SHORT


def test_s02_keeping_costs_a_bounded_share_of_the_time(program, monkeypatch):
    """A boundary whose state takes long to keep is passed over while there is no need."""
    kept = []
    monkeypatch.setattr(_run_kept, "_NOTHING_SECONDS", 4e-4)

    def body():
        keeper = program.run._life.keeper
        if program.run.steps_made == 1:
            keeper._seconds.extend([1.0] * keeper._seconds.maxlen)  # As a large model takes it.
        kept.append(keeper._last is not None and keeper._last.position.step)

    program.life(body)
    assert kept[2:] == [kept[2]] * len(kept[2:]) and kept[2] <= 2
