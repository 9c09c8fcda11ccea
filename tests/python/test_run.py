# SPDX-License-Identifier: Apache-2.0
"""plimsoll.Run: the folder, what is asked of a run, parts, commits and the end."""
import gc
import json
import os
import re
import signal
import threading
import time
import types
import warnings

import pytest

import plimsoll
from plimsoll import _core
from plimsoll.cli import _program
from plimsoll.core import _torch_gate
from plimsoll.run import _run_life
from plimsoll.errors import MemoryPressure

torch = pytest.importorskip("torch")

BATCHES = [torch.full((2, 3), float(k)) for k in range(6)]


class Loop:
    """A little program: main() is a life of it, and `seen` what batches it got in all of them."""

    def __init__(self, path):
        self.path, self.seen, self.parts = path, [], {}

    def main(self, body=lambda run: None, data=BATCHES, epochs=2, parts=None, steps=None,
             memory_limit="4GiB", **options):
        with plimsoll.Run(self.path, memory_limit=memory_limit, **options) as run:
            self.model = torch.nn.Linear(3, 1)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
            run.track(model=self.model, optimizer=self.optimizer, **(parts or {}))
            for batch in run.steps(data, epochs=epochs, progress=False, **(steps or {})):
                run.log(loss=run.step(lambda x: self.model(x).square().mean() + 0 * torch.rand(()), batch))
                self.seen.append(float(batch[0, 0]))
                body(run)
        return run

    def weight(self):
        return self.model.weight.detach().clone()

    def events(self, name):
        lines = (self.path / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]


@pytest.fixture
def loop(tmp_path):
    return Loop(tmp_path / "run")


def fail_at(step):
    def body(run):
        if run.steps_made == step - 1:
            raise RuntimeError(f"no step {step}")
    return body


def test_a_finished_run_says_so_and_does_nothing_when_started_again(loop):
    loop.main()
    status = plimsoll.status(loop.path)
    assert (status["status"], status["step"], status["checkpoint_step"]) == ("finished", 12, 12)
    assert not status["alive"] and status["epochs"] == 2 and status["limit_bytes"] == 4 << 30
    assert [event["step"] for event in loop.events("step")] == list(range(1, 13))
    commit, = loop.events("commit")
    assert commit["step"] == 12 and commit["bytes"] > 0 and commit["seconds"] > 0
    assert list((loop.path / "metrics").glob("events.out.tfevents.*"))
    after = loop.weight()
    assert loop.main().steps_made == 12 and torch.equal(loop.weight(), after)
    assert len(loop.seen) == 12


def test_a_body_that_raises_commits_nothing(loop):
    with pytest.raises(RuntimeError, match="no step 8"):
        loop.main(fail_at(8), steps={"commit_every_steps": 3})
    status = plimsoll.status(loop.path)
    assert (status["status"], status["message"]) == ("failed", "RuntimeError: no step 8")
    assert (status["step"], status["checkpoint_step"]) == (8, 6)
    loop.seen.clear()
    loop.main()
    assert loop.seen == [0, 1, 2, 3, 4, 5]  # The second epoch; six steps of the first were committed.


def test_it_goes_on_within_an_epoch_with_the_same_bits(loop, tmp_path):
    undisturbed = Loop(tmp_path / "other")
    undisturbed.main()
    with pytest.raises(RuntimeError):
        loop.main(fail_at(6), steps={"commit_every_steps": 4})
    loop.main()
    assert loop.seen == [0, 1, 2, 3, 4, 5, 4, 5, 0, 1, 2, 3, 4, 5]
    assert torch.equal(loop.weight(), undisturbed.weight())


def test_commits_by_the_minute_count_from_publication(loop, monkeypatch):
    clock = types.SimpleNamespace(now=0.0, sleep=time.sleep)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(_run_life, "time", clock)

    def body(run):
        run._life.end_writing()
        clock.now += 25

    loop.main(body, steps={"commit_every_minutes": 1})
    assert [event["step"] for event in loop.events("commit")] == [3, 6, 9, 12]


class Ring:
    """Reachable from nowhere but itself."""

    def __init__(self, size):
        self.tensor, self.me = torch.ones(size), self


