# SPDX-License-Identifier: Apache-2.0
"""plimsoll.Run with a loop for each epoch: resumed at any commit it goes on as one that nobody disturbed.

A life ends by an exception in its body, after which nothing is committed: as by a kill.
"""
import pytest

import plimsoll

torch = pytest.importorskip("torch")


class Killed(Exception):
    pass


def lives(life, path, kills):
    """What life(run's folder, the step it is killed in) gives, killed in these steps, one after another, and not at all."""
    undisturbed = life(path / "undisturbed", -1)
    for step in kills:
        with pytest.raises(Killed):
            life(path / "run", step)
    return undisturbed, life(path / "run", -1)


# ---- Data that has an order of its own for each epoch ----


@pytest.mark.parametrize("every, workers", [(1, 0), (4, 0), (3, 0), (12, 0), (4, 1)])
@pytest.mark.parametrize("per_loop, leaves", [(1, 0), (2, 0), (1, 3)])
def test_a_stateful_loader_keeps_its_order_over_the_end_of_an_epoch_and_of_a_loop(every, per_loop, leaves, workers, tmp_path):
    """Commits come at the end of an epoch (4 batches), within it, or of a loop. leaves: a loop after so many batches."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def life(path, killed_in):
        with plimsoll.Run(path, memory_limit="4GiB", seed=5) as run:
            order = {"seen": []}
            run.track(order=order)
            data = torchdata.StatefulDataLoader(range(8), batch_size=2, shuffle=True, num_workers=workers)
            for _ in range(6 // per_loop):
                for batch in run.steps(data, epochs=per_loop, commit_every_steps=every, progress=False):
                    if run.steps_made + 1 == killed_in:
                        run._life.end_writing()
                        raise Killed
                    order["seen"] = [*order["seen"], (*batch.tolist(), torch.rand(1).item())]
                    if leaves and len(order["seen"]) % leaves == 0:
                        break
            return order["seen"]

    steps = 18 if leaves else 24
    undisturbed, resumed = lives(life, tmp_path, [5, 7, 9, 12, steps - 1])
    assert len(undisturbed) == steps and len({tuple(one[:2]) for one in undisturbed}) > 8
    assert resumed == undisturbed


class Augmented(torch.utils.data.Dataset):
    """Items that draw from all main generators; several at once where `together`."""

    def __init__(self, together):
        if together:
            self.__getitems__ = lambda indices: [self[k] for k in indices]

    def __len__(self):
        return 24

    def __getitem__(self, index):
        import random

        import numpy

        return torch.tensor([index, torch.rand(()), random.random(), numpy.random.rand()], dtype=torch.float64)


def seen_of_stateful(path, killed_in, every=3, **options):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    with plimsoll.Run(path, memory_limit="4GiB", seed=5) as run:
        order = {"seen": []}
        run.track(order=order)
        data = torchdata.StatefulDataLoader(batch_size=4, **options)
        for _ in range(2):
            for batch in run.steps(data, epochs=2, commit_every_steps=every, progress=False):
                if run.steps_made + 1 == killed_in:
                    run._life.end_writing()
                    raise Killed
                order["seen"] = [*order["seen"], *map(tuple, batch.tolist())]
        return order["seen"]


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}, {"num_workers": 2, "together": True}],
                         ids=["two", "persistent", "together"])
def test_s08_random_augmentation_in_workers_of_a_stateful_loader_is_the_same_after_a_resumption(options, tmp_path):
    options = dict(options)
    options |= {"dataset": Augmented(options.pop("together", False)), "shuffle": True}
    undisturbed, resumed = lives(lambda path, kill: seen_of_stateful(path, kill, **options), tmp_path, [5, 9, 14, 22])
    assert resumed == undisturbed and len(undisturbed) == 4 * 24
    assert len({one[1:] for one in undisturbed}) == 4 * 24, "no two draw alike"


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(8))


def test_s08_a_stateful_loader_whose_items_cannot_be_seeded_is_named(tmp_path):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    with plimsoll.Run(tmp_path / "run", memory_limit="4GiB") as run:
        run.track(order={"n": 0})
        data = torchdata.StatefulDataLoader(Endless(), batch_size=2, num_workers=1)
        with pytest.warns(RuntimeWarning, match="StatefulDataLoader has workers, .* the same bits are not promised"):
            assert sum(1 for _ in run.steps(data, progress=False)) == 4


def test_more_epochs_of_a_loop_with_an_order_of_its_own_are_gone_on_with(tmp_path):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def life(path, epochs):
        with plimsoll.Run(path, memory_limit="4GiB", seed=5) as run:
            order = {"seen": []}
            run.track(order=order)
            data = torchdata.StatefulDataLoader(range(8), batch_size=2, shuffle=True)
            for batch in run.steps(data, epochs=epochs, progress=False):
                order["seen"] = [*order["seen"], (*batch.tolist(), torch.rand(1).item())]
            return order["seen"], torch.rand(1).item()

    life(tmp_path / "run", 2)
    assert life(tmp_path / "run", 4) == life(tmp_path / "other", 4)


@pytest.mark.parametrize("every", [1, 3])
def test_dealt_to_virtual_workers_a_stateful_loader_draws_as_it_did(every, tmp_path):
    """What its beginning in the middle draws is put back, too."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def life(path, killed_in):
        with plimsoll.Run(path, memory_limit="4GiB", seed=5, virtual_workers=2) as run:
            order = {"seen": []}
            run.track(order=order)
            data = torchdata.StatefulDataLoader(range(12), batch_size=2, shuffle=True)
            for _ in range(3):
                for batches in run.steps(data, commit_every_steps=every, progress=False):
                    if run.steps_made + 1 == killed_in:
                        run._life.end_writing()
                        raise Killed
                    order["seen"] = [*order["seen"], (*(one.tolist() for one in batches), torch.rand(1).item())]
            return order["seen"]

    undisturbed, resumed = lives(life, tmp_path, [2, 4, 6, 8])
    assert resumed == undisturbed and len(resumed) == 9