def test_m06_m09_cleaning_up_every_n_steps_changes_no_bit_and_says_what_it_freed(loop, tmp_path):
    def body(run):
        gc.disable()
        Ring(4 << 20)  # 16 MiB.

    other = Loop(tmp_path / "other")
    try:
        loop.main(body, steps={"cleanup_every_n_steps": 5})
    finally:
        gc.enable()
        gc.collect()
    other.main()
    assert torch.equal(loop.weight(), other.weight())
    seen = loop.events("cleanup")
    assert [one["step"] for one in seen] == [5, 10] and not other.events("cleanup")
    for one in seen:
        assert one["freed_bytes"] == one["resident_before_bytes"] - one["resident_after_bytes"]
        assert one["freed_bytes"] > 64 << 20 and one["collected_objects"] >= 5 and one["seconds"] > 0


@pytest.mark.parametrize("option", ["commit_every_steps", "commit_every_minutes", "cleanup_every_n_steps"])
def test_an_interval_below_zero_is_named(loop, option):
    with pytest.raises(ValueError, match=f"steps: {option} -1 must be 0 or more"):
        loop.main(steps={option: -1})


def test_two_commits_are_kept(loop):
    loop.main(steps={"commit_every_steps": 5})
    assert sorted(os.listdir(loop.path / "checkpoints")) == [
        "manifest.json", "step-000000010", "step-000000012"]


def test_plimsoll_stop_ends_the_loop_after_a_commit(loop):
    run = loop.main(lambda run: run.steps_made == 3 and plimsoll.stop(loop.path))
    assert run.stopped == ".stop" and run.steps_made == 4
    status = plimsoll.status(loop.path)
    assert (status["status"], status["message"], status["checkpoint_step"]) == ("stopped", ".stop", 4)
    assert loop.main().stopped == "" and loop.seen == [0, 1, 2, 3, 4, 5] * 2


@pytest.fixture
def as_in_a_terminal():
    """What was started in the background of a shell ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("as_in_a_terminal")
def test_a_signal_ends_the_loop_after_a_commit(number, loop):
    before = signal.getsignal(number)
    run = loop.main(lambda run: run.steps_made == 3 and os.kill(os.getpid(), number))
    assert run.stopped == number.name and run.steps_made == 4 and signal.getsignal(number) is before
    assert plimsoll.status(loop.path)["checkpoint_step"] == 4
    if number == signal.SIGINT:  # Python's own again.
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
            time.sleep(1)


class Interrupting:
    """A part that does something while it is committed, once."""

    def __init__(self):
        self.does = None

    def state_dict(self):
        does, self.does = self.does, None
        if does is not None:
            does()
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, ".stop"])
@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.usefixtures("as_in_a_terminal")
def test_a_stop_that_is_asked_for_in_a_loops_last_commit_stops_the_run(how, leaves, loop):
    """Of a loop for each epoch. leaves: by `break`, in whose step it is asked."""
    def life(asks):
        seen, ask = [], lambda: plimsoll.stop(loop.path) if how == ".stop" else os.kill(os.getpid(), how)
        with plimsoll.Run(loop.path, memory_limit="4GiB") as run:
            part = Interrupting()
            run.track(part=part)
            for _ in range(3):
                for k, _ in enumerate(run.steps(BATCHES, progress=False)):
                    seen.append(run.epoch)
                    if asks and k == 5:
                        asks = False
                        if leaves:
                            ask()
                        else:
                            part.does = ask
                    if leaves and k == 5:
                        break
        return run.stopped, seen

    assert life(asks=True) == (how if how == ".stop" else how.name, [0] * 6)
    status = plimsoll.status(loop.path)
    assert (status["status"], status["checkpoint_step"]) == ("stopped", 6)
    assert life(asks=False) == ("", [1] * 6 + [2] * 6)
    assert plimsoll.status(loop.path)["status"] == "finished"


def test_plimsoll_pause_holds_the_run_at_a_commit_until_it_may_continue(loop):
    told = []

    def look():
        while len(told) < 500:
            told.append(plimsoll.status(loop.path))
            if told[-1]["status"] == "paused":
                plimsoll.continue_run(loop.path)
                return
            time.sleep(0.01)

    def body(run):
        if run.steps_made == 2:
            plimsoll.pause(loop.path)
            threading.Thread(target=look).start()

    assert loop.main(body).steps_made == 12
    assert told[-1]["status"] == "paused" and told[-1]["checkpoint_step"] == 3 and told[-1]["alive"]


def test_plimsoll_limit_is_obeyed_between_steps(loop):
    limits = []

    def body(run):
        if run.steps_made == 2:
            plimsoll.limit(loop.path, "5GiB")
            for _ in range(500):
                if run.governor.limit_bytes == 5 << 30:
                    break
                time.sleep(0.01)
        limits.append(run.governor.limit_bytes)

    loop.main(body)
    assert limits[0] == 4 << 30 and limits[-1] == 5 << 30
    event, = loop.events("limit")
    assert event["asked_bytes"] == 5 << 30 and event["settled"]


def test_m07_short_memory_commits_and_raises_and_the_run_goes_on(loop, monkeypatch):
    report = types.SimpleNamespace(stop=True, pressure=True, evictions=[], needed_bytes=5 << 30, kernel="",
                                   resident=types.SimpleNamespace(total=1), unexplained_bytes=1,
                                   purged_bytes=0, shrunk_bytes=0)

    def body(run):
        if run.steps_made == 4:
            monkeypatch.setattr(run.governor, "_look", lambda: report)

    with pytest.raises(MemoryPressure, match="A limit of 5120 MiB would do"):
        loop.main(body)
    status = plimsoll.status(loop.path)
    assert status["status"] == "stopped" and status["checkpoint_step"] == status["step"] == 5
    assert status["message"].startswith("MemoryPressure: memory is short")
    assert loop.main().steps_made == 12 and loop.seen == [0, 1, 2, 3, 4, 5] * 2


def test_a_second_process_is_refused(loop, tmp_path):
    told = []

    def body(run):
        if run.steps_made == 1:
            with pytest.raises(ValueError, match="run, step 1> is open in this process; close it first"):
                plimsoll.Run(tmp_path / "other")
            with pytest.raises(ValueError, match="run: another process trains in this run"):
                _core.RunFolder.open(str(loop.path))
            read, write = os.pipe()
            if os.fork() == 0:
                try:
                    plimsoll.Run(loop.path)
                except BaseException as error:
                    os.write(write, str(error).encode())
                os._exit(0)
            os.close(write)
            told.append(os.read(read, 1000).decode())
            os.wait()

    assert loop.main(body).steps_made == 12
    assert "run: another process trains in this run" in told[0] and "plimsoll stop RUN" in told[0]


def test_a_child_that_lives_on_does_not_hold_the_folder(loop):
    children = []

    def body(run):
        if run.steps_made == 1:
            pid = os.fork()
            if pid == 0:
                time.sleep(60)
                os._exit(0)
            children.append(pid)

    loop.main(body)
    try:
        assert not plimsoll.status(loop.path)["alive"]
        assert loop.main().steps_made == 12
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)


def test_what_decides_the_bits_may_not_change_once_something_is_committed(loop):
    with pytest.raises(RuntimeError):
        loop.main(fail_at(2), seed=1, options={"lr": 0.1})
    loop.main(seed=7, options={"lr": 0.01})  # Nothing was committed.
    with pytest.raises(ValueError, match=r"this run cannot go on here: options.lr was 0.01 and is 0.02; "
                                         r"seed was 7 and is 8: the same bits need the same identity"):
        loop.main(seed=8, options={"lr": 0.02})
    with pytest.raises(ValueError, match="threads was [0-9]+ and is 17"):
        loop.main(seed=7, options={"lr": 0.01}, compute_threads=17)
    assert plimsoll.Governor.current() is None
    status = plimsoll.status(loop.path)
    assert status["status"] == "failed" and status["step"] == 12 and "threads was" in status["message"]
    loop.main(seed=7, options={"lr": 0.02}, accept=["options.lr"])
    assert loop.events("identity")[0]["key"] == "options.lr"


def test_other_data_is_refused(loop):
    with pytest.raises(RuntimeError):
        loop.main(fail_at(4), steps={"commit_every_steps": 2})
    with pytest.raises(ValueError, match="the data is another than the run began with: batches was 6 and is 5"):
        loop.main(data=BATCHES[:5])
    with pytest.raises(ValueError, match="batches was 6 and is None; items was None and is 6; batch_size was None and"):
        with plimsoll.Run(loop.path, memory_limit="4GiB") as run:
            model = torch.nn.Linear(3, 1)
            run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
            next(run.steps(run.loader(BATCHES, batch_size=1), progress=False))


def test_a_commit_that_fails_ends_the_loop_and_leaves_the_one_before(loop, monkeypatch):
    from plimsoll.run import _run_commit

    def body(run):
        if run.steps_made == 7:
            run._life.end_writing()  # Step 4.
            monkeypatch.setattr(_run_commit, "sync_folder", full)
        while run.steps_made == 8 and not run._life._writer.done:
            time.sleep(0.01)  # It has failed then, and the loop looks between two steps.

    def full(path):
        raise OSError(28, "No space left on device", str(path))

    with pytest.raises(OSError, match="No space left on device"):
        loop.main(body, steps={"commit_every_steps": 4})
    monkeypatch.undo()
    assert len(loop.seen) == 9
    status = plimsoll.status(loop.path)
    assert status["status"] == "failed" and status["checkpoint_step"] == 4
    loop.seen.clear()
    loop.main()
    assert loop.seen == [4, 5, 0, 1, 2, 3, 4, 5]


class StopsTheRun:
    """As Ctrl-C in a terminal: it reaches the worker too, which ends."""

    def __init__(self, fatal):
        self.fatal = fatal

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == self.fatal:
            time.sleep(0.5)  # The loop waits for this item by now.
            os.kill(os.getppid(), signal.SIGTERM)
            raise RuntimeError("the worker ended")
        return BATCHES[index]


def test_a_worker_that_the_same_signal_ended_is_no_failure(loop):
    def life(fatal):
        with plimsoll.Run(loop.path, memory_limit="4GiB") as run:
            seen = {"n": 0}
            run.track(seen=seen)
            data = run.loader(StopsTheRun(fatal), batch_size=1, workers=1, shuffle=False)
            for _ in run.steps(data, progress=False):
                seen["n"] += 1
        return run.stopped, seen["n"]

    assert life(4) == ("SIGTERM", 4) and plimsoll.status(loop.path)["checkpoint_step"] == 4
    assert life(-1) == ("", 6)


def test_parts_are_named_when_they_do_not_fit(loop, tmp_path):
    loop.main(parts={"scale": torch.ones(3), "seen": {"rows": 4}})
    with pytest.raises(ValueError, match=r"the commit of step 12 holds scale, seen, which this program does not "
                                         r"track: run.track\(scale=…, seen=…\)"):
        loop.main()
    with pytest.raises(ValueError, match="the commit of step 12 has no part 'more'; it has model, optimizer, "
                                         "scale, seen"):
        loop.main(parts={"more": {}})
    with pytest.raises(ValueError, match=r"scale is not what the commit of step 12 holds: it is float32 \[4\] "
                                         r"and was float32 \[3\]"):
        loop.main(parts={"scale": torch.ones(4), "seen": {}})
    with plimsoll.Run(loop.path, memory_limit="4GiB") as run:
        with pytest.raises(ValueError, match=r"model is not what .* holds: weight is float32 \[2, 3\] and was "
                                             r"float32 \[1, 3\]; bias is float32 \[2\] and was float32 \[1\]"):
            run.track(model=torch.nn.Linear(3, 2))
        with pytest.raises(ValueError, match="model is not what .* holds: bias is there and not here"):
            run.track(model=torch.nn.Linear(3, 1, bias=False))
    seen = {}
    loop.main(parts={"scale": torch.ones(3), "seen": seen})
    assert seen == {"rows": 4}


def test_parts_that_cannot_be_parts(loop, tmp_path):
    with plimsoll.Run(tmp_path / "run", memory_limit="4GiB") as run:
        model = torch.nn.Linear(3, 1)
        run.track(model=model)
        with pytest.raises(ValueError, match="there is a part 'model' already"):
            run.track(model=model)
        with pytest.raises(ValueError, match="list is a list, which has no state_dict"):
            run.track(list=[1])
        with pytest.raises(ValueError, match=r"plain\['f'\] is a builtins.function: a checkpoint holds"):
            run.track(plain={"f": lambda: 0})
        run.track(optimizer=torch.optim.SGD(torch.nn.Linear(5, 2).parameters(), lr=1))
        with pytest.raises(ValueError, match=r"2 parameters of optimizer are in no tracked part \(the first is "
                                             r"\[2, 5\]\)"):
            run.steps(BATCHES)


def test_generators_and_bfloat16_come_back_bit_for_bit(loop):
    import random

    import numpy as np

    def parts():
        return {"own": torch.Generator().manual_seed(1), "numbers": np.random.default_rng(2),
                "old": np.random.RandomState(3), "plain": random.Random(4),
                "half": torch.full((5,), 0.3, dtype=torch.bfloat16)}

    def drawn(one):
        return [torch.rand(2, generator=one["own"]).tolist(), one["numbers"].random(), one["old"].rand(),
                one["plain"].random(), one["half"].tolist()]

    first = parts()
    for _ in range(3):
        drawn(first)
    first["half"] += 0.007
    loop.main(parts=first)
    again = parts()
    loop.main(parts=again)
    assert drawn(again) == drawn(first)


def test_break_ends_the_loop_after_the_step_that_was_made(loop):
    def life():
        with plimsoll.Run(loop.path, memory_limit="4GiB") as run:
            count = {"n": 0}
            run.track(count=count)
            epochs = []
            for _ in run.steps(BATCHES, epochs=3, progress=False):
                count["n"] += 1
                if count["n"] == 4:
                    break
            for _ in run.steps(BATCHES, epochs=1, progress=False):
                count["n"] += 1
                epochs.append(run.epoch)
        return count["n"], epochs, run.steps_made

    assert life() == (10, [3] * 6, 10)
    assert life() == (10, [], 10)


def test_a_loop_that_a_variable_keeps_after_break_counts_its_step_once(loop):
    """Its iterator is closed only where the variable ends: once the step is counted, or in another loop."""
    with plimsoll.Run(loop.path, memory_limit="4GiB") as run:
        count = {"n": 0}
        run.track(count=count)
        kept = run.steps(BATCHES, progress=False)
        for _ in kept:
            count["n"] += 1
            if count["n"] == 2:
                break
        other = run.steps(BATCHES, progress=False)
        assert run.steps_made == 2
        kept.close()
        assert run.steps_made == 2
        for _ in other:
            count["n"] += 1
            if count["n"] == 4:
                break
        third = run.steps(BATCHES, progress=False)
        for _ in third:
            other.close()
            assert run.steps_made == count["n"]
            count["n"] += 1
        assert run.steps_made == count["n"] == 4 + len(BATCHES)


@pytest.mark.parametrize("raised, status, cause", [(plimsoll.BudgetExceeded("no room", "rows", 1, 0), "stopped", "refused"),
                                                   (RuntimeError("no loss"), "failed", "error")])
def test_a_step_that_raises_was_not_made_though_it_is_caught_around_the_loop(raised, status, cause, loop, tmp_path):
    def life(path, fails):
        def wrong(x):
            if fails and run.steps_made == 4:
                raise raised
            return model(x).square().mean()

        seen = []
        with plimsoll.Run(path, memory_limit="4GiB") as run:
            model = torch.nn.Linear(3, 1)
            run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            try:
                for batch in run.steps(BATCHES, commit_every_steps=3, progress=False):
                    run.step(wrong, batch)
                    seen.append(float(batch[0, 0]))
            except (plimsoll.BudgetExceeded, RuntimeError):
                assert run.steps_made == 4
        return seen, model.weight.tolist()

    assert life(loop.path, fails=True)[0] == [0, 1, 2, 3]
    seen = plimsoll.status(loop.path)
    committed = 4 if cause == "refused" else 3
    assert (seen["status"], seen["step"], seen["checkpoint_step"]) == (status, 5, committed)
    assert loop.events("end")[-1]["cause"] == cause and str(raised) in seen["message"]
    seen, weight = life(loop.path, fails=False)
    assert seen == [3, 4, 5][committed - 3:] and weight == life(tmp_path / "other", fails=False)[1]
    assert plimsoll.status(loop.path)["status"] == "finished"


def test_a_loop_may_follow_one_whose_step_was_not_made(loop):
    def life(fails):
        def wrong(x):
            if fails and run.steps_made == 2:
                raise plimsoll.BudgetExceeded("no room", "rows", 1, 0)
            return model(x).square().mean()

        with plimsoll.Run(loop.path, memory_limit="4GiB") as run:
            model = torch.nn.Linear(3, 1)
            run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            for batches in (BATCHES, BATCHES[:3]):
                try:
                    for batch in run.steps(batches, progress=False):
                        run.step(wrong, batch)
                except plimsoll.BudgetExceeded:
                    fails = False
        return run.steps_made, model.weight.tolist()

    made, weight = life(fails=True)
    assert made == 5 and plimsoll.status(loop.path)["status"] == "finished"
    assert life(fails=False) == (5, weight)


def test_what_ends_a_loop_is_told_though_it_is_caught_around_it(loop):
    def data():
        yield from BATCHES[:2]
        raise RuntimeError("no more data")

    with plimsoll.Run(loop.path, memory_limit="4GiB") as run:
        run.track(count={"n": 0})
        with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match="no more data"):
            for _ in run.steps(data(), commit_every_steps=1, progress=False):
                pass
    seen = plimsoll.status(loop.path)
    assert (seen["status"], seen["step"], seen["message"]) == ("failed", 2, "RuntimeError: no more data")


def test_an_epoch_a_loop_goes_on_in_the_right_one(loop):
    def life(fail):
        epochs = []
        with plimsoll.Run(loop.path, memory_limit="4GiB") as run:
            count = {"n": 0}
            run.track(count=count)
            data = run.loader(list(range(8)), batch_size=4)
            for _ in range(3):
                for batch in run.steps(data, commit_every_steps=1, progress=False):
                    count["n"] += 1
                    epochs.append((run.epoch, batch.tolist()))
                    if count["n"] == fail:
                        raise RuntimeError
        return epochs

    with pytest.raises(RuntimeError):
        life(4)
    rest = life(0)
    assert [epoch for epoch, _ in rest] == [1, 2, 2]
    order = plimsoll.SampleOrder(8, 0, 1)
    assert rest[0][1] == [order.at(place) for place in range(4, 8)]


def test_what_is_drawn_between_loops_is_drawn_again(loop):
    def life(path, fail):
        with plimsoll.Run(path, memory_limit="4GiB", seed=2) as run:
            drawn = torch.zeros(3)
            run.track(drawn=drawn)
            for _ in run.steps(BATCHES, progress=False):
                drawn += torch.rand(3)
            between = torch.rand(3)
            for k, _ in enumerate(run.steps(BATCHES, commit_every_steps=4, progress=False)):
                drawn += torch.rand(3)
                if k == fail:
                    raise RuntimeError
            return drawn.tolist(), torch.rand(2).tolist(), between.tolist()

    undisturbed = life(loop.path.with_name("other"), -1)
    with pytest.raises(RuntimeError):
        life(loop.path, 0)  # Comes back to the first loop's end.
    with pytest.raises(RuntimeError):
        life(loop.path, 4)  # Comes back into the second.
    assert life(loop.path, -1)[:2] == undisturbed[:2]


def test_more_epochs_are_gone_on_with(loop, tmp_path):
    other = Loop(tmp_path / "other")
    other.main(epochs=3)
    loop.main(epochs=2)
    assert loop.main(epochs=3).steps_made == 18 and len(loop.seen) == 18
    assert torch.equal(loop.weight(), other.weight())


class Stateful:
    """As a StatefulDataLoader: goes on after load_state_dict()."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        begin, self.next = self.next, 0
        for k in range(begin, 6):
            self.next = (k + 1) % 6
            yield BATCHES[k]

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def test_data_with_a_state_of_its_own_goes_on_from_it(loop):
    with pytest.raises(RuntimeError):
        loop.main(fail_at(10), data=Stateful(), steps={"commit_every_steps": 3})
    loop.main(data=Stateful())
    assert loop.seen == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 3, 4, 5]