class Wrapping:
    """Its state after the last batch is that of the next epoch, as before the first."""

    def __init__(self):
        self.next = 0

    def __len__(self):
        return 3

    def __iter__(self):
        for k in range(self.next % 3, 3):
            self.next += 1
            yield self.next - 1

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def test_an_epoch_that_a_state_says_is_over_is_not_read_again(tmp_path):
    def life(path, killed_in):
        with plimsoll.Run(path, memory_limit="4GiB") as run:
            order = {"seen": []}
            run.track(order=order)
            for one in run.steps(Wrapping(), epochs=3, commit_every_steps=3, progress=False):
                if run.steps_made + 1 == killed_in:
                    run._life.end_writing()
                    raise Killed
                order["seen"] = [*order["seen"], one]
            return order["seen"]

    undisturbed, resumed = lives(life, tmp_path, [4, 8])
    assert undisturbed == [*range(9)] == resumed


# ---- What a program does to its parts before its loop goes on ----


class Program:
    """Its life has a loop for each epoch of 4 batches; what is called between them is of a test."""

    def __init__(self, epochs=6, leaves=0, **steps):
        self.epochs, self.leaves, self.steps = epochs, leaves, steps

    def made(self, run):
        """Tracks everything."""
        torch.manual_seed(1)
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7)
        run.track(model=self.model, optimizer=self.optimizer, schedule=self.schedule)

    def after(self):
        self.schedule.step()

    def life(self, path, killed_in):
        with plimsoll.Run(path, memory_limit="4GiB", seed=3) as run:
            self.made(run)
            for _ in range(self.epochs):
                for batch in run.steps([torch.full((2, 3), float(k)) for k in range(4)], progress=False, **self.steps):
                    if run.steps_made + 1 == killed_in:
                        run._life.end_writing()
                        raise Killed
                    run.step(lambda x: (self.model(x) + torch.rand(())).square().mean(), batch)
                    if batch[0, 0] + 1 == self.leaves:
                        break
                self.after()
            return self.state()

    def state(self):
        slots = [value.tolist() for slot in self.optimizer.state.values() for value in slot.values()]
        return (self.model.weight.tolist(), slots, [group["lr"] for group in self.optimizer.param_groups],
                self.schedule.state_dict(), torch.rand(1).item())