def shuffled():
    """Drawn from the main generator, as users do."""
    return torch.utils.data.DataLoader(torch.stack(BATCHES), batch_size=None, shuffle=True)


def test_data_without_a_position_is_read_again_and_warns(loop, tmp_path):
    undisturbed = Loop(tmp_path / "other")
    with pytest.warns(RuntimeWarning, match="DataLoader has no position"):
        undisturbed.main(data=shuffled())
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError):
        loop.main(fail_at(10), data=shuffled(), steps={"commit_every_steps": 8})
    with pytest.warns(RuntimeWarning):
        loop.main(data=shuffled())
    assert loop.seen[:10] == undisturbed.seen[:10] and loop.seen[10:] == undisturbed.seen[8:]
    assert torch.equal(loop.weight(), undisturbed.weight())


def test_an_iterator_gives_one_epoch(loop):
    with pytest.warns(RuntimeWarning), pytest.raises(ValueError, match="epoch 1 has no batch"):
        loop.main(data=iter(BATCHES))


def test_options_of_steps_stay_the_same_and_steps_are_in_the_loop(loop, tmp_path):
    with plimsoll.Run(tmp_path / "run", memory_limit="4GiB") as run:
        model = torch.nn.Linear(3, 1)
        with pytest.raises(ValueError, match="step: call it in the body of `for batch in run.steps"):
            run.step(lambda x: model(x).sum(), BATCHES[0])
        run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.steps(BATCHES, progress=False)
        next(batches)
        run.step(lambda x: model(x).sum(), BATCHES[0], clip_norm=1.0)
        with pytest.raises(ValueError, match="step: clip_norm was 1.0 and is 2.0; the steps of a run have"):
            run.step(lambda x: model(x).sum(), BATCHES[0], clip_norm=2.0)
        batches.close()