@pytest.mark.parametrize("every", [3, 4, 0])
def test_a_schedule_that_steps_between_loops_has_stepped_once_for_each(every, tmp_path):
    """Commits come within a loop, on its last step, or at its end, before the schedule's step."""
    undisturbed, resumed = lives(Program(commit_every_steps=every).life, tmp_path, [6, 14, 15, 21, 24])
    assert resumed == undisturbed and undisturbed[2] == [pytest.approx(0.1 * 0.7 ** 6)]


class MadeLater(Program):
    """A schedule is made when its optimizer was restored, and rewrites the rate; other parts change before the loop, too."""

    def made(self, run):
        torch.manual_seed(1)
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        run.track(model=self.model, optimizer=self.optimizer)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=20)
        self.counts, self.own, self.tensor = {"n": 0}, torch.Generator(), torch.zeros(2)
        run.track(schedule=self.schedule, counts=self.counts, own=self.own, tensor=self.tensor)
        self.after()

    def after(self):
        self.schedule.step()
        self.optimizer.param_groups[0]["eps"] = 1e-8 * (self.counts["n"] + 1)
        self.counts["n"] += 1
        self.tensor += torch.rand(2, generator=self.own)
        with torch.no_grad():
            self.model.weight += self.tensor.sum()

    def state(self):
        return *super().state(), self.counts, self.tensor.tolist()


@pytest.mark.parametrize("every, leaves", [(3, 0), (4, 0), (0, 0), (0, 3), (2, 3)])
def test_what_a_program_does_to_its_parts_before_its_loop_is_done_once(every, leaves, tmp_path):
    """leaves: each loop, after so many batches; that is committed where the next loop begins, after what comes between."""
    life = MadeLater(commit_every_steps=every, leaves=leaves).life
    undisturbed, resumed = lives(life, tmp_path, [2, 6, 7, 13, 15] + [20, 21, 24] * (not leaves))
    assert resumed == undisturbed and undisturbed[5] == {"n": 7}


class Holding(Program):
    """It holds a group of its optimizer since before it was restored, and sets the rate there."""

    def made(self, run):
        torch.manual_seed(1)
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.group, = self.optimizer.param_groups
        run.track(model=self.model, optimizer=self.optimizer)

    def after(self):
        self.group["lr"] *= 0.5

    def state(self):
        return self.model.weight.tolist(), self.optimizer.param_groups[0]["lr"]


def test_a_group_that_a_program_holds_is_still_its_optimizers(tmp_path):
    undisturbed, resumed = lives(Holding(commit_every_steps=3).life, tmp_path, [6, 14, 21])
    assert resumed == undisturbed and resumed[1] == 0.1 / 64


def test_a_finished_run_started_again_ends_in_its_own_bits(tmp_path):
    """What comes after the last loop is done again, and nothing else."""
    life = MadeLater().life
    assert life(tmp_path / "run", -1) == life(tmp_path / "run", -1)