def test_the_largest_batch_is_admitted_before_the_first_step(loop):
    limit = _core.resident().total + (400 << 20)
    with pytest.raises(plimsoll.BudgetExceeded, match="a step of 40000000 rows is not admitted"):
        loop.main(steps={"largest": torch.ones(1, 1).expand(40_000_000, 3)}, memory_limit=limit)
    assert plimsoll.status(loop.path)["status"] == "stopped" and loop.seen == []


def test_what_was_admitted_changes_no_bit(loop, tmp_path):
    other = Loop(tmp_path / "other")
    other.main()
    loop.main(steps={"largest": torch.ones(1000, 3)})
    assert torch.equal(loop.weight(), other.weight())
    [admitted] = loop.events("admitted")
    assert admitted["rows"] == 1000 and re.search(r"(?m)^free +[0-9.]+ [KMG]iB$", admitted["table"])  # Who holds the limit then.


@pytest.mark.parametrize("accumulate", [1, 3])
def test_what_the_first_life_was_admitted_is_enough_for_any_step_and_any_life(accumulate, tmp_path):
    """Activations, gradients that wait and the optimizer's states are together there from the second update on, and in lives
    that begin with them."""
    def live(steps):
        gc.collect()  # Of the life before.
        with plimsoll.Run(tmp_path / "run", memory_limit="4GiB") as run:
            model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            run.track(model=model, optimizer=optimizer)
            batches = [torch.full((1024, 512), float(k)) for k in range(9)]
            for batch in run.steps(batches, epochs=1, progress=False, largest=batches[0]):
                arena.reset_peak()
                run.step(lambda x: model(x).square().mean(), batch, loss="mean", accumulate=accumulate)
                peaks.append(arena.arena_stats()["live_peak_bytes"])
                if run.steps_made + 1 == steps:
                    plimsoll.stop(run.path)

    arena, peaks = _torch_gate.load(), []
    for steps in (4, 5, 8, 9):
        live(steps)
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    first, *others = [one["peak_bytes"] for one in map(json.loads, lines) if one["event"] == "admitted"]
    assert len(others) == 3 and max(others) <= first + first // 32 and max(peaks) <= first


def test_plimsoll_status_and_resume_know_it(loop, capfd):
    loop.main()
    assert _program.main(["status", str(loop.path)]) == 0
    assert "finished\n  step      12 of 12, epoch 2 of 2\n" in capfd.readouterr().out
    assert _program.main(["resume", str(loop.path)]) == 1
    said = capfd.readouterr().err
    assert "is the run of a Python program, started in " in said and "start that program again" in said


def test_a_run_of_a_recipe_is_refused_and_left_alone(loop):
    loop.path.mkdir()
    _core.RunFolder.create(str(loop.path), 'recipe = "cosir"\n').close()
    before = (loop.path / "run.toml").read_bytes()
    with pytest.raises(ValueError, match="is a run of `plimsoll train`, and `plimsoll resume` goes on with it"):
        loop.main()
    assert (loop.path / "run.toml").read_bytes() == before


def test_a_folder_of_other_things_is_refused_and_left_alone(loop):
    loop.path.mkdir()
    (loop.path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty and is no run: name a new or empty folder, with --out or as "
                                         "the first argument of a Run"):
        loop.main()
    assert os.listdir(loop.path) == ["notes.txt"]


def test_a_limit_that_is_too_small_leaves_no_folder(loop):
    with pytest.raises(plimsoll.BudgetExceeded):
        loop.main(memory_limit="1MiB")
    assert not loop.path.exists()
    loop.main()


def test_a_closed_run_says_so(loop):
    run = loop.main()
    with pytest.raises(ValueError, match=r"this run was closed; make plimsoll.Run\('"):
        run.track(x={})


def test_torch_is_as_it_was_afterwards(loop):
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.main(compute_threads=1)
    assert torch.get_num_threads() == threads and not torch.are_deterministic_algorithms_enabled()