def test_restoring_again_needs_no_more_memory_than_restoring(tmp_path):
    """Parts that are optimizers are there once; the commit is a map of its file, given back when the loop goes on."""
    from plimsoll.core import _torch_gate

    arena = _torch_gate.load()

    def life(killed_in):
        with plimsoll.Run(tmp_path / "run", memory_limit="4GiB") as run:
            model = torch.nn.Linear(1024, 1024)
            optimizer = torch.optim.Adam(model.parameters())
            arena.reset_peak()
            before = arena.arena_stats()["live_bytes"]
            run.track(model=model, optimizer=optimizer)
            peaks.append(arena.arena_stats()["live_peak_bytes"] - before)
            for batch in run.steps([torch.ones(1, 1024)] * 3, commit_every_steps=1, progress=False):
                peaks.append(arena.arena_stats()["live_peak_bytes"] - before)
                maps = open("/proc/self/maps", encoding="utf-8").read()
                mapped.append(str(tmp_path / "run" / "checkpoints") in maps)
                if run.steps_made + 1 == killed_in:
                    raise Killed
                run.step(lambda x: model(x).square().mean(), batch)

    peaks, mapped = [], []
    with pytest.raises(Killed):
        life(3)
    peaks.clear()
    life(-1)
    assert peaks[1] <= 9 << 20 and not any(mapped), peaks


# ---- A backward and an optimizer of a program's own ----


def accumulating(path, killed_in, *, how, every=1, to_none=True, stops=False):
    """Steps after each fourth of 6 batches an epoch; gives its state, and the names of what the last commit holds."""
    with plimsoll.Run(path, memory_limit="4GiB", seed=3) as run:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        others = torch.nn.Linear(1, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        often = torch.optim.SGD(others.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer, others=others, often=often)

        def update():
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)

        for batch in run.steps([torch.full((2, 3), float(k)) for k in range(6)], epochs=3, commit_every_steps=every,
                               progress=False):
            k = run.steps_made
            if k + 1 == killed_in:
                run._life.end_writing()
                raise Killed
            if how == "first" and k % 4 == 0:
                update()
            if how == "before" and k % 4 == 0 or how == "each":
                optimizer.zero_grad(set_to_none=to_none)
            (others(model(batch)) + torch.rand(())).square().mean().backward()
            often.step()
            often.zero_grad()
            if how == "after" and k % 4 == 3:
                update()
            if how == "before" and k % 4 == 3 or how == "each":
                optimizer.step()
            if stops:
                plimsoll.stop(path)
        state = [one.tolist() for part in (model, others) for one in part.parameters()]
        state = state, [slot["exp_avg"].tolist() for slot in optimizer.state.values()], torch.rand(1).item()
    if run.stopped:
        return accumulating(path, -1, how=how, every=every, to_none=to_none, stops=run.steps_made < 17)
    return state


@pytest.mark.parametrize("how, to_none", [("after", True), ("after", False), ("before", True), ("first", True)])
def test_gradients_that_wait_for_the_optimizers_step_are_in_a_commit(how, to_none, tmp_path):
    """Killed within a window, on its last batch, and where it goes over an epoch's end."""
    undisturbed, resumed = lives(lambda path, killed_in: accumulating(path, killed_in, how=how, to_none=to_none), tmp_path,
                                 [2, 4, 5, 7, 8, 9, 16])
    assert resumed == undisturbed


def test_stopped_after_each_batch_a_loop_that_accumulates_ends_in_the_same_bits(tmp_path):
    assert accumulating(tmp_path / "a", -1, how="after") == accumulating(tmp_path / "b", -1, how="after", stops=True)


@pytest.mark.parametrize("how, holds", [("each", False), ("after", True)])
def test_gradients_that_were_used_are_in_no_commit(how, holds, tmp_path):
    with pytest.raises(Killed):
        accumulating(tmp_path / "run", 8, how=how)  # The commit of step 7 is within a window.
    saved = torch.load(tmp_path / "run" / "checkpoints" / "step-000000007" / "parts.pt")
    assert [*saved.get("gradients", {})] == ["optimizer"] * holds
    assert all(one is not None for one in saved.get("gradients", {}).get("optimizer", []))
    with pytest.raises(Killed):
        accumulating(tmp_path / "run", 9, how=how)
    saved = torch.load(tmp_path / "run" / "checkpoints" / "step-000000008" / "parts.pt")
    assert "gradients" not in saved
